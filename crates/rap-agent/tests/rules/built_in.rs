//! Built-in tools: children, sleeps, waits, schedules.

use crate::notation::{
    Thread, check, check_each_from, check_event_child, check_spawned_child, small_limits, spawned_child,
};

const ASKING: &[&str] = &["said hi"];
/// The thread sleeps. `r` is a background call, `s` a subscription.
const SLEEPING: &[&str] =
    &["said hi", "answer: s", "subscribed s: ok", "answer: r", "said more", "answer: a=sleep(50)"];

#[test]
fn a_thread_spawns_a_child_and_receives_its_reports() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a p=spawn(dig) b   -> waiting; assistant [a p b]; open a; spawn t1 at 2 (asking 1, a: the thread that started you deals with this call, p: do dig, b: the thread that started you deals with this call); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; open b; invoke a; invoke b
        report t1 p: halfway       -> waiting; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: halfway
        returned a: 1              -> waiting; settle a Returned; a: 1
        returned b: 2              -> asking 2; settle b Returned; b: 2; release 2 UntilBatchCloses; ask 2
        report t1 p: done          -> asking 2; hold assistant [rap_2 interrupt:p (report of thread t1)]; hold rap_2: done
        answer ok:                 -> asking 3; assistant ok; release 2 UntilBatchCloses; ask 3
        answer ok:                 -> idle; assistant ok
        report t1 p: more, newer   -> asking 4; assistant [rap_3 interrupt:p (report of thread t1)]; rap_3: more; ask 4
        answer: q=message(t1) r=message(t9) -> asking 5; assistant [q r]; send to t1: psst; q: the message was sent; r: Error: this thread has no open child `t9`; open children: t1; ask 5; deliver
        answer ok:                 -> idle; assistant ok
        child closed t1            -> idle
        child closed t1            -> ignored: Duplicate
        ",
    );
}

#[test]
fn a_thread_cannot_spawn_more_children_than_the_limit() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: p=spawn(dig) q=spawn(delve) -> asking 2; assistant [p q]; spawn t1 at 2 (asking 1, p: do dig, q: the thread that started you deals with this call); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; q: Error: this thread has 1 open children, the most it may have; let some of them finish first; ask 2
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn closing_a_thread_closes_its_children() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: p=spawn(dig)       -> asking 2; assistant [p]; spawn t1 at 2 (asking 1, p: do dig); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; ask 2
        close                      -> closed; notice the thread was closed; send to t1: close; abandon 2; notify close; deliver
        ",
    );
}

/// Proves: SE-28
#[test]
fn a_thread_that_closes_itself_makes_no_more_calls() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a b=close(bye) c d=spawn(dig) -> closed; assistant [a b c d]; a: not called: the thread was closed; b: the thread is closed; subscriptions that end with it: s; c: not called: the thread was closed; d: not called: the thread was closed; settle s Ended; notice the thread was closed; notify close
        said more                  -> ignored: Closed
        ",
    );
}

