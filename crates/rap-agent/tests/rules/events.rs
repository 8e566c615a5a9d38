//! Subscriptions, their events, and event children.

use rap_agent::{Cause, Limits};

use crate::notation::{
    Thread, check, check_event_child, check_with, event_child, small_limits, spawned_child,
};

/// Proves: SE-06, SE-07, SE-08, SE-13, SE-22
#[test]
fn an_event_enters_the_history_as_a_synthetic_call() {
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
fn a_repeated_event_id_is_ignored() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: ding, id e1       -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding; mark 1 e1
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
        returned a: 1              -> asking 3; settle a Returned; a: 1; release 4 UntilBatchCloses; ask 3
        answer done:               -> idle; assistant done
        event s: three             -> asking 4; assistant [rap_3 interrupt:s (subscription remains active)]; rap_3: three; ask 4
        ",
    );
}

#[test]
fn held_events_join_after_hold_max() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        due                        -> ignored: NotDue
        event s: one               -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: one
        after 59s                  -> prepared
        event s: two               -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        due                        -> ignored: NotDue
        after 1s                   -> prepared
        due                        -> asking 3; a: still running; the result will follow; release 4 UntilBatchCloses; ask 3
        due                        -> ignored: NotDue
        returned a: 1              -> asking 3; settle a Returned; hold assistant [rap_3 interrupt:a (result of a call that was still running)]; hold rap_3: 1
        ",
    );
}

/// Proves: SE-09
#[test]
fn an_event_that_is_not_associative_spawns_a_child_at_the_last_settled_point() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: early, child      -> asking 2; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: early, runtime you are a thread of your own, made for t…)
        child closed t1            -> asking 2
        answer done:               -> idle; assistant done
        event s: ding, child, id e1 -> idle; spawn t2 at 4 (asking 1, assistant [rap_2 interrupt:s (subscription remains active)], rap_2: ding, runtime you are a thread of your own, made for t…); mark 1 e1
        event s: ding, child, id e1 -> ignored: Duplicate
        event s: dong, child       -> idle; backlog of s assistant [rap_3 interrupt:s (subscription remains active)]; backlog of s rap_3: dong
        child closed t2            -> idle; spawn t3 at 4 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        child closed t2            -> ignored: Duplicate
        event s: dong, child, final -> idle; backlog of s assistant [rap_4 interrupt:s (subscription has ended)]; backlog of s rap_4: dong; settle s Ended
        event s: dang, child       -> ignored: EndedSubscription
        close                      -> closed; drop backlog of s; notice dropped waiting events of s: 1; notice the thread was closed; send to t3: close; notify close; deliver
        ",
    );
}

#[test]
fn the_settled_point_does_not_advance_while_a_background_call_is_open() {
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
        event s: ding, child       -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: ding, runtime you are a thread of your own, made for t…)
        child closed t1            -> idle
        returned a: 1              -> asking 5; settle a Returned; assistant [rap_2 interrupt:a (result of a call that was still running)]; rap_2: 1; ask 5
        answer done:               -> idle; assistant done
        event s: ding, child       -> idle; spawn t2 at 12 (asking 1, assistant [rap_3 interrupt:s (subscription remains active)], rap_3: ding, runtime you are a thread of your own, made for t…)
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
        answer: x=cancel(t) y=cancel(s) z=cancel(s) -> asking 3; assistant [x y z]; x: Error: this thread has no active subscription `t`; active subscriptions: s; settle s Ended; y: subscription s was cancelled; z: Error: this thread has no active subscription `s`; it has none; notify cancel s; ask 3
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
        cancel r                   -> asking 2; settle r Ended; notice subscription r was cancelled; notify cancel r
        event r: x                 -> ignored: EndedSubscription
        ",
    );
}

/// Proves: SE-15
#[test]
fn an_event_child_cannot_cancel_the_subscription_and_is_closed_after_its_answer() {
    check_event_child(
        "
        answer: x=cancel(s)        -> asking 2; assistant [x]; x: Error: this thread has no active subscription `s`; it has none; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        said more                  -> ignored: Closed
        ",
    );
}

