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
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use rap_io::body::{BodyError, BodyLimits, ReceivedBody};
use rap_io::hashing::hash;
use rap_io::introspection::NotAccepted;
use rap_io::metrics::CONTENT_TYPE;
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, DISCOVERY_PATH, Fault, Invalid, MIGRATE_PATH, StatusAnswer,
    TOOL_CALL_STATUS_PATH, TRACEPARENT, TraceContext, limits, parse_cancel_tool_call, parse_close_thread,
    parse_migrate, parse_status_query,
};
use serde_json::json;
use url::Url;

use crate::auth::{Caller, CallerInHead, Signed};
use crate::engine::{
    Accepted, AnswerOutcome, ArrivalRefused, CHOICE_PATH, CONSENT_PATH, Engine, FILES_PATH, IMPORT_BYTES,
    IMPORT_PATH, Migrated, Refusal,
};

/// Path for invocations, relative to the public URL.
pub(crate) const INVOKE_PATH: &str = "/invoke";

/// `Retry-After` of a 503, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    let mut router = Router::new();
    if engine.moves_sessions() {
        router = router.route(MIGRATE_PATH, post(migrate));
    }
    if engine.accepts_calls() {
        router = router.route(IMPORT_PATH, post(import_calls)).route(FILES_PATH, post(import_files));
    }
    router
        .route(DISCOVERY_PATH, get(discover))
        .route(INVOKE_PATH, post(invoke))
        .route(CLOSE_THREAD_PATH, post(close_thread))
        .route(CANCEL_TOOL_CALL_PATH, post(cancel_tool_call))
        .route(TOOL_CALL_STATUS_PATH, post(tool_call_status))
        .route(&format!("{CHOICE_PATH}/{{token}}"), post(choice))
        .route(&format!("{CONSENT_PATH}/{{token}}"), get(consent))
        .route(CONSENT_PATH, get(consent_by_state))
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
    ([(header::CONTENT_TYPE, json)], engine.offer().manifest.clone()).into_response()
}

