//! The simulated environment of an engine: clock, random numbers, and tool servers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rap_io::client::{Error, Fetched, Reply};
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, DISCOVERY_PATH, TOOL_CALL_STATUS_PATH, ThreadId,
    Timestamp,
};
use serde_json::{Value, json};

use super::invariants::Notification;
use super::peers::{SimEvent, ToolCall};
use super::state::{Sim, State};
use super::tracker::FOR_CLIENTS;
use crate::store::{WorkKind, WorkQueue};
use crate::world::{Blocking, Clock, Http, MessageKind, Random, To, World};

/// The base of callback URLs.
pub(super) const PUBLIC_URL: &str = "http://127.0.0.1:9";
/// Time until a request to a hanging server times out.
const HANG_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn world(sim: &Arc<Sim>) -> World {
    let world = Arc::new(SimWorld { sim: Arc::clone(sim) });
    World {
        clock: Arc::<SimWorld>::clone(&world),
        random: Arc::<SimWorld>::clone(&world),
        http: world,
        blocking: Blocking::Inline,
    }
}

struct SimWorld {
    sim: Arc<Sim>,
}

impl Clock for SimWorld {
    fn now(&self) -> Timestamp {
        self.sim.state().wall_clock()
    }
}

impl Random for SimWorld {
    fn next(&self) -> u64 {
        self.sim.state().rng.next()
    }
}

/// The simulated course of an HTTP request.
#[derive(Debug)]
struct Exchange {
    request_delay: Duration,
    arrives: bool,
    reply_delay: Duration,
    answer: Result<u16, Error>,
}

impl Exchange {
    fn random(state: &mut State) -> Exchange {
        let millis = |state: &mut State, max| Duration::from_millis(state.rng.below(max) as u64);
        let (request_delay, reply_delay) = (millis(state, 20), millis(state, 20));
        if state.chaos_over {
            return Exchange { request_delay, arrives: true, reply_delay, answer: Ok(200) };
        }
        let [refuses, fails, slow] = state.chances.server_faults;
        let request_delay = if state.rng.percent(slow) { millis(state, 4_000) } else { request_delay };
        if state.rng.percent(refuses) {
            return Exchange { request_delay, arrives: false, reply_delay, answer: Ok(400) };
        }
        if !state.rng.percent(fails) {
            return Exchange { request_delay, arrives: true, reply_delay, answer: Ok(202) };
        }
        let arrives = state.rng.percent(50);
        match state.rng.below(4) {
            0 => Exchange { request_delay, arrives: false, reply_delay, answer: Ok(503) },
            1 => Exchange { request_delay, arrives, reply_delay: HANG_TIMEOUT, answer: Err(Error::TimedOut) },
            2 => Exchange {
                request_delay,
                arrives: false,
                reply_delay,
                answer: Err(Error::Unreachable("down".into())),
            },
            _ => Exchange {
                request_delay,
                arrives,
                reply_delay,
                answer: Err(Error::Protocol("the connection broke")),
            },
        }
    }
}

fn reply(status: u16, body: Bytes) -> Reply {
    Reply { status, retry_after: None, body }
}

#[async_trait]
impl Http for SimWorld {
    async fn post(&self, _kind: MessageKind, to: To<'_>, body: Bytes) -> Result<Reply, Error> {
        let url = to.url;
        let base = url.origin().ascii_serialization();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        match url.path() {
            "/invoke" => self.handle_invocation(base, body).await,
            CANCEL_TOOL_CALL_PATH | CLOSE_THREAD_PATH => self.handle_notification(&base, &body).await,
            TOOL_CALL_STATUS_PATH => self.handle_status_check(base, &body).await,
            path => self.handle_answer(base, path, &body).await,
        }
    }

    async fn get(&self, to: To<'_>, _max_bytes: usize) -> Result<Fetched, Error> {
        let url = to.url;
        assert_eq!(url.path(), DISCOVERY_PATH);
        let base = url.origin().ascii_serialization();
        let exchange = Exchange::random(&mut self.sim.state());
        tokio::time::sleep(exchange.request_delay + exchange.reply_delay).await;
        let mut state = self.sim.state();
        state.note(|| format!("GET {url}: {:?}", exchange.answer));
        let status = exchange.answer?;
        let version =
            state.peers.servers.iter().find(|server| server.url == base).map(|server| server.version);
        let body = if status < 300 { toolset(&base, version.unwrap_or(0)) } else { Vec::new() };
        let status = if status < 300 { 200 } else { status };
        Ok(Fetched { status, retry_after: None, body: body.into() })
    }
}

