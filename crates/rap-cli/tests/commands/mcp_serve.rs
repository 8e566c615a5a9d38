//! `rap mcp serve` with fake tool servers, over stdin and stdout, line by line.

mod agents;
mod client;
mod counterparts;
mod hostile;
mod http;
mod people;
mod slow;
mod tasks;

use std::time::Duration;

use rap_testkit::peer::Reply;
use rap_testkit::tools::{CANCEL, CLOSE, INVOKE, with};
use rap_testkit::{Tools, http as web};
use serde_json::{Value, json};

use client::{Stdio, text};

/// A fake tool server with the tools `work` and `watch`, and a client of them.
async fn connected(flags: &[&str]) -> (Tools, Stdio) {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, flags);
    client.initialize("2025-11-25", json!({})).await;
    (tools, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_keep_their_names_schemas_and_annotations() {
    let tools = Tools::start().await;
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let read = json!({"name": "read", "description": "Reads.", "inputSchema": schema,
                      "annotations": {"readOnly": true, "idempotent": true, "destructive": false}});
    let bare = json!({"name": "bare", "description": "Does.", "inputSchema": {}});
    tools.offer(tools.document("bench", "1", vec![read, bare]));
    let mut client = Stdio::start(&tools.url, &[]);
    let hello = client.initialize("2025-11-25", json!({})).await;
    assert_eq!(hello["protocolVersion"], "2025-11-25");
    assert_eq!(hello["serverInfo"]["name"], "rap");
    let listed = client.ask("tools/list", json!({})).await;
    let names: Vec<&str> =
        listed["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["bare", "read"]);
    assert_eq!(listed["tools"][0]["inputSchema"]["type"], "object");
    assert_eq!(listed["tools"][1]["inputSchema"], schema);
    let hints = json!({"readOnlyHint": true, "destructiveHint": false, "idempotentHint": true});
    assert_eq!(listed["tools"][1]["annotations"], hints);
    let invalid = client.ask("tools/call", json!({"name": "read", "arguments": {"n": "one"}})).await;
    assert_eq!(invalid["isError"], true);
    assert!(text(&invalid).contains("do not match the schema of read"), "{invalid}");
    assert!(tools.count(INVOKE) == 0, "invalid arguments must not be sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_version_with_a_handshake_is_spoken() {
    let tools = Tools::start().await;
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let mut client = Stdio::start(&tools.url, &[]);
        assert_eq!(client.initialize(version, json!({})).await["protocolVersion"], version);
        let id = client.call("work", json!({})).await;
        tools.invocation().await.returns(version).await;
        assert_eq!(text(&client.result(id).await), version);
        assert_eq!(client.ask("ping", json!({})).await, json!({}));
        client.close().await;
    }
    // A client that asks for a version without a handshake gets one that has it.
    let mut client = Stdio::start(&tools.url, &[]);
    assert_eq!(client.initialize("2099-01-01", json!({})).await["protocolVersion"], "2025-11-25");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_run_in_parallel_and_errors_and_images_come_through() {
    let (tools, mut client) = connected(&[]).await;
    let mut ids = Vec::new();
    for number in 0..3 {
        ids.push(client.call("work", json!({"number": number})).await);
    }
    let mut calls = tools.invocations(3).await;
    calls.sort_by_key(|call| call.arguments()["number"].as_u64());
    assert_eq!(calls[0].thread(), calls[2].thread(), "a session is one thread");
    assert_eq!(calls[0].request.body["toolset_version"], "1");
    calls[2].returns("third").await;
    assert_eq!(text(&client.result(ids[2]).await), "third");
    calls[1].returns("Error: no such number").await;
    let failed = client.result(ids[1]).await;
    assert_eq!((failed["isError"].as_bool(), text(&failed)), (Some(true), "Error: no such number"));
    let image = json!({"type": "image", "data": "aGk=", "mediaType": "image/png"});
    let content = json!({"content": [{"type": "text", "text": "a chart"}, image]});
    calls[0].says(&with(calls[0].result("-"), content)).await;
    let shown = client.result(ids[0]).await;
    assert_eq!(shown["content"][1], json!({"type": "image", "data": "aGk=", "mimeType": "image/png"}));
    // A repeated result is acknowledged and changes nothing.
    calls[0].returns("again").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_reaches_the_tool_and_the_end_of_stdin_closes_the_thread() {
    let (tools, mut client) = connected(&[]).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    client.notify("notifications/cancelled", json!({"requestId": id})).await;
    let cancelled = tools.notified(CANCEL, 1).await;
    assert_eq!(cancelled[0], json!({"thread_id": call.thread(), "tool_call_id": call.id()}));
    // A result after the cancellation is acknowledged.
    call.returns("late").await;
    client.call("work", json!({})).await;
    let open = tools.invocation().await;
    assert_eq!(client.close().await, Some(0));
    assert_eq!(tools.notified(CLOSE, 1).await, [json!({"thread_id": call.thread()})]);
    let cancelled = tools.notified(CANCEL, 1).await;
    assert_eq!(cancelled[0]["tool_call_id"], open.id());
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_views_are_progress_notifications() {
    let (tools, mut client) = connected(&[]).await;
    let params = json!({"name": "work", "arguments": {}, "_meta": {"progressToken": "p"}});
    let id = client.send("tools/call", params).await;
    let call = tools.invocation().await;
    call.says(&call.view("diff", json!({"path": "x"}))).await;
    let mut last = -1.0;
    for (fraction, words) in [(0.0, "begin"), (0.5, "half"), (0.25, "back"), (1.0, "done")] {
        call.says(&call.view("progress", json!({"fraction": fraction, "text": words}))).await;
        let shown = client.notification("notifications/progress").await;
        assert_eq!((&shown["progressToken"], &shown["message"]), (&json!("p"), &json!(words)));
        assert!(shown["progress"].as_f64().unwrap() > last, "{shown}");
        last = shown["progress"].as_f64().unwrap();
    }
    call.returns("ready").await;
    assert_eq!(text(&client.result(id).await), "ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_is_a_resource_with_updates() {
    let (tools, mut client) = connected(&[]).await;
    let names = client.tool_names().await;
    assert_eq!(names, ["watch", "work"]);
    let id = client.call("watch", json!({})).await;
    let call = tools.invocation().await;
    call.confirms("watching").await;
    let confirmed = client.result(id).await;
    assert_eq!(text(&confirmed), "watching");
    let uri = confirmed["content"].as_array().unwrap().last().unwrap()["uri"].as_str().unwrap().to_owned();
    assert_eq!(uri, format!("rap://calls/{}", call.id()));
    client.notification("notifications/resources/list_changed").await;
    client.notification("notifications/tools/list_changed").await;
    assert_eq!(client.tool_names().await, ["watch", "work", "read_call", "cancel_call"]);
    assert_eq!(client.ask("resources/list", json!({})).await["resources"][0]["uri"], uri);
    client.ask("resources/subscribe", json!({"uri": uri})).await;
    let named = with(call.event("one"), json!({"event_id": "e1"}));
    call.says(&named).await;
    call.says(&named).await;
    assert_eq!(client.notification("notifications/resources/updated").await["uri"], uri);
    let read = client.ask("resources/read", json!({"uri": uri})).await;
    let shown: Value = serde_json::from_str(read["contents"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(shown["status"], "active");
    assert_eq!(shown["events"], json!([{"number": 1, "text": "one", "final": false}]));
    // `read_call` waits for new events.
    let reading =
        json!({"name": "read_call", "arguments": {"id": call.id(), "after": 1, "wait_seconds": 60}});
    let reading = client.send("tools/call", reading).await;
    call.says(&call.event("two")).await;
    assert_eq!(client.result(reading).await["structuredContent"]["events"][0]["text"], "two");
    let cancel = json!({"name": "cancel_call", "arguments": {"id": call.id()}});
    assert_ne!(client.ask("tools/call", cancel).await["isError"], true);
    assert_eq!(tools.notified(CANCEL, 1).await[0]["tool_call_id"], call.id());
    call.says(&call.event("late")).await;
    let read = client.ask("resources/read", json!({"uri": uri})).await;
    assert!(!read.to_string().contains("late"), "{read}");
    let unknown = client.refusal("resources/read", json!({"uri": "rap://calls/none"})).await;
    assert_eq!(unknown["code"], -32002);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_call_returns_an_error_with_its_id_and_goes_on() {
    let (tools, mut client) = connected(&["--task-after", "50ms", "--wait-at-most", "100ms"]).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    let waited = client.result(id).await;
    assert_eq!(waited["isError"], true);
    assert!(text(&waited).contains(call.id()), "{waited}");
    let reading = json!({"name": "read_call", "arguments": {"id": call.id(), "wait_seconds": 60}});
    let reading = client.send("tools/call", reading).await;
    call.returns("at last").await;
    assert_eq!(text(&client.result(reading).await), "at last");
    assert!(tools.count(CANCEL) == 0, "the call goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_call_becomes_a_task_where_the_client_can() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &["--task-after", "50ms"]);
    let tasks = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}});
    client.initialize("2025-11-25", tasks).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    let task = client.result(id).await;
    assert_eq!(task["status"], "working", "{task}");
    call.says(&call.view("progress", json!({"fraction": 0.5, "text": "half"}))).await;
    let get = json!({"taskId": task["taskId"]});
    client.until("tasks/get", &get, |state| state["statusMessage"] == "half").await;
    call.returns("Error: too late").await;
    let done = client.until("tasks/get", &get, |state| state["status"] == "completed").await;
    assert_eq!((&done["result"]["isError"], text(&done["result"])), (&json!(true), "Error: too late"));
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    let get = json!({"taskId": client.result(id).await["taskId"]});
    client.ask("tasks/cancel", get.clone()).await;
    assert_eq!(tools.notified(CANCEL, 1).await[0]["tool_call_id"], call.id());
    client.until("tasks/get", &get, |state| state["status"] == "cancelled").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_waits_for_a_minute_by_default() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let tasks = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}});
    client.initialize("2025-11-25", tasks).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    // A shorter bound would show here.
    tokio::time::sleep(Duration::from_secs(3)).await;
    call.returns("done").await;
    assert_eq!(text(&client.result(id).await), "done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_toolset_is_fetched_again_and_announced() {
    let (tools, mut client) = connected(&[]).await;
    tools.offer(tools.document(
        "bench",
        "2",
        vec![rap_testkit::tools::tool("work"), rap_testkit::tools::tool("new")],
    ));
    tools.answer_next(INVOKE, Reply::Status(409));
    // A toolset is not fetched twice in a second.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let stale = client.ask("tools/call", json!({"name": "work", "arguments": {}})).await;
    assert_eq!(
        (&stale["isError"], text(&stale)),
        (&json!(true), "Error: the tools of bench changed; call again")
    );
    client.notification("notifications/tools/list_changed").await;
    assert_eq!(client.tool_names().await, ["new", "work"]);
    tools.invocation().await;
    let id = client.call("new", json!({})).await;
    let call = tools.invocation().await;
    assert_eq!(call.request.body["toolset_version"], "2");
    call.returns("new").await;
    assert_eq!(text(&client.result(id).await), "new");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_are_offered_together_except_for_names_that_clash() {
    let one = Tools::offering("one", &["same", "first", "read_call"]).await;
    let two = Tools::offering("two", &["same", "second"]).await;
    let mut client = Stdio::start(&one.url, &["--toolset", &two.url, "--bearer", "t1", "--bearer", "t2"]);
    client.initialize("2025-11-25", json!({})).await;
    assert_eq!(client.tool_names().await, ["first", "second"]);
    let id = client.call("second", json!({})).await;
    let call = two.invocation().await;
    assert_eq!(call.request.header("authorization"), Some("Bearer t2"));
    call.returns("2").await;
    assert_eq!(text(&client.result(id).await), "2");
    client.close().await;
    assert_eq!(one.notified(CLOSE, 1).await, two.notified(CLOSE, 1).await, "every server is told");
}

#[tokio::test(flavor = "multi_thread")]
async fn callbacks_need_the_token_and_the_ids_of_their_call() {
    let (tools, mut client) = connected(&[]).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    let (base, token) = call.url().rsplit_once('/').unwrap();
    assert!(token.len() >= 64 && base.starts_with("http://127.0.0.1:"), "{base}");
    let guessed = format!("{base}/{}", "0".repeat(token.len()));
    assert_eq!(web::post(&guessed, &call.result("forged")).await.status, 401);
    for wrong in [json!({"id": "other"}), json!({"group_id": "other"}), json!({"text": null})] {
        assert_eq!(call.post(&with(call.result("forged"), wrong)).await.status, 400);
    }
    let huge = call.result(&"x".repeat(9 * 1024 * 1024));
    assert_eq!(call.post(&huge).await.status, 413);
    call.returns("true").await;
    assert_eq!(text(&client.result(id).await), "true");
}
