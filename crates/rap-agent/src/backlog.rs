//! Events that are not for the thread itself: each goes to a child, and where too many children are at work, it waits.
//! All that waits goes together to the next child.

use rap_protocol::{CallId, ThreadId};

use crate::callback::{happened, kind};
use crate::step::Stepping;
use crate::words;
use crate::{
    Arguments, Backlog, Birth, Effect, Entry, Event, Head, Held, Ignored, Item, Letter, Origin, Phase,
    Speaker, Subscription, Write,
};

/// An event is two entries: a call, and its result.
const ENTRIES: u64 = 2;

impl Stepping<'_> {
    /// An event for a child: there is one at once, or it waits for one.
    pub(crate) fn take_aside(
        &mut self,
        subscription: &Subscription,
        event: &Event,
        mut birth: Birth,
    ) -> Result<(), Ignored> {
        if self.limits.children.min(self.limits.event_children) == 0 {
            return Err(Ignored::Full("no children are allowed"));
        }
        let at = self.backlog_of(subscription)?;
        let bears = self.has_place(at) && self.head.backlogs[at].held.is_empty();
        if !bears && self.head.backlogs[at].held.is_full(self.limits) {
            return Err(Ignored::Full("too many events wait for a child"));
        }
        let arguments = Arguments::Echo {
            of: subscription.id.clone(),
            kind: kind(subscription, event),
            arguments: Some(std::mem::take(&mut birth.arguments)),
        };
        let items = self.synthetic_with(&subscription.name, arguments, happened(event));
        if bears {
            self.bear(at, birth, 1, items);
            return Ok(());
        }
        let (now, call) = (self.now, subscription.id.clone());
        let first = self.head.backlogs[at].held.add(&items, now);
        let shelve = |(no, item)| Write::Shelve { call: call.clone(), no, entry: Entry { at: now, item } };
        self.writes.extend((first..).zip(items).map(shelve));
        Ok(())
    }

    /// The backlog of a subscription. Those that only drain are no more than the subscriptions themselves.
    fn backlog_of(&mut self, subscription: &Subscription) -> Result<usize, Ignored> {
        let backlogs = &mut self.head.backlogs;
        if let Some(at) = backlogs.iter().position(|backlog| backlog.call == subscription.id) {
            return Ok(at);
        }
        if backlogs.len() >= 2 * self.limits.subscriptions.max(1) {
            return Err(Ignored::Full("the events of too many subscriptions wait for a child"));
        }
        let (call, tool) = (subscription.id.clone(), subscription.name.clone());
        backlogs.push(Backlog { call, tool, held: Held::default(), at_work: Vec::new() });
        Ok(backlogs.len() - 1)
    }

    fn has_place(&self, backlog: usize) -> bool {
        self.head.children.len() < self.limits.children
            && self.head.backlogs[backlog].at_work.len() < self.limits.event_children
    }

    /// A child for events: it sees the history up to the last settled point, then them.
    fn bear(&mut self, backlog: usize, birth: Birth, events: u64, mut items: Vec<Item>) {
        let Birth { parent, child, .. } = birth;
        items.push(Item::User { text: words::event_child(events), from: Speaker::Runtime });
        let backlog = &mut self.head.backlogs[backlog];
        let waited = backlog.held.entries();
        backlog.held = Held { first: backlog.held.next, next: backlog.held.next, ..Held::default() };
        backlog.at_work.push(child.clone());
        let (call, tool) = (backlog.call.clone(), backlog.tool.clone());
        let at = self.head.settled;
        let seq = at + waited + items.len() as u64;
        let head = Head {
            phase: Phase::Asking { up_to: seq },
            origin: Origin::Event { parent, call: call.clone(), tool },
            turn: 1,
            turns_awake: 1,
            seq,
            settled: at,
            answered: at,
            // Of a summary that was made since, the child knows nothing.
            summarised: Some(self.head.summarised).filter(|covers| *covers < at).unwrap_or(0),
            minted: self.head.minted,
            ..Head::new()
        };
        let entries = items.into_iter().map(|item| Entry { at: self.now, item }).collect();
        self.head.children.push(child.clone());
        let shelf = (waited > 0).then_some((call, waited));
        self.writes.push(Write::Born { child, at, head: Box::new(head), shelf, entries });
    }

    /// A child is not at work any more.
    pub(crate) fn leave_work(&mut self, child: &ThreadId) {
        for backlog in &mut self.head.backlogs {
            backlog.at_work.retain(|other| other != child);
        }
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.at_work.is_empty());
    }

    /// All that waits for a child goes to the next one, if there is a place.
    pub(crate) fn work_off(&mut self, birth: Option<Birth>) {
        let waits = |at: &usize| !self.head.backlogs[*at].held.is_empty() && self.has_place(*at);
        let next = (0..self.head.backlogs.len()).find(waits);
        if let (Some(at), Some(birth)) = (next, birth) {
            let events = self.head.backlogs[at].held.entries() / ENTRIES;
            self.bear(at, birth, events, Vec::new());
        }
    }

    pub(crate) fn free_place(&mut self, child: &ThreadId, birth: Option<Birth>) -> Result<(), Ignored> {
        if !self.head.backlogs.iter().any(|backlog| backlog.at_work.contains(child)) {
            return Err(Ignored::Duplicate);
        }
        self.leave_work(child);
        self.work_off(birth);
        Ok(())
    }

    /// A subscription was cancelled: nobody waits for what it sent.
    pub(crate) fn drop_backlog(&mut self, call: &CallId) {
        let Some(backlog) = self.head.backlogs.iter_mut().find(|backlog| backlog.call == *call) else {
            return;
        };
        let dropped = backlog.clone();
        backlog.held = Held { first: dropped.held.next, next: dropped.held.next, ..Held::default() };
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.at_work.is_empty());
        self.discard(&dropped);
    }

    pub(crate) fn discard(&mut self, backlog: &Backlog) {
        if !backlog.held.is_empty() {
            let events = backlog.held.entries() / ENTRIES;
            self.writes.push(Write::Discard { call: backlog.call.clone() });
            self.append(Item::notice(words::dropped(&backlog.call, events)));
        }
    }

    /// A thread that was made for events and is not at work any more leaves its place to the next.
    pub(crate) fn rest_if_made(&mut self) {
        let stuck = matches!(self.head.phase, Phase::Idle | Phase::Failed { .. } | Phase::Paused { .. });
        if stuck && matches!(self.head.origin, Origin::Event { .. }) {
            self.leave_place();
        }
    }

    pub(crate) fn leave_place(&mut self) {
        if let Origin::Event { parent, .. } = &self.head.origin
            && !self.head.rests
        {
            self.effects.push(Effect::Tell { to: parent.clone(), letter: Letter::ChildRests });
            self.head.rests = true;
        }
    }
}