/// Returns the toolset of a server. Both servers have the same tools under different names.
fn toolset(base: &str, version: u64) -> Vec<u8> {
    let number = &base[base.len() - "0.test".len()..base.len() - ".test".len()];
    let schema = json!({"type": "object", "properties": {"of": {"type": "integer"}}});
    let tool = |name: &str| json!({"name": name, "description": "A tool.", "inputSchema": schema});
    let mut wipe = tool(&format!("wipe{number}"));
    wipe["annotations"] = json!({"destructive": true});
    let mut tools = vec![tool(&format!("look{number}")), wipe];
    if number == "0" {
        tools.push(tool(FOR_CLIENTS));
    }
    let document = json!({
        "name": format!("tools{number}"), "endpoint": format!("{base}/invoke"), "version": version.to_string(),
        "tools": tools,
    });
    serde_json::to_vec(&document).expect("JSON")
}

/// A request that a simulated server is handling. It ends when this is dropped, even if the runtime gave it up.
struct InFlightRequest<'a> {
    sim: &'a Sim,
    queue: WorkQueue,
    work: String,
}

impl<'a> InFlightRequest<'a> {
    fn begin(
        sim: &'a Sim,
        kind: WorkKind,
        destination: &str,
        thread: &ThreadId,
        work: String,
    ) -> InFlightRequest<'a> {
        let queue = WorkQueue { kind, destination: destination.to_owned() };
        let mut state = sim.state();
        let now = state.now();
        let outcome = match state.reference.index(thread) {
            Some(_) => state.fairness.begin(&queue, &work, now),
            None => super::invariants::violation(format!("I8: a request for the unknown thread {thread}")),
        };
        state.record(outcome);
        InFlightRequest { sim, queue, work }
    }
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        self.sim.state().fairness.end(&self.queue, &self.work);
    }
}

fn text(body: &Value, name: &str) -> String {
    body[name].as_str().unwrap_or_default().to_owned()
}

fn thread_in(body: &Value, name: &str) -> ThreadId {
    ThreadId::new(text(body, name)).expect("a thread id")
}

fn call_in(body: &Value, name: &str) -> CallId {
    CallId::new(text(body, name)).expect("a call id")
}

impl SimWorld {
    async fn handle_invocation(&self, base: String, body: Value) -> Result<Reply, Error> {
        let (thread, call) = (thread_in(&body, "group_id"), call_in(&body, "id"));
        let exchange = {
            let mut state = self.sim.state();
            let state = &mut *state;
            let outcome = match state.reference.index(&thread) {
                Some(index) => state.checker.on_invocation(&state.reference, index, &call),
                None => super::invariants::violation(format!(
                    "I8: {call} is invoked for the unknown thread {thread}"
                )),
            };
            state.record(outcome);
            Exchange::random(state)
        };
        let in_flight = InFlightRequest::begin(&self.sim, WorkKind::Invoke, &base, &thread, call.to_string());
        tokio::time::sleep(exchange.request_delay).await;
        let stale = {
            let mut state = self.sim.state();
            let redeploys = state.chances.redeploys;
            let redeploys = !state.chaos_over && state.rng.percent(redeploys);
            let server = state.peers.servers.iter_mut().find(|server| server.url == base);
            let server = server.expect("a simulated server");
            server.version += u64::from(redeploys);
            text(&body, "toolset_version") != server.version.to_string()
        };
        let answer = if stale && exchange.arrives { Ok(409) } else { exchange.answer };
        self.sim.state().note(|| format!("invoke {call} of {thread}: {answer:?} {}", exchange.arrives));
        if exchange.arrives && !stale {
            self.accept(&mut self.sim.state(), &thread, &call, text(&body, "callback_url"));
        }
        tokio::time::sleep(exchange.reply_delay).await;
        drop(in_flight);
        let mut state = self.sim.state();
        let now = state.now();
        match &answer {
            Ok(200..300) => state.fairness.accepted(call.as_str()),
            Ok(500..) | Err(_) if state.may_pause(&thread, &call) => {
                state.fairness.failed(call.as_str(), now);
            }
            Ok(_) | Err(_) => {}
        }
        drop(state);
        Ok(reply(answer?, Bytes::new()))
    }

    /// A tool server accepts an invocation, possibly a repeated one.
    fn accept(&self, state: &mut State, thread: &ThreadId, call: &CallId, callback: String) {
        let callback = callback.strip_prefix(PUBLIC_URL).unwrap_or_default().to_owned();
        let index = state.reference.index(thread).unwrap_or_default();
        let new = ToolCall { thread: thread.clone(), index, callback, lost: false, results: 0, result: None };
        let known = state.peers.accepted.entry(call.clone()).or_insert(new);
        known.lost = false;
        let again = known.results > 0;
        if again && state.rng.percent(50) {
            return;
        }
        match state.rng.below(10) {
            0 if !state.chaos_over => {
                if state.rng.percent(50)
                    && let Some(known) = state.peers.accepted.get_mut(call)
                {
                    known.lost = true;
                }
            }
            1 | 2 => {
                for _ in 0..=state.rng.below(3) {
                    state.send_question_or_view(call);
                }
                state.send_result(call);
            }
            _ => state.send_result(call),
        }
        self.sim.send_queue_changed.notify_one();
    }

