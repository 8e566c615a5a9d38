//! The state machine of one call, as a pure function.
//!
//! Nothing here reads a clock, a database or the network. The journal loads a [`Head`], calls [`step`], and writes
//! the result in one transaction; see `journal.rs`.
//!
//! Invariants:
//! - A call has exactly one result, or none if its thread is closed first.
//! - Events come after the confirmation of a subscription. None come after a final event, a cancellation or the
//!   closing of the thread.
//! - A call that is neither [`State::Running`] nor [`State::Subscribed`] accepts no input from its handler.

use rap_protocol::{AuthUrl, Body, ERROR_PREFIX, ResponseUrl, Segment};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// The handler is running and there is no result yet.
    Running,
    /// A confirmed subscription that may still send events.
    Subscribed,
    /// The handler has finished, or its output is no longer wanted. The outbox is not empty yet.
    Ending,
    /// All messages were delivered, refused, given up or dropped.
    Settled,
}

impl State {
    /// Returns true if the call accepts input from its handler.
    pub(crate) fn is_live(self) -> bool {
        matches!(self, State::Running | State::Subscribed)
    }
}

/// The state of a call, as far as the rules need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) state: State,
    /// The result or the confirmation is in the outbox.
    pub(crate) result_waits: bool,
    /// Number of events in the outbox.
    pub(crate) events_wait: u32,
    /// Number of asides in the outbox.
    pub(crate) asides_wait: u32,
    /// Number of the next event, from 1.
    pub(crate) next_event: u64,
    /// The call was confirmed as a subscription.
    pub(crate) subscription: bool,
    /// The result was refused, and was replaced by an error result that says so.
    pub(crate) refusal_reported: bool,
    /// Number of crashes of the server while the call was running, since the last graceful shutdown.
    pub(crate) restarts: u32,
}

impl Head {
    /// A call that was just accepted. Equals the defaults of the journal's columns.
    #[cfg(test)]
    pub(crate) const NEW: Head = Head {
        state: State::Running,
        result_waits: false,
        events_wait: 0,
        asides_wait: 0,
        next_event: 1,
        subscription: false,
        refusal_reported: false,
        restarts: 0,
    };

    pub(crate) fn outbox_is_empty(&self) -> bool {
        self.state == State::Settled || !self.result_waits && self.events_wait == 0 && self.asides_wait == 0
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// The handler returned.
    Returned(Returned),
    /// The handler confirmed the subscription.
    Confirmed(String),
    /// The handler sends an event.
    Event { text: String, associative: bool },
    /// The handler sends the final event.
    FinalEvent { text: String, associative: bool },
    /// The handler shows something to the user or asks the user.
    Aside(Aside),
    /// The runtime cancelled the call.
    Cancelled,
    /// The runtime closed the thread.
    Closed,
    /// The server was restarted, and the call is unfinished.
    Restarted(OnRestart),
    /// A message was delivered and removed from the outbox.
    Delivered(MessageKind),
    /// A message was refused with this HTTP status and removed from the outbox.
    Refused(MessageKind, u16),
    /// A message could not be delivered in time and was removed from the outbox.
    GaveUp(MessageKind),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Returned {
    Result {
        body: Body,
        display_as: Vec<Segment>,
    },
    Error(String),
    /// The handler of a subscription returned without a final event.
    Nothing,
}

/// What happens to an unfinished call after a restart; see `Tool::restartable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRestart {
    RunAgain,
    Fail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Result,
    Event,
    Aside,
}

/// A message to the user while the call is running. The model does not see it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Aside {
    View {
        view_type: String,
        content: Value,
    },
    Choice {
        question: QuestionName,
        prompt: String,
        choices: Vec<String>,
        default: usize,
        response_url: ResponseUrl,
    },
    Authorise {
        question: QuestionName,
        auth_url: AuthUrl,
    },
}

/// Key of a question: a hash of the secret token in its URL.
pub(crate) type QuestionName = [u8; 32];

/// The result of [`step`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    pub(crate) head: Head,
    /// Messages to delete from the outbox, before `post` is added.
    pub(crate) drop: Dropped,
    pub(crate) post: Option<Post>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    Nothing,
    Everything,
}

/// A message to add to the outbox.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Post {
    Result { body: Body, display_as: Vec<Segment>, subscription: bool },
    Event { number: u64, text: String, associative: bool, is_final: bool },
    Aside(Aside),
}

/// Why an input has no effect. Each of these is a normal case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ignored {
    /// The call has ended, or the input does not apply in its state.
    Ended,
    /// The outbox has the maximum number of events or asides of this call.
    Full,
    /// The handler has to be started again.
    RunAgain,
}

