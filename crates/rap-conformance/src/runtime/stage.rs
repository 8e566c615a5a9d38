//! The stage: one listener that plays every tool server and the model, and writes down all that the runtime sends.
//!
//! How a request is answered is decided when it arrives, by what the probes have said before: each probe has a number,
//! and everything that is about it carries a mark with that number. So all probes can be at work at the same time.

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

use super::Pace;
use super::gate::Gate;
use super::model::{self, Prompt};
use super::tools::{self, Conduct, INVOKE_PATH};
use crate::{Exchange, Shown};

/// Where the model is, below the stage's address.
pub(crate) const MODEL_PATH: &str = "/v1";
/// Where people's answers are sent, below the stage's address.
pub(crate) const ANSWERS_PATH: &str = "/answers/";
/// The largest request that is read, in bytes.
const BODY_BYTES: usize = 64 * 1024 * 1024;
/// How many requests are kept; a runtime that sends more has lost its way and is answered 503.
const REQUESTS: usize = 50_000;
/// How many tool servers there are.
pub(crate) const SERVERS: usize = 3;
const LIMITS: ServeLimits = ServeLimits { connections: 1024, head_within: Duration::from_secs(30) };

/// What a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Somebody wants to know the tools of a server.
    Discovery(usize),
    /// A call of a tool.
    Invocation(usize),
    /// A thread was closed.
    Close(usize),
    /// A call was cancelled.
    Cancel(usize),
    /// The model is asked.
    Question,
    /// A person has answered.
    Answer,
    /// Nothing that the protocol knows.
    Other,
}

impl Route {
    fn of(path: &str) -> Route {
        if path == format!("{MODEL_PATH}/chat/completions") {
            return Route::Question;
        }
        if path.starts_with(ANSWERS_PATH) {
            return Route::Answer;
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

/// How a request is answered.
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

/// A request as it came in, and the answer to it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) route: Route,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) raw: Bytes,
    /// The body, if it is JSON.
    pub(crate) body: Value,
    pub(crate) at: Instant,
    pub(crate) reply: Reply,
    /// The scene that it is about, by the first mark in it.
    pub(crate) scene: Option<u32>,
    /// What the model reads, if this is a question.
    pub(crate) prompt: Option<Prompt>,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// The mark of the call, if this is an invocation.
    pub(crate) fn mark(&self) -> &str {
        self.body["arguments"][tools::MARK].as_str().unwrap_or_default()
    }

    /// A text field of the body, or nothing.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.body[name].as_str().unwrap_or_default()
    }

    pub(crate) fn exchange(&self) -> Exchange {
        let Asked { method, path, raw, reply, .. } = self;
        Exchange::new(
            Shown::new(format!("{method} {path}"), raw),
            Shown::new(reply.status.to_string(), &reply.body),
        )
    }
}

/// The mark of one step of one probe, as it stands in what is said, called and returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mark {
    pub(crate) scene: u32,
    pub(crate) step: u32,
}

/// The notes of a run.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) asked: Vec<Arc<Asked>>,
    /// What the model does about a mark.
    pub(crate) steps: HashMap<Mark, model::Step>,
    /// How the next attempts to send the calls of a mark are answered.
    pub(crate) acknowledgements: HashMap<Mark, VecDeque<tools::Acknowledgement>>,
    /// How servers take the notifications about a thread.
    pub(crate) conducts: HashMap<String, Conduct>,
    /// What discovery answers.
    pub(crate) documents: Vec<Reply>,
}

/// The stage itself.
pub(crate) struct Stage {
    pub(crate) url: String,
    /// Tells this run's marks from those of others.
    run: String,
    pub(crate) pace: Pace,
    pub(crate) token: Secret,
    /// The number of the next scene.
    pub(crate) scenes: AtomicU32,
    /// The number of the next id that the model gives to a call.
    model_ids: AtomicU32,
    record: Mutex<Record>,
    arrivals: watch::Sender<usize>,
    /// Where the third server's tools will be, once somebody listens there.
    away: Mutex<Option<TcpSocket>>,
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stage").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Stage {
    /// Listens. `public` is how the runtime reaches the address, if not by itself.
    pub(crate) async fn open(
        listener: TcpListener,
        public: Option<&str>,
        run: String,
        token: Secret,
        pace: Pace,
    ) -> std::io::Result<Arc<Stage>> {
        let address = listener.local_addr()?;
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind((address.ip(), 0).into())?;
        let away = socket.local_addr()?;
        let url = public.map_or_else(|| format!("http://{address}"), |url| url.trim_end_matches('/').into());
        let away_url = match url::Url::parse(&url) {
            Ok(public) => {
                format!("{}://{}:{}", public.scheme(), public.host_str().unwrap_or_default(), away.port())
            }
            Err(_) => format!("http://{away}"),
        };
        let documents = (0..SERVERS).map(|at| Reply::json(&tools::document(at, &url, &away_url)));
        let record = Record { documents: documents.collect(), ..Record::default() };
        let stage = Arc::new(Stage {
            url,
            run,
            pace,
            token,
            scenes: AtomicU32::new(1),
            model_ids: AtomicU32::new(1),
            record: Mutex::new(record),
            arrivals: watch::Sender::new(0),
            away: Mutex::new(Some(socket)),
        });
        stage.serve(listener);
        Ok(stage)
    }

    fn serve(self: &Arc<Self>, listener: TcpListener) {
        let router = Router::new().fallback(perform).with_state(Arc::clone(self));
        tokio::spawn(async move {
            serve_until(listener, router, LIMITS, std::future::pending()).await;
        });
    }

