//! Calls that the user has to allow.

use crate::notation::{check, check_each_from};

/// Two calls wait for approval, one is sent.
const WAITING: &[&str] = &["said hi", "answer: a=approve b=approve c"];

#[test]
fn every_input_is_handled_while_a_call_waits_for_approval() {
    check_each_from(
        WAITING,
        "
        chose a 0                  -> waiting; approve a; drop questions of a; invoke a
        chose a 1                  -> waiting; drop questions of a; settle a Interrupted; a: refused: the user did not allow this call; nothing was done
        chose a 2                  -> ignored: NoSuchChoice(2)
        dismissed a                -> waiting; drop questions of a; settle a Interrupted; a: refused: the user did not allow this call; nothing was done
        chose c 0                  -> ignored: NoQuestion
        timed out a                -> ignored: NotDue
        cancel a                   -> waiting; a: interrupted; drop questions of a; settle a Interrupted
        said more                  -> asking 2; a: not started: the call waits until the user allows it; the result will follow; b: not started: the call waits until the user allows it; the result will follow; c: still running; the result will follow; user more; ask 2
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
fn an_approved_call_is_sent_and_times_out_like_any_other() {
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
fn a_call_that_nobody_allows_expires() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve          -> waiting; assistant [a]; open a; a wants approval #1
        after 86400s               -> prepared
        timed out a                -> asking 2; drop questions of a; settle a Interrupted; a: not approved: nobody answered within 24 hours; the call was not sent; ask 2
        chose a 0                  -> ignored: NoQuestion
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_refused_background_call_enters_as_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve b=approve -> waiting; assistant [a b]; open a; a wants approval #1; open b; b wants approval #2
        said more                  -> asking 2; a: not started: the call waits until the user allows it; the result will follow; b: not started: the call waits until the user allows it; the result will follow; user more; ask 2
        answer ok:                 -> idle; assistant ok
        chose a 1                  -> asking 3; drop questions of a; settle a Interrupted; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: refused: the user did not allow this call; nothing was done; ask 3
        chose b 0                  -> asking 3; approve b; drop questions of b; invoke b
        returned b: 2              -> asking 3; settle b Returned; hold assistant [rap_2 interrupt:b (result of a call that was still running)]; hold rap_2: 2
        ",
    );
}

#[test]
fn approvals_beyond_the_limit_of_questions_get_an_error() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=approve b=approve c=approve -> waiting; assistant [a b c]; open a; a wants approval #1; open b; b wants approval #2; c: Error: 2 questions wait for the user, the most there may be; call again when some are answered
        ",
    );
}
