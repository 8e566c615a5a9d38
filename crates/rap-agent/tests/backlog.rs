//! Events that are for children, as tables in the notation of the rules: one child at a time, the rest waits.

// Each test takes what it needs of this.
#[allow(dead_code)]
mod notation;

use notation::{check, check_child, check_with, narrow};
use rap_agent::Limits;

/// There is room for more children than one subscription may have at work.
fn check_wide(table: &str) {
    check_with(Limits { children: 3, ..narrow() }, table);
}

#[test]
fn a_flood_costs_one_child_at_a_time_and_loses_nothing() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child, id e1   -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b; mark e1
        event s: b, child, id e1   -> ignored: Duplicate
        event s: c, child          -> idle; shelve of s assistant [rap_3 interrupt:s (subscription remains active)]; shelve of s rap_3: c
        event s: d, child          -> ignored: Full(too many events wait for a child)
        child closed t1            -> idle; born t2 at 4 (asking 1, 4 from the shelf of s, runtime you are a thread of your own, made for t…)
        event s: d, child          -> idle; shelve of s assistant [rap_4 interrupt:s (subscription remains active)]; shelve of s rap_4: d
        child closed t2            -> idle; born t3 at 4 (asking 1, 2 from the shelf of s, runtime you are a thread of your own, made for t…)
        ",
    );
}

/// Whoever takes them up reads them all at once, so a few large ones are as much as many small ones.
#[test]
fn what_waits_is_bounded_by_its_size_as_well() {
    let room_for_one = Limits { held: 100, held_bytes: 1, ..narrow() };
    check_with(
        room_for_one.clone(),
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        event s: c, child          -> ignored: Full(too many events wait for a child)
        child closed t1            -> idle; born t2 at 4 (asking 1, 2 from the shelf of s, runtime you are a thread of your own, made for t…)
        event s: c, child          -> idle; shelve of s assistant [rap_3 interrupt:s (subscription remains active)]; shelve of s rap_3: c
        ",
    );
    check_with(
        room_for_one,
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s a                -> waiting; assistant [s a]; open s; open a; invoke s; invoke a
        subscribed s: ok           -> waiting; settle s Subscribed; s: ok
        event s: b                 -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: b
        event s: c                 -> ignored: Full(too much input is held)
        returned a: 1              -> asking 2; settle a Returned; a: 1; release 2 Held; ask 2
        event s: c                 -> asking 2; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: c
        ",
    );
}

#[test]
fn a_final_event_lets_what_waits_drain() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        event s: c, child, final   -> idle; shelve of s assistant [rap_3 interrupt:s (subscription has ended)]; shelve of s rap_3: c; settle s Ended
        event s: d, child          -> ignored: EndedSubscription
        child closed t1            -> idle; born t2 at 4 (asking 1, 4 from the shelf of s, runtime you are a thread of your own, made for t…)
        child closed t2            -> idle
        ",
    );
}

#[test]
fn cancelling_drops_what_waits_and_says_how_much() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        event s: c, child          -> idle; shelve of s assistant [rap_3 interrupt:s (subscription remains active)]; shelve of s rap_3: c
        cancel s                   -> idle; notice subscription s was cancelled; discard what waits of s; notice of the events of s, 2 that waited for a …; settle s Ended; notify cancel s
        child closed t1            -> idle
        ",
    );
}

#[test]
fn a_model_that_cancels_drops_what_waits() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        said stop                  -> asking 3; user stop; ask 3
        answer: c=cancel(s)        -> asking 4; assistant [c]; settle s Ended; discard what waits of s; notice of the events of s, 1 that waited for a …; c: subscription s was cancelled; notify cancel s; ask 4
        ",
    );
}

#[test]
fn closing_drops_what_waits() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        close                      -> closed; settle s Ended; discard what waits of s; notice of the events of s, 1 that waited for a …; notice the thread was closed; notify close; tell t1 Close
        ",
    );
}

#[test]
fn a_child_that_rests_frees_its_place() {
    check_wide(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer done:               -> idle; assistant done
        event s: a, child          -> idle; born t1 at 4 (asking 1, assistant [rap_1 interrupt:s (subscription remains active)], rap_1: a, runtime you are a thread of your own, made for t…)
        event s: b, child          -> idle; shelve of s assistant [rap_2 interrupt:s (subscription remains active)]; shelve of s rap_2: b
        child rests t1             -> idle; born t2 at 4 (asking 1, 2 from the shelf of s, runtime you are a thread of your own, made for t…)
        child rests t1             -> ignored: Duplicate
        child closed t2            -> idle
        child closed t1            -> idle
        ",
    );
}

#[test]
fn a_child_that_has_long_been_waiting_rests() {
    check_child(
        "
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        due                        -> ignored: NotDue
        after 60s                  -> time passes
        due                        -> waiting; tell t0 ChildRests
        due                        -> ignored: NotDue
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; notify close; tell t0 ChildClosed
        ",
    );
}

#[test]
fn a_child_that_failed_rests() {
    check_child(
        "
        failed                     -> failed until 30s; notice the model could not be asked: 503; tell t0 ChildRests
        resume                     -> asking 2; ask 2
        answer done:               -> closed; assistant done; notice the thread was closed; notify close; tell t0 ChildClosed
        ",
    );
}
