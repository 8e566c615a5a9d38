//! Calls: timeouts, failures, questions to the user, views.

use std::time::Duration;

use rap_agent::{Limits, Server};

use crate::notation::{Thread, check, check_with, small_limits};

/// Proves: LC-15
#[test]
fn a_call_that_could_not_be_delivered_gets_an_error_and_its_late_result_is_accepted() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        call failed a              -> asking 2; settle a Failed; a: Error: refused; ask 2
        call failed a              -> ignored: SettledCall
        answer sorry:              -> idle; assistant sorry
        returned a: after all      -> asking 3; settle a Returned; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: after all; ask 3
        returned a: after all      -> ignored: Duplicate
        ",
    );
}

/// Proves: LC-28
#[test]
fn a_call_times_out_after_the_call_timeout() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        after 99s                  -> prepared
        timed out a                -> ignored: NotDue
        after 1s                   -> prepared
        timed out a                -> waiting; settle a TimedOut; a: Error: no result came within 100 seconds; it may still follow
        timed out a                -> ignored: SettledCall
        subscribed a: late         -> waiting; settle a Returned; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: late The subscription was not kept: its confirmation came after the call had ended. Subscribe again if needed.; notify cancel a
        returned b: 2              -> asking 2; settle b Returned; b: 2; release 2 UntilBatchCloses; ask 2
        ",
    );
}

#[test]
fn a_tool_server_can_have_a_call_timeout_of_its_own() {
    let limits = |own| Limits {
        call_timeouts: [(Server("https://tools.example".into()), own)].into(),
        ..small_limits()
    };
    for begin in [&["said hi", "answer: a"][..], &["said hi", "answer: a=approve", "chose a 0"]] {
        let mut own = Thread::after(limits(Some(Duration::from_secs(7))), begin);
        assert_eq!(own.take("after 7s"), "prepared");
        assert!(own.take("timed out a").contains("Error: no result came within 7 seconds"), "{begin:?}");
        let mut none = Thread::after(limits(None), begin);
        none.take("after 5000s");
        assert_eq!(none.take("timed out a"), "ignored: NotDue");
    }
}

#[test]
fn a_background_call_that_fails_enters_as_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        said hurry                 -> asking 2; a: still running; the result will follow; b: still running; the result will follow; user hurry; ask 2
        call failed a              -> asking 2; settle a Failed; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: Error: refused
        answer done:               -> asking 3; assistant done; release 2 UntilBatchCloses; ask 3
        after 100s                 -> prepared
        timed out b                -> asking 3; settle b TimedOut; hold assistant [rap_2 interrupt:b (result of a call that was still running)]; hold rap_2: Error: no result came within 100 seconds; it may still follow
        returned b: late           -> asking 3; settle b Returned; hold assistant [rap_3 interrupt:b (result of a call that was still running)]; hold rap_3: late
        ",
    );
}

#[test]
fn a_late_result_is_refused_if_held_input_is_full() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        call failed a              -> waiting; settle a Failed; a: Error: refused
        event s: one               -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: one
        event s: two               -> waiting; hold assistant [rap_2 interrupt:s (subscription remains active)]; hold rap_2: two
        returned a: late           -> ignored: Full(too much input is held)
        ",
    );
}

/// All results are read at once for the next model request, so their total size is limited. The confirmation of a
/// subscription counts, too.
#[test]
fn results_beyond_the_total_size_until_the_next_model_request_are_replaced_by_errors() {
    let limits = Limits { result_bytes: 5, ..small_limits() };
    check_with(
        limits,
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b c              -> waiting; assistant [a b c]; open a; open b; open c; invoke a; invoke b; invoke c
        returned a: 1234           -> waiting; settle a Returned; a: 1234
        subscribed b: 67           -> waiting; settle b Subscribed; b: Error: the call is over, but its result was not kept: it has 2 bytes, and all results that the model reads at once may have 5. Call fewer tools at once, or ask them for less.
        returned c: 5              -> asking 2; settle c Returned; c: 5; ask 2
        answer: d                  -> waiting; assistant [d]; open d; invoke d
        said hurry                 -> asking 3; d: still running; the result will follow; user hurry; ask 3
        returned d: 123456         -> asking 3; settle d Returned; hold assistant [rap_1 interrupt:d (result of a call that was still running)]; hold rap_1: Error: the call is over, but its result was not kept: it has 6 bytes, and all results that the model reads at once may have 5. Call fewer tools at once, or ask them for less.
        answer: e                  -> waiting; assistant [e]; open e; invoke e
        returned e: 12345          -> asking 4; settle e Returned; e: 12345; release 2 UntilBatchCloses; ask 4
        ",
    );
}

