//! The runtime's HTTP side: the callback endpoint for tools, the API for clients.
//!
//! Nothing here decides anything about a thread: a request becomes a message, and what the store makes of it becomes
//! an answer. Paths of callbacks are capabilities: they are never logged.

mod api;
mod callback;
mod deliveries;
mod json;
mod openapi;
mod query;
mod refused;
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
pub(crate) use refused::Refused;

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let (client, open) = openapi::routers();
    let client = client.layer(middleware::from_fn_with_state(Arc::clone(&engine), known_client));
    Router::new()
        .merge(client)
        .merge(open)
        .route("/callback/{token}", post(callback::callback))
        .fallback(async || Refused::new(StatusCode::NOT_FOUND, "not_found", "there is nothing here"))
        .method_not_allowed_fallback(async || {
            Refused::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path takes another method",
            )
        })
        .with_state(engine)
}

/// Clients show a token. Without tokens, being on this machine is the credential, and a page in a browser here could
/// borrow it by pointing a name of its own to loopback; the `Host` header gives it away.
async fn known_client(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    let tokens = &engine.settings.tokens;
    let headers = request.headers();
    if tokens.is_empty() {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
        let public = engine.settings.public_url.split('/').nth(2).unwrap_or("");
        if is_loopback(host) || host.eq_ignore_ascii_case(public) {
            if is_of_another_site(headers, host) {
                let message = "without tokens, the pages of other sites are not served; set server.tokens";
                return Refused::new(StatusCode::FORBIDDEN, "foreign_origin", message).into_response();
            }
            return next.run(request).await;
        }
        let message = "without tokens, clients on this machine alone are served; set server.tokens";
        return Refused::new(StatusCode::MISDIRECTED_REQUEST, "not_local", message).into_response();
    }
    let given = bearer(headers).map(Sha256::digest);
    let known = given.is_some_and(|given| {
        // Digests have one length, and all of them are compared.
        tokens.iter().fold(false, |known, token| {
            known | bool::from(Sha256::digest(token.expose()).as_slice().ct_eq(given.as_slice()))
        })
    });
    if known { next.run(request).await } else { Refused::unauthorised().into_response() }
}

/// A browser says whose page sends a request. Not all of them need a preflight: a POST without a body does not.
fn is_of_another_site(headers: &HeaderMap, host: &str) -> bool {
    headers.get(header::ORIGIN).is_some_and(|origin| {
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        !authority.is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host))
    })
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// What stands in the path. What is no text there names nothing.
struct InPath<T>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for InPath<T> {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(found)) => Ok(InPath(found)),
            Err(_) => Err(Refused::new(StatusCode::NOT_FOUND, "not_found", "there is nothing here")),
        }
    }
}

/// A JSON body within the bound.
async fn body(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, Refused> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let message = "send JSON, with the header Content-Type: application/json";
        return Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message));
    }
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.downcast_ref::<LengthLimitError>().is_some() => {
            let message = format!("the body has more than {limit} bytes");
            Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message))
        }
        Err(_) => Err(Refused::new(StatusCode::BAD_REQUEST, "incomplete", "the body did not arrive whole")),
    }
}
