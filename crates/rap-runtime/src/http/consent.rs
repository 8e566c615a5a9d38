//! Redirects of browsers after a sign-in at a tool server that the program around the runtime starts.
//!
//! Such a server listens on a port of this machine, which is another one after each start. Browsers are therefore sent
//! to the runtime, which passes the query on. It answers with a page of its own: nothing that a tool server answers is
//! shown at the origin of the runtime. The query contains secrets and must never be logged.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{UrlPolicy, UrlRules};

use super::PathParams;
use crate::engine::Engine;

/// Path of a tool server for redirects after a sign-in.
const PATH: &str = "/consent";
/// Maximum length of a query, and of a token in the path, in bytes.
const QUERY_BYTES: usize = 16 * 1024;
const TOKEN_BYTES: usize = 256;
/// Maximum size of the answer of a tool server, in bytes. It is not shown.
const ANSWER_BYTES: usize = 64 * 1024;
/// Time for a tool server to answer.
const WITHIN: Duration = Duration::from_secs(10);

/// Receives a redirect whose `state` names the call.
pub(super) async fn by_state(
    State(engine): State<Arc<Engine>>,
    PathParams(server): PathParams<String>,
    RawQuery(query): RawQuery,
) -> Response {
    pass_on(&engine, &server, "", query).await
}

/// Receives a redirect whose path names the call.
pub(super) async fn by_token(
    State(engine): State<Arc<Engine>>,
    PathParams((server, token)): PathParams<(String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    if token.len() > TOKEN_BYTES || !token.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return unknown();
    }
    pass_on(&engine, &server, &format!("/{token}"), query).await
}

async fn pass_on(engine: &Engine, server: &str, token: &str, query: Option<String>) -> Response {
    let servers = &engine.settings.tool_servers;
    let found = servers.iter().find(|found| found.started.is_some() && found.url == server);
    let (Some(server), query) = (found, query.unwrap_or_default()) else { return unknown() };
    if query.len() > QUERY_BYTES {
        return page(StatusCode::URI_TOO_LONG, "The address of this page is too long.");
    }
    let share = engine.admission.consent(&server.url);
    let (Ok(url), Some(_share)) = (server.at(&format!("{PATH}{token}?{query}")), share) else {
        return unavailable();
    };
    let limits = ClientLimits { total: WITHIN, ..ClientLimits::default() };
    // A new client may read the root certificates of the system, so there is only one.
    let new = || Client::new(UrlRules::from(UrlPolicy::Loopback), limits);
    match engine
        .consent_client
        .get_or_init(new)
        .get(&url, &[], ANSWER_BYTES)
        .await
        .map(|answer| answer.status)
    {
        Ok(200) => page(StatusCode::OK, "Thank you. You can close this page."),
        Ok(404) => unknown(),
        _ => unavailable(),
    }
}

fn unknown() -> Response {
    page(StatusCode::NOT_FOUND, "This sign-in is unknown, or it has ended.")
}

fn unavailable() -> Response {
    page(StatusCode::SERVICE_UNAVAILABLE, "Something went wrong. Please reload this page in a moment.")
}

fn page(status: StatusCode, text: &str) -> Response {
    let page = format!("<!doctype html><meta charset=utf-8><title>{text}</title><p>{text}</p>");
    let headers = [
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    ];
    (status, headers, Html(page)).into_response()
}
