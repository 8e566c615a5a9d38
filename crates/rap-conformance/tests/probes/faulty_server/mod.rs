//! A small in-memory tool server with one selectable fault.
//!
//! It offers `ping`, `echo`, `open`, `crawl`, which is slow, and the subscription `tick`.

mod fault;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Address, Invocation, UrlPolicy, parse_invocation};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use url::Url;

pub use fault::Fault;

pub const TOKEN: &str = "the-token-of-this-server";
const VERSION: &str = "1";
/// Duration of `ping` and `echo`, long enough that concurrent calls overlap.
const WORK: Duration = Duration::from_millis(40);
/// Duration of `crawl`.
const SLOW: Duration = Duration::from_millis(1_500);
/// Size of an invocation that [`Fault::RefusesLargeInvocations`] refuses.
const LARGE: usize = 64 * 1024;
/// Delay that the checker does not accept as prompt.
const LATE: Duration = Duration::from_millis(1_200);
/// Number of concurrent calls from which [`Fault::MixesCallsUnderLoad`] has an effect.
const OVERLOAD: usize = 13;
/// Number of notifications before the rate limit.
const BURST: usize = 400;
/// Maximum number of attempts to deliver a callback.
const ATTEMPTS: u32 = 12;

/// Handle of the server task. The server stops when this is dropped.
pub struct FaultyServer {
    pub url: Url,
    server: Arc<Server>,
    task: JoinHandle<()>,
}

impl FaultyServer {
    pub async fn start(fault: Fault) -> FaultyServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Arc::new(Server {
            fault,
            endpoint: format!("{url}/invoke"),
            client: Client::new(UrlPolicy::Loopback, ClientLimits::default()),
            state: Mutex::default(),
            running: AtomicUsize::new(0),
            fetched: AtomicUsize::new(0),
            notified: AtomicUsize::new(0),
        });
        let router = Router::new()
            .route("/.well-known/rap-toolset", get(discover))
            .route("/invoke", post(invoke))
            .route("/close_thread", post(close))
            .route("/cancel_tool_call", post(cancel))
            .with_state(Arc::clone(&server));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        FaultyServer { url: url.parse().unwrap(), server, task }
    }

    /// Operations that were invoked.
    pub fn operations(&self) -> HashSet<String> {
        self.server.state.lock().unwrap().operations.clone()
    }
}

impl Drop for FaultyServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Server {
    fault: Fault,
    endpoint: String,
    client: Client,
    state: Mutex<ServerState>,
    running: AtomicUsize,
    fetched: AtomicUsize,
    notified: AtomicUsize,
}

#[derive(Default)]
struct ServerState {
    /// Calls by thread, id and callback URL.
    calls: HashMap<(String, String, String), Call>,
    closed: HashSet<String>,
    cancelled: HashSet<(String, String)>,
    /// First callback URL of each thread.
    first_urls: HashMap<String, String>,
    latest: Option<Address>,
    operations: HashSet<String>,
    /// Threads in which `open` was called.
    opened: HashSet<String>,
    /// Threads of calls of `crawl` that have not returned.
    at_work: HashSet<String>,
}

#[derive(Clone)]
struct Call {
    address: Address,
    stop: Arc<watch::Sender<bool>>,
}

