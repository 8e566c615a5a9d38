//! Table tests of the dispatcher's decisions. `tests/random.rs` runs it against a model of the store.

mod random;

use super::*;

const SLOTS: Slots = Slots { ask: 1, invoke: 2, answer: 3, check: 4 };
const SMALL: Bounds = Bounds { items: 4, per_session: 2 };
const NOW: Timestamp = Timestamp(1000);

fn queue(kind: WorkKind) -> WorkQueue {
    WorkQueue { kind, destination: "a".into() }
}

fn key(number: u64) -> ThreadKey {
    ThreadKey::from_bytes(number.to_be_bytes())
}

fn session(number: u64) -> SessionKey {
    SessionKey::of_root(key(number))
}

/// Work item `number` of a session.
fn ask(session: u64, number: u64) -> WorkKey {
    WorkKey::Ask { thread: key(session), turn: number }
}

fn call(number: u64) -> CallId {
    CallId::new(format!("c{number}")).unwrap()
}

fn invoke(number: u64) -> WorkKey {
    WorkKey::Invoke { thread: key(1), call: call(number) }
}

/// Returns a dispatcher whose only slot for model requests is in use.
fn busy(bounds: Bounds) -> Dispatcher {
    let dispatcher = Dispatcher::with_bounds(SLOTS, bounds);
    assert!(dispatcher.offer(&queue(WorkKind::Ask), session(99), ask(99, 0)).is_some());
    dispatcher
}

/// Returns the next action as text: `1.2` starts item 2 of session 1, `read 3 x2` reads the sessions after session 3,
/// up to two items each.
fn next(dispatcher: &Dispatcher) -> String {
    match dispatcher.next(&queue(WorkKind::Ask), NOW) {
        Next::Start(_, WorkKey::Ask { thread, turn }, _) => {
            format!("{}.{turn}", u64::from_be_bytes(thread.to_bytes()))
        }
        Next::Start(..) => "other work".into(),
        Next::Read(page) => {
            let after = page.after.map(|after| {
                (0..100).find(|number| session(*number) == after).map_or("?".into(), |n| n.to_string())
            });
            format!("read {} x{}", after.unwrap_or_default(), page.per_session)
        }
        Next::Nothing => "nothing".into(),
    }
}

/// Releases a slot of a queue, whichever session holds it.
fn release(dispatcher: &Dispatcher, queue: &WorkQueue) {
    let holder = dispatcher.state().queues[queue].slots.by_session.keys().next().copied();
    if let Some(session) = holder {
        dispatcher.release(queue, session);
    }
}

/// Releases a slot and returns the next action.
fn free(dispatcher: &Dispatcher) -> String {
    release(dispatcher, &queue(WorkKind::Ask));
    next(dispatcher)
}

fn page(after: Option<u64>, per_session: usize) -> DuePage {
    let after = after.map(session);
    DuePage { now: NOW, after, sessions: SMALL.items, per_session, skip: HashSet::new() }
}

fn found(work: &[(u64, u64)], after: Option<u64>) -> DueWork {
    let work = work.iter().map(|(of, number)| (session(*of), ask(*of, *number))).collect();
    DueWork { work, after: after.map(session), more: false }
}

fn offer(dispatcher: &Dispatcher, of: u64, number: u64) -> bool {
    dispatcher.offer(&queue(WorkKind::Ask), session(of), ask(of, number)).is_some()
}

#[test]
fn reserved_work_holds_its_slot_until_it_is_offered_or_released() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let reserve = |of: u64| dispatcher.reserve(&queue(WorkKind::Ask), session(of), &ask(of, 1));
    assert!(reserve(1));
    // It holds the only slot.
    assert!(!reserve(1) && !reserve(2) && !offer(&dispatcher, 2, 1));
    assert!(offer(&dispatcher, 1, 1));
    // The work was started, so there is nothing to release.
    assert!(dispatcher.unreserve(&ask(1, 1)).is_none());
    assert_eq!(dispatcher.busy(), 1);
    dispatcher.end(&ask(1, 1));
    assert_eq!(free(&dispatcher), "2.1");
    dispatcher.end(&ask(2, 1));
    assert_eq!(free(&dispatcher), "nothing");
    // Work whose commit failed is never offered.
    assert!(reserve(3));
    assert_eq!(dispatcher.unreserve(&ask(3, 1)), Some(queue(WorkKind::Ask)));
    assert!(dispatcher.busy() == 0 && reserve(4));
    // A page does not start it a second time.
    dispatcher.page_read(&queue(WorkKind::Ask), &page(None, 2), found(&[(4, 1)], None));
    assert!(offer(&dispatcher, 4, 1));
    dispatcher.end(&ask(4, 1));
    assert_eq!(free(&dispatcher), "nothing");
}

