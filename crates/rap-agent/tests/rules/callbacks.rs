//! Refused callbacks, views after a result, lost subscriptions.

use std::time::Duration;

use rap_agent::Limits;

use crate::notation::{Thread, check, check_with, small_limits};

/// Returns limits with this call timeout.
fn timeout(seconds: Option<u64>) -> Limits {
    Limits { call_timeout: seconds.map(Duration::from_secs), ..small_limits() }
}

#[test]
fn a_call_whose_callback_was_refused_is_settled_after_five_minutes() {
    check_with(
        timeout(None),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        after 10s                  -> prepared
        refused a: 413: too large  -> waiting; a at 310s
        refused a: 413: too large  -> ignored: Duplicate
        after 299s                 -> prepared
        timed out a                -> ignored: NotDue
        refused a: 400: no object  -> waiting; a at 310s
        after 1s                   -> prepared
        timed out a                -> waiting; settle a Failed; a: Error: the tool's result was refused (400: no object)
        refused a: 413: too large  -> ignored: SettledCall
        timed out a                -> ignored: SettledCall
        returned b: 2              -> asking 2; settle b Returned; b: 2; ask 2
        answer done:               -> idle; assistant done
        returned a: after all      -> asking 3; settle a Returned; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: after all; ask 3
        ",
    );
}

#[test]
fn the_head_shows_the_problem_of_a_call() {
    let mut thread = Thread::after(timeout(None), &["said hi", "answer: a"]);
    let why = |thread: &Thread| {
        let problem = thread.head.batch()[0].problem.clone();
        problem.map(|problem| problem.why)
    };
    assert_eq!(why(&thread), None);
    thread.apply_all(&["refused a: 413: too large"]);
    assert_eq!(why(&thread).as_deref(), Some("413: too large"));
    thread.apply_all(&["view a"]);
    assert_eq!(why(&thread), None);
}

#[test]
fn any_valid_callback_clears_the_problem() {
    for (valid, shown) in [
        ("view a", "waiting; a never; view progress"),
        ("sign in a", "waiting; a never; a wants sign-in #1"),
        ("choice a 1", "waiting; a never; a wants choice #1"),
    ] {
        let mut thread = Thread::after(timeout(None), &["said hi", "answer: a", "refused a: 413: too large"]);
        assert_eq!(thread.take(valid), shown);
        thread.apply_all(&["after 300s"]);
        assert_eq!(thread.take("timed out a"), "ignored: NotDue", "{valid}");
        // The next refused callback starts a new grace period.
        assert_eq!(thread.take("refused a: 413: too large"), "waiting; a at 600s", "{valid}");
    }
    let mut thread = Thread::after(timeout(None), &["said hi", "answer: a b", "refused a: 413: too large"]);
    thread.check(
        "
        returned a: 1              -> waiting; settle a Returned; a: 1
        after 300s                 -> prepared
        timed out a                -> ignored: SettledCall
        ",
    );
}

#[test]
fn a_refused_callback_does_not_change_the_time_out_of_its_call() {
    let mut thread = Thread::after(timeout(Some(400)), &["said hi", "answer: a"]);
    thread.check(
        "
        refused a: 413: too large  -> waiting; a at 300s
        view a                     -> waiting; a at 400s; view progress
        after 200s                 -> prepared
        refused a: 413: too large  -> waiting; a at 400s
        after 200s                 -> prepared
        timed out a                -> asking 2; settle a TimedOut; a: Error: no result came within 400 seconds; it may still follow; ask 2
        ",
    );
}

/// Even if the timer fires late, after both times.
#[test]
fn the_earlier_of_time_out_and_grace_period_decides() {
    for (call_timeout, state) in [(299, "TimedOut"), (301, "Failed")] {
        let lines = ["said hi", "answer: a", "refused a: 413: too large", "after 5000s"];
        let mut thread = Thread::after(timeout(Some(call_timeout)), &lines);
        let outcome = thread.take("timed out a");
        assert!(outcome.contains(&format!("settle a {state};")), "{call_timeout}: {outcome}");
    }
}

