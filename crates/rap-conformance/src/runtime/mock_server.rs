//! HTTP server that acts as all tool servers and as the model, and that records every request of the runtime.
//!
//! Probes configure in advance how requests are answered. Each scenario has a number, and every message of a scenario
//! contains a marker with that number. Therefore many probes can run concurrently.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Request, Response, header};
use bytes::Bytes;
use rap_io::serve::{ServeLimits, serve_until};
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, DISCOVERY_PATH, Secret};
use serde_json::Value;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

use super::Timeouts;
use super::latch::Latch;
use super::model::{self, Prompt};
use super::tools::{self, INVOKE_PATH, NotificationBehavior};
use crate::{Exchange, RedactedMessage};

/// Path of the model's API.
pub(crate) const MODEL_PATH: &str = "/v1";
/// Path below which the answers to user choices arrive.
pub(crate) const ANSWERS_PATH: &str = "/answers/";
/// Maximum size of a request, in bytes.
const BODY_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of recorded requests. Further requests are answered 503.
const REQUESTS: usize = 50_000;
/// Number of tool servers.
pub(crate) const SERVERS: usize = 3;
const LIMITS: ServeLimits =
    ServeLimits { connections: 1024, head_within: Duration::from_secs(30), urgent_paths: &[] };

/// Kind of a request. The number is the index of the tool server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Request for a toolset.
    Discovery(usize),
    Invocation(usize),
    /// Notification that a thread was closed.
    Close(usize),
    /// Notification that a call was cancelled.
    Cancel(usize),
    ModelRequest,
    /// Answer to a user choice.
    ChoiceAnswer,
    /// Request that is not part of the protocol.
    Other,
}

impl Route {
    fn of(path: &str) -> Route {
        if path == format!("{MODEL_PATH}/chat/completions") {
            return Route::ModelRequest;
        }
        if path.starts_with(ANSWERS_PATH) {
            return Route::ChoiceAnswer;
        }
        let split = (0..SERVERS).find_map(|at| Some((at, path.strip_prefix(tools::base_path(at))?)));
        match split {
            Some((at, DISCOVERY_PATH)) => Route::Discovery(at),
            Some((at, INVOKE_PATH)) => Route::Invocation(at),
            Some((at, CLOSE_THREAD_PATH)) => Route::Close(at),
            Some((at, CANCEL_TOOL_CALL_PATH)) => Route::Cancel(at),
            _ => Route::Other,
        }
    }
}

/// Answer to a request.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) kind: Option<&'static str>,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Reply {
        Reply { status, kind: None, body: Bytes::new() }
    }

    pub(crate) fn json(value: &Value) -> Reply {
        Reply { status: 200, kind: Some("application/json"), body: value.to_string().into() }
    }
}

/// A request of the runtime and the answer to it.
#[derive(Debug)]
pub(crate) struct RecordedRequest {
    pub(crate) route: Route,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) raw: Bytes,
    /// Parsed body; null if it is not JSON.
    pub(crate) body: Value,
    pub(crate) at: Instant,
    pub(crate) reply: Reply,
    /// Number of the scenario of the first marker in the request; `None` if there is no marker.
    pub(crate) scenario: Option<u32>,
    /// Prompt, if this is a model request.
    pub(crate) prompt: Option<Prompt>,
}

impl RecordedRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Marker of the call, if this is an invocation; otherwise the empty string.
    pub(crate) fn marker(&self) -> &str {
        self.body["arguments"][tools::MARKER].as_str().unwrap_or_default()
    }

    /// A string field of the body, or the empty string.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.body[name].as_str().unwrap_or_default()
    }

    pub(crate) fn exchange(&self) -> Exchange {
        let RecordedRequest { method, path, raw, reply, .. } = self;
        Exchange::new(
            RedactedMessage::new(format!("{method} {path}"), raw),
            RedactedMessage::new(reply.status.to_string(), &reply.body),
        )
    }
}

/// Identifies one step of one scenario in messages, arguments and results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Marker {
    pub(crate) scenario: u32,
    pub(crate) step: u32,
}