#[test]
fn a_root_cannot_report_to_a_parent() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: r=report(done)     -> asking 2; assistant [r]; r: Error: this thread has no parent; tell the user instead; ask 2
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_spawned_thread_reports_and_closes_itself() {
    check_spawned_child(
        "
        answer: r=report(halfway) a -> waiting; assistant [r a]; report to t0: halfway; r: the report was sent; open a; invoke a; deliver
        from parent: hurry         -> waiting; hold parent hurry
        returned a: 1              -> asking 2; settle a Returned; a: 1; release 1 UntilBatchCloses; ask 2
        answer ok:                 -> idle; assistant ok
        from parent: more          -> asking 3; parent more; ask 3
        answer: c=close(done)      -> closed; assistant [c]; report to t0: done; c: the thread is closed; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_idle_spawned_thread_stays_open() {
    check_spawned_child(
        "
        answer ok:                 -> idle; assistant ok
        said more                  -> asking 2; user more; ask 2
        answer ok:                 -> idle; assistant ok
        close                      -> closed; notice the thread was closed; report to t0: this thread was closed before it sent a report; send to t0: child closed; notify close; deliver
        ",
    );
}

/// Its parent may wait for the report.
#[test]
fn a_spawned_thread_that_is_closed_without_a_report_tells_its_parent() {
    for (before, reports) in [
        (&[][..], true),
        (&["answer: r=report(done)"][..], false),
        (&["answer: r=report(halfway)", "answer ok:", "from parent: go on"][..], true),
    ] {
        let child = || {
            let mut child = spawned_child(small_limits());
            child.apply_all(before);
            child
        };
        assert_eq!(child().take("close").contains("report to t0: "), reports, "{before:?}");
        assert_eq!(child().take("answer: c=close").contains("report to t0: "), reports, "{before:?}");
        assert!(!child().take("parent closed").contains("report to t0: "), "{before:?}");
    }
}

#[test]
fn the_report_of_a_closed_child_ends_a_wait() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: p=spawn(dig) a=wait -> waiting; assistant [p a]; spawn t1 at 2 (asking 1, p: do dig, a: the thread that started you deals with this call); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will arrive as calls of spawn_thread; use send_message_to_child to send it a message.; open a
        report t1 p: closed        -> asking 2; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: closed; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 2
        ",
    );
}

#[test]
fn messages_of_the_session_are_held_up_to_a_bound() {
    let mut thread = Thread::after(small_limits(), &["said hi", "answer: p=spawn(dig)"]);
    for number in 0..1024 {
        let shown = thread.take("report t1 p: halfway");
        assert!(shown.contains("hold "), "{number}: {shown}");
    }
    for _ in 0..3 {
        assert_eq!(
            thread.take("report t1 p: halfway"),
            "asking 2; send to t1: notice a message to another thread was not accepted: too many messages wait there already; deliver"
        );
    }
    // The number of held inputs is that of events and users. The thread learns how many messages were dropped, even if their
    // senders are closed.
    let mut closed = thread.clone();
    for shown in [thread.take("answer ok:"), closed.take("close")] {
        let release = "release 2048 UntilBatchCloses; notice messages of other threads that were drop…";
        assert!(shown.contains(release), "{shown}");
    }
    assert!(thread.take("report t1 p: halfway").contains("hold "));
    let shown = thread.take("answer ok:");
    assert!(shown.contains("release 2 UntilBatchCloses"), "{shown}");
    assert!(!shown.contains("messages of other threads"), "{shown}");
}

#[test]
fn an_event_child_can_report_to_its_parent() {
    check_event_child(
        "
        answer: r=report(seen)     -> asking 2; assistant [r]; report to t0: seen; r: the report was sent; ask 2; deliver
        answer ok:                 -> closed; assistant ok; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn a_sleep_is_an_open_call_of_the_runtime_itself() {
    check_each_from(
        ASKING,
        "
        answer: a=sleep(50)        -> waiting; assistant [a]; open a
        answer: a=sleep(0)         -> asking 2; assistant [a]; a: the sleep is over; ask 2
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        ",
    );
}

#[test]
fn a_sleep_ends_at_its_time() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(50)        -> waiting; assistant [a]; open a
        timed out a                -> ignored: NotDue
        after 50s                  -> prepared
        timed out a                -> asking 2; a: the sleep is over; settle a Returned; ask 2
        timed out a                -> ignored: SettledCall
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_sleeping_thread_handles_every_input() {
    check_each_from(
        SLEEPING,
        "
        said more                  -> asking 4; a: ended because something else happened; settle a Returned; user more; ask 4
        said more, interrupt       -> asking 4; a: interrupted; settle a Interrupted; notice call r of look was interrupted; settle r Interrupted; user more; notify cancel r; ask 4
        said more, enqueue         -> asking 4; a: ended because something else happened; settle a Returned; user more; ask 4
        said more, reject          -> ignored: Busy
        returned r: 1              -> asking 4; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 4
        event s: x                 -> asking 4; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 4
        event s: x, child          -> waiting; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: x, runtime you are a thread of your own, made for t…)
        report t1 p: done          -> asking 4; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: done; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 4
        from parent: hurry         -> asking 4; hold parent hurry; a: ended because something else happened; settle a Returned; release 1 UntilBatchCloses; ask 4
        timed out a                -> ignored: NotDue
        cancel a                   -> asking 4; a: interrupted; settle a Interrupted; ask 4
        interrupt                  -> idle; a: interrupted; settle a Interrupted; notice call r of look was interrupted; settle r Interrupted; notify cancel r
        close                      -> closed; a: interrupted; settle a Interrupted; settle r Interrupted; settle s Ended; notice the thread was closed; notify close; notify cancel r
        due                        -> ignored: NotDue
        ",
    );
}

#[test]
fn a_sleep_next_to_other_calls_ends_at_its_time() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        returned b: 1              -> waiting; settle b Returned; b: 1
        after 50s                  -> prepared
        timed out a                -> asking 2; a: the sleep is over; settle a Returned; ask 2
        ",
    );
}

