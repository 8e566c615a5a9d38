//! Traces of what agents do, sent to a collector with OTLP over HTTP.
//!
//! Each turn of a thread is a trace: a root span, its model requests, the invocations that follow from its answer, and the
//! callbacks of these calls. The root span has a link to that of the turn before it.
//!
//! Invariants:
//! - The ids of a turn and of its calls are computed from stored values, so an invocation or a callback after a restart, or
//!   on another node, belongs to the same trace. Only links, and model requests without an answer yet, are in memory.
//! - Spans contain names, ids, counts, times and kinds of outcomes. They contain no text of a message, no argument, no path
//!   of a URL and no secret.
//! - Nothing waits for the collector.

mod export;
mod span;

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Entry, Item, OpenCall, Phase, Step, Usage, Write};
use rap_io::metrics::Exposition;
use rap_protocol::{CallId, Secret, TRACEPARENT, ThreadId, Timestamp, TraceContext};
use sha2::{Digest, Sha256};
use url::Url;

use crate::model::{self, Model, ModelAnswer};
use crate::store::{InvokeWork, Thread, ThreadKey};
use crate::token::Grant;
pub(crate) use export::Exporter;
use export::Queue;
use span::{Kind, Span};

/// Maximum number of threads whose links and unfinished turns are remembered. Beyond it, all are forgotten.
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
    requests: HashMap<ThreadKey, Vec<RequestRecord>>,
    /// Root span of the last turn.
    previous: HashMap<ThreadKey, TraceContext>,
}

/// A model request that has ended.
struct RequestRecord {
    began: SystemTime,
    ended: SystemTime,
    model: String,
    provider: String,
    server: Option<String>,
    outcome: Result<Usage, &'static str>,
}

/// Returns the context of a turn whose answer was stored at this time. A call that a person has approved has the time of the
/// approval, and so a trace of its own.
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

/// Makes room for a key in a map of bounded size.
fn make_room<K: Eq + Hash, V>(map: &mut HashMap<K, V>, key: &K) {
    if map.len() >= REMEMBERED && !map.contains_key(key) {
        map.clear();
    }
}

fn time(at: Timestamp) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(at.0).unwrap_or_default())
}

fn host(url: &str) -> Option<String> {
    Url::parse(url).ok()?.host_str().map(str::to_owned)
}

impl Telemetry {
    /// Returns the recorder, and the exporter of its spans, which has to run.
    pub(crate) fn new(settings: TelemetrySettings) -> (Telemetry, Exporter) {
        let (queue, exporter) = Queue::new(settings);
        (Telemetry { queue, turns: Mutex::default() }, exporter)
    }

    /// Writes how many spans were sent and dropped.
    pub(crate) fn expose(&self, text: &mut Exposition) {
        self.queue.counts.expose(text);
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a model request. Its span is sent when the turn ends, because only then is the id of the trace known.
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
        let request = RequestRecord {
            began,
            ended: SystemTime::now(),
            model: model.name().to_owned(),
            // Both APIs of OpenAI are one provider in the semantic conventions.
            provider: model.provider().replace("openai-responses", "openai"),
            server: host(model.destination()),
            outcome,
        };
        let mut turns = self.turns();
        make_room(&mut turns.requests, &thread.key);
        let requests = turns.requests.entry(thread.key).or_default();
        if requests.len() < REQUESTS {
            requests.push(request);
        }
    }

    /// Records what a committed step has ended: a turn, or the wait for an approval. Called in commit order, so it must not
    /// block.
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
        match step.head.phase() {
            Phase::Asking(_) => {}
            Phase::Failed { .. } => {
                let failed = turn_context(thread.incarnation, Timestamp::from(SystemTime::now()));
                self.turn_ended(thread, failed, Some("model_request_failed"));
            }
            // The turn was interrupted.
            _ => _ = self.turns().requests.remove(&thread.key),
        }
    }

    /// Sends the spans of a turn. A turn whose model requests are not known, because they were sent before a restart,
    /// has only its root span.
    fn turn_ended(&self, thread: &Thread, root: TraceContext, error: Option<&'static str>) {
        let (requests, previous) = {
            let mut turns = self.turns();
            let requests = turns.requests.remove(&thread.key).unwrap_or_default();
            if error.is_some() && requests.is_empty() {
                return;
            }
            make_room(&mut turns.previous, &thread.key);
            (requests, turns.previous.insert(thread.key, root))
        };
        let now = SystemTime::now();
        let began = requests.first().map_or(now, |request| request.began);
        let name = format!("invoke_agent {}", thread.agent);
        let mut span = Span::new(&name, Kind::Internal, root, None, (began, now));
        span.text("gen_ai.operation.name", "invoke_agent");
        describe(&mut span, thread);
        if let Some(previous) = previous {
            span.link(previous);
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
        let name = format!("approve {}", call.name);
        let mut span = Span::new(&name, Kind::Internal, root, None, (at, at));
        span.text("gen_ai.tool.name", &call.name);
        span.text("gen_ai.tool.call.id", call.id.as_str());
        describe(&mut span, thread);
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
        let (context, times) = (Telemetry::invocation_context(work), (began, SystemTime::now()));
        let name = format!("execute_tool {}", call.name);
        let mut span = Span::new(&name, Kind::Client, context, Some(root.span), times);
        span.text("gen_ai.operation.name", "execute_tool");
        span.text("gen_ai.tool.name", &call.name);
        span.text("gen_ai.tool.call.id", call.id.as_str());
        describe(&mut span, thread);
        span.number("rap.attempts", attempts.into());
        if let Some(host) = host(&call.server.0) {
            span.text("server.address", &host);
        }
        if let Some(failure) = failure {
            span.error(failure);
        }
        self.queue.push(span);
    }

    /// Records a callback in the trace of its call. Its parent is the span that the tool names, if that is in the same
    /// trace, else the invocation. A span of another trace is linked.
    pub(crate) fn callback(
        &self,
        grant: &Grant,
        thread: Option<&ThreadId>,
        headers: &HeaderMap,
        began: SystemTime,
        status: StatusCode,
    ) {
        let call = call_context(grant.incarnation, grant.since, &grant.call);
        let received = received_context(headers);
        let (same, other) =
            (received.filter(|it| it.trace == call.trace), received.filter(|it| it.trace != call.trace));
        let (parent, times) = (same.unwrap_or(call), (began, SystemTime::now()));
        let context = TraceContext { span: random_span(), ..call };
        let mut span = Span::new("callback", Kind::Server, context, Some(parent.span), times);
        span.text("gen_ai.tool.call.id", grant.call.as_str());
        if let Some(thread) = thread {
            span.text("gen_ai.conversation.id", thread.as_str());
        }
        span.number("http.response.status_code", status.as_u16().into());
        if let Some(other) = other {
            span.link(other);
        }
        if !status.is_success() {
            span.error("refused");
        }
        self.queue.push(span);
    }
}

