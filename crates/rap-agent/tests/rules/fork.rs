//! Forks: where they begin, and what they know of what they inherit.

use crate::items::{call, calls, echo, result, says};
use crate::notation::{Thread, event_child, narrow, spawned_child};
use rap_agent::{ForkPoint, ForkSearch, Head, Item, Origin, Phase, Seq};
use serde_json::json;

/// Where a fork of a history begins that is forked at an entry, looked for as a store does it.
fn fork(history: &[Item], at: Seq) -> ForkPoint {
    let mut search = ForkSearch::new(at);
    let backwards = (1..=at).rev().map(|seq| (seq, &history[seq as usize - 1]));
    for (seq, item) in backwards {
        if let Some(point) = search.look(seq, item) {
            return point;
        }
    }
    search.end()
}

/// Where forks at each entry begin, and what a summary of each could cover.
fn check(history: &[Item], expected: &[(Seq, Option<Seq>)]) {
    let forks = (0..=history.len() as Seq).map(|at| fork(history, at));
    let forks: Vec<_> = forks.map(|point| (point.at, Head::new().fork(point).coverable())).collect();
    assert_eq!(forks, expected);
}

fn look(id: &str) -> rap_agent::CallEntry {
    call(id, "look", json!({}))
}

#[test]
fn a_fork_begins_where_no_call_lacks_its_result() {
    let history = [
        Item::said("one"),
        calls("", vec![look("a"), look("b")]),
        result("b", "2"),
        Item::notice("for people"),
        result("a", "1"),
        says("done"),
    ];
    let before = (1, None);
    check(&history, &[(0, None), before, before, before, before, (5, Some(1)), (6, Some(5))]);
}

/// What the model answered later, in the other thread, is not answered here.
#[test]
fn a_fork_can_be_summarised_as_far_as_the_model_has_answered_in_it() {
    let history = [
        Item::said("one"),
        says("first"),
        Item::said("two"),
        says("second"),
        calls("", vec![echo("e", "s", None)]),
        result("e", "ding"),
        Item::said("three"),
        says("third"),
    ];
    let answered = [None, None, Some(1), Some(1), Some(3), Some(3), Some(3), Some(3), Some(7)];
    let points = [0, 1, 2, 3, 4, 4, 6, 7, 8];
    check(&history, &points.into_iter().zip(answered).collect::<Vec<_>>());
}

/// Between what a summary covers and where it stands, a fork does not see it, and has to be able to make one.
#[test]
fn a_fork_knows_of_a_summary_if_it_sees_it() {
    let history = [
        Item::said("one"),
        says("first"),
        Item::said("two"),
        Item::Summary { text: "S".into(), covers: 1 },
        says("second"),
    ];
    let covered = [(0, None), (1, None), (2, Some(1)), (3, Some(1)), (4, None), (5, Some(4))];
    check(&history, &covered);
}

/// Its ids are its own, since its incarnation is.
#[test]
fn a_fork_inherits_nothing_that_is_open() {
    let lines = ["said one", "answer: s p=spawn(dig)", "subscribed s: ok", "answer: a", "said more"];
    let source = Thread::after(narrow(), &lines).head;
    assert_eq!(
        (source.children().count(), source.subscriptions().len(), source.background().len()),
        (1, 1, 1)
    );
    let history = [Item::said("one"), says("first")];
    let head = source.fork(fork(&history, 2));
    assert_eq!((head.seq(), head.settled(), head.answered()), (2, 2, 1));
    assert_eq!((head.phase(), head.origin(), head.turn()), (&Phase::Idle, &Origin::Root, 0));
    assert_eq!((head.children().count(), head.subscriptions().len(), head.open_calls().count()), (0, 0, 0));
}

#[test]
fn a_fork_of_a_child_is_a_root() {
    for source in [event_child(narrow()), spawned_child(narrow())] {
        let head = source.head.fork(fork(&[Item::said("one"), says("first")], 2));
        assert_eq!(head.origin(), &Origin::Root);
    }
}

/// What the source answered and summarised later does not count here.
#[test]
fn a_fork_before_a_summary_can_make_one() {
    let source = Thread::after(narrow(), &["said one", "answer first:", "said two", "summarised: S"]).head;
    assert_eq!(source.summarised(), 1);
    let head = source.fork(fork(&[Item::said("one"), says("first")], 2));
    assert_eq!((head.summarised(), head.coverable()), (0, Some(1)));
}
