//! The state of a run: the reference store, the peers and the random number generator. Everything happens on one OS
//! thread, in an order that the seed determines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_agent::{Bounds, Budgets, Entry, Limits, LostAfter};
use rap_protocol::{CallId, ThreadId, Timestamp};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::fairness::{Fairness, SHORTEST_PAUSE};
use super::invariants::{Checker, Violation, violation};
use super::peers::{Peers, Server};
use super::reference::{ReferenceStore, ThreadIndex};
use super::rng::Rng;
use crate::store::sqlite::CommitFault;

/// Called with the history that a model request covers.
pub(super) type Visitor = Box<dyn FnMut(&[Entry]) + Send>;

/// Maximum number of store operations without simulated time passing. More of them mean that the runtime is in a busy
/// loop.
const MAX_OPERATIONS_AT_ONCE: usize = 5_000;

/// Maximum number of times that the clock is set back in a run.
const MAX_SET_BACK: usize = 8;

/// A simulated run.
pub(super) struct Sim {
    state: Mutex<State>,
    /// Notified when the process crashes.
    pub(super) crash: Notify,
    /// Notified when a request was added to the send queue.
    pub(super) send_queue_changed: Notify,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) reference: ReferenceStore,
    pub(super) checker: Checker,
    pub(super) fairness: Fairness,
    pub(super) peers: Peers,
    pub(super) chances: Chances,
    pub(super) bounds: RunBounds,
    /// Set at the end of a run: from now on all peers respond and nothing fails.
    pub(super) chaos_over: bool,
    /// For each task of the runtime that asks the model: the thread and the last entry that its request covers.
    pub(super) asking: BTreeMap<tokio::task::Id, (ThreadIndex, u64)>,
    pub(super) violation: Option<Violation>,
    pub(super) visitor: Option<Visitor>,
    pub(super) steps: usize,
    /// The current time, and the number of store operations at this time.
    operations: (Timestamp, usize),
    actions: Vec<String>,
    keeps_actions: bool,
    /// Simulated time at the start of the process, and the tokio instant of the start. `None` between processes.
    clock: (Timestamp, Option<Instant>),
    /// Time by which the wall clock is behind simulated time: at first, and after each time at which it was set back.
    behind: Vec<Duration>,
}

/// Probabilities in a run, in percent unless stated otherwise.
#[derive(Debug, Clone)]
pub(super) struct Chances {
    /// Answers of the model with tool calls.
    pub(super) tool_calls: usize,
    /// Results that start a subscription.
    pub(super) subscribe: usize,
    /// Prompts that the model refuses as too long.
    pub(super) prompt_too_long: usize,
    /// Status checks that a server answers wrongly with "not alive".
    pub(super) false_gone: usize,
    /// Server faults: refusals, failures and slow responses, in this order.
    pub(super) server_faults: [usize; 3],
    /// Commits that fail, per thousand.
    pub(super) lost_commits: usize,
    /// Crashes at a point where the runtime waits, per ten thousand.
    pub(super) crashes: usize,
    /// Actions at which the clock is set back, per thousand.
    pub(super) set_back: usize,
    /// Store operations that take some time.
    pub(super) slow_store: usize,
    /// Invocations during which the server changes its toolset.
    pub(super) redeploys: usize,
    /// Weight of each action of `chaos`, not in percent.
    pub(super) weights: [usize; super::chaos::ACTIONS],
}

/// The limits of a run.
#[derive(Debug, Clone)]
pub(super) struct RunBounds {
    pub(super) thread: Limits,
    pub(super) lost_after: LostAfter,
    pub(super) slots: [usize; 2],
    pub(super) model_attempts: u32,
    pub(super) invoke_retry_for: Duration,
}

