//! The rules, as tables: what each message does to a thread in each phase, and the stories that make a rule. How a
//! line is read stands in [`notation`].

// Each test takes what it needs of this.
#[allow(dead_code)]
mod notation;

use notation::{Thread, check, check_child, check_with, from, narrow};
use rap_agent::{Arguments, CallEntry, Entry, Item, Limits, Speaker, Status, Thought, ThoughtKind, Thoughts};
use rap_protocol::{Body, Content, Image, Segment, Timestamp};
use serde_json::{Map, Value};

const IDLE: &[&str] = &["said hi", "answer hello:"];
/// Two calls are open, one result of the batch is there.
const WAITING: &[&str] = &["said hi", "answer: a b c", "returned a: 1"];
/// The model is asked; call `r` goes on behind a placeholder, `s` is a subscription.
const ASKING: &[&str] = &["said hi", "answer: s", "subscribed s: ok", "answer: r", "said more"];
const FAILED: &[&str] = &["said hi", "answer: r", "said more", "failed"];
const PAUSED: &[&str] =
    &["said hi", "answer: r", "said more", "answer: x=refuse", "answer: y=refuse", "answer: z=refuse"];
const CLOSED: &[&str] = &["said hi", "close"];

#[test]
fn what_an_idle_thread_does() {
    from(
        IDLE,
        "
        said more                  -> asking 2; user more; ask 2
        said more, interrupt       -> asking 2; user more; ask 2
        said more, enqueue         -> asking 2; user more; ask 2
        said more, reject          -> asking 2; user more; ask 2
        answer late:               -> ignored: StaleTurn
        answer of 1 late:          -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        spent                      -> idle
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
fn what_an_asking_thread_does() {
    from(
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
        failed                     -> failed until 30s; notice the model could not be asked: 503
        failed for good            -> failed; notice the model could not be asked: 503
        spent                      -> asking 3
        returned r: 1              -> asking 3; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1
        subscribed r: ok           -> asking 3; settle r Subscribed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: ok
        returned s: 1              -> ignored: Duplicate
        returned nobody: 1         -> ignored: UnknownCall
        call failed r              -> asking 3; settle r Failed; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: Error: refused
        timed out r                -> ignored: NotDue
        event s: x                 -> asking 3; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        event s: x, id e1          -> asking 3; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; mark e1
        event s: x, child          -> asking 3; born t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: x, runtime you are a thread of your own, made for t…)
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
        cancel s                   -> asking 3; notice subscription s was cancelled; settle s Ended; notify cancel s
        cancel nobody              -> ignored: SettledCall
        resume                     -> ignored: NothingToResume
        due                        -> ignored: NotDue
        child closed t1            -> ignored: Duplicate
        close                      -> closed; settle r Interrupted; settle s Ended; notice the thread was closed; abandon 3; notify close
        ",
    );
}

/// Proves: LC-19
#[test]
fn what_a_waiting_thread_does() {
    from(
        WAITING,
        "
        said more                  -> asking 2; b: still running; the result will follow; c: still running; the result will follow; user more; ask 2
        said more, interrupt       -> asking 2; b: interrupted; settle b Interrupted; c: interrupted; settle c Interrupted; user more; notify cancel b; notify cancel c; ask 2
        said more, enqueue         -> waiting; queue user more
        said more, reject          -> ignored: Busy
        answer late:               -> ignored: StaleTurn
        answer of 1 late:          -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        spent                      -> waiting
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
        close                      -> closed; b: interrupted; settle b Interrupted; c: interrupted; settle c Interrupted; notice the thread was closed; notify close
        ",
    );
}

/// Proves: LC-22
#[test]
fn what_a_failed_thread_does() {
    from(
        FAILED,
        "
        said again                 -> asking 3; user again; ask 3
        said again, interrupt      -> asking 3; user again; ask 3
        said again, enqueue        -> asking 3; user again; ask 3
        said again, reject         -> asking 3; user again; ask 3
        answer late:               -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        spent                      -> failed until 30s
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
        close                      -> closed; settle r Interrupted; notice the thread was closed; notify close
        ",
    );
}

#[test]
fn what_a_paused_thread_does() {
    from(
        PAUSED,
        "
        said again                 -> paused; hold user again
        said again, interrupt      -> paused; hold user again
        said again, enqueue        -> paused; queue user again
        said again, reject         -> ignored: Busy
        answer late:               -> ignored: StaleTurn
        failed                     -> ignored: StaleTurn
        spent                      -> paused
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
        close                      -> closed; settle r Interrupted; notice the thread was closed; notify close
        ",
    );
}

#[test]
fn a_closed_thread_takes_no_message() {
    from(
        CLOSED,
        "
        said again                 -> ignored: Closed
        said again, interrupt      -> ignored: Closed
        said again, enqueue        -> ignored: Closed
        said again, reject         -> ignored: Closed
        answer late:               -> ignored: Closed
        failed                     -> ignored: Closed
        spent                      -> ignored: Closed
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

/// Proves: LC-30
#[test]
fn a_batch_closes_with_its_last_result_and_a_repeat_changes_nothing() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer looking: a b        -> waiting; assistant looking[a b]; open a; open b; invoke a; invoke b
        returned b: 2              -> waiting; settle b Returned; b: 2
        returned b: 2              -> ignored: Duplicate
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        returned a: 1              -> ignored: Duplicate
        answer done:               -> idle; assistant done
        answer of 2 done:          -> ignored: StaleTurn
        ",
    );
}

/// Proves: SE-22, TR-22
#[test]
fn a_result_of_a_call_that_was_never_made_enters_nothing() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        returned a: 1              -> ignored: UnknownCall
        subscribed a: ok           -> ignored: UnknownCall
        event a: x                 -> ignored: UnknownCall
        cancel a                   -> ignored: SettledCall
        call failed a              -> ignored: SettledCall
        sign in a                  -> ignored: SettledCall
        view a                     -> ignored: SettledCall
        ",
    );
}

