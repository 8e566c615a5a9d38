//! Facts that a step needs, by input and state.

use rap_agent::{Bounds, Budgets, FactsNeeded, Head, Limits, facts_needed};

use crate::notation::{Thread, read, small_limits};

/// A thread with a background call `r`, subscriptions `s` and `t` (a schedule), and a batch of `a` and `b` (a sleep). Call
/// `p` has returned.
const WAITING: &[&str] = &[
    "said hi",
    "answer: s t=schedule(60) r",
    "subscribed s: ok",
    "said more",
    "answer: p",
    "returned p: 1",
    "answer: a b=sleep(50)",
];
const IDLE: &[&str] = &[
    "said hi",
    "answer: s t=schedule(60) r",
    "subscribed s: ok",
    "said more",
    "answer: p",
    "returned p: 1",
    "answer ok:",
];
const ASKING: &[&str] = &["said hi", "answer: s", "subscribed s: ok"];
/// A call is open, and an event is held.
const HOLDING: &[&str] = &["said hi", "answer: s", "subscribed s: ok", "answer: a", "event s: x"];

fn with(budgets: Budgets) -> Limits {
    Limits { budgets, turns_per_wake: 50, ..small_limits() }
}

fn per_hour(bounds: Bounds) -> Limits {
    with(Budgets { per_hour: bounds, ..Budgets::default() })
}

fn wakes() -> Limits {
    per_hour(Bounds { wakes: Some(1000), ..Bounds::default() })
}

fn show(needs: FactsNeeded, thread: &mut Thread) -> String {
    let FactsNeeded { call, event, arguments, schedule, spending, paused } = needs;
    let mut parts = Vec::new();
    parts.extend(call.map(|call| format!("call {call}")));
    parts.extend(event.map(|(call, event)| format!("event {event} of {call}")));
    parts.extend(arguments.map(|(call, seq)| format!("arguments of {call} in {seq}")));
    parts.extend(schedule.map(|(call, seq)| format!("schedule {call} in {seq}")));
    parts.extend(spending.then(|| "spending".to_owned()));
    parts.extend(paused.then(|| "paused".to_owned()));
    if parts.is_empty() {
        parts.push("nothing".into());
    }
    thread.names.show(&parts.join(", "))
}

fn check(limits: Limits, lines: &[&str], table: &str) {
    let mut thread = Thread::after(limits, lines);
    crate::notation::compare(table, |line| {
        let (input, _) = read::input(&thread, line);
        let needs = facts_needed(&thread.head, &input, &thread.limits);
        show(needs, &mut thread)
    });
}

#[test]
fn facts_about_calls_are_needed_only_if_the_head_lacks_them() {
    check(
        with(Budgets::default()),
        WAITING,
        "
        returned a: 1              -> nothing
        returned r: 1              -> nothing
        returned p: 1              -> call p
        returned s: 1              -> call s
        returned nobody: 1         -> call nobody
        view a                     -> nothing
        view r                     -> nothing
        view s                     -> nothing
        view p                     -> call p
        event a: x                 -> nothing
        event p: x                 -> call p
        event p: x, id e1, child   -> call p
        event nobody: x            -> call nobody
        event s: x                 -> nothing
        event s: x, id e1          -> event e1 of s
        event s: x, child          -> arguments of s in 2
        event s: x, child, id e1   -> event e1 of s, arguments of s in 2
        timed out a                -> nothing
        timed out nobody           -> nothing
        timed out t                -> schedule t in 2
        said more                  -> nothing
        answer done:               -> nothing
        call failed a              -> nothing
        call failed p              -> nothing
        cancel s                   -> nothing
        chose a 0                  -> nothing
        sign in a                  -> nothing
        choice a 1                 -> nothing
        interrupt                  -> nothing
        resume                     -> spending, paused
        close                      -> nothing
        due                        -> nothing
        child closed t1            -> nothing
        report t1 p: x             -> nothing
        ",
    );
}

