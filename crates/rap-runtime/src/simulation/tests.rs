//! Seeded runs. `RAP_SIM_SEED=n` runs only seed n. `RAP_SIM_SEEDS=n` runs n seeds in each part.

use std::env;

use super::{check, run};

/// Number of seeds in each part, unless `RAP_SIM_SEEDS` is set.
const SEEDS: u64 = 250;

fn number(name: &str) -> Option<u64> {
    env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text}")))
}

fn part(part: u64) {
    if let Some(seed) = number("RAP_SIM_SEED") {
        return check(seed);
    }
    let seeds = number("RAP_SIM_SEEDS").unwrap_or(SEEDS);
    for seed in part * seeds..(part + 1) * seeds {
        check(seed);
    }
}

/// The other parts check the same invariants with other seeds.
///
/// Proves: TC-07, CN-07, TR-07, TR-13, SE-03, SE-06, SE-09, SE-22, LC-16, LC-29, LC-30, LC-38
#[test]
fn all_invariants_hold_under_chaos_1_of_8() {
    part(0);
}

macro_rules! other_parts {
    ($($name:ident: $part:literal;)*) => {
        $(
            #[test]
            fn $name() {
                part($part);
            }
        )*
    };
}

other_parts! {
    all_invariants_hold_under_chaos_2_of_8: 1;
    all_invariants_hold_under_chaos_3_of_8: 2;
    all_invariants_hold_under_chaos_4_of_8: 3;
    all_invariants_hold_under_chaos_5_of_8: 4;
    all_invariants_hold_under_chaos_6_of_8: 5;
    all_invariants_hold_under_chaos_7_of_8: 6;
    all_invariants_hold_under_chaos_8_of_8: 7;
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    for seed in 0..10 {
        let [(_, one), (_, other)] = [run(seed, true), run(seed, true)];
        let differs = one.iter().zip(&other).position(|(one, other)| one != other);
        let shown = differs.map(|at| (&one[at], &other[at]));
        assert!(one == other, "seed {seed}: {} and {} actions, {shown:?}", one.len(), other.len());
    }
}