/// Proves: CN-14, CN-24
#[test]
fn a_late_result_of_an_interrupted_call_is_ignored() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        cancel a                   -> waiting; a: interrupted; settle a Interrupted; notify cancel a
        cancel a                   -> ignored: SettledCall
        returned a: late           -> ignored: SettledCall
        subscribed a: late         -> ignored: SettledCall
        interrupt                  -> idle; b: interrupted; settle b Interrupted; notify cancel b
        returned b: late           -> ignored: SettledCall
        said and now               -> asking 2; user and now; ask 2
        returned b: late           -> ignored: SettledCall
        ",
    );
}

/// Proves: LC-19
#[test]
fn a_user_joins_and_the_real_result_follows_as_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        returned a: 1              -> waiting; settle a Returned; a: 1
        said hurry                 -> asking 2; b: still running; the result will follow; user hurry; ask 2
        answer on it:              -> idle; assistant on it
        returned b: 2              -> asking 3; settle b Returned; assistant [rap_1 interrupt:b (result of a call that was still running)]; rap_1: 2; ask 3
        returned b: 2              -> ignored: Duplicate
        answer done:               -> idle; assistant done
        ",
    );
}

#[test]
fn a_result_behind_a_placeholder_waits_while_the_thread_is_busy() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said hurry                 -> asking 2; a: still running; the result will follow; user hurry; ask 2
        answer: b                  -> waiting; assistant [b]; open b; invoke b
        returned a: 1              -> waiting; settle a Returned; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: 1
        returned b: 2              -> asking 3; settle b Returned; b: 2; release 2 Held; ask 3
        ",
    );
}

#[test]
fn what_was_held_comes_before_what_is_said_later() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event s: ding              -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding
        said hurry                 -> asking 3; a: still running; the result will follow; release 2 Held; user hurry; ask 3
        ",
    );
}

#[test]
fn a_batch_closes_also_with_a_cancelled_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        returned a: 1              -> waiting; settle a Returned; a: 1
        cancel b                   -> asking 2; b: interrupted; settle b Interrupted; notify cancel b; ask 2
        ",
    );
}