    /// From now on somebody listens where the third server's tools are.
    pub(crate) fn come_home(self: &Arc<Self>) -> std::io::Result<()> {
        let socket = self.away.lock().unwrap_or_else(PoisonError::into_inner).take();
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

    /// The base URL of a tool server.
    pub(crate) fn tool_url(&self, at: usize) -> String {
        format!("{}{}", self.url, tools::base_path(at))
    }

    pub(crate) fn model_url(&self) -> String {
        format!("{}{MODEL_PATH}", self.url)
    }

    /// How a mark is written.
    pub(crate) fn written(&self, mark: Mark) -> String {
        format!("rapcheck-{}-{}-{}", self.run, mark.scene, mark.step)
    }

    /// An id for a call of the model, which it has given to no other.
    pub(crate) fn model_id(&self) -> String {
        format!("call_{}_{}", self.run, self.model_ids.fetch_add(1, Ordering::Relaxed))
    }

    /// A word of a probe's own, to be looked for in prompts. It ends in a mark about which nothing is to be done.
    pub(crate) fn word(&self, scene: u32, word: &str) -> String {
        format!("{word}.{}", self.written(Mark { scene, step: 0 }))
    }

    /// The marks of this run in a text, in order.
    pub(crate) fn marks(&self, text: &str) -> Vec<Mark> {
        let prefix = format!("rapcheck-{}-", self.run);
        text.match_indices(&prefix).filter_map(|(at, _)| mark(&text[at + prefix.len()..])).collect()
    }

    /// The requests that a probe is interested in, so far.
    pub(crate) fn asked(&self, wanted: impl Fn(&Asked) -> bool) -> Vec<Arc<Asked>> {
        self.record().asked.iter().filter(|asked| wanted(asked)).cloned().collect()
    }

    /// How often a server was asked for its tools.
    pub(crate) fn discoveries(&self, at: usize) -> usize {
        self.asked(|asked| asked.route == Route::Discovery(at)).len()
    }

    /// Notes a request and decides on its answer.
    fn enter(&self, parts: axum::http::request::Parts, raw: Bytes) -> (Arc<Asked>, Option<Gate>) {
        let body: Value = serde_json::from_slice(&raw).unwrap_or(Value::Null);
        let path = parts.uri.path().to_owned();
        let route = Route::of(&path);
        let mut record = self.record();
        let prompt = (route == Route::Question).then(|| Prompt::of(&body));
        let marks = match (&prompt, route) {
            (Some(prompt), _) => prompt.marks(self),
            (None, Route::Invocation(_)) => self.marks(&body["arguments"].to_string()),
            _ => Vec::new(),
        };
        let (reply, gate) = match route {
            Route::Discovery(at) => (record.documents[at].clone(), None),
            Route::Invocation(_) => (acknowledge(&mut record, &marks, &body), None),
            Route::Close(_) | Route::Cancel(_) => {
                let thread = body["thread_id"].as_str().unwrap_or_default();
                record.conducts.get(thread).cloned().unwrap_or_default().answer()
            }
            Route::Answer => (Reply::status(200), None),
            Route::Question | Route::Other => match &prompt {
                Some(prompt) => self.answer(&mut record, prompt, &body),
                None => (Reply::status(404), None),
            },
        };
        let axum::http::request::Parts { method, headers, .. } = parts;
        let (at, scene) = (Instant::now(), marks.first().map(|mark| mark.scene));
        let asked = Arc::new(Asked { route, method, path, headers, raw, body, at, reply, scene, prompt });
        record.asked.push(Arc::clone(&asked));
        drop(record);
        self.arrivals.send_modify(|count| *count += 1);
        (asked, gate)
    }

    fn answer(&self, record: &mut Record, prompt: &Prompt, body: &Value) -> (Reply, Option<Gate>) {
        let undone = prompt.undone(self);
        for mark in &undone {
            let step = record.steps.get_mut(mark);
            if let Some(status) = step.and_then(|step| step.refusals.pop_front()) {
                return (model::refusal(status), None);
            }
        }
        let steps: Vec<&model::Step> = undone.iter().filter_map(|mark| record.steps.get(mark)).collect();
        let gate = steps.iter().find_map(|step| step.gate.clone());
        (model::answer(&steps, body), gate)
    }
}

fn acknowledge(record: &mut Record, marks: &[Mark], invocation: &Value) -> Reply {
    let waiting = marks.first().and_then(|mark| record.acknowledgements.get_mut(mark));
    waiting.and_then(VecDeque::pop_front).unwrap_or_default().reply(invocation)
}

fn mark(text: &str) -> Option<Mark> {
    let (scene, rest) = number(text)?;
    let (step, _) = number(rest.strip_prefix('-')?)?;
    Some(Mark { scene, step })
}

fn number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

async fn perform(State(stage): State<Arc<Stage>>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(raw) = axum::body::to_bytes(body, BODY_BYTES).await else {
        return respond(&Reply::status(413));
    };
    if stage.record().asked.len() >= REQUESTS {
        return respond(&Reply::status(503));
    }
    let (asked, gate) = stage.enter(parts, raw);
    if let Some(gate) = gate {
        gate.passed().await;
    }
    respond(&asked.reply)
}

fn respond(reply: &Reply) -> Response<Body> {
    let mut response = Response::builder().status(reply.status);
    if let Some(kind) = reply.kind {
        response = response.header(header::CONTENT_TYPE, kind);
    }
    response.body(Body::from(reply.body.clone())).expect("bug: status and header are valid")
}
