//! The user's side: speaking, choosing, interrupting, cancelling, resuming.

use rap_protocol::CallId;

use crate::step::{Released, Stepping, take};
use crate::words;
use crate::{
    CallState, Effect, Ignored, Item, NewQuestion, OnBusy, OpenCall, Phase, Question, QuestionKind, Queue,
    Write,
};

/// How many answers in a row a user's messages may drop; the next message waits.
const DROPS: u8 = 2;

impl Stepping<'_> {
    pub(crate) fn hear(&mut self, text: String, on_busy: OnBusy) -> Result<(), Ignored> {
        match (&self.head.phase, on_busy) {
            (Phase::Idle, _) => self.answer_now(text),
            (Phase::Failed { .. }, _) => {
                self.head.failing_since = None;
                self.answer_now(text);
            }
            (_, OnBusy::Reject) => return Err(Ignored::Busy),
            (_, OnBusy::Enqueue) => self.wait(Queue::Queued, text)?,
            (Phase::Waiting, OnBusy::Join) => {
                self.let_run();
                self.answer_now(text);
            }
            (Phase::Asking { .. }, OnBusy::Join) if self.head.dropped < DROPS => {
                self.head.dropped += 1;
                self.abandon();
                self.answer_now(text);
            }
            (Phase::Waiting | Phase::Asking { .. }, OnBusy::Interrupt) => {
                self.head.dropped = 0;
                self.stop();
                self.answer_now(text);
            }
            (Phase::Asking { .. } | Phase::Paused { .. } | Phase::Closed, _) => {
                self.wait(Queue::Held, text)?;
                self.head.held.user = true;
            }
        }
        Ok(())
    }

    /// What waited comes first, then the text; the model is asked for all of it.
    fn answer_now(&mut self, text: String) {
        self.release(Queue::Held);
        self.append(Item::said(text));
        self.wake();
    }

    fn wait(&mut self, queue: Queue, text: String) -> Result<(), Ignored> {
        self.room(queue)?;
        self.hold(queue, vec![Item::said(text)]);
        Ok(())
    }

    /// Ends the calls and the answer in progress.
    fn stop(&mut self) {
        self.abandon();
        for call in std::mem::take(&mut self.head.batch) {
            self.append(Item::made(call.id.clone(), words::INTERRUPTED));
            let sent = call.is_sent();
            self.settle_cancelled(call.id, sent, CallState::Interrupted);
        }
        for call in std::mem::take(&mut self.head.running) {
            self.append(Item::notice(format!("call {} of {} was interrupted", call.id, call.name)));
            let sent = call.is_sent();
            self.settle_cancelled(call.id, sent, CallState::Interrupted);
        }
    }

    /// Ends a call, and tells the servers if one of them has it.
    pub(crate) fn settle_cancelled(&mut self, call: CallId, sent: bool, state: CallState) {
        self.settle(call.clone(), state);
        if sent {
            self.effects.push(Effect::NotifyCancel { call });
        }
    }

    pub(crate) fn interrupt(&mut self) -> Result<(), Ignored> {
        if self.head.phase == Phase::Idle && self.head.running.is_empty() {
            return Err(Ignored::NothingToInterrupt);
        }
        self.stop();
        self.head.dropped = 0;
        self.head.failing_since = None;
        self.release(Queue::Held);
        match self.release(Queue::Queued) {
            Released::Something => self.wake(),
            Released::Nothing => self.head.phase = Phase::Idle,
        }
        Ok(())
    }

    pub(crate) fn cancel(&mut self, call: &CallId) -> Result<(), Ignored> {
        if let Some(open) = take(&mut self.head.batch, call) {
            self.append(Item::made(open.id.clone(), words::INTERRUPTED));
            let sent = open.is_sent();
            self.settle_cancelled(open.id, sent, CallState::Interrupted);
            self.move_on();
        } else if let Some(open) = take(&mut self.head.running, call) {
            self.append(Item::notice(format!("call {} of {} was cancelled", open.id, open.name)));
            let sent = open.is_sent();
            self.settle_cancelled(open.id, sent, CallState::Interrupted);
        } else if let Some(subscription) = self.head.subscription(call).cloned() {
            self.head.subscriptions.retain(|other| other.id != *call);
            self.append(Item::notice(words::subscription_cancelled(call.as_str())));
            self.drop_backlog(call);
            let sent = !subscription.server.is_runtime();
            self.settle_cancelled(subscription.id, sent, CallState::Ended);
        } else {
            return Err(Ignored::SettledCall);
        }
        Ok(())
    }

    pub(crate) fn resume(&mut self) -> Result<(), Ignored> {
        if !matches!(self.head.phase, Phase::Failed { .. } | Phase::Paused { .. }) {
            return Err(Ignored::NothingToResume);
        }
        self.head.failing_since = None;
        self.release(Queue::Held);
        self.wake();
        Ok(())
    }

    /// A call that a person has to allow first.
    pub(crate) fn ask_for_approval(&mut self, mut open: OpenCall, prompt: String) {
        let limit = self.limits.questions;
        if self.head.questions.len() >= limit {
            return self.append(Item::made(open.id, words::too_many_questions(limit)));
        }
        open.until = Some(self.now.plus(self.limits.approval_within));
        let call = open.id.clone();
        self.head.batch.push(open.clone());
        self.writes.push(Write::Open(open));
        self.head.minted += 1;
        let no = self.head.minted;
        let kind = QuestionKind::Approval;
        self.head.questions.push(Question { no, call: call.clone(), kind, answered: false });
        self.writes.push(Write::Ask { no, call, question: NewQuestion::Approval(prompt) });
    }

    fn approve(&mut self, call: &CallId, selected: usize) -> Result<(), Ignored> {
        match selected {
            words::REFUSE => return self.give_up(call, CallState::Interrupted, words::REFUSED.into()),
            words::ALLOW => {}
            _ => return Err(Ignored::NoSuchChoice(words::APPROVAL.len())),
        }
        let until = self.limits.call_timeout.map(|timeout| self.now.plus(timeout));
        let mut calls = self.head.batch.iter_mut().chain(&mut self.head.running);
        let open = calls.find(|open| open.id == *call).ok_or(Ignored::SettledCall)?;
        (open.unapproved, open.since, open.until) = (false, self.now, until);
        self.writes.push(Write::Dispatch(open.clone()));
        self.head.questions.retain(|question| question.call != *call);
        self.writes.push(Write::Forget { call: call.clone() });
        self.effects.push(Effect::Dispatch { call: call.clone() });
        Ok(())
    }

    pub(crate) fn choose(&mut self, call: &CallId, selected: Option<usize>) -> Result<(), Ignored> {
        let open = self.head.questions.iter_mut().find(|question| {
            question.call == *call && !question.answered && question.kind != QuestionKind::SignIn
        });
        let Some(question) = open else { return Err(Ignored::NoQuestion) };
        if question.kind == QuestionKind::Approval {
            return self.approve(call, selected.unwrap_or(words::REFUSE));
        }
        let QuestionKind::Choice { choices, default, .. } = question.kind else {
            return Err(Ignored::NoQuestion);
        };
        let selected = selected.unwrap_or(default);
        if selected >= choices {
            return Err(Ignored::NoSuchChoice(choices));
        }
        question.answered = true;
        let no = question.no;
        self.writes.push(Write::Answer { no, selected });
        self.effects.push(Effect::Answer { no });
        Ok(())
    }
}