/// The write that moves it may return before or after its reservation in the first queue is released.
#[test]
fn work_that_is_moved_to_another_queue_holds_a_slot_of_that_queue_only() {
    let home = queue(WorkKind::Ask);
    let to = WorkQueue { kind: WorkKind::Ask, destination: "b".into() };
    for moved_first in [true, false] {
        let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
        let unreserve = || assert_eq!(dispatcher.unreserve(&ask(1, 1)), Some(home.clone()));
        assert!(dispatcher.reserve(&home, session(1), &ask(1, 1)));
        assert!(dispatcher.hold(&ask(1, 1)) && !dispatcher.hold(&ask(1, 1)));
        if !moved_first {
            unreserve();
        }
        // It does not start in the first queue meanwhile.
        dispatcher.check_store(&home);
        dispatcher.page_read(&home, &page(None, 2), found(&[(1, 1)], None));
        assert_eq!(next(&dispatcher), "nothing");
        assert!(dispatcher.has_free_slot(&to, session(1)));
        dispatcher.end(&ask(1, 1));
        assert!(dispatcher.offer(&to, session(1), ask(1, 1)).is_some());
        assert!(!dispatcher.has_free_slot(&to, session(2)));
        if moved_first {
            unreserve();
        }
        assert!(dispatcher.has_free_slot(&home, session(2)), "moved first: {moved_first}");
        dispatcher.end(&ask(1, 1));
        dispatcher.release(&to, session(1));
        assert_eq!(dispatcher.busy(), 0);
    }
}

#[test]
fn each_queue_has_its_own_slots() {
    let dispatcher = Dispatcher::new(SLOTS);
    for (kind, slots) in [(WorkKind::Ask, 1), (WorkKind::Invoke, 2), (WorkKind::Answer, 3)] {
        for destination in ["a", "b"] {
            let queue = WorkQueue { kind, destination: destination.into() };
            let started = (0..9).filter(|number| {
                let thread = key(10 * number + u64::from(destination == "b"));
                let key = match kind {
                    WorkKind::Ask => WorkKey::Ask { thread, turn: 1 },
                    WorkKind::Invoke => WorkKey::Invoke { thread, call: call(1) },
                    _ => WorkKey::Answer { thread, number: 1 },
                };
                dispatcher.offer(&queue, session(*number), key).is_some()
            });
            assert_eq!(started.count(), slots, "{kind:?} {destination}");
            assert!(matches!(dispatcher.next(&queue, NOW), Next::Nothing));
        }
    }
    assert_eq!(dispatcher.in_progress(), [("ask", 2), ("invoke", 4), ("answer", 6), ("check", 0)]);
}

#[test]
fn work_starts_at_once_if_a_slot_is_free_and_nothing_waits() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    assert_eq!(next(&dispatcher), "nothing");
    assert!(offer(&dispatcher, 1, 1));
    assert!(!offer(&dispatcher, 1, 1), "already in progress");
    assert!(!offer(&dispatcher, 1, 2));
    assert_eq!(next(&dispatcher), "nothing");
    // The slot is free, but other work waits for it.
    release(&dispatcher, &queue(WorkKind::Ask));
    assert!(!offer(&dispatcher, 2, 1));
    assert_eq!(next(&dispatcher), "1.2");
    assert_eq!(free(&dispatcher), "2.1");
    assert_eq!(free(&dispatcher), "nothing");
    assert!(offer(&dispatcher, 3, 1));
}

#[test]
fn sessions_take_turns() {
    let dispatcher = busy(Bounds { items: 100, per_session: 10 });
    for (of, number) in [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)] {
        assert!(!offer(&dispatcher, of, number));
        // Work that is queued is not added again.
        assert!(!offer(&dispatcher, of, number));
    }
    let order: Vec<String> = (0..7).map(|_| free(&dispatcher)).collect();
    assert_eq!(order, ["1.1", "2.1", "3.1", "1.2", "2.2", "1.3", "nothing"]);
}

