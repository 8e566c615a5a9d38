//! Input from the user: messages, choices, interrupting, cancelling, resuming.

use rap_protocol::CallId;

use crate::step::{StepBuilder, TurnReason};
use crate::texts;
use crate::{
    CallState, Effect, Ignored, Item, NewQuestion, OnBusy, OpenCall, PauseScope, Phase, Question,
    QuestionKind, Queue, ThreadMessage, UserMessage, Write,
};

/// Maximum number of consecutive answers that user messages drop. The next message is held.
const MAX_DROPPED_ANSWERS: u8 = 2;

impl StepBuilder<'_> {
    pub(crate) fn handle_user_message(
        &mut self,
        message: UserMessage,
        on_busy: OnBusy,
    ) -> Result<(), Ignored> {
        match (&self.head.phase, on_busy) {
            (Phase::Idle, _) => self.ask_with_message(message),
            (Phase::Failed { .. }, _) => {
                self.failing_since = None;
                self.ask_with_message_in_order(message, on_busy);
            }
            // The hourly limit of wakes, which paused this thread, does not apply to user messages.
            (Phase::Paused(pause), _) if pause.until.is_some() => {
                self.ask_with_message_in_order(message, on_busy)
            }
            (_, OnBusy::Reject) => return Err(Ignored::Busy),
            (Phase::Waiting { .. }, OnBusy::Enqueue) if self.is_sleeping() => {
                self.end_sleeps(|_| true);
                self.ask_with_message(message);
            }
            (_, OnBusy::Enqueue) => self.hold_message(Queue::UntilIdle, message)?,
            (Phase::Waiting { .. }, OnBusy::Join) => {
                self.move_batch_to_background();
                self.ask_with_message(message);
            }
            (Phase::Asking(asking), OnBusy::Join) if asking.dropped < MAX_DROPPED_ANSWERS => {
                self.dropped += 1;
                self.abandon_turn();
                self.ask_with_message(message);
            }
            (Phase::Waiting { .. } | Phase::Asking(_), OnBusy::Interrupt) => {
                self.dropped = 0;
                self.interrupt_calls_and_turn();
                self.ask_with_message(message);
            }
            (Phase::Asking(_) | Phase::Paused(_) | Phase::Closed, _) => {
                self.hold_message(Queue::UntilBatchCloses, message)?;
                self.head.held.user = true;
            }
        }
        Ok(())
    }

    /// Appends held input, then the message, and asks the model about all of it.
    pub(crate) fn ask_with_message(&mut self, message: UserMessage) {
        self.release(Queue::UntilBatchCloses);
        self.append(message.into());
        self.ask(TurnReason::User);
    }

    /// Does the same as `ask_with_message`, but an enqueued message does not overtake earlier ones.
    fn ask_with_message_in_order(&mut self, message: UserMessage, on_busy: OnBusy) {
        if on_busy == OnBusy::Enqueue {
            self.release(Queue::UntilBatchCloses);
            self.release(Queue::UntilIdle);
        }
        self.ask_with_message(message);
    }

    fn hold_message(&mut self, queue: Queue, message: UserMessage) -> Result<(), Ignored> {
        self.check_space(queue)?;
        self.hold(queue, vec![message.into()]);
        Ok(())
    }

    /// Cancels the open calls and abandons the turn in progress.
    fn interrupt_calls_and_turn(&mut self) {
        self.abandon_turn();
        for call in self.take_batch() {
            self.append(Item::runtime_result(call.id.clone(), texts::INTERRUPTED));
            self.settle_cancelled(&call);
        }
        for call in std::mem::take(&mut self.head.background) {
            self.append(Item::notice(format!("call {} of {} was interrupted", call.id, call.name)));
            self.settle_cancelled(&call);
        }
    }

    /// Settles a call as interrupted, and notifies the tool servers if it may have been sent.
    pub(crate) fn settle_cancelled(&mut self, call: &OpenCall) {
        self.settle(call.id.clone(), CallState::Interrupted);
        if call.is_sent() {
            self.effects.push(Effect::NotifyCancel { call: call.id.clone() });
        }
    }

    pub(crate) fn interrupt(&mut self) -> Result<(), Ignored> {
        if self.head.phase == Phase::Idle && self.head.background.is_empty() {
            return Err(Ignored::NothingToInterrupt);
        }
        self.interrupt_calls_and_turn();
        (self.dropped, self.failing_since) = (0, None);
        self.release(Queue::UntilBatchCloses);
        match self.release(Queue::UntilIdle) {
            Some(reason) => self.ask(reason),
            None => self.head.phase = Phase::Idle,
        }
        Ok(())
    }

    pub(crate) fn cancel(&mut self, call: &CallId) -> Result<(), Ignored> {
        if let Some(open) = self.take_from_batch(call) {
            self.append(Item::runtime_result(open.id.clone(), texts::INTERRUPTED));
            self.settle_cancelled(&open);
            self.continue_batch(TurnReason::Continue);
        } else if let Some(open) = self.take_from_background(call) {
            self.append(Item::notice(format!("call {} of {} was cancelled", open.id, open.name)));
            self.settle_cancelled(&open);
        } else if self.end_subscription(call) {
            self.append(Item::notice(texts::subscription_cancelled(call.as_str())));
        } else {
            return Err(Ignored::SettledCall);
        }
        Ok(())
    }

    /// Ends an active subscription, notifies the tool servers, and drops its waiting events. Returns `false` if there is no
    /// such subscription.
    pub(crate) fn end_subscription(&mut self, call: &CallId) -> bool {
        let Some(subscription) = self.head.subscription(call).cloned() else { return false };
        self.head.subscriptions.retain(|other| other.id != *call);
        self.drop_backlog(call);
        self.settle(call.clone(), CallState::Ended);
        if !subscription.server.is_runtime() {
            self.effects.push(Effect::NotifyCancel { call: call.clone() });
        }
        true
    }

    /// Resumes the thread after a failure or pause. If the session's budget is exceeded, renews it and resumes all threads
    /// that it paused.
    pub(crate) fn resume_session(&mut self) -> Result<(), Ignored> {
        let own = matches!(&self.head.phase, Phase::Paused(pause) if pause.scope == PauseScope::Session);
        let others = std::mem::take(&mut self.facts.paused);
        let of_others = !others.is_empty() && self.is_budget_exceeded();
        if own || of_others {
            self.renew_budget();
            for other in others {
                self.send(other, ThreadMessage::Resume);
            }
        }
        match self.resume() {
            Err(Ignored::NothingToResume) if of_others => Ok(()),
            resumed => resumed,
        }
    }

    pub(crate) fn resume(&mut self) -> Result<(), Ignored> {
        if !matches!(self.head.phase, Phase::Failed { .. } | Phase::Paused(_)) {
            return Err(Ignored::NothingToResume);
        }
        self.failing_since = None;
        self.release(Queue::UntilBatchCloses);
        self.ask(TurnReason::User);
        Ok(())
    }

    /// Opens a call that the user has to allow before it is sent.
    pub(crate) fn ask_for_approval(&mut self, mut open: OpenCall, prompt: String) {
        let limit = self.limits.questions;
        if !self.head.may_ask_user(self.limits) {
            return self.append(Item::runtime_result(open.id, texts::too_many_questions(limit)));
        }
        open.until = Some(self.now.plus(self.limits.approval_within));
        let call = open.id.clone();
        self.add_to_batch(open.clone());
        self.writes.push(Write::Open(open));
        let number = self.add_question(call.clone(), QuestionKind::Approval);
        self.writes.push(Write::Question { number, call, question: NewQuestion::Approval(prompt) });
    }

    pub(crate) fn add_question(&mut self, call: CallId, kind: QuestionKind) -> u64 {
        self.head.ids_made += 1;
        let number = self.head.ids_made;
        self.head.questions.push(Question { number, call, kind, answered: false });
        number
    }

    fn decide_approval(&mut self, call: &CallId, selected: usize) -> Result<(), Ignored> {
        match selected {
            texts::REFUSE => {
                return self.settle_with_text(call, CallState::Interrupted, texts::REFUSED.into());
            }
            texts::ALLOW => {}
            _ => return Err(Ignored::NoSuchChoice(texts::APPROVAL_CHOICES.len())),
        }
        let (since, limits) = (self.now, self.limits);
        let open = self.open_call_mut(call).ok_or(Ignored::SettledCall)?;
        let until = limits.call_timeout_of(&open.server).map(|timeout| since.plus(timeout));
        (open.unapproved, open.since, open.until) = (false, since, until);
        let open = open.clone();
        self.effects.push(Effect::InvokeApproved { call: call.clone(), server: open.server.clone() });
        self.writes.push(Write::Approve(open));
        self.head.questions.retain(|question| question.call != *call);
        self.writes.push(Write::DropQuestions { call: call.clone() });
        Ok(())
    }

    pub(crate) fn choose(&mut self, call: &CallId, selected: Option<usize>) -> Result<(), Ignored> {
        let open = self.head.questions.iter_mut().find(|question| {
            question.call == *call && !question.answered && question.kind != QuestionKind::SignIn
        });
        let Some(question) = open else { return Err(Ignored::NoQuestion) };
        if question.kind == QuestionKind::Approval {
            return self.decide_approval(call, selected.unwrap_or(texts::REFUSE));
        }
        let QuestionKind::Choice { choices, default, .. } = question.kind else {
            return Err(Ignored::NoQuestion);
        };
        let selected = selected.unwrap_or(default);
        if selected >= choices {
            return Err(Ignored::NoSuchChoice(choices));
        }
        question.answered = true;
        let number = question.number;
        let server = self.head.open_call(call).map(|open| open.server.clone()).ok_or(Ignored::SettledCall)?;
        self.writes.push(Write::Answer { number, selected });
        self.effects.push(Effect::Answer { number, server });
        Ok(())
    }
}
