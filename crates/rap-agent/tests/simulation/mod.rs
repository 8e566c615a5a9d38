//! A simulation of a whole runtime around the step. The same seed gives the same run.
//!
//! To use it from a test: `#[path = "simulation/mod.rs"] mod sim;`.

// Each test takes what it needs of this.
#![allow(dead_code)]

pub mod chaos;
pub mod disk;
pub mod fault;
pub mod histories;
pub mod invariants;
pub mod outside;
pub mod purse;
pub mod rng;
pub mod watch;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use chaos::Chaos;
use fault::Fault;
use invariants::Broken;

/// How many of the last actions a failed run shows.
const SHOWN: usize = 25;

/// Runs a seed; says what broke.
pub fn run(seed: u64, fault: Fault) -> Result<(), Broken> {
    catch_unwind(|| Chaos::new(seed, fault).run())
        .unwrap_or_else(|_| Err(Broken("an assertion of the rules failed".into())))
}

/// Runs a seed and, if something breaks, runs it again and shows what happened before.
pub fn check(seed: u64) {
    let Err(broken) = run(seed, Fault::None) else { return };
    let mut chaos = Chaos::new(seed, Fault::None);
    chaos.world.keeps_actions = true;
    let again = catch_unwind(AssertUnwindSafe(|| chaos.run()));
    let actions = &chaos.world.actions;
    for action in actions.iter().skip(actions.len().saturating_sub(SHOWN)) {
        println!("{action}");
    }
    let again = again.map(|result| result.err().map(|broken| broken.0));
    panic!("seed {seed}: {}\nRAP_SIM_SEED={seed} runs it again ({again:?})", broken.0);
}