async fn discover(State(server): State<Arc<Server>>) -> Response {
    let fetched = server.fetched.fetch_add(1, Ordering::Relaxed);
    let text = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    let ticks =
        json!({"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]});
    let mut tools = vec![
        json!({"name": "ping", "description": "Answers.", "inputSchema": {"type": "object"},
               "annotations": {"readOnly": true}}),
        json!({"name": "echo", "description": "Says back.", "inputSchema": text, "annotations": {"readOnly": true}}),
        json!({"name": "open", "description": "Opens.", "inputSchema": {"type": "object"}}),
        json!({"name": "crawl", "description": "Takes its time.", "inputSchema": {"type": "object"}}),
        json!({"name": "tick", "description": "Ticks.", "inputSchema": ticks}),
    ];
    match server.fault {
        Fault::ServesNoToolset => return StatusCode::NOT_FOUND.into_response(),
        Fault::AnnotatesNothing => {
            for tool in &mut tools {
                tool.as_object_mut().unwrap().remove("annotations");
            }
        }
        Fault::OffersAToolTwice => tools.push(tools[0].clone()),
        Fault::ChangesItsToolsAndNotItsVersion => {
            tools[0]["description"] = json!(format!("Answer {fetched}."))
        }
        _ => {}
    }
    let toolset = json!({"name": "wrong", "endpoint": server.endpoint, "version": VERSION, "tools": tools});
    axum::Json(toolset).into_response()
}

async fn invoke(State(server): State<Arc<Server>>, headers: HeaderMap, body: Bytes) -> Response {
    let fault = server.fault;
    if !is_authorized(&headers) && !matches!(fault, Fault::LetsAnyoneInvoke | Fault::NeedsNoToken) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let is_deep = body.windows(500).any(|part| part.iter().all(|byte| *byte == b'['));
    if fault == Fault::FailsAtDeepJson && is_deep {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if fault == Fault::RefusesLargeInvocations && body.len() > LARGE && !is_deep {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    }
    if fault == Fault::RefusesUnknownFields && String::from_utf8_lossy(&body).contains("x-unknown-field") {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let (address, invocation) = match parse_invocation(&body) {
        Ok(invocation) => (invocation.address.clone(), Ok(invocation)),
        Err(bad) => match bad.address {
            Some(address) if fault != Fault::RefusesDefects => (*address, Err(bad.error.to_string())),
            None if fault == Fault::AcceptsGarbage => return StatusCode::OK.into_response(),
            None if fault == Fault::FailsAtGarbage && !is_deep => {
                return StatusCode::INTERNAL_SERVER_ERROR.into_response();
            }
            _ => return StatusCode::BAD_REQUEST.into_response(),
        },
    };
    server.accept(address, invocation).await
}

impl Server {
    async fn accept(self: &Arc<Self>, address: Address, invocation: Result<Invocation, String>) -> Response {
        let fault = self.fault;
        let operation = invocation.as_ref().map_or("", |invocation| invocation.operation.as_str()).to_owned();
        let is_known = matches!(operation.as_str(), "ping" | "echo" | "tick" | "open" | "crawl");
        if fault == Fault::RefusesUnknownOperations && !is_known && invocation.is_ok() {
            return StatusCode::NOT_FOUND.into_response();
        }
        let address_thread = address.group_id.clone();
        let Some(call) = self.admit(&address) else { return StatusCode::OK.into_response() };
        let version = invocation.as_ref().ok().and_then(|invocation| invocation.toolset_version.as_deref());
        if version.is_some_and(|version| version != VERSION) {
            match fault {
                Fault::IgnoresTheVersion => {}
                Fault::DropsStaleCalls => return StatusCode::OK.into_response(),
                _ => return StatusCode::CONFLICT.into_response(),
            }
        }
        let thread = address_thread.as_str();
        if fault == Fault::MakesFilesByGroupId && thread.contains('/') {
            drop(std::fs::create_dir_all(std::path::Path::new("/").join(thread)));
        }
        self.state.lock().unwrap().operations.insert(operation.clone());
        let server = Arc::clone(self);
        let work = async move { server.work(call, invocation).await };
        match fault {
            Fault::AcknowledgesAfterDelivery if operation == "ping" => work.await,
            Fault::WorksBeforeItAcknowledges if operation == "crawl" => work.await,
            Fault::AcknowledgesLate => {
                tokio::spawn(work);
                tokio::time::sleep(LATE).await;
            }
            _ => drop(tokio::spawn(work)),
        }
        match fault {
            Fault::AcknowledgesWith202 => StatusCode::ACCEPTED.into_response(),
            _ => StatusCode::OK.into_response(),
        }
    }

    /// Registers a call; `None` if it is a repeated invocation.
    fn admit(&self, address: &Address) -> Option<Call> {
        let mut state = self.state.lock().unwrap();
        let (thread, id) = (address.group_id.as_str().to_owned(), address.id.as_str().to_owned());
        let url = address.callback_url.expose().to_owned();
        if self.fault == Fault::RefusesCallsOfClosedThreads && state.closed.contains(&thread) {
            return None;
        }
        state.first_urls.entry(thread.clone()).or_insert_with(|| url.clone());
        state.latest = Some(address.clone());
        let key = match self.fault {
            Fault::IdentifiesCallsByIdAlone => (String::new(), id, String::new()),
            _ => (thread, id, url),
        };
        if state.calls.contains_key(&key) && self.fault != Fault::RunsRepeatedInvocations {
            return None;
        }
        let call = Call { address: address.clone(), stop: Arc::new(watch::Sender::new(false)) };
        state.calls.insert(key, call.clone());
        Some(call)
    }

    async fn work(&self, call: Call, invocation: Result<Invocation, String>) {
        self.running.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(WORK).await;
        let overloaded = self.running.load(Ordering::SeqCst) >= OVERLOAD;
        let text = match &invocation {
            Err(defect) => self.error(&call, defect),
            Ok(invocation) => match invocation.operation.as_str() {
                "ping" => Some("pong".to_owned()),
                "open" => {
                    self.state.lock().unwrap().opened.insert(call.address.group_id.as_str().to_owned());
                    Some("opened".into())
                }
                "crawl" => {
                    let thread = call.address.group_id.as_str().to_owned();
                    self.state.lock().unwrap().at_work.insert(thread.clone());
                    tokio::time::sleep(SLOW).await;
                    self.state.lock().unwrap().at_work.remove(&thread);
                    Some("arrived".into())
                }
                "echo" => match invocation.arguments.get("text").and_then(Value::as_str) {
                    Some(text) => Some(text.to_owned()),
                    None if self.fault == Fault::RunsInvalidArguments => Some("undefined".into()),
                    None => self.error(&call, "`text` has to be a string"),
                },
                "tick" if self.needs_setup(&call) => self.error(&call, "call `open` first"),
                "tick" => match invocation.arguments.get("count") {
                    Some(Value::Number(count)) if count.is_u64() => {
                        return self.tick(&call, count.as_u64().unwrap()).await;
                    }
                    Some(_) if self.fault == Fault::IgnoresTypesOfArguments => Some("Subscribed.".into()),
                    _ if self.fault == Fault::RunsInvalidArguments => Some("undefined".into()),
                    _ => self.error(&call, "`count` has to be an integer"),
                },
                _ if self.fault == Fault::NeverSendsErrors => Some("done".into()),
                _ if self.fault == Fault::DropsUnknownOperations => None,
                _ => self.error(&call, "there is no such operation"),
            },
        };
        if let Some(text) = text {
            self.return_result(&call, &text, overloaded).await;
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    fn error(&self, call: &Call, what: &str) -> Option<String> {
        Some(match self.fault {
            Fault::ErrorsWithoutPrefix => format!("This is wrong: {what}"),
            Fault::ErrorsWithoutDescription => "Error: ".into(),
            Fault::ShowsFilePaths => format!("Error: {what} (in /srv/wrong/server.py, line 7)"),
            Fault::RepeatsTheCallbackUrl => {
                format!("Error: {what}, says {}", call.address.callback_url.expose())
            }
            _ => format!("Error: {what}"),
        })
    }

    async fn return_result(&self, call: &Call, text: &str, overloaded: bool) {
        if self.fault == Fault::NeverDelivers && text == "pong" {
            return;
        }
        let mut result = self.result(call, text, overloaded);
        if self.fault == Fault::SubscribesUnknownOperations && text.contains("no such operation") {
            result["subscription"] = true.into();
        }
        let status = self.deliver(call, &result).await;
        if self.fault == Fault::SendsTwoResults && status == Some(200) {
            self.deliver(call, &result).await;
        }
    }

    fn result(&self, call: &Call, text: &str, overloaded: bool) -> Value {
        let mut address = call.address.clone();
        if self.fault == Fault::MixesCallsUnderLoad && overloaded {
            address = self.state.lock().unwrap().latest.clone().unwrap();
        }
        let mut result = json!({
            "type": "tool_result", "group_id": address.group_id, "id": address.id, "text": text,
        });
        if let Some(call_id) = &address.call_id {
            result["call_id"] = json!(call_id);
        }
        match self.fault {
            Fault::SendsResultsWithAnotherId => result["id"] = "of_another".into(),
            Fault::SendsResultsWithAnotherThread => result["group_id"] = "none".into(),
            Fault::DropsTheCallId => drop(result.as_object_mut().unwrap().remove("call_id")),
            Fault::SendsWrongTypes => result["subscription"] = "no".into(),
            _ => {}
        }
        result
    }

    async fn tick(&self, call: &Call, count: u64) {
        let mut stopped = call.stop.subscribe();
        let id = &call.address.id;
        let mut confirmation = self.result(call, &format!("Subscribed. Subscription ID: {id}"), false);
        confirmation["subscription"] = (self.fault != Fault::ConfirmsWithoutSubscriptionFlag).into();
        if self.fault == Fault::ConfirmsWithoutAnIdentifier {
            confirmation["text"] = "Subscribed.".into();
        }
        if self.fault == Fault::SendsEventsBeforeItConfirms {
            self.deliver(call, &self.event(call, 0, false)).await;
        }
        self.deliver(call, &confirmation).await;
        for number in 1..=count {
            tokio::time::sleep(WORK).await;
            if *stopped.borrow_and_update() {
                return;
            }
            self.deliver(call, &self.event(call, number, number == count)).await;
        }
        if self.fault == Fault::SendsEventsAfterTheFinalOne {
            self.deliver(call, &self.event(call, count + 1, false)).await;
        }
    }

    fn event(&self, call: &Call, number: u64, is_final: bool) -> Value {
        let Address { group_id, id, .. } = &call.address;
        let field = if self.fault == Fault::SendsEventsWithoutToolCallId { "id" } else { "tool_call_id" };
        json!({"type": "subscription_event", "group_id": group_id, field: id, "text": format!("tick {number}"),
               "final": is_final})
    }

    /// Posts a callback until it is answered below 500. After a 400, an error result follows.
    async fn deliver(&self, call: &Call, message: &Value) -> Option<u16> {
        let is_event = message["type"] == "subscription_event";
        let mut url = call.address.callback_url.to_url();
        match self.fault {
            Fault::DropsTheQueryOfTheCallbackUrl => url.set_query(None),
            Fault::KeepsOneCallbackUrlForAThread => {
                let state = self.state.lock().unwrap();
                url = state.first_urls[call.address.group_id.as_str()].parse().unwrap();
            }
            _ => {}
        }
        let kind = if self.fault == Fault::SendsPlainText { "text/plain" } else { "application/json" };
        let headers = [(header::CONTENT_TYPE, HeaderValue::from_static(kind))];
        for attempt in 0..ATTEMPTS {
            let body = Bytes::from(message.to_string());
            let status = self.client.post_json(&url, &headers, body).await.ok().map(|reply| reply.status);
            if !self.goes_on_after(status, is_event) {
                if status == Some(400) && !is_event {
                    let error = self.result(call, "Error: the result was refused (400)", false);
                    drop(self.client.post_json(&url, &headers, error.to_string().into()).await);
                }
                return status;
            }
            if self.fault != Fault::NeverPauses {
                tokio::time::sleep(Duration::from_millis(60) * 2_u32.pow(attempt.min(5))).await;
            }
        }
        None
    }

    fn goes_on_after(&self, status: Option<u16>, is_event: bool) -> bool {
        match (status, self.fault) {
            (None, fault) => fault != Fault::GivesUpAfterALostConnection,
            (Some(503), Fault::GivesUpAfter503) => is_event,
            (Some(503), Fault::DropsEventsAfter503) => !is_event,
            (Some(404), Fault::RetriesAfter404) | (Some(400), Fault::RetriesAfter400) => !is_event,
            (Some(400), Fault::RetriesEventsAfter400) => is_event,
            (Some(status), _) => status >= 500,
        }
    }

    fn needs_setup(&self, call: &Call) -> bool {
        let state = self.state.lock().unwrap();
        self.fault == Fault::NeedsSetup && !state.opened.contains(call.address.group_id.as_str())
    }

    /// Counts a notification against the rate limit, unless the server has this fault.
    fn admits_notification(&self, unlimited: Fault) -> bool {
        self.notified.fetch_add(1, Ordering::Relaxed) < BURST || self.fault == unlimited
    }
}

async fn close(State(server): State<Arc<Server>>, headers: HeaderMap, body: Bytes) -> Response {
    let fault = server.fault;
    if !is_authorized(&headers) && !matches!(fault, Fault::LetsAnyoneClose | Fault::NeedsNoToken) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if !server.admits_notification(Fault::ClosesWithoutRateLimit) {
        return StatusCode::TOO_MANY_REQUESTS.into_response();
    }
    let [Some(thread)] = ids(&body, ["thread_id"]) else { return StatusCode::BAD_REQUEST.into_response() };
    if fault == Fault::HasNoCloseEndpoint {
        return StatusCode::NOT_FOUND.into_response();
    }
    if fault == Fault::RefusesHostileIds && is_odd(&thread) {
        return StatusCode::BAD_REQUEST.into_response();
    }
    if fault == Fault::DeletesFilesByThreadId {
        delete(&thread);
    }
    if fault == Fault::FailsAtHostileThreadIds && is_odd(&thread) {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if fault == Fault::WaitsForItsCleanUp {
        tokio::time::sleep(LATE).await;
    }
    let mut state = server.state.lock().unwrap();
    let mut calls = state.calls.values().filter(|call| call.address.group_id.as_str() == thread).peekable();
    let is_known = calls.peek().is_some();
    if fault != Fault::SendsEventsAfterClosing {
        for call in calls {
            call.stop.send_replace(true);
        }
        for call in state.calls.values().filter(|_| fault == Fault::ClosesAllThreads) {
            call.stop.send_replace(true);
        }
    }
    let is_first = state.closed.insert(thread.clone());
    match fault {
        // The ids of the hostile probe are excluded, so that only one probe fails.
        Fault::Answers404ToUnknownThreads if !is_known && !is_odd(&thread) => {
            StatusCode::NOT_FOUND.into_response()
        }
        Fault::Answers500ToClosings if is_known && is_first => {
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        Fault::Answers409ToASecondClosing if !is_first => StatusCode::CONFLICT.into_response(),
        Fault::RevealsWhatIsAtWork => {
            axum::Json(json!({"stopped": usize::from(state.at_work.contains(&thread))})).into_response()
        }
        Fault::AnswersClosingsWithABody => axum::Json(json!({"ok": true})).into_response(),
        Fault::RevealsWhetherAThreadIsKnown => axum::Json(json!({"known": is_known})).into_response(),
        _ => StatusCode::OK.into_response(),
    }
}

async fn cancel(State(server): State<Arc<Server>>, headers: HeaderMap, body: Bytes) -> Response {
    let fault = server.fault;
    if !is_authorized(&headers) && !matches!(fault, Fault::LetsAnyoneCancel | Fault::NeedsNoToken) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if !server.admits_notification(Fault::CancelsWithoutRateLimit) {
        return StatusCode::TOO_MANY_REQUESTS.into_response();
    }
    let [Some(thread), Some(id)] = ids(&body, ["thread_id", "tool_call_id"]) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    if fault == Fault::HasNoCancelEndpoint {
        return StatusCode::NOT_FOUND.into_response();
    }
    if fault == Fault::RefusesHostileIds && (is_odd(&id) || is_odd(&thread)) {
        return StatusCode::BAD_REQUEST.into_response();
    }
    if fault == Fault::DeletesFilesByCallId {
        delete(&id);
    }
    if fault == Fault::FailsAtHostileCallIds && (is_odd(&id) || is_odd(&thread)) {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let mut state = server.state.lock().unwrap();
    let matches_call =
        |call: &Call| call.address.group_id.as_str() == thread && call.address.id.as_str() == id;
    let matches_id_only = |call: &Call| fault == Fault::CancelsByIdAlone && call.address.id.as_str() == id;
    let call = state.calls.values().find(|call| matches_call(call)).cloned();
    for call in state.calls.values().filter(|call| matches_call(call) || matches_id_only(call)) {
        call.stop.send_replace(fault != Fault::SendsEventsAfterCancellation);
    }
    if let Some(call) = call.clone().filter(|_| fault == Fault::SendsAResultAfterCancellingAFinishedCall) {
        let server = Arc::clone(&server);
        tokio::spawn(
            async move { server.deliver(&call, &server.result(&call, "Error: cancelled", false)).await },
        );
    }
    let is_odd = is_odd(&thread) || is_odd(&id);
    let is_first = state.cancelled.insert((thread, id));
    match fault {
        Fault::Answers404ToUnknownCalls if call.is_none() && !is_odd => StatusCode::NOT_FOUND.into_response(),
        Fault::Answers409ToASecondCancellation if !is_first && call.is_some() => {
            StatusCode::CONFLICT.into_response()
        }
        Fault::AnswersCancellationsWithABody => axum::Json(json!({"ok": true})).into_response(),
        Fault::RevealsWhetherACallIsKnown => axum::Json(json!({"found": call.is_some()})).into_response(),
        _ => StatusCode::OK.into_response(),
    }
}

fn ids<const N: usize>(body: &[u8], fields: [&str; N]) -> [Option<String>; N] {
    let message: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    fields.map(|field| message[field].as_str().map(str::to_owned))
}

/// Deletes a directory below the temporary directory of the checker.
fn delete(path: &str) {
    if path.contains("/rap-check-") && !path.contains("%") {
        drop(std::fs::remove_dir_all(std::path::Path::new("/").join(path)));
    }
}

/// Returns true for ids as the hostile probe uses them.
fn is_odd(id: &str) -> bool {
    id.is_empty() || id.len() > 256 || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

fn is_authorized(headers: &HeaderMap) -> bool {
    headers.get(header::AUTHORIZATION).is_some_and(|value| value == &format!("Bearer {TOKEN}"))
}
