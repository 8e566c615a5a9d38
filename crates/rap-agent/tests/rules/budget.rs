//! The session's budget: what counts against it, what happens when it is exceeded, and how it is renewed.

use crate::notation::{Thread, check_spending, check_with, event_child, small_limits, spawned_child};
use rap_agent::{Bounds, Budgets, Limits, Status};

/// Returns limits with an hourly budget.
fn per_hour(turns: Option<u64>, tokens: Option<u64>, wakes: Option<u64>) -> Limits {
    let per_hour = Bounds { turns, tokens, wakes };
    let budgets = Budgets { per_hour, ..Budgets::default() };
    Limits { budgets, turns_per_wake: 50, ..small_limits() }
}

/// Returns limits whose budget limits only the wakes per hour.
fn wakes(bound: u64) -> Limits {
    per_hour(None, None, Some(bound))
}

#[test]
fn a_request_to_the_model_is_a_turn_and_a_user_message_is_not_a_wake() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        answer: a b                -> 0, 0, 0
        returned a: 1              -> 0, 0, 0
        returned a: 1              -> 0, 0, 0
        returned b: 2              -> 1, 0, 0
        said and?                  -> 1, 0, 0
        answer done:               -> 0, 0, 0
        said hi                    -> 1, 0, 0
        said wait, enqueue         -> 0, 0, 0
        answer done:               -> 1, 0, 0
        interrupt                  -> 0, 0, 0
        ",
    );
}

#[test]
fn events_reports_late_results_and_schedules_are_wakes() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        answer: s t=schedule(60) p=spawn(dig) -> 1, 0, 1
        subscribed s: ok           -> 1, 0, 0
        event s: ding              -> 0, 0, 0
        event s: dong              -> 0, 0, 0
        answer done:               -> 1, 0, 1
        answer done:               -> 0, 0, 0
        report t1 p: gold          -> 1, 0, 1
        answer done:               -> 0, 0, 0
        after 60s                  -> prepared
        ticked t: tea, next 120    -> 1, 0, 1
        answer: a                  -> 0, 0, 0
        said go on                 -> 1, 0, 0
        answer done:               -> 0, 0, 0
        returned a: 1              -> 1, 0, 1
        answer done:               -> 0, 0, 0
        lost s                     -> 1, 0, 1
        ",
    );
}

#[test]
fn a_retried_turn_is_not_a_wake() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        failed                     -> 0, 0, 0
        after 30s                  -> prepared
        due                        -> 1, 0, 0
        answer: s                  -> 0, 0, 0
        subscribed s: ok           -> 1, 0, 0
        answer done:               -> 0, 0, 0
        said more                  -> 1, 0, 0
        summarised: S              -> 1, 4, 0
        failed                     -> 0, 0, 0
        event s: ding              -> 0, 0, 0
        after 3600s                -> prepared
        due                        -> 1, 0, 1
        failed permanently         -> 0, 0, 0
        resume                     -> 1, 0, 0
        ",
    );
}

#[test]
fn tokens_of_an_unused_answer_count() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        said hi                    -> 1, 0, 0
        unused answer              -> 0, 4, 0
        ",
    );
}

#[test]
fn the_first_turn_of_a_child_counts_when_it_is_spawned() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        answer: s p=spawn(dig)     -> 1, 0, 1
        subscribed s: ok           -> 1, 0, 0
        event s: ding, child       -> 1, 0, 1
        event s: dong, child       -> 1, 0, 1
        event s: deng, child       -> 0, 0, 0
        child closed t2            -> 1, 0, 1
        report t1 p: gold          -> 0, 0, 0
        answer done:               -> 1, 0, 1
        ",
    );
}