#[test]
fn input_ends_a_sleep_but_not_the_other_calls() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        event s: x                 -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; a: ended because something else happened; settle a Returned
        returned b: 1              -> asking 3; settle b Returned; b: 1; release 2 UntilBatchCloses; ask 3
        ",
    );
}

#[test]
fn input_held_during_the_turn_ends_a_sleep_at_once() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: x                 -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        answer: a=sleep(50)        -> asking 3; assistant [a]; open a; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 3
        ",
    );
}

#[test]
fn a_wait_ends_with_any_other_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=wait b           -> waiting; assistant [a b]; open a; open b; invoke b
        returned b: 1              -> asking 2; settle b Returned; b: 1; a: ended because something else happened; settle a Returned; ask 2
        answer: c=wait             -> waiting; assistant [c]; open c
        timed out c                -> ignored: NotDue
        after 5000s                -> prepared
        timed out c                -> ignored: NotDue
        said more                  -> asking 3; c: ended because something else happened; settle c Returned; user more; ask 3
        ",
    );
}

#[test]
fn a_schedule_is_a_subscription_of_the_runtime_itself() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        ticked s: tea, next 120    -> ignored: NotDue
        after 60s                  -> prepared
        ticked s: tea, next 120    -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: tea; s at 120s; ask 3
        ticked s: tea, next 180    -> ignored: NotDue
        answer ok:                 -> idle; assistant ok
        after 100s                 -> prepared
        ticked s: tea, next 180    -> asking 4; assistant [rap_2 interrupt:s (subscription remains active)]; rap_2: tea; s at 180s; ask 4
        answer: c=cancel(s)        -> asking 5; assistant [c]; settle s Ended; c: subscription s was cancelled; ask 5
        ticked s: tea, next 240    -> ignored: SettledCall
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_subscription_is_cancelled_by_the_short_form_of_its_id_too() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer: c=cancel_short(s)  -> asking 3; assistant [c]; settle s Ended; c: subscription s was cancelled; ask 3
        ",
    );
}

#[test]
fn a_schedule_without_further_times_ends() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        after 60s                  -> prepared
        ticked s: tea              -> asking 3; assistant [rap_1 interrupt:s (subscription has ended)]; rap_1: tea; settle s Ended; ask 3
        answer ok:                 -> idle; assistant ok
        ticked s: tea              -> ignored: SettledCall
        ",
    );
}

#[test]
fn schedules_count_as_subscriptions() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=schedule(60) b=schedule(60) c=schedule(60) -> asking 2; assistant [a b c]; open a; settle a Subscribed; a at 60s; a: scheduled; open b; settle b Subscribed; b at 60s; b: scheduled; c: The subscription was not kept: this thread has 2, the most it may have. Cancel one with cancel_subscription and subscribe again.; ask 2
        cancel a                   -> asking 2; settle a Ended; notice subscription a was cancelled
        close                      -> closed; settle b Ended; notice the thread was closed; abandon 2; notify close
        ",
    );
}
