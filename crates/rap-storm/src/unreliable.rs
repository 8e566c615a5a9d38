//! A tool server without a journal, in this process. It answers some invocations with 500 or nonsense, sends some results
//! twice, and sends invalid callbacks before valid ones. Its one tool is `unreliable`.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rap_testkit::Rng;
use rap_testkit::http;
use rap_testkit::peer::{self, Reply, Request};
use rap_testkit::tools::{DISCOVERY, INVOKE, tool};
use serde_json::{Value, json};

/// Attempts to deliver a result. With the pauses between them they last longer than any run that ends.
const ATTEMPTS: u32 = 100_000;
const PAUSE: Duration = Duration::from_millis(100);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

struct State {
    rng: Mutex<Rng>,
    accepted: Mutex<HashSet<String>>,
}

/// Starts the server. Returns its URL.
pub(crate) async fn start(seed: u64) -> String {
    let state = State { rng: Mutex::new(Rng(seed ^ 0x7001)), accepted: Mutex::default() };
    let state = Arc::new(state);
    peer::serve(move |request| {
        let state = Arc::clone(&state);
        async move { answer(&state, &request) }
    })
    .await
}

fn answer(state: &Arc<State>, request: &Request) -> Reply {
    match request.path.as_str() {
        DISCOVERY => {
            let host = request.header("host").unwrap_or_default();
            let endpoint = format!("http://{host}{INVOKE}");
            let tools = [tool("unreliable")];
            Reply::json(&json!({"name": "unreliable", "version": "1", "endpoint": endpoint, "tools": tools}))
        }
        INVOKE => accept(state, &request.body),
        _ => Reply::Status(200),
    }
}

fn accept(state: &Arc<State>, invocation: &Value) -> Reply {
    let number = state.rng.lock().unwrap().below(10);
    match number {
        0 => return Reply::Status(500),
        1 => return Reply::Status(503),
        _ => {}
    }
    let id = invocation["id"].as_str().unwrap_or_default().to_owned();
    if state.accepted.lock().unwrap().insert(id) {
        tokio::spawn(deliver(invocation.clone(), number));
    }
    match number {
        // It has accepted the call, but says that it has not. The call is sent again.
        2 => Reply::Status(502),
        3 => Reply::Full(200, None, "{\"nonsense\": [".into()),
        _ => Reply::Status(200),
    }
}

async fn deliver(invocation: Value, number: usize) {
    let url = invocation["callback_url"].as_str().unwrap_or_default().to_owned();
    let mark = invocation["arguments"]["mark"].as_str().unwrap_or_default();
    let result = json!({
        "type": "tool_result", "group_id": invocation["group_id"], "id": invocation["id"], "text": format!("done {mark};"),
    });
    if number == 4 {
        post(&url, &json!({"type": "tool_result", "text": 5})).await;
    }
    let mut rest = if number >= 7 { 2 } else { 1 };
    for _ in 0..ATTEMPTS {
        if post(&url, &result).await.is_some_and(|status| status < 500) {
            rest -= 1;
        }
        if rest == 0 {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Posts a callback. Returns the status, if there was an answer in time.
async fn post(url: &str, body: &Value) -> Option<u16> {
    let bytes = body.to_string();
    let request = http::attempt("POST", url, &[("content-type", "application/json")], bytes.as_bytes());
    let answer = tokio::time::timeout(ANSWER_WITHIN, request).await.ok()?;
    Some(answer.ok()?.status)
}
