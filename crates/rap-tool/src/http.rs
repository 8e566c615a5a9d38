//! The HTTP endpoints. Handlers do not wait for tools, and the cost of a request is bounded before its body is
//! parsed.
//!
//! Checks run in this order: caller, content type, size, content. Only `/tool_call_status` reveals anything about
//! threads or calls, and only about those of the caller.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use rap_io::body::{BodyError, BodyLimits, ReceivedBody};
use rap_io::metrics::CONTENT_TYPE;
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, DISCOVERY_PATH, Fault, Invalid, StatusAnswer,
    TOOL_CALL_STATUS_PATH, limits, parse_cancel_tool_call, parse_close_thread, parse_status_query,
};
use serde_json::json;

use crate::auth::Caller;
use crate::engine::{Accepted, AnswerOutcome, CHOICE_PATH, CONSENT_PATH, Engine, Refusal};

/// Path for invocations, relative to the public URL.
pub(crate) const INVOKE_PATH: &str = "/invoke";

/// `Retry-After` of a 503, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route(DISCOVERY_PATH, get(discover))
        .route(INVOKE_PATH, post(invoke))
        .route(CLOSE_THREAD_PATH, post(close_thread))
        .route(CANCEL_TOOL_CALL_PATH, post(cancel_tool_call))
        .route(TOOL_CALL_STATUS_PATH, post(tool_call_status))
        .route(&format!("{CHOICE_PATH}/{{token}}"), post(choice))
        .route(&format!("{CONSENT_PATH}/{{token}}"), get(consent))
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics))
        .layer(middleware::map_response(no_sniffing))
        .with_state(engine)
}

async fn no_sniffing(mut response: Response) -> Response {
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

async fn discover(State(engine): State<Arc<Engine>>) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], engine.manifest.clone()).into_response()
}

async fn invoke(State(engine): State<Arc<Engine>>, request: Request) -> Result<StatusCode, ErrorResponse> {
    let caller = authenticate(&engine, request.headers())?;
    let received = read_body(&engine, Some(&caller), request).await?;
    match engine.accept(caller, received.bytes).await {
        Ok(Accepted::New | Accepted::Repeat) => Ok(StatusCode::OK),
        Err(Refusal::Invalid(invalid)) => Err(ErrorResponse::invalid(&invalid)),
        Err(Refusal::Stale) => Err(ErrorResponse::new(
            StatusCode::CONFLICT,
            "stale_toolset",
            "the toolset has changed; fetch it again",
        )),
        Err(Refusal::Overloaded) => {
            Err(ErrorResponse::unavailable("overloaded", "too many requests at once; try again later"))
        }
        Err(Refusal::ShareUsedUp) => Err(ErrorResponse::unavailable(
            "overloaded",
            "the share of running calls of this caller is used up; try again when one has ended",
        )),
        Err(Refusal::Unavailable) => Err(ErrorResponse::unavailable(
            "unavailable",
            "the journal cannot be written right now; try again later",
        )),
    }
}

async fn close_thread(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let (caller, received) = admit_notification(&engine, request).await?;
    match parse_close_thread(&received.bytes) {
        Ok(close) => {
            engine.close(caller, close.thread_id).await;
            Ok(StatusCode::OK)
        }
        Err(invalid) => invalid_notification(&invalid, CLOSE_THREAD_PATH),
    }
}

async fn cancel_tool_call(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let (caller, received) = admit_notification(&engine, request).await?;
    match parse_cancel_tool_call(&received.bytes) {
        Ok(cancel) => {
            engine.cancel(caller, cancel).await;
            Ok(StatusCode::OK)
        }
        Err(invalid) => invalid_notification(&invalid, CANCEL_TOOL_CALL_PATH),
    }
}