#[test]
fn a_user_drops_two_answers_in_a_row_then_waits_and_does_not_wait_for_calls() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        said two                   -> asking 2; user two; abandon 1; ask 2
        said three                 -> asking 3; user three; abandon 2; ask 3
        said four                  -> asking 3; hold user four
        answer: a                  -> asking 4; assistant [a]; open a; a: still running; the result will follow; release 1 Held; invoke a; ask 4
        answer of 3: a             -> ignored: StaleTurn
        answer done:               -> idle; assistant done
        returned a: 1              -> asking 5; settle a Returned; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: 1; ask 5
        ",
    );
}

#[test]
fn an_answer_without_calls_lets_a_waiting_user_in() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        said two                   -> asking 2; user two; abandon 1; ask 2
        said three                 -> asking 3; user three; abandon 2; ask 3
        said four                  -> asking 3; hold user four
        answer done:               -> asking 4; assistant done; release 1 Held; ask 4
        answer all done:           -> idle; assistant all done
        ",
    );
}

#[test]
fn a_user_who_interrupts_ends_every_open_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said more                  -> asking 2; a: still running; the result will follow; user more; ask 2
        answer: b                  -> waiting; assistant [b]; open b; invoke b
        said stop, interrupt       -> asking 3; b: interrupted; settle b Interrupted; notice call a of look was interrupted; settle a Interrupted; user stop; notify cancel b; notify cancel a; ask 3
        returned a: late           -> ignored: SettledCall
        returned b: late           -> ignored: SettledCall
        ",
    );
}

#[test]
fn enqueued_words_wait_until_the_thread_would_be_idle() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        said later, enqueue        -> asking 1; queue user later
        said much later, enqueue   -> asking 1; queue user much later
        said too much, enqueue     -> ignored: Full(too much input is held)
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event a: x                 -> ignored: NotYetSubscribed
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer done:               -> asking 3; assistant done; release 2 Queued; ask 3
        answer done:               -> idle; assistant done
        ",
    );
}

#[test]
fn an_interrupt_lets_enqueued_words_in() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said later, enqueue        -> waiting; queue user later
        interrupt                  -> asking 2; a: interrupted; settle a Interrupted; release 1 Queued; notify cancel a; ask 2
        ",
    );
}

/// Proves: SE-06, SE-07, SE-08, SE-13, SE-22
#[test]
fn an_event_enters_by_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        event s: too early         -> ignored: NotYetSubscribed
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        subscribed s: ok           -> ignored: Duplicate
        answer done:               -> idle; assistant done
        event s: ding              -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: ding; ask 3
        answer heard:              -> idle; assistant heard
        returned s: second         -> ignored: Duplicate
        ",
    );
}

/// Proves: SE-03, SE-22
#[test]
fn a_final_event_ends_its_subscription() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: bye, final, id e1 -> asking 3; assistant [rap_1 interrupt:s (subscription has ended)]; rap_1: bye; settle s Ended; ask 3
        event s: bye, final, id e1 -> ignored: EndedSubscription
        event s: more              -> ignored: EndedSubscription
        cancel s                   -> ignored: SettledCall
        ",
    );
}

/// Proves: LC-30
#[test]
fn an_event_with_an_id_counts_once() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: ding, id e1       -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding; mark e1
        event s: ding, id e1       -> ignored: Duplicate
        event s: dong              -> asking 2; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: dong
        ",
    );
}

#[test]
fn held_events_do_not_stand_between_a_call_and_its_result() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event s: one               -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: one
        event s: two               -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        event s: three             -> ignored: Full(too much input is held)
        returned a: 1              -> asking 3; settle a Returned; a: 1; release 4 Held; ask 3
        answer done:               -> idle; assistant done
        event s: three             -> asking 4; assistant [rap_3 interrupt:s (subscription remains active)]; rap_3: three; ask 4
        ",
    );
}

