//! A client that reads more slowly than resources change. It misses changes, and is told later what may have changed.

use rap_testkit::tools::Call;
use rap_testkit::{Tools, http as web};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::client::Stdio;
use super::people::modern;

/// Number of events that fill the pipe to the client.
const FILLING: usize = 1_000;
/// Number of events after which earlier changes are no longer kept.
const PUSHING: usize = 400;
const SENDERS: usize = 8;

/// Sends events, and does not wait until the client was notified of them.
async fn burst(call: &Call, count: usize) {
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        let (url, event) = (call.url().to_owned(), call.event("again"));
        senders.spawn(async move {
            for _ in 0..count / SENDERS {
                assert_eq!(web::post(&url, &event).await.status, 200);
            }
        });
    }
    senders.join_all().await;
}

/// Starts a subscription without waiting for its answer.
async fn subscribed(tools: &Tools, client: &mut Stdio, request: Value) -> (Call, u64) {
    let id = client.send("tools/call", request).await;
    let call = tools.invocation().await;
    call.confirms("watching").await;
    (call, id)
}

/// Returns the methods of all notifications up to the answer to a request.
async fn told(client: &mut Stdio, until: u64) -> Vec<String> {
    let mut told = Vec::new();
    loop {
        let message = client.message(|_| true).await;
        match message["method"].as_str() {
            Some(method) => told.push(method.to_owned()),
            None if message["id"] == until => return told,
            None => {}
        }
    }
}

async fn is_told_again(client: &mut Stdio, tools: &Tools, first: &Call, wrapped: impl Fn(Value) -> Value) {
    burst(first, FILLING).await;
    let (second, id) = subscribed(tools, client, wrapped(json!({"name": "watch", "arguments": {}}))).await;
    burst(first, PUSHING).await;
    let before = told(client, id).await;
    assert!(before.len() < FILLING, "the client was not slow enough");
    assert!(!before.iter().any(|method| method.ends_with("list_changed")), "{before:?}");
    // The changes of the second subscription were missed. The lists and the first resource are named again.
    for expected in ["tools/list_changed", "resources/list_changed", "resources/updated"] {
        client.notification(&format!("notifications/{expected}")).await;
    }
    let listed = client.ask("resources/list", wrapped(json!({}))).await.to_string();
    assert!(listed.contains(second.id()), "{listed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_is_told_what_may_have_changed() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    client.initialize("2025-11-25", json!({})).await;
    let (first, id) = subscribed(&tools, &mut client, json!({"name": "watch", "arguments": {}})).await;
    client.result(id).await;
    for expected in ["tools/list_changed", "resources/list_changed"] {
        client.notification(&format!("notifications/{expected}")).await;
    }
    client.ask("resources/subscribe", json!({"uri": format!("rap://calls/{}", first.id())})).await;
    is_told_again(&mut client, &tools, &first, |params| params).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_without_handshake_is_told_what_may_have_changed() {
    let tools = Tools::start().await;
    let mut client = Stdio::start(&tools.url, &[]);
    let wrapped = |params| modern(params, &json!({}));
    let (first, id) =
        subscribed(&tools, &mut client, wrapped(json!({"name": "watch", "arguments": {}}))).await;
    client.result(id).await;
    let uri = format!("rap://calls/{}", first.id());
    let wanted =
        json!({"toolsListChanged": true, "resourcesListChanged": true, "resourceSubscriptions": [uri]});
    client.send("subscriptions/listen", wrapped(json!({"notifications": wanted}))).await;
    client.notification("notifications/subscriptions/acknowledged").await;
    is_told_again(&mut client, &tools, &first, wrapped).await;
}
