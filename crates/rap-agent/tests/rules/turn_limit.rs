//! A thread without external input is paused after `turns_per_wake` turns, even if it exchanges messages with other threads
//! of its session.

use rap_agent::{Bounds, Budgets, Input, Limits, PauseScope, Phase, ThreadMessage, Write};
use rap_protocol::ThreadId;

use crate::notation::{Thread, check, check_spawned_child, small_limits};

#[test]
fn a_short_sleep_does_not_count_as_external_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(9)         -> waiting; assistant [a]; open a
        after 9s                   -> prepared
        timed out a                -> asking 2; a: the sleep is over; settle a Returned; ask 2
        answer: b=sleep(0)         -> asking 3; assistant [b]; b: the sleep is over; ask 3
        answer: c=sleep(18)        -> waiting; assistant [c]; open c
        after 9s                   -> prepared
        timed out c                -> paused; c: the sleep is over; settle c Returned; notice paused: 3 turns in a row without new ext…
        ",
    );
}

#[test]
fn a_long_sleep_counts_as_external_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: x=refuse           -> asking 2; assistant [x]; x: Error: no such tool; ask 2
        answer: y=refuse           -> asking 3; assistant [y]; y: Error: no such tool; ask 3
        answer: a=sleep(10)        -> waiting; assistant [a]; open a
        after 10s                  -> prepared
        timed out a                -> asking 4; a: the sleep is over; settle a Returned; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without new ext…
        ",
    );
}

/// Even if another call closes the batch.
#[test]
fn a_long_sleep_next_to_another_call_counts_as_external_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: x=refuse           -> asking 2; assistant [x]; x: Error: no such tool; ask 2
        answer: y=refuse           -> asking 3; assistant [y]; y: Error: no such tool; ask 3
        answer: a=sleep(10) b      -> waiting; assistant [a b]; open a; open b; invoke b
        after 10s                  -> prepared
        timed out a                -> waiting; a: the sleep is over; settle a Returned
        returned b: 1              -> asking 4; settle b Returned; b: 1; ask 4
        ",
    );
}

#[test]
fn messages_of_the_session_without_external_input_do_not_reset_the_turn_count() {
    check_spawned_child(
        "
        said hi                    -> asking 2; user hi; abandon 1; ask 2
        answer done:               -> idle; assistant done
        from parent: one           -> asking 3; parent one; ask 3
        answer done:               -> idle; assistant done
        from parent: two           -> asking 4; parent two; ask 4
        answer done:               -> idle; assistant done
        from parent: three         -> paused; parent three; notice paused: 3 turns in a row without new ext…
        ",
    );
}

/// Returns a thread that has answered three reports without external input, and then these lines.
fn after_three_reports(between: &[&str]) -> Thread {
    let mut lines = vec!["said hi", "answer: s", "subscribed s: ok", "answer done:"];
    for _ in 0..3 {
        lines.extend(["report t1 p: so", "answer done:"]);
    }
    lines.extend(between);
    let mut thread = Thread::new(Limits { depth: 0, ..small_limits() });
    thread.apply_all(&lines);
    thread
}

#[test]
fn external_input_lets_messages_of_the_session_reset_the_turn_count() {
    let table: &[(&[&str], bool)] = &[
        (&[], false),
        (&["notice: people should know"], false),
        (&["view s"], false),
        (&["event s: ding", "answer done:"], true),
        (&["said hello", "answer done:"], true),
        (&["said hello", "answer: a", "returned a: 1", "answer done:"], true),
        (&["said hello", "answer: a", "call failed a", "answer done:"], true),
        (&["lost s", "answer done:"], true),
    ];
    for (between, asks) in table {
        let mut thread = after_three_reports(between);
        thread.apply_all(&["report t1 p: so"]);
        assert_eq!(thread.head.turn_in_progress().is_some(), *asks, "{between:?}: {:?}", thread.head.phase());
    }
}

/// The turn that follows the result itself does not reset the count.
#[test]
fn a_result_lets_the_next_message_of_the_session_reset_the_turn_count() {
    check_spawned_child(
        "
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer: x=refuse           -> asking 3; assistant [x]; x: Error: no such tool; ask 3
        answer done:               -> idle; assistant done
        from parent: one           -> asking 4; parent one; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer done:               -> idle; assistant done
        from parent: two           -> paused; parent two; notice paused: 3 turns in a row without new ext…
        ",
    );
}

#[test]
fn a_message_of_the_session_with_newer_external_input_resets_the_turn_count() {
    let mut thread = after_three_reports(&[]);
    thread.check(
        "
        report t1 p: so, newer     -> asking 6; assistant [rap_4 interrupt:p (report of thread t1)]; rap_4: so; ask 6
        answer: x=refuse           -> asking 7; assistant [x]; x: Error: no such tool; ask 7
        report t1 p: so            -> asking 7; hold assistant [rap_5 interrupt:p (report of thread t1)]; hold rap_5: so
        report t1 p: so, newer     -> asking 7; hold assistant [rap_6 interrupt:p (report of thread t1)]; hold rap_6: so
        answer: y=refuse           -> asking 8; assistant [y]; y: Error: no such tool; release 4 UntilBatchCloses; ask 8
        answer: x=refuse           -> asking 9; assistant [x]; x: Error: no such tool; ask 9
        answer: y=refuse           -> asking 10; assistant [y]; y: Error: no such tool; ask 10
        report t1 p: so            -> asking 10; hold assistant [rap_7 interrupt:p (report of thread t1)]; hold rap_7: so
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; release 2 UntilBatchCloses; notice paused: 3 turns in a row without new ext…
        ",
    );
}