#[test]
fn held_events_join_when_the_oldest_has_waited_long() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        due                        -> ignored: NotDue
        event s: one               -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: one
        after 59s                  -> time passes
        event s: two               -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        due                        -> ignored: NotDue
        after 1s                   -> time passes
        due                        -> asking 3; a: still running; the result will follow; release 4 Held; ask 3
        due                        -> ignored: NotDue
        returned a: 1              -> asking 3; settle a Returned; hold assistant [rap_3 interrupt:a (result of a call that was still running)]; hold rap_3: 1
        ",
    );
}

/// Proves: SE-09
#[test]
fn an_event_that_is_not_associative_makes_a_child_at_the_last_settled_point() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: early, child      -> asking 2; born t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: early, runtime you are a thread of your own, made for t…)
        child closed t1            -> asking 2
        answer done:               -> idle; assistant done
        event s: ding, child, id e1 -> idle; born t2 at 4 (asking 1, assistant [rap_2 interrupt:s (subscription remains active)], rap_2: ding, runtime you are a thread of your own, made for t…); mark e1
        event s: ding, child, id e1 -> ignored: Duplicate
        event s: dong, child       -> idle; shelve of s assistant [rap_3 interrupt:s (subscription remains active)]; shelve of s rap_3: dong
        child closed t2            -> idle; born t3 at 4 (asking 1, 2 from the shelf of s, runtime you are a thread of your own, made for t…)
        child closed t2            -> ignored: Duplicate
        event s: dong, child, final -> idle; shelve of s assistant [rap_4 interrupt:s (subscription has ended)]; shelve of s rap_4: dong; settle s Ended
        event s: dang, child       -> ignored: EndedSubscription
        close                      -> closed; discard what waits of s; notice of the events of s, 1 that waited for a …; notice the thread was closed; notify close; tell t3 Close
        ",
    );
}

#[test]
fn an_open_call_behind_a_placeholder_holds_the_settled_point_back() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        said more                  -> asking 3; user more; ask 3
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said hurry                 -> asking 4; a: still running; the result will follow; user hurry; ask 4
        answer done:               -> idle; assistant done
        event s: ding, child       -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: ding, runtime you are a thread of your own, made for t…)
        child closed t1            -> idle
        returned a: 1              -> asking 5; settle a Returned; assistant [rap_2 interrupt:a (result of a call that was still running)]; rap_2: 1; ask 5
        answer done:               -> idle; assistant done
        event s: ding, child       -> idle; born t2 at 12 (asking 1, assistant [rap_3 interrupt:s (subscription remains active)], rap_3: ding, runtime you are a thread of your own, made for t…)
        ",
    );
}

/// Proves: SE-15, SE-17, SE-18, SE-22
#[test]
fn cancel_subscription_runs_inside_the_step() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: x=cancel(t) y=cancel(s) z=cancel(s) -> asking 3; assistant [x y z]; x: Error: this thread has no active subscription `t`; active are: s; settle s Ended; y: subscription s was cancelled; z: Error: this thread has no active subscription `s`; it has none; notify cancel s; ask 3
        event s: late              -> ignored: EndedSubscription
        answer: b c=cancel(b)      -> waiting; assistant [b c]; open b; c: Error: this thread has no active subscription `b`; it has none; invoke b
        ",
    );
}

