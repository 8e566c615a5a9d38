//! The state machine of one call, as a pure function.
//!
//! Nothing here reads a clock, a database or the network. The journal loads a [`Head`], calls [`step`], and writes
//! the result in one transaction; see `journal.rs`.
//!
//! Invariants:
//! - A call has exactly one result, or none if its thread is closed first. After a cancellation it is the
//!   value that the handler returns within its grace time, or an error.
//! - Events come after the confirmation of a subscription. None come after a final event, a cancellation or the
//!   closing of the thread.
//! - A call that is neither [`State::Running`] nor [`State::Subscribed`] accepts no input from its handler.
//! - A subscription ends if no runtime accepts its events.

use std::time::Duration;

use rap_protocol::{AuthUrl, Body, ERROR_PREFIX, ResponseUrl, Segment, Timestamp};
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
    /// Number of views and questions in the outbox.
    pub(crate) user_messages_wait: u32,
    /// Number of the next event, from 1.
    pub(crate) next_event: u64,
    /// The call was confirmed as a subscription.
    pub(crate) subscription: bool,
    /// The result was refused, and was replaced by an error result that says so.
    pub(crate) refusal_reported: bool,
    /// Number of crashes of the server while the call was running, since the last graceful shutdown.
    pub(crate) restarts: u32,
    /// The call was cancelled. While it is running, its handler may still return a result.
    pub(crate) cancelled: bool,
    /// Time since which every event was refused, if the last one was.
    pub(crate) refused_since: Option<Timestamp>,
}

impl Head {
    /// A call that was just accepted. Equals the defaults of the journal's columns.
    #[cfg(test)]
    pub(crate) const NEW: Head = Head {
        state: State::Running,
        result_waits: false,
        events_wait: 0,
        user_messages_wait: 0,
        next_event: 1,
        subscription: false,
        refusal_reported: false,
        restarts: 0,
        cancelled: false,
        refused_since: None,
    };

    /// Returns true if the handler may send events, views and questions.
    pub(crate) fn accepts_messages(&self) -> bool {
        self.state.is_live() && !self.cancelled
    }

    pub(crate) fn outbox_is_empty(&self) -> bool {
        self.state == State::Settled
            || !self.result_waits && self.events_wait == 0 && self.user_messages_wait == 0
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
    UserMessage(UserMessage),
    /// The runtime cancelled the call.
    Cancelled,
    /// The grace time of the handler after a cancellation is over.
    GraceOver,
    /// The handler has not returned, or confirmed its subscription, within this time.
    TimedOut(Duration),
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

impl Input {
    /// Returns why a handler is stopped if this input stops it.
    pub(crate) fn stop_cause(&self) -> StopCause {
        match self {
            Input::Cancelled | Input::GraceOver => StopCause::Cancelled,
            Input::Closed => StopCause::Closed,
            Input::TimedOut(_) => StopCause::TimedOut,
            Input::Refused(..) | Input::GaveUp(_) => StopCause::Unwanted,
            _ => StopCause::Finished,
        }
    }
}

/// Reason why a handler was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopCause {
    /// The handler itself ended the call.
    Finished,
    Cancelled,
    Closed,
    TimedOut,
    /// No runtime accepts the messages of the call.
    Unwanted,
}

impl StopCause {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            StopCause::Finished => "ended",
            StopCause::Cancelled => "cancelled",
            StopCause::Closed => "closed",
            StopCause::TimedOut => "timed out",
            StopCause::Unwanted => "unwanted",
        }
    }
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

/// Handling of an unfinished call after a restart; see `Tool::restartable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRestart {
    RunAgain,
    Fail,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Result,
    Event,
    UserMessage,
}

/// A view or question for the user while the call is running. The model does not see it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum UserMessage {
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
    Authorize {
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
    pub(crate) post: Option<OutboxContent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    Nothing,
    Everything,
}

/// A message to add to the outbox.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OutboxContent {
    Result { body: Body, display_as: Vec<Segment>, subscription: bool },
    Event { number: u64, text: String, associative: bool, is_final: bool },
    UserMessage(UserMessage),
}

