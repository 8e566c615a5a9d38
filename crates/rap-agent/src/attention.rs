//! Transitions of a thread that cause alerts to people.
//!
//! A transition is a change of the head in one step, so a thread that stays in a state is reported once. A person is needed
//! from the first open question to the answer of the last one, also while the model is asked about something else. A thread
//! fails at its first failed turn; the retries that fail after it are the same failure. Of the threads of a session only the
//! root is reported as closed: its descendants close with it, and event children close all the time.

use serde::{Deserialize, Serialize};

use crate::{Head, Origin, Pause, Phase};

/// State that a thread entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// A question or a pause waits for a person.
    NeedsYou,
    /// The model cannot be asked.
    Failed,
    /// The session was closed.
    Closed,
}

impl Attention {
    /// All states.
    pub const ALL: [Attention; 3] = [Attention::NeedsYou, Attention::Failed, Attention::Closed];

    /// Returns the word for the state in the configuration and in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Attention::NeedsYou => "needs_you",
            Attention::Failed => "failed",
            Attention::Closed => "closed",
        }
    }

    fn applies_to(self, head: &Head) -> bool {
        match self {
            Attention::NeedsYou => {
                let asks = head.questions().iter().any(|question| !question.answered);
                asks || matches!(head.phase(), Phase::Paused(_))
            }
            Attention::Failed => match head.phase() {
                Phase::Failed { .. } => true,
                Phase::Asking(asking) => asking.failing_since.is_some(),
                _ => false,
            },
            Attention::Closed => head.is_closed() && *head.origin() == Origin::Root,
        }
    }

    /// Returns the states that apply to a head.
    pub fn of(head: &Head) -> Vec<Attention> {
        Attention::ALL.into_iter().filter(|state| state.applies_to(head)).collect()
    }

    /// Returns the reason of the state; `None` if the state explains itself.
    pub fn reason(self, head: &Head) -> Option<&str> {
        match (self, head.phase()) {
            (Attention::Failed, Phase::Failed { why, .. }) => Some(why),
            (Attention::NeedsYou, Phase::Paused(Pause { why, .. })) => Some(why),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rap_protocol::{ThreadId, Timestamp};

    use super::*;
    use crate::{
        Arguments, Facts, Identity, Input, Limits, OnBusy, Plan, PlannedCall, Server, TurnAnswer, TurnRetry,
        step,
    };

    /// Applies an input. Returns the new head and the states that the step entered.
    fn apply(head: Head, input: Input, now: i64) -> (Head, Vec<Attention>) {
        let thread = Identity { id: ThreadId::new("t").unwrap(), incarnation: 7, depth: 0 };
        let step = step(head, input, Facts::of(thread), Timestamp(now), &Limits::default()).unwrap();
        (step.head, step.entered)
    }

    fn answer(turn: u64, plans: Vec<Plan>) -> Input {
        let call = |plan| PlannedCall {
            model_id: None,
            name: "wipe".into(),
            arguments: Arguments::Given(serde_json::Map::new()),
            display: None,
            plan,
        };
        let calls = plans.into_iter().map(call).collect();
        Input::TurnEnded { turn, answer: TurnAnswer { text: "Fine.".into(), calls, ..TurnAnswer::default() } }
    }

    #[test]
    fn a_question_is_entered_once_until_it_is_answered() {
        let (head, entered) = apply(Head::new(), Input::Begin { message: Some("hello\nthere".into()) }, 1);
        assert_eq!((head.title(), entered), (Some("hello"), vec![]));
        let approve = || Plan::Approve { server: Server("http://s".into()), prompt: "Allow?".into() };
        let (head, entered) = apply(head, answer(1, vec![approve(), approve()]), 2);
        assert_eq!(entered, [Attention::NeedsYou]);
        let message = Input::UserMessage { message: "wait".into(), on_busy: OnBusy::Join };
        let (head, entered) = apply(head, message, 3);
        assert_eq!((head.status(), head.title(), entered), (crate::Status::Running, Some("hello"), vec![]));
        let (head, entered) = apply(head, answer(2, vec![]), 4);
        assert_eq!((head.status(), entered), (crate::Status::NeedsYou, vec![]));
        let calls: Vec<_> = head.questions().iter().map(|question| question.call.clone()).collect();
        let head = calls.into_iter().fold(head, |head, call| {
            let (head, entered) = apply(head, Input::Choose { call, selected: Some(0) }, 5);
            assert_eq!(entered, []);
            head
        });
        assert_eq!(apply(head, Input::Close, 6).1, [Attention::Closed]);
    }

    #[test]
    fn a_failure_is_entered_once_however_often_it_is_retried() {
        let (mut head, _) = apply(Head::new(), Input::Begin { message: Some("hello".into()) }, 1);
        for (turn, expected) in [(1, vec![Attention::Failed]), (2, vec![]), (3, vec![])] {
            let failed = Input::TurnFailed { turn, why: "503".into(), retry: TurnRetry::Later };
            let (after, entered) = apply(head, failed, 10);
            assert_eq!(entered, expected, "turn {turn}");
            assert_eq!(Attention::Failed.reason(&after), Some("503"));
            let due = after.due(&Limits::default()).unwrap().0;
            head = apply(after, Input::Due, due).0;
        }
        let (head, entered) = apply(head, answer(4, vec![]), 20);
        assert_eq!((head.status(), entered), (crate::Status::Idle, vec![]));
    }
}
