//! The endpoint of `rap mcp serve` for MCP clients.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;

use rap_testkit::programs;
use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{Stage, TOOL};
use crate::wire::{self, JSON};

const TOPIC: &str = "mcp";
const CLIENT: &str = "s3cret-token-of-mcp-clients";

pub(super) fn all() -> Vec<Attempt> {
    vec![attempt!(TOPIC, "MCP request without permission", "it is served", requests)]
}

/// A process that is killed on drop.
struct Server {
    child: Child,
    url: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Starts the endpoint for the tools of the ordinary tool server.
fn start(toolset: &str) -> Server {
    let mut command = programs::rap(&["mcp", "serve", "--listen", "127.0.0.1:0", "--toolset", toolset]);
    command.envs([("RAP_TOOL_BEARER", TOOL), ("RAP_MCP_TOKEN", CLIENT)]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.by_ref().find(|line| line.starts_with("MCP at ")).expect("it did not start");
    // The log must be read, or the server stops when the pipe is full.
    std::thread::spawn(move || lines.for_each(drop));
    Server { child, url: line.trim_start_matches("MCP at ").to_owned() }
}

fn initialize() -> Value {
    let params = json!({
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "attack", "version": "1"},
    });
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
}

async fn requests(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    stage.keep_secret(CLIENT);
    let toolset = stage.kitchen.process().url.clone();
    let server = tokio::task::spawn_blocking(move || start(&toolset)).await.unwrap();
    let (bearer, body) = (format!("Bearer {CLIENT}"), initialize().to_string());
    let send = async |headers: &[(&str, &str)], body: &[u8]| {
        let accept = [("accept", "application/json, text/event-stream"), JSON];
        wire::status("POST", &server.url, &[&accept[..], headers].concat(), body).await
    };
    let own = ("authorization", bearer.as_str());
    let status = send(&[own], body.as_bytes()).await;
    tries.add(format!("an ordinary client was answered {status}"), status != 200);
    let port = wire::port(&server.url);
    for headers in [
        vec![],
        vec![("authorization", "Bearer ")],
        vec![("authorization", "Bearer s3cret-token-of-mcp-client")],
        vec![("authorization", CLIENT)],
        vec![("authorization", "Basic czNjcmV0")],
        vec![own, ("origin", "https://evil.example")],
        vec![own, ("origin", "null")],
        vec![own, ("origin", "http://127.0.0.1:1")],
        vec![own, ("host", "evil.example")],
        vec![own, ("host", &*format!("evil.example:{port}"))],
        vec![own, ("mcp-session-id", "of-somebody-else")],
    ] {
        let status = send(&headers, body.as_bytes()).await;
        tries.add(format!("{headers:?} was answered {status}"), wire::is_success(status));
    }
    for (what, body) in [
        ("garbage", b"garbage".to_vec()),
        ("deep nesting", vec![b'['; 1_000_000]),
        ("20 MB", vec![b' '; 20_000_000]),
        (
            "an unknown method",
            json!({"jsonrpc": "2.0", "id": 1, "method": "shutdown"}).to_string().into_bytes(),
        ),
    ] {
        let status = send(&[own], &body).await;
        tries.add(format!("{what} was answered {status}"), wire::is_success(status));
    }
    let status = send(&[own], body.as_bytes()).await;
    tries.add(format!("afterwards, an ordinary client was answered {status}"), status != 200);
    tries
}
