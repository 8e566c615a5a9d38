//! The simulated world of an engine: its clock, its randomness, and the tool servers.

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
use url::Url;

use super::invariants::Notification;
use super::outside::{SimEvent, ToolCall};
use super::state::{Sim, State};
use super::watch::FOR_CLIENTS;
use crate::store::{WorkKind, WorkQueue};
use crate::world::{Blocking, Clock, Headers, Http, Purpose, Random, World};

/// The base of callback URLs.
pub(super) const PUBLIC_URL: &str = "http://127.0.0.1:9";
/// How long a request waits for a server that hangs.
const HANGS: Duration = Duration::from_secs(10);

pub(super) fn world(sim: &Arc<Sim>) -> World {
    let outside = Arc::new(SimWorld { sim: Arc::clone(sim) });
    World {
        clock: Arc::<SimWorld>::clone(&outside),
        random: Arc::<SimWorld>::clone(&outside),
        http: outside,
        blocking: Blocking::Inline,
    }
}

struct SimWorld {
    sim: Arc<Sim>,
}

impl Clock for SimWorld {
    fn now(&self) -> Timestamp {
        self.sim.state().now()
    }
}

impl Random for SimWorld {
    fn next(&self) -> u64 {
        self.sim.state().rng.next()
    }
}

/// What becomes of a request.
#[derive(Debug)]
struct Fate {
    before: Duration,
    arrives: bool,
    after: Duration,
    answer: Result<u16, Error>,
}

impl Fate {
    fn draw(state: &mut State) -> Fate {
        let millis = |state: &mut State, most| Duration::from_millis(state.rng.below(most) as u64);
        let (before, after) = (millis(state, 20), millis(state, 20));
        if state.healed {
            return Fate { before, arrives: true, after, answer: Ok(200) };
        }
        let [refuses, fails, slow] = state.mood.trouble;
        let before = if state.rng.percent(slow) { millis(state, 4_000) } else { before };
        if state.rng.percent(refuses) {
            return Fate { before, arrives: false, after, answer: Ok(400) };
        }
        if !state.rng.percent(fails) {
            return Fate { before, arrives: true, after, answer: Ok(202) };
        }
        let arrives = state.rng.percent(50);
        match state.rng.below(4) {
            0 => Fate { before, arrives: false, after, answer: Ok(503) },
            1 => Fate { before, arrives, after: HANGS, answer: Err(Error::TimedOut) },
            2 => Fate { before, arrives: false, after, answer: Err(Error::Unreachable("down".into())) },
            _ => Fate { before, arrives, after, answer: Err(Error::Protocol("the connection broke")) },
        }
    }
}

fn reply(status: u16, body: Bytes) -> Reply {
    Reply { status, retry_after: None, body }
}

#[async_trait]
impl Http for SimWorld {
    async fn post(
        &self,
        _purpose: Purpose,
        url: &Url,
        _headers: &Headers,
        body: Bytes,
    ) -> Result<Reply, Error> {
        let base = url.origin().ascii_serialization();
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        match url.path() {
            "/invoke" => self.invoked(base, body).await,
            CANCEL_TOOL_CALL_PATH | CLOSE_THREAD_PATH => self.notified(&base, &body).await,
            TOOL_CALL_STATUS_PATH => self.asked_after(base, &body).await,
            path => self.answered(base, path, &body).await,
        }
    }

    async fn get(&self, url: &Url, _headers: &Headers, _max_bytes: usize) -> Result<Fetched, Error> {
        assert_eq!(url.path(), DISCOVERY_PATH);
        let base = url.origin().ascii_serialization();
        let fate = Fate::draw(&mut self.sim.state());
        tokio::time::sleep(fate.before + fate.after).await;
        let mut state = self.sim.state();
        state.note(|| format!("GET {url}: {:?}", fate.answer));
        let status = fate.answer?;
        let version =
            state.outside.servers.iter().find(|server| server.url == base).map(|server| server.version);
        let body = if status < 300 { toolset(&base, version.unwrap_or(0)) } else { Vec::new() };
        let status = if status < 300 { 200 } else { status };
        Ok(Fetched { status, retry_after: None, body: body.into() })
    }
}