/// Applies a line and returns the messages that the step sends, with their receivers.
fn messages(thread: &mut Thread, line: &str) -> Vec<(ThreadId, ThreadMessage)> {
    let step = thread.step_line(line).unwrap();
    let sent = step.writes.into_iter().filter_map(|write| match write {
        Write::Send { to, message } => Some((to, message)),
        _ => None,
    });
    sent.collect()
}

/// Lets parent and child answer each other until one is paused. Returns the number of turns.
fn exchange_messages(parent: &mut Thread, child: &mut Thread) -> u64 {
    let (parent_id, child_id) = (parent.identity.id.clone(), child.identity.id.clone());
    let before = parent.head.turn() + child.head.turn();
    for _ in 0..200 {
        for (to, message) in messages(child, "answer: r=report(thanks)") {
            assert_eq!(to, parent_id);
            parent.step(Input::FromThread { sender: child_id.clone(), message }).unwrap();
        }
        if parent.head.turn_in_progress().is_none() || child.head.turn_in_progress().is_none() {
            break;
        }
        child.apply_all(&["answer done:"]);
        for (to, message) in messages(parent, &format!("answer: q=message({child_id})")) {
            assert_eq!(to, child_id);
            child.step(Input::FromThread { sender: parent_id.clone(), message }).unwrap();
        }
        if parent.head.turn_in_progress().is_none() || child.head.turn_in_progress().is_none() {
            break;
        }
        parent.apply_all(&["answer done:"]);
    }
    parent.head.turn() + child.head.turn() - before
}

/// Whatever external input they received before.
#[test]
fn a_parent_and_a_child_that_only_answer_each_other_are_paused() {
    let limits = Limits { turns_per_wake: 10, ..small_limits() };
    let before: &[&[&str]] = &[&[], &["answer: a", "returned a: 1"], &["said hello"]];
    for of_child in before {
        for of_parent in [&["answer done:"][..], &["answer done:", "said hello", "answer done:"]] {
            let mut parent = Thread::after(limits.clone(), &["said hi"]);
            let mut child = parent.spawn("answer: p=spawn(dig)");
            parent.apply_all(of_parent);
            child.apply_all(of_child);
            let turns = exchange_messages(&mut parent, &mut child);
            let paused = |thread: &Thread| matches!(thread.head.phase(), Phase::Paused(_));
            assert!(paused(&parent) || paused(&child), "{of_child:?} {of_parent:?}");
            assert!(turns < 60, "{turns} turns after {of_child:?} {of_parent:?}");
        }
    }
}

/// The events are external input, although the parent itself receives only the reports.
#[test]
fn reports_of_event_children_reset_the_parents_turn_count() {
    let mut parent =
        Thread::after(small_limits(), &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    for _ in 0..20 {
        let mut child = parent.spawn("event s: ding, child");
        let sender = child.identity.id.clone();
        let mut sent = messages(&mut child, "answer: r=report(seen)");
        sent.extend(messages(&mut child, "answer done:"));
        for (_, message) in sent {
            parent.step(Input::FromThread { sender: sender.clone(), message }).unwrap();
        }
        assert!(parent.head.turn_in_progress().is_some(), "{:?}", parent.head.phase());
        parent.apply_all(&["answer done:"]);
    }
}

/// The user's message counts as external input for the reviewer too, although the writer has reported in between.
#[test]
fn external_input_of_the_root_counts_for_threads_that_it_messages_later() {
    let limits = Limits { children: 2, turns_per_wake: 8, ..small_limits() };
    let mut root = Thread::after(limits, &["said hi"]);
    let mut writer = root.spawn("answer: p=spawn(write)");
    let mut reviewer = root.spawn("answer: q=spawn(review)");
    root.apply_all(&["answer done:"]);
    for child in [&mut writer, &mut reviewer] {
        child.apply_all(&["answer done:"]);
    }
    for _ in 0..20 {
        root.apply_all(&["after 60s", "said once more"]);
        for child in [&mut writer, &mut reviewer] {
            child.apply_all(&["after 60s"]);
            let id = child.identity.id.clone();
            for (_, message) in messages(&mut root, &format!("answer: q=message({id})")) {
                child.step(Input::FromThread { sender: root.identity.id.clone(), message }).unwrap();
            }
            root.apply_all(&["answer done:"]);
            assert!(child.head.turn_in_progress().is_some(), "{:?}", child.head.phase());
            for (_, message) in messages(child, "answer: r=report(done)") {
                root.step(Input::FromThread { sender: id.clone(), message }).unwrap();
            }
            child.apply_all(&["answer done:"]);
            assert!(root.head.turn_in_progress().is_some(), "{:?}", root.head.phase());
        }
        root.apply_all(&["answer done:"]);
    }
}

/// An hourly limit of wakes must not reset the count of threads that only answer each other.
#[test]
fn the_end_of_an_hour_does_not_count_as_external_input() {
    let per_hour = Bounds { wakes: Some(1), ..Bounds::default() };
    let limits = Limits { budgets: Budgets { per_hour, ..Budgets::default() }, ..small_limits() };
    let mut thread = Thread::after(limits, &["said hi", "answer done:", "report t1 p: so", "answer done:"]);
    thread.apply_all(&["report t1 p: so", "after 3600s", "due"]);
    assert!(thread.head.turn_in_progress().is_some(), "{:?}", thread.head.phase());
    thread.apply_all(&["answer done:", "after 3600s", "report t1 p: so"]);
    let Phase::Paused(pause) = thread.head.phase() else { panic!("{:?}", thread.head.phase()) };
    assert_eq!(pause.scope, PauseScope::Thread);
}
