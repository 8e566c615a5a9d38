//! State of sessions that other tool servers send to those that the program around the runtime starts.
//!
//! Such a server listens on a port of this machine, which another machine does not reach and which changes with each start.
//! The runtime passes the pages on without reading them. They are encrypted with a key that only the tool servers have, and
//! a server accepts no others.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{UrlPolicy, UrlRules};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::admission::Sender;
use super::{ErrorResponse, PathParams, read_body};
use crate::engine::Engine;

/// Paths of a tool server that take state of sessions.
const PATHS: [&str; 2] = ["import_calls", "import_files"];
/// Time for a tool server to answer.
const WITHIN: Duration = Duration::from_secs(60);
/// Maximum number of pages that are passed on at once.
const AT_ONCE: usize = 8;

static PASSED_ON: Semaphore = Semaphore::const_new(AT_ONCE);

/// Passes a page on to a tool server that the program around the runtime starts.
pub(super) async fn import(
    State(engine): State<Arc<Engine>>,
    PathParams((server, path)): PathParams<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let servers = &engine.settings.tool_servers;
    let found = servers.iter().find(|found| found.started.is_some() && found.url == server);
    let Some(server) = found.filter(|_| PATHS.contains(&path.as_str())) else {
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such path"));
    };
    let unavailable = |why: String| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", why);
    if !engine.hosts(&server.url) {
        return Err(unavailable("the process of this tool server runs on another node".into()));
    }
    let url = server.at(&format!("/{path}")).map_err(unavailable)?;
    let _permit = PASSED_ON.try_acquire().map_err(|_| unavailable("too many pages at once".into()))?;
    let received = read_body(&engine, Sender::Runtime, &headers, body).await?;
    let limits = ClientLimits { total: WITHIN, ..ClientLimits::default() };
    let new = || Client::new(UrlRules::from(UrlPolicy::Loopback), limits);
    let reply = engine.started_client.get_or_init(new).post_json(&url, &[], received.bytes.clone()).await;
    let reply = reply.map_err(|error| unavailable(format!("the tool server does not answer: {error}")))?;
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::BAD_GATEWAY);
    // Nothing but JSON of a tool server is shown at the origin of the runtime.
    Ok((status, Json(serde_json::from_slice(&reply.body).unwrap_or(Value::Null))).into_response())
}
