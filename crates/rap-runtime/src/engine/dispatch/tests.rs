//! The decisions of the dispatcher as tables. `tests/random.rs` drives it against a model of the store.

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

/// Work of a session, told apart by its number.
fn ask(session: u64, number: u64) -> WorkKey {
    WorkKey::Ask { thread: key(session), turn: number }
}

fn call(number: u64) -> CallId {
    CallId::new(format!("c{number}")).unwrap()
}

fn invoke(number: u64) -> WorkKey {
    WorkKey::Invoke { thread: key(1), call: call(number) }
}

/// A dispatcher whose only slot for questions is taken.
fn busy(bounds: Bounds) -> Dispatcher {
    let dispatcher = Dispatcher::with_bounds(SLOTS, bounds);
    assert!(dispatcher.offer(&queue(WorkKind::Ask), session(99), ask(99, 0)).is_some());
    dispatcher
}

/// What is done next, as text: `1.2` begins work 2 of session 1, `read 3 x2` reads behind session 3, two items each.
fn next(dispatcher: &Dispatcher) -> String {
    match dispatcher.next(&queue(WorkKind::Ask), NOW) {
        Next::Start(WorkKey::Ask { thread, turn }, _) => {
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

/// Frees the slot and says what is done next.
fn free(dispatcher: &Dispatcher) -> String {
    dispatcher.release(&queue(WorkKind::Ask));
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
fn each_queue_has_slots_of_its_own() {
    let dispatcher = Dispatcher::new(SLOTS);
    for (kind, slots) in [(WorkKind::Ask, 1), (WorkKind::Invoke, 2), (WorkKind::Answer, 3)] {
        for destination in ["a", "b"] {
            let queue = WorkQueue { kind, destination: destination.into() };
            let begun = (0..9).filter(|number| {
                let thread = key(10 * number + u64::from(destination == "b"));
                let key = match kind {
                    WorkKind::Ask => WorkKey::Ask { thread, turn: 1 },
                    WorkKind::Invoke => WorkKey::Invoke { thread, call: call(1) },
                    _ => WorkKey::Answer { thread, no: 1 },
                };
                dispatcher.offer(&queue, session(*number), key).is_some()
            });
            assert_eq!(begun.count(), slots, "{kind:?} {destination}");
            assert!(matches!(dispatcher.next(&queue, NOW), Next::Nothing));
        }
    }
    assert_eq!(dispatcher.running(), [("ask", 2), ("invoke", 4), ("answer", 6), ("check", 0)]);
}

#[test]
fn work_begins_at_once_if_a_slot_is_free_and_nobody_waits() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    assert_eq!(next(&dispatcher), "nothing");
    assert!(offer(&dispatcher, 1, 1));
    assert!(!offer(&dispatcher, 1, 1), "it is in progress");
    assert!(!offer(&dispatcher, 1, 2));
    assert_eq!(next(&dispatcher), "nothing");
    // The slot is free, but somebody waits for it.
    dispatcher.release(&queue(WorkKind::Ask));
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
        // What waits is not added again.
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
    // Only the first of a session that has more in the store stays here, so that it is not ahead of others.
    offer(&dispatcher, 2, 1);
    assert_eq!([free(&dispatcher), free(&dispatcher)], ["1.1", "2.1"]);
    assert_eq!(free(&dispatcher), "read  x2");
    assert_eq!(next(&dispatcher), "nothing", "it is being read");
    // There may be more than two, so it is read again, and again one of each session only.
    dispatcher.end(&ask(1, 1));
    dispatcher.end(&ask(2, 1));
    dispatcher.read(&queue(WorkKind::Ask), &page(None, 2), found(&[(1, 2), (1, 3)], None));
    assert_eq!(next(&dispatcher), "1.2");
    assert_eq!(free(&dispatcher), "read  x2");
    dispatcher.end(&ask(1, 2));
    dispatcher.read(&queue(WorkKind::Ask), &page(None, 2), found(&[(1, 3)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["1.3", "nothing"]);
}

#[test]
fn a_page_fills_the_slots_that_are_free() {
    let dispatcher = Dispatcher::with_bounds(Slots { ask: 3, ..SLOTS }, SMALL);
    dispatcher.look_in_store(&queue(WorkKind::Ask));
    assert_eq!(next(&dispatcher), "read  x2");
    let work = found(&[(1, 1), (1, 2), (2, 1), (2, 2)], None);
    dispatcher.read(&queue(WorkKind::Ask), &page(None, 2), work);
    assert_eq!([next(&dispatcher), next(&dispatcher), next(&dispatcher)], ["1.1", "2.1", "1.2"]);
    // The fourth has to be found again.
    assert_eq!(free(&dispatcher), "read  x2");
}

#[test]
fn a_session_that_had_a_turn_since_the_last_page_is_behind_the_others() {
    let dispatcher = busy(SMALL);
    for (of, number) in [(3, 1), (3, 2), (3, 3), (1, 1)] {
        offer(&dispatcher, of, number);
    }
    let order = [free(&dispatcher), free(&dispatcher), free(&dispatcher)];
    assert_eq!(order, ["3.1", "1.1", "read  x2"]);
    let work = found(&[(1, 2), (2, 1), (3, 2), (3, 3)], None);
    dispatcher.read(&queue(WorkKind::Ask), &page(None, 2), work);
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["2.1", "3.2", "1.2"]);
}

#[test]
fn in_a_round_of_several_pages_each_session_has_one_turn() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    dispatcher.look_in_store(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    let first = [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1)];
    dispatcher.read(&asks, &page(None, 2), found(&first, Some(4)));
    let mut order: Vec<String> = vec![next(&dispatcher)];
    // New work of sessions does not overtake those on the next page.
    for (of, number) in [(1, 3), (9, 1)] {
        assert!(!offer(&dispatcher, of, number));
    }
    order.extend((0..4).map(|_| free(&dispatcher)));
    assert_eq!(order, ["1.1", "2.1", "3.1", "4.1", "read 4 x1"]);
    dispatcher.read(&asks, &page(Some(4), 1), found(&[(7, 1), (9, 1)], None));
    // The round wraps, because it did not begin with this page.
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["7.1", "9.1", "read  x2"]);
    for (of, number) in [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (9, 1)] {
        dispatcher.end(&ask(of, number));
    }
    dispatcher.read(&asks, &page(None, 2), found(&[(1, 2), (3, 2)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher), free(&dispatcher)], ["1.2", "3.2", "nothing"]);
}

#[test]
fn work_that_comes_while_a_page_is_read_is_not_forgotten() {
    let dispatcher = busy(SMALL);
    let asks = queue(WorkKind::Ask);
    for number in 1..=3 {
        offer(&dispatcher, 1, number);
    }
    assert_eq!([free(&dispatcher), free(&dispatcher)], ["1.1", "read  x2"]);
    // Session 2 had no turn yet; session 1 had, and its work may not be on the page.
    offer(&dispatcher, 2, 1);
    offer(&dispatcher, 1, 4);
    dispatcher.read(&asks, &page(None, 9), found(&[(1, 2), (1, 3)], None));
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["2.1", "1.2"]);
    assert_eq!(free(&dispatcher), "read  x2");
    // A page that could not be read is read again.
    dispatcher.not_read(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    // So is one during whose reading the clock told of more.
    assert_eq!(dispatcher.look_in_store_for_all(), std::slice::from_ref(&asks));
    dispatcher.read(&asks, &page(None, 2), found(&[], None));
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.read(&asks, &page(None, 2), found(&[], None));
    assert_eq!(next(&dispatcher), "nothing");
}

#[test]
fn a_page_that_is_not_all_is_followed_by_another() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    dispatcher.look_in_store(&asks);
    assert_eq!(next(&dispatcher), "read  x2");
    dispatcher.read(&asks, &page(None, 2), DueWork { more: true, ..found(&[(1, 1)], None) });
    assert_eq!([next(&dispatcher), free(&dispatcher)], ["1.1", "read  x2"]);
    // But not if nothing of it can be begun: that would have no end.
    dispatcher.read(&asks, &page(None, 2), DueWork { more: true, ..found(&[], None) });
    assert_eq!(next(&dispatcher), "nothing");
}

#[test]
fn work_in_progress_is_not_begun_again() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let asks = queue(WorkKind::Ask);
    assert!(offer(&dispatcher, 1, 1));
    dispatcher.look_in_store(&asks);
    dispatcher.release(&asks);
    let Next::Read(read) = dispatcher.next(&asks, NOW) else { panic!("there may be work") };
    assert_eq!(read.skip, HashSet::from([ask(1, 1)]));
    // It was read before it began.
    dispatcher.read(&asks, &read, found(&[(1, 1)], None));
    assert_eq!(next(&dispatcher), "nothing");
    dispatcher.end(&ask(1, 1));
    assert!(offer(&dispatcher, 1, 1));
}

