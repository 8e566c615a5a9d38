//! Checks of a request before its handler runs, and the headers of every response.

use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rap_api::TokenScope;
use rap_io::client::is_outgoing;
use rap_io::serve::is_loopback;
use rap_protocol::ThreadId;

use super::ErrorResponse;
use super::admission::HoldingBody;
use super::principal::Principal;
use crate::engine::Engine;
use crate::settings::Settings;
use crate::store::transfer::Record;
use crate::store::{Error, Visibility};

/// Requires a valid bearer token. If no tokens are configured, clients on this machine need none, except for web pages
/// of other sites and for requests that a tool made a runtime or a tool server send.
pub(super) async fn authenticate(
    State(engine): State<Arc<Engine>>,
    request: Request,
    next: Next,
) -> Response {
    match Principal::of(&engine, request.method(), request.headers()).await {
        Ok(principal) => serve(&engine, principal, request, next).await,
        Err(refused) => refused.into_response(),
    }
}

/// Requires that the client's token permits requests of this scope.
pub(super) async fn require_scope(needed: TokenScope, request: Request, next: Next) -> Response {
    let scope = request.extensions().get::<Principal>().map(|principal| principal.scope);
    if scope.is_some_and(|scope| scope.permits(needed)) {
        return next.run(request).await;
    }
    ErrorResponse::insufficient_scope(needed).into_response()
}

/// Serves a request within the client's share of the server's resources.
async fn serve(engine: &Engine, principal: Principal, mut request: Request, next: Next) -> Response {
    engine.note_activity();
    let client = principal.client;
    if !engine.admission.rate(client) {
        let message = "more requests of this client than limits.requests_per_second allows; wait a second";
        return ErrorResponse::too_many(message).into_response();
    }
    let Some(_share) = engine.admission.request(client) else {
        let message = "too many requests of this client at once; wait for some of them to end";
        return ErrorResponse::too_many(message).into_response();
    };
    let visible = principal.visible.clone();
    request.extensions_mut().insert(principal);
    let reader = match request.method() {
        &Method::GET => Some(engine.admission.reader(client).await),
        _ => None,
    };
    let thread = thread_in(request.uri().path());
    let mut response = next.run(request).await;
    if response.status() == StatusCode::NOT_FOUND
        && let Some(thread) = thread
        && is_moving(engine, &thread, &visible).await.unwrap_or(false)
    {
        response = ErrorResponse::from(Error::Moving).into_response();
    }
    let (head, body) = response.into_parts();
    drop(reader);
    // An event stream has no known size, and counts its own bytes.
    let size = body.size_hint().exact().unwrap_or(0);
    match engine.admission.response(client, usize::try_from(size).unwrap_or(usize::MAX)) {
        Ok(None) => Response::from_parts(head, body),
        Ok(Some(memory)) => Response::from_parts(head, HoldingBody::wrap(body, memory)),
        Err(no_memory) => ErrorResponse::from(no_memory).into_response(),
    }
}

/// Returns true if a client sees the thread and it is being moved.
async fn is_moving(engine: &Engine, thread: &ThreadId, visible: &Visibility) -> Result<bool, Error> {
    if *visible == Visibility::All {
        return Ok(engine.store.parcel_of(thread).await?.is_some());
    }
    let root = engine.store.parcel_root(thread).await?;
    let root = root.and_then(|record| Record::read(&record).ok());
    Ok(matches!(root, Some(Record::Thread(root)) if visible.includes(root.user_id.as_ref())))
}

/// Returns the thread that a path names.
fn thread_in(path: &str) -> Option<ThreadId> {
    let id = path.strip_prefix("/v1/threads/")?;
    ThreadId::new(id.split('/').next()?).ok()
}

/// Requires a `Host` header that names this machine or the public URL, if only clients on this machine are served. The
/// paths behind it need no token, and a web page could read them through a DNS name that resolves to loopback.
pub(super) async fn require_local_host(
    State(engine): State<Arc<Engine>>,
    request: Request,
    next: Next,
) -> Response {
    if engine.settings.is_local_only() && !is_local(&engine.settings, host(request.headers())) {
        let message = "this server serves only its own machine; use its address or server.public_url";
        return not_local(message).into_response();
    }
    next.run(request).await
}

/// Sets the headers that every response has.
pub(super) async fn set_headers(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let is_api = path.starts_with("/v1/") || path == "/session";
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if is_api {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

/// Returns the reason to refuse a request without a token while none are configured.
pub(super) fn refuse_without_tokens(settings: &Settings, headers: &HeaderMap) -> Option<ErrorResponse> {
    let host = host(headers);
    if !is_local(settings, host) {
        let message =
            "only clients on this machine are served while no tokens are configured; set server.tokens";
        return Some(not_local(message));
    }
    if is_cross_site(headers, host) {
        let message = "requests from pages of other sites are refused while no tokens are configured; set server.tokens";
        return Some(ErrorResponse::new(StatusCode::FORBIDDEN, "foreign_origin", message));
    }
    if is_outgoing(headers) {
        let message = "requests that a runtime or a tool server sends for others are refused while no tokens are \
                       configured; set server.tokens";
        return Some(ErrorResponse::new(StatusCode::FORBIDDEN, "outgoing_request", message));
    }
    None
}

fn not_local(message: &str) -> ErrorResponse {
    ErrorResponse::new(StatusCode::MISDIRECTED_REQUEST, "not_local", message)
}

pub(super) fn host(headers: &HeaderMap) -> &str {
    headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("")
}

/// Returns true if a `Host` header names this machine or the public URL.
fn is_local(settings: &Settings, host: &str) -> bool {
    is_loopback(host) || host.eq_ignore_ascii_case(public_authority(settings))
}

fn public_authority(settings: &Settings) -> &str {
    settings.public_url.split('/').nth(2).unwrap_or("")
}

/// Returns true unless the `Origin` header names a page of another site than this server and its public URL.
pub(super) fn is_own_origin(settings: &Settings, headers: &HeaderMap) -> bool {
    !is_cross_site(headers, host(headers)) || !is_cross_site(headers, public_authority(settings))
}

/// Returns true if the `Origin` header names another site. A preflight alone does not protect the API, because a
/// browser sends a POST without a body directly.
fn is_cross_site(headers: &HeaderMap, host: &str) -> bool {
    headers.get_all(header::ORIGIN).iter().any(|origin| {
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        !authority.is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host))
    })
}