/// The tools of a server. Both servers have the same ones, by different names.
fn toolset(base: &str, version: u64) -> Vec<u8> {
    let no = &base[base.len() - "0.test".len()..base.len() - ".test".len()];
    let schema = json!({"type": "object", "properties": {"of": {"type": "integer"}}});
    let tool = |name: &str| json!({"name": name, "description": "A tool.", "inputSchema": schema});
    let mut wipe = tool(&format!("wipe{no}"));
    wipe["annotations"] = json!({"destructive": true});
    let mut tools = vec![tool(&format!("look{no}")), wipe];
    if no == "0" {
        tools.push(tool(FOR_CLIENTS));
    }
    let document = json!({
        "name": format!("tools{no}"), "endpoint": format!("{base}/invoke"), "version": version.to_string(),
        "tools": tools,
    });
    serde_json::to_vec(&document).expect("JSON")
}

/// A request that a simulated server works on. It ends when this is dropped, also if the runtime gave it up.
struct Served<'a> {
    sim: &'a Sim,
    queue: WorkQueue,
    work: String,
}

impl<'a> Served<'a> {
    fn begin(sim: &'a Sim, kind: WorkKind, destination: &str, thread: &ThreadId, work: String) -> Served<'a> {
        let queue = WorkQueue { kind, destination: destination.to_owned() };
        let mut state = sim.state();
        let now = state.now();
        let outcome = match state.disk.place(thread) {
            Some(_) => state.fairness.begin(&queue, &work, now),
            None => super::invariants::broken(format!("I8: nobody knows thread {thread}")),
        };
        state.holds(outcome);
        Served { sim, queue, work }
    }
}

impl Drop for Served<'_> {
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
    async fn invoked(&self, base: String, body: Value) -> Result<Reply, Error> {
        let (thread, call) = (thread_in(&body, "group_id"), call_in(&body, "id"));
        let fate = {
            let mut state = self.sim.state();
            let state = &mut *state;
            let outcome = match state.disk.place(&thread) {
                Some(place) => state.checker.invoked(&state.disk, place, &call),
                None => super::invariants::broken(format!("I8: {call} of unknown {thread}")),
            };
            state.holds(outcome);
            Fate::draw(state)
        };
        let served = Served::begin(&self.sim, WorkKind::Invoke, &base, &thread, call.to_string());
        tokio::time::sleep(fate.before).await;
        let stale = {
            let mut state = self.sim.state();
            let redeploys = state.mood.redeploys;
            let redeploys = !state.healed && state.rng.percent(redeploys);
            let server = state.outside.servers.iter_mut().find(|server| server.url == base);
            let server = server.expect("a server of ours");
            server.version += u64::from(redeploys);
            text(&body, "toolset_version") != server.version.to_string()
        };
        let answer = if stale && fate.arrives { Ok(409) } else { fate.answer };
        self.sim.state().note(|| format!("invoke {call} of {thread}: {answer:?} {}", fate.arrives));
        if fate.arrives && !stale {
            self.accept(&mut self.sim.state(), &thread, &call, text(&body, "callback_url"));
        }
        tokio::time::sleep(fate.after).await;
        drop(served);
        let mut state = self.sim.state();
        let now = state.now();
        match &answer {
            Ok(200..300) => state.fairness.accepted(call.as_str()),
            Ok(500..) | Err(_) => state.fairness.failed(call.as_str(), now),
            Ok(_) => {}
        }
        drop(state);
        Ok(reply(answer?, Bytes::new()))
    }

    /// A tool server has an invocation, perhaps for the second time.
    fn accept(&self, state: &mut State, thread: &ThreadId, call: &CallId, callback: String) {
        let callback = callback.strip_prefix(PUBLIC_URL).unwrap_or_default().to_owned();
        let place = state.disk.place(thread).unwrap_or_default();
        let new =
            ToolCall { thread: thread.clone(), place, callback, forgotten: false, results: 0, result: None };
        let known = state.outside.accepted.entry(call.clone()).or_insert(new);
        known.forgotten = false;
        let again = known.results > 0;
        if again && state.rng.percent(50) {
            return;
        }
        match state.rng.below(10) {
            0 if !state.healed => {
                if state.rng.percent(50)
                    && let Some(known) = state.outside.accepted.get_mut(call)
                {
                    known.forgotten = true;
                }
            }
            1 | 2 => {
                for _ in 0..=state.rng.below(3) {
                    state.aside(call);
                }
                state.send_result(call);
            }
            _ => state.send_result(call),
        }
        self.sim.agenda_changed.notify_one();
    }