#[test]
fn an_event_child_with_a_background_call_is_closed_when_the_call_ends() {
    check_event_child(
        "
        answer: r q                -> waiting; assistant [r q]; open r; open q; invoke r; invoke q
        said hurry                 -> asking 2; r: still running; the result will follow; q: still running; the result will follow; user hurry; ask 2
        answer done:               -> idle; assistant done; send to t0: child idle; deliver
        cancel q                   -> idle; notice call q of look was cancelled; settle q Interrupted; notify cancel q
        cancel r                   -> closed; notice call r of look was cancelled; settle r Interrupted; notice the thread was closed; send to t0: child closed; notify close; notify cancel r; deliver
        ",
    );
    check_event_child(
        "
        answer: r                  -> waiting; assistant [r]; open r; invoke r
        said hurry                 -> asking 2; r: still running; the result will follow; user hurry; ask 2
        answer done:               -> idle; assistant done; send to t0: child idle; deliver
        returned r: 1              -> asking 3; settle r Returned; assistant [rap_1 interrupt:r (result of a call that was still running)]; rap_1: 1; ask 3
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_event_child_with_a_subscription_is_closed_when_the_subscription_ends() {
    check_event_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; send to t0: child idle; deliver
        cancel u                   -> closed; settle u Ended; notice subscription u was cancelled; notice the thread was closed; send to t0: child closed; notify close; notify cancel u; deliver
        ",
    );
    check_event_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; send to t0: child idle; deliver
        event u: bye, final        -> asking 3; assistant [rap_1 interrupt:u (subscription has ended)]; rap_1: bye; settle u Ended; ask 3
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_event_child_with_a_child_is_closed_after_the_child() {
    check_event_child(
        "
        answer: u                  -> waiting; assistant [u]; open u; invoke u
        subscribed u: ok           -> asking 2; settle u Subscribed; u: ok; ask 2
        answer done:               -> idle; assistant done; send to t0: child idle; deliver
        event u: ding, child, final -> idle; spawn t1 at 10 (asking 1, assistant [rap_1 interrupt:u (subscription has ended)], rap_1: ding, runtime you are a thread of your own, made for t…); settle u Ended
        child closed t1            -> closed; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_interrupted_event_child_is_closed() {
    check_event_child(
        "
        interrupt                  -> closed; notice the thread was closed; send to t0: child closed; abandon 1; notify close; deliver
        ",
    );
}

#[test]
fn the_oldest_event_ids_are_forgotten_beyond_the_limit_with_one_notice() {
    check_with(
        Limits { event_ids: 2, held: 100, ..small_limits() },
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s t                -> waiting; assistant [s t]; open s; open t; invoke s; invoke t
        subscribed s: ok           -> waiting; settle s Subscribed; s: ok
        subscribed t: ok           -> asking 2; settle t Subscribed; t: ok; ask 2
        event s: x, id e1          -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; mark 1 e1
        event s: x                 -> asking 2; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: x
        event s: x, id e2          -> asking 2; hold assistant [rap_3 interrupt:s (subscription remains active)]; hold rap_3: x; mark 2 e2
        event t: x, id e1          -> asking 2; hold assistant [rap_4 interrupt:t (subscription remains active)]; hold rap_4: x; mark 1 e1
        event s: x, id e1          -> ignored: Duplicate
        event s: x, id e3          -> asking 2; hold assistant [rap_5 interrupt:s (subscription remains active)]; hold rap_5: x; notice more than 2 event ids were recorded for …; mark 3 e3, forget up to 1
        event s: x, id e4, child   -> asking 2; spawn t1 at 0 (asking 1, assistant [rap_6 interrupt:s (subscription remains active)], rap_6: x, runtime you are a thread of your own, made for t…); mark 4 e4, forget up to 2
        event s: x, id e3          -> ignored: Duplicate
        event s: x, id e4          -> ignored: Duplicate
        event t: x, id e1          -> ignored: Duplicate
        event s: x, id e1          -> asking 2; hold assistant [rap_7 interrupt:s (subscription remains active)]; hold rap_7: x; mark 5 e1, forget up to 3
        event s: x, id e6, final   -> asking 2; hold assistant [rap_8 interrupt:s (subscription has ended)]; hold rap_8: x; settle s Ended
        ",
    );
}

/// An event child does not have the rights of a client, and neither do the threads that it spawns.
#[test]
fn only_a_root_was_caused_by_a_client() {
    assert_eq!(Thread::new(small_limits()).head.origin().cause(), Some(Cause::Client));
    assert_eq!(event_child(small_limits()).head.origin().cause(), Some(Cause::Event));
    assert_eq!(spawned_child(small_limits()).head.origin().cause(), None);
}

/// A report must not be lost. The number of such messages is limited by the number of threads and turns.
#[test]
fn a_message_of_the_session_does_not_count_as_held_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        report t1 p: so            -> asking 2; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: so
        report t1 p: so            -> asking 2; hold assistant [rap_2 interrupt:p (report of thread t1)]; hold rap_2: so
        event s: one               -> asking 2; hold assistant [rap_3 interrupt:s (subscription remains active)]; hold rap_3: one
        event s: two               -> asking 2; hold assistant [rap_4 interrupt:s (subscription remains active)]; hold rap_4: two
        event s: three             -> ignored: Full(too much input is held)
        report t1 p: so            -> asking 2; hold assistant [rap_5 interrupt:p (report of thread t1)]; hold rap_5: so
        ",
    );
}

#[test]
fn a_thread_at_the_depth_limit_spawns_no_children_and_handles_its_events_itself() {
    spawned_child(Limits { depth: 1, ..small_limits() }).check(
        "
        answer: q=spawn(dig) s     -> waiting; assistant [q s]; q: Error: threads nest 1 deep at most; do the work in this thread; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: ding, child       -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: ding; ask 3
        ",
    );
}
