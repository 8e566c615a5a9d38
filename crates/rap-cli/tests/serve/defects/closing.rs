//! Closing a thread with open calls notifies the tool servers of the thread and of the calls.

use serde_json::{Value, json};

use rap_testkit::peer::Reply;
use rap_testkit::tools::{CANCEL, CLOSE, Call, INVOKE, tool, with};
use rap_testkit::{Rap, Tools};

/// A thread with a subscription, two calls that were sent, and two that were not.
async fn busy(tools: &Tools, rap: &Rap) -> (String, Vec<Call>) {
    let wipe = with(tool("wipe"), json!({"annotations": {"destructive": true}}));
    tools.offer(tools.document("bench", "1", vec![tool("work"), tool("watch"), wipe]));
    let thread = rap.open("call watch {}").await;
    tools.invocation().await.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call work {}\ncall work {}\ncall wipe {}\ncall sleep {\"seconds\": 86400}").await;
    let calls = tools.invocations(2).await;
    rap.until_status(&thread, "needs_you").await;
    (thread, calls)
}

/// Waits until any other request would have arrived: a call that is refused twice is sent a third time.
async fn wait_for_late_requests(tools: &Tools, rap: &Rap) {
    (0..2).for_each(|_| tools.answer_next(INVOKE, Reply::Status(503)));
    rap.open("call work {}").await;
    tools.invocations(3).await;
}

/// Proves: CN-01, SE-20, TC-01
#[tokio::test]
async fn closing_cancels_the_calls_that_were_sent_and_nothing_else() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, calls) = busy(&tools, &rap).await;
    rap.close(&thread).await;
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": thread}));
    let mut cancelled = tools.notified(CANCEL, 2).await;
    cancelled.sort_by_key(Value::to_string);
    let mut expected: Vec<_> =
        calls.iter().map(|call| json!({"thread_id": thread, "tool_call_id": call.name()})).collect();
    expected.sort_by_key(Value::to_string);
    assert_eq!(cancelled, expected);
    let transcript = rap.transcript(&thread).await;
    for call in &calls {
        let line = format!("result {}: interrupted", call.name());
        assert_eq!(transcript.iter().filter(|told| **told == line).count(), 1, "{transcript:#?}");
        assert_eq!(call.post(&call.result("late")).await.refusal(), (410, "thread_closed"));
    }
    wait_for_late_requests(&tools, &rap).await;
    assert_eq!((tools.count(CLOSE), tools.count(CANCEL)), (1, 2));
}

/// Proves: TC-01
#[tokio::test]
async fn close_thread_arrives_before_the_cancellations_of_the_calls() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, _) = busy(&tools, &rap).await;
    rap.close(&thread).await;
    tools.notified(CANCEL, 2).await;
    let closed = tools.next(CLOSE).await.at;
    let cancelled = tools.all(CANCEL).into_iter().map(|asked| asked.at);
    assert!(cancelled.min() > Some(closed), "a cancellation came first");
}

/// A call with a placeholder result is open too.
#[tokio::test]
async fn closing_cancels_calls_that_show_a_placeholder() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {}").await;
    let call = tools.invocation().await;
    rap.say(&thread, "say meanwhile").await;
    rap.until_line(&thread, "assistant: meanwhile").await;
    rap.close(&thread).await;
    assert_eq!(tools.next(CANCEL).await.body, json!({"thread_id": thread, "tool_call_id": call.name()}));
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": thread}));
}
