//! Closing: what is settled, and the order of the notifications.

use rap_agent::Limits;

use crate::notation::{Thread, check, small_limits};

/// Proves: SE-20
#[test]
fn closing_settles_everything_and_cancels_no_subscription() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: r                  -> waiting; assistant [r]; open r; invoke r
        said more                  -> asking 3; r: still running; the result will follow; user more; ask 3
        event s: ding, child       -> asking 3; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: ding, runtime you are a thread of your own, made for t…)
        event s: held              -> asking 3; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: held
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said later, enqueue        -> waiting; queue user later
        close                      -> closed; a: interrupted; settle a Interrupted; settle r Interrupted; settle s Ended; release 2 UntilBatchCloses; release 1 UntilIdle; notice the thread was closed; send to t1: close; notify close; notify cancel a; notify cancel r; deliver
        close                      -> ignored: Closed
        event s: late              -> ignored: Closed
        returned a: late           -> ignored: Closed
        ",
    );
}

/// A thread with everything that can be open: sent calls in the batch and in the background, a call that waits for approval,
/// a sleep, a subscription and a schedule.
const EVERYTHING: &[&str] = &[
    "said hi",
    "answer: s t=schedule(60) r",
    "subscribed s: ok",
    "said more",
    "answer: a u=approve",
    "said and more",
    "answer: b w=sleep(50)",
];

/// Proves: SE-20
#[test]
fn closing_is_notified_first_and_then_each_sent_call_is_cancelled() {
    let limits = Limits { open_calls: 10, ..small_limits() };
    Thread::after(limits, EVERYTHING).check(
        "
        close                      -> closed; b: interrupted; settle b Interrupted; w: interrupted; settle w Interrupted; settle r Interrupted; settle a Interrupted; drop questions of u; settle u Interrupted; settle t Ended; settle s Ended; notice the thread was closed; notify close; notify cancel b; notify cancel r; notify cancel a
        ",
    );
}

#[test]
fn a_thread_is_closed_in_the_same_way_whoever_closes_it() {
    let limits = Limits { open_calls: 10, ..small_limits() };
    let notified = |line: &str| {
        let mut thread = Thread::after(limits.clone(), EVERYTHING);
        let mut shown = thread.take(line);
        if line.starts_with("said") {
            shown = thread.take("answer: x=close");
        }
        let (_, notified) = shown.split_once("notify close; ").unwrap();
        let mut calls: Vec<&str> = notified.split("; ").collect();
        calls.sort_unstable();
        calls.join("; ")
    };
    for line in ["close", "parent closed", "said stop"] {
        assert_eq!(notified(line), "notify cancel a; notify cancel b; notify cancel r", "{line}");
    }
}

/// Proves: SE-28
#[test]
fn calls_in_the_same_answer_as_close_thread_are_neither_executed_nor_cancelled() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: r                  -> waiting; assistant [r]; open r; invoke r
        said more                  -> asking 2; r: still running; the result will follow; user more; ask 2
        answer: a u=approve x=refuse c=close b v=approve w=wait -> closed; assistant [a u x c b v w]; a: not called: the thread was closed; u: not called: the thread was closed; x: Error: no such tool; c: the thread is closed; b: not called: the thread was closed; v: not called: the thread was closed; w: not called: the thread was closed; settle r Interrupted; notice the thread was closed; notify close; notify cancel r
        ",
    );
}
