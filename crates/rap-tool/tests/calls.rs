//! Calls: accepted, validated, run and answered.

mod support;

use serde_json::json;
use support::{Process, Runtime, data_dir};

/// Proves: LC-01, LC-02, TR-03, TR-11, TR-12, LC-05, LC-11
#[tokio::test]
async fn a_call_is_acknowledged_and_its_result_delivered() {
    let data = data_dir();
    let server = Process::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    let call = runtime.invocation("echo", "thread_1", "call_1", json!({"text": "hi"}));
    server.caller().accepted(&call).await;
    let result = runtime.next().await;
    assert_eq!(result.name, "call_1");
    let expected = json!({"type": "tool_result", "group_id": "thread_1", "id": "call_1", "text": "echo hi"});
    assert_eq!(result.body, expected);
}
