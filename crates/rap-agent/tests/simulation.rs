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

/// A shell with that fault has to be found out, by one of these invariants, before so many seeds have run.
fn is_caught(fault: Fault, invariants: &[&str]) {
    const WITHIN: u64 = 500;
    let broken = (0..WITHIN).find_map(|seed| sim::run(seed, fault).err());
    let broken = broken.unwrap_or_else(|| panic!("{fault:?} was not found in {WITHIN} seeds")).0;
    let named = invariants.iter().any(|invariant| broken.starts_with(&format!("{invariant}:")));
    assert!(named, "{fault:?} was found, but not by {invariants:?}: {broken}");
}

#[test]
fn an_acknowledgement_before_the_commit_is_caught() {
    is_caught(Fault::AcknowledgesEarly, &["I1"]);
}

#[test]
fn a_head_stored_without_its_writes_is_caught() {
    is_caught(Fault::TearsCommits, &["I4"]);
}

#[test]
fn writes_stored_without_their_head_are_caught() {
    is_caught(Fault::KeepsOldHeads, &["I4"]);
}

#[test]
fn effects_that_are_only_in_memory_are_caught() {
    is_caught(Fault::ForgetsEffects, &["I6"]);
}

#[test]
fn letters_that_are_not_stored_are_caught() {
    is_caught(Fault::LosesLetters, &["I11"]);
}

#[test]
fn an_invocation_of_a_settled_call_is_caught() {
    is_caught(Fault::InvokesBlindly, &["I6"]);
}

#[test]
fn an_invocation_after_an_answer_is_caught() {
    is_caught(Fault::InvokesOnAndOn, &["I6"]);
}

#[test]
fn stored_notifications_are_caught() {
    is_caught(Fault::StoresNotifications, &["I7"]);
}

#[test]
fn retried_notifications_are_caught() {
    is_caught(Fault::RetriesNotifications, &["I7"]);
}

#[test]
fn forgotten_event_ids_are_caught() {
    is_caught(Fault::ForgetsMarks, &["I2"]);
}

#[test]
fn forgotten_keys_of_clients_are_caught() {
    is_caught(Fault::ForgetsKeys, &["I2"]);
}

#[test]
fn held_input_in_the_wrong_order_is_caught() {
    is_caught(Fault::ReversesHeld, &["I1"]);
}

#[test]
fn a_child_that_sees_too_much_is_caught() {
    is_caught(Fault::SharesHistory, &["I9"]);
}

#[test]
fn a_call_id_that_is_not_new_is_caught() {
    is_caught(Fault::TrustsIds, &["I5", "I6"]);
}

/// Tests of prompts can take the histories of the simulation.
#[test]
fn histories_are_offered_to_other_tests() {
    use std::{cell::Cell, rc::Rc};
    let histories = Rc::new(Cell::new(0));
    let counted = Rc::clone(&histories);
    for seed in 0..20 {
        let counted = Rc::clone(&counted);
        sim::histories::each(seed, move |_| counted.set(counted.get() + 1));
    }
    assert!(histories.get() > 200, "{} histories in 20 seeds", histories.get());
}
