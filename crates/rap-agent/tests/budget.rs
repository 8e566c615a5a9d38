//! What a step spends of its session's budget, and who goes on when it is lifted. A line is `message -> turns, tokens,
//! wakes`, and behind a `+` the same for each child.

#[allow(dead_code, reason = "each test program uses another part of this")]
mod notation;

use notation::{Thread, check_spending, narrow};
use rap_agent::Resumes;

#[test]
fn a_question_is_a_turn_and_the_first_about_something_new_is_a_wake() {
    check_spending(
        "
        said hi                    -> 1, 0, 1
        answer: a b                -> 0, 0, 0
        returned a: 1              -> 0, 0, 0
        returned a: 1              -> 0, 0, 0
        returned b: 2              -> 1, 0, 0
        said and?                  -> 1, 0, 1
        answer done:               -> 0, 0, 0
        said hi                    -> 1, 0, 1
        said wait, enqueue         -> 0, 0, 0
        answer done:               -> 1, 0, 1
        interrupt                  -> 0, 0, 0
        ",
    );
}

#[test]
fn a_question_that_is_asked_again_is_no_wake() {
    check_spending(
        "
        said hi                    -> 1, 0, 1
        failed                     -> 0, 0, 0
        after 30s                  -> time passes
        due                        -> 1, 0, 0
        answer: s                  -> 0, 0, 0
        subscribed s: ok           -> 1, 0, 0
        answer done:               -> 0, 0, 0
        said more                  -> 1, 0, 1
        summarised: S              -> 1, 4, 0
        failed                     -> 0, 0, 0
        event s: ding              -> 0, 0, 0
        after 3600s                -> time passes
        due                        -> 1, 0, 1
        failed for good            -> 0, 0, 0
        resume                     -> 1, 0, 1
        over budget                -> 0, 0, 0
        said more                  -> 0, 0, 0
        resume                     -> 1, 0, 1
        ",
    );
}

#[test]
fn tokens_count_also_where_nobody_waits_for_the_answer_any_more() {
    check_spending(
        "
        said hi                    -> 1, 0, 1
        said hi                    -> 1, 0, 1
        spent                      -> 0, 4, 0
        ",
    );
}

#[test]
fn a_child_spends_its_first_question_with_its_birth() {
    check_spending(
        "
        said hi                    -> 1, 0, 1
        answer: s p=spawn(dig)     -> 0, 0, 0 + 1, 0, 1
        subscribed s: ok           -> 1, 0, 0
        event s: ding, child       -> 0, 0, 0 + 1, 0, 1
        event s: dong, child       -> 0, 0, 0
        child closed t2            -> 0, 0, 0 + 1, 0, 1
        report t1 p: gold          -> 0, 0, 0
        answer done:               -> 1, 0, 1
        ",
    );
}

#[test]
fn time_that_passes_wakes() {
    check_spending(
        "
        said hi                    -> 1, 0, 1
        answer: a=sleep(60)        -> 0, 0, 0
        after 60s                  -> time passes
        timed out a                -> 1, 0, 1
        ",
    );
}

#[test]
fn who_is_paused_goes_on_with_the_session_and_nobody_else_does() {
    let table: [(&[&str], Resumes); 6] = [
        (&[], Resumes::Alone),
        (&["said hi"], Resumes::Alone),
        (&["said hi", "failed for good"], Resumes::Alone),
        (&["said hi", "answer: a=approve"], Resumes::Alone),
        (&["said hi", "over budget"], Resumes::WithSession),
        (&["said hi", "over budget", "close"], Resumes::Alone),
    ];
    for (way, expected) in table {
        let mut thread = Thread::new(narrow());
        for message in way {
            thread.take(message);
        }
        assert_eq!(thread.head.resumes(), expected, "{way:?}");
    }
}
