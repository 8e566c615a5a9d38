//! Events that go to event children, and the backlogs in which they wait.

use crate::notation::{Thread, check, check_event_child, check_with, small_limits};
use rap_agent::{Arguments, Entry, Item, Limits};
use rap_protocol::{Body, ThreadId};

/// Checks a table with three slots for children, of which one subscription may use one.
fn check_with_three_children(table: &str) {
    check_with(Limits { children: 3, ..small_limits() }, table);
}

#[test]
fn many_events_use_one_child_at_a_time_and_none_is_lost() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child, id e1   -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b; mark 1 e1
        event s: b, child, id e1   -> ignored: Duplicate
        event s: c, child          -> idle; backlog of s assistant [rap_3 interrupt:s (subscription remains active)]; backlog of s rap_3: c
        event s: d, child          -> ignored: Full(too many events wait for a child)
        child closed t1            -> idle; spawn t2 at 4 (asking 1, 4 from the backlog of s, runtime you are a thread of your own, made for t…)
        event s: d, child          -> idle; backlog of s assistant [rap_4 interrupt:s (subscription remains active)]; backlog of s rap_4: d
        child closed t2            -> idle; spawn t3 at 4 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        ",
    );
}

/// A backlog is read at once, so its size in bytes is limited as well as the number of events.
#[test]
fn waiting_events_and_held_input_are_limited_in_bytes() {
    let one_input = Limits { held: 100, held_bytes: 1, ..small_limits() };
    check_with(
        one_input.clone(),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        event s: c, child          -> ignored: Full(too many events wait for a child)
        child closed t1            -> idle; spawn t2 at 4 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        event s: c, child          -> idle; backlog of s assistant [rap_3 interrupt:s (subscription remains active)]; backlog of s rap_3: c
        ",
    );
    check_with(
        one_input,
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s a                -> waiting; assistant [s a]; open s; open a; invoke s; invoke a
        subscribed s: ok           -> waiting; settle s Subscribed; s: ok
        event s: b                 -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: b
        event s: c                 -> ignored: Full(too much input is held)
        returned a: 1              -> asking 2; settle a Returned; a: 1; release 2 UntilBatchCloses; ask 2
        event s: c                 -> asking 2; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: c
        ",
    );
}

#[test]
fn waiting_events_are_still_handled_after_a_final_event() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        event s: c, child, final   -> idle; backlog of s assistant [rap_3 interrupt:s (subscription has ended)]; backlog of s rap_3: c; settle s Ended
        event s: d, child          -> ignored: EndedSubscription
        child closed t1            -> idle; spawn t2 at 4 (asking 1, 4 from the backlog of s, runtime you are a thread of your own, made for t…)
        child closed t2            -> idle
        ",
    );
}

#[test]
fn cancelling_drops_waiting_events_and_reports_their_number() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        event s: c, child          -> idle; backlog of s assistant [rap_3 interrupt:s (subscription remains active)]; backlog of s rap_3: c
        cancel s                   -> idle; drop backlog of s; notice dropped waiting events of s: 2; settle s Ended; notice subscription s was cancelled; notify cancel s
        child closed t1            -> idle
        ",
    );
}

#[test]
fn cancelling_by_the_model_drops_waiting_events() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        said stop                  -> asking 3; user stop; ask 3
        answer: c=cancel(s)        -> asking 4; assistant [c]; drop backlog of s; notice dropped waiting events of s: 1; settle s Ended; c: subscription s was cancelled; notify cancel s; ask 4
        ",
    );
}

#[test]
fn closing_drops_waiting_events() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        close                      -> closed; settle s Ended; drop backlog of s; notice dropped waiting events of s: 1; notice the thread was closed; send to t1: close; notify close; deliver
        ",
    );
}

#[test]
fn an_idle_event_child_frees_its_slot() {
    check_with_three_children(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; spawn t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; backlog of s assistant [rap_2 interrupt:s (subscription remains active)]; backlog of s rap_2: b
        child idle t1             -> idle; spawn t2 at 4 (asking 1, 2 from the backlog of s, runtime you are a thread of your own, made for t…)
        child idle t1             -> ignored: Duplicate
        child closed t2            -> idle
        child closed t1            -> idle
        ",
    );
}