#[test]
fn cancelled_work_is_told() {
    let dispatcher = Dispatcher::new(SLOTS);
    let invokes = queue(WorkKind::Invoke);
    let cancelled = dispatcher.offer(&invokes, session(1), invoke(1)).unwrap();
    dispatcher.cancel(&invoke(2));
    assert!(!cancelled.is_cancelled());
    dispatcher.cancel(&invoke(1));
    assert!(cancelled.is_cancelled());
    // It is accepted all the same, which is not recorded any more.
    assert!(!dispatcher.accept(key(1), &call(1)));
    assert!(dispatcher.take_accepted().is_empty());
    assert_eq!(dispatcher.running()[1], ("invoke", 0));
}

#[test]
fn accepted_invocations_are_kept_until_that_is_recorded() {
    let dispatcher = Dispatcher::new(Slots { invoke: 9, ..SLOTS });
    let invokes = queue(WorkKind::Invoke);
    for number in 1..=4 {
        assert!(dispatcher.offer(&invokes, session(1), invoke(number)).is_some());
    }
    assert!(dispatcher.accept(key(1), &call(1)), "the first has to be recorded");
    assert!(!dispatcher.accept(key(1), &call(2)), "together with the first");
    assert!(!dispatcher.accept(key(1), &call(3)));
    assert!(!dispatcher.accept(key(1), &call(9)), "it is not in progress");
    // A call that has settled since need not be recorded.
    dispatcher.cancel(&invoke(2));
    let accepted = vec![(key(1), call(1)), (key(1), call(3))];
    assert_eq!(dispatcher.take_accepted(), accepted);
    assert!(dispatcher.take_accepted().is_empty());
    // It could not be recorded: it is kept, and not begun again meanwhile.
    dispatcher.keep_accepted(accepted.clone());
    assert!(dispatcher.offer(&invokes, session(1), invoke(1)).is_none());
    assert!(!dispatcher.accept(key(1), &call(4)));
    assert_eq!(dispatcher.take_accepted().len(), 3);
    for number in [1, 3, 4] {
        dispatcher.end(&invoke(number));
    }
    assert_eq!(dispatcher.running()[1], ("invoke", 0));
}

