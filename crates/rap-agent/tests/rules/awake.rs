//! A model that only talks to itself, or to other threads of its session, is paused after `turns_per_wake` questions.

use rap_agent::{Bounds, Budgets, Input, Limits, PauseScope, Phase, ThreadMessage, Write};
use rap_protocol::ThreadId;

use crate::notation::{Thread, check, check_spawned, narrow};

#[test]
fn a_short_sleep_is_nothing_from_outside() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(9)         -> waiting; assistant [a]; open a
        after 9s                   -> prepared
        timed out a                -> asking 2; a: the time is over; settle a Returned; ask 2
        answer: b=sleep(0)         -> asking 3; assistant [b]; b: the time is over; ask 3
        answer: c=sleep(18)        -> waiting; assistant [c]; open c
        after 9s                   -> prepared
        timed out c                -> paused; c: the time is over; settle c Returned; notice paused: 3 turns in a row without anythin…
        ",
    );
}

#[test]
fn a_long_sleep_counts_as_something_from_outside() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: x=refuse           -> asking 2; assistant [x]; x: Error: no such tool; ask 2
        answer: y=refuse           -> asking 3; assistant [y]; y: Error: no such tool; ask 3
        answer: a=sleep(10)        -> waiting; assistant [a]; open a
        after 10s                  -> prepared
        timed out a                -> asking 4; a: the time is over; settle a Returned; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without anythin…
        ",
    );
}

/// Also when another call ends the wait.
#[test]
fn a_long_sleep_beside_another_call_counts_too() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: x=refuse           -> asking 2; assistant [x]; x: Error: no such tool; ask 2
        answer: y=refuse           -> asking 3; assistant [y]; y: Error: no such tool; ask 3
        answer: a=sleep(10) b      -> waiting; assistant [a b]; open a; open b; invoke b
        after 10s                  -> prepared
        timed out a                -> waiting; a: the time is over; settle a Returned
        returned b: 1              -> asking 4; settle b Returned; b: 1; ask 4
        ",
    );
}

/// The message of a person resets the count, and messages of the session that tell of nothing newer do not.
#[test]
fn messages_of_the_session_without_news_do_not_count_as_new() {
    check_spawned(
        "
        said hi                    -> asking 2; user hi; abandon 1; ask 2
        answer done:               -> idle; assistant done
        told: one                  -> asking 3; parent one; ask 3
        answer done:               -> idle; assistant done
        told: two                  -> asking 4; parent two; ask 4
        answer done:               -> idle; assistant done
        told: three                -> paused; parent three; notice paused: 3 turns in a row without anythin…
        ",
    );
}

/// What brings three messages in a row to their end, and a fourth one on its way.
fn after_three(between: &[&str]) -> Thread {
    let mut lines = vec!["said hi", "answer: s", "subscribed s: ok", "answer done:"];
    for _ in 0..3 {
        lines.extend(["report t1 p: so", "answer done:"]);
    }
    lines.extend(between);
    let mut thread = Thread::new(Limits { depth: 0, ..narrow() });
    thread.take_all(&lines);
    thread
}

#[test]
fn messages_of_the_session_count_again_after_something_from_outside() {
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
        let mut thread = after_three(between);
        thread.take_all(&["report t1 p: so"]);
        assert_eq!(thread.head.asking().is_some(), *asks, "{between:?}: {:?}", thread.head.phase());
    }
}

/// A tool's result alone lets the next message of the session count, not the question about the result itself.
#[test]
fn a_result_lets_the_next_message_count_as_new() {
    check_spawned(
        "
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer: x=refuse           -> asking 3; assistant [x]; x: Error: no such tool; ask 3
        answer done:               -> idle; assistant done
        told: one                  -> asking 4; parent one; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer done:               -> idle; assistant done
        told: two                  -> paused; parent two; notice paused: 3 turns in a row without anythin…
        ",
    );
}

#[test]
fn news_that_a_message_carries_count_as_new() {
    let mut thread = after_three(&[]);
    thread.play(
        "
        report t1 p: so, news      -> asking 6; assistant [rap_4 interrupt:p (report of thread t1)]; rap_4: so; ask 6
        answer: x=refuse           -> asking 7; assistant [x]; x: Error: no such tool; ask 7
        report t1 p: so            -> asking 7; hold assistant [rap_5 interrupt:p (report of thread t1)]; hold rap_5: so
        report t1 p: so, news      -> asking 7; hold assistant [rap_6 interrupt:p (report of thread t1)]; hold rap_6: so
        answer: y=refuse           -> asking 8; assistant [y]; y: Error: no such tool; release 4 Held; ask 8
        answer: x=refuse           -> asking 9; assistant [x]; x: Error: no such tool; ask 9
        answer: y=refuse           -> asking 10; assistant [y]; y: Error: no such tool; ask 10
        report t1 p: so            -> asking 10; hold assistant [rap_7 interrupt:p (report of thread t1)]; hold rap_7: so
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; release 2 Held; notice paused: 3 turns in a row without anythin…
        ",
    );
}

/// The messages of a step, by receiver.
fn messages(thread: &mut Thread, line: &str) -> Vec<(ThreadId, ThreadMessage)> {
    let step = thread.step_line(line).unwrap();
    let sent = step.writes.into_iter().filter_map(|write| match write {
        Write::Send { to, message } => Some((to, message)),
        _ => None,
    });
    sent.collect()
}

