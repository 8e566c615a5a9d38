//! Runs a seed: processes start, crash and start again on the same database, until all threads are idle.

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

use super::invariants::{Violation, violation};
use super::model::SimModel;
use super::peers::{Request, RequestKind};
use super::state::Sim;
use super::store::SimStore;
use super::tracker::FOR_CLIENTS;
use super::world::{PUBLIC_URL, world};
use crate::engine::{Engine, on_commit, rules};
use crate::glob::ToolGlob;
use crate::http::CallbackRequirements;
use crate::settings::{Agent, AgentModel, Limits, Settings, ToolServer, Window};
use crate::store::SqliteStore;
use crate::store::sqlite::Inline;

/// Simulated time within which all threads must become idle.
const IDLE_WITHIN: Duration = Duration::from_secs(6 * 3600);
/// Maximum number of processes in a run.
const PROCESSES: usize = 60;

/// The way in which a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessEnd {
    Crashed,
    Stopped,
    /// All threads are idle and the run is complete.
    Idle,
}

/// Runs a seed to its end.
pub(super) fn run(sim: &Arc<Sim>) -> Result<(), Violation> {
    let (fault, observer) = (Arc::clone(sim), Arc::clone(sim));
    let conn = Connection::open_in_memory().expect("an in-memory database");
    let inline = Inline::new(conn, move || fault.next_commit(), move |observed| observer.observe(observed));
    let mut actions_left = {
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
            actions_left = 0;
        }
        let end = runtime.block_on(run_process(sim, &inline, &mut actions_left));
        drop(runtime);
        let mut state = sim.state();
        if let Some(violation) = state.violation.take() {
            return Err(violation);
        }
        state.note(|| format!("the process ended: {end:?}"));
        state.fairness.crash();
        state.asking.clear();
        drop(state);
        inline.with(|conn| super::compare::compare(sim, conn))?;
        if end == ProcessEnd::Idle {
            return Ok(());
        }
    }
    Ok(())
}

