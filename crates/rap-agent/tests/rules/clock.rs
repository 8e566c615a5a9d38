//! The clock is set back: no pause becomes longer than its bound.

use crate::notation::{Thread, check, small_limits};

#[test]
fn a_failed_thread_retries_although_the_clock_was_set_back() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model could not be asked: 503
        clock back 3000s           -> prepared
        due                        -> ignored: NotDue
        clock back 600s            -> prepared
        due                        -> asking 2; ask 2
        failed                     -> failed until -3570s; notice the model could not be asked: 503
        after 100s                 -> prepared
        due                        -> asking 3; ask 3
        failed                     -> failed until -3400s; notice the model could not be asked: 503
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
        due                        -> asking 3; a: still running; the result will follow; release 2 UntilBatchCloses; ask 3
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
        timed out a                -> waiting; a at -400s
        timed out b                -> waiting; b at -450s
        timed out a                -> ignored: NotDue
        after 100s                 -> prepared
        timed out a                -> waiting; settle a TimedOut; a: Error: no result came within 100 seconds; it may still follow
        ",
    );
}
