//! Closing a thread, and due times of a thread itself.

use crate::step::{Stepping, Wake};
use crate::words;
use crate::{CallState, Effect, Ignored, Item, Phase, Queue, ThreadMessage};

impl Stepping<'_> {
    pub(crate) fn take_due(&mut self) -> Result<(), Ignored> {
        if self.head.due(self.limits).is_none_or(|due| due > self.now) {
            return Err(Ignored::NotDue);
        }
        match self.head.phase {
            Phase::Waiting { .. } if self.head.held.is_empty() => self.leave_work(),
            Phase::Waiting { .. } if self.held_must_wait() => return Err(Ignored::NotDue),
            Phase::Waiting { .. } => self.join(),
            // The budget's hour is over: the question counts as a wake, but it is nothing new.
            Phase::Paused(_) => self.close_batch(Wake::Session { heard: self.head.heard }),
            // Held input is new to the model.
            _ => self.close_batch(Wake::Continue),
        }
        Ok(())
    }

    /// Leaves the history as a valid prompt that holds everything that was ever acknowledged. Subscriptions are not
    /// cancelled: their tools learn of the closing, and their events find the thread closed.
    pub(crate) fn close(&mut self) {
        self.abandon();
        self.effects.push(Effect::NotifyClose);
        for call in self.take_batch() {
            self.append(Item::made(call.id.clone(), words::INTERRUPTED));
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
        for child in children.into_iter().chain(std::mem::take(&mut self.head.resting)) {
            self.send(child, ThreadMessage::Close);
        }
        if let Some((parent, ..)) = self.head.origin.parent() {
            self.send(parent.clone(), ThreadMessage::ChildClosed);
        }
    }
}
