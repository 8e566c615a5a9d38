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

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use crate::attempt::Outcome;
use crate::attempts::PENDING;
use crate::stage::{Front, Stage};

const USAGE: &str = "\
usage: attack [--pending] [--weakened] [FILTER…]

  FILTER      run only attempts whose name or topic contains one of these
  --pending   also run attempts whose defence is not built yet
  --weakened  put a proxy in front of the servers that accepts everything; then attempts have to succeed";

struct Options {
    pending: bool,
    front: Front,
    filters: Vec<String>,
}

fn options() -> Option<Options> {
    let mut options = Options { pending: false, front: Front::None, filters: Vec::new() };
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--pending" => options.pending = true,
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
    let runs = |name: &str| options.pending || !PENDING.contains(&name);
    let stage = Arc::new(Stage::start(options.front, isolation, runs).await);
    println!("servers started after {:.1} s", began.elapsed().as_secs_f64());
    if stage.slowdown > 1 {
        println!("this machine is busy: bounds of time are multiplied by {}", stage.slowdown);
    }
    let mut outcomes = Vec::new();
    for attempt in attempts::all().into_iter().filter(|attempt| attempt.matches(&options.filters)) {
        let outcome = match runs(attempt.name) {
            true => watch::run(&stage, &attempt).await,
            false => Outcome::pending(&attempt),
        };
        println!("{:6.1} s  {outcome}", began.elapsed().as_secs_f64());
        outcomes.push(outcome);
    }
    outcomes.extend(end::check(&stage).await);
    println!("finished after {:.1} s", began.elapsed().as_secs_f64());
    outcomes
}