#[test]
fn the_problem_of_a_background_call_enters_as_a_synthetic_call() {
    check_with(
        timeout(None),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        refused a: 413: too large  -> waiting; a at 300s
        said more                  -> asking 2; a: still running; the result will follow; user more; ask 2
        answer done:               -> idle; assistant done
        after 300s                 -> prepared
        timed out a                -> asking 3; settle a Failed; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: Error: the tool's result was refused (413: too large); ask 3
        ",
    );
}

#[test]
fn only_a_call_that_was_sent_and_is_open_has_a_problem() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b=approve c=sleep(50) -> waiting; assistant [a b c]; open a; open b; b wants approval #1; open c; invoke a
        refused b: 400             -> ignored: SettledCall
        refused c: 400             -> ignored: SettledCall
        refused nobody: 400        -> ignored: SettledCall
        subscribed a: ok           -> waiting; settle a Subscribed; a: ok
        refused a: 400             -> ignored: SettledCall
        ",
    );
}

#[test]
fn a_view_is_kept_for_a_call_that_has_returned_but_not_for_one_that_was_settled_otherwise() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b s              -> waiting; assistant [a b s]; open a; open b; open s; invoke a; invoke b; invoke s
        returned a: 1              -> waiting; settle a Returned; a: 1
        view a                     -> waiting; view progress
        cancel b                   -> waiting; b: interrupted; settle b Interrupted; notify cancel b
        view b                     -> ignored: SettledCall
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        view s                     -> asking 2; view progress
        event s: bye, final        -> asking 2; hold assistant [rap_1 interrupt:s (subscription has ended)]; hold rap_1: bye; settle s Ended
        view s                     -> ignored: SettledCall
        answer: f t x=refuse       -> waiting; assistant [f t x]; open f; open t; x: Error: no such tool; invoke f; invoke t
        call failed f              -> waiting; settle f Failed; f: Error: refused
        view f                     -> ignored: SettledCall
        view x                     -> ignored: SettledCall
        after 100s                 -> prepared
        timed out t                -> asking 3; settle t TimedOut; t: Error: no result came within 100 seconds; it may still follow; release 2 UntilBatchCloses; ask 3
        view t                     -> ignored: SettledCall
        returned t: late           -> asking 3; settle t Returned; hold assistant [rap_2 interrupt:t (result of a call that was still running)]; hold rap_2: late
        view t                     -> asking 3; view progress
        answer: d                  -> waiting; assistant [d]; open d; invoke d
        interrupt                  -> idle; d: interrupted; settle d Interrupted; release 2 UntilBatchCloses; notify cancel d
        view d                     -> ignored: SettledCall
        said go on                 -> asking 4; user go on; ask 4
        answer: h=schedule(900)    -> asking 5; assistant [h]; open h; settle h Subscribed; h at 900s; h: scheduled; ask 5
        view h                     -> ignored: SettledCall
        ",
    );
}

#[test]
fn a_lost_subscription_ends_with_a_last_event() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        lost s                     -> ignored: EndedSubscription
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        lost s                     -> asking 3; assistant [rap_3 interrupt:s (subscription has ended)]; rap_3: Error: the tool server does not know this subscription any more; it was lost, and no further events will come; settle s Ended; ask 3
        lost s                     -> ignored: EndedSubscription
        event s: late              -> ignored: EndedSubscription
        child closed t1            -> asking 3; spawn t2 at 4 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        ",
    );
}

#[test]
fn a_lost_subscription_is_kept_while_held_input_is_full() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: 1                 -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: 1
        event s: 2                 -> asking 2; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: 2
        lost s                     -> ignored: Full(too much input is held)
        answer done:               -> asking 3; assistant done; release 4 UntilBatchCloses; ask 3
        lost s                     -> asking 3; hold assistant [rap_3 interrupt:s (subscription has ended)]; hold rap_3: Error: the tool server does not know this subscription any more; it was lost, and no further events will come; settle s Ended
        ",
    );
}

#[test]
fn a_repeated_choice_clears_the_problem_of_its_call() {
    let mut thread = Thread::after(small_limits(), &["said hi", "answer: a", "choice a 1", "refused a: 400"]);
    assert!(thread.head.batch()[0].problem.is_some());
    thread.apply_all(&["choice a 1"]);
    assert!(thread.head.batch()[0].problem.is_none());
    assert_eq!(thread.take("choice a 1"), "ignored: Duplicate");
}
