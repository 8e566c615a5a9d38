//! The HTTP server: the callback endpoint for tools, the API for clients and the web interface.
//!
//! Handlers contain no rules about threads. A request becomes a message, and the outcome of applying it becomes the
//! response. Callback paths are capabilities and must never be logged.

mod admission;
mod api;
mod callback;
mod callback_auth;
mod consent;
mod deletion;
mod deliveries;
mod error;
mod figures;
mod guard;
mod imports;
mod json;
mod openapi;
mod principal;
mod query;
mod sign_in;
mod started;
mod stream;
mod tokens;
mod web;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware;
use axum::routing::{get, post};
use rap_io::body::{BodyError, ReceivedBody};
use serde::de::DeserializeOwned;

use crate::engine::Engine;
pub(crate) use admission::Admission;
use admission::Sender;
pub(crate) use callback_auth::CallbackRequirements;
pub(crate) use error::ErrorResponse;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let (client, open) = openapi::routers();
    let client = client.layer(middleware::from_fn_with_state(Arc::clone(&engine), guard::authenticate));
    let session = get(sign_in::get).post(sign_in::sign_in).delete(sign_in::sign_out);
    let open = match engine.settings.web_assets {
        Some(assets) => open.merge(web::router(assets)).route("/session", session),
        None => open,
    };
    let open = open
        .route("/consent/{server}", get(consent::by_state))
        .route("/consent/{server}/{token}", get(consent::by_token))
        .layer(middleware::from_fn_with_state(Arc::clone(&engine), guard::require_local_host));
    Router::new()
        .merge(client)
        .merge(open)
        .route("/callback/{token}", post(callback::callback))
        .route("/started/{server}/{path}", post(started::import))
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

/// Size up to which a body is parsed on the async worker, in bytes.
const PARSED_INLINE: usize = 128 * 1024;

/// Parses a body. A large one is parsed outside of the async workers, a few at a time, because that takes long and needs
/// a multiple of its size.
async fn parse_body<T: Send + 'static>(
    engine: &Engine,
    received: &ReceivedBody,
    parse: impl FnOnce(&[u8]) -> Result<T, ErrorResponse> + Send + 'static,
) -> Result<T, ErrorResponse> {
    if received.bytes.len() <= PARSED_INLINE {
        return parse(&received.bytes);
    }
    let _parser = engine.admission.parser().await;
    let bytes = received.bytes.clone();
    let parsed = engine.world.blocking.run(move || parse(&bytes)).await;
    parsed.unwrap_or_else(|| {
        let message = "the body cannot be parsed";
        Err(ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message))
    })
}

/// Reads a body. It counts against the memory of its sender until it is dropped.
async fn read_body(
    engine: &Engine,
    sender: Sender,
    headers: &HeaderMap,
    body: Body,
) -> Result<ReceivedBody, ErrorResponse> {
    engine.admission.read_body(sender, headers, body).await.map_err(|error| {
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
