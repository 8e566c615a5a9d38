//! Calls that a person has to allow, as tables in the notation of the rules.

use crate::notation::{check, from};

/// Two calls wait to be allowed, one goes on.
const ASKED: &[&str] = &["said hi", "answer: a=approve b=approve c"];

#[test]
fn what_becomes_of_a_call_that_waits_to_be_allowed() {
    from(
        ASKED,
        "
        chose a 0                  -> waiting; approve a; drop questions of a; invoke a
        chose a 1                  -> waiting; drop questions of a; settle a Interrupted; a: refused: the user did not allow this call; nothing was done
        chose a 2                  -> ignored: NoSuchChoice(2)
        dismissed a                -> waiting; drop questions of a; settle a Interrupted; a: refused: the user did not allow this call; nothing was done
        chose c 0                  -> ignored: NoQuestion
        timed out a                -> ignored: NotDue
        cancel a                   -> waiting; a: interrupted; drop questions of a; settle a Interrupted
        said more                  -> asking 2; a: still running; the result will follow; b: still running; the result will follow; c: still running; the result will follow; user more; ask 2
        said more, interrupt       -> asking 2; a: interrupted; drop questions of a; settle a Interrupted; b: interrupted; drop questions of b; settle b Interrupted; c: interrupted; settle c Interrupted; user more; notify cancel c; ask 2
        interrupt                  -> idle; a: interrupted; drop questions of a; settle a Interrupted; b: interrupted; drop questions of b; settle b Interrupted; c: interrupted; settle c Interrupted; notify cancel c
        close                      -> closed; a: interrupted; drop questions of a; settle a Interrupted; b: interrupted; drop questions of b; settle b Interrupted; c: interrupted; settle c Interrupted; notice the thread was closed; notify close; notify cancel c
        returned a: forged         -> ignored: UnknownCall
        sign in a                  -> ignored: SettledCall
        choice a 1                 -> ignored: SettledCall
        view a                     -> ignored: SettledCall
        ",
    );
}

#[test]
fn a_call_that_was_allowed_is_sent_and_times_out_like_any_other() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve          -> waiting; assistant [a]; open a; a wants approval #1
        after 5000s                -> prepared
        timed out a                -> ignored: NotDue
        chose a 0                  -> waiting; approve a; drop questions of a; invoke a
        chose a 0                  -> ignored: NoQuestion
        timed out a                -> ignored: NotDue
        after 100s                 -> prepared
        timed out a                -> asking 2; settle a TimedOut; a: Error: no result came within 100 seconds; it may still follow; ask 2
        ",
    );
}

#[test]
fn a_call_that_nobody_allows_lapses() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve          -> waiting; assistant [a]; open a; a wants approval #1
        after 86400s               -> prepared
        timed out a                -> asking 2; drop questions of a; settle a Interrupted; a: lapsed: nobody allowed this call within 24 hours; nothing was done; ask 2
        chose a 0                  -> ignored: NoQuestion
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_refusal_behind_a_placeholder_is_told_as_a_late_result() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve b=approve -> waiting; assistant [a b]; open a; a wants approval #1; open b; b wants approval #2
        said more                  -> asking 2; a: still running; the result will follow; b: still running; the result will follow; user more; ask 2
        answer ok:                 -> idle; assistant ok
        chose a 1                  -> asking 3; drop questions of a; settle a Interrupted; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: refused: the user did not allow this call; nothing was done; ask 3
        chose b 0                  -> asking 3; approve b; drop questions of b; invoke b
        returned b: 2              -> asking 3; settle b Returned; hold assistant [rap_2 interrupt:b (result of a call that was still running)]; hold rap_2: 2
        ",
    );
}

#[test]
fn only_so_many_questions_wait_for_a_person() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve b=approve c=approve -> waiting; assistant [a b c]; open a; a wants approval #1; open b; b wants approval #2; c: Error: 2 questions wait for the user, the most there may be; call again when some are answered
        ",
    );
}
