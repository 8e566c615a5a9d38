//! Summaries: when they are accepted, and what they cover.

use rap_agent::{Input, TurnAnswer, Usage};

use crate::notation::{Thread, check, check_each_from, check_event_child, check_spawned_child, small_limits};

#[test]
fn a_summary_covers_the_answered_entries_and_the_turn_is_repeated() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        summarised: S              -> ignored: Duplicate
        answer fine:               -> idle; assistant fine
        said two                   -> asking 2; user two; ask 2
        summarised of 1: S         -> ignored: StaleTurn
        summarised: S              -> asking 3; summary to 1: S; ask 3
        summarised of 2: S         -> ignored: StaleTurn
        summarised: S              -> ignored: Duplicate
        answer good:               -> idle; assistant good
        summarised: S              -> ignored: StaleTurn
        said three                 -> asking 4; user three; ask 4
        summarised: T              -> asking 5; summary to 4: T; ask 5
        ",
    );
}

#[test]
fn results_that_the_model_has_not_seen_are_not_covered() {
    check(
        "
        said go                    -> asking 1; user go; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        summarised: S              -> ignored: StaleTurn
        returned b: 2              -> waiting; settle b Returned; b: 2
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        summarised: S              -> asking 3; summary to 1: S; ask 3
        answer: c                  -> waiting; assistant [c]; open c; invoke c
        returned c: 3              -> asking 4; settle c Returned; c: 3; ask 4
        summarised: S              -> asking 5; summary to 5: S; ask 5
        ",
    );
}

#[test]
fn a_summary_lists_open_calls_subscriptions_and_children() {
    let lines = ["said go", "answer: s", "subscribed s: ok", "answer: a k=spawn(dig)", "said and?"];
    check_each_from(
        &lines,
        "
        summarised: S              -> asking 4; summary to 3: S Calls that are still running; their results will follow: - a (look) Active subscriptions, which cancel_subscription ends: - s (look) Threads that this one started, which send_message_to_child reaches: - t1; ask 4
        ",
    );
}

#[test]
fn summaries_do_not_count_as_turns_without_external_input() {
    let lines = ["said go", "answer: a=refuse", "answer: b=refuse", "summarised: S", "failed", "resume"];
    check_each_from(
        &lines,
        "
        answer: c=refuse           -> asking 6; assistant [c]; c: Error: no such tool; ask 6
        ",
    );
    check(
        "
        said go                    -> asking 1; user go; ask 1
        answer: a=refuse           -> asking 2; assistant [a]; a: Error: no such tool; ask 2
        summarised: S              -> asking 3; summary to 1: S; ask 3
        answer: b=refuse           -> asking 4; assistant [b]; b: Error: no such tool; ask 4
        summarised: S              -> asking 5; summary to 4: S; ask 5
        answer: c=refuse           -> paused; assistant [c]; c: Error: no such tool; notice paused: 3 turns in a row without new ext…
        ",
    );
}

#[test]
fn input_that_comes_while_a_summary_is_made_is_not_lost() {
    let lines = ["said go", "answer: s", "subscribed s: ok", "answer done:", "said more"];
    check_each_from(&lines, "said again -> asking 4; user again; abandon 3; ask 4");
    let mut lines = lines.to_vec();
    lines.extend(["event s: ding", "summarised: S"]);
    check_each_from(&lines, "answer done: -> asking 5; assistant done; release 2 UntilBatchCloses; ask 5");
}

#[test]
fn an_event_child_can_summarise_everything_that_it_inherits() {
    check_event_child(
        "
        summarised: S              -> asking 2; summary to 4: S; ask 2
        summarised: S              -> ignored: Duplicate
        ",
    );
}

/// A summary that was written after the point at which a child was spawned is not inherited, even if it covers everything up
/// to that point. The child inherits the long history and must be able to summarise it.
#[test]
fn a_child_that_does_not_inherit_a_summary_can_make_one() {
    let mut thread = Thread::new(small_limits());
    for message in ["said hi", "answer: s", "subscribed s: ok", "answer done:"] {
        thread.take(message);
    }
    let mut child = thread.spawn("event s: ding, child");
    for message in ["summarised: S", "answer: z", "subscribed z: ok"] {
        child.take(message);
    }
    assert_eq!((child.head.settled_up_to(), child.head.summarised_up_to()), (4, 4));
    assert_eq!(child.spawn("event z: dong, child").head.summarisable_up_to(), Some(4));
}

#[test]
fn a_spawned_child_can_summarise_what_was_answered_before_it_was_spawned() {
    check_spawned_child(
        "
        summarised: S              -> asking 2; summary to 1: S; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        returned a: 1              -> asking 3; settle a Returned; a: 1; ask 3
        summarised: S              -> asking 4; summary to 4: S; ask 4
        ",
    );
}

#[test]
fn a_long_summary_is_truncated() {
    let mut thread = Thread::new(small_limits());
    for message in ["said go", "answer fine:", "said go"] {
        thread.take(message);
    }
    let shown = thread.take(&format!("summarised: {}", "ü".repeat(70_000)));
    let length = shown.chars().filter(|char| *char == 'ü').count();
    assert_eq!(length, 32 * 1024);
}

/// The pause after the next failure is the shortest one again.
#[test]
fn a_summary_ends_a_series_of_failures() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        answer fine:               -> idle; assistant fine
        said two                   -> asking 2; user two; ask 2
        failed                     -> failed until 30s; notice the model request failed: 503
        after 100s                 -> prepared
        due                        -> asking 3; ask 3
        summarised: S              -> asking 4; summary to 1: S; ask 4
        failed                     -> failed until 130s; notice the model request failed: 503
        ",
    );
}

/// The token count of the last prompt does not apply to the next one, which contains the summary.
#[test]
fn the_size_of_the_prompt_is_unknown_after_a_summary() {
    let mut thread = Thread::after(small_limits(), &["said one"]);
    let usage = Usage { input: 900, output: 1, ..Usage::default() };
    thread.step(Input::TurnEnded { turn: 1, answer: TurnAnswer { usage, ..TurnAnswer::default() } }).unwrap();
    thread.apply_all(&["said two"]);
    assert_eq!(thread.head.prompt_tokens(), 900);
    thread.apply_all(&["summarised: S"]);
    assert_eq!(thread.head.prompt_tokens(), 0);
}
