//! The rules under chaos: thousands of seeded runs of a whole runtime, with all invariants checked after every action.
//!
//! A seed that fails prints itself and its last actions. `RAP_SIM_SEED=n` runs that seed alone, `RAP_SIM_SEEDS=n`
//! runs so many in each of the eight parts.

#[path = "simulation/mod.rs"]
mod sim;

use std::env;

use sim::fault::Fault;

/// Seeds in each part.
const SEEDS: u64 = 2_500;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text}")))
}

fn part(part: u64) {
    if let Some(seed) = number("RAP_SIM_SEED") {
        return sim::check(seed);
    }
    let seeds = number("RAP_SIM_SEEDS").unwrap_or(SEEDS);
    for seed in part * seeds..(part + 1) * seeds {
        sim::check(seed);
    }
}

macro_rules! parts {
    ($($name:ident = $part:literal),*) => {
        $(
            /// Proves: CN-14, CN-24, SE-03, SE-06, SE-13, SE-17, SE-22, SE-25, LC-15, LC-30, TR-22
            #[test]
            fn $name() {
                part($part);
            }
        )*
    };
}

parts!(
    all_invariants_hold_under_chaos_1_of_8 = 0,
    all_invariants_hold_under_chaos_2_of_8 = 1,
    all_invariants_hold_under_chaos_3_of_8 = 2,
    all_invariants_hold_under_chaos_4_of_8 = 3,
    all_invariants_hold_under_chaos_5_of_8 = 4,
    all_invariants_hold_under_chaos_6_of_8 = 5,
    all_invariants_hold_under_chaos_7_of_8 = 6,
    all_invariants_hold_under_chaos_8_of_8 = 7
);
