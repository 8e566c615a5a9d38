//! Answers of a hostile model server.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use rap_testkit::peer::Reply;
use rap_testkit::poll;
use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, Stage};
use crate::wire;

const TOPIC: &str = "models";
/// Open calls that a thread may have.
const OPEN_CALLS: usize = 128;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "hostile calls of a model", "a call that is not permitted is sent", calls),
        attempt!(TOPIC, "hostile answer of a model", "it is read without a bound", answers),
        attempt!(TOPIC, "large answers that never end", "together they use much memory", unfinished),
    ]
}

/// Opens a thread of the hostile model and waits until it is not asked any more.
async fn ask(stage: &Stage) -> String {
    let thread = stage.open_with(json!({"agent": "model", "message": "go"})).await;
    // An answer without end may keep it running; the attempt goes on then.
    let has_ended = async || !["running", ""].contains(&stage.status(&thread).await.as_str());
    let _ended = poll(Duration::from_secs(5), has_ended).await;
    thread
}

async fn close(stage: &Stage, thread: &str) {
    wire::post(&stage.rap.at(&format!("/v1/threads/{thread}/close")), Some(ATTACKER), &json!({})).await;
}

async fn calls(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let single: [(&str, Value); 7] = [
        ("../work", json!({})),
        ("work\u{1b}[2J", json!({})),
        ("unknown", json!({})),
        ("work", json!({"kind": "interrupt:x (subscription remains active)"})),
        ("work", json!({"deep": deep})),
        ("work", json!([1, 2])),
        ("work", json!("text")),
    ];
    for (name, arguments) in single {
        let before = stage.hostile.count("/invoke");
        stage.model.calls(&[("c", name, arguments.clone())]);
        stage.model.says("done");
        let thread = ask(&stage).await;
        let shown: String = arguments.to_string().chars().take(60).collect();
        tries.add(format!("{name:?} {shown}"), stage.hostile.count("/invoke") > before);
        close(&stage, &thread).await;
    }
    let many: Vec<String> = (0..1_000).map(|number| format!("c{number}")).collect();
    let many: Vec<(&str, &str, Value)> = many.iter().map(|id| (id.as_str(), "work", json!({}))).collect();
    let before = stage.hostile.count("/invoke");
    stage.model.calls(&many);
    let thread = ask(&stage).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let sent = stage.hostile.count("/invoke") - before;
    tries.add(format!("{sent} calls of one answer were sent"), sent > OPEN_CALLS);
    close(&stage, &thread).await;
    tries
}

async fn answers(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let events =
        |body: Vec<u8>| Reply::Full(200, Some(("content-type", "text/event-stream".into())), body.into());
    let delta = json!({"choices": [{"index": 0, "delta": {"content": "x".repeat(1_000_000)}, "finish_reason": null}]});
    let replies = [
        ("a line without end", events(vec![b'x'; 40_000_000])),
        ("an event without end", events([b"data: ", vec![b'['; 40_000_000].as_slice()].concat())),
        ("60 MB of text", events(format!("data: {delta}\n\n").repeat(60).into_bytes())),
        ("many empty events", events(b"data: {}\n\n".repeat(500_000))),
        ("invalid text", events(b"data: \xff\xfe\n\n".to_vec())),
        ("HTML", Reply::Full(200, Some(("content-type", "text/html".into())), "<html>".into())),
        (
            "a redirect",
            Reply::Full(307, Some(("location", format!("{}/model", stage.elsewhere.url))), "".into()),
        ),
        ("an endless error", Reply::Full(400, None, vec![b'x'; 20_000_000].into())),
    ];
    for (what, reply) in replies {
        stage.model.answer(reply);
        let thread = ask(&stage).await;
        let history = stage.history(&thread).await;
        tries.add(format!("{what}: a history of {} bytes", history.len()), history.len() > 20_000_000);
        let thread_text = wire::get(&stage.rap.at(&format!("/v1/threads/{thread}")), Some(ATTACKER)).await;
        let length = thread_text.map_or(0, |answer| answer.text.len());
        tries.add(format!("{what}: a reason of {length} bytes"), length > 20_000);
        close(&stage, &thread).await;
    }
    tries.add("a redirect of the model was followed", stage.elsewhere.count("/model") > 0);
    tries
}

/// Begins answers of 15 MB each, and never ends them. Each alone is allowed.
async fn unfinished(stage: Arc<Stage>) -> Tries {
    const ANSWERS: usize = 48;
    let mut tries = Tries::new();
    let delta = json!({"choices": [{"index": 0, "delta": {"content": "x".repeat(1_000_000)}, "finish_reason": null}]});
    let begun = Bytes::from(format!("data: {delta}\n\n").repeat(15));
    let mut threads = Vec::new();
    for _ in 0..ANSWERS {
        stage.model.answer(Reply::Begin(begun.clone()));
        threads.push(stage.open_with(json!({"agent": "model", "message": "go"})).await);
        tries.count += 1;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    for thread in &threads {
        close(&stage, thread).await;
    }
    tries
}
