//! Input that no client should send. It costs a bounded amount of memory, gets an answer where it has an id, and disturbs
//! nobody.

use rap_testkit::Tools;
use rap_testkit::tools::INVOKE;
use serde_json::{Value, json};

use super::client::{Stdio, text};
use super::connected;
use crate::support::output;

/// Number of calls at the same time.
const PARALLEL: u64 = 200;
/// Maximum number of open calls, as in the code.
const OPEN_CALLS: u64 = 1_000;

async fn still_works(tools: &Tools, client: &mut Stdio) {
    let id = client.call("work", json!({})).await;
    tools.invocation().await.returns("still here").await;
    assert_eq!(text(&client.result(id).await), "still here");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_request_is_skipped_before_and_after_the_handshake() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let garbage: [&[u8]; 8] = [
        b"\n",
        b"hello\n",
        b"{\"jsonrpc\": \"2.0\", \"method\":\n",
        b"\xff\xfe\x00\n",
        b"[]\n",
        b"[{\"jsonrpc\": \"2.0\", \"id\": \"b\", \"method\": \"ping\"}]\n",
        b"{\"jsonrpc\": \"2.0\", \"method\": \"notifications/made_up\"}\n",
        b"{\"jsonrpc\": \"2.0\", \"id\": 77, \"result\": {}}\n",
    ];
    for line in garbage {
        client.write(line).await;
    }
    client.initialize("2025-11-25", json!({})).await;
    for line in garbage {
        client.write(line).await;
    }
    let deep = format!(
        "{{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"ping\", \"params\": {}}}\n",
        "[".repeat(100_000)
    );
    client.write(deep.as_bytes()).await;
    still_works(&tools, &mut client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_too_long_is_skipped() {
    let (tools, mut client) = connected(&[]).await;
    let piece = vec![b'x'; 1024 * 1024];
    for _ in 0..17 {
        client.write(&piece).await;
    }
    client.write(b"\n").await;
    still_works(&tools, &mut client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_methods_tools_and_parameters_have_their_own_errors() {
    let (tools, mut client) = connected(&[]).await;
    let code = async |client: &mut Stdio, method: &str, params: Value| {
        client.refusal(method, params).await["code"].as_i64().unwrap()
    };
    assert_eq!(code(&mut client, "tools/made_up", json!({})).await, -32601);
    assert_eq!(code(&mut client, "", json!({})).await, -32601);
    assert_eq!(code(&mut client, "tools/call", json!({"name": "none", "arguments": {}})).await, -32602);
    assert_eq!(code(&mut client, "tools/call", json!({"name": 7})).await, -32602);
    assert_eq!(code(&mut client, "tools/call", json!({})).await, -32602);
    assert_eq!(code(&mut client, "resources/read", json!({"uri": "file:///etc/passwd"})).await, -32002);
    assert_eq!(code(&mut client, "resources/subscribe", json!({"uri": "rap://calls/../x"})).await, -32002);
    assert_eq!(code(&mut client, "tasks/get", json!({"taskId": "x"})).await, -32602);
    let unknown =
        client.ask("tools/call", json!({"name": "cancel_call", "arguments": {"id": "call_1"}})).await;
    assert_eq!(unknown["isError"], true);
    assert_eq!(tools.count(INVOKE), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_calls_run_at_once() {
    let (tools, mut client) = connected(&[]).await;
    let mut ids = Vec::new();
    for number in 0..PARALLEL {
        ids.push(client.call("work", json!({"number": number})).await);
    }
    for _ in 0..PARALLEL {
        let call = tools.invocation().await;
        call.returns(&call.arguments()["number"].to_string()).await;
    }
    for (number, id) in ids.into_iter().enumerate() {
        assert_eq!(text(&client.result(id).await), number.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_calls_are_refused_with_a_reason() {
    let (tools, mut client) = connected(&[]).await;
    let mut ids = Vec::new();
    for _ in 0..OPEN_CALLS {
        ids.push(client.call("work", json!({})).await);
    }
    for _ in 0..OPEN_CALLS {
        tools.invocation().await;
    }
    let refused = client.ask("tools/call", json!({"name": "work", "arguments": {}})).await;
    assert_eq!(refused["isError"], true);
    assert!(text(&refused).contains("1000 calls are running already"), "{refused}");
    assert_eq!(client.ask("ping", json!({})).await, json!({}));
}

#[test]
fn wrong_usage_and_unreachable_servers_are_explained() {
    let run = |arguments: &[&str]| output(&mut rap_testkit::programs::rap(arguments));
    let nothing = run(&["mcp", "serve"]);
    assert_eq!((nothing.code, nothing.out.as_str()), (Some(2), ""));
    assert!(nothing.err.contains("--toolset") && nothing.err.contains("--runtime"), "{}", nothing.err);
    let both = run(&["mcp", "serve", "--toolset", "http://127.0.0.1:1", "--runtime", "http://127.0.0.1:1"]);
    assert_eq!(both.code, Some(2), "{both:?}");
    let open = run(&["mcp", "serve", "--runtime", "http://127.0.0.1:1", "--allow-origin", "http://x:1"]);
    assert_eq!(open.code, Some(2), "{open:?}");
    let unreachable = run(&["mcp", "serve", "--toolset", "http://127.0.0.1:1"]);
    assert_eq!((unreachable.code, unreachable.out.as_str()), (Some(1), ""));
    assert!(unreachable.err.contains("http://127.0.0.1:1"), "{}", unreachable.err);
    let scheme = run(&["mcp", "serve", "--toolset", "file:///etc/passwd"]);
    assert_eq!(scheme.code, Some(2), "{scheme:?}");
}
