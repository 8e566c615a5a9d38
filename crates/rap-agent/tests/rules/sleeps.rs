//! Sleeps and waits, which enqueued messages end.

use crate::notation::check;

#[test]
fn an_enqueued_message_ends_a_wait() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=wait             -> waiting; assistant [a]; open a
        said more, enqueue         -> asking 2; a: ended because something else happened; settle a Returned; user more; ask 2
        answer: b=sleep(5000) c=wait -> waiting; assistant [b c]; open b; open c
        said more, enqueue         -> asking 3; b: ended because something else happened; settle b Returned; c: ended because something else happened; settle c Returned; user more; ask 3
        ",
    );
}

#[test]
fn an_enqueued_message_ends_a_sleep_when_the_other_calls_have_returned() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=sleep(5000) b c  -> waiting; assistant [a b c]; open a; open b; open c; invoke b; invoke c
        said more, enqueue         -> waiting; queue user more
        returned b: 1              -> waiting; settle b Returned; b: 1
        said and more, enqueue     -> waiting; queue user and more
        returned c: 2              -> asking 2; settle c Returned; c: 2; a: ended because something else happened; settle a Returned; release 2 UntilIdle; ask 2
        answer done:               -> idle; assistant done
        ",
    );
}

/// However that call is settled.
#[test]
fn an_enqueued_message_ends_a_wait_when_the_last_other_call_is_settled() {
    let table = |input: &str, settled: &str| {
        format!(
            "
            said hi                    -> asking 1; user hi; ask 1
            answer: a=wait b           -> waiting; assistant [a b]; open a; open b; invoke b
            said more, enqueue         -> waiting; queue user more
            after 100s                 -> prepared
            {input}                    -> asking 2; {settled}; a: ended because something else happened; settle a Returned; release 1 UntilIdle; {}ask 2
            ",
            if input == "cancel b" { "notify cancel b; " } else { "" },
        )
    };
    check(&table("call failed b", "settle b Failed; b: Error: refused"));
    check(&table("cancel b", "b: interrupted; settle b Interrupted"));
    let late = "Error: no result came within 100 seconds; it may still follow";
    check(&table("timed out b", &format!("settle b TimedOut; b: {late}")));
    check(&table("subscribed b: ok", "settle b Subscribed; b: ok"));
}

#[test]
fn a_call_that_waits_for_approval_is_not_a_sleep() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a=wait b=approve   -> waiting; assistant [a b]; open a; open b; b wants approval #1
        said more, enqueue         -> waiting; queue user more
        dismissed b                -> asking 2; drop questions of b; settle b Interrupted; b: refused: the user did not allow this call; nothing was done; a: ended because something else happened; settle a Returned; release 1 UntilIdle; ask 2
        ",
    );
}

#[test]
fn a_message_that_was_enqueued_before_the_answer_ends_its_wait_at_once() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        said more, enqueue         -> asking 1; queue user more
        answer: a=wait             -> asking 2; assistant [a]; open a; a: ended because something else happened; settle a Returned; release 1 UntilIdle; ask 2
        said and more, enqueue     -> asking 2; queue user and more
        answer: b=sleep(50) c      -> waiting; assistant [b c]; open b; open c; invoke c
        returned c: 1              -> asking 3; settle c Returned; c: 1; b: ended because something else happened; settle b Returned; release 1 UntilIdle; ask 3
        ",
    );
}

#[test]
fn an_enqueued_message_ends_a_wait_for_a_call_in_the_background() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: r                  -> waiting; assistant [r]; open r; invoke r
        said more                  -> asking 2; r: still running; the result will follow; user more; ask 2
        answer: a=wait             -> waiting; assistant [a]; open a
        said more, enqueue         -> asking 3; a: ended because something else happened; settle a Returned; user more; ask 3
        ",
    );
}

#[test]
fn events_come_before_enqueued_messages() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: s                  -> waiting; assistant [s]; open s; invoke s
        subscribed s: ok           -> asking 2; settle s Subscribed; s: ok; ask 2
        event s: x                 -> asking 2; hold assistant [rap_1 interrupt:s (subscription remains active)]; hold rap_1: x
        said more, enqueue         -> asking 2; queue user more
        answer: a=wait             -> asking 3; assistant [a]; open a; a: ended because something else happened; settle a Returned; release 2 UntilBatchCloses; ask 3
        answer: b=wait             -> asking 4; assistant [b]; open b; b: ended because something else happened; settle b Returned; release 1 UntilIdle; ask 4
        ",
    );
}

#[test]
fn sleeps_and_waits_are_open_calls() {
    check(
        "
        said hi                    -> asking 1; user hi; ask 1
        answer: a b=wait c=sleep(50) d=sleep(50) e=wait f -> waiting; assistant [a b c d e f]; open a; open b; open c; d: Error: this thread has 3 open calls, the most it may have; call again when some have returned; e: Error: this thread has 3 open calls, the most it may have; call again when some have returned; f: Error: this thread has 3 open calls, the most it may have; call again when some have returned; invoke a
        ",
    );
}
