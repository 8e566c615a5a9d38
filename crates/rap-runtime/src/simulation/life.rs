//! A run: processes that start, crash and start again on the same database, until everything has come to rest.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::StatusCode;
use rap_agent::OnBusy;
use rap_io::secret_box::Key;
use rap_protocol::{Secret, UrlPolicy};
use rusqlite::Connection;
use tower::ServiceExt;

use super::invariants::{Broken, broken};
use super::model::SimModel;
use super::outside::{Request, What};
use super::state::Sim;
use super::store::SimStore;
use super::watch::FOR_CLIENTS;
use super::world::{PUBLIC_URL, world};
use crate::engine::{Engine, on_commit, rules};
use crate::glob::ToolGlob;
use crate::settings::{Agent, AgentModel, Limits, Settings, ToolServer, Window};
use crate::store::SqliteStore;
use crate::store::sqlite::Inline;

/// Simulated time that everything has to come to rest within.
const REST_WITHIN: Duration = Duration::from_secs(6 * 3600);
/// Processes in a run; more crashes than that do not happen.
const PROCESSES: usize = 60;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Crashed,
    Stopped,
    /// Everything is done.
    AtRest,
}

/// Runs a seed to its end.
pub(super) fn run(sim: &Arc<Sim>) -> Result<(), Broken> {
    let (fault, observer) = (Arc::clone(sim), Arc::clone(sim));
    let conn = Connection::open_in_memory().expect("memory");
    let inline = Inline::new(conn, move || fault.next_commit(), move |observed| observer.observe(observed));
    let mut left = {
        let mut state = sim.state();
        50 + state.rng.below(200)
    };
    for process in 0.. {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        if process + 1 >= PROCESSES {
            left = 0;
        }
        let end = runtime.block_on(live(sim, &inline, &mut left));
        drop(runtime);
        let mut state = sim.state();
        if let Some(broken) = state.broken.take() {
            return Err(broken);
        }
        state.note(|| format!("the process ended: {end:?}"));
        state.fairness.crash();
        state.asking.clear();
        drop(state);
        inline.with(|conn| super::compare::compare(sim, conn))?;
        if end == End::AtRest {
            return Ok(());
        }
    }
    Ok(())
}

/// One process.
async fn live(sim: &Arc<Sim>, inline: &Inline, left: &mut usize) -> End {
    sim.state().start_clock();
    let engine = start(sim, inline);
    let router = crate::http::router(Arc::clone(&engine));
    let stop_at = {
        let mut state = sim.state();
        let again: Vec<u64> = state.outside.in_flight.iter().copied().collect();
        for no in again {
            let at = state.later(500);
            state.outside.send_again(no, at);
        }
        state.rng.percent(10).then(|| state.rng.below(200))
    };
    let work = async {
        tokio::select! {
            biased;
            end = act(sim, &engine, left, stop_at) => end,
            () = carry(sim, &router) => End::Crashed,
        }
    };
    let end = tokio::select! {
        biased;
        () = sim.crash.notified() => End::Crashed,
        end = work => end,
    };
    sim.state().stop_clock();
    end
}

fn start(sim: &Arc<Sim>, inline: &Inline) -> Arc<Engine> {
    let settings = settings(sim);
    let world = world(sim);
    let key = Key::parse(&"07".repeat(32)).expect("a key");
    let slot: Arc<OnceLock<Weak<Engine>>> = Arc::default();
    let store = SqliteStore::inline(
        inline.clone(),
        key.clone(),
        rules(&settings),
        Arc::clone(&world.clock),
        on_commit(&slot),
    );
    let store = SimStore { sim: Arc::clone(sim), store: store.expect("a store") };
    Engine::run(settings, world, Arc::new(store), key, &slot)
}

