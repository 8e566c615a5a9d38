//! Forks: the point at which they begin, and their heads.

use crate::items::{answer, call, calls, result, synthetic_call};
use rap_agent::{ForkPoint, ForkSearch, Item, Origin, Phase, Seq};
use serde_json::json;

/// Searches the fork point for an entry in the same way as the store.
fn fork(history: &[Item], at: Seq) -> ForkPoint {
    let mut search = ForkSearch::new(at);
    let backwards = (1..=at).rev().map(|seq| (seq, &history[seq as usize - 1]));
    for (seq, item) in backwards {
        if let Some(point) = search.visit(seq, item) {
            return point;
        }
    }
    search.finish()
}

/// Checks, for a fork at each entry, the fork point and the last entry that a summary could cover.
fn check(history: &[Item], expected: &[(Seq, Option<Seq>)]) {
    let forks = (0..=history.len() as Seq).map(|at| fork(history, at));
    let forks: Vec<_> = forks.map(|point| (point.at, point.head().summarisable_up_to())).collect();
    assert_eq!(forks, expected);
}

fn look_call(id: &str) -> rap_agent::CallEntry {
    call(id, "look", json!({}))
}

#[test]
fn a_fork_begins_at_a_point_where_every_call_has_a_result() {
    let history = [
        Item::user("one"),
        calls("", vec![look_call("a"), look_call("b")]),
        result("b", "2"),
        Item::notice("for people"),
        result("a", "1"),
        answer("done"),
    ];
    let before = (1, None);
    check(&history, &[(0, None), before, before, before, before, (5, Some(1)), (6, Some(5))]);
}

/// Answers after the fork point do not count in the fork.
#[test]
fn a_fork_can_be_summarised_as_far_as_the_model_has_answered_in_it() {
    let history = [
        Item::user("one"),
        answer("first"),
        Item::user("two"),
        answer("second"),
        calls("", vec![synthetic_call("e", "s", None)]),
        result("e", "ding"),
        Item::user("three"),
        answer("third"),
    ];
    let answered = [None, None, Some(1), Some(1), Some(3), Some(3), Some(3), Some(3), Some(7)];
    let points = [0, 1, 2, 3, 4, 4, 6, 7, 8];
    check(&history, &points.into_iter().zip(answered).collect::<Vec<_>>());
}

/// A fork between the last covered entry and the summary itself does not inherit the summary, and must be able to make one.
#[test]
fn a_fork_inherits_a_summary_only_if_it_is_in_its_history() {
    let history = [
        Item::user("one"),
        answer("first"),
        Item::user("two"),
        Item::Summary { text: "S".into(), covers: 1 },
        answer("second"),
    ];
    let covered = [(0, None), (1, None), (2, Some(1)), (3, Some(1)), (4, None), (5, Some(4))];
    check(&history, &covered);
}

/// Its ids are its own, since its incarnation is.
#[test]
fn a_fork_is_an_idle_root_without_calls_subscriptions_or_children() {
    let history = [Item::user("one"), answer("first")];
    let head = fork(&history, 2).head();
    assert_eq!((head.seq(), head.settled_up_to(), head.answered_up_to()), (2, 2, 1));
    assert_eq!((head.phase(), head.origin(), head.turn()), (&Phase::Idle, &Origin::Root, 0));
    assert_eq!((head.children().count(), head.subscriptions().len(), head.open_calls().count()), (0, 0, 0));
}

/// Later answers and summaries of the source thread do not count in the fork.
#[test]
fn a_fork_before_a_summary_can_make_one() {
    let summary = Item::Summary { text: "S".into(), covers: 1 };
    let history = [Item::user("one"), answer("first"), Item::user("two"), summary, answer("second")];
    let head = fork(&history, 2).head();
    assert_eq!((head.summarised_up_to(), head.summarisable_up_to()), (0, Some(1)));
}