/// Recorded requests and configured answers of a run.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) requests: Vec<Arc<RecordedRequest>>,
    /// Scripted steps of the model, by marker.
    pub(crate) steps: HashMap<Marker, model::ScriptedStep>,
    /// Answers to the next invocations of a step, by marker.
    pub(crate) acknowledgements: HashMap<Marker, VecDeque<tools::Acknowledgement>>,
    /// Treatment of notifications, by thread.
    pub(crate) notification_behaviors: HashMap<String, NotificationBehavior>,
    /// Answers to discovery requests, by tool server.
    pub(crate) documents: Vec<Reply>,
}

pub(crate) struct MockServer {
    pub(crate) url: String,
    /// Random text in all markers, which distinguishes them from those of other runs.
    run: String,
    pub(crate) timeouts: Timeouts,
    pub(crate) token: Secret,
    /// Number of the next scenario.
    pub(crate) scenarios: AtomicU32,
    /// Number in the next call id of the model.
    model_ids: AtomicU32,
    record: Mutex<Record>,
    arrivals: watch::Sender<usize>,
    /// Socket of the third server's endpoint, until it starts to listen.
    third_endpoint: Mutex<Option<TcpSocket>>,
}

impl fmt::Debug for MockServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockServer").field("url", &self.url).finish_non_exhaustive()
    }
}

impl MockServer {
    /// Starts to listen. `public` is the URL by which the runtime reaches the listener; if `None`, the listener's
    /// address.
    pub(crate) async fn open(
        listener: TcpListener,
        public: Option<&str>,
        run: String,
        token: Secret,
        timeouts: Timeouts,
    ) -> std::io::Result<Arc<MockServer>> {
        let address = listener.local_addr()?;
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind((address.ip(), 0).into())?;
        let third_address = socket.local_addr()?;
        let url = public.map_or_else(|| format!("http://{address}"), |url| url.trim_end_matches('/').into());
        let third_url = match url::Url::parse(&url) {
            Ok(public) => {
                format!(
                    "{}://{}:{}",
                    public.scheme(),
                    public.host_str().unwrap_or_default(),
                    third_address.port()
                )
            }
            Err(_) => format!("http://{third_address}"),
        };
        let documents = (0..SERVERS).map(|at| Reply::json(&tools::document(at, &url, &third_url)));
        let record = Record { documents: documents.collect(), ..Record::default() };
        let server = Arc::new(MockServer {
            url,
            run,
            timeouts,
            token,
            scenarios: AtomicU32::new(1),
            model_ids: AtomicU32::new(1),
            record: Mutex::new(record),
            arrivals: watch::Sender::new(0),
            third_endpoint: Mutex::new(Some(socket)),
        });
        server.serve(listener);
        Ok(server)
    }

    fn serve(self: &Arc<Self>, listener: TcpListener) {
        let router = Router::new().fallback(handle).with_state(Arc::clone(self));
        tokio::spawn(async move {
            serve_until(listener, router, LIMITS, std::future::pending()).await;
        });
    }