    async fn notified(&self, base: &str, body: &Value) -> Result<Reply, Error> {
        let call = body.get("tool_call_id").map(|_| call_in(body, "tool_call_id"));
        let thread = thread_in(body, "thread_id");
        let fate = {
            let mut state = self.sim.state();
            let state = &mut *state;
            state.note(|| format!("notify {base}: {body}"));
            let notification = Notification { server: base.to_owned(), thread, call };
            let outcome = state.checker.notified(&state.disk, notification);
            state.holds(outcome);
            Fate::draw(state)
        };
        tokio::time::sleep(fate.before + fate.after).await;
        Ok(reply(fate.answer?, Bytes::new()))
    }

    async fn asked_after(&self, base: String, body: &Value) -> Result<Reply, Error> {
        let (thread, call) = (thread_in(body, "thread_id"), call_in(body, "tool_call_id"));
        let (fate, gone) = {
            let mut state = self.sim.state();
            let state = &mut *state;
            let checked = state.checker.asked_after(&call, state.now());
            state.holds(checked);
            let known = state.outside.accepted.get(&call);
            let gone = known.is_none_or(|known| known.forgotten);
            let lies = !state.healed && state.rng.percent(state.mood.forgetful);
            (Fate::draw(state), gone || lies)
        };
        let served = Served::begin(&self.sim, WorkKind::Check, &base, &thread, call.to_string());
        tokio::time::sleep(fate.before + fate.after).await;
        drop(served);
        let gone = fate.answer.as_ref().is_ok_and(|status| *status < 300) && gone;
        let mut state = self.sim.state();
        state.note(|| format!("status of {call}: {:?} gone {gone}", fate.answer));
        let now = state.now();
        if gone {
            state.checker.said_gone(&call, now);
        }
        drop(state);
        let status = fate.answer.map(|status| if status < 300 { 200 } else { status });
        let body = json!({"alive": !gone}).to_string();
        Ok(reply(status?, body.into()))
    }

    async fn answered(&self, base: String, path: &str, body: &Value) -> Result<Reply, Error> {
        let call = call_in(body, "id");
        let (fate, thread) = {
            let mut state = self.sim.state();
            state.note(|| format!("answer {path}: {body}"));
            let thread = state.outside.accepted.get(&call).map(|call| call.thread.clone());
            (Fate::draw(&mut state), thread)
        };
        let Some(thread) = thread else { return Ok(reply(404, Bytes::new())) };
        let served = Served::begin(&self.sim, WorkKind::Answer, &base, &thread, path.to_owned());
        tokio::time::sleep(fate.before + fate.after).await;
        drop(served);
        if fate.arrives && self.sim.state().rng.percent(60) {
            self.sim.state().send_result(&call);
            self.sim.agenda_changed.notify_one();
        }
        Ok(reply(fate.answer?, Bytes::new()))
    }
}

impl State {
    /// A tool server sends the result of a call; a repeat is the same result.
    pub(super) fn send_result(&mut self, call: &CallId) {
        let subscribes = !self.healed && self.rng.percent(self.mood.subscribing);
        let at = self.later(if self.healed { 50 } else { 1_500 });
        let Some(mut known) = self.outside.accepted.get(call).cloned() else { return };
        let (word, subscription) = *known.result.get_or_insert_with(|| (self.outside.word(), subscribes));
        known.results += 1;
        self.outside.send(known.result(call, word, subscription), at);
        self.outside.accepted.insert(call.clone(), known);
    }

    /// A tool server asks something or shows something.
    pub(super) fn aside(&mut self, call: &CallId) {
        // Now and then the same as before.
        let (no, again) = (self.outside.number(), self.rng.below(2) as u64);
        let at = self.later(1_000);
        let Some(known) = self.outside.accepted.get(call) else { return };
        let server = &self.outside.servers[self.rng.below(2)].url;
        let request = match self.rng.below(10) {
            0 => known.nonsense(),
            1..=3 => known.sign_in(call, no),
            4..=6 => known.choice(call, no - again, server),
            _ => known.view(no),
        };
        self.outside.send(request, at);
    }

    pub(super) fn event(&mut self, call: &CallId) {
        let no = self.outside.number();
        let id = self.rng.percent(70).then_some(no);
        let crowded = self.disk.threads.len() + self.outside.requests.len() / 2 >= super::chaos::THREADS;
        let associative = crowded || self.rng.percent(60);
        let is_final = self.rng.percent(15);
        let word = self.outside.word();
        let at = self.later(500);
        let Some(known) = self.outside.accepted.get(call) else { return };
        let request = known.event(call, &SimEvent { id, word, associative, is_final });
        self.outside.send(request, at);
    }
}
