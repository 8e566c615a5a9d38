//! The rules under chaos: thousands of seeded runs of a whole runtime, with all invariants checked after every action.
//!
//! A seed that fails prints itself and its last actions. `RAP_SIM_SEED=n` runs that seed alone, `RAP_SIM_SEEDS=n`
//! runs so many in each of the eight parts.

#[path = "simulation/mod.rs"]
mod sim;
mod strict;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::env;
use std::rc::Rc;

use rap_agent::prompt::{Prompt, Thinking, anthropic, openai, seen, to_summarise};
use rap_agent::{Entry, Item};
use serde_json::Value;
use sim::fault::Fault;
use sim::world::SUMMARY;

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
    is_caught(Fault::TearsCommits, &["I4", "I1"]);
}

#[test]
fn writes_stored_without_their_head_are_caught() {
    is_caught(Fault::KeepsOldHeads, &["I4", "I1"]);
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
    is_caught(Fault::SharesHistory, &["I9", "I5"]);
}

#[test]
fn a_call_id_that_is_not_new_is_caught() {
    is_caught(Fault::TrustsIds, &["I5", "I6"]);
}

#[test]
fn a_fork_in_the_middle_of_an_answer_is_caught() {
    is_caught(Fault::ForksAnywhere, &["I9"]);
}

#[test]
fn a_fork_that_takes_subscriptions_along_is_caught() {
    is_caught(Fault::ForksSubscriptions, &["I10"]);
}

#[test]
fn an_event_that_may_do_too_much_is_caught() {
    is_caught(Fault::TrustsEvents, &["I8"]);
}

#[test]
fn a_call_that_is_lost_at_the_first_word_is_caught() {
    is_caught(Fault::BelievesAtOnce, &["I8"]);
}

#[test]
fn a_forgotten_word_on_a_lost_call_is_caught() {
    is_caught(Fault::ForgetsDoubts, &["I12"]);
}

#[test]
fn forgotten_spending_is_caught() {
    is_caught(Fault::ForgetsSpending, &["I12"]);
}

#[test]
fn a_session_that_goes_on_in_part_is_caught() {
    is_caught(Fault::ResumesOne, &["I12"]);
}

#[test]
fn a_summary_of_more_than_it_covers_is_caught() {
    is_caught(Fault::SummarisesAll, &["I1"]);
}

/// Every history that a model is asked about gives a request that both providers accept, in which each result of the
/// history stands once: nothing is dropped, nothing made up.
#[test]
fn every_history_of_the_simulation_is_a_prompt_that_providers_accept() {
    let (histories, summaries) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    for seed in 0..PROMPT_SEEDS {
        let (counted, summed) = (Rc::clone(&histories), Rc::clone(&summaries));
        sim::histories::each(seed, move |history| {
            counted.set(counted.get() + 1);
            let entries: Vec<Entry> = history.iter().map(|entry| (*entry).clone()).collect();
            let short = seen((1..).zip(entries.clone()).collect());
            check_prompt(seed, &entries);
            check_prompt(seed, &to_summarise(short.clone()));
            if short != entries {
                summed.set(summed.get() + 1);
                check_prompt(seed, &short);
                check_summary(seed, &entries, &short);
            }
        });
    }
    assert!(histories.get() > 1000, "only {} histories", histories.get());
    assert!(summaries.get() > 100, "only {} with a summary", summaries.get());
}

const PROMPT_SEEDS: u64 = 120;

/// With a summary, a prompt begins with it, nothing is left out that it does not cover, and every call that is still
/// there is told as it was without it.
fn check_summary(seed: u64, whole: &[Entry], short: &[Entry]) {
    let Item::Summary { covers, .. } = short[0].item else {
        panic!("seed {seed}: {:?} comes first", short[0])
    };
    let rest = whole[covers as usize..].iter().filter(|entry| !matches!(entry.item, Item::Summary { .. }));
    let results = |entry: &&Entry| !matches!(entry.item, Item::Assistant { .. });
    assert!(rest.clone().count() + 1 == short.len(), "seed {seed}: something is left out");
    assert!(rest.filter(results).eq(short[1..].iter().filter(results)), "seed {seed}: something is another");
    let [whole, short] =
        [whole, short].map(|entries| Value::Object(openai::request(&Prompt::new("", entries, &[])).body));
    let first = short["messages"][0]["content"].as_str().unwrap_or_default();
    assert!(first.contains(SUMMARY), "seed {seed}: {first}");
    let [whole, short] = [&whole, &short].map(|body| {
        let messages = body["messages"].as_array().into_iter().flatten();
        let calls = messages.flat_map(|message| message["tool_calls"].as_array().into_iter().flatten());
        calls.map(|call| (call["id"].to_string(), call["function"].clone())).collect::<BTreeMap<_, _>>()
    });
    let changed = short.iter().find(|(id, function)| whole.get(*id) != Some(function));
    assert!(changed.is_none(), "seed {seed}: {changed:?}");
}

fn check_prompt(seed: u64, entries: &[Entry]) {
    let prompt = Prompt::new("be good", entries, &[]);
    let openai = Value::Object(openai::request(&prompt).body);
    let anthropic = Value::Object(anthropic::request(&prompt).body);
    strict::openai_accepts(&openai).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    let thinking = Thinking::First { model: "m" };
    let thinks = Value::Object(anthropic::request(&Prompt { thinking, ..prompt }).body);
    strict::anthropic_accepts(&thinks, strict::Thinking::First)
        .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    strict::anthropic_accepts(&anthropic, strict::Thinking::Off)
        .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    let calls: usize = entries
        .iter()
        .map(|entry| match &entry.item {
            Item::Assistant { calls, .. } => calls.len(),
            _ => 0,
        })
        .sum();
    let results = entries.iter().filter(|entry| matches!(entry.item, Item::Result { .. })).count();
    let told = openai["messages"].as_array().into_iter().flatten();
    let told = told.filter(|message| message["role"] == "tool").count();
    // A thread that waits has calls without a result; they show a placeholder.
    assert!(results <= calls && told == calls, "seed {seed}: {calls} calls, {results} results, {told} told");
}
