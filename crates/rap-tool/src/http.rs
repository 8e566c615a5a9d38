//! The endpoints. Each answers at once; what a request costs is bounded before its body is looked at.
//!
//! The order is: who is calling, what kind of body, how large, and only then what it says. No answer tells
//! anything about threads or calls but `/tool_call_status`, and that only about the caller's own.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use bytes::BytesMut;
use http_body_util::BodyExt;
use rap_io::metrics::CONTENT_TYPE;
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, DISCOVERY_PATH, Fault, Invalid, StatusAnswer,
    TOOL_CALL_STATUS_PATH, limits, parse_cancel_tool_call, parse_close_thread, parse_status_query,
};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use crate::auth::Caller;
use crate::engine::{Accepted, Answered, CHOICE_PATH, CONSENT_PATH, Engine, Refusal};

/// Where invocations are POSTed, below the public URL.
pub(crate) const INVOKE_PATH: &str = "/invoke";

/// When to come back after a 503, in seconds.
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
        .with_state(engine)
}

async fn discover(State(engine): State<Arc<Engine>>) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], engine.manifest.clone()).into_response()
}

async fn invoke(State(engine): State<Arc<Engine>>, request: Request) -> Result<StatusCode, Refused> {
    let caller = recognise(&engine, request.headers())?;
    let arrived = read_body(&engine, request).await?;
    match engine.accept(caller, arrived.body).await {
        Ok(Accepted::New | Accepted::Repeat) => Ok(StatusCode::OK),
        Err(Refusal::Invalid(invalid)) => Err(Refused::unreadable(&invalid)),
        Err(Refusal::Stale) => Err(Refused::new(
            StatusCode::CONFLICT,
            "stale_toolset",
            "the toolset has changed; fetch it again",
        )),
        Err(Refusal::Overloaded) => Err(Refused::for_now("overloaded", "too much at once; try again later")),
        Err(Refusal::Unavailable) => {
            Err(Refused::for_now("unavailable", "nothing can be stored right now; try again later"))
        }
    }
}

async fn close_thread(State(engine): State<Arc<Engine>>, request: Request) -> Result<StatusCode, Refused> {
    let (caller, arrived) = admit_notification(&engine, request).await?;
    match parse_close_thread(&arrived.body) {
        Ok(close) => {
            engine.close(caller, close.thread_id).await;
            Ok(StatusCode::OK)
        }
        Err(invalid) => ill_formed(&invalid, CLOSE_THREAD_PATH),
    }
}

async fn cancel_tool_call(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, Refused> {
    let (caller, arrived) = admit_notification(&engine, request).await?;
    match parse_cancel_tool_call(&arrived.body) {
        Ok(cancel) => {
            engine.cancel(caller, cancel).await;
            Ok(StatusCode::OK)
        }
        Err(invalid) => ill_formed(&invalid, CANCEL_TOOL_CALL_PATH),
    }
}

async fn tool_call_status(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<Json<StatusAnswer>, Refused> {
    let (caller, arrived) = admit_notification(&engine, request).await?;
    let alive = match parse_status_query(&arrived.body) {
        Ok(query) => engine.is_alive(caller, query).await,
        Err(invalid) if invalid.fault == Fault::Value => Ok(false),
        Err(invalid) => return Err(Refused::unreadable(&invalid)),
    };
    match alive {
        Ok(alive) => Ok(Json(StatusAnswer { alive })),
        Err(_) => Err(Refused::for_now("unavailable", "nothing can be looked up right now; try again later")),
    }
}

/// The answer to a choice. Whoever knows the URL may answer; the runtime tries again after a 5xx.
async fn choice(
    State(engine): State<Arc<Engine>>,
    Path(token): Path<String>,
    request: Request,
) -> Result<StatusCode, Refused> {
    if !engine.answers.admits(&()) {
        return Err(Refused::for_now("overloaded", "too many answers at once; try again later"));
    }
    let arrived = read_body(&engine, request).await?;
    match engine.choose(&token, &arrived.body).await {
        Ok(Answered::Taken) => Ok(StatusCode::OK),
        Ok(Answered::Otherwise) => {
            Err(Refused::new(StatusCode::CONFLICT, "answered", "this question was answered otherwise before"))
        }
        Ok(Answered::Unknown) => {
            Err(Refused::new(StatusCode::NOT_FOUND, "unknown", "there is no such question, or it is over"))
        }
        Err(Refusal::Invalid(invalid)) => Err(Refused::unreadable(&invalid)),
        Err(_) => Err(Refused::for_now("unavailable", "nothing can be stored right now; try again later")),
    }
}

/// Where a user's browser arrives. It reads a page, not JSON.
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
        Ok(Answered::Taken | Answered::Otherwise) => {
            page(StatusCode::OK, "Thank you. You can close this page.")
        }
        Ok(Answered::Unknown) => page(StatusCode::NOT_FOUND, "This request is unknown, or it is over."),
        Err(_) => {
            page(StatusCode::SERVICE_UNAVAILABLE, "Something went wrong. Please try again in a moment.")
        }
    }
}