    async fn handle_notification(&self, base: &str, body: &Value) -> Result<Reply, Error> {
        let call = body.get("tool_call_id").map(|_| call_in(body, "tool_call_id"));
        let thread = thread_in(body, "thread_id");
        let exchange = {
            let mut state = self.sim.state();
            let state = &mut *state;
            state.note(|| format!("notify {base}: {body}"));
            let notification = Notification { server: base.to_owned(), thread, call };
            let outcome = state.checker.on_notification(&state.reference, notification);
            state.record(outcome);
            Exchange::random(state)
        };
        tokio::time::sleep(exchange.request_delay + exchange.reply_delay).await;
        Ok(reply(exchange.answer?, Bytes::new()))
    }

    async fn handle_status_check(&self, base: String, body: &Value) -> Result<Reply, Error> {
        let (thread, call) = (thread_in(body, "thread_id"), call_in(body, "tool_call_id"));
        let (exchange, gone) = {
            let mut state = self.sim.state();
            let state = &mut *state;
            let checked = state.checker.on_status_check(&call, state.now());
            state.record(checked);
            let known = state.peers.accepted.get(&call);
            let gone = known.is_none_or(|known| known.lost);
            let wrong = !state.chaos_over && state.rng.percent(state.chances.false_gone);
            (Exchange::random(state), gone || wrong)
        };
        let in_flight = InFlightRequest::begin(&self.sim, WorkKind::Check, &base, &thread, call.to_string());
        tokio::time::sleep(exchange.request_delay + exchange.reply_delay).await;
        drop(in_flight);
        let gone = exchange.answer.as_ref().is_ok_and(|status| *status < 300) && gone;
        let mut state = self.sim.state();
        state.note(|| format!("status of {call}: {:?} gone {gone}", exchange.answer));
        let now = state.now();
        if gone {
            state.checker.on_gone(&call, now);
        }
        drop(state);
        let status = exchange.answer.map(|status| if status < 300 { 200 } else { status });
        let body = json!({"alive": !gone}).to_string();
        Ok(reply(status?, body.into()))
    }

    async fn handle_answer(&self, base: String, path: &str, body: &Value) -> Result<Reply, Error> {
        let call = call_in(body, "id");
        let (exchange, thread) = {
            let mut state = self.sim.state();
            state.note(|| format!("answer {path}: {body}"));
            let thread = state.peers.accepted.get(&call).map(|call| call.thread.clone());
            (Exchange::random(&mut state), thread)
        };
        let Some(thread) = thread else { return Ok(reply(404, Bytes::new())) };
        let in_flight = InFlightRequest::begin(&self.sim, WorkKind::Answer, &base, &thread, path.to_owned());
        tokio::time::sleep(exchange.request_delay + exchange.reply_delay).await;
        drop(in_flight);
        if exchange.arrives && self.sim.state().rng.percent(60) {
            self.sim.state().send_result(&call);
            self.sim.send_queue_changed.notify_one();
        }
        Ok(reply(exchange.answer?, Bytes::new()))
    }
}

impl State {
    /// A tool server sends the result of a call. A repeat sends the same result.
    pub(super) fn send_result(&mut self, call: &CallId) {
        let subscribes = !self.chaos_over && self.rng.percent(self.chances.subscribe);
        let at = self.later(if self.chaos_over { 50 } else { 1_500 });
        let Some(mut known) = self.peers.accepted.get(call).cloned() else { return };
        let (tag, subscription) = *known.result.get_or_insert_with(|| (self.peers.next_tag(), subscribes));
        known.results += 1;
        self.peers.send(known.result(call, tag, subscription), at);
        self.peers.accepted.insert(call.clone(), known);
    }

    /// A tool server sends a question, a view or a malformed callback.
    pub(super) fn send_question_or_view(&mut self, call: &CallId) {
        // Some choices repeat an earlier question.
        let (number, again) = (self.peers.next_number(), self.rng.below(2) as u64);
        let at = self.later(1_000);
        let Some(known) = self.peers.accepted.get(call) else { return };
        let server = &self.peers.servers[self.rng.below(2)].url;
        let request = match self.rng.below(10) {
            0 => known.malformed(),
            1..=3 => known.sign_in(call, number),
            4..=6 => known.choice(call, number - again, server),
            _ => known.view(number),
        };
        self.peers.send(request, at);
    }

    pub(super) fn send_event(&mut self, call: &CallId) {
        let number = self.peers.next_number();
        let id = self.rng.percent(70).then_some(number);
        let crowded = self.reference.threads.len() + self.peers.requests.len() / 2 >= super::chaos::THREADS;
        let associative = crowded || self.rng.percent(60);
        let is_final = self.rng.percent(15);
        let tag = self.peers.next_tag();
        let at = self.later(500);
        let Some(known) = self.peers.accepted.get(call) else { return };
        let request = known.event(call, &SimEvent { id, tag, associative, is_final });
        self.peers.send(request, at);
    }
}
