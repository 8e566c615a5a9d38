//! Tests of the rules: inputs of a call, and what it does.

use super::*;

const BOUNDS: Bounds = Bounds { max_events: 3, deliver_for: Duration::from_secs(60) };

/// Applies inputs to a new call, and lists the messages, drops and ignored inputs, and the last state.
fn play(inputs: &[Input]) -> String {
    play_at(inputs.iter().map(|input| (0, input)))
}

/// Like [`play`], with the time of each input in seconds.
fn play_at<'a>(inputs: impl Iterator<Item = (i64, &'a Input)>) -> String {
    let mut head = Head::NEW;
    let mut log = Vec::new();
    for (at, input) in inputs {
        match step(head, input.clone(), Timestamp(at * 1_000), &BOUNDS) {
            Err(ignored) => log.push(format!("{ignored:?}")),
            Ok(next) => {
                head = next.head;
                log.extend((next.drop == Dropped::Everything).then(|| "drop all".to_owned()));
                log.extend(next.post.map(describe));
            }
        }
    }
    format!("{} -> {:?}", log.join(", "), head.state)
}

fn describe(post: OutboxContent) -> String {
    match post {
        OutboxContent::Result { body: Body::Text(text), subscription, .. } => {
            format!("{}[{text}]", if subscription { "confirm" } else { "result" })
        }
        OutboxContent::Result { body, .. } => format!("result[{body:?}]"),
        OutboxContent::UserMessage(message) => format!("message[{message:?}]"),
        OutboxContent::Event { number, text, is_final, .. } => {
            format!("{}{number}[{text}]", if is_final { "final" } else { "event" })
        }
    }
}

fn returned(text: &str) -> Input {
    Input::Returned(Returned::Result { body: Body::Text(text.into()), display_as: Vec::new() })
}
fn failed(text: &str) -> Input {
    Input::Returned(Returned::Error(text.into()))
}
fn confirmed() -> Input {
    Input::Confirmed("ok".into())
}
fn event() -> Input {
    Input::Event { text: "e".into(), associative: false }
}
fn finished() -> Input {
    Input::FinalEvent { text: "f".into(), associative: false }
}
const GOT_RESULT: Input = Input::Delivered(MessageKind::Result);
const GOT_EVENT: Input = Input::Delivered(MessageKind::Event);

fn check(inputs: &[Input], expected: &str) {
    assert_eq!(play(inputs), expected, "{inputs:?}");
}

/// Proves: LC-08, LC-10, LC-26, LC-27
#[test]
fn a_call_has_one_result() {
    check(&[returned("r")], "result[r] -> Ending");
    check(&[returned("r"), GOT_RESULT], "result[r] -> Settled");
    check(&[returned("r"), returned("again")], "result[r], Ended -> Ending");
    check(&[failed("no")], "result[Error: no] -> Ending");
    check(&[event()], "Ended -> Running");
}

/// Proves: CN-03, CN-08, CN-09, CN-13
#[test]
fn a_cancelled_call_reports_it_once_and_a_result_in_the_outbox_is_kept() {
    use Input::{Cancelled, GraceOver};
    check(&[Cancelled], " -> Running");
    check(&[Cancelled, GraceOver], "result[Error: cancelled] -> Ending");
    check(&[Cancelled, Cancelled, GraceOver], "Ended, result[Error: cancelled] -> Ending");
    check(&[Cancelled, returned("part")], "result[part] -> Ending");
    check(&[Cancelled, failed("stopped")], "result[Error: cancelled] -> Ending");
    check(&[Cancelled, Input::Returned(Returned::Nothing)], "result[Error: cancelled] -> Ending");
    check(&[Cancelled, returned("part"), GraceOver], "result[part], Ended -> Ending");
    check(&[Cancelled, GraceOver, returned("late")], "result[Error: cancelled], Ended -> Ending");
    check(&[returned("r"), Cancelled, GOT_RESULT], "result[r], Ended -> Settled");
    check(&[returned("r"), GOT_RESULT, Cancelled], "result[r], Ended -> Settled");
    check(&[GraceOver], "Ended -> Running");
}

#[test]
fn a_cancelled_call_sends_nothing_but_its_result() {
    let message = Input::UserMessage(UserMessage::View { view_type: "v".into(), content: Value::Null });
    for input in [confirmed(), message] {
        check(&[Input::Cancelled, input], "Ended -> Running");
    }
    for on_restart in [OnRestart::RunAgain, OnRestart::Fail] {
        let after = [Input::Cancelled, Input::Restarted(on_restart)];
        check(&after, "result[Error: cancelled] -> Ending");
    }
    check(&[Input::Cancelled, Input::Closed], "drop all -> Settled");
}