/// Adds the agent and the thread of a span.
fn describe(span: &mut Span, thread: &Thread) {
    span.text("gen_ai.agent.name", &thread.agent);
    span.text("gen_ai.conversation.id", thread.id.as_str());
}

impl RequestRecord {
    fn span(self, root: TraceContext, thread: &Thread) -> Span {
        let context = TraceContext { span: random_span(), ..root };
        let (name, times) = (format!("chat {}", self.model), (self.began, self.ended));
        let mut span = Span::new(&name, Kind::Client, context, Some(root.span), times);
        span.text("gen_ai.operation.name", "chat");
        span.text("gen_ai.provider.name", &self.provider);
        span.text("gen_ai.request.model", &self.model);
        describe(&mut span, thread);
        if let Some(server) = &self.server {
            span.text("server.address", server);
        }
        match self.outcome {
            Ok(usage) => {
                span.number("gen_ai.usage.input_tokens", usage.input);
                span.number("gen_ai.usage.output_tokens", usage.output);
                span.number("gen_ai.usage.cache_read.input_tokens", usage.cached);
            }
            Err(why) => span.error(why),
        }
        span
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use serde_json::{Value, json};

    use super::*;

    /// Returns the span of a callback with this header.
    fn callback(grant: &Grant, header: &str) -> Value {
        let url = Url::parse("http://127.0.0.1:9/v1/traces").unwrap();
        let (telemetry, mut exporter) =
            Telemetry::new(TelemetrySettings { url, headers: Vec::new(), service: "rap".into() });
        let headers = [(TRACEPARENT.parse().unwrap(), HeaderValue::from_str(header).unwrap())];
        telemetry.callback(grant, None, &HeaderMap::from_iter(headers), SystemTime::now(), StatusCode::OK);
        let mut spans = Vec::new();
        exporter.fill(&mut spans);
        spans.remove(0).to_json()
    }

    #[test]
    fn a_callback_stays_in_the_trace_of_its_call() {
        let call = CallId::new("call_1").unwrap();
        let (incarnation, since) = (7, Timestamp(1000));
        let of_call = call_context(incarnation, since, &call).to_string();
        let grant = Grant { thread: ThreadKey::from_bytes([1; 8]), incarnation, since, call };
        let (trace, span) = (&of_call[3..35], &of_call[36..52]);
        let own = format!("00-{trace}-1111111111111111-01");
        let foreign = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (header, parent, links) in [
            (of_call.as_str(), span, json!([])),
            ("malformed", span, json!([])),
            (own.as_str(), "1111111111111111", json!([])),
            (foreign, span, json!([{"traceId": &foreign[3..35], "spanId": &foreign[36..52], "flags": 1}])),
        ] {
            let recorded = callback(&grant, header);
            assert_eq!(recorded["traceId"], trace, "{header}");
            assert_eq!((&recorded["parentSpanId"], &recorded["links"]), (&json!(parent), &links), "{header}");
        }
    }

    /// The ids must never change: a call that was sent by an older version has them.
    #[test]
    fn ids_are_computed_from_stored_values() {
        let call = CallId::new("rap_0000000000000007_1").unwrap();
        let (turn, of_call) = (turn_context(7, Timestamp(1000)), call_context(7, Timestamp(1000), &call));
        assert_eq!(turn.to_string(), "00-47da7af21dfc79a7c58b1c38de87619e-3737f085dea9dde6-01");
        assert_eq!(of_call.to_string(), "00-47da7af21dfc79a7c58b1c38de87619e-0790876c90c83f14-01");
        let other = CallId::new("rap_0000000000000007_2").unwrap();
        assert_ne!(call_context(7, Timestamp(1000), &other).span, of_call.span);
        assert_ne!(turn_context(7, Timestamp(1001)).trace, turn.trace);
        assert_ne!(turn_context(8, Timestamp(1000)).trace, turn.trace);
    }
}