#[test]
fn work_beyond_the_bounds_is_read_from_the_store() {
    let dispatcher = busy(SMALL);
    for number in 1..=5 {
        offer(&dispatcher, 1, number);
    }
    // Only the first item of each session stays in memory, so that a session with more in the store does not get ahead.
    offer(&dispatcher, 2, 1);
    assert_eq!([free(&dispatcher), free(&dispatcher)], ["1.1", "2.1"]);
    assert_eq!(free(&dispatcher), "read  x2");
    assert_eq!(next(&dispatcher), "nothing", "a page is being read");
    // A session may have more than two items, so the store is read again, and again one item of each session is taken.
    dispatcher.end(&ask(1, 1));
    dispatcher.end(&ask(2, 1));
    dispatcher.page_read(&queue(WorkKind::Ask), &page(None, 2), found(&[(1, 2), (1, 3)], None));
    assert_eq!(next(&dispatcher), "1.2");
    assert_eq!(free(&dispatcher), "read  x2");
    dispatcher.end(&ask(1, 2));
    dispatcher.page_read(&queue(WorkKind::Ask), &page(None, 2), found(&[(1, 3)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["1.3", "nothing"]);
}

#[test]
fn a_page_fills_the_free_slots() {
    let dispatcher = Dispatcher::with_bounds(Slots { ask: 3, ..SLOTS }, SMALL);
    dispatcher.check_store(&queue(WorkKind::Ask));
    assert_eq!(next(&dispatcher), "read  x2");
    let work = found(&[(1, 1), (1, 2), (2, 1), (2, 2)], None);
    dispatcher.page_read(&queue(WorkKind::Ask), &page(None, 2), work);
    assert_eq!([next(&dispatcher), next(&dispatcher), next(&dispatcher)], ["1.1", "2.1", "1.2"]);
    // The fourth item has to be read again.
    assert_eq!(free(&dispatcher), "read  x2");
}

#[test]
fn a_session_that_had_a_turn_since_the_last_page_comes_after_the_others() {
    let dispatcher = busy(SMALL);
    for (of, number) in [(3, 1), (3, 2), (3, 3), (1, 1)] {
        offer(&dispatcher, of, number);
    }
    let order = [free(&dispatcher), free(&dispatcher), free(&dispatcher)];
    assert_eq!(order, ["3.1", "1.1", "read  x2"]);
    let work = found(&[(1, 2), (2, 1), (3, 2), (3, 3)], None);
    dispatcher.page_read(&queue(WorkKind::Ask), &page(None, 2), work);
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["2.1", "3.2", "1.2"]);
}

#[test]
fn in_a_round_of_several_pages_each_session_has_one_turn() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    dispatcher.check_store(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    let first = [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1)];
    dispatcher.page_read(&asks, &page(None, 2), found(&first, Some(4)));
    let mut order: Vec<String> = vec![next(&dispatcher)];
    // New work does not overtake the sessions of the next page.
    for (of, number) in [(1, 3), (9, 1)] {
        assert!(!offer(&dispatcher, of, number));
    }
    order.extend((0..4).map(|_| free(&dispatcher)));
    assert_eq!(order, ["1.1", "2.1", "3.1", "4.1", "read 4 x1"]);
    dispatcher.page_read(&asks, &page(Some(4), 1), found(&[(7, 1), (9, 1)], None));
    // The round starts over, because this page was not its first.
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["7.1", "9.1", "read  x2"]);
    for (of, number) in [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (9, 1)] {
        dispatcher.end(&ask(of, number));
    }
    dispatcher.page_read(&asks, &page(None, 2), found(&[(1, 2), (3, 2)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["1.2", "3.2", "nothing"]);
}

#[test]
fn work_that_is_added_while_a_page_is_read_is_not_lost() {
    let dispatcher = busy(SMALL);
    let asks = queue(WorkKind::Ask);
    for number in 1..=3 {
        offer(&dispatcher, 1, number);
    }
    assert_eq!([free(&dispatcher), free(&dispatcher)], ["1.1", "read  x2"]);
    // Session 2 had no turn yet. Session 1 had one, and its new work may be missing from the page.
    offer(&dispatcher, 2, 1);
    offer(&dispatcher, 1, 4);
    dispatcher.page_read(&asks, &page(None, 9), found(&[(1, 2), (1, 3)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["2.1", "1.2"]);
    assert_eq!(free(&dispatcher), "read  x2");
    // A page that could not be read is read again.
    dispatcher.read_failed(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    // So is a page during whose read the clock reported more work.
    assert_eq!(dispatcher.check_store_for_all(), std::slice::from_ref(&asks));
    dispatcher.page_read(&asks, &page(None, 2), found(&[], None));
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.page_read(&asks, &page(None, 2), found(&[], None));
    assert_eq!(next(&dispatcher), "nothing");
}

#[test]
fn an_incomplete_page_is_followed_by_another() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    dispatcher.check_store(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.page_read(&asks, &page(None, 2), DueWork { more: true, ..found(&[(1, 1)], None) });
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["1.1", "read  x2"]);
    // But not if none of its work can be started: that would repeat forever.
    dispatcher.page_read(&asks, &page(None, 2), DueWork { more: true, ..found(&[], None) });
    assert_eq!(next(&dispatcher), "nothing");
}

#[test]
fn work_in_progress_is_not_started_again() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    assert!(offer(&dispatcher, 1, 1));
    dispatcher.check_store(&asks);
    release(&dispatcher, &asks);
    let Next::Read(read) = dispatcher.next(&asks, NOW) else { panic!("expected a read") };
    assert_eq!(read.skip, HashSet::from([ask(1, 1)]));
    // The page was read before the work started.
    dispatcher.page_read(&asks, &read, found(&[(1, 1)], None));
    assert_eq!(next(&dispatcher), "nothing");
    dispatcher.end(&ask(1, 1));
    assert!(offer(&dispatcher, 1, 1));
}

#[test]
fn work_that_waits_in_two_queues_is_started_once() {
    let dispatcher = busy(SMALL);
    assert!(!offer(&dispatcher, 1, 1));
    assert!(!offer(&dispatcher, 2, 1));
    let other = WorkQueue { kind: WorkKind::Ask, destination: "other".into() };
    assert!(dispatcher.offer(&other, session(1), ask(1, 1)).is_some());
    assert_eq!(free(&dispatcher), "2.1");
    assert_eq!(free(&dispatcher), "nothing");
    assert_eq!(dispatcher.busy(), 1);
}

#[test]
fn cancelling_work_in_progress_cancels_its_token() {
    let dispatcher = Dispatcher::new(SLOTS);
    let invokes = queue(WorkKind::Invoke);
    let cancelled = dispatcher.offer(&invokes, session(1), invoke(1)).unwrap();
    dispatcher.cancel(&invoke(2));
    assert!(!cancelled.is_cancelled());
    dispatcher.cancel(&invoke(1));
    assert!(cancelled.is_cancelled());
    // If it is accepted nevertheless, that is not recorded.
    assert!(!dispatcher.accept(key(1), &call(1)));
    assert!(dispatcher.take_accepted().is_empty());
    assert_eq!(dispatcher.in_progress()[1], ("invoke", 0));
}

#[test]
fn accepted_invocations_are_kept_until_their_acceptance_is_recorded() {
    let dispatcher = Dispatcher::new(Slots { invoke: 9, ..SLOTS });
    let invokes = queue(WorkKind::Invoke);
    for number in 1..=4 {
        assert!(dispatcher.offer(&invokes, session(1), invoke(number)).is_some());
    }
    assert!(dispatcher.accept(key(1), &call(1)), "the first one triggers a write");
    assert!(!dispatcher.accept(key(1), &call(2)), "recorded together with the first");
    assert!(!dispatcher.accept(key(1), &call(3)));
    assert!(!dispatcher.accept(key(1), &call(9)), "not in progress");
    // The acceptance of a settled call is not recorded.
    dispatcher.cancel(&invoke(2));
    let accepted = vec![(key(1), call(1)), (key(1), call(3))];
    assert_eq!(dispatcher.take_accepted(), accepted);
    assert!(dispatcher.take_accepted().is_empty());
    // The write failed: the invocations are kept and not started again.
    dispatcher.keep_accepted(accepted.clone());
    assert!(dispatcher.offer(&invokes, session(1), invoke(1)).is_none());
    assert!(!dispatcher.accept(key(1), &call(4)));
    assert_eq!(dispatcher.take_accepted().len(), 3);
    for number in [1, 3, 4] {
        dispatcher.end(&invoke(number));
    }
    assert_eq!(dispatcher.in_progress()[1], ("invoke", 0));
}

#[test]
fn a_released_slot_is_used_by_the_next_item() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let invokes = queue(WorkKind::Invoke);
    for number in 1..=5 {
        dispatcher.offer(&invokes, session(number), invoke(number));
    }
    // An accepted invocation occupies no slot.
    assert!(dispatcher.accept(key(1), &call(1)));
    release(&dispatcher, &invokes);
    assert!(matches!(dispatcher.next(&invokes, NOW), Next::Start(_, started, _) if started == invoke(3)));
    assert!(matches!(dispatcher.next(&invokes, NOW), Next::Nothing));
    // Releasing more slots than are in use changes nothing.
    for _ in 0..9 {
        release(&dispatcher, &invokes);
    }
    let started = std::iter::from_fn(|| match dispatcher.next(&invokes, NOW) {
        Next::Start(_, key, _) => Some(key),
        _ => None,
    });
    assert_eq!(started.collect::<Vec<_>>(), [invoke(4), invoke(5)]);
}

#[test]
fn no_page_is_read_after_a_round_in_which_all_due_work_is_in_progress() {
    let dispatcher = busy(Bounds { items: 2, per_session: 2 });
    let asks = queue(WorkKind::Ask);
    dispatcher.check_store(&asks);
    release(&dispatcher, &asks);
    assert!(next(&dispatcher).starts_with("read"));
    dispatcher.page_read(&asks, &page(None, 2), found(&[], Some(2)));
    assert!(next(&dispatcher).starts_with("read"));
    dispatcher.page_read(&asks, &page(Some(2), 1), found(&[], None));
    assert_eq!(next(&dispatcher), "nothing");
}

#[test]
fn a_session_leaves_reserved_slots_to_sessions_that_hold_none() {
    let dispatcher = Dispatcher::new(Slots { ask: 8, ..SLOTS });
    let asks = queue(WorkKind::Ask);
    let started = (1..=9).filter(|number| offer(&dispatcher, 1, *number)).count();
    assert_eq!((started, next(&dispatcher)), (6, "nothing".into()));
    // Another session starts at once, but not twice.
    assert!(!offer(&dispatcher, 2, 1));
    assert!(!offer(&dispatcher, 2, 2));
    assert_eq!([next(&dispatcher), next(&dispatcher)], ["2.1", "nothing"]);
    assert!(!offer(&dispatcher, 3, 1));
    assert_eq!([next(&dispatcher), next(&dispatcher)], ["3.1", "nothing"]);
    // The common slots are free again when the first session gives back two, after the reserved ones.
    dispatcher.release(&asks, session(1));
    dispatcher.release(&asks, session(1));
    assert_eq!(next(&dispatcher), "nothing");
    dispatcher.release(&asks, session(1));
    assert_eq!([next(&dispatcher), next(&dispatcher)], ["1.7", "nothing"]);
}

#[test]
fn the_store_is_not_read_again_and_again_for_sessions_that_must_wait() {
    let dispatcher = Dispatcher::with_bounds(Slots { ask: 4, ..SLOTS }, SMALL);
    let asks = queue(WorkKind::Ask);
    for number in 1..=9 {
        offer(&dispatcher, 1, number);
    }
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.page_read(&asks, &page(None, 2), found(&[(1, 4), (1, 5)], None));
    assert_eq!(next(&dispatcher), "nothing");
    // New work of another session is found at once, in memory or in the store.
    offer(&dispatcher, 2, 1);
    assert_eq!(next(&dispatcher), "2.1");
    // A released slot causes one more read.
    dispatcher.release(&asks, session(1));
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.page_read(&asks, &page(None, 2), found(&[(1, 4), (1, 5)], None));
    assert_eq!(next(&dispatcher), "nothing");
    dispatcher.release(&asks, session(2));
    assert_eq!(next(&dispatcher), "1.4");
}