async fn invoke(State(engine): State<Arc<Engine>>, request: Request) -> Result<StatusCode, ErrorResponse> {
    let trace =
        request.headers().get(TRACEPARENT).and_then(|value| TraceContext::parse(value.to_str().ok()?));
    let Admitted { caller, received, .. } = admit(&engine, Endpoint::Invoke, request).await?;
    let accepted = engine.accept(caller, received.bytes, trace).await;
    rap_io::crash::point("before_invocation_answer");
    match accepted {
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
    let Admitted { caller, received, message } = admit(&engine, Endpoint::Close, request).await?;
    if engine.callers.is_repeated(message.as_ref()) {
        return Ok(StatusCode::OK);
    }
    match parse_close_thread(&received.bytes) {
        Ok(close) => {
            engine.close(caller, close.thread_id).await;
            engine.callers.remember(message, engine.now());
            Ok(StatusCode::OK)
        }
        Err(invalid) => invalid_notification(&invalid, CLOSE_THREAD_PATH),
    }
}

async fn cancel_tool_call(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let Admitted { caller, received, message } = admit(&engine, Endpoint::Cancel, request).await?;
    if engine.callers.is_repeated(message.as_ref()) {
        return Ok(StatusCode::OK);
    }
    match parse_cancel_tool_call(&received.bytes) {
        Ok(cancel) => {
            engine.cancel(caller, cancel).await;
            engine.callers.remember(message, engine.now());
            Ok(StatusCode::OK)
        }
        Err(invalid) => invalid_notification(&invalid, CANCEL_TOOL_CALL_PATH),
    }
}

async fn tool_call_status(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<Json<StatusAnswer>, ErrorResponse> {
    let Admitted { caller, received, .. } = admit(&engine, Endpoint::Status, request).await?;
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

/// Moves the state of a session. 200 means that all of it is at the destination.
async fn migrate(State(engine): State<Arc<Engine>>, request: Request) -> Result<StatusCode, ErrorResponse> {
    let Admitted { caller, received, .. } = admit(&engine, Endpoint::Migrate, request).await?;
    let request = parse_migrate(&received.bytes).map_err(|invalid| ErrorResponse::invalid(&invalid))?;
    match engine.migrate(&caller, request).await {
        Migrated::Done => Ok(StatusCode::OK),
        Migrated::Busy => Err(ErrorResponse::unavailable(
            "overloaded",
            "too many sessions are being moved; try again later",
        )),
        Migrated::Failed(why) => {
            let (status, code) = (StatusCode::INTERNAL_SERVER_ERROR, "not_moved");
            let message = format!("the state of the session was not moved: {why}").into();
            Err(ErrorResponse { status, code, message })
        }
    }
}

/// Receives calls of a session from another tool server with the same migration key.
async fn import_calls(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let received = read_import(&engine, IMPORT_PATH, request).await?;
    import_answer(engine.receive_calls(received.bytes.clone()).await)
}

/// Receives files of a session from another tool server with the same migration key.
async fn import_files(
    State(engine): State<Arc<Engine>>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let received = read_import(&engine, FILES_PATH, request).await?;
    import_answer(engine.receive_files(received.bytes.clone()).await)
}

/// Reads a page of state. Who does not know the migration key is refused before the body is read.
async fn read_import(
    engine: &Engine,
    path: &'static str,
    request: Request,
) -> Result<ReceivedBody, ErrorResponse> {
    if !engine.is_sender(path, request.headers()) {
        return Err(import_refused(ArrivalRefused::NO_KEY));
    }
    if !engine.answers.admits(&None) {
        return Err(ErrorResponse::unavailable("overloaded", "too many requests at once; try again later"));
    }
    let (head, body) = request.into_parts();
    let limits = BodyLimits { bytes: IMPORT_BYTES, within: engine.limits.request_within };
    Ok(engine.request_memory.of(None).read_json(&head.headers, body, limits).await?)
}

fn import_answer(received: Result<(), ArrivalRefused>) -> Result<StatusCode, ErrorResponse> {
    received.map(|()| StatusCode::OK).map_err(import_refused)
}

fn import_refused(refused: ArrivalRefused) -> ErrorResponse {
    match refused {
        ArrivalRefused::Invalid(why) => ErrorResponse::new(StatusCode::FORBIDDEN, "not_accepted", why),
        ArrivalRefused::Unavailable => ErrorResponse::unavailable(
            "unavailable",
            "the journal cannot be written right now; try again later",
        ),
    }
}

/// Receives the answer to a choice. Everyone who knows the URL may answer. The runtime retries after a 5xx.
async fn choice(
    State(engine): State<Arc<Engine>>,
    Path(path): Path<String>,
    request: Request,
) -> Result<StatusCode, ErrorResponse> {
    let (token, caller) = engine.split_question_path(&path);
    if !engine.answers.admits(&caller) {
        return Err(ErrorResponse::unavailable("overloaded", "too many answers at once; try again later"));
    }
    let (head, body) = request.into_parts();
    let received = read_body(&engine, caller.as_ref(), &head.headers, body).await?;
    match engine.choose(token, &received.bytes).await {
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

/// Receives the redirect of a user's browser whose `state` names the call.
async fn consent_by_state(engine: State<Arc<Engine>>, query: Query<BTreeMap<String, String>>) -> Response {
    let path = query.0.get("state").cloned().unwrap_or_default();
    consent(engine, Path(path), query).await
}

/// Receives the redirect of a user's browser, so it answers with HTML instead of JSON.
async fn consent(
    State(engine): State<Arc<Engine>>,
    Path(path): Path<String>,
    Query(parameters): Query<BTreeMap<String, String>>,
) -> Response {
    let page = |status: StatusCode, text: &str| {
        let page = format!("<!doctype html><meta charset=utf-8><title>{text}</title><p>{text}</p>");
        (status, [(header::REFERRER_POLICY, "no-referrer")], Html(page)).into_response()
    };
    let (token, caller) = engine.split_question_path(&path);
    if !engine.answers.admits(&caller) {
        return page(StatusCode::SERVICE_UNAVAILABLE, "Too many at once. Please try again in a moment.");
    }
    match engine.consent(token, parameters).await {
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

/// Endpoints that only known callers may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Invoke,
    Close,
    Cancel,
    Status,
    Migrate,
}

impl Endpoint {
    /// Name in the ids of signed messages.
    fn word(self) -> &'static str {
        match self {
            Endpoint::Invoke => "invoke",
            Endpoint::Close => "close",
            Endpoint::Cancel => "cancel",
            Endpoint::Status => "status",
            Endpoint::Migrate => "migrate",
        }
    }

    /// Counts a request. The rate of invocations is limited later.
    fn count(self, engine: &Engine, caller: &Caller) -> Result<(), ErrorResponse> {
        if self == Endpoint::Invoke || engine.notifications.admits(caller) {
            return Ok(());
        }
        Err(ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, "too_many", "too many notifications at once"))
    }
}

/// A request of a known caller.
struct Admitted {
    caller: Caller,
    received: ReceivedBody,
    /// Id of a signed message.
    message: Option<String>,
}

/// Authenticates a request and reads its body. A signature can be checked only when the body has arrived.
async fn admit(
    engine: &Arc<Engine>,
    endpoint: Endpoint,
    request: Request,
) -> Result<Admitted, ErrorResponse> {
    let (head, body) = request.into_parts();
    let known = match engine.callers.identify(&head, engine.now()).map_err(ErrorResponse::unauthorized)? {
        CallerInHead::Known(caller) => Some(caller),
        CallerInHead::Token(token) => Some(engine.callers.introspect(&token, engine.now()).await?),
        CallerInHead::Signed => None,
    };
    match known {
        Some(caller) => {
            endpoint.count(engine, &caller)?;
            let received = read_body(engine, Some(&caller), &head.headers, body).await?;
            Ok(Admitted { caller, received, message: None })
        }
        None => {
            let received = read_body(engine, None, &head.headers, body).await?;
            let (length, bytes) = (received.bytes.len(), received.bytes.clone());
            let (verifier, now) = (Arc::clone(engine), engine.now());
            let verify = move || {
                let base = public_path(&verifier.public_url);
                verifier.callers.verify(&head, (&base, endpoint.word()), &bytes, now)
            };
            let verified = hash(length, verify).await;
            let Signed { caller, message } = verified.map_err(ErrorResponse::unauthorized)?;
            endpoint.count(engine, &caller)?;
            Ok(Admitted { caller, received, message })
        }
    }
}

/// Returns the path of a URL without a trailing slash.
fn public_path(url: &str) -> String {
    Url::parse(url).map(|url| url.path().trim_end_matches('/').to_owned()).unwrap_or_default()
}

async fn read_body(
    engine: &Engine,
    caller: Option<&Caller>,
    headers: &HeaderMap,
    body: Body,
) -> Result<ReceivedBody, ErrorResponse> {
    let limits = BodyLimits { bytes: limits::BODY_BYTES, within: engine.limits.request_within };
    let memory = engine.request_memory.of(caller);
    memory.read_json(headers, body, limits).await.map_err(ErrorResponse::from)
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

    fn unauthorized(message: String) -> Self {
        ErrorResponse { status: StatusCode::UNAUTHORIZED, code: "unauthorized", message: message.into() }
    }

    fn invalid(invalid: &Invalid) -> Self {
        let message = invalid.to_string().into();
        ErrorResponse { status: StatusCode::BAD_REQUEST, code: "invalid", message }
    }
}

impl From<NotAccepted> for ErrorResponse {
    fn from(why: NotAccepted) -> Self {
        let message = why.to_string();
        match why {
            NotAccepted::Invalid(_) => ErrorResponse::unauthorized(message),
            NotAccepted::Unavailable(_) => ErrorResponse {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "unavailable",
                message: message.into(),
            },
        }
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
