//! Crash points of a tool server: the process ends at each of them. After a restart its call has one result.

use serde_json::json;

use crate::support::{Runtime, ToolProcess, data_dir};

/// Invokes a tool, and lets the server crash at a point. Returns the results that arrive.
async fn survive(point: &str) -> Vec<String> {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[("RAP_CRASH_POINT", point)]);
    let call = runtime.invocation("slow", "thread_1", "call_1", json!({"seconds": 0.05}));
    // There may be no answer.
    server.caller().try_post("/invoke", call.to_string()).await;
    assert!(!server.wait().success(), "it ended by itself");
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    // A runtime without an answer sends the invocation again.
    server.caller().accepted(&call).await;
    server.caller().until_settled("thread_1", "call_1").await;
    let mut received = vec![runtime.next().await];
    received.extend(runtime.pending());
    received.iter().map(|received| received.text().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_before_the_answer_to_an_invocation_leads_to_one_result() {
    assert_eq!(survive("before_invocation_answer").await, ["slept 0.05"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_before_a_delivery_leads_to_one_result() {
    assert_eq!(survive("before_delivery").await, ["slept 0.05"]);
}

/// The runtime has the result, but the server does not know that. It sends the same result again.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_a_delivery_repeats_the_same_result() {
    assert_eq!(survive("after_delivery").await, ["slept 0.05", "slept 0.05"]);
}
