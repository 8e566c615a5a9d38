//! Failed requests to the model, and event children that stop working.

use std::time::Duration;

use rap_agent::{Limits, Phase, Status, Write};
use rap_protocol::ThreadId;

use crate::notation::{Thread, check, check_event_child, check_with, event_child, small_limits, thread_id};

/// An event child retries whatever the reason, because no user looks after it.
#[test]
fn an_event_child_that_failed_retries_and_is_closed_after_a_while() {
    check_event_child(
        "
        failed permanently         -> failed until 30s; notice the model request failed: 503; send to t0: child idle; deliver
        due                        -> ignored: NotDue
        after 30s                  -> prepared
        due                        -> asking 2; ask 2
        failed permanently         -> failed until 60s; notice the model request failed: 503
        after 3569s                -> prepared
        due                        -> asking 3; ask 3
        failed                     -> failed until 7198s; notice the model request failed: 503
        after 3599s                -> prepared
        due                        -> asking 4; ask 4
        failed                     -> closed; notice the model request failed: 503; send to t0: notice an event child of look (s) was closed because its requests to the model failed: 503; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_event_child_whose_retry_succeeds_is_closed_as_usual() {
    check_event_child(
        "
        failed permanently         -> failed until 30s; notice the model request failed: 503; send to t0: child idle; deliver
        after 30s                  -> prepared
        due                        -> asking 2; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        after 3600s                -> prepared
        returned a: 1              -> asking 3; settle a Returned; a: 1; ask 3
        failed                     -> failed until 3660s; notice the model request failed: 503
        after 30s                  -> prepared
        due                        -> asking 4; ask 4
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

/// Only event children retry after a final failure.
#[test]
fn a_thread_whose_failure_is_final_waits_for_the_user() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed permanently         -> failed; notice the model request failed: 503
        after 90000s               -> prepared
        due                        -> ignored: NotDue
        resume                     -> asking 2; ask 2
        failed                     -> failed until 90030s; notice the model request failed: 503
        after 3600s                -> prepared
        due                        -> asking 3; ask 3
        failed                     -> failed; notice the model request failed: 503
        ",
    );
}

/// Even if the next turn follows at once.
#[test]
fn an_answer_ends_a_series_of_failures() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        after 100s                 -> prepared
        due                        -> asking 2; ask 2
        answer: x=refuse           -> asking 3; assistant [x]; x: Error: no such tool; ask 3
        failed                     -> failed until 130s; notice the model request failed: 503
        ",
    );
}

#[test]
fn a_failed_thread_retries_at_least_once_an_hour() {
    check_with(
        Limits { failed_retry_for: Duration::from_secs(24 * 3600), ..small_limits() },
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        after 7200s                -> prepared
        due                        -> asking 2; ask 2
        failed                     -> failed until 10800s; notice the model request failed: 503
        ",
    );
}

#[test]
fn a_notice_of_an_event_child_is_written_into_the_parents_history() {
    check(
        "
        child notice t1: gone      -> idle; notice gone
        ",
    );
}

#[test]
fn children_that_failed_do_not_block_later_events() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: a, child          -> asking 2; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> asking 2; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        child idle t1              -> asking 2; spawn t2 at 0 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        child idle t2              -> asking 2
        event s: c, child          -> asking 2; spawn t3 at 0 (asking 1, assistant [rap_3 interrupt:s (subscription remains active)], rap_3: c, runtime you are a thread of your own, made for t…)
        child closed t1            -> asking 2
        close                      -> closed; settle s Ended; notice the thread was closed; send to t3: close; send to t2: close; abandon 2; notify close; deliver
        ",
    );
}

/// A spawned thread stays open until its model closes it.
#[test]
fn spawned_children_do_not_occupy_slots_of_event_children() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s p=spawn(dig)     -> waiting; assistant [s p]; open s; spawn t1 at 2 (asking 1, s: the thread that started you deals with this call, p: do dig); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        child idle t1              -> ignored: Duplicate
        event s: a, child          -> asking 2; spawn t2 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> asking 2; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        child closed t1            -> asking 2
        child closed t2            -> asking 2; spawn t3 at 0 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        ",
    );
}

#[test]
fn event_children_do_not_count_against_the_limit_of_spawned_children() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: a, child          -> asking 2; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        answer: p=spawn(dig)       -> asking 3; assistant [p]; spawn t2 at 4 (asking 1, p: do dig); open p; settle p Returned; p: thread t2 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; ask 3
        ",
    );
}

#[test]
fn the_oldest_of_too_many_idle_event_children_is_closed() {
    let mut parent =
        Thread::after(small_limits(), &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    let children: Vec<ThreadId> = (0..1023).map(|number| thread_id(&format!("c{number}"))).collect();
    let mut stored = serde_json::to_value(&parent.head).unwrap();
    stored["resting"] = serde_json::to_value(&children).unwrap();
    parent.head = serde_json::from_value(stored).unwrap();
    let last = parent.spawn("event s: ding, child").identity.id;
    assert_eq!(parent.take(&format!("child idle {last}")), "idle");
    assert_eq!(parent.head.children().count(), 1024);
    for oldest in &children[..3] {
        let last = parent.spawn("event s: ding, child").identity.id;
        let step = parent.step_line(&format!("child idle {last}")).unwrap();
        let closed: Vec<_> = step
            .writes
            .iter()
            .filter_map(|write| match write {
                Write::Send { to, .. } => Some(to),
                _ => None,
            })
            .collect();
        assert_eq!(closed, [oldest]);
        assert_eq!(parent.head.children().count(), 1024);
        assert!(parent.head.children().any(|child| *child == last));
        // The parent has already removed the child.
        assert_eq!(parent.take(&format!("child closed {oldest}")), "ignored: Duplicate");
    }
}

#[test]
fn a_prompt_that_is_too_long_pauses_the_thread() {
    check_with(
        small_limits(),
        "
        said hi                    -> asking 1; user hi; ask 1
        too long: 9000 of 8000     -> paused; notice 9000 of 8000
        too long: 9000 of 8000     -> ignored: StaleTurn
        due                        -> ignored: NotDue
        said more                  -> paused; hold user more
        resume                     -> asking 2; release 1 UntilBatchCloses; ask 2
        too long: 9000 of 8000     -> paused; notice 9000 of 8000
        resume                     -> asking 3; ask 3
        answer done:               -> idle; assistant done
        too long: 9000 of 8000     -> ignored: StaleTurn
        ",
    );
    let thread = Thread::after(small_limits(), &["said hi", "too long: 9000 of 8000"]);
    assert_eq!(thread.head.status(), Status::NeedsYou);
    assert!(matches!(thread.head.phase(), Phase::Paused(pause) if pause.why == "9000 of 8000"));
}

#[test]
fn an_event_child_whose_prompt_is_too_long_reports_itself_idle() {
    event_child(small_limits()).check(
        "
        too long: 9000 of 8000     -> paused; notice 9000 of 8000; send to t0: child idle; deliver
        ",
    );
}
