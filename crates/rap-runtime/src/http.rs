//! The HTTP server: the callback endpoint for tools and the API for clients.
//!
//! Handlers contain no rules about threads. A request becomes a message, and the outcome of applying it becomes the
//! response. Callback paths are capabilities and must never be logged.

mod admission;
mod api;
mod callback;
mod deliveries;
mod error;
mod guard;
mod json;
mod openapi;
mod principal;
mod query;
mod stream;
mod tokens;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware;
use axum::routing::post;
use rap_io::body::{BodyError, ReceivedBody};
use serde::de::DeserializeOwned;

use crate::engine::Engine;
pub(crate) use admission::Admission;
pub(crate) use error::ErrorResponse;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let (client, open) = openapi::routers();
    let client = client.layer(middleware::from_fn_with_state(Arc::clone(&engine), guard::authenticate));
    let open = open.layer(middleware::from_fn_with_state(Arc::clone(&engine), guard::require_local_host));
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
        .layer(middleware::from_fn(guard::set_headers))
        .with_state(engine)
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

/// Reads a JSON body.
async fn read_body(engine: &Engine, headers: &HeaderMap, body: Body) -> Result<ReceivedBody, ErrorResponse> {
    let admission = &engine.admission;
    admission.request_memory.read_json(headers, body, admission.body_limits).await.map_err(|error| {
        let (status, code) = match error {
            BodyError::NotJson => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json"),
            BodyError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            BodyError::TooSlow => (StatusCode::REQUEST_TIMEOUT, "too_slow"),
            BodyError::CutOff => (StatusCode::BAD_REQUEST, "incomplete"),
            BodyError::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
        };
        ErrorResponse::new(status, code, error.to_string())
    })
}
