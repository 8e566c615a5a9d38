//! MCP servers as tool servers.

mod bad_server;
mod conformance;
mod over_http;
mod packages;

use std::path::Path;
use std::process::Child;

use rap_testkit::{Rap, Setup, until};
use serde_json::{Value, json};

/// The server that misbehaves on demand.
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/mcp/server.py");

/// A child process that ends with its test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Cancels the call that a thread waits for.
async fn cancel(rap: &Rap, thread: &str) {
    let id = until("an open call", async || {
        let waiting = rap.get(&format!("/v1/threads/{thread}")).await.expect(200)["waiting_on"].clone();
        waiting[0]["call_id"].as_str().map(ToOwned::to_owned)
    })
    .await;
    rap.post(&format!("/v1/threads/{thread}/calls/{id}/cancel"), &json!({})).await.expect(202);
}

/// Returns a setup with that server, which writes notes to a directory.
fn with_bad_server(notes: &Path, lines: &str) -> Setup {
    with_bad_command(notes, lines, &json!(["python3", SERVER]))
}

fn with_bad_command(notes: &Path, lines: &str, command: &Value) -> Setup {
    let notes = notes.to_str().unwrap();
    Setup::new().mcp_lines(&format!(
        "name = \"bad\"\ncommand = {command}\n{lines}\nenv = {{ MCP_NOTES = {notes:?}, MCP_SECRET = \"env:MY_SECRET\", \
         MCP_PLAIN = \"two words\" }}"
    )).variable("MY_SECRET", "hush")
}

/// Waits until the tools of a server are known, and returns the server as `/v1/tools` shows it.
async fn server(rap: &Rap, url: &str) -> Value {
    until(url, async || {
        let servers = rap.get("/v1/tools").await.expect(200)["servers"].clone();
        let found = servers.as_array().unwrap().iter().find(|server| server["url"] == url).cloned();
        found.filter(|server| server["tools"].as_array().is_some_and(|tools| !tools.is_empty()))
    })
    .await
}

/// Calls a tool in a thread and returns the content of the result.
async fn call(rap: &Rap, thread: &str, tool: &str, arguments: Value) -> String {
    let before = results(rap, thread).await.len();
    rap.say(thread, &format!("call {tool} {arguments}")).await;
    until(&format!("the result of {tool}"), async || results(rap, thread).await.get(before).cloned()).await
}

async fn results(rap: &Rap, thread: &str) -> Vec<String> {
    let text = |entry: &Value| match &entry["content"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    rap.history(thread).await.iter().filter(|entry| entry["kind"] == "result").map(text).collect()
}

/// Opens a thread whose session has the tools.
async fn open(rap: &Rap) -> String {
    server(rap, "mcp:bad").await;
    let thread = rap.open("hello").await;
    rap.until_idle(&thread).await;
    thread
}

async fn until_noted(notes: &Path, name: &str) -> String {
    until(name, async || std::fs::read_to_string(notes.join(name)).ok()).await
}

/// Uses a server that knows only the protocol version without handshake, and whose list of tools changes.
async fn uses_modern_server(rap: &Rap, notes: &Path) {
    let thread = open(rap).await;
    assert_eq!(call(rap, &thread, "echo", json!({"text": "hi"})).await, "hi");
    assert_eq!(call(rap, &thread, "fail", json!({})).await, "Error: the disk is full");
    until_noted(notes, "listening").await;
    assert_eq!(call(rap, &thread, "grow", json!({})).await, "grown");
    until("the new tool in a new session", async || {
        let new = rap.open("call grown {}").await;
        until("a result", async || results(rap, &new).await.first().cloned()).await == "big"
    })
    .await;
}