/// Proves: SE-22, SE-25
#[test]
fn a_subscription_beyond_the_limit_is_not_kept() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: r s t              -> waiting; assistant [r s t]; open r; open s; open t; invoke r; invoke s; invoke t
        subscribed r: ok           -> waiting; settle r Subscribed; r: ok
        subscribed s: ok           -> waiting; settle s Subscribed; s: ok
        subscribed t: ok           -> asking 2; settle t Returned; t: ok The subscription was not kept: this thread has 2, the most it may have. Cancel one with cancel_subscription and subscribe again.; notify cancel t; ask 2
        event t: x                 -> ignored: EndedSubscription
        cancel t                   -> ignored: SettledCall
        event r: x                 -> asking 2; hold assistant [rap_1 interrupt:r (subscription remains active)]; hold rap_1: x
        cancel r                   -> asking 2; notice subscription r was cancelled; settle r Ended; notify cancel r
        event r: x                 -> ignored: EndedSubscription
        ",
    );
}

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
        event s: ding, child       -> asking 3; born t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: ding, runtime you are a thread of your own, made for t…)
        event s: held              -> asking 3; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: held
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said later, enqueue        -> waiting; queue user later
        close                      -> closed; a: interrupted; settle a Interrupted; settle r Interrupted; settle s Ended; release 2 Held; release 1 Queued; notice the thread was closed; notify close; tell t1 Close
        close                      -> ignored: Closed
        event s: late              -> ignored: Closed
        returned a: late           -> ignored: Closed
        ",
    );
}

/// Proves: LC-15
#[test]
fn a_call_that_could_not_be_delivered_has_an_error_and_its_late_result_still_comes() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        call failed a              -> asking 2; settle a Failed; a: Error: refused; ask 2
        call failed a              -> ignored: SettledCall
        answer sorry:              -> idle; assistant sorry
        returned a: after all      -> asking 3; settle a Returned; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: after all; ask 3
        returned a: after all      -> ignored: Duplicate
        ",
    );
}

/// Proves: LC-28
#[test]
fn a_call_times_out_when_its_time_has_come() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        after 99s                  -> time passes
        timed out a                -> ignored: NotDue
        after 1s                   -> time passes
        timed out a                -> waiting; settle a TimedOut; a: Error: no result came within 100 seconds; it may still follow
        timed out a                -> ignored: SettledCall
        subscribed a: late         -> waiting; settle a Returned; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: late The subscription was not kept: its confirmation came after the call had ended. Subscribe again if needed.; notify cancel a
        returned b: 2              -> asking 2; settle b Returned; b: 2; release 2 Held; ask 2
        ",
    );
}

#[test]
fn a_call_behind_a_placeholder_fails_by_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        said hurry                 -> asking 2; a: still running; the result will follow; b: still running; the result will follow; user hurry; ask 2
        call failed a              -> asking 2; settle a Failed; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: Error: refused
        answer done:               -> asking 3; assistant done; release 2 Held; ask 3
        after 100s                 -> time passes
        timed out b                -> asking 3; settle b TimedOut; hold assistant [rap_2 interrupt:b (result of a call that was still running)]; hold rap_2: Error: no result came within 100 seconds; it may still follow
        returned b: late           -> asking 3; settle b Returned; hold assistant [rap_3 interrupt:b (result of a call that was still running)]; hold rap_3: late
        ",
    );
}

#[test]
fn a_late_result_finds_no_room_where_all_is_held() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        call failed a              -> waiting; settle a Failed; a: Error: refused
        event s: one               -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: one
        event s: two               -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        returned a: late           -> ignored: Full(too much input is held)
        ",
    );
}

/// Proves: LC-22
#[test]
fn a_model_that_fails_is_asked_again_and_the_words_stay() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model could not be asked: 503
        due                        -> ignored: NotDue
        after 30s                  -> time passes
        due                        -> asking 2; ask 2
        due                        -> ignored: NotDue
        failed                     -> failed until 60s; notice the model could not be asked: 503
        after 30s                  -> time passes
        due                        -> asking 3; ask 3
        after 60s                  -> time passes
        failed                     -> failed until 240s; notice the model could not be asked: 503
        after 4000s                -> time passes
        due                        -> asking 4; ask 4
        failed                     -> failed; notice the model could not be asked: 503
        due                        -> ignored: NotDue
        resume                     -> asking 5; ask 5
        failed                     -> failed until 4150s; notice the model could not be asked: 503
        ",
    );
}

