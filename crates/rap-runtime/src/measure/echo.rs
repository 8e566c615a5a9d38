//! The echo tool: a plain HTTP server without a journal, in a separate process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use bytes::Bytes;
use rap_io::client::Client;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use url::Url;

use super::client::client;
use rap_io::bench::{BenchResult, parent_is_gone};

struct Echo {
    client: Client,
    url: String,
    state: Mutex<EchoState>,
}

#[derive(Default)]
struct EchoState {
    last: HashMap<String, (Instant, u64)>,
    /// Number and duration of each turn, in microseconds.
    trips: Vec<(u64, u64)>,
    held: Option<Value>,
    is_holding: bool,
    /// Base URLs of the nodes that results are sent to in turn. If there are none, they go to their callback URLs.
    nodes: Vec<String>,
    /// Number of results that were sent.
    sent: usize,
}

impl EchoState {
    /// Returns the URL that a result is sent to, as a load balancer would choose it.
    fn route(&mut self, callback_url: &str) -> Option<Url> {
        let mut url = Url::parse(callback_url).ok()?;
        if !self.nodes.is_empty() {
            self.sent += 1;
            let node = Url::parse(&self.nodes[self.sent % self.nodes.len()]).ok()?;
            url.set_port(node.port()).ok()?;
        }
        Some(url)
    }
}

pub async fn echo() -> BenchResult<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    eprintln!("listening on {url}");
    let echo = Arc::new(Echo { client: client(), url, state: Mutex::default() });
    let router = Router::new()
        .route("/.well-known/rap-toolset", get(toolset))
        .route("/invoke", post(invoke))
        .route("/empty", post(|_: Bytes| async {}))
        .route("/close_thread", post(|_: Bytes| async {}))
        .route("/trips", post(trips))
        .route("/hold", post(hold))
        .route("/spread", post(spread))
        .with_state(echo);
    tokio::select! {
        served = axum::serve(tap(listener), router) => served?,
        () = parent_is_gone() => {}
    }
    Ok(())
}

fn tap(listener: TcpListener) -> impl axum::serve::Listener<Addr = std::net::SocketAddr> {
    use axum::serve::ListenerExt;
    listener.tap_io(|stream| drop(stream.set_nodelay(true)))
}

async fn toolset(State(echo): State<Arc<Echo>>) -> String {
    let tool = json!({
        "name": "echo",
        "description": "Returns its text.",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    });
    json!({"name": "echo", "endpoint": format!("{}/invoke", echo.url), "tools": [tool]}).to_string()
}

async fn invoke(State(echo): State<Arc<Echo>>, body: Bytes) {
    let now = Instant::now();
    let Ok(invocation) = serde_json::from_slice::<Value>(&body) else { return };
    let thread = invocation["group_id"].as_str().unwrap_or("").to_owned();
    let result = json!({
        "type": "tool_result",
        "group_id": invocation["group_id"],
        "id": invocation["id"],
        "text": invocation["arguments"]["text"],
    });
    let url = {
        let mut state = echo.state.lock().expect("bug: no code panics under the lock");
        if state.is_holding {
            state.held = Some(json!({"callback_url": invocation["callback_url"], "result": result}));
            return;
        }
        let turn = match state.last.get(&thread).copied() {
            None => 1,
            Some((before, turn)) => {
                let took = now.duration_since(before).as_micros() as u64;
                state.trips.push((turn + 1, took));
                turn + 1
            }
        };
        state.last.insert(thread, (now, turn));
        state.route(invocation["callback_url"].as_str().unwrap_or(""))
    };
    tokio::spawn(async move {
        let Some(url) = url else { return };
        // There is no answer if the runtime has stopped.
        if let Ok(reply) = echo.client.post_json(&url, &[], result.to_string().into()).await
            && reply.status != 200
        {
            eprintln!("a callback was answered {}", reply.status);
        }
    });
}

/// Returns the round trips since the last request.
async fn trips(State(echo): State<Arc<Echo>>) -> String {
    let trips = std::mem::take(&mut echo.state.lock().expect("bug: no code panics under the lock").trips);
    json!(trips).to_string()
}

/// Stops answering calls. Returns the last unanswered call, or null.
async fn hold(State(echo): State<Arc<Echo>>) -> String {
    let mut state = echo.state.lock().expect("bug: no code panics under the lock");
    state.is_holding = true;
    json!(state.held).to_string()
}

/// Sets the nodes that results are sent to.
async fn spread(State(echo): State<Arc<Echo>>, body: Bytes) {
    let nodes = serde_json::from_slice(&body).unwrap_or_default();
    echo.state.lock().expect("bug: no code panics under the lock").nodes = nodes;
}
