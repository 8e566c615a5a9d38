//! Calls that a person has to approve in the inbox before they are sent.

use std::time::Duration;

use rap_testkit::peer::Reply;
use rap_testkit::stream::Stream;
use rap_testkit::tools::{INVOKE, tool, with};
use rap_testkit::{Rap, Setup, Tools};
use serde_json::{Value, json};

/// A server with one tool that is annotated as destructive.
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
    // Nothing is sent before, not even after a crash.
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
async fn an_approval_names_every_argument_and_the_inbox_carries_them_all() {
    let tools = Tools::start().await;
    // A display script could say anything.
    let more = json!({"annotations": {"destructive": true}, "displayScript": "\"harmless\""});
    tools.offer(tools.document("bench", "1", vec![with(tool("wipe"), more)]));
    let rap = Rap::start(&tools);
    let arguments = json!({"a": "x".repeat(5000), "disk": {"name": "sda\u{202e}"}, "force": true});
    let thread = rap.open(&format!("call wipe {arguments}")).await;
    let question = asked(&rap, &thread).await;
    let expected = format!(
        "Allow wipe({{\"a\":\"{}\"… (4488 bytes not shown),\"disk\":{{\"name\":\"sda\\u{{202e}}\"}},\"force\":true}})?",
        "x".repeat(512)
    );
    assert_eq!(question["prompt"], json!(expected));
    assert_eq!(question["arguments"], arguments);
    for command in [&["inbox", "ls"][..], &["threads", "show", &thread]] {
        let (_, shown) = rap.command(command);
        assert!(shown.contains(&expected) && !shown.contains("harmless"), "{command:?}: {shown}");
    }
    // Events carry no arguments, which may be large.
    for path in [format!("/v1/threads/{thread}/events"), "/v1/events".into()] {
        let event = Stream::open(&rap, &path, None).await.unwrap().until("choice").await;
        assert_eq!((&event["prompt"], &event["arguments"]), (&json!(expected), &Value::Null), "{path}");
    }
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
async fn a_question_without_an_answer_expires() {
    let tools = tools().await;
    let rap = Setup::new().tools(&tools).limit("approval_within = \"1s\"").start();
    let thread = rap.open("call wipe {}").await;
    rap.until_line(
        &thread,
        "result call_1_1: not approved: nobody answered within 1 second; the call was not sent",
    )
    .await;
    rap.until_idle(&thread).await;
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(tools.count(INVOKE), 0);
}

#[tokio::test]
async fn tools_in_approve_need_approval() {
    let tools = tools().await;
    let rap = Setup::new().tools(&tools).agent("name = \"careful\"\napprove = [\"wo*\"]").start();
    let thread = rap.open("call work {}").await;
    asked(&rap, &thread).await;
    choose(&rap, &thread, &json!({"selected": 0})).await;
    tools.invocation().await.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}

#[tokio::test]
async fn a_call_approved_right_before_kill_9_is_sent_and_returns_once() {
    let tools = tools().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call wipe {\"disk\": 2}").await;
    asked(&rap, &thread).await;
    // The first invocation is not acknowledged: the runtime is killed while it is sent.
    tools.answer_next(INVOKE, Reply::Hang);
    choose(&rap, &thread, &json!({"selected": 0})).await;
    let first = tools.invocation().await;
    let rap = rap.restarted();
    let again = tools.invocation().await;
    assert_eq!(again.request.body, first.request.body);
    assert!(rap.listing("inbox").await.is_empty());
    let late =
        rap.post(&format!("/v1/threads/{thread}/calls/call_1_1/choice"), &json!({"selected": 1})).await;
    assert_eq!(late.status, 404);
    again.returns("wiped").await;
    first.returns("wiped").await;
    rap.until_line(&thread, "assistant: wipe: wiped").await;
    let transcript = rap.transcript(&thread).await;
    assert_eq!(transcript.iter().filter(|line| line.starts_with("result ")).count(), 1, "{transcript:?}");
}

#[tokio::test]
async fn a_refusal_right_before_kill_9_is_kept() {
    let tools = tools().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call wipe {}").await;
    asked(&rap, &thread).await;
    choose(&rap, &thread, &json!({"selected": 1})).await;
    let rap = rap.restarted();
    rap.until_idle(&thread).await;
    let refused = "result call_1_1: refused: the user did not allow this call; nothing was done";
    assert_eq!(rap.transcript(&thread).await.iter().filter(|line| *line == refused).count(), 1);
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(tools.count(INVOKE), 0);
}

#[tokio::test]
async fn a_question_expires_after_a_day() {
    let tools = tools().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call wipe {}").await;
    asked(&rap, &thread).await;
    let call = rap.listing("calls").await.remove(0);
    assert_eq!(rap.number("SELECT until - since FROM calls"), 24 * 3600 * 1000);
    // A restart does not extend the deadline.
    let rap = rap.restarted();
    assert_eq!(rap.listing("calls").await.remove(0), call);
    assert_eq!(rap.listing("timers").await.remove(0)["at"], call["until"]);
}

#[tokio::test]
async fn a_question_expires_while_the_runtime_is_down() {
    let tools = tools().await;
    // Timeouts that came due during downtime get a short grace period after the start.
    let limits = "approval_within = \"500ms\"\ncall_timeout = \"1s\"";
    let rap = Setup::new().tools(&tools).limit(limits).start();
    let thread = rap.open("call wipe {}").await;
    asked(&rap, &thread).await;
    let rap = rap.restarted_after(Duration::from_millis(600));
    let expired = "result call_1_1: not approved: nobody answered within 500 ms; the call was not sent";
    rap.until_line(&thread, expired).await;
    rap.until_idle(&thread).await;
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(tools.count(INVOKE), 0);
}
