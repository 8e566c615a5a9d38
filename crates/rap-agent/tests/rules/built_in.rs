//! The runtime's own tools, as tables in the notation of the rules: children, sleep, schedules.

use crate::notation::{check, check_child, check_spawned, from};

const IDLE_ASKED: &[&str] = &["said hi"];
/// It sleeps; call `r` goes on behind a placeholder, `s` is a subscription.
const SLEEPING: &[&str] =
    &["said hi", "answer: s", "subscribed s: ok", "answer: r", "said more", "answer: a=sleep(50)"];

#[test]
fn a_thread_starts_a_child_and_hears_its_reports() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a p=spawn(dig) b   -> waiting; assistant [a p b]; open a; spawn t1 at 2 (asking 1, a: the thread that started you deals with this call, p: do dig, b: the thread that started you deals with this call); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will come by themselves, as calls of spawn_thread; send_message_to_child reaches it.; open b; invoke a; invoke b
        report t1 p: halfway       -> waiting; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: halfway
        returned a: 1              -> waiting; settle a Returned; a: 1
        returned b: 2              -> asking 2; settle b Returned; b: 2; release 2 Held; ask 2
        report t1 p: done          -> asking 2; hold assistant [rap_2 interrupt:p (report of thread t1)]; hold rap_2: done
        answer ok:                 -> asking 3; assistant ok; release 2 Held; ask 3
        answer ok:                 -> idle; assistant ok
        report t1 p: more, news    -> asking 4; assistant [rap_3 interrupt:p (report of thread t1)]; rap_3: more; ask 4
        answer: q=tell(t1) r=tell(t9) -> asking 5; assistant [q r]; send to t1: psst; q: the message is on its way; r: Error: this thread has no open child `t9`; open are: t1; ask 5; deliver
        answer ok:                 -> idle; assistant ok
        child closed t1            -> idle
        child closed t1            -> ignored: Duplicate
        ",
    );
}

#[test]
fn a_thread_has_only_so_many_children() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: p=spawn(dig) q=spawn(delve) -> asking 2; assistant [p q]; spawn t1 at 2 (asking 1, p: do dig, q: the thread that started you deals with this call); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will come by themselves, as calls of spawn_thread; send_message_to_child reaches it.; q: Error: this thread has 1 open children, the most it may have; let some of them finish first; ask 2
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn closing_a_thread_closes_what_it_started() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: p=spawn(dig)       -> asking 2; assistant [p]; spawn t1 at 2 (asking 1, p: do dig); open p; settle p Returned; p: thread t1 was started and works on it. Its reports will come by themselves, as calls of spawn_thread; send_message_to_child reaches it.; ask 2
        close                      -> closed; notice the thread was closed; send to t1: close; abandon 2; notify close; deliver
        ",
    );
}

/// Proves: SE-28
#[test]
fn a_thread_closes_itself_and_calls_nothing_after_that() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a b=close(bye) c d=spawn(dig) -> closed; assistant [a b c d]; a: not called: the thread was closed; b: the thread is closed; with it end the subscriptions s; c: not called: the thread was closed; d: not called: the thread was closed; settle s Ended; notice the thread was closed; notify close
        said more                  -> ignored: Closed
        ",
    );
}

