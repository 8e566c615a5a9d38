//! Conversations between the user and the model: batches of calls, joining, interrupting, enqueued messages, failures.

use crate::notation::check;

/// Proves: LC-30
#[test]
fn a_batch_closes_with_its_last_result_and_repeated_results_are_ignored() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer looking: a b        -> waiting; assistant looking[a b]; open a; open b; invoke a; invoke b
        returned b: 2              -> waiting; settle b Returned; b: 2
        returned b: 2              -> ignored: Duplicate
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        returned a: 1              -> ignored: Duplicate
        answer done:               -> idle; assistant done
        answer of 2 done:          -> ignored: StaleTurn
        ",
    );
}

/// Proves: SE-22, TR-22
#[test]
fn a_result_of_a_call_that_was_never_made_is_ignored() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        returned a: 1              -> ignored: UnknownCall
        subscribed a: ok           -> ignored: UnknownCall
        event a: x                 -> ignored: UnknownCall
        cancel a                   -> ignored: SettledCall
        call failed a              -> ignored: SettledCall
        sign in a                  -> ignored: SettledCall
        view a                     -> ignored: SettledCall
        ",
    );
}

/// Proves: CN-14, CN-24
#[test]
fn a_late_result_of_an_interrupted_call_is_ignored() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        cancel a                   -> waiting; a: interrupted; settle a Interrupted; notify cancel a
        cancel a                   -> ignored: SettledCall
        returned a: late           -> ignored: SettledCall
        subscribed a: late         -> ignored: SettledCall
        interrupt                  -> idle; b: interrupted; settle b Interrupted; notify cancel b
        returned b: late           -> ignored: SettledCall
        said and now               -> asking 2; user and now; ask 2
        returned b: late           -> ignored: SettledCall
        ",
    );
}

/// Proves: LC-19
#[test]
fn a_joined_call_gets_a_placeholder_and_its_result_follows_as_a_synthetic_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        returned a: 1              -> waiting; settle a Returned; a: 1
        said hurry                 -> asking 2; b: still running; the result will follow; user hurry; ask 2
        answer on it:              -> idle; assistant on it
        returned b: 2              -> asking 3; settle b Returned; assistant [rap_1 interrupt:b (result of a call that was still running)]; rap_1: 2; ask 3
        returned b: 2              -> ignored: Duplicate
        answer done:               -> idle; assistant done
        ",
    );
}

#[test]
fn a_result_of_a_background_call_is_held_while_the_thread_is_busy() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said hurry                 -> asking 2; a: still running; the result will follow; user hurry; ask 2
        answer: b                  -> waiting; assistant [b]; open b; invoke b
        returned a: 1              -> waiting; settle a Returned; hold assistant [rap_1 interrupt:a (result of a call that was still running)]; hold rap_1: 1
        returned b: 2              -> asking 3; settle b Returned; b: 2; release 2 UntilBatchCloses; ask 3
        ",
    );
}

#[test]
fn held_input_comes_before_a_later_message() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event s: ding              -> waiting; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding
        said hurry                 -> asking 3; a: still running; the result will follow; release 2 UntilBatchCloses; user hurry; ask 3
        ",
    );
}

#[test]
fn a_batch_closes_when_its_last_call_is_cancelled() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        returned a: 1              -> waiting; settle a Returned; a: 1
        cancel b                   -> asking 2; b: interrupted; settle b Interrupted; notify cancel b; ask 2
        ",
    );
}

#[test]
fn user_messages_drop_at_most_two_answers_in_a_row_and_do_not_wait_for_calls() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        said two                   -> asking 2; user two; abandon 1; ask 2
        said three                 -> asking 3; user three; abandon 2; ask 3
        said four                  -> asking 3; hold user four
        answer: a                  -> asking 4; assistant [a]; open a; a: still running; the result will follow; release 1 UntilBatchCloses; invoke a; ask 4
        answer of 3: a             -> ignored: StaleTurn
        answer done:               -> idle; assistant done
        returned a: 1              -> asking 5; settle a Returned; assistant [rap_1 interrupt:a (result of a call that was still running)]; rap_1: 1; ask 5
        ",
    );
}

#[test]
fn an_answer_without_calls_releases_a_held_message() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        said two                   -> asking 2; user two; abandon 1; ask 2
        said three                 -> asking 3; user three; abandon 2; ask 3
        said four                  -> asking 3; hold user four
        answer done:               -> asking 4; assistant done; release 1 UntilBatchCloses; ask 4
        answer all done:           -> idle; assistant all done
        ",
    );
}

