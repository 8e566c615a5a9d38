//! Random inputs in random order with random limits. The model of the store can apply every write, every head survives a
//! round trip through its stored form, and no step misses a fact.

use std::time::Duration;

use proptest::prelude::*;
use rap_agent::{Bounds, Budgets, Facts, FactsNeeded, Input, Limits, Occurrence, facts_needed, step};

use crate::notation::{Thread, event_child, read, small_limits, spawned_child};

/// Loads every fact that exists for an input.
fn all_facts(thread: &Thread, input: &Input, occurrence: Option<Occurrence>) -> Facts {
    let mut needs = FactsNeeded { spending: true, paused: true, ..FactsNeeded::default() };
    let call = match input {
        Input::ToolResult { call, .. }
        | Input::View { call, .. }
        | Input::Event { call, .. }
        | Input::TimerFired { call } => Some(call.clone()),
        _ => None,
    };
    if let Some(call) = call {
        if let Some(active) = thread.head.subscription(&call) {
            needs.arguments = Some((call.clone(), active.seq));
            needs.schedule = Some((call.clone(), active.seq));
        }
        if let Input::Event { event, .. } = input {
            needs.event = event.id.clone().map(|id| (call.clone(), id));
        }
        needs.call = Some(call);
    }
    thread.store.load(&needs, thread.identity.clone(), occurrence)
}

/// Checks that a step with all facts equals a step with the facts that `facts_needed` returns.
fn check_facts_needed(thread: &Thread, line: &str) {
    let (input, occurrence) = read::input(thread, line);
    let all = all_facts(thread, &input, occurrence.clone());
    let needs = facts_needed(&thread.head, &input, &thread.limits);
    let needed = thread.store.load(&needs, thread.identity.clone(), occurrence);
    let take = |facts| step(thread.head.clone(), input.clone(), facts, thread.now, &thread.limits);
    assert_eq!(take(needed), take(all), "{line}: {needs:?}");
}

fn check_all(mut thread: Thread, lines: &[String]) {
    for line in lines {
        if !thread.is_preparation(line) {
            check_facts_needed(&thread, line);
            // It does not matter here whether the input is ignored.
            drop(thread.take(line));
        }
    }
}

fn any_of(texts: &'static [&'static str]) -> impl Strategy<Value = &'static str> {
    proptest::sample::select(texts)
}

/// Names of calls. There are few, so that most inputs refer to a call that exists.
fn any_call() -> impl Strategy<Value = &'static str> {
    any_of(&["a", "b", "c", "s", "rap_1", "nobody"])
}

fn any_answer() -> impl Strategy<Value = String> {
    let plan = any_of(&[
        "",
        "",
        "",
        "=refuse",
        "=approve",
        "=malformed",
        "=cancel(s)",
        "=cancel(a)",
        "=spawn(dig)",
        "=report(so)",
        "=message(t1)",
        "=sleep(3)",
        "=sleep(90)",
        "=sleep(4000)",
        "=wait",
        "=schedule(60)",
        "=schedule(900)",
    ]);
    let call = (any_of(&["a", "b", "c", "s", "?"]), plan).prop_map(|(name, plan)| format!("{name}{plan}"));
    let close = any_of(&["", "", "", "", "", "", "", "", " x=close", " x=close(so)"]);
    prop_oneof![
        1 => Just("answer done:".to_owned()),
        3 => (proptest::collection::vec(call, 1..4), close)
            .prop_map(|(calls, close)| format!("answer: {}{close}", calls.join(" "))),
    ]
}

fn any_event() -> impl Strategy<Value = String> {
    (
        any_call(),
        any_of(&["", ", child"]),
        any_of(&["", "", "", ", final"]),
        any_of(&["", ", id e1", ", id e2"]),
    )
        .prop_map(|(call, child, end, id)| format!("event {call}: x{child}{end}{id}"))
}

fn any_line() -> impl Strategy<Value = String> {
    let of_call = any_of(&[
        "returned CALL: 1",
        "returned CALL: 1",
        "returned CALL: 1",
        "subscribed CALL: ok",
        "subscribed CALL: ok",
        "call failed CALL",
        "refused CALL: 400",
        "timed out CALL",
        "timed out CALL",
        "ticked CALL: tea, next 2000",
        "ticked CALL: tea, next unknown",
        "ticked CALL: tea",
        "lost CALL",
        "sign in CALL",
        "choice CALL 1",
        "choice CALL 2",
        "view CALL",
        "chose CALL 0",
        "chose CALL 1",
        "dismissed CALL",
        "cancel CALL",
        "report t1 CALL: so",
        "report t2 CALL: so, newer",
    ]);
    let other = any_of(&[
        "said hi",
        "said hi, enqueue",
        "said hi, interrupt",
        "said hi, reject",
        "failed",
        "failed permanently",
        "too long: x",
        "summarised: S",
        "unused answer",
        "interrupt",
        "resume",
        "due",
        "due",
        "notice: x",
        "child closed t1",
        "child closed t2",
        "child idle t1",
        "child idle t2",
        "child notice t1: x",
        "from parent: so",
        "from parent: so, newer",
        "resumed",
        "paused elsewhere t8 t9",
        "clock back 500s",
    ]);
    let seconds = any_of(&["1", "30", "60", "100", "300", "3600"]);
    prop_oneof![
        6 => any_answer(),
        6 => (of_call, any_call()).prop_map(|(line, call)| line.replace("CALL", call)),
        3 => any_event(),
        4 => other.prop_map(str::to_owned),
        2 => seconds.prop_map(|seconds| format!("after {seconds}s")),
    ]
}

fn any_bounds() -> impl Strategy<Value = Bounds> {
    let bound = || proptest::option::weighted(0.4, 0..6_u64);
    (bound(), bound(), bound()).prop_map(|(turns, tokens, wakes)| Bounds { turns, tokens, wakes })
}

fn any_limits() -> impl Strategy<Value = Limits> {
    let sizes = (1..4_usize, 0..3_usize, 0..3_u32, 0..3_u64, 1..6_u32, 1..4_u32);
    (any_bounds(), any_bounds(), sizes, any::<bool>()).prop_map(|(per_hour, in_total, sizes, timeout)| {
        let (children, event_children, events_per_child, event_ids, turns_per_wake, held) = sizes;
        Limits {
            budgets: Budgets { per_hour, in_total },
            call_timeout: timeout.then_some(Duration::from_secs(100)),
            open_calls: 6,
            children,
            event_children,
            events_per_child,
            event_ids,
            turns_per_wake,
            held,
            ..small_limits()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn facts_needed_is_complete_for_random_inputs(
        limits in any_limits(),
        lines in proptest::collection::vec(any_line(), 1..40),
    ) {
        check_all(Thread::after(limits, &["said hi"]), &lines);
    }

    #[test]
    fn facts_needed_is_complete_for_random_inputs_to_a_child(
        limits in any_limits(),
        for_events in any::<bool>(),
        lines in proptest::collection::vec(any_line(), 1..30),
    ) {
        // The child is spawned with other limits than it has later, so that it always exists.
        let spawning = Limits { event_children: 1, ..small_limits() };
        let mut child = if for_events { event_child(spawning) } else { spawned_child(spawning) };
        child.limits = limits;
        check_all(child, &lines);
    }
}