#[test]
fn a_long_sleep_is_a_wake_and_a_short_one_is_not() {
    check_spending(
        "
        said hi                    -> 1, 0, 0
        answer: a=sleep(10)        -> 0, 0, 0
        after 10s                  -> prepared
        timed out a                -> 1, 0, 1
        answer: b=sleep(19)        -> 0, 0, 0
        after 10s                  -> prepared
        timed out b                -> 1, 0, 0
        ",
    );
}

#[test]
fn a_session_that_exceeds_its_budget_is_paused_until_it_is_resumed() {
    check_with(
        per_hour(Some(2), None, None),
        "
        said hi                    -> asking 1; user hi; hour 1, 0, 0; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; hour 2, 0, 0; ask 2
        answer done:               -> idle; assistant done
        said more                  -> session paused; user more; notice this session has used its budget of 2 tu…; hour 3, 0, 0
        said still there?          -> session paused; hold user still there?
        event s: x                 -> session paused; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        event s: y, child          -> session paused; spawn t1 at 4 (session paused, assistant [rap_2 interrupt:s (subscription remains active)], rap_2: y, runtime you are a thread of your own, made for t…, notice this session has used its budget of 2 tu…); hour 4, 0, 1
        after 4000s                -> prepared
        due                        -> ignored: NotDue
        resume                     -> asking 3; release 3 UntilBatchCloses; hour 1, 0, 0; ask 3
        resume                     -> ignored: NothingToResume
        ",
    );
}

#[test]
fn tokens_are_limited_separately() {
    check_with(
        per_hour(None, Some(3), None),
        "
        said hi                    -> asking 1; user hi; hour 1, 0, 0; ask 1
        unused answer              -> asking 1; hour 1, 4, 0
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        returned a: 1              -> session paused; settle a Returned; a: 1; notice this session has used its budget of 3 to…; hour 2, 4, 0
        resume                     -> asking 2; hour 3, 0, 0; ask 2
        ",
    );
}

/// At the limit the thread holds its input until the hour is over, and then continues.
#[test]
fn a_session_at_the_limit_of_wakes_continues_after_the_hour() {
    check_with(
        wakes(1),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        after 100s                 -> prepared
        event s: one               -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: one; hour 1, 0, 1; ask 3
        answer done:               -> idle; assistant done
        event s: two               -> session paused until 3600s; assistant [rap_2 interrupt:s (subscription remains active)]; rap_2: two; notice this session has reached its limit of 1 …; hour 1, 0, 2
        event s: three             -> session paused until 3600s; hold assistant [rap_3 interrupt:s (subscription remains active)]; hold rap_3: three
        after 3499s                -> prepared
        due                        -> ignored: NotDue
        after 1s                   -> prepared
        due                        -> asking 4; release 2 UntilBatchCloses; hour 1, 0, 1; ask 4
        due                        -> ignored: NotDue
        answer done:               -> idle; assistant done
        event s: four              -> session paused until 7200s; assistant [rap_4 interrupt:s (subscription remains active)]; rap_4: four; notice this session has reached its limit of 1 …; hour 1, 0, 2
        after 3600s                -> prepared
        due                        -> asking 5; hour 1, 0, 1; ask 5
        ",
    );
}

#[test]
fn a_user_message_is_answered_at_once_at_the_limit_of_wakes() {
    for limits in [wakes(0), per_hour(Some(1000), Some(1000), Some(0))] {
        for message in ["said hello", "said hello, enqueue", "said hello, reject", "said hello, interrupt"] {
            let lines = ["said hi", "answer: s", "subscribed s: ok", "answer done:", "event s: x"];
            let mut thread = Thread::after(limits.clone(), &lines);
            assert_eq!(thread.head.status(), Status::NeedsYou);
            thread.apply_all(&["event s: y", message]);
            assert_eq!(thread.head.turn_in_progress(), Some(3), "{message}");
            assert!(thread.head.held().is_empty());
            // The turns that follow are not held back either.
            thread.apply_all(&["answer: a", "returned a: 1"]);
            assert_eq!(thread.head.turn_in_progress(), Some(4), "{message}");
        }
    }
}

