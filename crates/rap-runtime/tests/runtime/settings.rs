//! Invalid settings in a program that embeds the runtime. The `rap` command finds these when it reads its configuration.

use std::future::pending;

use rap_protocol::Secret;
use rap_runtime::{Credentials, Runtime, Settings, ToolServer};
use rap_testkit::{http, until};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::local::settings;

/// Serves until the end of the test. Returns the address.
async fn serve(runtime: Runtime) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(runtime.serve(listener, pending()));
    url
}

#[tokio::test]
async fn an_invalid_bearer_token_is_an_error_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = settings(&directory);
    let credentials = Credentials::bearer(Secret::new("two\nlines"));
    settings.tool_servers.push(ToolServer { credentials, ..ToolServer::new("http://127.0.0.1:9") });
    let error = Runtime::start(settings).err().expect("it started").to_string();
    assert!(error.contains("bearer") && !error.contains("lines"), "{error}");
}

#[tokio::test]
async fn a_runtime_without_agents_does_not_start() {
    let directory = tempfile::tempdir().unwrap();
    let error = Runtime::start(Settings { agents: Vec::new(), ..settings(&directory) }).err();
    let error = error.expect("it started").to_string();
    assert!(error.contains("agent"), "{error}");
}

#[tokio::test]
async fn a_notification_whose_url_cannot_be_parsed_has_a_line_in_the_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let mut settings = settings(&directory);
    settings.tool_servers.push(ToolServer::new("http://[broken"));
    let runtime = Runtime::start(settings).unwrap();
    let url = serve(runtime).await;
    http::post(&format!("{url}/v1/threads"), &json!({"id": "t"})).await.expect(201);
    http::post(&format!("{url}/v1/threads/t/close"), &Value::Null).await.expect(202);
    let noted = async || {
        let lines = http::send("GET", &format!("{url}/v1/deliveries"), &[], b"").await.expect(200);
        let lines = lines["deliveries"].as_array().unwrap().clone();
        lines.into_iter().find(|line| line["kind"] == "notification" && line["thread_id"] == "t")
    };
    let line = until("a line in the delivery log", noted).await;
    assert_ne!(line["outcome"], "delivered", "{line}");
}