/// Proves: CN-11, CN-25
#[test]
fn a_call_that_takes_too_long_ends_with_an_error_and_a_confirmed_subscription_does_not() {
    let late = Input::TimedOut(Duration::from_secs(5400));
    let error = format!("result[Error: {}]", timed_out(Duration::from_secs(5400)));
    assert!(error.contains("did not finish within 90 minutes"), "{error}");
    check(std::slice::from_ref(&late), &format!("{error} -> Ending"));
    check(&[late.clone(), returned("late")], &format!("{error}, Ended -> Ending"));
    check(&[returned("r"), late.clone()], "result[r], Ended -> Ending");
    check(&[confirmed(), late.clone(), event()], "confirm[ok], Ended, event1[e] -> Subscribed");
    check(&[Input::Cancelled, late], "result[Error: cancelled] -> Ending");
}

#[test]
fn time_counts_from_the_acceptance_and_a_restarted_call_has_some_in_any_case() {
    let left = |timeout, accepted, now| {
        let at = |seconds: i64| Timestamp(seconds * 1_000);
        time_left(Duration::from_secs(timeout), at(accepted), at(now)).as_secs()
    };
    assert_eq!(left(86_400, 100, 100), 86_400);
    assert_eq!(left(86_400, 100, 3_700), 82_800);
    assert_eq!(left(86_400, 100, 1_000_000), 600);
    assert_eq!(left(5, 100, 1_000_000), 5);
    assert_eq!(left(5, 100, 0), 5, "the clock was set back");
}

/// Proves: TC-09, TC-11
#[test]
fn a_closed_thread_receives_nothing_more() {
    check(&[Input::Closed], "drop all -> Settled");
    check(&[Input::Closed, returned("late"), Input::Closed], "drop all, Ended, Ended -> Settled");
    check(&[returned("r"), Input::Closed], "result[r], drop all -> Settled");
    check(&[confirmed(), event(), Input::Closed], "confirm[ok], event1[e], drop all -> Settled");
}

/// Proves: SE-04, SE-11
#[test]
fn events_come_after_the_confirmation_and_before_the_final_event() {
    check(&[confirmed(), event(), event()], "confirm[ok], event1[e], event2[e] -> Subscribed");
    check(&[confirmed(), confirmed()], "confirm[ok], Ended -> Subscribed");
    check(&[confirmed(), finished(), event()], "confirm[ok], final1[f], Ended -> Ending");
    check(&[confirmed(), finished(), GOT_RESULT, GOT_EVENT], "confirm[ok], final1[f] -> Settled");
    let ended = "confirm[ok], final1[the subscription has ended] -> Ending";
    check(&[confirmed(), Input::Returned(Returned::Nothing)], ended);
    check(&[confirmed(), failed("no")], "confirm[ok], final1[Error: no] -> Ending");
    check(&[failed("no such feed")], "result[Error: no such feed] -> Ending");
}

/// Proves: SE-19, SE-26
#[test]
fn a_cancelled_subscription_sends_nothing_more() {
    let started = [confirmed(), GOT_RESULT, event()];
    let after = |inputs: &[Input]| [&started[..], inputs].concat();
    check(&after(&[Input::Cancelled]), "confirm[ok], event1[e], drop all -> Settled");
    check(&after(&[Input::Cancelled, event()]), "confirm[ok], event1[e], drop all, Ended -> Settled");
    let final_waits = "confirm[ok], event1[e], final2[f], drop all -> Settled";
    check(&after(&[finished(), Input::Cancelled]), final_waits);
    // An undelivered confirmation is replaced by the result "cancelled".
    let unseen = "confirm[ok], event1[e], drop all, result[Error: cancelled] -> Ending";
    check(&[confirmed(), event(), Input::Cancelled], unseen);
    check(&[confirmed(), event(), Input::Cancelled, GOT_RESULT], &unseen.replace("Ending", "Settled"));
}

#[test]
fn the_number_of_events_in_the_outbox_is_limited() {
    let full = "confirm[ok], event1[e], event2[e], event3[e], Full -> Subscribed";
    check(&[confirmed(), event(), event(), event(), event()], full);
    let room = "confirm[ok], event1[e], event2[e], event3[e], event4[e] -> Subscribed";
    check(&[confirmed(), event(), event(), event(), GOT_EVENT, event()], room);
}

