//! A simulation of the whole runtime: the real engine and the real SQLite store, with simulated time, people, models,
//! tool servers and crashes. The same seed gives the same run.

mod chaos;
mod compare;
mod fairness;
mod invariants;
mod model;
mod observe;
mod peers;
mod reference;
mod rng;
mod runner;
mod state;
mod store;
mod tests;
mod tracker;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use invariants::Violation;
use state::Sim;

/// Number of actions that a failed run prints, counted from the last.
const PRINTED_ACTIONS: usize = 40;

/// Runs a seed. Returns the first violation, and the log of actions if `keeps_actions` is set.
fn run(seed: u64, keeps_actions: bool) -> (Result<(), Violation>, Vec<String>) {
    let sim = Sim::new(seed, keeps_actions);
    let outcome = catch_unwind(AssertUnwindSafe(|| runner::run(&sim)))
        .unwrap_or_else(|_| Err(Violation("panic: see the message above".into())));
    let actions = sim.state().take_actions();
    (outcome, actions)
}

/// Runs a seed. If an invariant is violated, runs it again and prints the last actions before the violation.
fn check(seed: u64) {
    let (Err(violation), _) = run(seed, false) else { return };
    let (again, actions) = run(seed, true);
    let shown =
        std::env::var("RAP_SIM_SHOWN").ok().and_then(|text| text.parse().ok()).unwrap_or(PRINTED_ACTIONS);
    for action in actions.iter().skip(actions.len().saturating_sub(shown)) {
        println!("{action}");
    }
    let again = again.err().map(|violation| violation.0);
    panic!("seed {seed}: {}\nRAP_SIM_SEED={seed} repeats the run (second run: {again:?})", violation.0);
}
