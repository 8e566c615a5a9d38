//! Schedules, which are subscriptions of the runtime itself. The timer is set again whether or not an occurrence is skipped.

use crate::notation::{Thread, check, small_limits};

/// Returns a thread with a schedule `s` and a subscription `e`, in a turn, whose held input is full.
fn full(lines: &[&str]) -> Thread {
    let mut all = vec!["said hi", "answer: s=schedule(60) e", "subscribed e: ok", "event e: 1", "event e: 2"];
    all.extend(lines);
    Thread::after(small_limits(), &all)
}

#[test]
fn an_occurrence_is_skipped_if_held_input_is_full() {
    full(&["after 60s"]).check(
        "
        ticked s: tea, next 120    -> asking 2; s at 120s
        ticked s: tea, next 120    -> ignored: NotDue
        answer done:               -> asking 3; assistant done; release 4 UntilBatchCloses; ask 3
        after 60s                  -> prepared
        ticked s: tea, next 180    -> asking 3; hold assistant [rap_3 interrupt:s (subscription remains active)]; hold rap_3: tea; s at 180s
        ",
    );
}

#[test]
fn the_last_occurrence_is_tried_again_if_held_input_is_full() {
    full(&["after 60s"]).check(
        "
        ticked s: tea              -> asking 2; s at 120s
        ticked s: tea              -> ignored: NotDue
        after 60s                  -> prepared
        ticked s: tea              -> asking 2; s at 180s
        answer done:               -> asking 3; assistant done; release 4 UntilBatchCloses; ask 3
        after 60s                  -> prepared
        ticked s: tea              -> asking 3; hold assistant [rap_3 interrupt:s (subscription has ended)]; hold rap_3: tea; settle s Ended
        ",
    );
}

#[test]
fn a_schedule_whose_next_time_is_unknown_is_kept_and_does_not_fire_until_it_is_known() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        after 60s                  -> prepared
        ticked s: tea, next unknown -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: tea; s at 3660s; ask 3
        answer ok:                 -> idle; assistant ok
        after 3600s                -> prepared
        ticked s: tea, next unknown -> idle; s at 7260s
        after 3600s                -> prepared
        ticked s: tea, next 7300   -> idle; s at 7300s
        ticked s: tea, next 7300   -> ignored: NotDue
        after 40s                  -> prepared
        ticked s: tea, next 7360   -> asking 4; assistant [rap_2 interrupt:s (subscription remains active)]; rap_2: tea; s at 7360s; ask 4
        ",
    );
}

#[test]
fn a_schedule_that_cannot_be_read_is_kept_without_an_event() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        after 60s                  -> prepared
        timed out s                -> idle; s at 3660s
        ",
    );
}

#[test]
fn a_schedule_that_turns_out_to_be_over_sends_a_last_event() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        after 60s                  -> prepared
        ticked s: tea, next unknown -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: tea; s at 3660s; ask 3
        answer ok:                 -> idle; assistant ok
        after 3600s                -> prepared
        ticked s: tea              -> asking 4; assistant [rap_2 interrupt:s (subscription has ended)]; rap_2: tea; settle s Ended; ask 4
        ",
    );
}

#[test]
fn setting_the_clock_back_does_not_end_a_schedule() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        after 60s                  -> prepared
        clock back 50s             -> prepared
        ticked s: tea, next 70     -> ignored: NotDue
        after 50s                  -> prepared
        ticked s: tea, next 120    -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: tea; s at 120s; ask 3
        ",
    );
}

/// After the clock was set back, the next occurrence is earlier than the stored one.
#[test]
fn setting_the_clock_back_does_not_delay_a_schedule() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s=schedule(60)     -> asking 2; assistant [s]; open s; settle s Subscribed; s at 60s; s: scheduled; ask 2
        answer ok:                 -> idle; assistant ok
        clock back 50s             -> prepared
        ticked s: tea, next 10     -> idle; s at 10s
        ticked s: tea, next 10     -> ignored: NotDue
        after 60s                  -> prepared
        ticked s: tea, next 70     -> asking 3; assistant [rap_1 interrupt:s (subscription remains active)]; rap_1: tea; s at 70s; ask 3
        ",
    );
}

#[test]
fn a_paused_thread_holds_its_occurrences() {
    let lines = ["said hi", "answer: s=schedule(60)", "too long: much", "after 60s"];
    Thread::after(small_limits(), &lines).check(
        "
        ticked s: tea, next 120    -> paused; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: tea; s at 120s
        resume                     -> asking 3; release 2 UntilBatchCloses; ask 3
        ",
    );
}