async fn run_process(sim: &Arc<Sim>, inline: &Inline, actions_left: &mut usize) -> ProcessEnd {
    sim.state().start_clock();
    let engine = start(sim, inline);
    let router = crate::http::router(Arc::clone(&engine));
    let stop_at = {
        let mut state = sim.state();
        let again: Vec<u64> = state.peers.in_flight.iter().copied().collect();
        for number in again {
            let at = state.later(500);
            state.peers.send_again(number, at);
        }
        state.rng.percent(10).then(|| state.rng.below(200))
    };
    let work = async {
        tokio::select! {
            biased;
            end = run_actions(sim, &engine, actions_left, stop_at) => end,
            () = send_due_requests(sim, &router) => ProcessEnd::Crashed,
        }
    };
    let end = tokio::select! {
        biased;
        () = sim.crash.notified() => ProcessEnd::Crashed,
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
    Engine::run(settings, world, Arc::new(store), (key.into(), CallbackRequirements::default()), &slot)
}

fn settings(sim: &Arc<Sim>) -> Settings {
    let state = sim.state();
    let bounds = &state.bounds;
    let model = |number: u32| -> Arc<dyn crate::model::Model> {
        Arc::new(SimModel { sim: Arc::clone(sim), destination: format!("http://model{number}.test") })
    };
    let for_events = ["look*", "wipe*"].map(|pattern| ToolGlob::new(pattern).expect("a pattern"));
    let agent =
        |name: &str| Agent { name: name.into(), event_tools: for_events.to_vec(), ..Agent::default() };
    let own = AgentModel { model: model(1), images: false, window: Window::default() };
    debug_assert!(!for_events.iter().any(|pattern| pattern.matches(FOR_CLIENTS)));
    Settings {
        public_url: PUBLIC_URL.into(),
        database: crate::settings::Database::File("simulated".into()),
        tokens: Vec::<Secret>::new(),
        agents: vec![agent("one"), Agent { model: Some(own), ..agent("two") }],
        model: model(0),
        images: false,
        window: Window::default(),
        tool_servers: state.peers.servers.iter().map(|server| ToolServer::new(server.url.clone())).collect(),
        notify: Vec::new(),
        telemetry: None,
        retention: None,
        functions: Vec::new(),
        url_policy: UrlPolicy::Loopback,
        allow_hosts: Vec::new(),
        listen: None,
        tls: None,
        proxies: None,
        web_assets: None,
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

/// Clients and tools act until their number of actions is used up. Then all threads have to become idle.
async fn run_actions(
    sim: &Arc<Sim>,
    engine: &Arc<Engine>,
    actions_left: &mut usize,
    stop: Option<usize>,
) -> ProcessEnd {
    let mut until_stop = stop;
    while *actions_left > 0 {
        *actions_left -= 1;
        let pause = {
            let mut state = sim.state();
            state.change_clock();
            state.next_action()
        };
        sim.send_queue_changed.notify_one();
        tokio::time::sleep(pause).await;
        if until_stop == Some(0) {
            engine.shut_down().await;
            return ProcessEnd::Stopped;
        }
        until_stop = until_stop.map(|left| left - 1);
    }
    let began = {
        let mut state = sim.state();
        state.chaos_over = true;
        state.note(|| "chaos is over".into());
        // No pause becomes longer than its kind ever is, so all threads become idle within the same time.
        state.change_clock_at_end();
        state.now()
    };
    let mut idle_rounds = 0;
    let mut rounds = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(if rounds < 20 { 2 } else { 30 })).await;
        rounds += 1;
        let mut state = sim.state();
        let state = &mut *state;
        let outstanding = state.settle();
        sim.send_queue_changed.notify_one();
        let in_progress: usize = engine.dispatcher.in_progress().iter().map(|(_, count)| count).sum();
        let busy = in_progress + engine.dispatcher.busy();
        idle_rounds = if outstanding.is_none() && busy == 0 { idle_rounds + 1 } else { 0 };
        if idle_rounds > 2 {
            let outcome = state.checker.check_idle(&state.reference);
            state.record(outcome);
            return ProcessEnd::Idle;
        }
        if state.now().since(began) > IDLE_WITHIN {
            let why = match outstanding {
                Some(outstanding) => format!("I6: the run does not become idle: {outstanding}"),
                None => format!("I13: all threads are idle, but {busy} slots are in use"),
            };
            state.record(violation(why));
            return ProcessEnd::Idle;
        }
    }
}

/// Sends requests to the runtime when they are due.
async fn send_due_requests(sim: &Arc<Sim>, router: &Router) {
    loop {
        let (due, pause) = {
            let mut state = sim.state();
            let now = state.now();
            match state.peers.send_queue.first().copied() {
                Some((at, number)) if at <= now => {
                    state.peers.send_queue.pop_first();
                    state.peers.in_flight.insert(number);
                    (Some(number), Duration::ZERO)
                }
                Some((at, _)) => (None, at.since(now)),
                None => (None, Duration::from_secs(3600)),
            }
        };
        match due {
            Some(number) => {
                let (sim, router) = (Arc::clone(sim), router.clone());
                tokio::spawn(async move { send(&sim, router, number).await });
            }
            None => {
                tokio::select! {
                    biased;
                    () = sim.send_queue_changed.notified() => {}
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
    }
}

async fn send(sim: &Arc<Sim>, router: Router, number: u64) {
    let Some(request) = sim.state().peers.requests.get(&number).cloned() else { return };
    let status = post(router, &request).await;
    // The response may be lost.
    sim.pause_or_crash().await;
    let mut state = sim.state();
    let state = &mut *state;
    state.note(|| format!("{} {} {}: {status}", request.path, request.body, number));
    let lost = !state.chaos_over && state.rng.percent(5);
    if lost || status == StatusCode::SERVICE_UNAVAILABLE {
        // A client without an idempotency key cannot repeat its request safely.
        if request.kind != RequestKind::Client || request.idempotency_key.is_some() {
            // A thread may hold its input for an hour. Pauses of real senders grow; this is the last one.
            let at = state.later(if state.chaos_over { 60_000 } else { 3_000 });
            state.peers.send_again(number, at);
            sim.send_queue_changed.notify_one();
            return;
        }
    }
    state.peers.in_flight.remove(&number);
    state.peers.requests.remove(&number);
    if status.is_success()
        && let Some(tag) = request.tag
    {
        let outcome = state.checker.on_acknowledged(&state.reference, tag);
        state.record(outcome);
    }
    if request.kind == RequestKind::Callback {
        state.peers.answered_callbacks.push(request);
    }
}

async fn post(router: Router, request: &Request) -> StatusCode {
    let mut builder = http::Request::builder().method("POST").uri(&request.path);
    builder = builder.header("host", "127.0.0.1").header("content-type", "application/json");
    if let Some(key) = request.idempotency_key {
        builder = builder.header("idempotency-key", format!("k{key}"));
    }
    let body = Body::from(request.body.to_string());
    let response = router.oneshot(builder.body(body).expect("a request")).await;
    response.map_or(StatusCode::SERVICE_UNAVAILABLE, |response| response.status())
}

impl super::state::State {
    /// Acts for clients and tools so that all threads become idle. Returns what is still outstanding.
    fn settle(&mut self) -> Option<String> {
        // Events may wait until their thread is resumed, which needs a request.
        let is_client = |request: &&Request| request.kind == RequestKind::Client;
        if self.peers.requests.values().filter(is_client).count() > 100 {
            return Some("too many requests are outstanding".into());
        }
        let mut outstanding =
            self.peers.requests.iter().next().map(|first| format!("outstanding request: {first:?}"));
        for thread in 0..self.reference.threads.len() {
            outstanding = self.settle_thread(thread).or(outstanding);
        }
        if !self.reference.outbox.is_empty() {
            outstanding = Some(format!("messages between threads: {:?}", self.reference.outbox));
        }
        outstanding
    }

    fn settle_thread(&mut self, thread: super::reference::ThreadIndex) -> Option<String> {
        use rap_agent::Phase;
        let head = self.reference.threads[thread].head.clone();
        let schedule = head.subscriptions().iter().find(|active| active.server.is_runtime());
        if let Some(schedule) = schedule {
            self.command_to(thread, &format!("calls/{}/cancel", schedule.id));
            return Some(format!("t{thread} has a schedule"));
        }
        for open in head.open_calls() {
            // A server that has accepted a call sends a result at last.
            let known = self.peers.accepted.get(&open.id);
            if known.is_some_and(|known| !known.lost) {
                self.send_result(&open.id);
            }
        }
        match head.phase() {
            Phase::Waiting { batch } => {
                let waits = |open: &rap_agent::OpenCall| open.server.is_runtime() && open.until.is_none();
                if batch.iter().any(waits) {
                    self.send_message_to(thread, OnBusy::Join);
                }
                Some(format!("t{thread} waits for {batch:?}"))
            }
            Phase::Asking(asking) => Some(format!("t{thread} asks: {asking:?}")),
            Phase::Failed { .. } | Phase::Paused(_) => {
                self.command_to(thread, "resume");
                Some(format!("t{thread} is {:?}", head.phase()))
            }
            Phase::Idle if head.open_calls().next().is_some() => {
                Some(format!("t{thread} has open calls: {:?}", head.background()))
            }
            Phase::Idle | Phase::Closed => None,
        }
    }
}
