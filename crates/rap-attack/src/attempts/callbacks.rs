//! Callbacks with forged, altered, foreign and used callback URLs.

use std::sync::Arc;
use std::time::Duration;

use rap_testkit::http::Response;
use rap_testkit::poll;
use rap_testkit::tools::{Call, with};
use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, Stage};
use crate::wire::{self, JSON};

const TOPIC: &str = "callbacks";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "forged callback token", "an altered token is accepted", forged_tokens),
        attempt!(TOPIC, "token of another call", "a callback reaches a call of another URL", other_calls),
        attempt!(TOPIC, "replayed result", "a result enters a history twice", replays),
        attempt!(
            TOPIC,
            "event after the end",
            "an event enters after its subscription has ended",
            late_events
        ),
        attempt!(TOPIC, "bulk requests with one URL", "one URL keeps more than 16 requests open", bulk),
        attempt!(TOPIC, "hostile callback", "a malformed callback is accepted", malformed),
    ]
}

async fn post(url: &str, body: &Value) -> Option<Response> {
    wire::post(url, None, body).await
}

async fn is_accepted(url: &str, body: &Value) -> bool {
    post(url, body).await.is_some_and(|answer| wire::is_success(answer.status))
}

/// Changes each character of a token, cuts it, extends it, and replaces it.
fn forgeries(token: &str) -> Vec<String> {
    let mut forged = Vec::new();
    for (at, old) in token.char_indices() {
        for new in ['A', '7', '_'].into_iter().filter(|new| *new != old) {
            forged.push(format!("{}{new}{}", &token[..at], &token[at + 1..]));
        }
    }
    // The bits of the last character that base64 does not use must not make a second spelling.
    forged.extend((b'A'..=b'Z').map(|last| format!("{}{}", &token[..token.len() - 1], char::from(last))));
    forged.retain(|forged| forged != token);
    forged.extend((0..token.len()).step_by(4).map(|length| token[..length].to_owned()));
    forged.extend(["=", "A", "%00", "/..", "%2e", "?"].map(|end| format!("{token}{end}")));
    forged.extend([token.to_lowercase(), token.chars().rev().collect(), "A".repeat(token.len())]);
    forged.extend(["A".repeat(7_000), "../healthz".to_owned(), "%2e%2e%2fv1%2fthreads".to_owned()]);
    // A query is not part of the token.
    forged.retain(|forged| !forged.ends_with('?'));
    forged
}

async fn forged_tokens(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let (base, token) = call.url().rsplit_once('/').unwrap();
    for forged in forgeries(token) {
        let accepted = is_accepted(&format!("{base}/{forged}"), &call.result("forged")).await;
        tries.add(format!("token {forged}"), accepted);
    }
    let changed = stage.history(call.thread()).await.contains("forged")
        || stage.status(call.thread()).await != "waiting";
    tries.add("the thread has changed", changed);
    call.post(&call.result("done")).await;
    tries
}

async fn other_calls(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (mine, victim) = (stage.call("work").await, stage.call("work").await);
    let names = [
        json!({"id": victim.id(), "group_id": victim.thread()}),
        json!({"id": victim.id()}),
        json!({"group_id": victim.thread()}),
        json!({"id": victim.id(), "tool_call_id": victim.id(), "group_id": victim.thread()}),
        json!({"tool_call_id": victim.id(), "group_id": victim.thread()}),
    ];
    for named in names {
        for body in [
            mine.result("foreign"),
            mine.confirmation("foreign"),
            mine.event("foreign"),
            mine.oauth("https://foreign.example/"),
            mine.question("http://127.0.0.1:9/foreign"),
            mine.view("foreign", json!("foreign")),
        ] {
            let body = with(body, named.clone());
            let accepted = is_accepted(mine.url(), &body).await;
            let id = if body["type"] == "subscription_event" { &body["tool_call_id"] } else { &body["id"] };
            let names_victim = body["group_id"] == victim.thread() || *id == victim.id();
            // A view belongs to a thread, not to a call.
            let is_view_of_mine = body["type"] == "view_update" && body["group_id"] == mine.thread();
            tries.add(&body, accepted && names_victim && !is_view_of_mine);
        }
    }
    let history = stage.history(victim.thread()).await;
    tries.add("the victim's thread has changed", history.contains("foreign"));
    mine.post(&mine.result("done")).await;
    victim.post(&victim.result("done")).await;
    tries
}

async fn replays(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let once = call.result("said once");
    let all = (0..24).map(|number| {
        let body = if number % 3 == 2 { call.result("said otherwise") } else { once.clone() };
        let url = call.url().to_owned();
        async move { post(&url, &body).await.map_or(0, |answer| answer.status) }
    });
    for status in futures_util::future::join_all(all).await {
        tries.add(format!("status {status}"), ![200, 503].contains(&status));
    }
    until_idle(&stage, call.thread()).await;
    post(call.url(), &call.result("said otherwise")).await;
    let history = stage.history(call.thread()).await;
    let results = history.matches("\"kind\":\"result\"").count();
    tries.add(format!("{results} results in the history"), results != 1);
    tries
}

