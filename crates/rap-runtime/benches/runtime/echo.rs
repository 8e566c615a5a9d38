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

use crate::client::client;
use rap_testkit::bench::{BenchResult, parent_is_gone};

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
    {
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
    }
    tokio::spawn(async move {
        let Some(url) = invocation["callback_url"].as_str().and_then(|url| Url::parse(url).ok()) else {
            return;
        };
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
