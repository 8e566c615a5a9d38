//! Who talks to the runtime.

use std::time::Duration;

use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde_json::{Value, json};
use url::Url;

use crate::bench::Outcome;
use crate::process::Process;

pub fn client() -> Client {
    Client::new(
        UrlPolicy::Local,
        ClientLimits { idle_per_host: 256, drain_bytes: 1 << 30, ..ClientLimits::default() },
    )
}

pub async fn post_to(client: &Client, url: String, body: Value) -> Outcome<Value> {
    let reply = client.post_json(&Url::parse(&url)?, &[], body.to_string().into()).await?;
    if reply.status >= 300 {
        return Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)).into());
    }
    Ok(serde_json::from_slice(&reply.body).unwrap_or(Value::Null))
}

pub async fn get_from(client: &Client, url: String) -> Outcome<Value> {
    let reply = client.get(&Url::parse(&url)?, &[], 1 << 30).await?;
    if reply.status >= 300 {
        return Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)).into());
    }
    Ok(serde_json::from_slice(&reply.body)?)
}

pub async fn open_thread(client: &Client, runtime: &Process, id: &str, message: &str) -> Outcome<()> {
    let body = json!({"id": id, "message": message});
    post_to(client, format!("{}/v1/threads", runtime.url), body).await?;
    Ok(())
}

/// Looks until a thread is as it should be.
pub async fn until(
    client: &Client,
    runtime: &Process,
    id: &str,
    is: impl Fn(&Value) -> bool,
) -> Outcome<Value> {
    loop {
        let thread = get_from(client, format!("{}/v1/threads/{id}", runtime.url)).await?;
        if is(&thread) {
            return Ok(thread);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// From now on the tool answers nothing; gives a call that it was sent, as soon as there is one.
pub async fn held_call(client: &Client, tool: &Process) -> Outcome<Value> {
    loop {
        let held = post_to(client, format!("{}/hold", tool.url), json!({})).await?;
        if !held.is_null() {
            return Ok(held);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