#[test]
fn a_closed_thread_needs_no_facts() {
    let turns = per_hour(Bounds { turns: Some(10), ..Bounds::default() });
    check(
        turns,
        &["said hi", "answer: p", "returned p: 1", "close"],
        "
        returned p: 1              -> nothing
        view p                     -> nothing
        event p: x, id e1, child   -> nothing
        timed out p                -> nothing
        said hi                    -> nothing
        resume                     -> nothing
        due                        -> nothing
        ",
    );
}

/// This is the default configuration. User messages and results that close a batch do not touch the row that all threads
/// of a session share.
#[test]
fn spending_is_needed_for_wakes_if_only_wakes_are_limited() {
    check(
        wakes(),
        WAITING,
        "
        begin: hi                  -> nothing
        said more                  -> nothing
        said more, enqueue         -> nothing
        said more, interrupt       -> nothing
        interrupt                  -> nothing
        returned a: 1              -> nothing
        call failed a              -> nothing
        returned r: 1              -> spending
        call failed r              -> spending
        returned p: 1              -> call p, spending
        failed                     -> nothing
        too long: x                -> nothing
        summarised: x              -> nothing
        unused answer              -> nothing
        refused a: 400             -> nothing
        sign in a                  -> nothing
        choice a 1                 -> nothing
        view a                     -> nothing
        close                      -> nothing
        notice: x                  -> nothing
        parent closed              -> nothing
        child notice t1: x         -> nothing
        timed out b                -> spending
        timed out t                -> schedule t in 2, spending
        event s: x                 -> spending
        event s: x, child          -> arguments of s in 2, spending
        lost s                     -> spending
        chose a 0                  -> spending
        cancel a                   -> spending
        due                        -> spending
        child closed t1            -> spending
        child idle t1              -> spending
        report t1 p: x             -> spending
        from parent: x             -> spending
        resumed                    -> spending
        resume                     -> spending, paused
        ",
    );
}

#[test]
fn an_answer_needs_the_spending_if_it_spawns_a_child_or_releases_held_input() {
    check(
        wakes(),
        ASKING,
        "
        answer done:               -> nothing
        answer: a                  -> nothing
        answer: a p=spawn(dig)     -> spending
        ",
    );
    let mut holding = ASKING.to_vec();
    holding.push("event s: x");
    check(wakes(), &holding, "answer done: -> spending");
    check(
        wakes(),
        HOLDING,
        "
        returned a: 1              -> spending
        call failed a              -> spending
        said more                  -> nothing
        ",
    );
}

#[test]
fn spending_is_always_needed_if_turns_or_tokens_are_limited() {
    for bounds in [
        Bounds { turns: Some(10), ..Bounds::default() },
        Bounds { tokens: Some(10_000), ..Bounds::default() },
    ] {
        for limits in [per_hour(bounds), with(Budgets { in_total: bounds, ..Budgets::default() })] {
            check(
                limits,
                IDLE,
                "
                said more                  -> spending
                answer done:               -> spending
                returned r: 1              -> spending
                unused answer              -> spending
                resume                     -> spending, paused
                ",
            );
        }
    }
}

#[test]
fn resuming_a_session_needs_its_paused_threads() {
    let none = per_hour(Bounds { wakes: Some(0), ..Bounds::default() });
    let paused = ["said hi", "answer: s", "subscribed s: ok", "answer done:", "event s: x"];
    check(none, &paused, "resume -> spending, paused");
    // Even if the limits were removed meanwhile.
    let mut thread = Thread::after(per_hour(Bounds { wakes: Some(0), ..Bounds::default() }), &paused);
    thread.limits.budgets = Budgets::default();
    let (input, _) = read::input(&thread, "resume");
    let needs = facts_needed(&thread.head, &input, &thread.limits);
    assert_eq!(needs, FactsNeeded { spending: true, paused: true, ..FactsNeeded::default() });
    // Resuming a thread that the budget did not pause resumes the others.
    check(wakes(), &["said hi", "too long: x"], "resume -> spending, paused");
    check(wakes(), &["said hi", "failed"], "resume -> spending, paused");
}

#[test]
fn a_new_thread_needs_no_facts() {
    let (input, _) = read::input(&Thread::new(wakes()), "begin: hi");
    assert_eq!(facts_needed(&Head::new(), &input, &Limits::default()), FactsNeeded::default());
}
