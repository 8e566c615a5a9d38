//! The HTTP server: the callback endpoint for tools and the API for clients.
//!
//! Handlers contain no rules about threads. A request becomes a message, and the outcome of applying it becomes the
//! response. Callback paths are capabilities and must never be logged.

mod api;
mod callback;
mod deliveries;
mod error;
mod json;
mod openapi;
mod query;
mod stream;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use rap_io::serve::is_loopback;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::engine::Engine;
pub(crate) use error::ErrorResponse;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let (client, open) = openapi::routers();
    let client = client.layer(middleware::from_fn_with_state(Arc::clone(&engine), authenticate));
    Router::new()
        .merge(client)
        .merge(open)
        .route("/callback/{token}", post(callback::callback))
        .fallback(async || ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such path"))
        .method_not_allowed_fallback(async || {
            ErrorResponse::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path does not support the request's method",
            )
        })
        .with_state(engine)
}

/// Requires a valid bearer token. If no tokens are configured, every client on this machine is trusted. A web page
/// could abuse that through a DNS name that resolves to loopback, so the `Host` header has to be local or the public
/// URL.
async fn authenticate(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    let tokens = &engine.settings.tokens;
    let headers = request.headers();
    if tokens.is_empty() {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
        let public = engine.settings.public_url.split('/').nth(2).unwrap_or("");
        if is_loopback(host) || host.eq_ignore_ascii_case(public) {
            if is_cross_site(headers, host) {
                let message = "requests from pages of other sites are refused while no tokens are configured; set server.tokens";
                return ErrorResponse::new(StatusCode::FORBIDDEN, "foreign_origin", message).into_response();
            }
            return next.run(request).await;
        }
        let message =
            "only clients on this machine are served while no tokens are configured; set server.tokens";
        return ErrorResponse::new(StatusCode::MISDIRECTED_REQUEST, "not_local", message).into_response();
    }
    let given = bearer(headers).map(Sha256::digest);
    let known = given.is_some_and(|given| {
        // All digests have the same length and all are compared, so that the time does not depend on the token.
        tokens.iter().fold(false, |known, token| {
            known | bool::from(Sha256::digest(token.expose()).as_slice().ct_eq(given.as_slice()))
        })
    });
    if known { next.run(request).await } else { ErrorResponse::unauthorised().into_response() }
}

/// Returns true if the `Origin` header names another site. A preflight alone does not protect the API, because a
/// browser sends a POST without a body directly.
fn is_cross_site(headers: &HeaderMap, host: &str) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| {
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        !authority.is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host))
    })
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// Path parameters. Malformed parameters are 404.
struct PathParams<T>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathParams<T> {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ErrorResponse> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(found)) => Ok(PathParams(found)),
            Err(_) => Err(ErrorResponse::new(StatusCode::NOT_FOUND, "not_found", "no such path")),
        }
    }
}

/// Reads a JSON body of at most `limit` bytes.
async fn body(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ErrorResponse> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let message = "send JSON, with the header Content-Type: application/json";
        return Err(ErrorResponse::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message));
    }
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.downcast_ref::<LengthLimitError>().is_some() => {
            let message = format!("the body has more than {limit} bytes");
            Err(ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message))
        }
        Err(_) => Err(ErrorResponse::new(StatusCode::BAD_REQUEST, "incomplete", "the body is incomplete")),
    }
}
