//! Calls that a person has to allow: asked through the inbox, before anything is sent.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use serde_json::{Value, json};
use support::tools::{INVOKE, tool, with};
use support::{Rap, Setup, Tools};

/// A server of which one tool says that it is destructive.
async fn tools() -> Tools {
    let tools = Tools::start().await;
    let wipe = with(tool("wipe"), json!({"annotations": {"destructive": true}}));
    tools.offer(tools.document("bench", "1", vec![wipe, tool("work")]));
    tools
}

async fn asked(rap: &Rap, thread: &str) -> Value {
    rap.until_status(thread, "needs_you").await;
    rap.listing("inbox").await.remove(0)
}

async fn choose(rap: &Rap, thread: &str, answer: &Value) {
    rap.post(&format!("/v1/threads/{thread}/calls/call_1_1/choice"), answer).await.expect(202);
}

#[tokio::test]
async fn a_destructive_tool_is_called_when_a_person_allows_it() {
    let tools = tools().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call wipe {\"disk\": 1}").await;
    let question = asked(&rap, &thread).await;
    assert_eq!(question["prompt"], "Allow wipe({\"disk\":1})?");
    assert_eq!((&question["choices"], &question["default"]), (&json!(["Allow", "Refuse"]), &json!(1)));
    // Nothing goes out before, not even after a crash.
    let rap = rap.restarted();
    assert_eq!(asked(&rap, &thread).await["call_id"], "call_1_1");
    assert_eq!(tools.count(INVOKE), 0);
    choose(&rap, &thread, &json!({"selected": 0})).await;
    let call = tools.invocation().await;
    assert_eq!(call.arguments(), &json!({"disk": 1}));
    call.returns("wiped").await;
    rap.until_line(&thread, "assistant: wipe: wiped").await;
    assert!(rap.listing("inbox").await.is_empty());
}

#[tokio::test]
async fn a_refusal_and_a_dismissal_are_results() {
    let tools = tools().await;
    let rap = Rap::start(&tools);
    for answer in [json!({"selected": 1}), json!({"dismiss": true})] {
        let thread = rap.open("call wipe {}").await;
        asked(&rap, &thread).await;
        choose(&rap, &thread, &answer).await;
        rap.until_line(
            &thread,
            "result call_1_1: refused: the user did not allow this call; nothing was done",
        )
        .await;
        rap.until_idle(&thread).await;
    }
    assert_eq!(tools.count(INVOKE), 0);
}

#[tokio::test]
async fn a_question_that_nobody_answers_lapses() {
    let tools = tools().await;
    let rap = Setup::new().tools(&tools).limit("approval_within = \"1s\"").start();
    let thread = rap.open("call wipe {}").await;
    rap.until_line(
        &thread,
        "result call_1_1: lapsed: nobody allowed this call within 1 second; nothing was done",
    )
    .await;
    rap.until_idle(&thread).await;
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(tools.count(INVOKE), 0);
}

#[tokio::test]
async fn an_agent_asks_for_what_its_configuration_names() {
    let tools = tools().await;
    let rap = Setup::new().tools(&tools).agent("name = \"careful\"\napprove = [\"wo*\"]").start();
    let thread = rap.open("call work {}").await;
    asked(&rap, &thread).await;
    choose(&rap, &thread, &json!({"selected": 0})).await;
    tools.invocation().await.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}
