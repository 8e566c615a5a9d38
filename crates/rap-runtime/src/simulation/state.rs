//! The state of a run: the model, the outside, and the source of chance. Everything happens on one thread, in an order
//! that the seed decides.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_agent::{Bounds, Budgets, Entry, Limits, LostAfter};
use rap_protocol::Timestamp;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::disk::{Disk, Place};
use super::fairness::Fairness;
use super::invariants::{Broken, Checker, broken};
use super::outside::{Outside, Server};
use super::rng::Rng;
use crate::store::sqlite::CommitFault;

/// Sees the history that a question to the model covers.
pub(super) type Visitor = Box<dyn FnMut(&[Entry]) + Send>;

/// Operations of the store at one moment of simulated time; beyond it the runtime spins.
const SPINS: usize = 5_000;

/// A run.
pub(super) struct Sim {
    state: Mutex<State>,
    /// The process ends here.
    pub(super) crash: Notify,
    /// A request is to be sent earlier than planned.
    pub(super) agenda_changed: Notify,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) disk: Disk,
    pub(super) checker: Checker,
    pub(super) fairness: Fairness,
    pub(super) outside: Outside,
    pub(super) mood: Mood,
    pub(super) bounds: RunBounds,
    /// Chaos is over: everybody answers, and nothing fails any more.
    pub(super) healed: bool,
    /// Threads that a task of the runtime asks the model for.
    pub(super) asking: BTreeMap<tokio::task::Id, (Place, u64)>,
    pub(super) broken: Option<Broken>,
    pub(super) visitor: Option<Visitor>,
    pub(super) steps: usize,
    /// Operations of the store since time passed.
    operations: (Timestamp, usize),
    actions: Vec<String>,
    keeps_actions: bool,
    /// Time at the start of the process, and when that was.
    clock: (Timestamp, Option<Instant>),
}

/// What is likely in a run, in percent.
#[derive(Debug, Clone)]
pub(super) struct Mood {
    pub(super) talkative: usize,
    pub(super) subscribing: usize,
    pub(super) long: usize,
    pub(super) forgetful: usize,
    /// Servers: refusals, no answers, slow answers, in this order.
    pub(super) trouble: [usize; 3],
    /// Commits that fail, in one of a thousand.
    pub(super) lost_commits: usize,
    /// Crashes at a point where the runtime waits, in one of ten thousand.
    pub(super) crashes: usize,
    /// Store operations that take a moment.
    pub(super) slow_store: usize,
    pub(super) redeploys: usize,
    pub(super) weights: [usize; super::chaos::ACTIONS],
}

/// The bounds of a run.
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
        let servers = (0..2).map(|no| Server { url: format!("http://tools{no}.test"), version: 1 });
        let mut outside = Outside::default();
        outside.servers = servers.collect();
        let state = State {
            mood: mood(&mut rng),
            disk: Disk::default(),
            checker: Checker::new(bounds.thread.clone(), bounds.lost_after),
            fairness: Fairness::new(bounds.slots),
            outside,
            bounds,
            healed: false,
            asking: BTreeMap::new(),
            broken: None,
            visitor: None,
            steps: 0,
            operations: (Timestamp(0), 0),
            actions: Vec::new(),
            keeps_actions,
            clock: (Timestamp(1_000_000_000), None),
            rng,
        };
        Arc::new(Sim { state: Mutex::new(state), crash: Notify::new(), agenda_changed: Notify::new() })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A point at which the runtime waits for something outside of it: it may take a moment, or crash.
    pub(super) async fn wait_here(&self) {
        let (crashes, pause) = {
            let mut state = self.state();
            state.count_operation();
            let (likely, slow) = (state.mood.crashes, state.mood.slow_store);
            let crashes = state.broken.is_some() || !state.healed && state.rng.below(10_000) < likely;
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

    /// How the next commit ends.
    pub(super) fn next_commit(&self) -> CommitFault {
        let mut state = self.state();
        let likely = state.mood.lost_commits;
        if state.healed || state.rng.below(1_000) >= likely {
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

    /// The clock of a new process goes on where the last one ended.
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

    /// I12: a runtime that goes on without waiting for anything would use a whole processor.
    fn count_operation(&mut self) {
        let now = self.now();
        let (at, count) = self.operations;
        self.operations = if at == now { (at, count + 1) } else { (now, 1) };
        if count > SPINS {
            self.holds(broken(format!("I12: {count} operations of the store at the same time")));
        }
    }

    /// Keeps what holds; the first thing that does not is the outcome of the run.
    pub(super) fn holds(&mut self, outcome: Result<(), Broken>) {
        if let Err(broken) = outcome {
            self.broken.get_or_insert(broken);
        }
    }
}

fn mood(rng: &mut Rng) -> Mood {
    let usual = super::chaos::USUAL;
    let weights = usual.map(|weight| match rng.below(8) {
        0 => 0,
        1 => weight * 3,
        _ => weight + 1,
    });
    let quiet = rng.percent(20);
    Mood {
        talkative: 20 + rng.below(60),
        subscribing: rng.below(90),
        long: rng.below(30),
        forgetful: rng.below(40),
        trouble: if quiet { [0; 3] } else { [rng.below(15), rng.below(20), rng.below(30)] },
        lost_commits: if rng.percent(50) { 0 } else { rng.below(60) },
        crashes: if rng.percent(40) { 0 } else { rng.below(60) },
        slow_store: if rng.percent(20) { 0 } else { rng.below(60) },
        redeploys: if rng.percent(60) { 0 } else { rng.below(10) },
        weights,
    }
}

/// In some runs one thing is bounded for each session.
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

/// Narrow bounds, so that every run meets some of them.
fn limits(rng: &mut Rng) -> Limits {
    Limits {
        subscriptions: 1 + rng.below(3),
        open_calls: 1 + rng.below(5),
        held: 1 + rng.below(6) as u32,
        // What is said here is short.
        held_bytes: u64::MAX,
        questions: 1 + rng.below(3),
        children: 1 + rng.below(3),
        event_children: 1 + rng.below(2),
        events_per_child: 1 + rng.below(4) as u32,
        event_marks: 1_000,
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
