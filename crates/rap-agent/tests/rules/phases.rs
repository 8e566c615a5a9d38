//! Effect of each input in each phase.

use rap_agent::{Limits, Status};

use crate::notation::{Thread, check_each_from, check_with, small_limits};

const IDLE: &[&str] = &["said hi", "answer hello:"];
/// A batch with two open calls and one result.
const WAITING: &[&str] = &["said hi", "answer: a b c", "returned a: 1"];
/// A turn is in progress. `r` is a background call, `s` a subscription.
const ASKING: &[&str] = &["said hi", "answer: s", "subscribed s: ok", "answer: r", "said more"];
const FAILED: &[&str] = &["said hi", "answer: r", "said more", "failed"];
const PAUSED: &[&str] =
    &["said hi", "answer: r", "said more", "answer: x=refuse", "answer: y=refuse", "answer: z=refuse"];
const CLOSED: &[&str] = &["said hi", "close"];

#[test]
fn an_idle_thread_handles_every_input() {
    check_each_from(
        IDLE,
        "
        said more                  -> asking 2; user more; ask 2
        said more, interrupt       -> asking 2; user more; ask 2
        said more, enqueue         -> asking 2; user more; ask 2
        said more, reject          -> asking 2; user more; ask 2
        answer late:               -> ignored: StaleTurn
        answer of 1 late:          -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        unused answer              -> idle
        returned a: 1              -> ignored: UnknownCall
        call failed a              -> ignored: SettledCall
        timed out a                -> ignored: SettledCall
        event a: x                 -> ignored: UnknownCall
        sign in a                  -> ignored: SettledCall
        choice a 1                 -> ignored: SettledCall
        view a                     -> ignored: SettledCall
        chose a 0                  -> ignored: NoQuestion
        interrupt                  -> ignored: NothingToInterrupt
        cancel a                   -> ignored: SettledCall
        resume                     -> ignored: NothingToResume
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; notice the thread was closed; notify close
        ",
    );
}

/// Proves: LC-19
#[test]
fn an_asking_thread_handles_every_input() {
    check_each_from(
        ASKING,
        "
        said again                 -> asking 4; user again; abandon 3; ask 4
        said again, interrupt      -> asking 4; notice call r of look was interrupted; settle r Interrupted; user again; abandon 3; notify cancel r; ask 4
        said again, enqueue        -> asking 3; queue user again
        said again, reject         -> ignored: Busy
        answer done:               -> idle; assistant done
        answer: d e                -> waiting; assistant [d e]; open d; open e; invoke d; invoke e
        answer: d=refuse           -> asking 4; assistant [d]; d: Error: no such tool; ask 4
        answer: d=cancel(s)        -> asking 4; assistant [d]; settle s Ended; d: subscription s was cancelled; notify cancel s; ask 4
        answer of 3 late:          -> idle; assistant late
        failed                     -> failed until 30s; notice the model request failed: 503
        failed permanently         -> failed; notice the model request failed: 503
        unused answer              -> asking 3
        returned r: 1              -> asking 3; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1
        subscribed r: ok           -> asking 3; settle r Subscribed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: ok
        returned s: 1              -> ignored: Duplicate
        returned nobody: 1         -> ignored: UnknownCall
        call failed r              -> asking 3; settle r Failed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: Error: refused
        timed out r                -> ignored: NotDue
        event s: x                 -> asking 3; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        event s: x, id e1          -> asking 3; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; mark 1 e1
        event s: x, child          -> asking 3; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: x, runtime you are a thread of your own, made for t…)
        event s: x, final          -> asking 3; hold assistant [rap_1 interrupt:s (subscription has ended)]; hold rap_1: x; settle s Ended
        event r: x                 -> ignored: NotYetSubscribed
        event nobody: x            -> ignored: UnknownCall
        sign in r                  -> asking 3; r wants sign-in #1
        choice r 1                 -> asking 3; r wants choice #1
        view r                     -> asking 3; view progress
        view s                     -> asking 3; view progress
        view nobody                -> ignored: SettledCall
        chose r 0                  -> ignored: NoQuestion
        interrupt                  -> idle; notice call r of look was interrupted; settle r Interrupted; abandon 3; notify cancel r
        cancel r                   -> asking 3; notice call r of look was cancelled; settle r Interrupted; notify cancel r
        cancel s                   -> asking 3; settle s Ended; notice subscription s was cancelled; notify cancel s
        cancel nobody              -> ignored: SettledCall
        resume                     -> ignored: NothingToResume
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; settle r Interrupted; settle s Ended; notice the thread was closed; abandon 3; notify close; notify cancel r
        ",
    );
}

/// Proves: LC-19
#[test]
fn a_waiting_thread_handles_every_input() {
    check_each_from(
        WAITING,
        "
        said more                  -> asking 2; b: still running; the result will follow; c: still running; the result will follow; user more; ask 2
        said more, interrupt       -> asking 2; b: interrupted; settle b Interrupted; c: interrupted; settle c Interrupted; user more; notify cancel b; notify cancel c; ask 2
        said more, enqueue         -> waiting; queue user more
        said more, reject          -> ignored: Busy
        answer late:               -> ignored: StaleTurn
        answer of 1 late:          -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        unused answer              -> waiting
        returned a: 2              -> ignored: Duplicate
        returned b: 2              -> waiting; settle b Returned; b: 2
        subscribed b: ok           -> waiting; settle b Subscribed; b: ok
        call failed b              -> waiting; settle b Failed; b: Error: refused
        timed out b                -> ignored: NotDue
        event a: x                 -> ignored: EndedSubscription
        event b: x                 -> ignored: NotYetSubscribed
        sign in b                  -> waiting; b wants sign-in #1
        choice b 1                 -> waiting; b wants choice #1
        view b                     -> waiting; view progress
        chose b 0                  -> ignored: NoQuestion
        interrupt                  -> idle; b: interrupted; settle b Interrupted; c: interrupted; settle c Interrupted; notify cancel b; notify cancel c
        cancel b                   -> waiting; b: interrupted; settle b Interrupted; notify cancel b
        cancel a                   -> ignored: SettledCall
        resume                     -> ignored: NothingToResume
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; b: interrupted; settle b Interrupted; c: interrupted; settle c Interrupted; notice the thread was closed; notify close; notify cancel b; notify cancel c
        ",
    );
}

