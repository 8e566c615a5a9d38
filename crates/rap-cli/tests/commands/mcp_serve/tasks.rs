//! Tasks in the form of the protocol version 2025-11-25, which the client asks for.

use rap_testkit::Tools;
use rap_testkit::tools::{CANCEL, INVOKE};
use serde_json::{Value, json};

use super::client::{Stdio, text};
use super::http::Server;

const ANSWER: &str = "/answer";
const RELATED: &str = "io.modelcontextprotocol/related-task";

fn as_task(name: &str, ttl: u64) -> Value {
    json!({"name": name, "arguments": {}, "task": {"ttl": ttl}})
}

async fn connected(capabilities: Value) -> (Tools, Stdio) {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let hello = client.initialize("2025-11-25", capabilities).await;
    let offered = json!({"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}});
    assert_eq!(hello["capabilities"]["tasks"], offered, "{hello}");
    (tools, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_asks_for_a_task_and_reads_its_state_and_result() {
    let (tools, mut client) = connected(json!({})).await;
    let listed = client.ask("tools/list", json!({})).await;
    assert_eq!(listed["tools"][0]["execution"], json!({"taskSupport": "optional"}), "{listed}");
    let created = client.ask("tools/call", as_task("work", 60_000)).await;
    let call = tools.invocation().await;
    let task = &created["task"];
    assert_eq!((&task["status"], &task["ttl"]), (&json!("working"), &json!(60_000)), "{created}");
    assert!(task["pollInterval"].is_u64() && task["createdAt"].is_string(), "{created}");
    let id = json!({"taskId": task["taskId"]});
    // One that waits for the result does not hold up other requests.
    let waiting = client.send("tasks/result", id.clone()).await;
    call.says(&call.view("progress", json!({"fraction": 0.5, "text": "half"}))).await;
    client.until("tasks/get", &id, |state| state["statusMessage"] == "half").await;
    call.returns("done").await;
    let result = client.result(waiting).await;
    assert_eq!((text(&result), &result["_meta"][RELATED]), ("done", &id));
    let state = client.ask("tasks/get", id.clone()).await;
    assert_eq!(state["status"], "completed", "{state}");
    // The result can be read again, and the task is listed.
    assert_eq!(text(&client.ask("tasks/result", id.clone()).await), "done");
    let listed = client.ask("tasks/list", json!({})).await;
    assert_eq!(listed["tasks"], json!([state]));
    let late = client.refusal("tasks/cancel", id).await;
    assert_eq!(late["code"], -32602, "{late}");
    for method in ["tasks/get", "tasks/result", "tasks/cancel"] {
        let unknown = client.refusal(method, json!({"taskId": "none"})).await;
        assert_eq!(unknown["code"], -32602, "{method}: {unknown}");
    }
    assert_eq!(client.refusal("tasks/list", json!({"cursor": "x"})).await["code"], -32602);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_fails_with_its_tool_and_its_cancellation_reaches_the_tool() {
    let (tools, mut client) = connected(json!({})).await;
    let failing = client.ask("tools/call", as_task("work", 60_000)).await;
    tools.invocation().await.returns("Error: the disk is full").await;
    let id = json!({"taskId": failing["task"]["taskId"]});
    let result = client.ask("tasks/result", id.clone()).await;
    assert_eq!((&result["isError"], text(&result)), (&json!(true), "Error: the disk is full"));
    assert_eq!(client.ask("tasks/get", id).await["status"], "failed");

    let running = client.ask("tools/call", as_task("work", 60_000)).await;
    let call = tools.invocation().await;
    let id = json!({"taskId": running["task"]["taskId"]});
    let waiting = client.send("tasks/result", id.clone()).await;
    assert_eq!(client.ask("tasks/cancel", id.clone()).await["status"], "cancelled");
    assert_eq!(tools.notified(CANCEL, 1).await[0]["tool_call_id"], call.id());
    let ended = client.message(|message| message["id"] == waiting).await;
    assert!(ended["error"]["message"].as_str().unwrap().contains("cancelled"), "{ended}");
    assert_eq!(client.ask("tasks/get", id).await["status"], "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_time_is_over_is_cancelled_and_forgotten() {
    let (tools, mut client) = connected(json!({})).await;
    let running = client.ask("tools/call", as_task("work", 100)).await;
    let call = tools.invocation().await;
    assert_eq!(tools.notified(CANCEL, 1).await[0]["tool_call_id"], call.id());
    let id = json!({"taskId": running["task"]["taskId"]});
    assert_eq!(client.refusal("tasks/get", id).await["code"], -32602);
    assert_eq!(client.ask("tasks/list", json!({})).await["tasks"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_of_a_task_is_asked_where_its_result_is_awaited() {
    let (tools, mut client) = connected(json!({"elicitation": {}})).await;
    let running = client.ask("tools/call", as_task("work", 60_000)).await;
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}{ANSWER}", tools.url))).await;
    let id = json!({"taskId": running["task"]["taskId"]});
    client.until("tasks/get", &id, |state| state["status"] == "input_required").await;
    let waiting = client.send("tasks/result", id.clone()).await;
    let request = client.request("elicitation/create").await;
    assert_eq!(request["params"]["message"], "Which colour?");
    assert_eq!(request["params"]["_meta"][RELATED], id);
    client.answer(&request, json!({"action": "accept", "content": {"choice": "red"}})).await;
    assert_eq!(tools.notified(ANSWER, 1).await[0]["selected"], 0);
    call.returns("painted").await;
    assert_eq!(text(&client.result(waiting).await), "painted");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_a_task_is_refused_and_older_clients_get_the_result() {
    let (tools, mut client) = connected(json!({})).await;
    assert_eq!(client.refusal("tools/call", as_task("none", 1)).await["code"], -32602);
    assert_eq!(client.refusal("tools/call", as_task("read_call", 1)).await["code"], -32601);
    assert_eq!(tools.count(INVOKE), 0);
    let mut older = Stdio::start(&tools.url, &[]);
    let hello = older.initialize("2025-06-18", json!({})).await;
    assert!(hello["capabilities"].get("tasks").is_none(), "{hello}");
    let id = older.send("tools/call", as_task("work", 60_000)).await;
    tools.invocation().await.returns("at once").await;
    assert_eq!(text(&older.result(id).await), "at once");
    let listed = older.ask("tools/list", json!({})).await;
    assert!(listed["tools"][0].get("execution").is_none(), "{listed}");
    assert_eq!(older.refusal("tasks/list", json!({})).await["code"], -32601);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_belongs_to_its_session() {
    let tools = Tools::start().await;
    let server = Server::start(&tools.url, &[]);
    let (one, other) = (server.session().await, server.session().await);
    let ask = async |session: &str, method: &str, params: Value| {
        let request = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
        let headers = [("mcp-session-id", session), ("mcp-protocol-version", "2025-11-25")];
        server.post(&headers, &request).await
    };
    let created = super::http::result(&ask(&one, "tools/call", as_task("work", 60_000)).await);
    let call = tools.invocation().await;
    let id = json!({"taskId": created["task"]["taskId"]});
    let foreign = ask(&other, "tasks/get", id.clone()).await;
    assert!(foreign.text.contains("-32602"), "{}", foreign.text);
    let listed = super::http::result(&ask(&other, "tasks/list", json!({})).await);
    assert_eq!(listed["tasks"], json!([]));
    call.returns("over HTTP").await;
    assert_eq!(text(&super::http::result(&ask(&one, "tasks/result", id).await)), "over HTTP");
}