async fn until_idle(stage: &Stage, thread: &str) {
    stage.until_status(thread, &["idle"]).await;
}

/// Opens a subscription.
async fn subscription(stage: &Stage) -> Call {
    let call = stage.call("watch").await;
    post(call.url(), &call.confirmation("watching")).await;
    until_idle(stage, call.thread()).await;
    call
}

async fn late_events(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (finished, cancelled, closed) =
        (subscription(&stage).await, subscription(&stage).await, subscription(&stage).await);
    post(finished.url(), &with(finished.inline("the last one"), json!({"final": true}))).await;
    until_idle(&stage, finished.thread()).await;
    let act = async |path: String| wire::post(&stage.rap.at(&path), Some(ATTACKER), &json!({})).await;
    act(format!("/v1/threads/{}/calls/{}/cancel", cancelled.thread(), cancelled.id())).await;
    act(format!("/v1/threads/{}/close", closed.thread())).await;
    for (name, call) in [("final", &finished), ("cancelled", &cancelled), ("closed", &closed)] {
        for body in [
            call.event("too late"),
            call.inline("too late"),
            with(call.inline("too late"), json!({"final": true})),
            call.confirmation("too late"),
            call.question("http://127.0.0.1:9/"),
            call.oauth("https://too-late.example/"),
        ] {
            let accepted = is_accepted(call.url(), &body).await;
            // A callback that is ignored because its call has ended is answered 200, except for events.
            tries.add(format!("{name}: {body}"), accepted && body["type"] == "subscription_event");
        }
        let inbox = wire::get(&stage.rap.at("/v1/inbox"), Some(ATTACKER)).await;
        let asked = inbox.is_none_or(|inbox| inbox.text.contains(call.thread()));
        tries.add(format!("{name}: a question is in the inbox"), asked);
        let late = stage.history(call.thread()).await.contains("too late");
        tries.add(format!("{name}: the event is in the history"), late);
    }
    tries
}

/// Keeps requests with one callback URL open by not finishing their bodies.
async fn bulk(stage: Arc<Stage>) -> Tries {
    const REQUESTS: usize = 200;
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let path = call.url().trim_start_matches("http://").split_once('/').unwrap().1;
    let host = wire::authority(call.url());
    let request = format!(
        "POST /{path} HTTP/1.1\r\nhost: {host}\r\n{}: {}\r\ncontent-length: 1000\r\n\r\n{{",
        JSON.0, JSON.1
    );
    let mut open = wire::never_reading(call.url(), REQUESTS, &request).await;
    let mut refused = 0;
    let answers = open.iter_mut().map(|stream| wire::first_status(stream, Duration::from_millis(500)));
    for status in futures_util::future::join_all(answers).await {
        refused += usize::from(status == 503);
        tries.add(format!("status {status}"), wire::is_success(status));
    }
    tries.add(format!("only {refused} of {REQUESTS} were refused"), REQUESTS - refused > 16);
    drop(open);
    // The URL can be used again.
    let result = call.result("done");
    let accepted = poll(Duration::from_secs(5), || is_accepted(call.url(), &result)).await;
    tries.add("the result of the call was refused for good", accepted.is_none());
    tries
}

async fn malformed(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let long = "x".repeat(300);
    for body in [
        json!(null),
        json!([]),
        json!({}),
        with(call.result("x"), json!({"type": "unknown"})),
        with(call.result("x"), json!({"type": ["tool_result"]})),
        with(call.result("x"), json!({"text": null})),
        with(call.result("x"), json!({"text": {"deep": 1}})),
        with(call.result("x"), json!({"content": [{"type": "video"}]})),
        with(call.result("x"), json!({"group_id": "../../etc/passwd"})),
        with(call.result("x"), json!({"group_id": "a\u{0}b"})),
        with(call.result("x"), json!({"group_id": long})),
        with(call.result("x"), json!({"id": "\r\n\u{1b}[31m"})),
        with(call.oauth("https://x.example/"), json!({"auth_url": "javascript:alert(1)"})),
        with(call.oauth("https://x.example/"), json!({"auth_url": "http://x.example/"})),
        with(call.oauth("https://x.example/"), json!({"auth_url": "https://bank.example@evil.example/"})),
        with(call.question("http://127.0.0.1:9/"), json!({"choices": []})),
        with(call.question("http://127.0.0.1:9/"), json!({"default": 7})),
        with(call.question("http://127.0.0.1:9/"), json!({"response_url": "file:///etc/passwd"})),
        call.view("huge", json!("x".repeat(300 * 1024))),
    ] {
        let shown: String = body.to_string().chars().take(200).collect();
        let answer = post(call.url(), &body).await;
        let accepted = answer.as_ref().is_some_and(|answer| wire::is_success(answer.status));
        tries.add(&shown, accepted);
        let repeated = answer.is_some_and(|answer| answer.text.len() > 2_000);
        tries.add(format!("a long answer to {shown}"), repeated);
    }
    call.post(&call.result("done")).await;
    tries
}