/// Reason why an input has no effect. Each of these is a normal case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ignored {
    /// The call has ended, or the input does not apply in its state.
    Ended,
    /// The outbox has the maximum number of events, or of views and questions, of this call.
    Full,
    /// The handler has to be started again.
    RunAgain,
}

/// Maximum number of views and questions of one call in the outbox.
pub(crate) const MAX_USER_MESSAGES: u32 = 64;

/// Number of crashes during a call after which it is not started again.
pub(crate) const MAX_RESTARTS: u32 = 20;

/// Bounds that the rules apply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Maximum number of events of a call in the outbox.
    pub(crate) max_events: u32,
    /// Time after which a subscription ends whose events are all refused.
    pub(crate) deliver_for: Duration,
}

/// Time that a call has at least when it runs again after a restart, unless its timeout is shorter.
const TIME_AFTER_RESTART: Duration = Duration::from_secs(600);

/// Returns the time that a handler which starts now has to return.
pub(crate) fn time_left(timeout: Duration, accepted_at: Timestamp, now: Timestamp) -> Duration {
    timeout.saturating_sub(now.since(accepted_at)).max(timeout.min(TIME_AFTER_RESTART))
}

const CANCELLED: &str = "cancelled";
const RESTARTED: &str = "the server restarted during the call, so its outcome is unknown; \
                         check what was done before you call it again";
const KEEPS_CRASHING: &str = "the server crashed each time it ran this call, so it will not be tried again";

/// Applies `input` to a call.
pub(crate) fn step(head: Head, input: Input, now: Timestamp, bounds: &Bounds) -> Result<Step, Ignored> {
    match input {
        _ if head.state == State::Settled => Err(Ignored::Ended),
        Input::Closed => Ok(head.settle()),
        Input::Delivered(kind) => Ok(Head { refused_since: None, ..head }.left_outbox(kind)),
        Input::Refused(MessageKind::Result, status) => Ok(head.result_refused(status)),
        Input::Refused(kind, status) => Ok(head.refused(kind, status, now, bounds.deliver_for)),
        Input::GaveUp(MessageKind::Result) => Ok(head.settle_unaccepted()),
        // No runtime has answered for as long as messages are retried.
        Input::GaveUp(_) if head.subscription => Ok(head.settle()),
        Input::GaveUp(kind) => Ok(head.left_outbox(kind)),
        Input::Cancelled => head.cancel(),
        _ if head.state == State::Ending => Err(Ignored::Ended),
        Input::GraceOver | Input::Restarted(_) | Input::TimedOut(_) if head.cancelled => {
            Ok(head.error(Dropped::Nothing, CANCELLED))
        }
        Input::GraceOver => Err(Ignored::Ended),
        Input::TimedOut(_) if head.subscription => Err(Ignored::Ended),
        Input::TimedOut(after) => Ok(head.error(Dropped::Nothing, &timed_out(after))),
        Input::Restarted(on_restart) => head.restart(on_restart),
        Input::Returned(returned) => Ok(head.end(returned)),
        _ if head.cancelled => Err(Ignored::Ended),
        Input::Confirmed(_) if head.subscription => Err(Ignored::Ended),
        Input::Confirmed(text) => Ok(head.confirm(text)),
        Input::Event { .. } | Input::FinalEvent { .. } if !head.subscription => Err(Ignored::Ended),
        Input::Event { .. } if head.events_wait >= bounds.max_events => Err(Ignored::Full),
        Input::Event { text, associative } => Ok(head.event(text, associative, false)),
        Input::FinalEvent { text, associative } => Ok(head.event(text, associative, true)),
        Input::UserMessage(_) if head.user_messages_wait >= MAX_USER_MESSAGES => Err(Ignored::Full),
        Input::UserMessage(message) => Ok(head.user_message(message)),
    }
}

impl Head {
    fn then(self, drop: Dropped, post: Option<OutboxContent>) -> Step {
        Step { head: self, drop, post }
    }

    /// Ends the call and drops its outbox.
    fn settle(mut self) -> Step {
        (self.state, self.result_waits) = (State::Settled, false);
        (self.events_wait, self.user_messages_wait) = (0, 0);
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
        self.then(drop, Some(OutboxContent::Result { body, display_as, subscription: false }))
    }

