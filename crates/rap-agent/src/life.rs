//! Birth, timers and closing.

use rap_protocol::ThreadId;

use crate::callback::{happened, kind};
use crate::step::Stepping;
use crate::words;
use crate::{
    Arguments, Birth, CallState, Effect, Entry, Event, Head, Ignored, Item, Letter, Origin, Phase, Queue,
    Speaker, Subscription, Write,
};

impl Stepping<'_> {
    /// A child for an event: it sees the history up to the last settled point, then the event.
    pub(crate) fn bear(
        &mut self,
        subscription: &Subscription,
        event: &Event,
        birth: Birth,
    ) -> Result<(), Ignored> {
        if self.head.children.len() >= self.limits.children {
            return Err(Ignored::Full("too many children are at work"));
        }
        let Birth { parent, child, arguments, .. } = birth;
        let arguments = Arguments::Echo {
            of: subscription.id.clone(),
            kind: kind(subscription, event),
            arguments: Some(arguments),
        };
        let mut items = self.synthetic_with(&subscription.name, arguments, happened(event));
        items.push(Item::User { text: words::event_child(), from: Speaker::Runtime });
        let at = self.head.settled;
        let seq = at + items.len() as u64;
        let head = Head {
            phase: Phase::Asking { up_to: seq },
            origin: Origin::Event { parent, call: subscription.id.clone(), tool: subscription.name.clone() },
            turn: 1,
            turns_awake: 1,
            seq,
            settled: at,
            minted: self.head.minted,
            ..Head::new()
        };
        let entries = items.into_iter().map(|item| Entry { at: self.now, item }).collect();
        self.head.children.push(child.clone());
        self.writes.push(Write::Born { child, at, head: Box::new(head), entries });
        Ok(())
    }

    pub(crate) fn forget_child(&mut self, child: &ThreadId) -> Result<(), Ignored> {
        let before = self.head.children.len();
        self.head.children.retain(|known| known != child);
        if self.head.children.len() == before {
            return Err(Ignored::Duplicate);
        }
        Ok(())
    }

    pub(crate) fn due(&mut self) -> Result<(), Ignored> {
        if self.head.due(self.limits).is_none_or(|due| due > self.now) {
            return Err(Ignored::NotDue);
        }
        match self.head.phase {
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
