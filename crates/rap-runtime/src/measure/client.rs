//! Client of the runtime.

use std::time::Duration;

use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde_json::{Value, json};
use url::Url;

use super::process::BenchProcess;
use rap_io::bench::BenchResult;

pub fn client() -> Client {
    Client::new(
        UrlPolicy::Loopback,
        ClientLimits { idle_per_host: 256, drain_bytes: 1 << 30, ..ClientLimits::default() },
    )
}

pub async fn post_to(client: &Client, url: String, body: Value) -> BenchResult<Value> {
    let reply = client.post_json(&Url::parse(&url)?, &[], body.to_string().into()).await?;
    if reply.status >= 300 {
        return Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)).into());
    }
    Ok(serde_json::from_slice(&reply.body).unwrap_or(Value::Null))
}

pub async fn get_from(client: &Client, url: String) -> BenchResult<Value> {
    let reply = client.get(&Url::parse(&url)?, &[], 1 << 30).await?;
    if reply.status >= 300 {
        return Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)).into());
    }
    Ok(serde_json::from_slice(&reply.body)?)
}

pub async fn open_thread(
    client: &Client,
    runtime: &BenchProcess,
    id: &str,
    message: &str,
) -> BenchResult<()> {
    let body = json!({"id": id, "message": message});
    post_to(client, format!("{}/v1/threads", runtime.url), body).await?;
    Ok(())
}

/// Polls a thread until `is` returns true for it.
pub async fn until(
    client: &Client,
    runtime: &BenchProcess,
    id: &str,
    is: impl Fn(&Value) -> bool,
) -> BenchResult<Value> {
    loop {
        let thread = get_from(client, format!("{}/v1/threads/{id}", runtime.url)).await?;
        if is(&thread) {
            return Ok(thread);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Makes the tool stop answering calls. Waits for the next call and returns it.
pub async fn held_call(client: &Client, tool: &BenchProcess) -> BenchResult<Value> {
    loop {
        let held = post_to(client, format!("{}/hold", tool.url), json!({})).await?;
        if !held.is_null() {
            return Ok(held);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
