//! Traces of what agents do, sent to a collector with OTLP over HTTP.
//!
//! Each turn of a thread is a trace: a root span, its model requests, the invocations that follow from its answer, and the
//! callbacks of these calls. The root span has a link to that of the turn before it. A message of a client that sends a
//! `traceparent` is a span of the client's trace, to which the next turn has a link.
//!
//! Invariants:
//! - The ids of a turn and of its calls are computed from stored values, so an invocation or a callback after a restart, or
//!   on another node, belongs to the same trace. Only links, and model requests without an answer yet, are in memory.
//! - Spans contain names, ids, counts, times and kinds of outcomes. They contain no text of a message, no argument, no path
//!   of a URL and no secret.
//! - Nothing waits for the collector. Spans that do not fit into the queue are dropped.

mod export;
mod span;

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Entry, Item, OpenCall, Phase, Step, Usage, Write};
use rap_protocol::{CallId, Secret, TRACEPARENT, ThreadId, Timestamp, TraceContext};
use sha2::{Digest, Sha256};
use url::Url;

use crate::model::{self, Model, ModelAnswer};
use crate::store::{InvokeWork, Thread, ThreadKey};
use crate::token::Grant;
pub(crate) use export::run;
use export::{Queue, Receiver};
use span::{Kind, Span};

/// Maximum number of threads whose links and unfinished turns are remembered. Beyond it, they are forgotten.
const REMEMBERED: usize = 4096;
/// Maximum number of model requests of one turn that are remembered.
const REQUESTS: usize = 32;

/// Destination of traces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TelemetrySettings {
    /// URL to which traces are posted, such as `http://127.0.0.1:4318/v1/traces`.
    pub url: Url,
    /// Headers of each request, such as an API key of the collector.
    pub headers: Vec<(String, Secret)>,
    /// Name of this program in traces.
    pub service: String,
}

/// Records spans and puts them into the queue of the collector.
pub(crate) struct Telemetry {
    queue: Queue,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    /// Model requests of the turn in progress.
    requests: HashMap<ThreadKey, Vec<ModelRequestSpan>>,
    /// Root span of the last turn.
    previous: HashMap<ThreadKey, TraceContext>,
    /// Span of the last message of a client since then.
    clients: HashMap<ThreadId, TraceContext>,
}

struct ModelRequestSpan {
    began: SystemTime,
    ended: SystemTime,
    model: String,
    provider: &'static str,
    server: String,
    outcome: Result<Usage, &'static str>,
}

/// Returns the context of a turn whose answer or approval was stored at this time.
fn turn_context(incarnation: u64, at: Timestamp) -> TraceContext {
    let digest = Sha256::new_with_prefix("rap turn");
    let digest = digest.chain_update(incarnation.to_be_bytes()).chain_update(at.0.to_be_bytes()).finalize();
    let (trace, rest) = digest.split_first_chunk::<16>().expect("bug: a digest has 32 bytes");
    let span = rest.first_chunk::<8>().expect("bug: a digest has 32 bytes");
    TraceContext { trace: *trace, span: *span, sampled: true }
}

/// Returns the context of a call that was made or approved at this time.
fn call_context(incarnation: u64, since: Timestamp, call: &CallId) -> TraceContext {
    let digest = Sha256::new_with_prefix("rap call");
    let digest = digest.chain_update(incarnation.to_be_bytes()).chain_update(call.as_str()).finalize();
    let span = digest.first_chunk::<8>().expect("bug: a digest has 32 bytes");
    TraceContext { span: *span, ..turn_context(incarnation, since) }
}

/// Returns the context of the sender of a request, if it has sent one.
fn received_context(headers: &HeaderMap) -> Option<TraceContext> {
    TraceContext::parse(headers.get(TRACEPARENT)?.to_str().ok()?)
}

fn random_span() -> [u8; 8] {
    let mut span = [0; 8];
    getrandom::fill(&mut span).expect("bug: the system provides random numbers");
    span
}

/// Inserts a value into a map of bounded size.
fn remember<K: Eq + Hash, V>(map: &mut HashMap<K, V>, key: K, value: V) {
    if map.len() >= REMEMBERED {
        map.clear();
    }
    map.insert(key, value);
}

fn time(at: Timestamp) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(at.0).unwrap_or_default())
}

