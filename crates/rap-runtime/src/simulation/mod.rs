//! A simulation of the whole runtime: the real engine and the real SQLite store, with simulated time, people, models,
//! tool servers and crashes. The same seed gives the same run.

mod chaos;
mod compare;
mod disk;
mod fairness;
mod invariants;
mod life;
mod model;
mod observe;
mod outside;
mod rng;
mod state;
mod store;
mod tests;
mod watch;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use invariants::Broken;
use state::Sim;

/// How many of the last actions a failed run shows.
const SHOWN: usize = 40;

/// Runs a seed. Returns what broke, and the actions if they are to be kept.
fn run(seed: u64, keeps_actions: bool) -> (Result<(), Broken>, Vec<String>) {
    let sim = Sim::new(seed, keeps_actions);
    let outcome = catch_unwind(AssertUnwindSafe(|| life::run(&sim)))
        .unwrap_or_else(|_| Err(Broken("panic: an assertion failed".into())));
    let actions = sim.state().take_actions();
    (outcome, actions)
}

/// Runs a seed and, if something breaks, runs it again and shows what happened before.
fn check(seed: u64) {
    let (Err(broken), _) = run(seed, false) else { return };
    let (again, actions) = run(seed, true);
    let shown = std::env::var("RAP_SIM_SHOWN").ok().and_then(|text| text.parse().ok()).unwrap_or(SHOWN);
    for action in actions.iter().skip(actions.len().saturating_sub(shown)) {
        println!("{action}");
    }
    let again = again.err().map(|broken| broken.0);
    panic!("seed {seed}: {}\nRAP_SIM_SEED={seed} runs it again ({again:?})", broken.0);
}