#[test]
fn an_event_child_that_waits_for_long_reports_itself_idle() {
    check_event_child(
        "
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        due                        -> ignored: NotDue
        after 60s                  -> prepared
        due                        -> waiting; send to t0: child idle; deliver
        due                        -> ignored: NotDue
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

#[test]
fn an_event_child_that_failed_reports_itself_idle() {
    check_event_child(
        "
        failed                     -> failed until 30s; notice the model request failed: 503; send to t0: child idle; deliver
        resume                     -> asking 2; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; send to t0: child closed; notify close; deliver
        ",
    );
}

fn first_child(thread: &Thread) -> Option<ThreadId> {
    thread.head.children().next().cloned()
}

/// Returns the texts of the events that each child was spawned with, in order.
fn events_by_child(thread: &Thread) -> Vec<Vec<String>> {
    let texts = |child| {
        let entries = thread.store.entries_of(child).values();
        let text = |entry: &Entry| match &entry.item {
            Item::Result { content: Body::Text(text), .. } => Some(text.clone()),
            _ => None,
        };
        entries.filter_map(text).collect()
    };
    thread.store.children().map(texts).collect()
}

/// Proves: SE-09
#[test]
fn a_child_receives_at_most_events_per_child_events_oldest_first() {
    for (events_per_child, expected) in [
        (1, vec![vec!["1"], vec!["2"], vec!["3"], vec!["4"], vec!["5"], vec!["6"]]),
        (2, vec![vec!["1"], vec!["2", "3"], vec!["4", "5"], vec!["6"]]),
        (4, vec![vec!["1"], vec!["2", "3", "4", "5"], vec!["6"]]),
        (100, vec![vec!["1"], vec!["2", "3", "4", "5", "6"]]),
        // 0 counts as 1; otherwise no event would ever be handled.
        (0, vec![vec!["1"], vec!["2"], vec!["3"], vec!["4"], vec!["5"], vec!["6"]]),
    ] {
        let lines = ["said hi", "answer: s", "subscribed s: ok", "answer done:"];
        let limits = Limits { events_per_child, held: 100, ..small_limits() };
        let mut thread = Thread::after(limits, &lines);
        for event in 1..=6 {
            thread.apply_all(&[&format!("event s: {event}, child")]);
        }
        while let Some(child) = first_child(&thread) {
            thread.apply_all(&[&format!("child closed {child}")]);
        }
        assert_eq!(events_by_child(&thread), expected, "{events_per_child} events per child");
    }
}

#[test]
fn events_keep_their_order_while_children_come_and_go() {
    let lines = ["said hi", "answer: s", "subscribed s: ok", "answer done:"];
    let limits = Limits { events_per_child: 2, event_children: 2, children: 2, held: 100, ..small_limits() };
    let mut thread = Thread::after(limits, &lines);
    for event in 1..=20 {
        thread.apply_all(&[&format!("event s: {event}, child")]);
        if event % 3 == 0 {
            let child = first_child(&thread).unwrap();
            thread.apply_all(&[&format!("child {} {child}", if event % 2 == 0 { "closed" } else { "idle" })]);
        }
    }
    thread.apply_all(&["event s: 21, child, final"]);
    while let Some(child) = first_child(&thread) {
        thread.apply_all(&[&format!("child closed {child}")]);
    }
    let taken: Vec<String> = events_by_child(&thread).concat();
    assert_eq!(taken, (1..=21).map(|event| event.to_string()).collect::<Vec<_>>());
    assert!(thread.head.backlogs().is_empty());
}

/// The limits may be higher after a restart, so that a slot is free while events wait.
#[test]
fn an_event_does_not_overtake_waiting_events() {
    let lines = ["said hi", "answer: s", "subscribed s: ok", "answer done:"];
    let mut thread = Thread::after(Limits { held: 100, ..small_limits() }, &lines);
    thread.apply_all(&["event s: 1, child", "event s: 2, child", "event s: 3, child"]);
    (thread.limits.children, thread.limits.event_children) = (2, 2);
    thread.apply_all(&["event s: 4, child"]);
    while let Some(child) = first_child(&thread) {
        thread.apply_all(&[&format!("child closed {child}")]);
    }
    assert_eq!(events_by_child(&thread), [vec!["1"], vec!["2", "3", "4"]]);
}

#[test]
fn an_event_child_sees_the_arguments_of_the_call_that_subscribed() {
    let mut thread =
        Thread::after(small_limits(), &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    let child = thread.spawn("event s: ding, child");
    let arguments = child.store.history().find_map(|item| match item {
        Item::Assistant { calls, .. } => match &calls[0].arguments {
            Arguments::Synthetic { arguments, .. } => arguments.clone(),
            _ => None,
        },
        _ => None,
    });
    assert_eq!(serde_json::to_string(&arguments.unwrap()).unwrap(), r#"{"of":"s"}"#);
}

/// A subscription gets another child only after the other subscriptions with waiting events.
#[test]
fn subscriptions_take_turns() {
    let limits = Limits { subscriptions: 2, events_per_child: 1, ..small_limits() };
    let lines = ["said hi", "answer: s t", "subscribed s: ok", "subscribed t: ok", "answer done:"];
    let mut thread = Thread::after(limits, &lines);
    thread.apply_all(&["event s: a, child", "event s: b, child", "event s: c, child", "event t: d, child"]);
    let next = |thread: &mut Thread, closed: &str| {
        let line = thread.take(&format!("child closed {closed}"));
        line.split("backlog of ").nth(1).and_then(|rest| rest.chars().next())
    };
    assert_eq!(["t1", "t2", "t3"].map(|closed| next(&mut thread, closed)), [Some('s'), Some('t'), Some('s')]);
}