impl Telemetry {
    /// Returns the recorder, and the receiver of its spans for [`run`].
    pub(crate) fn new() -> (Telemetry, Receiver) {
        let (queue, receiver) = Queue::new();
        (Telemetry { queue, turns: Mutex::default() }, receiver)
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a model request. It is sent when the turn ends.
    pub(crate) fn model_request(
        &self,
        thread: &Thread,
        model: &dyn Model,
        began: SystemTime,
        answer: &Result<ModelAnswer, model::Error>,
    ) {
        let outcome = match answer {
            Ok(answer) => Ok(answer.usage),
            Err(model::Error::Retry { .. }) => Err("temporary"),
            Err(model::Error::TooLong { .. }) => Err("too_long"),
            Err(model::Error::Refused { .. }) => Err("refused"),
        };
        let server = Url::parse(model.destination()).ok().and_then(|url| url.host_str().map(str::to_owned));
        let request = ModelRequestSpan {
            began,
            ended: SystemTime::now(),
            model: model.name().to_owned(),
            provider: model.provider(),
            server: server.unwrap_or_default(),
            outcome,
        };
        let mut turns = self.turns();
        if turns.requests.len() >= REMEMBERED {
            turns.requests.clear();
        }
        let requests = turns.requests.entry(thread.key).or_default();
        if requests.len() < REQUESTS {
            requests.push(request);
        }
    }

    /// Records what a committed step has ended: a turn, or an approval. Called in commit order, so it must not block.
    pub(crate) fn step(&self, thread: &Thread, step: &Step) {
        for write in &step.writes {
            match write {
                Write::Append { entry: Entry { at, item: Item::Assistant { calls, .. }, .. }, .. }
                    if !calls.iter().any(|call| call.arguments.is_synthetic()) =>
                {
                    self.turn_ended(thread, turn_context(thread.incarnation, *at), None);
                }
                Write::Approve(call) => self.approved(thread, call),
                _ => {}
            }
        }
        if matches!(step.head.phase(), Phase::Failed { .. }) {
            let failed = turn_context(thread.incarnation, Timestamp::from(SystemTime::now()));
            self.turn_ended(thread, failed, Some("model_request_failed"));
        }
    }

    /// Sends the spans of a turn. A turn whose model requests are not known, because they were sent before a restart, has only
    /// its root span.
    fn turn_ended(&self, thread: &Thread, root: TraceContext, error: Option<&'static str>) {
        let (requests, links) = {
            let mut turns = self.turns();
            let requests = turns.requests.remove(&thread.key).unwrap_or_default();
            if error.is_some() && requests.is_empty() {
                return;
            }
            let links = [turns.previous.remove(&thread.key), turns.clients.remove(&thread.id)];
            remember(&mut turns.previous, thread.key, root);
            (requests, links)
        };
        let now = SystemTime::now();
        let began = requests.first().map_or(now, |request| request.began);
        let agent = format!("invoke_agent {}", thread.agent);
        let mut span = Span::new(agent, Kind::Internal, root, None, (began, now));
        span.text("gen_ai.operation.name", "invoke_agent");
        span.text("gen_ai.agent.name", &thread.agent);
        span.text("gen_ai.conversation.id", thread.id.as_str());
        for link in links.into_iter().flatten() {
            span.link(link);
        }
        if let Some(error) = error {
            span.error(error);
        }
        self.queue.push(span);
        for request in requests {
            self.queue.push(request.span(root, thread));
        }
    }

    /// Sends the root span of the trace of a call that a person has allowed.
    fn approved(&self, thread: &Thread, call: &OpenCall) {
        let (root, at) = (turn_context(thread.incarnation, call.since), time(call.since));
        let mut span = Span::new(format!("approve {}", call.name), Kind::Internal, root, None, (at, at));
        span.text("gen_ai.tool.name", &call.name);
        span.text("gen_ai.tool.call.id", call.id.as_str());
        span.text("gen_ai.conversation.id", thread.id.as_str());
        if let Some(previous) = self.turns().previous.get(&thread.key) {
            span.link(*previous);
        }
        self.queue.push(span);
    }

    /// Returns the context that an invocation carries. It is the same in every attempt.
    pub(crate) fn invocation_context(work: &InvokeWork) -> TraceContext {
        call_context(work.thread.incarnation, work.call.since, &work.call.id)
    }

    /// Records an invocation that was accepted, refused or given up.
    pub(crate) fn invoked(&self, work: &InvokeWork, attempts: u32, failure: Option<&'static str>) {
        let InvokeWork { thread, call, .. } = work;
        let (root, began) = (turn_context(thread.incarnation, call.since), time(call.since));
        let context = Telemetry::invocation_context(work);
        let name = format!("execute_tool {}", call.name);
        let mut span = Span::new(name, Kind::Client, context, Some(root.span), (began, SystemTime::now()));
        span.text("gen_ai.operation.name", "execute_tool");
        span.text("gen_ai.tool.name", &call.name);
        span.text("gen_ai.tool.call.id", call.id.as_str());
        span.text("gen_ai.agent.name", &thread.agent);
        span.text("gen_ai.conversation.id", thread.id.as_str());
        span.number("rap.attempts", attempts.into());
        if let Some(host) = Url::parse(&call.server.0).ok().and_then(|url| url.host_str().map(str::to_owned))
        {
            span.text("server.address", &host);
        }
        if let Some(failure) = failure {
            span.error(failure);
        }
        self.queue.push(span);
    }

    /// Records a callback of a call. Its parent is the span that the tool names, else the invocation of the call.
    pub(crate) fn callback(
        &self,
        grant: &Grant,
        thread: Option<&ThreadId>,
        headers: &HeaderMap,
        began: SystemTime,
        status: StatusCode,
    ) {
        let parent = received_context(headers);
        let parent = parent.unwrap_or_else(|| call_context(grant.incarnation, grant.since, &grant.call));
        let context = TraceContext { span: random_span(), ..parent };
        let times = (began, SystemTime::now());
        let mut span = Span::new("callback".into(), Kind::Server, context, Some(parent.span), times);
        span.text("gen_ai.tool.call.id", grant.call.as_str());
        if let Some(thread) = thread {
            span.text("gen_ai.conversation.id", thread.as_str());
        }
        span.number("http.response.status_code", status.as_u16().into());
        if !status.is_success() {
            span.error("refused");
        }
        self.queue.push(span);
    }

    /// Records a message of a client that sends a context. The next turn of the thread has a link to it.
    pub(crate) fn client_message(&self, thread: &ThreadId, headers: &HeaderMap, began: SystemTime) {
        let Some(parent) = received_context(headers) else { return };
        let context = TraceContext { span: random_span(), ..parent };
        let times = (began, SystemTime::now());
        let mut span = Span::new("send_message".into(), Kind::Server, context, Some(parent.span), times);
        span.text("gen_ai.conversation.id", thread.as_str());
        self.queue.push(span);
        remember(&mut self.turns().clients, thread.clone(), context);
    }
}

impl ModelRequestSpan {
    fn span(self, root: TraceContext, thread: &Thread) -> Span {
        let context = TraceContext { span: random_span(), ..root };
        let (name, times) = (format!("chat {}", self.model), (self.began, self.ended));
        let mut span = Span::new(name, Kind::Client, context, Some(root.span), times);
        span.text("gen_ai.operation.name", "chat");
        span.text("gen_ai.provider.name", self.provider);
        span.text("gen_ai.request.model", &self.model);
        span.text("gen_ai.agent.name", &thread.agent);
        span.text("gen_ai.conversation.id", thread.id.as_str());
        if !self.server.is_empty() {
            span.text("server.address", &self.server);
        }
        match self.outcome {
            Ok(usage) => {
                span.number("gen_ai.usage.input_tokens", i64::try_from(usage.input).unwrap_or(i64::MAX));
                span.number("gen_ai.usage.output_tokens", i64::try_from(usage.output).unwrap_or(i64::MAX));
            }
            Err(why) => span.error(why),
        }
        span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ids must never change: a call that was sent by an older version has them.
    #[test]
    fn ids_are_computed_from_stored_values() {
        let call = CallId::new("rap_0000000000000007_1").unwrap();
        let (turn, of_call) = (turn_context(7, Timestamp(1000)), call_context(7, Timestamp(1000), &call));
        assert_eq!(
            (turn.trace, turn.trace == turn_context(7, Timestamp(1001)).trace),
            (of_call.trace, false)
        );
        assert_ne!(turn.span, of_call.span);
        assert_ne!(turn.trace, turn_context(8, Timestamp(1000)).trace);
        assert_eq!(of_call.to_string(), call_context(7, Timestamp(1000), &call).to_string());
    }
}
