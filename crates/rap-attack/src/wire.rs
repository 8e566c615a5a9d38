//! Requests of attackers and bystanders: nothing panics, and every wait is bounded.

use std::time::Duration;

use rap_testkit::http::{self, Response};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Time within which any request is answered or its connection closed.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
pub(crate) const JSON: (&str, &str) = ("content-type", "application/json");

/// Status of an answer. 0 if the connection was closed or no answer came.
pub(crate) async fn status(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> u16 {
    answer(method, url, headers, body).await.map_or(0, |answer| answer.status)
}

pub(crate) async fn answer(
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Option<Response> {
    tokio::time::timeout(ANSWERED_WITHIN, http::attempt(method, url, headers, body)).await.ok()?.ok()
}

/// POSTs JSON.
pub(crate) async fn post(url: &str, token: Option<&str>, body: &Value) -> Option<Response> {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut headers: Vec<(&str, &str)> =
        bearer.iter().map(|value| ("authorization", value.as_str())).collect();
    headers.push(JSON);
    answer("POST", url, &headers, body.to_string().as_bytes()).await
}

pub(crate) async fn get(url: &str, token: Option<&str>) -> Option<Response> {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let headers: Vec<(&str, &str)> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
    answer("GET", url, &headers, b"").await
}

pub(crate) fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

/// Host and port of a URL.
pub(crate) fn authority(url: &str) -> &str {
    let rest = url.trim_start_matches("http://");
    rest.split('/').next().unwrap_or(rest)
}

pub(crate) fn port(url: &str) -> &str {
    authority(url).rsplit(':').next().unwrap_or_default()
}

/// Sends raw bytes. Returns all that comes back until the server closes the connection or is silent for a while.
pub(crate) async fn exchange(url: &str, request: &[u8], silence: Duration) -> String {
    let mut received = Vec::new();
    let Ok(mut stream) = TcpStream::connect(authority(url)).await else { return String::new() };
    // A server that refuses early may not read all of it.
    stream.write_all(request).await.ok();
    let mut buffer = [0; 16 * 1024];
    while let Ok(Ok(count @ 1..)) = tokio::time::timeout(silence, stream.read(&mut buffer)).await {
        received.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8_lossy(&received).into_owned()
}

/// Opens connections that send `request` and never read. Returns those that could be opened.
pub(crate) async fn never_reading(url: &str, count: usize, request: &str) -> Vec<TcpStream> {
    /// Connections that are opened at the same time.
    const AT_ONCE: usize = 64;
    let (mut opening, mut opened) = (JoinSet::new(), Vec::new());
    for _ in 0..count {
        if opening.len() >= AT_ONCE {
            opened.extend(opening.join_next().await.into_iter().flatten().flatten());
        }
        let (address, request) = (authority(url).to_owned(), request.to_owned());
        opening.spawn(async move {
            let connecting = tokio::time::timeout(ANSWERED_WITHIN, TcpStream::connect(address)).await;
            let mut stream = connecting.ok()?.ok()?;
            // Closing sends a reset, so that no port stays occupied.
            stream.set_zero_linger().ok();
            stream.write_all(request.as_bytes()).await.ok()?;
            Some(stream)
        });
    }
    while let Some(stream) = opening.join_next().await {
        opened.extend(stream.ok().flatten());
    }
    opened
}

/// Status line of what a connection has received so far, without waiting for long.
pub(crate) async fn first_status(stream: &mut TcpStream, within: Duration) -> u16 {
    let mut buffer = [0; 16];
    match tokio::time::timeout(within, stream.read_exact(&mut buffer)).await {
        Ok(Ok(_)) => {
            String::from_utf8_lossy(&buffer).split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
        }
        _ => 0,
    }
}
