//! The echo tool: plain, without a journal, in a process of its own.

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

use crate::bench::Outcome;
use crate::client::client;
use crate::process::parent_is_gone;

struct Echo {
    client: Client,
    url: String,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    last: HashMap<String, (Instant, u64)>,
    /// The turn and how long it took, in microseconds.
    trips: Vec<(u64, u64)>,
    held: Option<Value>,
    holds: bool,
}

pub async fn echo() -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("{url}");
    let echo = Arc::new(Echo { client: client(), url, seen: Mutex::default() });
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
        "description": "Says back what it is told.",
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
        let mut seen = echo.seen.lock().expect("bug: nobody panics under the lock");
        if seen.holds {
            seen.held = Some(json!({"callback_url": invocation["callback_url"], "result": result}));
            return;
        }
        let turn = match seen.last.get(&thread).copied() {
            None => 1,
            Some((before, turn)) => {
                let took = now.duration_since(before).as_micros() as u64;
                seen.trips.push((turn + 1, took));
                turn + 1
            }
        };
        seen.last.insert(thread, (now, turn));
    }
    tokio::spawn(async move {
        let Some(url) = invocation["callback_url"].as_str().and_then(|url| Url::parse(url).ok()) else {
            return;
        };
        // A runtime that was stopped does not answer.
        if let Ok(reply) = echo.client.post_json(&url, &[], result.to_string().into()).await
            && reply.status != 200
        {
            eprintln!("a callback was answered {}", reply.status);
        }
    });
}

/// What was seen since the last time.
async fn trips(State(echo): State<Arc<Echo>>) -> String {
    let trips = std::mem::take(&mut echo.seen.lock().expect("bug: nobody panics under the lock").trips);
    json!(trips).to_string()
}

/// From now on nothing is answered; gives the last call that was not.
async fn hold(State(echo): State<Arc<Echo>>) -> String {
    let mut seen = echo.seen.lock().expect("bug: nobody panics under the lock");
    seen.holds = true;
    json!(seen.held).to_string()
}