async fn tool_call_status(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<Json<StatusAnswer>, ErrorResponse> {
    let (caller, received) = admit_notification(&engine, request).await?;
    let alive = match parse_status_query(&received.bytes) {
        Ok(query) => engine.is_alive(caller, query).await,
        Err(invalid) if invalid.fault == Fault::Value => Ok(false),
        Err(invalid) => return Err(ErrorResponse::invalid(&invalid)),
    };
    match alive {
        Ok(alive) => Ok(Json(StatusAnswer { alive })),
        Err(_) => Err(ErrorResponse::unavailable(
            "unavailable",
            "the journal cannot be read right now; try again later",
        )),
    }
}

/// Receives the answer to a choice. Everyone who knows the URL may answer. The runtime retries after a 5xx.
async fn choice(
    State(engine): State<Arc<Engine>>,
    Path(token): Path<String>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    if !engine.answers.admits(&()) {
        return Err(ErrorResponse::unavailable("overloaded", "too many answers at once; try again later"));
    }
    let received = read_body(&engine, None, request).await?;
    match engine.choose(&token, &received.bytes).await {
        Ok(AnswerOutcome::Accepted) => Ok(StatusCode::OK),
        Ok(AnswerOutcome::Conflict) => Err(ErrorResponse::new(
            StatusCode::CONFLICT,
            "answered",
            "this question already has a different answer",
        )),
        Ok(AnswerOutcome::Unknown) => Err(ErrorResponse::new(
            StatusCode::NOT_FOUND,
            "unknown",
            "there is no such question, or its call has ended",
        )),
        Err(Refusal::Invalid(invalid)) => Err(ErrorResponse::invalid(&invalid)),
        Err(_) => Err(ErrorResponse::unavailable(
            "unavailable",
            "the journal cannot be written right now; try again later",
        )),
    }
}

/// Receives the redirect of a user's browser, so it answers with HTML instead of JSON.
async fn consent(
    State(engine): State<Arc<Engine>>,
    Path(token): Path<String>,
    Query(parameters): Query<BTreeMap<String, String>>,
) -> Response {
    let page = |status: StatusCode, text: &str| {
        let page = format!("<!doctype html><meta charset=utf-8><title>{text}</title><p>{text}</p>");
        (status, [(header::REFERRER_POLICY, "no-referrer")], Html(page)).into_response()
    };
    if !engine.answers.admits(&()) {
        return page(StatusCode::SERVICE_UNAVAILABLE, "Too many at once. Please try again in a moment.");
    }
    match engine.consent(&token, parameters).await {
        Ok(AnswerOutcome::Accepted | AnswerOutcome::Conflict) => {
            page(StatusCode::OK, "Thank you. You can close this page.")
        }
        Ok(AnswerOutcome::Unknown) => {
            page(StatusCode::NOT_FOUND, "This request is unknown, or it has ended.")
        }
        Err(_) => {
            page(StatusCode::SERVICE_UNAVAILABLE, "Something went wrong. Please try again in a moment.")
        }
    }
}

async fn healthz(State(engine): State<Arc<Engine>>) -> Result<&'static str, ErrorResponse> {
    if engine.is_stopping() {
        Err(ErrorResponse::unavailable("stopping", "the server is stopping"))
    } else {
        Ok("ok\n")
    }
}

async fn metrics(State(engine): State<Arc<Engine>>) -> Result<Response, ErrorResponse> {
    if !engine.scrapes.admits(&()) {
        return Err(ErrorResponse::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many",
            "too many scrapes at once",
        ));
    }
    let text = engine.metrics().await;
    let text =
        text.map_err(|_| ErrorResponse::unavailable("unavailable", "the journal cannot be read right now"))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

/// Treats an invalid id like an unknown one: logs it and answers 200. A body of the wrong shape is an error.
fn invalid_notification(invalid: &Invalid, path: &'static str) -> Result<StatusCode, ErrorResponse> {
    if invalid.fault == Fault::Shape {
        return Err(ErrorResponse::invalid(invalid));
    }
    tracing::info!(path, %invalid, "a notification contained an invalid id");
    Ok(StatusCode::OK)
}

async fn admit_notification(
    engine: &Engine,
    request: Request,
) -> Result<(Caller, ReceivedBody), ErrorResponse> {
    let caller = authenticate(engine, request.headers())?;
    if !engine.notifications.admits(&caller) {
        return Err(ErrorResponse::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many",
            "too many notifications at once",
        ));
    }
    let received = read_body(engine, Some(&caller), request).await?;
    Ok((caller, received))
}

fn authenticate(engine: &Engine, headers: &HeaderMap) -> Result<Caller, ErrorResponse> {
    let message = "send a token of this server as `Authorization: Bearer TOKEN`";
    let refused = || ErrorResponse::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    engine.callers.authenticate(headers).ok_or_else(refused)
}

async fn read_body(
    engine: &Engine,
    caller: Option<&Caller>,
    request: Request,
) -> Result<ReceivedBody, ErrorResponse> {
    let (head, body) = request.into_parts();
    let limits = BodyLimits { bytes: limits::BODY_BYTES, within: engine.limits.request_within };
    let memory = engine.request_memory.of(caller);
    memory.read_json(&head.headers, body, limits).await.map_err(ErrorResponse::from)
}

/// An error response: a status, a stable code and a message that says what to do.
pub(crate) struct ErrorResponse {
    status: StatusCode,
    code: &'static str,
    message: Cow<'static, str>,
}

impl ErrorResponse {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: &'static str) -> Self {
        ErrorResponse { status, code, message: message.into() }
    }

    /// A 503: the client may try again later.
    fn unavailable(code: &'static str, message: &'static str) -> Self {
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    fn invalid(invalid: &Invalid) -> Self {
        let message = invalid.to_string().into();
        ErrorResponse { status: StatusCode::BAD_REQUEST, code: "invalid", message }
    }
}

impl From<BodyError> for ErrorResponse {
    fn from(error: BodyError) -> Self {
        let (status, code) = match error {
            BodyError::NotJson => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json"),
            BodyError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            BodyError::TooSlow => (StatusCode::REQUEST_TIMEOUT, "too_slow"),
            BodyError::CutOff => (StatusCode::BAD_REQUEST, "cut_off"),
            BodyError::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, "overloaded"),
        };
        ErrorResponse { status, code, message: error.to_string().into() }
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let body = json!({"error": {"code": self.code, "message": self.message}});
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => headers.insert(header::RETRY_AFTER, RETRY_AFTER),
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
            }
            StatusCode::REQUEST_TIMEOUT => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"))
            }
            _ => None,
        };
        response
    }
}