#[test]
fn a_root_has_nobody_to_report_to() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: r=report(done)     -> asking 2; assistant [r]; r: Error: this thread has no parent; say it to the user; ask 2
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn a_spawned_thread_reports_and_closes_itself() {
    check_spawned(
        "
        answer: r=report(halfway) a -> waiting; assistant [r a]; report to t0: halfway; r: the report is on its way; open a; invoke a; deliver
        told: hurry                -> waiting; hold parent hurry
        returned a: 1              -> asking 2; settle a Returned; a: 1; release 1 Held; ask 2
        answer ok:                 -> idle; assistant ok
        told: more                 -> asking 3; parent more; ask 3
        answer: c=close(done)      -> closed; assistant [c]; report to t0: done; c: the thread is closed; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn a_spawned_thread_that_is_idle_stays() {
    check_spawned(
        "
        answer ok:                 -> idle; assistant ok
        said more                  -> asking 2; user more; ask 2
        answer ok:                 -> idle; assistant ok
        close                      -> closed; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn a_child_of_an_event_reports_too() {
    check_child(
        "
        answer: r=report(seen)     -> asking 2; assistant [r]; report to t0: seen; r: the report is on its way; ask 2; deliver
        answer ok:                 -> closed; assistant ok; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn a_sleep_is_an_open_call_of_the_runtime_itself() {
    from(
        IDLE_ASKED,
        "
        answer: a=sleep(50)        -> waiting; assistant [a]; open a
        answer: a=sleep(0)         -> asking 2; assistant [a]; a: the time is over; ask 2
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        ",
    );
}

#[test]
fn a_sleep_that_is_over() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(50)        -> waiting; assistant [a]; open a
        timed out a                -> ignored: NotDue
        after 50s                  -> prepared
        timed out a                -> asking 2; a: the time is over; settle a Returned; ask 2
        timed out a                -> ignored: SettledCall
        answer ok:                 -> idle; assistant ok
        ",
    );
}

#[test]
fn what_ends_a_sleep() {
    from(
        SLEEPING,
        "
        said more                  -> asking 4; a: something happened; it follows; settle a Returned; user more; ask 4
        said more, interrupt       -> asking 4; a: interrupted; settle a Interrupted; notice call r of look was interrupted; settle r Interrupted; user more; notify cancel r; ask 4
        said more, enqueue         -> asking 4; a: something happened; it follows; settle a Returned; user more; ask 4
        said more, reject          -> ignored: Busy
        returned r: 1              -> asking 4; settle r Returned; hold assistant [rap_1 interrupt:r (result of a call that was still running)]; hold rap_1: 1; a: something happened; it follows; settle a Returned; release 2 Held; ask 4
        event s: x                 -> asking 4; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; a: something happened; it follows; settle a Returned; release 2 Held; ask 4
        event s: x, child          -> waiting; spawn t1 at 0 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: x, runtime you are a thread of your own, made for t…)
        report t1 p: done          -> asking 4; hold assistant [rap_1 interrupt:p (report of thread t1)]; hold rap_1: done; a: something happened; it follows; settle a Returned; release 2 Held; ask 4
        told: hurry                -> asking 4; hold parent hurry; a: something happened; it follows; settle a Returned; release 1 Held; ask 4
        timed out a                -> ignored: NotDue
        cancel a                   -> asking 4; a: interrupted; settle a Interrupted; ask 4
        interrupt                  -> idle; a: interrupted; settle a Interrupted; notice call r of look was interrupted; settle r Interrupted; notify cancel r
        close                      -> closed; a: interrupted; settle a Interrupted; settle r Interrupted; settle s Ended; notice the thread was closed; notify close; notify cancel r
        due                        -> ignored: NotDue
        ",
    );
}

#[test]
fn a_sleep_beside_other_calls() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        returned b: 1              -> waiting; settle b Returned; b: 1
        after 50s                  -> prepared
        timed out a                -> asking 2; a: the time is over; settle a Returned; ask 2
        ",
    );
}

#[test]
fn input_ends_a_sleep_but_not_the_calls_beside_it() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a=sleep(50) b      -> waiting; assistant [a b]; open a; open b; invoke b
        event s: x                 -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x; a: something happened; it follows; settle a Returned
        returned b: 1              -> asking 3; settle b Returned; b: 1; release 2 Held; ask 3
        ",
    );
}

#[test]
fn input_that_came_while_the_model_was_asked_ends_a_sleep_at_once() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: x                 -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        answer: a=sleep(50)        -> asking 3; assistant [a]; open a; a: something happened; it follows; settle a Returned; release 2 Held; ask 3
        ",
    );
}

#[test]
fn a_wait_ends_with_whatever_happens() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=wait b           -> waiting; assistant [a b]; open a; open b; invoke b
        returned b: 1              -> asking 2; settle b Returned; b: 1; a: something happened; it follows; settle a Returned; ask 2
        answer: c=wait             -> waiting; assistant [c]; open c
        timed out c                -> ignored: NotDue
        after 5000s                -> prepared
        timed out c                -> ignored: NotDue
        said more                  -> asking 3; c: something happened; it follows; settle c Returned; user more; ask 3
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
fn a_schedule_can_end_by_itself() {
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