#[test]
fn resuming_renews_the_budget_for_all_threads_of_the_session() {
    check_with(
        wakes(1),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: one, child        -> asking 2; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: one, runtime you are a thread of your own, made for t…); hour 1, 0, 1
        answer done:               -> idle; assistant done
        event s: two               -> session paused until 3600s; assistant [rap_2 interrupt:s (subscription remains active)]; rap_2: two; notice this session has reached its limit of 1 …; hour 1, 0, 2
        paused elsewhere t8 t9     -> prepared
        resume                     -> asking 3; send to t8: resume; send to t9: resume; hour 1, 0, 0; ask 3; deliver
        answer done:               -> idle; assistant done
        event s: three             -> asking 4; assistant [rap_3 interrupt:s (subscription remains active)]; rap_3: three; hour 2, 0, 1; ask 4
        ",
    );
}

#[test]
fn resuming_a_thread_at_its_own_limit_does_not_renew_the_budget() {
    check_with(
        Limits { turns_per_wake: 1, ..wakes(1) },
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=refuse           -> paused; assistant [a]; a: Error: no such tool; notice paused: 1 turn in a row without new exte…
        paused elsewhere t8 t9     -> prepared
        resume                     -> asking 2; ask 2
        ",
    );
}

#[test]
fn a_paused_thread_resumes_with_its_session() {
    let mut thread = Thread::after(wakes(0), &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    thread.check(
        "
        resumed                    -> ignored: NothingToResume
        event s: one               -> session paused until 3600s; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: one; notice this session has reached its limit of 0 …; hour 0, 0, 1
        event s: two               -> session paused until 3600s; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        paused elsewhere t8 t9     -> prepared
        resumed                    -> asking 3; release 2 UntilBatchCloses; ask 3
        ",
    );
}

#[test]
fn a_thread_that_the_budget_did_not_pause_is_not_resumed_with_its_session() {
    for lines in [["said hi", "failed"], ["said hi", "failed permanently"], ["said hi", "too long: much"]] {
        let mut thread = Thread::after(wakes(1), &lines);
        assert_eq!(thread.take("resumed"), "ignored: NothingToResume", "{lines:?}");
    }
}

/// The first turn of such a child counts as a wake when it starts.
#[test]
fn a_child_that_is_spawned_at_the_limit_is_paused_until_the_hour_is_over() {
    let limits = wakes(0);
    for mut child in [event_child(limits.clone()), spawned_child(limits)] {
        assert_eq!(child.head.due(&child.limits), Some(rap_protocol::Timestamp(3_600_000)));
        child.limits.budgets.per_hour.wakes = Some(1);
        child.check(
            "
            due                        -> ignored: NotDue
            after 3600s                -> prepared
            due                        -> asking 1; hour 1, 0, 1; ask 1
            ",
        );
    }
}

/// Another child would be paused as well, so further events wait.
#[test]
fn an_event_child_spawned_paused_by_the_budget_keeps_its_slot() {
    check_with(
        Limits { children: 4, ..wakes(0) },
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: one, child        -> asking 2; spawn t1 at 0 (session paused until 3600s, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: one, runtime you are a thread of your own, made for t…, notice this session has reached its limit of 0 …); hour 0, 0, 1
        event s: two, child        -> asking 2; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: two
        ",
    );
}

#[test]
fn a_resumed_session_may_use_its_budget_of_turns_again() {
    check_with(
        per_hour(Some(1), None, None),
        "
        said hi                    -> asking 1; user hi; hour 1, 0, 0; ask 1
        answer: x=refuse           -> session paused; assistant [x]; x: Error: no such tool; notice this session has used its budget of 1 tu…; hour 2, 0, 0
        resume                     -> asking 2; hour 1, 0, 0; ask 2
        answer: y=refuse           -> session paused; assistant [y]; y: Error: no such tool; notice this session has used its budget of 1 tu…; hour 2, 0, 0
        ",
    );
}

/// The child does not report itself idle.
#[test]
fn an_event_child_paused_by_the_budget_keeps_its_slot() {
    let mut child = event_child(small_limits());
    child.limits.budgets.in_total.turns = Some(0);
    child.check(
        "
        answer: x=refuse           -> session paused; assistant [x]; x: Error: no such tool; notice this session has used its budget of 0 tu…; hour 1, 0, 0
        ",
    );
}

#[test]
fn setting_the_clock_back_does_not_make_the_hour_longer() {
    check_with(
        wakes(1),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        after 86400s               -> prepared
        event s: one               -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: one; hour 1, 0, 1; ask 3
        answer done:               -> idle; assistant done
        clock back 80000s          -> prepared
        event s: two               -> asking 4; assistant [rap_2 interrupt:s (subscription remains active)]; rap_2: two; hour 1, 0, 1; ask 4
        answer done:               -> idle; assistant done
        event s: three             -> session paused until 10000s; assistant [rap_3 interrupt:s (subscription remains active)]; rap_3: three; notice this session has reached its limit of 1 …; hour 1, 0, 2
        ",
    );
}

#[test]
fn held_events_at_the_limit_of_wakes_do_not_delay_user_messages() {
    let woken =
        ["said hi", "answer: s", "subscribed s: ok", "answer done:", "event s: w", "answer done:", "said go"];
    let mut thread = Thread::after(wakes(1), &woken);
    thread.check(
        "
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event s: x                 -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: x
        after 60s                  -> prepared
        due                        -> ignored: NotDue
        returned a: 1              -> asking 5; settle a Returned; a: 1; ask 5
        said later, enqueue        -> asking 5; queue user later
        answer done:               -> asking 6; assistant done; release 1 UntilIdle; ask 6
        answer: b=sleep(9000)      -> waiting; assistant [b]; open b
        event s: y                 -> waiting; hold assistant [rap_3 interrupt:s (subscription remains active)]; hold rap_3: y
        after 3600s                -> prepared
        due                        -> asking 7; b: ended because something else happened; settle b Returned; release 4 UntilBatchCloses; hour 1, 0, 1; ask 7
        ",
    );
}

#[test]
fn held_events_at_the_limit_of_wakes_pause_a_thread_without_other_work() {
    let woken =
        ["said hi", "answer: s", "subscribed s: ok", "answer done:", "event s: w", "answer done:", "said go"];
    let mut thread = Thread::after(wakes(1), &woken);
    thread.check(
        "
        event s: x                 -> asking 4; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: x
        answer done:               -> session paused until 3600s; assistant done; release 2 UntilBatchCloses; notice this session has reached its limit of 1 …; hour 1, 0, 2
        after 3600s                -> prepared
        due                        -> asking 5; hour 1, 0, 1; ask 5
        ",
    );
}

#[test]
fn resuming_an_unpaused_thread_resumes_the_paused_threads_of_its_session() {
    check_with(
        wakes(0),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        resume                     -> ignored: NothingToResume
        event s: one, child        -> idle; spawn t1 at 4 (session paused until 3600s, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: one, runtime you are a thread of your own, made for t…, notice this session has reached its limit of 0 …); hour 0, 0, 1
        paused elsewhere t1        -> prepared
        resume                     -> idle; send to t1: resume; hour 0, 0, 0; deliver
        resume                     -> ignored: NothingToResume
        ",
    );
}

#[test]
fn an_enqueued_message_does_not_overtake_earlier_ones() {
    check_with(
        wakes(0),
        "
        said hi                    -> asking 1; user hi; ask 1
        said one, enqueue          -> asking 1; queue user one
        failed                     -> failed until 30s; notice the model request failed: 503
        said two, enqueue          -> asking 2; release 1 UntilIdle; user two; ask 2
        ",
    );
}