    /// Starts to listen at the endpoint of the third server, which refuses connections until then.
    pub(crate) fn start_third_endpoint(self: &Arc<Self>) -> std::io::Result<()> {
        let socket = self.third_endpoint.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(socket) = socket {
            self.serve(socket.listen(64)?);
        }
        Ok(())
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn arrivals(&self) -> watch::Receiver<usize> {
        self.arrivals.subscribe()
    }

    /// Base URL of a tool server.
    pub(crate) fn tool_url(&self, at: usize) -> String {
        format!("{}{}", self.url, tools::base_path(at))
    }

    pub(crate) fn model_url(&self) -> String {
        format!("{}{MODEL_PATH}", self.url)
    }

    pub(crate) fn marker_text(&self, marker: Marker) -> String {
        format!("rapcheck-{}-{}-{}", self.run, marker.scenario, marker.step)
    }

    /// A new id that the model can give to a call.
    pub(crate) fn model_id(&self) -> String {
        format!("call_{}_{}", self.run, self.model_ids.fetch_add(1, Ordering::Relaxed))
    }

    /// Text that occurs nowhere else and that probes look for in prompts. It ends with a marker without a step, so that
    /// the model does nothing about it.
    pub(crate) fn unique_text(&self, scenario: u32, prefix: &str) -> String {
        format!("{prefix}.{}", self.marker_text(Marker { scenario, step: 0 }))
    }

    /// Markers of this run in a text, in order.
    pub(crate) fn markers(&self, text: &str) -> Vec<Marker> {
        let prefix = format!("rapcheck-{}-", self.run);
        text.match_indices(&prefix).filter_map(|(at, _)| parse_marker(&text[at + prefix.len()..])).collect()
    }

    /// Requests so far for which `wanted` returns true.
    pub(crate) fn requests(&self, wanted: impl Fn(&RecordedRequest) -> bool) -> Vec<Arc<RecordedRequest>> {
        self.record().requests.iter().filter(|request| wanted(request)).cloned().collect()
    }

    /// Number of requests for the toolset of a server.
    pub(crate) fn discoveries(&self, at: usize) -> usize {
        self.requests(|request| request.route == Route::Discovery(at)).len()
    }

    /// Records a request and selects the answer.
    fn receive(
        &self,
        parts: axum::http::request::Parts,
        raw: Bytes,
    ) -> (Arc<RecordedRequest>, Option<Latch>) {
        let body: Value = serde_json::from_slice(&raw).unwrap_or(Value::Null);
        let path = parts.uri.path().to_owned();
        let route = Route::of(&path);
        let mut record = self.record();
        let prompt = (route == Route::ModelRequest).then(|| Prompt::of(&body));
        let markers = match (&prompt, route) {
            (Some(prompt), _) => prompt.markers(self),
            (None, Route::Invocation(_)) => self.markers(&body["arguments"].to_string()),
            _ => Vec::new(),
        };
        let (reply, latch) = match route {
            Route::Discovery(at) => (record.documents[at].clone(), None),
            Route::Invocation(_) => acknowledge(&mut record, &markers, &body),
            Route::Close(_) | Route::Cancel(_) => {
                let thread = body["thread_id"].as_str().unwrap_or_default();
                record.notification_behaviors.get(thread).cloned().unwrap_or_default().answer()
            }
            Route::ChoiceAnswer => (Reply::status(200), None),
            Route::ModelRequest | Route::Other => match &prompt {
                Some(prompt) => self.answer(&mut record, prompt, &body),
                None => (Reply::status(404), None),
            },
        };
        let axum::http::request::Parts { method, headers, .. } = parts;
        let (at, scenario) = (Instant::now(), markers.first().map(|marker| marker.scenario));
        let request = Arc::new(RecordedRequest {
            route,
            method,
            path,
            headers,
            raw,
            body,
            at,
            reply,
            scenario,
            prompt,
        });
        record.requests.push(Arc::clone(&request));
        drop(record);
        self.arrivals.send_modify(|count| *count += 1);
        (request, latch)
    }

    fn answer(&self, record: &mut Record, prompt: &Prompt, body: &Value) -> (Reply, Option<Latch>) {
        let pending = prompt.pending_markers(self);
        for marker in &pending {
            let step = record.steps.get_mut(marker);
            if let Some(status) = step.and_then(|step| step.error_statuses.pop_front()) {
                return (model::error_reply(status), None);
            }
        }
        let steps: Vec<&model::ScriptedStep> =
            pending.iter().filter_map(|marker| record.steps.get(marker)).collect();
        let latch = steps.iter().find_map(|step| step.latch.clone());
        (model::answer(&steps, body), latch)
    }
}

fn acknowledge(record: &mut Record, markers: &[Marker], invocation: &Value) -> (Reply, Option<Latch>) {
    let answers = markers.first().and_then(|marker| record.acknowledgements.get_mut(marker));
    answers.and_then(VecDeque::pop_front).unwrap_or_default().reply(invocation)
}

fn parse_marker(text: &str) -> Option<Marker> {
    let (scenario, rest) = number(text)?;
    let (step, _) = number(rest.strip_prefix('-')?)?;
    Some(Marker { scenario, step })
}

fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

async fn handle(State(server): State<Arc<MockServer>>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(raw) = axum::body::to_bytes(body, BODY_BYTES).await else {
        return respond(&Reply::status(413));
    };
    if server.record().requests.len() >= REQUESTS {
        return respond(&Reply::status(503));
    }
    let (request, latch) = server.receive(parts, raw);
    if let Some(latch) = latch {
        latch.wait().await;
    }
    respond(&request.reply)
}

fn respond(reply: &Reply) -> Response<Body> {
    let mut response = Response::builder().status(reply.status);
    if let Some(kind) = reply.kind {
        response = response.header(header::CONTENT_TYPE, kind);
    }
    response.body(Body::from(reply.body.clone())).expect("bug: status and header are valid")
}
