//! The clock is set back: no pause becomes longer than its bound.

use rap_agent::Limits;

use crate::notation::{Thread, check, check_with, small_limits};

#[test]
fn a_failed_thread_retries_although_the_clock_was_set_back() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        clock back 3000s           -> prepared
        due                        -> ignored: NotDue
        clock back 600s            -> prepared
        due                        -> asking 2; ask 2
        failed                     -> failed until -3570s; notice the model request failed: 503
        after 100s                 -> prepared
        due                        -> asking 3; ask 3
        failed                     -> failed until -3400s; notice the model request failed: 503
        ",
    );
}

#[test]
fn held_input_joins_although_the_clock_was_set_back() {
    let lines = ["said hi", "answer: s", "subscribed s: ok", "answer: a", "event s: ding"];
    let mut thread = Thread::after(small_limits(), &lines);
    thread.check(
        "
        due                        -> ignored: NotDue
        clock back 1s              -> prepared
        due                        -> asking 3; a: still running; the result will follow; release 2 UntilBatchCloses; a at 99s; ask 3
        ",
    );
}

/// A call that was made after the present time began before the clock was set back.
#[test]
fn a_timeout_or_a_sleep_starts_again_when_the_clock_was_set_back() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b=sleep(50)      -> waiting; assistant [a b]; open a; open b; invoke a
        timed out a                -> ignored: NotDue
        clock back 500s            -> prepared
        timed out a                -> waiting; a at -400s; b at -450s
        timed out b                -> ignored: NotDue
        after 100s                 -> prepared
        timed out a                -> waiting; settle a TimedOut; a: Error: no result came within 100 seconds; it may still follow
        ",
    );
}

/// Each step writes the due time again, also after the store has moved it.
#[test]
fn a_step_keeps_no_pause_that_the_clock_made_longer() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        clock back 86400s          -> prepared
        notice: hello              -> failed until -82800s; notice hello
        ",
    );
    let lines = ["said hi", "answer: s", "subscribed s: ok", "answer: a", "event s: ding", "clock back 500s"];
    let mut thread = Thread::after(small_limits(), &lines);
    let hold_max = thread.limits.hold_max;
    assert!(thread.take("event s: dong").contains("a at -400s"));
    assert_eq!(thread.head.due(&thread.limits), Some(thread.now.plus(hold_max)));
}

#[test]
fn the_grace_period_after_a_refused_callback_is_not_longer_when_the_clock_was_set_back() {
    check_with(
        Limits { call_timeout: None, ..small_limits() },
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        after 3000s                -> prepared
        refused a: 413             -> waiting; a at 3300s
        clock back 2000s           -> prepared
        timed out a                -> waiting; a at 1300s
        after 300s                 -> prepared
        timed out a                -> asking 2; settle a Failed; a: Error: the tool's result was refused (413); ask 2
        ",
    );
}

/// The clock is set back after the model's answer was read and before the step. The sleep begins with the step.
#[test]
fn a_sleep_takes_its_time_although_the_clock_was_set_back_during_the_answer() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        clock back 86400s          -> prepared
        answer: a=sleep_for(50)    -> waiting; assistant [a]; open a
        timed out a                -> ignored: NotDue
        after 50s                  -> prepared
        timed out a                -> asking 2; a: the sleep is over; settle a Returned; ask 2
        ",
    );
}