    fn error(self, drop: Dropped, message: &str) -> Step {
        self.result(drop, Body::Text(format!("{ERROR_PREFIX}{message}")), Vec::new())
    }

    fn confirm(mut self, text: String) -> Step {
        (self.state, self.result_waits, self.subscription) = (State::Subscribed, true, true);
        let body = Body::Text(text);
        self.then(
            Dropped::Nothing,
            Some(OutboxContent::Result { body, display_as: Vec::new(), subscription: true }),
        )
    }

    fn event(mut self, text: String, associative: bool, is_final: bool) -> Step {
        let number = self.next_event;
        self.next_event += 1;
        self.events_wait += 1;
        if is_final {
            self.state = State::Ending;
        }
        self.then(Dropped::Nothing, Some(OutboxContent::Event { number, text, associative, is_final }))
    }

    fn user_message(mut self, message: UserMessage) -> Step {
        self.user_messages_wait += 1;
        self.then(Dropped::Nothing, Some(OutboxContent::UserMessage(message)))
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
            // The error of a handler that was told to stop usually only says that it was.
            Returned::Error(_) | Returned::Nothing if self.cancelled => {
                self.error(Dropped::Nothing, CANCELLED)
            }
            Returned::Error(message) => self.error(Dropped::Nothing, &message),
            Returned::Nothing => {
                self.error(Dropped::Nothing, "the subscription ended before it was confirmed")
            }
        }
    }

    /// Cancels the call. Its handler may still return a result, and a result in the outbox is still delivered; a
    /// subscription sends nothing more.
    fn cancel(mut self) -> Result<Step, Ignored> {
        if self.state == State::Running && !self.cancelled {
            self.cancelled = true;
            return Ok(self.then(Dropped::Nothing, None));
        }
        if !self.subscription {
            return Err(Ignored::Ended);
        }
        if !self.result_waits {
            return Ok(self.settle());
        }
        // The confirmation was not delivered, so the one result of this call is that it was cancelled.
        let head = Head { events_wait: 0, user_messages_wait: 0, subscription: false, ..self };
        Ok(head.error(Dropped::Everything, CANCELLED))
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
            MessageKind::UserMessage => self.user_messages_wait = self.user_messages_wait.saturating_sub(1),
        }
        if self.state == State::Ending && self.outbox_is_empty() {
            self.state = State::Settled;
        }
        self.then(Dropped::Nothing, None)
    }

    /// The runtime refused an event or a message to the user. A subscription ends if it is unknown there, or if
    /// everything was refused for `deliver_for`.
    fn refused(mut self, kind: MessageKind, status: u16, now: Timestamp, deliver_for: Duration) -> Step {
        if kind == MessageKind::Event && matches!(status, 404 | 410) {
            return self.settle();
        }
        if self.subscription {
            let since = *self.refused_since.get_or_insert(now);
            if now.since(since) >= deliver_for {
                return self.settle();
            }
        }
        self.left_outbox(kind)
    }

    /// The runtime refused the result or the confirmation.
    fn result_refused(self, status: u16) -> Step {
        if self.refusal_reported || !matches!(status, 400 | 413) {
            return self.settle_unaccepted();
        }
        let head = Head {
            refusal_reported: true,
            subscription: false,
            events_wait: 0,
            user_messages_wait: 0,
            ..self
        };
        head.error(Dropped::Everything, &format!("the result was refused ({status})"))
    }
}

fn timed_out(after: Duration) -> String {
    format!(
        "the tool did not finish within {} and was stopped; it may have done part of its work, so check before you call \
         it again",
        plain_duration(after)
    )
}

/// Writes a duration in the largest unit in which it is a whole number: `24 hours`, `90 seconds`.
pub(crate) fn plain_duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [(3_600_000, "hour"), (60_000, "minute"), (1_000, "second"), (1, "millisecond")];
    let (unit, name) =
        *units.iter().find(|(unit, _)| millis.is_multiple_of(*unit)).unwrap_or(&(1, "millisecond"));
    let count = millis / unit;
    format!("{count} {name}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests;