/// A person's word begins the time anew for which a failed question is asked again.
#[test]
fn a_failing_thread_has_its_full_time_again_after_a_person_spoke() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed for good            -> failed; notice the model could not be asked: 503
        after 4000s                -> time passes
        said try again             -> asking 2; user try again; ask 2
        failed                     -> failed until 4030s; notice the model could not be asked: 503
        interrupt                  -> idle
        after 4000s                -> time passes
        said and now               -> asking 3; user and now; ask 3
        failed                     -> failed until 8030s; notice the model could not be asked: 503
        ",
    );
}

/// A model that can not be reached is not one that talks to itself.
#[test]
fn failed_questions_do_not_count_as_turns_alone() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model could not be asked: 503
        after 30s                  -> time passes
        due                        -> asking 2; ask 2
        failed                     -> failed until 60s; notice the model could not be asked: 503
        after 30s                  -> time passes
        due                        -> asking 3; ask 3
        failed                     -> failed until 120s; notice the model could not be asked: 503
        after 60s                  -> time passes
        due                        -> asking 4; ask 4
        failed                     -> failed until 240s; notice the model could not be asked: 503
        after 120s                 -> time passes
        due                        -> asking 5; ask 5
        answer: x=refuse           -> asking 6; assistant [x]; x: Error: no such tool; ask 6
        answer: y=refuse           -> asking 7; assistant [y]; y: Error: no such tool; ask 7
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without anythin…
        ",
    );
}

/// What was held by a failed thread is news.
#[test]
fn a_failed_thread_that_held_something_is_woken_by_it() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: x=refuse           -> asking 3; assistant [x]; x: Error: no such tool; ask 3
        failed                     -> failed until 30s; notice the model could not be asked: 503
        event s: ding              -> failed until 30s; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding
        after 30s                  -> time passes
        due                        -> asking 4; release 2 Held; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without anythin…
        ",
    );
}

#[test]
fn a_model_that_talks_to_itself_is_paused_until_it_is_resumed() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=refuse           -> asking 2; assistant [a]; a: Error: no such tool; ask 2
        answer: b=refuse           -> asking 3; assistant [b]; b: Error: no such tool; ask 3
        answer: c=refuse           -> paused; assistant [c]; c: Error: no such tool; notice paused: 3 turns in a row without anythin…
        said held                  -> paused; hold user held
        said held, enqueue         -> paused; queue user held
        said held                  -> paused; hold user held
        said too much              -> ignored: Full(too much input is held)
        resume                     -> asking 4; release 2 Held; ask 4
        resume                     -> ignored: NothingToResume
        answer done:               -> asking 5; assistant done; release 1 Queued; ask 5
        ",
    );
}

#[test]
fn ids_that_can_not_be_used_are_minted() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a a rap_7 ?        -> waiting; assistant [a rap_1 for a rap_2 for rap_7 rap_3]; open a; open rap_1; open rap_2; rap_3: Error: this thread has 3 open calls, the most it may have; call again when some have returned; invoke a; invoke rap_1; invoke rap_2
        returned rap_1: 1          -> waiting; settle rap_1 Returned; rap_1: 1
        ",
    );
}

#[test]
fn calls_beyond_the_limit_and_without_arguments_have_an_error() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: o=odd a b c d      -> waiting; assistant [o a b c d]; o: Error: the arguments are not a JSON object; open a; open b; open c; d: Error: this thread has 3 open calls, the most it may have; call again when some have returned; invoke a; invoke b; invoke c
        said hurry                 -> asking 2; a: still running; the result will follow; b: still running; the result will follow; c: still running; the result will follow; user hurry; ask 2
        answer: e                  -> asking 3; assistant [e]; e: Error: this thread has 3 open calls, the most it may have; call again when some have returned; ask 3
        ",
    );
}

