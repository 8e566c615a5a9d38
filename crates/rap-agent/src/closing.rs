//! Closing a thread, and handling its due time.

use crate::step::{StepBuilder, TurnReason};
use crate::texts;
use crate::{CallState, Effect, Ignored, Item, Phase, Queue, ThreadMessage};

impl StepBuilder<'_> {
    pub(crate) fn handle_due(&mut self) -> Result<(), Ignored> {
        if self.head.due(self.limits).is_none_or(|due| due > self.now) {
            return Err(Ignored::NotDue);
        }
        match self.head.phase {
            Phase::Waiting { .. } if self.head.held.is_empty() => self.report_idle(),
            Phase::Waiting { .. } if self.held_must_wait() => return Err(Ignored::NotDue),
            Phase::Waiting { .. } => self.join(),
            // The budget's hour is over. The turn counts as a wake, but not as new external input.
            Phase::Paused(_) => {
                self.close_batch(TurnReason::Session { external_input_at: self.head.external_input_at })
            }
            // A failed thread retries. Held input is released with the retry.
            _ => self.close_batch(TurnReason::Continue),
        }
        Ok(())
    }

    /// Closes the thread. The history is left as a valid prompt that contains all acknowledged input. Subscriptions are
    /// not cancelled: their tools are notified of the closing, and further events are refused.
    pub(crate) fn close(&mut self) {
        self.abandon_turn();
        self.effects.push(Effect::NotifyClose);
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
        self.release(Queue::Held);
        self.release(Queue::Queued);
        self.append(Item::notice("the thread was closed"));
        self.head.phase = Phase::Closed;
        let children = std::mem::take(&mut self.head.children);
        for child in children.into_iter().chain(std::mem::take(&mut self.head.idle_event_children)) {
            self.send(child, ThreadMessage::Close);
        }
        if let Some((parent, ..)) = self.head.origin.parent() {
            self.send(parent.clone(), ThreadMessage::ChildClosed);
        }
    }
}