/// Proves: LC-22
#[test]
fn a_failed_thread_handles_every_input() {
    check_each_from(
        FAILED,
        "
        said again                 -> asking 3; user again; ask 3
        said again, interrupt      -> asking 3; user again; ask 3
        said again, enqueue        -> asking 3; user again; ask 3
        said again, reject         -> asking 3; user again; ask 3
        answer late:               -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        unused answer              -> failed until 30s
        returned r: 1              -> failed until 30s; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1
        call failed r              -> failed until 30s; settle r Failed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: Error: refused
        timed out r                -> ignored: NotDue
        event r: x                 -> ignored: NotYetSubscribed
        sign in r                  -> failed until 30s; r wants sign-in #1
        choice r 1                 -> failed until 30s; r wants choice #1
        view r                     -> failed until 30s; view progress
        chose r 0                  -> ignored: NoQuestion
        interrupt                  -> idle; notice call r of look was interrupted; settle r Interrupted; notify cancel r
        cancel r                   -> failed until 30s; notice call r of look was cancelled; settle r Interrupted; notify cancel r
        resume                     -> asking 3; ask 3
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; settle r Interrupted; notice the thread was closed; notify close; notify cancel r
        ",
    );
}

#[test]
fn a_paused_thread_handles_every_input() {
    check_each_from(
        PAUSED,
        "
        said again                 -> paused; hold user again
        said again, interrupt      -> paused; hold user again
        said again, enqueue        -> paused; queue user again
        said again, reject         -> ignored: Busy
        answer late:               -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        unused answer              -> paused
        returned r: 1              -> paused; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1
        call failed r              -> paused; settle r Failed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: Error: refused
        timed out r                -> ignored: NotDue
        event r: x                 -> ignored: NotYetSubscribed
        sign in r                  -> paused; r wants sign-in #1
        choice r 1                 -> paused; r wants choice #1
        view r                     -> paused; view progress
        chose r 0                  -> ignored: NoQuestion
        interrupt                  -> idle; notice call r of look was interrupted; settle r Interrupted; notify cancel r
        cancel r                   -> paused; notice call r of look was cancelled; settle r Interrupted; notify cancel r
        resume                     -> asking 5; ask 5
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; settle r Interrupted; notice the thread was closed; notify close; notify cancel r
        ",
    );
}

#[test]
fn a_closed_thread_ignores_all_input() {
    check_each_from(
        CLOSED,
        "
        said again                 -> ignored: Closed
        said again, interrupt      -> ignored: Closed
        said again, enqueue        -> ignored: Closed
        said again, reject         -> ignored: Closed
        answer late:               -> ignored: Closed
        failed                     -> ignored: Closed
        unused answer              -> ignored: Closed
        returned r: 1              -> ignored: Closed
        call failed r              -> ignored: Closed
        timed out r                -> ignored: Closed
        event r: x                 -> ignored: Closed
        sign in r                  -> ignored: Closed
        choice r 1                 -> ignored: Closed
        view r                     -> ignored: Closed
        chose r 0                  -> ignored: Closed
        interrupt                  -> ignored: Closed
        cancel r                   -> ignored: Closed
        resume                     -> ignored: Closed
        due                        -> ignored: Closed
        child closed t1            -> ignored: Closed
        close                      -> ignored: Closed
        ",
    );
}

#[test]
fn limits_of_zero_refuse_input() {
    let none = Limits {
        subscriptions: 0,
        open_calls: 0,
        held: 0,
        questions: 0,
        children: 0,
        turns_per_wake: 0,
        ..small_limits()
    };
    check_with(
        none,
        "
        said hi                    -> paused; user hi; notice paused: 0 turns in a row without new ext…
        said more                  -> ignored: Full(too much input is held)
        resume                     -> paused; notice paused: 0 turns in a row without new ext…
        interrupt                  -> idle
        close                      -> closed; notice the thread was closed; notify close
        ",
    );
}

#[test]
fn the_status_is_the_first_that_applies() {
    let status = |lines: &[&str]| {
        let mut thread = Thread::new(small_limits());
        for line in lines {
            let outcome = thread.take(line);
            assert!(!outcome.starts_with("ignored"), "{line} -> {outcome}");
        }
        thread.head.status()
    };
    assert_eq!(status(IDLE), Status::Idle);
    assert_eq!(status(ASKING), Status::Running);
    assert_eq!(status(WAITING), Status::Waiting);
    assert_eq!(status(FAILED), Status::Failed);
    assert_eq!(status(PAUSED), Status::NeedsYou);
    assert_eq!(status(CLOSED), Status::Closed);
    assert_eq!(status(&["said hi", "answer: a", "choice a 1"]), Status::NeedsYou);
    assert_eq!(status(&["said hi", "answer: a", "choice a 1", "chose a 0"]), Status::Waiting);
    assert_eq!(status(&["said hi", "answer: a", "sign in a"]), Status::NeedsYou);
}
