//! Closing a thread.

use crate::step::StepBuilder;
use crate::texts;
use crate::{CallState, Effect, Item, Phase, Queue, ThreadMessage};

impl StepBuilder<'_> {
    /// Closes the thread. The history is left as a valid prompt that contains all acknowledged input. Subscriptions are
    /// not cancelled: their tools are notified of the closing, and further events are refused.
    pub(crate) fn close(&mut self) {
        self.abandon_turn();
        for call in self.take_batch() {
            self.append(Item::runtime_result(call.id.clone(), texts::INTERRUPTED));
            self.settle_cancelled(&call);
        }
        for call in std::mem::take(&mut self.head.background) {
            self.settle_cancelled(&call);
        }
        for subscription in std::mem::take(&mut self.head.subscriptions) {
            self.settle(subscription.id, CallState::Ended);
        }
        for backlog in std::mem::take(&mut self.head.backlogs) {
            self.drop_events(&backlog);
        }
        self.release(Queue::UntilBatchCloses);
        self.release(Queue::UntilIdle);
        self.append(Item::notice("the thread was closed"));
        self.head.phase = Phase::Closed;
        let children = std::mem::take(&mut self.head.counted_children);
        for child in children.into_iter().chain(std::mem::take(&mut self.head.idle_event_children)) {
            self.send(child, ThreadMessage::Close);
        }
        if self.head.owes_report {
            self.report(texts::CLOSED_WITHOUT_REPORT.into());
        }
        if let Some((parent, ..)) = self.head.origin.parent() {
            self.send(parent.clone(), ThreadMessage::ChildClosed);
        }
        self.notify_close();
    }

    /// Notifies the tool servers of the closing first, and then of the cancellations of this step.
    fn notify_close(&mut self) {
        let mut cancelled = Vec::new();
        self.effects.retain(|effect| match effect {
            Effect::NotifyCancel { call } => {
                cancelled.push(call.clone());
                false
            }
            _ => true,
        });
        self.effects.push(Effect::NotifyClose { cancelled });
    }
}
