//! State of sessions that other tool servers send to those that the program around the runtime starts.
//!
//! Such a server listens on a port of this machine, which another machine does not reach and which changes with each start.
//! The runtime passes the pages on without reading them. They are encrypted with the migration key of the tool server, which
//! accepts no others. Senders prove in a header that they know the key, before anything of the body is read. Without that,
//! all paths look as if they did not exist, so that nobody learns the names of tool servers.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use rap_io::client::{Client, ClientLimits};
use rap_io::moving::{PROOF, is_proven};
use rap_io::secret_box::Key;
use rap_protocol::{UrlPolicy, UrlRules};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::admission::Sender;
use super::{ErrorResponse, PathParams, read_body};
use crate::engine::Engine;
use crate::tool_server::ToolServer;

/// Paths of a tool server that take state of sessions.
const PATHS: [&str; 2] = ["/import_calls", "/import_files"];
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
    let path = format!("/{path}");
    let takes = |found: &&ToolServer| {
        let is_sender = |key: &Key| is_proven(key, &path, &headers, engine.now());
        found.started.is_some() && found.url == server && found.migration_key.as_ref().is_some_and(is_sender)
    };
    let Some(server) = servers.iter().find(takes).filter(|_| PATHS.contains(&path.as_str())) else {
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such path"));
    };
    let unavailable = |why: String| ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", why);
    if !engine.hosts(&server.url) {
        return Err(unavailable("the process of this tool server runs on another node".into()));
    }
    let url = server.at(&path).map_err(unavailable)?;
    let _permit = PASSED_ON.try_acquire().map_err(|_| unavailable("too many pages at once".into()))?;
    let received = read_body(&engine, Sender::Runtime, &headers, body).await?;
    let limits = ClientLimits { total: WITHIN, ..ClientLimits::default() };
    let new = || Client::new(UrlRules::from(UrlPolicy::Loopback), limits);
    let proof: Vec<_> = headers.get(PROOF).map(|proof| (PROOF, proof.clone())).into_iter().collect();
    let client = engine.started_client.get_or_init(new);
    let reply = client.post_json(&url, &proof, received.bytes.clone()).await;
    let reply = reply.map_err(|error| unavailable(format!("the tool server does not answer: {error}")))?;
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::BAD_GATEWAY);
    // Nothing but JSON of a tool server is shown at the origin of the runtime.
    Ok((status, Json(serde_json::from_slice(&reply.body).unwrap_or(Value::Null))).into_response())
}