#[test]
fn an_interrupting_message_cancels_every_open_call() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said more                  -> asking 2; a: still running; the result will follow; user more; ask 2
        answer: b                  -> waiting; assistant [b]; open b; invoke b
        said stop, interrupt       -> asking 3; b: interrupted; settle b Interrupted; notice call a of look was interrupted; settle a Interrupted; user stop; notify cancel b; notify cancel a; ask 3
        returned a: late           -> ignored: SettledCall
        returned b: late           -> ignored: SettledCall
        ",
    );
}

#[test]
fn enqueued_messages_wait_until_the_thread_would_be_idle() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        said later, enqueue        -> asking 1; queue user later
        said much later, enqueue   -> asking 1; queue user much later
        said too much, enqueue     -> ignored: Full(too much input is held)
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        event a: x                 -> ignored: NotYetSubscribed
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        answer done:               -> asking 3; assistant done; release 2 UntilIdle; ask 3
        answer done:               -> idle; assistant done
        ",
    );
}

#[test]
fn an_interrupt_releases_enqueued_messages() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        said later, enqueue        -> waiting; queue user later
        interrupt                  -> asking 2; a: interrupted; settle a Interrupted; release 1 UntilIdle; notify cancel a; ask 2
        ",
    );
}

/// Proves: LC-22
#[test]
fn a_failed_turn_is_retried_and_the_user_message_stays() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        due                        -> ignored: NotDue
        after 30s                  -> prepared
        due                        -> asking 2; ask 2
        due                        -> ignored: NotDue
        failed                     -> failed until 60s; notice the model request failed: 503
        after 30s                  -> prepared
        due                        -> asking 3; ask 3
        after 60s                  -> prepared
        failed                     -> failed until 240s; notice the model request failed: 503
        after 4000s                -> prepared
        due                        -> asking 4; ask 4
        failed                     -> failed; notice the model request failed: 503
        due                        -> ignored: NotDue
        resume                     -> asking 5; ask 5
        failed                     -> failed until 4150s; notice the model request failed: 503
        ",
    );
}

#[test]
fn a_user_message_restarts_the_retry_period_of_a_failed_thread() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed permanently         -> failed; notice the model request failed: 503
        after 4000s                -> prepared
        said try again             -> asking 2; user try again; ask 2
        failed                     -> failed until 4030s; notice the model request failed: 503
        interrupt                  -> idle
        after 4000s                -> prepared
        said and now               -> asking 3; user and now; ask 3
        failed                     -> failed until 8030s; notice the model request failed: 503
        ",
    );
}

#[test]
fn failed_turns_do_not_count_as_turns_without_external_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        failed                     -> failed until 30s; notice the model request failed: 503
        after 30s                  -> prepared
        due                        -> asking 2; ask 2
        failed                     -> failed until 60s; notice the model request failed: 503
        after 30s                  -> prepared
        due                        -> asking 3; ask 3
        failed                     -> failed until 120s; notice the model request failed: 503
        after 60s                  -> prepared
        due                        -> asking 4; ask 4
        failed                     -> failed until 240s; notice the model request failed: 503
        after 120s                 -> prepared
        due                        -> asking 5; ask 5
        answer: x=refuse           -> asking 6; assistant [x]; x: Error: no such tool; ask 6
        answer: y=refuse           -> asking 7; assistant [y]; y: Error: no such tool; ask 7
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without new ext…
        ",
    );
}

#[test]
fn input_held_by_a_failed_thread_resets_the_turn_count() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        answer: x=refuse           -> asking 3; assistant [x]; x: Error: no such tool; ask 3
        failed                     -> failed until 30s; notice the model request failed: 503
        event s: ding              -> failed until 30s; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: ding
        after 30s                  -> prepared
        due                        -> asking 4; release 2 UntilBatchCloses; ask 4
        answer: x=refuse           -> asking 5; assistant [x]; x: Error: no such tool; ask 5
        answer: y=refuse           -> asking 6; assistant [y]; y: Error: no such tool; ask 6
        answer: z=refuse           -> paused; assistant [z]; z: Error: no such tool; notice paused: 3 turns in a row without new ext…
        ",
    );
}

#[test]
fn a_thread_is_paused_after_too_many_turns_without_external_input() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=refuse           -> asking 2; assistant [a]; a: Error: no such tool; ask 2
        answer: b=refuse           -> asking 3; assistant [b]; b: Error: no such tool; ask 3
        answer: c=refuse           -> paused; assistant [c]; c: Error: no such tool; notice paused: 3 turns in a row without new ext…
        said held                  -> paused; hold user held
        said held, enqueue         -> paused; queue user held
        said held                  -> paused; hold user held
        said too much              -> ignored: Full(too much input is held)
        resume                     -> asking 4; release 2 UntilBatchCloses; ask 4
        resume                     -> ignored: NothingToResume
        answer done:               -> asking 5; assistant done; release 1 UntilIdle; ask 5
        ",
    );
}