#[test]
fn a_person_answers_the_oldest_question_of_a_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        choice a 1                 -> waiting; a wants choice #1
        choice a 1                 -> ignored: Duplicate
        choice a 2                 -> waiting; a wants choice #2
        choice b 3                 -> ignored: Full(too many questions wait for a person)
        sign in b                  -> ignored: Full(too many questions wait for a person)
        chose a 2                  -> ignored: NoSuchChoice(2)
        chose a 0                  -> waiting; #1 is 0; deliver #1
        dismissed a                -> waiting; #2 is 1; deliver #2
        chose a 0                  -> ignored: NoQuestion
        choice a 1                 -> ignored: Duplicate
        returned a: 1              -> waiting; forget questions of a; settle a Returned; a: 1
        chose a 0                  -> ignored: NoQuestion
        choice a 4                 -> ignored: SettledCall
        sign in b                  -> waiting; b wants sign-in #3
        sign in b                  -> waiting; b wants sign-in #3
        chose b 0                  -> ignored: NoQuestion
        returned b: 2              -> asking 2; forget questions of b; settle b Returned; b: 2; ask 2
        ",
    );
}

#[test]
fn a_view_never_wakes_the_model() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a s                -> waiting; assistant [a s]; open a; open s; invoke a; invoke s
        view a                     -> waiting; view progress
        view a                     -> waiting; view progress
        returned a: 1              -> waiting; settle a Returned; a: 1
        view a                     -> ignored: SettledCall
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        view s                     -> asking 2; view progress
        cancel s                   -> asking 2; notice subscription s was cancelled; settle s Ended; notify cancel s
        view s                     -> ignored: SettledCall
        ",
    );
}

/// Everything that a thread holds stays within its limits, whatever arrives.
#[test]
fn limits_of_zero_refuse_instead_of_failing() {
    let none = Limits {
        subscriptions: 0,
        open_calls: 0,
        held: 0,
        questions: 0,
        children: 0,
        turns_per_wake: 0,
        ..narrow()
    };
    check_with(
        none,
        "
        said hi                    -> paused; user hi; notice paused: 0 turns in a row without anythin…
        said more                  -> ignored: Full(too much input is held)
        resume                     -> paused; notice paused: 0 turns in a row without anythin…
        interrupt                  -> idle
        close                      -> closed; notice the thread was closed; notify close
        ",
    );
}

#[test]
fn a_status_is_the_first_that_applies() {
    let status = |way: &[&str]| {
        let mut thread = Thread::new(narrow());
        for message in way {
            let outcome = thread.take(message);
            assert!(!outcome.starts_with("ignored"), "{message} -> {outcome}");
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

/// Proves: SE-15
#[test]
fn an_events_child_can_not_cancel_the_subscription_and_is_closed_when_it_has_answered() {
    check_child(
        "
        answer: x=cancel(s)        -> asking 2; assistant [x]; x: Error: this thread has no active subscription `s`; it has none; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; notify close; tell t0 ChildClosed
        said more                  -> ignored: Closed
        ",
    );
}

#[test]
fn an_events_child_with_a_call_in_the_background_is_closed_when_that_ends() {
    check_child(
        "
        answer: r q                -> waiting; assistant [r q]; open r; open q; invoke r; invoke q
        said hurry                 -> asking 2; r: still running; the result will follow; q: still running; the result will follow; user hurry; ask 2
        answer done:               -> idle; assistant done; tell t0 ChildRests
        cancel q                   -> idle; notice call q of look was cancelled; settle q Interrupted; notify cancel q
        cancel r                   -> closed; notice call r of look was cancelled; settle r Interrupted; notice the thread was closed; notify cancel r; notify close; tell t0 ChildClosed
        ",
    );
    check_child(
        "
        answer: r                  -> waiting; assistant [r]; open r; invoke r
        said hurry                 -> asking 2; r: still running; the result will follow; user hurry; ask 2
        answer done:               -> idle; assistant done; tell t0 ChildRests
        returned r: 1              -> asking 3; settle r Returned; assistant [rap_2 interrupt:r (result of a call that was still running)]; rap_2: 1; ask 3
        answer done:               -> closed; assistant done; notice the thread was closed; notify close; tell t0 ChildClosed
        ",
    );
}

#[test]
fn an_events_child_with_a_subscription_is_closed_when_that_ends() {
    check_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; tell t0 ChildRests
        cancel u                   -> closed; notice subscription u was cancelled; settle u Ended; notice the thread was closed; notify cancel u; notify close; tell t0 ChildClosed
        ",
    );
    check_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; tell t0 ChildRests
        event u: bye, final        -> asking 3; assistant [rap_2 interrupt:u (subscription has ended)]; rap_2: bye; settle u Ended; ask 3
        answer done:               -> closed; assistant done; notice the thread was closed; notify close; tell t0 ChildClosed
        ",
    );
}

#[test]
fn an_events_child_with_a_child_of_its_own_is_closed_after_it() {
    check_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; tell t0 ChildRests
        event u: ding, child, final -> idle; born t1 at 10 (asking 1, assistant [rap_2 interrupt:u (subscription has ended)], rap_2: ding, runtime you are a thread of your own, made for t…); settle u Ended
        child closed t1            -> closed; notice the thread was closed; notify close; tell t0 ChildClosed
        ",
    );
}