/// Maximum number of asides of one call in the outbox.
pub(crate) const MAX_ASIDES: u32 = 64;

/// Number of crashes during a call after which it is not started again.
pub(crate) const MAX_RESTARTS: u32 = 20;

const RESTARTED: &str = "the server restarted during the call, so its outcome is unknown; \
                         check what was done before you call it again";
const KEEPS_CRASHING: &str = "the server crashed each time it ran this call, so it will not be tried again";

/// Applies `input` to a call. At most `max_events` events may be in the outbox.
pub(crate) fn step(head: Head, input: Input, max_events: u32) -> Result<Step, Ignored> {
    match input {
        _ if head.state == State::Settled => Err(Ignored::Ended),
        Input::Closed => Ok(head.settle()),
        Input::Delivered(kind) => Ok(head.left_outbox(kind)),
        Input::Refused(kind, status) => Ok(head.refused(kind, status)),
        Input::GaveUp(MessageKind::Result) => Ok(head.settle_unaccepted()),
        Input::GaveUp(kind) => Ok(head.left_outbox(kind)),
        Input::Cancelled => head.cancel(),
        _ if head.state == State::Ending => Err(Ignored::Ended),
        Input::Restarted(on_restart) => head.restart(on_restart),
        Input::Returned(returned) => Ok(head.end(returned)),
        Input::Confirmed(_) if head.subscription => Err(Ignored::Ended),
        Input::Confirmed(text) => Ok(head.confirm(text)),
        Input::Event { .. } | Input::FinalEvent { .. } if !head.subscription => Err(Ignored::Ended),
        Input::Event { .. } if head.events_wait >= max_events => Err(Ignored::Full),
        Input::Event { text, associative } => Ok(head.event(text, associative, false)),
        Input::FinalEvent { text, associative } => Ok(head.event(text, associative, true)),
        Input::Aside(_) if head.asides_wait >= MAX_ASIDES => Err(Ignored::Full),
        Input::Aside(aside) => Ok(head.aside(aside)),
    }
}

impl Head {
    fn then(self, drop: Dropped, post: Option<Post>) -> Step {
        Step { head: self, drop, post }
    }

    /// Ends the call and drops its outbox.
    fn settle(mut self) -> Step {
        (self.state, self.result_waits) = (State::Settled, false);
        (self.events_wait, self.asides_wait) = (0, 0);
        self.then(Dropped::Everything, None)
    }

    /// Ends the call, whose result no runtime accepted. The head keeps that: a status query must not reveal how the
    /// callback URL answered, because the caller chose it.
    fn settle_unaccepted(self) -> Step {
        let mut step = self.settle();
        step.head.result_waits = true;
        step
    }

    fn result(mut self, drop: Dropped, body: Body, display_as: Vec<Segment>) -> Step {
        (self.state, self.result_waits) = (State::Ending, true);
        self.then(drop, Some(Post::Result { body, display_as, subscription: false }))
    }

    fn error(self, drop: Dropped, message: &str) -> Step {
        self.result(drop, Body::Text(format!("{ERROR_PREFIX}{message}")), Vec::new())
    }

    fn confirm(mut self, text: String) -> Step {
        (self.state, self.result_waits, self.subscription) = (State::Subscribed, true, true);
        let body = Body::Text(text);
        self.then(Dropped::Nothing, Some(Post::Result { body, display_as: Vec::new(), subscription: true }))
    }

    fn event(mut self, text: String, associative: bool, is_final: bool) -> Step {
        let number = self.next_event;
        self.next_event += 1;
        self.events_wait += 1;
        if is_final {
            self.state = State::Ending;
        }
        self.then(Dropped::Nothing, Some(Post::Event { number, text, associative, is_final }))
    }

    fn aside(mut self, aside: Aside) -> Step {
        self.asides_wait += 1;
        self.then(Dropped::Nothing, Some(Post::Aside(aside)))
    }

    fn end(self, returned: Returned) -> Step {
        if self.subscription {
            let text = match returned {
                Returned::Error(message) => format!("{ERROR_PREFIX}{message}"),
                Returned::Result { .. } | Returned::Nothing => "the subscription has ended".into(),
            };
            return self.event(text, false, true);
        }
        match returned {
            Returned::Result { body, display_as } => self.result(Dropped::Nothing, body, display_as),
            Returned::Error(message) => self.error(Dropped::Nothing, &message),
            Returned::Nothing => {
                self.error(Dropped::Nothing, "the subscription ended before it was confirmed")
            }
        }
    }

