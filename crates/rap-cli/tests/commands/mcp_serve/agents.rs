//! `rap mcp serve --runtime`: agents as MCP tools, with the scripted model.

use rap_testkit::{Setup, Tools};
use serde_json::json;

use super::client::{Stdio, text};

#[tokio::test(flavor = "multi_thread")]
async fn agents_are_started_asked_awaited_and_read() {
    let tools = Tools::start().await;
    let rap = Setup::new().token("s3cr3t").tools(&tools).start();
    let mut client = Stdio::run(&["mcp", "serve", "--runtime", &rap.url, "--token", "s3cr3t"]);
    client.initialize("2025-11-25", json!({})).await;
    assert_eq!(client.tool_names().await, ["start", "ask", "wait", "read"]);
    let started = client
        .ask(
            "tools/call",
            json!({"name": "start", "arguments": {"message": "say hello", "wait_seconds": 60}}),
        )
        .await;
    assert_eq!(text(&started), "hello");
    let state = &started["structuredContent"];
    assert_eq!((&state["status"], &state["done"]), (&json!("idle"), &json!(true)));
    let thread = state["thread"].as_str().unwrap();

    // A call that takes long: ask returns, and says how to continue.
    let ask = json!({"thread": thread, "message": "call work {}", "wait_seconds": 1});
    let asked = client.ask("tools/call", json!({"name": "ask", "arguments": ask})).await;
    let state = &asked["structuredContent"];
    assert_eq!((&state["status"], &state["done"]), (&json!("waiting"), &json!(false)), "{asked}");
    assert!(state["next"].as_str().unwrap().contains("call wait"), "{asked}");
    let after = state["after"].clone();
    let wait = json!({"thread": thread, "after": after, "wait_seconds": 60});
    let params = json!({"name": "wait", "arguments": wait, "_meta": {"progressToken": 1}});
    let waiting = client.send("tools/call", params).await;
    tools.invocation().await.returns("done").await;
    let waited = client.result(waiting).await;
    assert_eq!(waited["structuredContent"]["status"], "idle", "{waited}");
    assert!(text(&waited).contains("done"), "{waited}");
    client.notification("notifications/progress").await;

    let read = json!({"name": "read", "arguments": {"thread": thread, "limit": 2}});
    let page = client.ask("tools/call", read).await["structuredContent"].clone();
    assert_eq!(page["entries"].as_array().unwrap().len(), 2);
    assert_eq!(page["entries"][0]["text"], "say hello");
    assert_eq!(page["more_after"], 2);
    let unknown = client.ask("tools/call", json!({"name": "read", "arguments": {"thread": "none"}})).await;
    assert_eq!(unknown["isError"], true);
    let wrong = client.ask("tools/call", json!({"name": "ask", "arguments": {"thread": thread}})).await;
    assert!(text(&wrong).contains("message"), "{wrong}");
    assert_eq!(client.close().await, Some(0));
    // The agent is durable: it is still there.
    assert_eq!(rap.thread(thread).await["status"], "idle");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_to_a_person_ends_the_wait() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).start();
    let mut client = Stdio::run(&["mcp", "serve", "--runtime", &rap.url]);
    client.initialize("2025-11-25", json!({})).await;
    let start = json!({"name": "start", "arguments": {"message": "call work {}", "wait_seconds": 60}});
    let id = client.send("tools/call", start).await;
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}/answer", tools.url))).await;
    let state = client.result(id).await["structuredContent"].clone();
    assert_eq!(state["status"], "needs_you", "{state}");
    assert!(state["next"].as_str().unwrap().contains("Which colour? [red, green]"), "{state}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_reported_at_the_start() {
    let tools = Tools::start().await;
    let rap = Setup::new().token("s3cr3t").tools(&tools).start();
    let url = rap.url.clone();
    let refused = tokio::task::spawn_blocking(move || {
        crate::support::output(&mut rap_testkit::programs::rap(&[
            "mcp",
            "serve",
            "--runtime",
            &url,
            "--token",
            "no",
        ]))
    });
    let refused = refused.await.unwrap();
    assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""));
    assert!(refused.err.contains("RAP_TOKEN"), "{}", refused.err);
}