fn settings(sim: &Arc<Sim>) -> Settings {
    let state = sim.state();
    let bounds = &state.bounds;
    let model = |no: u32| -> Arc<dyn crate::model::Model> {
        Arc::new(SimModel { sim: Arc::clone(sim), destination: format!("http://model{no}.test") })
    };
    let for_events = ["look*", "wipe*"].map(|pattern| ToolGlob::new(pattern).expect("a pattern"));
    let agent =
        |name: &str| Agent { name: name.into(), event_tools: for_events.to_vec(), ..Agent::default() };
    let own = AgentModel { model: model(1), images: false, window: Window::default() };
    debug_assert!(!for_events.iter().any(|pattern| pattern.matches(FOR_CLIENTS)));
    Settings {
        public_url: PUBLIC_URL.into(),
        database: "simulated".into(),
        tokens: Vec::<Secret>::new(),
        agents: vec![agent("one"), Agent { model: Some(own), ..agent("two") }],
        model: model(0),
        images: false,
        window: Window::default(),
        tool_servers: state
            .outside
            .servers
            .iter()
            .map(|server| ToolServer { url: server.url.clone(), bearer: None })
            .collect(),
        url_policy: UrlPolicy::Local,
        limits: Limits {
            thread: bounds.thread.clone(),
            lost_after: bounds.lost_after.0,
            model_attempts: bounds.model_attempts,
            model_concurrency: bounds.slots[0],
            model_timeout: Duration::from_secs(15),
            invoke_concurrency: bounds.slots[1],
            invoke_retry_for: bounds.invoke_retry_for,
            discovery_timeout: Duration::from_secs(3),
            ..Limits::default()
        },
    }
}

/// People and tools act until their number of actions is used up; then everything has to come to rest.
async fn act(sim: &Arc<Sim>, engine: &Arc<Engine>, left: &mut usize, stop: Option<usize>) -> End {
    let mut until_stop = stop;
    while *left > 0 {
        *left -= 1;
        let pause = sim.state().act();
        sim.agenda_changed.notify_one();
        tokio::time::sleep(pause).await;
        if until_stop == Some(0) {
            engine.shut_down().await;
            return End::Stopped;
        }
        until_stop = until_stop.map(|left| left - 1);
    }
    let began = {
        let mut state = sim.state();
        state.healed = true;
        state.note(|| "chaos is over".into());
        state.now()
    };
    let mut quiet = 0;
    let mut rounds = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(if rounds < 20 { 2 } else { 30 })).await;
        rounds += 1;
        let mut state = sim.state();
        let state = &mut *state;
        let waits = state.settle();
        sim.agenda_changed.notify_one();
        let running: usize = engine.dispatcher.running().iter().map(|(_, running)| running).sum();
        let busy = running + engine.dispatcher.busy();
        quiet = if waits.is_none() && busy == 0 { quiet + 1 } else { 0 };
        if quiet > 2 {
            let outcome = state.checker.look_at_rest(&state.disk);
            state.holds(outcome);
            return End::AtRest;
        }
        if state.now().since(began) > REST_WITHIN {
            let why = match waits {
                Some(waits) => format!("I6: it never comes to rest: {waits}"),
                None => format!("I13: at rest, and {busy} slots are in use"),
            };
            state.holds(broken(why));
            return End::AtRest;
        }
    }
}