impl Sim {
    pub(super) fn new(seed: u64, keeps_actions: bool) -> Arc<Sim> {
        let mut rng = Rng::new(seed);
        let bounds = RunBounds {
            thread: limits(&mut rng),
            lost_after: LostAfter(Duration::from_secs(1 + rng.below(200) as u64)),
            slots: [1 + rng.below(3), 1 + rng.below(3)],
            model_attempts: 1 + rng.below(3) as u32,
            invoke_retry_for: Duration::from_secs(1 + rng.below(120) as u64),
        };
        let servers = (0..2).map(|number| Server { url: format!("http://tools{number}.test"), version: 1 });
        let mut peers = Peers::default();
        peers.servers = servers.collect();
        let state = State {
            chances: chances(&mut rng),
            reference: ReferenceStore::default(),
            checker: Checker::new(bounds.thread.clone(), bounds.lost_after),
            fairness: Fairness::new(bounds.slots),
            peers,
            bounds,
            chaos_over: false,
            asking: BTreeMap::new(),
            violation: None,
            visitor: None,
            steps: 0,
            operations: (Timestamp(0), 0),
            actions: Vec::new(),
            keeps_actions,
            clock: (Timestamp(1_000_000_000), None),
            behind: vec![Duration::ZERO],
            rng,
        };
        Arc::new(Sim { state: Mutex::new(state), crash: Notify::new(), send_queue_changed: Notify::new() })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A point at which the runtime waits for IO. It may take some time here, or crash.
    pub(super) async fn pause_or_crash(&self) {
        let (crashes, pause) = {
            let mut state = self.state();
            state.count_operation();
            let (likely, slow) = (state.chances.crashes, state.chances.slow_store);
            let crashes = state.violation.is_some() || !state.chaos_over && state.rng.below(10_000) < likely;
            let pause = state.rng.percent(slow).then(|| state.rng.below(4) as u64);
            (crashes, pause)
        };
        if crashes {
            self.state().note(|| "crash".into());
            self.crash.notify_one();
            std::future::pending::<()>().await;
        }
        match pause {
            Some(0) => tokio::task::yield_now().await,
            Some(millis) => tokio::time::sleep(Duration::from_millis(millis * millis * 4)).await,
            None => {}
        }
    }

    /// Chooses the outcome of the next commit.
    pub(super) fn next_commit(&self) -> CommitFault {
        let mut state = self.state();
        let likely = state.chances.lost_commits;
        if state.chaos_over || state.rng.below(1_000) >= likely {
            return CommitFault::None;
        }
        let fault = if state.rng.percent(50) { CommitFault::Lost } else { CommitFault::Unknown };
        let crashes = state.rng.percent(30);
        state.note(|| format!("commit: {fault:?}, crash: {crashes}"));
        if crashes {
            self.crash.notify_one();
        }
        fault
    }
}

impl State {
    pub(super) fn note(&mut self, action: impl FnOnce() -> String) {
        if self.keeps_actions {
            let action = format!("{} {}", self.now().0 - 1_000_000_000, action());
            self.actions.push(action);
        }
    }

    pub(super) fn take_actions(&mut self) -> Vec<String> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn now(&self) -> Timestamp {
        let (base, start) = self.clock;
        start.map_or(base, |start| base.plus(start.elapsed()))
    }

    /// Returns the time that the process reads, which may have been set back.
    pub(super) fn wall_clock(&self) -> Timestamp {
        self.behind.last().map_or(self.now(), |behind| self.now().minus(*behind))
    }

    /// Returns the simulated time at which the process read this time, at last.
    pub(super) fn simulated_time(&self, read: Timestamp) -> Timestamp {
        let times = self.behind.iter().rev().map(|behind| read.plus(*behind));
        times.into_iter().find(|time| *time <= self.now()).unwrap_or(read)
    }

    /// Returns whether the next attempt of an invocation may have its usual pause. The last one has to be made when the
    /// time for retries is over.
    pub(super) fn may_pause(&self, thread: &ThreadId, call: &CallId) -> bool {
        let row = self.reference.index(thread).map(|index| &self.reference.threads[index]);
        let Some(call) = row.and_then(|row| row.calls.get(call)) else { return false };
        let (now, since) = (self.wall_clock(), call.open.since);
        let left = self.bounds.invoke_retry_for.saturating_sub(now.since(since));
        since <= now && left > SHORTEST_PAUSE
    }

    /// Sets the clock back with a probability of this run.
    pub(super) fn change_clock(&mut self) {
        let likely = self.chances.set_back;
        if self.rng.below(1_000) < likely {
            let seconds = [2, 30, 600, 7_200, 86_400][self.rng.below(5)];
            self.set_clock_back(seconds);
        }
    }

    /// In a run in which the clock is set back, sets it back once more by a day. No process follows that could notice it.
    pub(super) fn change_clock_at_end(&mut self) {
        if self.chances.set_back > 0 {
            self.set_clock_back(86_400);
        }
    }