#[test]
fn an_events_child_that_was_interrupted_has_nothing_left_to_do() {
    check_child(
        "
        interrupt                  -> closed; notice the thread was closed; abandon 1; notify close; tell t0 ChildClosed
        ",
    );
}

#[test]
fn every_kind_of_entry_reads_back_as_it_was_written() {
    let call = |id: &str, arguments| CallEntry {
        id: notation::id(id),
        call_id: Some(notation::id("own")),
        name: "look".into(),
        arguments,
        display: Some("a look".into()),
    };
    let given = Map::from_iter([("kind".to_owned(), Value::from("mine"))]);
    let echo = |arguments| Arguments::Echo { of: notation::id("a"), kind: "interrupt:a".into(), arguments };
    let image = Image { data: "aGk=".into(), media_type: "image/png".into() };
    let content = Body::Content(vec![Content::Text { text: "see".into() }, Content::Image(image.clone())]);
    let diff = Segment::Diff { path: "a.txt".into(), patch: "+1".into() };
    let display = vec![Segment::Text("short".into()), diff, Segment::Image(image)];
    let open = ThoughtKind::Open { text: "hm".into(), signature: "s".into() };
    let sealed = ThoughtKind::Sealed { data: "d".into() };
    let thoughts = vec![Thought { at: 0, kind: open }, Thought { at: 3, kind: sealed }];
    let items = [
        Item::said("hi"),
        Item::User { text: "you are a child".into(), from: Speaker::Runtime },
        Item::answered("", Vec::new()),
        Item::Assistant {
            text: "looking".into(),
            calls: vec![
                call("a", Arguments::Given(given.clone())),
                call("b", Arguments::Unusable("{".into())),
                call("c", echo(None)),
                call("d", echo(Some(given))),
            ],
            thoughts: Some(Thoughts { model: "m".into(), parts: thoughts }),
        },
        Item::Result { call_id: notation::id("a"), content, display, synthetic: false },
        Item::made(notation::id("b"), "Error: no"),
        Item::notice("a notice"),
    ];
    for item in items {
        let entry = Entry { at: Timestamp(7), item };
        let json = serde_json::to_string(&entry).unwrap();
        assert_eq!(serde_json::from_str::<Entry>(&json).unwrap(), entry, "{json}");
    }
}

#[test]
fn a_thread_without_a_budget_waits_for_somebody_to_let_it_go_on() {
    check(
        "
        over budget                -> ignored: StaleTurn
        said hi                    -> asking 1; user hi; ask 1
        over budget                -> paused; notice enough
        over budget                -> ignored: StaleTurn
        said more                  -> paused; hold user more
        event s: x                 -> ignored: UnknownCall
        resume                     -> asking 2; release 1 Held; ask 2
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 3; settle s Subscribed; s: ok; ask 3
        over budget                -> paused; notice enough
        event s: x                 -> paused; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        event s: y, child          -> paused; born t1 at 0 (asking 1, assistant [rap_2 interrupt:s (subscription remains active)], rap_2: y, runtime you are a thread of your own, made for t…)
        interrupt                  -> idle; release 2 Held
        ",
    );
}
