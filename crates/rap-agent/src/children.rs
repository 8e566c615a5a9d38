//! Children. Events that do not belong into the thread itself go to children; where too many children are at work, they
//! wait. A child takes up to `events_per_child` waiting events.

use rap_protocol::{CallId, ThreadId};

use crate::budget::Verdict;
use crate::callback::event_kind;
use crate::head::{Asking, Pause};
use crate::step::Stepping;
use crate::words;
use crate::{
    Amounts, Arguments, Backlog, BacklogRange, Effect, Entry, Event, Head, Held, Ignored, Item, Origin,
    PauseScope, Phase, Seq, Spawn, Speaker, Subscription, ThreadMessage, ToolResult, Write,
};

/// Number of entries of an event: a call and its result.
const EVENT_ENTRIES: u64 = 2;
/// Open children for events that are not at work any more; beyond it the oldest is closed.
const RESTING_CHILDREN: usize = 1024;

impl Stepping<'_> {
    /// Takes an event for a child: a child is spawned at once, or the event waits for one.
    pub(crate) fn take_for_child(
        &mut self,
        subscription: &Subscription,
        event: &Event,
    ) -> Result<(), Ignored> {
        if self.limits.children.min(self.limits.event_children) == 0 {
            return Err(Ignored::Full("no children are allowed"));
        }
        let at = self.backlog_of(subscription)?;
        let spawns = self.may_spawn(at) && self.head.backlogs[at].held.is_empty();
        if !spawns && self.head.backlogs[at].held.is_full(self.limits) {
            return Err(Ignored::Full("too many events wait for a child"));
        }
        let arguments = Arguments::Echo {
            of: subscription.id.clone(),
            kind: event_kind(subscription, event),
            arguments: Some(std::mem::take(&mut self.facts.arguments)),
        };
        let items = self.synthetic_with(&subscription.name, arguments, ToolResult::text(&event.text));
        if spawns {
            self.spawn_for_events(at, 1, items);
            return Ok(());
        }
        let (now, call) = (self.now, subscription.id.clone());
        let first = self.head.backlogs[at].held.add(&items, now);
        let write = |(no, item)| Write::Backlog { call: call.clone(), no, entry: Entry { at: now, item } };
        self.writes.extend((first..).zip(items).map(write));
        Ok(())
    }

    /// The backlog of a subscription. At most as many backlogs again may outlive their subscriptions.
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

    /// Children that the model spawned do not count: they may be idle, and their parent does not know.
    fn may_spawn(&self, backlog: usize) -> bool {
        self.head.at_work() < self.limits.children
            && self.head.backlogs[backlog].at_work.len() < self.limits.event_children
    }

    /// Spawns a child for events. It inherits the history up to the last settled point.
    fn spawn_for_events(&mut self, backlog: usize, events: u32, mut items: Vec<Item>) {
        items.push(Item::User { text: words::event_child(events), from: Speaker::Runtime });
        let waiting = &mut self.head.backlogs[backlog];
        let (call, tool) = (waiting.call.clone(), waiting.tool.clone());
        let range = (!waiting.held.is_empty()).then(|| BacklogRange {
            call: call.clone(),
            first: waiting.held.take_inputs(events, EVENT_ENTRIES),
            count: u64::from(events) * EVENT_ENTRIES,
        });
        // The events are new to the parent as well.
        self.hear_outside();
        let at = self.head.settled;
        let waited = range.as_ref().map_or(0, |range| range.count);
        let head = Head {
            origin: Origin::Event { parent: self.facts.thread.id.clone(), call, tool },
            seq: at + waited + items.len() as u64,
            settled: at,
            answered: at,
            // The child does not see a summary that was made since.
            summarised: Some(self.head.summarised).filter(|covers| *covers < at).unwrap_or(0),
            heard: self.head.heard,
            reset_for: self.head.heard,
            ..Head::new()
        };
        let entries = items.into_iter().map(|item| Entry { at: self.now, item }).collect();
        let child = self.spawn_child(head, at, range, entries);
        self.head.backlogs[backlog].at_work.push(child);
    }

    /// Adds a child whose first question is asked at once, or when the session's budget allows it.
    pub(crate) fn spawn_child(
        &mut self,
        mut head: Head,
        at: Seq,
        backlog: Option<BacklogRange>,
        mut entries: Vec<Entry>,
    ) -> ThreadId {
        self.head.ids += 2;
        let (id, incarnation) =
            (self.facts.thread.derive(self.head.ids - 1), self.facts.thread.derive(self.head.ids));
        let id = ThreadId::new(format!("t{:011x}{id:016x}", self.now.0.max(0)));
        let id = id.expect("bug: an id of digits is well-formed");
        let mut effects = Vec::new();
        let pause = match self.spend(Amounts { turns: 1, tokens: 0, wakes: 1 }) {
            Verdict::Allowed => None,
            Verdict::Spent { why } => Some(Pause { why, scope: PauseScope::Session, until: None }),
            Verdict::Hold { why, until } => {
                Some(Pause { why, scope: PauseScope::Session, until: Some(until) })
            }
        };
        match pause {
            None => {
                (head.turn, head.turns_awake) = (1, 1);
                let up_to = head.seq;
                head.phase = Phase::Asking(Asking { up_to, dropped: 0, failing_since: None });
                effects.push(Effect::Ask { turn: 1, up_to });
            }
            Some(pause) => {
                entries.push(Entry { at: self.now, item: Item::notice(&pause.why) });
                head.seq += 1;
                head.phase = Phase::Paused(pause);
            }
        }
        self.head.children.push(id.clone());
        let spawn = Spawn { id: id.clone(), incarnation, at, head, backlog, entries, effects };
        self.writes.push(Write::Spawn(Box::new(spawn)));
        id
    }

    fn leave_backlogs(&mut self, child: &ThreadId) {
        for backlog in &mut self.head.backlogs {
            backlog.at_work.retain(|other| other != child);
        }
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.at_work.is_empty());
    }

    /// Spawns children for events that wait, as far as children are allowed.
    fn spawn_for_waiting(&mut self) {
        let waits = |step: &Self, at: &usize| !step.head.backlogs[*at].held.is_empty() && step.may_spawn(*at);
        while let Some(at) = (0..self.head.backlogs.len()).find(|at| waits(self, at)) {
            let waiting = self.head.backlogs[at].held.inputs;
            self.spawn_for_events(at, waiting.min(self.limits.events_per_child.max(1)), Vec::new());
            // The others have their turn before this one has another.
            self.head.backlogs[at..].rotate_left(1);
        }
    }

    /// A child is closed.
    pub(crate) fn forget_child(&mut self, child: &ThreadId) -> Result<(), Ignored> {
        let known = self.head.children().any(|open| open == child);
        if !known {
            return Err(Ignored::Duplicate);
        }
        self.head.children.retain(|open| open != child);
        self.head.resting.retain(|open| open != child);
        self.leave_backlogs(child);
        self.spawn_for_waiting();
        Ok(())
    }

    /// A child for events is not at work any more.
    pub(crate) fn rest_child(&mut self, child: &ThreadId) -> Result<(), Ignored> {
        if !self.head.backlogs.iter().any(|backlog| backlog.at_work.contains(child)) {
            return Err(Ignored::Duplicate);
        }
        self.leave_backlogs(child);
        self.head.children.retain(|open| open != child);
        self.head.resting.push(child.clone());
        if self.head.resting.len() > RESTING_CHILDREN {
            let oldest = self.head.resting.remove(0);
            self.append(Item::notice(words::resting_child_closed(&oldest)));
            self.send(oldest, ThreadMessage::Close);
        }
        self.spawn_for_waiting();
        Ok(())
    }

    /// A subscription was cancelled: the events that wait are dropped.
    pub(crate) fn drop_backlog(&mut self, call: &CallId) {
        let Some(backlog) = self.head.backlogs.iter_mut().find(|backlog| backlog.call == *call) else {
            return;
        };
        let dropped = backlog.clone();
        backlog.held.clear();
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.at_work.is_empty());
        self.drop_events(&dropped);
    }

    pub(crate) fn drop_events(&mut self, backlog: &Backlog) {
        if !backlog.held.is_empty() {
            let events = backlog.held.entries() / EVENT_ENTRIES;
            self.writes.push(Write::DropBacklog { call: backlog.call.clone() });
            self.append(Item::notice(words::dropped(&backlog.call, events)));
        }
    }

    /// A thread that was made for events and is not at work any more makes room for another.
    pub(crate) fn leave_work_if_stuck(&mut self) {
        let stuck = match &self.head.phase {
            Phase::Idle | Phase::Failed { .. } => true,
            // While the session's budget is spent, another child would be paused as well.
            Phase::Paused(pause) => pause.scope == PauseScope::Thread,
            Phase::Asking(_) | Phase::Waiting { .. } | Phase::Closed => false,
        };
        if stuck {
            self.leave_work();
        }
    }

    pub(crate) fn leave_work(&mut self) {
        if let Origin::Event { parent, .. } = &self.head.origin
            && !self.head.left_work
        {
            let parent = parent.clone();
            self.send(parent, ThreadMessage::ChildIdle);
            self.head.left_work = true;
        }
    }
}