    /// Cancels the call. A result in the outbox is still delivered; a subscription sends nothing more.
    fn cancel(self) -> Result<Step, Ignored> {
        if self.state == State::Running {
            return Ok(self.error(Dropped::Nothing, "cancelled"));
        }
        if !self.subscription {
            return Err(Ignored::Ended);
        }
        if !self.result_waits {
            return Ok(self.settle());
        }
        // The confirmation was not delivered, so the one result of this call is that it was cancelled.
        let head = Head { events_wait: 0, asides_wait: 0, subscription: false, ..self };
        Ok(head.error(Dropped::Everything, "cancelled"))
    }

    fn restart(mut self, on_restart: OnRestart) -> Result<Step, Ignored> {
        if self.state == State::Subscribed {
            return Err(Ignored::RunAgain);
        }
        if on_restart == OnRestart::Fail {
            return Ok(self.error(Dropped::Nothing, RESTARTED));
        }
        self.restarts += 1;
        if self.restarts > MAX_RESTARTS {
            return Ok(self.error(Dropped::Nothing, KEEPS_CRASHING));
        }
        Ok(self.then(Dropped::Nothing, None))
    }

    /// A message was removed from the outbox.
    fn left_outbox(mut self, kind: MessageKind) -> Step {
        match kind {
            MessageKind::Result => self.result_waits = false,
            MessageKind::Event => self.events_wait = self.events_wait.saturating_sub(1),
            MessageKind::Aside => self.asides_wait = self.asides_wait.saturating_sub(1),
        }
        if self.state == State::Ending && self.outbox_is_empty() {
            self.state = State::Settled;
        }
        self.then(Dropped::Nothing, None)
    }

    fn refused(self, kind: MessageKind, status: u16) -> Step {
        match (kind, status) {
            (MessageKind::Event, 404 | 410) => self.settle(),
            (MessageKind::Event | MessageKind::Aside, _) => self.left_outbox(kind),
            (MessageKind::Result, 400 | 413) if !self.refusal_reported => {
                let head = Head {
                    refusal_reported: true,
                    subscription: false,
                    events_wait: 0,
                    asides_wait: 0,
                    ..self
                };
                head.error(Dropped::Everything, &format!("the result was refused ({status})"))
            }
            (MessageKind::Result, _) => self.settle_unaccepted(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_EVENTS: u32 = 3;

    /// Applies inputs to a new call, and lists the messages, drops and ignored inputs, and the last state.
    fn play(inputs: &[Input]) -> String {
        let mut head = Head::NEW;
        let mut log = Vec::new();
        for input in inputs {
            match step(head, input.clone(), MAX_EVENTS) {
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

    fn describe(post: Post) -> String {
        match post {
            Post::Result { body: Body::Text(text), subscription, .. } => {
                format!("{}[{text}]", if subscription { "confirm" } else { "result" })
            }
            Post::Result { body, .. } => format!("result[{body:?}]"),
            Post::Aside(aside) => format!("aside[{aside:?}]"),
            Post::Event { number, text, is_final, .. } => {
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

    /// Proves: CN-03, CN-08, CN-09
    #[test]
    fn a_cancelled_call_reports_it_once_and_a_result_in_the_outbox_is_kept() {
        check(&[Input::Cancelled], "result[Error: cancelled] -> Ending");
        check(&[Input::Cancelled, Input::Cancelled], "result[Error: cancelled], Ended -> Ending");
        check(&[Input::Cancelled, returned("late")], "result[Error: cancelled], Ended -> Ending");
        check(&[returned("r"), Input::Cancelled, GOT_RESULT], "result[r], Ended -> Settled");
        check(&[returned("r"), GOT_RESULT, Input::Cancelled], "result[r], Ended -> Settled");
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
        let aside = || Input::Aside(Aside::View { view_type: "v".into(), content: Value::Null });
        let shown = r#"aside[View { view_type: "v", content: Null }]"#;
        check(&[aside()], &format!("{shown} -> Running"));
        check(&[aside(), returned("r")], &format!("{shown}, result[r] -> Ending"));
        check(&[returned("r"), aside()], "result[r], Ended -> Ending");
        let delivered = [aside(), returned("r"), Input::Delivered(MessageKind::Aside), GOT_RESULT];
        check(&delivered, &format!("{shown}, result[r] -> Settled"));
        let refused = [aside(), returned("r"), Input::Refused(MessageKind::Aside, 410), GOT_RESULT];
        check(&refused, &format!("{shown}, result[r] -> Settled"));
        let full = vec![aside(); MAX_ASIDES as usize + 1];
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
        check(&after(Input::GaveUp(MessageKind::Event)), &format!("{log} -> Subscribed"));
        check(&[returned("r"), Input::GaveUp(MessageKind::Result)], "result[r], drop all -> Settled");
    }
}