/// Lets parent and child answer each other until one is paused. Returns the number of questions to the model.
fn thank_each_other(parent: &mut Thread, child: &mut Thread) -> u64 {
    let (parent_id, child_id) = (parent.identity.id.clone(), child.identity.id.clone());
    let before = parent.head.turn() + child.head.turn();
    for _ in 0..200 {
        for (to, message) in messages(child, "answer: r=report(thanks)") {
            assert_eq!(to, parent_id);
            parent.step(Input::FromThread { sender: child_id.clone(), message }).unwrap();
        }
        if parent.head.asking().is_none() || child.head.asking().is_none() {
            break;
        }
        child.take_all(&["answer done:"]);
        for (to, message) in messages(parent, &format!("answer: q=tell({child_id})")) {
            assert_eq!(to, child_id);
            child.step(Input::FromThread { sender: parent_id.clone(), message }).unwrap();
        }
        if parent.head.asking().is_none() || child.head.asking().is_none() {
            break;
        }
        parent.take_all(&["answer done:"]);
    }
    parent.head.turn() + child.head.turn() - before
}

/// Whatever they have heard before, and however often: thanks are no news.
#[test]
fn a_parent_and_a_child_that_only_thank_each_other_are_paused() {
    let limits = Limits { turns_per_wake: 10, ..narrow() };
    let heard: &[&[&str]] = &[&[], &["answer: a", "returned a: 1"], &["said hello"]];
    for of_child in heard {
        for of_parent in [&["answer done:"][..], &["answer done:", "said hello", "answer done:"]] {
            let mut parent = Thread::after(limits.clone(), &["said hi"]);
            let mut child = parent.spawn("answer: p=spawn(dig)");
            parent.take_all(of_parent);
            child.take_all(of_child);
            let turns = thank_each_other(&mut parent, &mut child);
            let paused = |thread: &Thread| matches!(thread.head.phase(), Phase::Paused(_));
            assert!(paused(&parent) || paused(&child), "{of_child:?} {of_parent:?}");
            assert!(turns < 60, "{turns} turns after {of_child:?} {of_parent:?}");
        }
    }
}

/// Reports about events are news, though the parent itself hears of nothing else.
#[test]
fn reports_of_children_for_events_keep_waking_the_parent() {
    let mut parent = Thread::after(narrow(), &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    for _ in 0..20 {
        let mut child = parent.spawn("event s: ding, child");
        let sender = child.identity.id.clone();
        let mut sent = messages(&mut child, "answer: r=report(seen)");
        sent.extend(messages(&mut child, "answer done:"));
        for (_, message) in sent {
            parent.step(Input::FromThread { sender: sender.clone(), message }).unwrap();
        }
        assert!(parent.head.asking().is_some(), "{:?}", parent.head.phase());
        parent.take_all(&["answer done:"]);
    }
}

/// What a person said reaches the reviewer through the root, though the writer has reported in between.
#[test]
fn news_reach_threads_that_the_root_tells_later() {
    let limits = Limits { children: 2, turns_per_wake: 8, ..narrow() };
    let mut root = Thread::after(limits, &["said hi"]);
    let mut writer = root.spawn("answer: p=spawn(write)");
    let mut reviewer = root.spawn("answer: q=spawn(review)");
    root.take_all(&["answer done:"]);
    for child in [&mut writer, &mut reviewer] {
        child.take_all(&["answer done:"]);
    }
    for _ in 0..20 {
        root.take_all(&["after 60s", "said once more"]);
        for child in [&mut writer, &mut reviewer] {
            child.take_all(&["after 60s"]);
            let id = child.identity.id.clone();
            for (_, message) in messages(&mut root, &format!("answer: q=tell({id})")) {
                child.step(Input::FromThread { sender: root.identity.id.clone(), message }).unwrap();
            }
            root.take_all(&["answer done:"]);
            assert!(child.head.asking().is_some(), "{:?}", child.head.phase());
            for (_, message) in messages(child, "answer: r=report(done)") {
                root.step(Input::FromThread { sender: id.clone(), message }).unwrap();
            }
            child.take_all(&["answer done:"]);
            assert!(root.head.asking().is_some(), "{:?}", root.head.phase());
        }
        root.take_all(&["answer done:"]);
    }
}

/// A small budget of wakes does not keep threads awake that only thank each other.
#[test]
fn the_end_of_an_hour_is_nothing_from_outside() {
    let per_hour = Bounds { wakes: Some(1), ..Bounds::default() };
    let limits = Limits { budgets: Budgets { per_hour, ..Budgets::default() }, ..narrow() };
    let mut thread = Thread::after(limits, &["said hi", "answer done:", "report t1 p: so", "answer done:"]);
    thread.take_all(&["report t1 p: so", "after 3600s", "due"]);
    assert!(thread.head.asking().is_some(), "{:?}", thread.head.phase());
    thread.take_all(&["answer done:", "after 3600s", "report t1 p: so"]);
    let Phase::Paused(pause) = thread.head.phase() else { panic!("{:?}", thread.head.phase()) };
    assert_eq!(pause.scope, PauseScope::Thread);
}
