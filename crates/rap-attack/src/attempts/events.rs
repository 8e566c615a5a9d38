//! Subscriptions that send more events than anybody can handle.

use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use rap_testkit::tools::{Call, with};
use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, EVENTS_PER_SECOND, Stage};
use crate::wire;

const TOPIC: &str = "events";
const AT_ONCE: usize = 16;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "events without end", "more than 1,000 events wait for a busy thread", without_end),
        attempt!(TOPIC, "flood of events to one subscription", "it may send faster than its rate", flood),
        attempt!(TOPIC, "repeated event", "an event enters twice", repeated),
    ]
}

async fn subscription(stage: &Stage) -> Call {
    let call = stage.call("watch").await;
    wire::post(call.url(), None, &call.confirmation("watching")).await;
    stage.until_status(call.thread(), &["idle"]).await;
    call
}

/// Sends events and returns the statuses of the answers.
async fn send(call: &Call, events: impl Iterator<Item = Value>) -> Vec<u16> {
    let sending = futures_util::stream::iter(events).map(|event| {
        let url = call.url().to_owned();
        async move { wire::post(&url, None, &event).await.map_or(0, |answer| answer.status) }
    });
    sending.buffer_unordered(AT_ONCE).collect().await
}

async fn close(stage: &Stage, call: &Call) {
    let url = stage.rap.at(&format!("/v1/threads/{}/close", call.thread()));
    wire::post(&url, Some(ATTACKER), &json!({})).await;
}

/// Sends events to a thread that waits for a call, so that they are held.
async fn without_end(stage: Arc<Stage>) -> Tries {
    const EVENTS: usize = 1_500;
    const HELD: usize = 1_000;
    let mut tries = Tries::new();
    let call = subscription(&stage).await;
    let url = stage.rap.at(&format!("/v1/threads/{}/messages", call.thread()));
    wire::post(&url, Some(ATTACKER), &json!({"text": "call sleep_until {\"time\": \"2999-01-01T00:00:00\", \"timezone\": \"UTC\"}\ncall work {}"})).await;
    stage.invocation(&stage.hostile, call.thread()).await;
    let statuses = send(&call, (0..EVENTS).map(|number| call.inline(&format!("event {number}")))).await;
    let accepted = statuses.iter().filter(|status| **status == 200).count();
    tries.count = EVENTS;
    tries.add(format!("{accepted} events wait"), accepted > HELD);
    tries.add(
        format!("other answers than 200 and 503: {statuses:?}"),
        statuses.iter().any(|status| ![200, 503].contains(status)),
    );
    close(&stage, &call).await;
    tries
}

async fn flood(stage: Arc<Stage>) -> Tries {
    const EVENTS: usize = 1_000;
    let mut tries = Tries::new();
    let call = subscription(&stage).await;
    let began = Instant::now();
    let statuses = send(&call, (0..EVENTS).map(|number| call.event(&format!("event {number}")))).await;
    let accepted = statuses.iter().filter(|status| **status == 200).count();
    tries.count = EVENTS;
    // A burst of one second is permitted besides.
    let permitted = EVENTS_PER_SECOND * (2 + usize::try_from(began.elapsed().as_secs()).unwrap_or_default());
    tries.add(
        format!("{accepted} of {EVENTS} events were accepted in {:?}", began.elapsed()),
        accepted > permitted,
    );
    let answer = wire::post(call.url(), None, &call.event("one more")).await;
    let no_pause = answer.is_some_and(|answer| answer.status == 503 && answer.retry_after().is_none());
    tries.add("503 without Retry-After", no_pause);
    close(&stage, &call).await;
    tries
}

async fn repeated(stage: Arc<Stage>) -> Tries {
    const TIMES: usize = 50;
    let mut tries = Tries::new();
    let call = subscription(&stage).await;
    let event = with(call.inline("an event that is sent often"), json!({"event_id": "same"}));
    send(&call, (0..TIMES).map(|_| event.clone())).await;
    tries.count = TIMES;
    stage.until_status(call.thread(), &["idle"]).await;
    let history = stage.history(call.thread()).await;
    let results = history.matches("\"content\":\"an event that is sent often\"").count();
    tries.add(format!("it is in the history {results} times"), results > 1);
    close(&stage, &call).await;
    tries
}
