//! The user's side: speaking, choosing, interrupting, cancelling, resuming.

use rap_protocol::CallId;

use crate::step::{Released, Stepping, take};
use crate::words;
use crate::{CallState, Effect, Ignored, Item, OnBusy, Phase, QuestionKind, Queue, Server, Write};

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
            self.settle_cancelled(call.id, &call.server, CallState::Interrupted);
        }
        for call in std::mem::take(&mut self.head.running) {
            self.append(Item::notice(format!("call {} of {} was interrupted", call.id, call.name)));
            self.settle_cancelled(call.id, &call.server, CallState::Interrupted);
        }
    }

    /// Ends a call, and tells the servers if one of them has it.
    pub(crate) fn settle_cancelled(&mut self, call: CallId, server: &Server, state: CallState) {
        self.settle(call.clone(), state);
        if !server.is_runtime() {
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
            self.settle_cancelled(open.id, &open.server, CallState::Interrupted);
            self.move_on();
        } else if let Some(open) = take(&mut self.head.running, call) {
            self.append(Item::notice(format!("call {} of {} was cancelled", open.id, open.name)));
            self.settle_cancelled(open.id, &open.server, CallState::Interrupted);
        } else if let Some(subscription) = self.head.subscription(call).cloned() {
            self.head.subscriptions.retain(|other| other.id != *call);
            self.append(Item::notice(words::subscription_cancelled(call.as_str())));
            self.drop_backlog(call);
            self.settle_cancelled(subscription.id, &subscription.server, CallState::Ended);
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

    pub(crate) fn choose(&mut self, call: &CallId, selected: Option<usize>) -> Result<(), Ignored> {
        let open = self.head.questions.iter_mut().find(|question| {
            question.call == *call && !question.answered && question.kind != QuestionKind::SignIn
        });
        let Some(question) = open else { return Err(Ignored::NoQuestion) };
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