/// The model may repeat an id, or use one that looks like an id of the runtime or is malformed.
#[test]
fn the_runtime_makes_every_id_whatever_id_the_model_gave() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a a rap_7 ?        -> waiting; assistant [a a' rap_7 rap_1]; open a; open a'; open rap_7; rap_1: Error: this thread has 3 open calls, the most it may have; call again when some have returned; invoke a; invoke a'; invoke rap_7
        returned a': 1             -> waiting; settle a' Returned; a': 1
        returned a': 1             -> ignored: Duplicate
        returned a: 2              -> waiting; settle a Returned; a: 2
        ",
    );
}

#[test]
fn calls_beyond_the_limit_or_without_valid_arguments_get_an_error() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: o=malformed a b c d -> waiting; assistant [o a b c d]; o: Error: the arguments are not a JSON object; open a; open b; open c; d: Error: this thread has 3 open calls, the most it may have; call again when some have returned; invoke a; invoke b; invoke c
        said hurry                 -> asking 2; a: still running; the result will follow; b: still running; the result will follow; c: still running; the result will follow; user hurry; ask 2
        answer: e                  -> asking 3; assistant [e]; e: Error: this thread has 3 open calls, the most it may have; call again when some have returned; ask 3
        ",
    );
}

/// A tool may ask many questions one after the other.
#[test]
fn answered_questions_do_not_count_as_open_ones() {
    let mut thread = Thread::after(small_limits(), &["said hi", "answer: a b"]);
    for question in 0..8 {
        let shown = thread.take(&format!("choice a {question}"));
        assert!(shown.contains("a wants choice"), "{question}: {shown}");
        thread.apply_all(&["chose a 0"]);
    }
    // They are kept, so that a repeated one is recognised, up to a bound.
    assert_eq!(thread.take("choice a 1"), "ignored: Duplicate");
    assert_eq!(thread.take("choice b 9"), "ignored: Full(too many questions wait for the user)");
    thread.apply_all(&["returned a: 1", "choice b 9"]);
}

#[test]
fn an_answer_belongs_to_the_oldest_question_of_a_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        choice a 1                 -> waiting; a wants choice #1
        choice a 1                 -> ignored: Duplicate
        choice a 2                 -> waiting; a wants choice #2
        choice b 3                 -> ignored: Full(too many questions wait for the user)
        sign in b                  -> ignored: Full(too many questions wait for the user)
        chose a 2                  -> ignored: NoSuchChoice(2)
        chose a 0                  -> waiting; #1 is 0; deliver #1
        dismissed a                -> waiting; #2 is 1; deliver #2
        chose a 0                  -> ignored: NoQuestion
        choice a 1                 -> ignored: Duplicate
        returned a: 1              -> waiting; drop questions of a; settle a Returned; a: 1
        chose a 0                  -> ignored: NoQuestion
        choice a 4                 -> ignored: SettledCall
        sign in b                  -> waiting; b wants sign-in #3
        sign in b                  -> waiting; b wants sign-in #3
        chose b 0                  -> ignored: NoQuestion
        returned b: 2              -> asking 2; drop questions of b; settle b Returned; b: 2; ask 2
        ",
    );
}

#[test]
fn a_view_never_wakes_the_model() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a s                -> waiting; assistant [a s]; open a; open s; invoke a; invoke s
        view a                     -> waiting; view progress
        view a                     -> waiting; view progress
        returned a: 1              -> waiting; settle a Returned; a: 1
        view a                     -> waiting; view progress
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        view s                     -> asking 2; view progress
        cancel s                   -> asking 2; settle s Ended; notice subscription s was cancelled; notify cancel s
        view s                     -> ignored: SettledCall
        ",
    );
}