/// Sends requests to the runtime when their time has come.
async fn carry(sim: &Arc<Sim>, router: &Router) {
    loop {
        let (due, pause) = {
            let mut state = sim.state();
            let now = state.now();
            match state.outside.agenda.first().copied() {
                Some((at, no)) if at <= now => {
                    state.outside.agenda.pop_first();
                    state.outside.in_flight.insert(no);
                    (Some(no), Duration::ZERO)
                }
                Some((at, _)) => (None, at.since(now)),
                None => (None, Duration::from_secs(3600)),
            }
        };
        match due {
            Some(no) => {
                let (sim, router) = (Arc::clone(sim), router.clone());
                tokio::spawn(async move { send(&sim, router, no).await });
            }
            None => {
                tokio::select! {
                    biased;
                    () = sim.agenda_changed.notified() => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
    }
}

async fn send(sim: &Arc<Sim>, router: Router, no: u64) {
    let Some(request) = sim.state().outside.requests.get(&no).cloned() else { return };
    let status = post(router, &request).await;
    // The answer may be lost on its way.
    sim.wait_here().await;
    let mut state = sim.state();
    let state = &mut *state;
    state.note(|| format!("{} {} {}: {status}", request.path, request.body, no));
    let lost = !state.healed && state.rng.percent(5);
    if lost || status == StatusCode::SERVICE_UNAVAILABLE {
        // A client without a key does not know whether it was heard.
        if request.what != What::Client || request.key.is_some() {
            let at = state.later(3_000);
            state.outside.send_again(no, at);
            sim.agenda_changed.notify_one();
            return;
        }
    }
    state.outside.in_flight.remove(&no);
    state.outside.requests.remove(&no);
    if status.is_success()
        && let Some(word) = request.word
    {
        let outcome = state.checker.acknowledged(&state.disk, word);
        state.holds(outcome);
    }
    if request.what == What::Callback {
        state.outside.sent.push(request);
    }
}

async fn post(router: Router, request: &Request) -> StatusCode {
    let mut builder = http::Request::builder().method("POST").uri(&request.path);
    builder = builder.header("host", "127.0.0.1").header("content-type", "application/json");
    if let Some(key) = request.key {
        builder = builder.header("idempotency-key", format!("k{key}"));
    }
    let body = Body::from(request.body.to_string());
    let response = router.oneshot(builder.body(body).expect("a request")).await;
    response.map_or(StatusCode::SERVICE_UNAVAILABLE, |response| response.status())
}

impl super::state::State {
    /// Does what people and tools have to do for everything to come to rest. Says what is still waited for.
    fn settle(&mut self) -> Option<String> {
        if self.outside.requests.len() > 100 {
            return Some("too many requests wait".into());
        }
        let mut waits = self.outside.requests.iter().next().map(|first| format!("requests wait: {first:?}"));
        for thread in 0..self.disk.threads.len() {
            waits = self.settle_thread(thread).or(waits);
        }
        if !self.disk.outbox.is_empty() {
            waits = Some(format!("messages between threads: {:?}", self.disk.outbox));
        }
        waits
    }

    fn settle_thread(&mut self, thread: super::disk::Place) -> Option<String> {
        use rap_agent::Phase;
        let head = self.disk.threads[thread].head.clone();
        let schedule = head.subscriptions().iter().find(|active| active.server.is_runtime());
        if let Some(schedule) = schedule {
            self.order_to(thread, &format!("calls/{}/cancel", schedule.id));
            return Some(format!("t{thread} has a schedule"));
        }
        for open in head.open_calls() {
            // A server that has a call, and does not work on it, says something at last.
            let known = self.outside.accepted.get(&open.id);
            if known.is_some_and(|known| !known.forgotten) {
                self.send_result(&open.id);
            }
        }
        match head.phase() {
            Phase::Waiting { batch } => {
                let waits = |open: &rap_agent::OpenCall| open.server.is_runtime() && open.until.is_none();
                if batch.iter().any(waits) {
                    self.say_to(thread, OnBusy::Join);
                }
                Some(format!("t{thread} waits for {batch:?}"))
            }
            Phase::Asking(asking) => Some(format!("t{thread} asks: {asking:?}")),
            Phase::Failed { .. } | Phase::Paused(_) => {
                self.order_to(thread, "resume");
                Some(format!("t{thread} is {:?}", head.phase()))
            }
            Phase::Idle if head.open_calls().next().is_some() => {
                Some(format!("t{thread} has open calls: {:?}", head.background()))
            }
            Phase::Idle | Phase::Closed => None,
        }
    }
}
