//! Answers that are larger than their request: histories, listings, views, streams.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, Stage};
use crate::wire;

const TOPIC: &str = "responses";
/// Size of a large result, in bytes.
const RESULT: usize = 7_000_000;
/// Size of a page, with its last row.
const PAGE: usize = 1024 * 1024 + 2 * RESULT;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(
            TOPIC,
            "huge histories that are never read",
            "they use more memory than the runtime sets aside",
            histories
        ),
        attempt!(TOPIC, "huge listings", "a page has no bound", listings),
        attempt!(
            TOPIC,
            "results of one batch without a bound",
            "a batch of results enters the prompt whatever its size",
            batch
        ),
    ]
}

/// Makes a thread with a long history. Returns its id.
async fn long_history(stage: &Stage, results: usize) -> String {
    let thread = stage.open("call work {}").await;
    for number in 0..results {
        if number > 0 {
            let url = stage.rap.at(&format!("/v1/threads/{thread}/messages"));
            wire::post(&url, Some(ATTACKER), &json!({"text": "call work {}"})).await;
        }
        let call = stage.invocation(&stage.hostile, &thread).await;
        call.post(&call.result(&"x".repeat(RESULT))).await;
        stage.until_status(&thread, &["idle"]).await;
    }
    thread
}

async fn histories(stage: Arc<Stage>) -> Tries {
    const REQUESTS: usize = 200;
    let mut tries = Tries::new();
    let thread = long_history(&stage, 4).await;
    let paths = [format!("/v1/threads/{thread}/history?limit=1000"), format!("/v1/threads/{thread}/events")];
    for path in paths {
        let host = wire::authority(&stage.rap.url);
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {ATTACKER}\r\n\r\n");
        let open = wire::never_reading(&stage.rap.url, REQUESTS, &request).await;
        tries.count += open.len();
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let page =
        wire::get(&stage.rap.at(&format!("/v1/threads/{thread}/history?limit=1000")), Some(ATTACKER)).await;
    let size = page.map_or(0, |page| page.text.len());
    tries.add(format!("a page of a history has {size} bytes"), size > PAGE);
    tries
}

async fn listings(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    for number in 0..70 {
        let view = call.view(&format!("view{number}"), json!("x".repeat(200 * 1024)));
        wire::post(call.url(), None, &view).await;
    }
    let views = format!("/v1/threads/{}/views", call.thread());
    for path in
        [&views, "/v1/threads", "/v1/calls", "/v1/inbox", "/v1/deliveries", "/v1/timers", "/v1/subscriptions"]
    {
        for limit in ["1000", "1001", "0", "-1", "99999999999999999999", "x"] {
            let separator = if path == views { "?limit=" } else { "?cursor=&limit=" };
            let answer = wire::get(&stage.rap.at(&format!("{path}{separator}{limit}")), Some(ATTACKER)).await;
            let size = answer.map_or(0, |answer| answer.text.len());
            tries.add(format!("{path} with limit={limit} has {size} bytes"), size > PAGE);
        }
    }
    call.post(&call.result("done")).await;
    tries
}

/// Returns results of 7 MB each for all calls of one answer. The size of the next model request must be bounded.
async fn batch(stage: Arc<Stage>) -> Tries {
    const CALLS: usize = 8;
    /// Default of `limits.result_bytes_per_turn`.
    const BOUND: usize = 16 * 1024 * 1024;
    let mut tries = Tries::new();
    let calls: Vec<(String, &str, serde_json::Value)> =
        (0..CALLS).map(|number| (format!("c{number}"), "work", json!({}))).collect();
    let borrowed: Vec<(&str, &str, serde_json::Value)> =
        calls.iter().map(|(id, name, arguments)| (id.as_str(), *name, arguments.clone())).collect();
    stage.model.calls(&borrowed);
    stage.model.says("done");
    let thread = stage.open_with(json!({"agent": "model", "message": "go"})).await;
    stage.model.question().await;
    for _ in 0..CALLS {
        let call = stage.invocation(&stage.hostile, &thread).await;
        call.post(&call.result(&"x".repeat(7_000_000))).await;
    }
    let size = stage.model.next("/v1/chat/completions").await.raw.len();
    tries.add(format!("the model was asked with {size} bytes"), size > BOUND);
    tries
}