#[test]
fn a_slot_that_was_released_is_used_by_the_next() {
    let dispatcher = Dispatcher::with_bounds(SLOTS, SMALL);
    let invokes = queue(WorkKind::Invoke);
    for number in 1..=5 {
        dispatcher.offer(&invokes, session(number), invoke(number));
    }
    // An accepted invocation occupies no slot.
    assert!(dispatcher.accept(key(1), &call(1)));
    dispatcher.release(&invokes);
    assert!(matches!(dispatcher.next(&invokes, NOW), Next::Start(begun, _) if begun == invoke(3)));
    assert!(matches!(dispatcher.next(&invokes, NOW), Next::Nothing));
    // More releases than there were slots in use change nothing.
    for _ in 0..9 {
        dispatcher.release(&invokes);
    }
    let begun = std::iter::from_fn(|| match dispatcher.next(&invokes, NOW) {
        Next::Start(key, _) => Some(key),
        _ => None,
    });
    assert_eq!(begun.collect::<Vec<_>>(), [invoke(4), invoke(5)]);
}

#[test]
fn a_round_in_which_all_due_work_is_in_progress_is_the_last() {
    let dispatcher = busy(Bounds { items: 2, per_session: 2 });
    let asks = queue(WorkKind::Ask);
    dispatcher.look_in_store(&asks);
    dispatcher.release(&asks);
    assert!(next(&dispatcher).starts_with("read"));
    dispatcher.read(&asks, &page(None, 2), found(&[], Some(2)));
    assert!(next(&dispatcher).starts_with("read"));
    dispatcher.read(&asks, &page(Some(2), 1), found(&[], None));
    assert_eq!(next(&dispatcher), "nothing");
}
