//! Children that end, timers and closing.

use rap_protocol::ThreadId;

use crate::step::Stepping;
use crate::words;
use crate::{Birth, CallState, Effect, Ignored, Item, Letter, Phase, Queue};

impl Stepping<'_> {
    pub(crate) fn forget_child(&mut self, child: &ThreadId, birth: Option<Birth>) -> Result<(), Ignored> {
        let before = self.head.children.len();
        self.head.children.retain(|known| known != child);
        if self.head.children.len() == before {
            return Err(Ignored::Duplicate);
        }
        self.leave_work(child);
        self.work_off(birth);
        Ok(())
    }
    pub(crate) fn due(&mut self) -> Result<(), Ignored> {
        if self.head.due(self.limits).is_none_or(|due| due > self.now) {
            return Err(Ignored::NotDue);
        }
        match self.head.phase {
            Phase::Waiting if self.head.held.is_empty() => self.leave_place(),
            Phase::Waiting => self.join(),
            // As when a batch closes: what waited is news to the model.
            _ => self.close_batch(),
        }
        Ok(())
    }

    /// The history is left as a valid prompt, with everything in it that was ever acknowledged. Subscriptions are
    /// not cancelled: their tools learn of the closing like everybody, and their events find the thread closed.
    pub(crate) fn close(&mut self) {
        self.abandon();
        for call in std::mem::take(&mut self.head.batch) {
            self.append(Item::made(call.id.clone(), words::INTERRUPTED));
            self.settle(call.id, CallState::Interrupted);
        }
        for call in std::mem::take(&mut self.head.running) {
            self.settle(call.id, CallState::Interrupted);
        }
        for subscription in std::mem::take(&mut self.head.subscriptions) {
            self.settle(subscription.id, CallState::Ended);
        }
        for backlog in std::mem::take(&mut self.head.backlogs) {
            self.discard(&backlog);
        }
        self.release(Queue::Held);
        self.release(Queue::Queued);
        self.append(Item::notice("the thread was closed"));
        self.head.phase = Phase::Closed;
        self.effects.push(Effect::NotifyClose);
        for child in std::mem::take(&mut self.head.children) {
            self.effects.push(Effect::Tell { to: child, letter: Letter::Close });
        }
        if let Some((parent, ..)) = self.head.origin.parent() {
            self.effects.push(Effect::Tell { to: parent.clone(), letter: Letter::ChildClosed });
        }
    }
}
