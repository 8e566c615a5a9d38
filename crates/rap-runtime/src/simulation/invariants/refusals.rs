//! Reasons with which inputs are refused: whether they are true for the state that the checker has recorded.

use rap_agent::{CallState, Head, Ignored, Input, OnBusy, Phase, ThreadMessage};
use rap_protocol::{CallId, Timestamp};

use super::{Checker, has_wake_limit};
use crate::simulation::reference::Row;
use crate::simulation::tracker::{ThreadTracker, turn_of};

impl Checker {
    /// Returns whether the reason of a refusal is true.
    pub(super) fn is_reason_true(
        &self,
        tracker: &ThreadTracker,
        row: &Row,
        input: &Input,
        now: Timestamp,
        why: &Ignored,
    ) -> bool {
        let head = &row.head;
        let call_state = call_of(input).and_then(|call| tracker.call_states.get(call).copied());
        let sent = call_of(input).and_then(|call| head.open_call(call)).is_some_and(|open| open.is_sent());
        match (why, input) {
            (Ignored::StaleTurn, input) => {
                turn_of(input).is_some_and(|turn| tracker.asking.is_none_or(|(current, _)| current != turn))
            }
            (Ignored::Duplicate, input) => is_duplicate(tracker, head, input, call_state),
            (Ignored::SettledCall, Input::ToolResult { .. }) => call_state == Some(CallState::Interrupted),
            (Ignored::SettledCall, Input::Cancel { .. }) => {
                !matches!(call_state, Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::SettledCall, Input::View { .. }) => {
                !sent && !matches!(call_state, Some(CallState::Subscribed | CallState::Returned))
            }
            (Ignored::SettledCall, _) => call_state != Some(CallState::Open) || !sent,
            (Ignored::UnknownCall, Input::ToolResult { .. }) => call_state.is_none() || !sent,
            (Ignored::UnknownCall, _) => call_state.is_none(),
            (Ignored::EndedSubscription, _) => {
                !matches!(call_state, None | Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::NotYetSubscribed, _) => call_state == Some(CallState::Open),
            (Ignored::Full(_), _) => self.is_full(tracker, row, input),
            (Ignored::Busy, Input::UserMessage { on_busy, .. }) => {
                let busy =
                    matches!(head.phase(), Phase::Asking(_) | Phase::Waiting { .. } | Phase::Paused(_));
                *on_busy == OnBusy::Reject && busy
            }
            (Ignored::NothingToInterrupt, _) => *head.phase() == Phase::Idle && !tracker.has_open(),
            (Ignored::NothingToResume, Input::Resume) => {
                !matches!(head.phase(), Phase::Failed { .. } | Phase::Paused(_))
            }
            (Ignored::NothingToResume, _) => {
                !matches!(head.phase(), Phase::Paused(pause) if pause.scope == rap_agent::PauseScope::Session)
            }
            (Ignored::NoQuestion, Input::Choose { call, .. }) => {
                let open = |question: &rap_agent::Question| question.call == *call && !question.answered;
                !head
                    .questions()
                    .iter()
                    .any(|question| open(question) && question.kind != rap_agent::QuestionKind::SignIn)
            }
            (Ignored::NoSuchChoice(choices), Input::Choose { selected, .. }) => {
                selected.is_some_and(|selected| selected >= *choices)
            }
            (Ignored::NotDue, Input::Due) => {
                // Held input may have to wait until the hourly budget is renewed.
                let waits = matches!(head.phase(), Phase::Waiting { .. }) && has_wake_limit(&self.limits);
                waits || head.due(&self.limits).is_none_or(|due| due > now)
            }
            (Ignored::NotDue, Input::TimerFired { call }) => {
                row.calls[call].timer.is_none_or(|timer| timer > now)
            }
            _ => false,
        }
    }

    fn is_full(&self, tracker: &ThreadTracker, row: &Row, input: &Input) -> bool {
        let (head, limits) = (&row.head, &self.limits);
        let held = *head.phase() != Phase::Idle && head.held().inputs >= limits.held;
        let depth = row.thread.ancestors.len();
        match input {
            Input::UserMessage { on_busy: OnBusy::Enqueue, .. } => {
                let held = if head.queued().inputs >= limits.held { true } else { held };
                held && !tracker.has_open() || head.queued().inputs >= limits.held
            }
            Input::UserMessage { .. } | Input::ToolResult { .. } | Input::SubscriptionLost { .. } => held,
            Input::Event { event, .. } if event.associative || depth >= limits.depth => held,
            Input::Event { call, .. } => {
                let backlog = head.backlogs().iter().find(|backlog| backlog.call == *call);
                let full = backlog.is_some_and(|backlog| backlog.held.inputs >= limits.held);
                full || backlog.is_none() && head.backlogs().len() >= 2 * limits.subscriptions
            }
            _ => !head.may_ask_user(limits),
        }
    }
}

/// Returns whether an input repeats one that was applied before.
fn is_duplicate(tracker: &ThreadTracker, head: &Head, input: &Input, call_state: Option<CallState>) -> bool {
    match input {
        Input::ToolResult { .. } => {
            matches!(call_state, Some(CallState::Returned | CallState::Subscribed | CallState::Ended))
        }
        Input::Event { call, event } => {
            event.id.as_ref().is_some_and(|id| tracker.events.contains(&(call.clone(), id.clone())))
        }
        Input::ChoiceRequested { .. } | Input::CallbackRefused { .. } => call_state == Some(CallState::Open),
        Input::Summarised { .. } => head.summarisable_up_to().is_none(),
        Input::FromThread { sender, message: ThreadMessage::ChildClosed } => {
            !tracker.children.contains(sender)
        }
        Input::FromThread { sender, message: ThreadMessage::EventChildIdle } => {
            !head.backlogs().iter().any(|backlog| backlog.active_children.contains(sender))
        }
        _ => false,
    }
}

/// Returns the call that an input refers to.
fn call_of(input: &Input) -> Option<&CallId> {
    match input {
        Input::ToolResult { call, .. }
        | Input::CallFailed { call, .. }
        | Input::CallbackRefused { call, .. }
        | Input::TimerFired { call }
        | Input::Event { call, .. }
        | Input::SubscriptionLost { call }
        | Input::SignInRequested { call, .. }
        | Input::ChoiceRequested { call, .. }
        | Input::View { call, .. }
        | Input::Choose { call, .. }
        | Input::Cancel { call } => Some(call),
        _ => None,
    }
}
