//! Questions of tools to people: elicitation where the client can, an honest result where it cannot.

use rap_testkit::Tools;
use rap_testkit::tools::CANCEL;
use serde_json::{Value, json};

use super::client::{Stdio, text};

const ANSWER: &str = "/answer";

async fn asked(version: &str, capabilities: Value) -> (Tools, Stdio, u64, rap_testkit::tools::Call) {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    client.initialize(version, capabilities).await;
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    (tools, client, id, call)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_choice_is_an_elicitation() {
    let (tools, mut client, id, call) = asked("2025-06-18", json!({"elicitation": {}})).await;
    let replies = [
        (json!({"action": "accept", "content": {"choice": "red"}}), 0),
        (json!({"action": "decline"}), 1),
        (json!({"action": "accept", "content": {"choice": "blue"}}), 1),
    ];
    for (number, (reply, selected)) in replies.into_iter().enumerate() {
        let url = format!("{}{ANSWER}?{number}", tools.url);
        call.says(&call.question(&url)).await;
        let request = client.request("elicitation/create").await;
        assert_eq!(request["params"]["message"], "Which colour?");
        let choice = &request["params"]["requestedSchema"]["properties"]["choice"];
        assert_eq!((&choice["enum"], &choice["default"]), (&json!(["red", "green"]), &json!("green")));
        client.answer(&request, reply).await;
        let answered = tools.notified(ANSWER, 1).await;
        assert_eq!(answered[0], json!({"id": call.id(), "selected": selected}));
    }
    call.returns("painted").await;
    assert_eq!(text(&client.result(id).await), "painted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_cannot_ask_gets_the_default_and_is_told_so() {
    let (tools, mut client, id, call) = asked("2025-03-26", json!({})).await;
    call.says(&call.question(&format!("{}{ANSWER}", tools.url))).await;
    assert_eq!(tools.notified(ANSWER, 1).await[0]["selected"], 1);
    call.returns("painted").await;
    let result = client.result(id).await;
    assert_eq!(text(&result), "painted");
    let note = result["content"][1]["text"].as_str().unwrap();
    assert!(note.contains("Which colour?") && note.contains("green"), "{note}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sign_in_is_a_page_to_open() {
    let (tools, mut client, id, call) = asked("2025-11-25", json!({"elicitation": {"url": {}}})).await;
    call.says(&call.oauth("https://login.example/start?state=1")).await;
    let request = client.request("elicitation/create").await;
    assert_eq!(request["params"]["mode"], "url");
    assert_eq!(request["params"]["url"], "https://login.example/start?state=1");
    client.answer(&request, json!({"action": "accept"})).await;
    call.returns("signed in").await;
    assert_eq!(text(&client.result(id).await), "signed in");
    let id = client.call("work", json!({})).await;
    let call = tools.invocation().await;
    call.says(&call.oauth("https://login.example/start?state=2")).await;
    let request = client.request("elicitation/create").await;
    client.answer(&request, json!({"action": "decline"})).await;
    let refused = client.result(id).await;
    assert_eq!((&refused["isError"], text(&refused)), (&json!(true), "Error: the user did not sign in"));
    assert_eq!(tools.notified(CANCEL, 1).await[0]["tool_call_id"], call.id());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_cannot_open_pages_gets_the_link_and_reads_the_result_later() {
    let (_tools, mut client, id, call) = asked("2025-11-25", json!({"elicitation": {"form": {}}})).await;
    call.says(&call.oauth("https://login.example/start?state=1")).await;
    let link = client.result(id).await;
    assert!(text(&link).contains("https://login.example/start?state=1"), "{link}");
    call.returns("signed in").await;
    let read = json!({"name": "read_call", "arguments": {"id": call.id(), "wait_seconds": 60}});
    assert_eq!(text(&client.ask("tools/call", read).await), "signed in");
}

pub fn modern(mut params: Value, capabilities: &Value) -> Value {
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    });
    params
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_handshake_the_request_is_sent_again_with_the_answer() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let able = json!({"elicitation": {"form": {}}});
    let found = client.ask("server/discover", modern(json!({}), &able)).await;
    assert!(found["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")), "{found}");
    let request = json!({"name": "work", "arguments": {}});
    let id = client.send("tools/call", modern(request.clone(), &able)).await;
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}{ANSWER}", tools.url))).await;
    let asked = client.result(id).await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    assert_eq!(asked["inputRequests"]["question"]["params"]["message"], "Which colour?");
    let mut again = request.clone();
    again["requestState"] = asked["requestState"].clone();
    again["inputResponses"] = json!({"question": {"action": "accept", "content": {"choice": "red"}}});
    let id = client.send("tools/call", modern(again.clone(), &able)).await;
    assert_eq!(tools.notified(ANSWER, 1).await[0]["selected"], 0);
    call.returns("red it is").await;
    assert_eq!(text(&client.result(id).await), "red it is");
    // The same request a third time has no open question.
    let stale = client.ask("tools/call", modern(again, &able)).await;
    assert_eq!(stale["isError"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_handshake_updates_come_on_a_subscription() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let id = client.send("tools/call", modern(json!({"name": "watch", "arguments": {}}), &json!({}))).await;
    let call = tools.invocation().await;
    call.confirms("watching").await;
    client.result(id).await;
    let uri = format!("rap://calls/{}", call.id());
    let filter = json!({"notifications": {"resourceSubscriptions": [uri]}});
    client.send("subscriptions/listen", modern(filter, &json!({}))).await;
    client.notification("notifications/subscriptions/acknowledged").await;
    call.says(&call.event("one")).await;
    assert_eq!(client.notification("notifications/resources/updated").await["uri"], uri);
}
