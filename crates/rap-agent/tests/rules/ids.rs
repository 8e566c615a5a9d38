//! Ids of calls and children. The runtime makes them, and they are unique in all threads.

use std::collections::BTreeSet;

use rap_agent::{Head, Identity, Input, Item, OnBusy, Step, Write};
use rap_protocol::{CallId, Timestamp};

use crate::notation::{Thread, small_limits, thread_id};

const LINES: &[&str] = &[
    "said hi",
    "answer: a a s t=schedule(60) p=spawn(dig) x=refuse",
    "subscribed s: ok",
    "said hurry",
    "event s: one",
    "choice a 1",
    "returned a: 1",
    "event s: two, child",
    "answer done:",
    "answer: b=sleep(50) c=approve",
];

fn with_incarnation(incarnation: u64) -> Thread {
    Thread::with(Identity { id: thread_id("t0"), incarnation, depth: 0 }, small_limits())
}

/// Returns the ids of the calls in an entry.
fn calls(item: &Item) -> Vec<CallId> {
    match item {
        Item::Assistant { calls, .. } => calls.iter().map(|call| call.id.clone()).collect(),
        _ => Vec::new(),
    }
}

/// Returns the ids of the calls that a step makes, in the thread itself and for its children.
fn made(step: &Step) -> Vec<CallId> {
    let of_write = |write: &Write| match write {
        Write::Append { entry, .. } | Write::Hold { entry, .. } | Write::Backlog { entry, .. } => {
            calls(&entry.item)
        }
        Write::Spawn(spawn) => spawn.entries.iter().flat_map(|entry| calls(&entry.item)).collect(),
        _ => Vec::new(),
    };
    step.writes.iter().flat_map(of_write).collect()
}

fn ids_of(thread: &mut Thread, lines: &[&str]) -> Vec<CallId> {
    lines.iter().flat_map(|line| made(&thread.step_line(line).expect("a step"))).collect()
}

#[test]
fn a_call_id_has_at_most_40_letters_digits_and_underscores() {
    let ids = ids_of(&mut with_incarnation(u64::MAX), LINES);
    assert_eq!(ids.len(), 11, "{ids:?}");
    for id in ids {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        assert!(id.as_str().len() <= 40 && id.as_str().bytes().all(plain), "{id}");
        assert!(id.as_str().starts_with("rap_ffffffffffffffff_"), "{id}");
    }
}

#[test]
fn a_call_id_is_short_enough_after_any_number_of_ids() {
    let json = r#"{"phase":"idle","turn":1,"turns_awake":0,"seq":0,"settled":0,"minted":9999999999999999997,
        "usage":{"input":0,"output":0}}"#;
    let mut thread = with_incarnation(u64::MAX);
    thread.head = serde_json::from_str::<Head>(json).unwrap();
    let ids = ids_of(&mut thread, &["said hi", "answer: a"]);
    assert_eq!(ids.iter().map(|id| id.as_str().len()).collect::<Vec<_>>(), [40]);
}

#[test]
fn no_id_is_made_twice_in_a_thread() {
    let mut thread = with_incarnation(7);
    let mut ids = ids_of(&mut thread, LINES);
    // Not even if the model repeats its ids.
    ids.extend(ids_of(
        &mut thread,
        &["interrupt", "said more", "answer: a a", "interrupt", "said more", "answer: a"],
    ));
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "{ids:?}");
}

#[test]
fn two_threads_that_do_the_same_make_different_ids() {
    let one = ids_of(&mut with_incarnation(7), LINES);
    let other = ids_of(&mut with_incarnation(8), LINES);
    assert_eq!(one.len(), other.len());
    assert!(one.iter().all(|id| !other.contains(id)));
}

#[test]
fn the_models_own_id_stays_with_its_call() {
    let mut thread = with_incarnation(7);
    thread.apply_all(&["said hi"]);
    let step = thread.step_line("answer: a ?").unwrap();
    let open: Vec<_> = step
        .writes
        .iter()
        .filter_map(|write| match write {
            Write::Open(open) => Some((open.id.as_str(), open.model_id.as_ref().map(CallId::as_str))),
            _ => None,
        })
        .collect();
    assert_eq!(open, [("rap_0000000000000007_1", Some("a")), ("rap_0000000000000007_2", None)]);
}

/// Ids and incarnations of children are derived, so that a repeated step makes the same ones.
#[test]
fn children_have_ids_and_incarnations_of_their_own() {
    let mut ids = BTreeSet::new();
    let mut incarnations = BTreeSet::from([7]);
    let mut parent = with_incarnation(7);
    parent.apply_all(&["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    for number in 0..100 {
        let before = parent.clone();
        let child = parent.spawn("event s: ding, child");
        assert_eq!(before.clone().spawn("event s: ding, child").identity, child.identity);
        let mut grandchild = child.clone();
        grandchild.apply_all(&["answer: u", "subscribed u: ok", "answer done:"]);
        let grandchild = grandchild.spawn("event u: ding, child");
        for identity in [&child.identity, &grandchild.identity] {
            assert!(ids.insert(identity.id.clone()), "{identity:?} after {number}");
            assert!(incarnations.insert(identity.incarnation), "{identity:?} after {number}");
        }
        assert_eq!((child.identity.depth, grandchild.identity.depth), (1, 2));
        parent.apply_all(&[&format!("child closed {}", child.identity.id)]);
    }
}

/// Lists that are sorted by id are therefore in order of age.
#[test]
fn the_id_of_a_child_begins_with_the_time() {
    let mut parent = with_incarnation(7);
    parent.now = Timestamp(0x0123_4567_89ab);
    parent.step(Input::UserMessage { message: "hi".into(), on_busy: OnBusy::Join }).unwrap();
    let child = parent.spawn("answer: p=spawn(dig)");
    assert_eq!(child.identity.id.as_str().split_at(12).0, "t123456789ab");
}