#[test]
fn asides_are_sent_while_the_call_runs_and_do_not_change_its_state() {
    let message = || Input::UserMessage(UserMessage::View { view_type: "v".into(), content: Value::Null });
    let shown = r#"message[View { view_type: "v", content: Null }]"#;
    check(&[message()], &format!("{shown} -> Running"));
    check(&[message(), returned("r")], &format!("{shown}, result[r] -> Ending"));
    check(&[returned("r"), message()], "result[r], Ended -> Ending");
    let delivered = [message(), returned("r"), Input::Delivered(MessageKind::UserMessage), GOT_RESULT];
    check(&delivered, &format!("{shown}, result[r] -> Settled"));
    let refused = [message(), returned("r"), Input::Refused(MessageKind::UserMessage, 410), GOT_RESULT];
    check(&refused, &format!("{shown}, result[r] -> Settled"));
    let full = vec![message(); MAX_USER_MESSAGES as usize + 1];
    assert!(play(&full).ends_with(", Full -> Running"));
}

/// Proves: LC-13, LC-14
#[test]
fn a_restart_runs_only_restartable_calls_again() {
    let again = Input::Restarted(OnRestart::RunAgain);
    let fail = Input::Restarted(OnRestart::Fail);
    check(std::slice::from_ref(&again), " -> Running");
    check(&[confirmed(), again.clone()], "confirm[ok], RunAgain -> Subscribed");
    check(&[confirmed(), fail.clone()], "confirm[ok], RunAgain -> Subscribed");
    check(std::slice::from_ref(&fail), &format!("result[Error: {RESTARTED}] -> Ending"));
    check(&[returned("r"), fail], "result[r], Ended -> Ending");
    let many = vec![again; MAX_RESTARTS as usize + 1];
    check(&many, &format!("result[Error: {KEEPS_CRASHING}] -> Ending"));
}

#[test]
fn a_refused_result_is_replaced_once_by_an_error_result() {
    let refused = |status| Input::Refused(MessageKind::Result, status);
    let reported = "result[r], drop all, result[Error: the result was refused (413)]";
    check(&[returned("r"), refused(413)], &format!("{reported} -> Ending"));
    check(&[returned("r"), refused(413), GOT_RESULT], &format!("{reported} -> Settled"));
    check(&[returned("r"), refused(413), refused(400)], &format!("{reported}, drop all -> Settled"));
    for status in [301, 401, 403, 404, 409, 410, 429] {
        check(&[returned("r"), refused(status)], "result[r], drop all -> Settled");
    }
    let unconfirmed =
        "confirm[ok], event1[e], drop all, result[Error: the result was refused (400)] -> Ending";
    check(&[confirmed(), event(), refused(400)], unconfirmed);
    check(&[confirmed(), event(), refused(410)], "confirm[ok], event1[e], drop all -> Settled");
}

#[test]
fn an_event_refused_with_404_or_410_ends_its_subscription() {
    let started = [confirmed(), GOT_RESULT, event(), event()];
    let after = |input: Input| [&started[..], &[input]].concat();
    let log = "confirm[ok], event1[e], event2[e]";
    for status in [404, 410] {
        check(&after(Input::Refused(MessageKind::Event, status)), &format!("{log}, drop all -> Settled"));
    }
    for status in [400, 401, 403, 413, 429] {
        check(&after(Input::Refused(MessageKind::Event, status)), &format!("{log} -> Subscribed"));
    }
    check(&[returned("r"), Input::GaveUp(MessageKind::Result)], "result[r], drop all -> Settled");
}

/// Proves: CN-25, TC-22
#[test]
fn a_subscription_ends_when_no_runtime_has_accepted_its_events_for_as_long_as_they_are_retried() {
    let (log, started) = ("confirm[ok], event1[e]", [confirmed(), GOT_RESULT, event()]);
    let after = |inputs: &[Input]| [&started[..], inputs].concat();
    check(&after(&[Input::GaveUp(MessageKind::Event)]), &format!("{log}, drop all -> Settled"));
    let refused = Input::Refused(MessageKind::Event, 401);
    let times = |times: &[i64], inputs: &[Input]| {
        let at = [0, 0, 0].iter().chain(times).copied();
        play_at(at.zip(&after(inputs)))
    };
    let again = [refused.clone(), event(), refused.clone()];
    assert_eq!(times(&[10, 69, 69], &again), format!("{log}, event2[e] -> Subscribed"));
    assert_eq!(times(&[10, 70, 70], &again), format!("{log}, event2[e], drop all -> Settled"));
    // One that is accepted in between shows that the runtime is there.
    let accepted = [refused.clone(), event(), GOT_EVENT, event(), refused];
    assert_eq!(times(&[10, 20, 20, 90, 90], &accepted), format!("{log}, event2[e], event3[e] -> Subscribed"));
}

#[test]
fn durations_are_written_in_whole_units() {
    let table = [
        (86_400_000, "24 hours"),
        (3_600_000, "1 hour"),
        (5_400_000, "90 minutes"),
        (61_000, "61 seconds"),
        (250, "250 milliseconds"),
        (0, "0 hours"),
    ];
    for (millis, expected) in table {
        assert_eq!(plain_duration(Duration::from_millis(millis)), expected);
    }
}