    fn set_clock_back(&mut self, seconds: u64) {
        if self.behind.len() <= MAX_SET_BACK {
            let behind = self.behind.last().copied().unwrap_or_default();
            self.behind.push(behind + Duration::from_secs(seconds));
            self.fairness.forget_failures();
            self.checker.on_set_back();
            self.note(|| format!("the clock was set back by {seconds} s"));
        }
    }

    /// Starts the clock of a new process at the time at which the last one ended.
    pub(super) fn start_clock(&mut self) {
        self.clock.1 = Some(Instant::now());
    }

    pub(super) fn stop_clock(&mut self) {
        self.clock = (self.now(), None);
    }

    pub(super) fn later(&mut self, millis: usize) -> Timestamp {
        let millis = self.rng.below(millis.max(1)) as u64;
        self.now().plus(Duration::from_millis(millis))
    }

    /// I12: a runtime that never waits would use a whole processor.
    fn count_operation(&mut self) {
        let now = self.now();
        let (at, count) = self.operations;
        self.operations = if at == now { (at, count + 1) } else { (now, 1) };
        if count > MAX_OPERATIONS_AT_ONCE {
            self.record(violation(format!("I12: {count} store operations without time passing")));
        }
    }

    /// Records the result of a check. The first violation is the outcome of the run.
    pub(super) fn record(&mut self, outcome: Result<(), Violation>) {
        if let Err(violation) = outcome {
            self.violation.get_or_insert(violation);
        }
    }
}

fn chances(rng: &mut Rng) -> Chances {
    let usual = super::chaos::USUAL_WEIGHTS;
    let weights = usual.map(|weight| match rng.below(8) {
        0 => 0,
        1 => weight * 3,
        _ => weight + 1,
    });
    let quiet = rng.percent(20);
    Chances {
        tool_calls: 20 + rng.below(60),
        subscribe: rng.below(90),
        prompt_too_long: rng.below(30),
        false_gone: rng.below(40),
        server_faults: if quiet { [0; 3] } else { [rng.below(15), rng.below(20), rng.below(30)] },
        lost_commits: if rng.percent(50) { 0 } else { rng.below(60) },
        crashes: if rng.percent(40) { 0 } else { rng.below(60) },
        set_back: if rng.percent(60) { 0 } else { 1 + rng.below(30) },
        slow_store: if rng.percent(20) { 0 } else { rng.below(60) },
        redeploys: if rng.percent(60) { 0 } else { rng.below(10) },
        weights,
    }
}

/// In some runs each session has a budget for one quantity.
fn budgets(rng: &mut Rng) -> Budgets {
    if rng.percent(60) {
        return Budgets::default();
    }
    let few = Some(1 + rng.below(20) as u64);
    let bounds = match rng.below(3) {
        0 => Bounds { turns: few, ..Bounds::default() },
        1 => Bounds { tokens: Some(20 + rng.below(300) as u64), ..Bounds::default() },
        _ => Bounds { wakes: few, ..Bounds::default() },
    };
    match rng.below(2) {
        0 => Budgets { per_hour: bounds, ..Budgets::default() },
        _ => Budgets { in_total: bounds, ..Budgets::default() },
    }
}

/// Small limits, so that every run reaches some of them.
fn limits(rng: &mut Rng) -> Limits {
    Limits {
        call_timeouts: std::collections::BTreeMap::new(),
        subscriptions: 1 + rng.below(3),
        open_calls: 1 + rng.below(5),
        held: 1 + rng.below(6) as u32,
        // All texts are short.
        held_bytes: u64::MAX,
        result_bytes: u64::MAX,
        questions: 1 + rng.below(3),
        children: 1 + rng.below(3),
        event_children: 1 + rng.below(2),
        events_per_child: 1 + rng.below(4) as u32,
        event_ids: 1_000,
        depth: 1 + rng.below(3),
        views: 64,
        turns_per_wake: 2 + rng.below(6) as u32,
        hold_max: Duration::from_secs(1 + rng.below(10) as u64),
        call_timeout: rng.percent(50).then(|| Duration::from_secs(1 + rng.below(60) as u64)),
        approval_within: Duration::from_secs(1 + rng.below(60) as u64),
        failed_retry_for: Duration::from_secs(3600),
        budgets: budgets(rng),
    }
}