async fn healthz(State(engine): State<Arc<Engine>>) -> Result<&'static str, Refused> {
    if engine.is_stopping() {
        Err(Refused::for_now("stopping", "the server is stopping"))
    } else {
        Ok("ok\n")
    }
}

async fn metrics(State(engine): State<Arc<Engine>>) -> Result<Response, Refused> {
    if !engine.scrapes.admits(&()) {
        return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, "too_many", "too many scrapes at once"));
    }
    let text = engine.metrics().await;
    let text = text.map_err(|_| Refused::for_now("unavailable", "nothing can be looked up right now"))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

/// An id that no thread or call can have is treated as one that nothing has.
fn ill_formed(invalid: &Invalid, path: &'static str) -> Result<StatusCode, Refused> {
    if invalid.fault == Fault::Shape {
        return Err(Refused::unreadable(invalid));
    }
    tracing::info!(path, %invalid, "a notification named an ill-formed id");
    Ok(StatusCode::OK)
}

async fn admit_notification(engine: &Engine, request: Request) -> Result<(Caller, Arrived), Refused> {
    let caller = recognise(engine, request.headers())?;
    if !engine.notifications.admits(&caller) {
        return Err(Refused::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many",
            "too many notifications at once",
        ));
    }
    Ok((caller, read_body(engine, request).await?))
}

fn recognise(engine: &Engine, headers: &HeaderMap) -> Result<Caller, Refused> {
    let message = "send a token of this server as `Authorization: Bearer TOKEN`";
    let refused = || Refused::new(StatusCode::UNAUTHORIZED, "unauthorized", message);
    engine.callers.recognise(headers).ok_or_else(refused)
}

/// A body that is wholly there.
struct Arrived {
    body: Bytes,
    /// Its share of the memory for requests.
    _share: Option<OwnedSemaphorePermit>,
}

async fn read_body(engine: &Engine, request: Request) -> Result<Arrived, Refused> {
    if !is_json(request.headers()) {
        let message = "send JSON, with `Content-Type: application/json`";
        return Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message));
    }
    if announced(request.headers()) > limits::BODY_BYTES {
        return Err(Refused::too_large());
    }
    let reading = collect(engine, request.into_body());
    match tokio::time::timeout(engine.limits.request_within, reading).await {
        Ok(arrived) => arrived,
        Err(_) => {
            Err(Refused::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the request took too long to arrive"))
        }
    }
}

/// Reads a body chunk by chunk. Each chunk takes its share of the memory for all of them. One that is the whole body,
/// as with most invocations, is not copied.
async fn collect(engine: &Engine, mut body: Body) -> Result<Arrived, Refused> {
    let mut collected = Bytes::new();
    let mut share: Option<OwnedSemaphorePermit> = None;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return Err(Refused::new(
                StatusCode::BAD_REQUEST,
                "cut_off",
                "the request ended before its body did",
            ));
        };
        let Ok(chunk) = frame.into_data() else { continue };
        if collected.len() + chunk.len() > limits::BODY_BYTES {
            return Err(Refused::too_large());
        }
        let bytes = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
        let Ok(more) = Arc::clone(&engine.arriving).try_acquire_many_owned(bytes) else {
            return Err(Refused::for_now("overloaded", "too much is arriving at once; try again later"));
        };
        match &mut share {
            Some(share) => share.merge(more),
            None => share = Some(more),
        }
        if collected.is_empty() {
            collected = chunk;
        } else {
            let mut longer = BytesMut::from(collected);
            longer.extend_from_slice(&chunk);
            collected = longer.freeze();
        }
    }
    Ok(Arrived { body: collected, _share: share })
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = content_type.split(';').next().unwrap_or("").trim();
    essence.eq_ignore_ascii_case("application/json")
}

fn announced(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

/// An error with a stable code and a sentence that tells what to do.
pub(crate) struct Refused {
    status: StatusCode,
    code: &'static str,
    message: Cow<'static, str>,
}

impl Refused {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: &'static str) -> Self {
        Refused { status, code, message: message.into() }
    }

    /// Not now, but later.
    fn for_now(code: &'static str, message: &'static str) -> Self {
        Refused::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }

    fn unreadable(invalid: &Invalid) -> Self {
        let message = invalid.to_string().into();
        Refused { status: StatusCode::BAD_REQUEST, code: "invalid", message }
    }

    fn too_large() -> Self {
        let message = format!("a body has at most {} bytes", limits::BODY_BYTES).into();
        Refused { status: StatusCode::PAYLOAD_TOO_LARGE, code: "too_large", message }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let body = json!({"error": {"code": self.code, "message": self.message}});
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::SERVICE_UNAVAILABLE => headers.insert(header::RETRY_AFTER, RETRY_AFTER),
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
            }
            _ => None,
        };
        response
    }
}
