//! `cargo xtask attack`: attacks a runtime, a tool server and their clients on loopback, and fails if an attempt succeeds.
//!
//! Each [`attempt::Attempt`] has a check of its own. Besides, an attempt succeeds if the memory, the CPU time or the latency
//! of bystanders leave the bounds in [`watch`], if a process does not stop in time, or if a log contains a secret.
//! docs/security.md says what the attempts stand for.
//!
//! Nothing is sent to another machine: where the system permits it, everything runs in a network namespace that has
//! nothing but loopback.

#![allow(clippy::unwrap_used, reason = "a panic counts as a success of the attempt")]

mod attempt;
mod attempts;
mod end;
mod isolation;
mod report;
mod stage;
mod watch;
mod weak;
mod wire;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::attempt::{Attempt, Outcome};
use crate::stage::{Front, Stage};

/// Number of sets of servers that are attacked at the same time. Each has its own bystanders.
const SETS: usize = 3;

const USAGE: &str = "\
usage: attack [--weakened] [FILTER…]

  FILTER      run only attempts whose name or topic contains one of these
  --weakened  put a proxy in front of the servers that accepts everything; then attempts have to succeed";

struct Options {
    front: Front,
    filters: Vec<String>,
}

fn options() -> Option<Options> {
    let mut options = Options { front: Front::None, filters: Vec::new() };
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--weakened" => options.front = Front::Weakened,
            word if word.starts_with('-') => return None,
            word => options.filters.push(word.to_owned()),
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    if let Some(target) = weak::requested() {
        return weak::run(&target);
    }
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let isolation = isolation::enter();
    // The text of a panic is part of the outcome of its attempt.
    std::panic::set_hook(Box::new(|_| {}));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let outcomes = runtime.block_on(run(&options, isolation));
    let successes = report::print(&outcomes);
    // Connections and fake servers of the attempts need not end in an orderly way.
    runtime.shutdown_background();
    if successes == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run(options: &Options, isolation: isolation::Isolation) -> Vec<Outcome> {
    let began = Instant::now();
    println!("{isolation}");
    let chosen = attempts::all().into_iter().filter(|attempt| attempt.matches(&options.filters));
    let attempts = Arc::new(Waiting(Mutex::new(chosen.collect())));
    let (mut stages, count) = (Vec::new(), SETS.min(attempts.count()));
    for _ in 0..count {
        stages.push(Arc::new(Stage::start(options.front, isolation).await));
    }
    println!("servers started after {:.1} s", began.elapsed().as_secs_f64());
    let sets = stages.iter().enumerate().map(|(set, stage)| {
        let (stage, attempts) = (Arc::clone(stage), Arc::clone(&attempts));
        tokio::spawn(async move { attack(&stage, || attempts.next(set, count), began).await })
    });
    let sets = futures_util::future::join_all(sets).await;
    let mut outcomes: Vec<Outcome> =
        sets.into_iter().flat_map(|outcomes| outcomes.expect("bug: panics of attempts are caught")).collect();
    outcomes.sort_by_key(|outcome| attempts::position(outcome.name));
    outcomes.extend(end::check(&stages).await);
    println!("finished after {:.1} s", began.elapsed().as_secs_f64());
    outcomes
}

/// Runs attempts on a set of servers, one after the other.
async fn attack(
    stage: &Arc<Stage>,
    mut next: impl FnMut() -> Option<Attempt>,
    began: Instant,
) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    while let Some(attempt) = next() {
        let outcome = watch::run(stage, &attempt).await;
        println!("{:6.1} s  {outcome}", began.elapsed().as_secs_f64());
        outcomes.push(outcome);
    }
    outcomes
}

/// Attempts that have not run yet. Costly ones are bound to a set of servers, and run there before all others.
struct Waiting(Mutex<VecDeque<Attempt>>);

impl Waiting {
    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Returns the next attempt for one of `sets` sets of servers.
    fn next(&self, set: usize, sets: usize) -> Option<Attempt> {
        let mut waiting = self.0.lock().unwrap();
        let set_of = |attempt: &Attempt| attempt.set().map(|set| set % sets);
        let own = waiting.iter().position(|attempt| set_of(attempt) == Some(set));
        let next = own.or_else(|| waiting.iter().position(|attempt| set_of(attempt).is_none()));
        waiting.remove(next?)
    }
}
