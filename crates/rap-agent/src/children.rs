//! Children. An event that is not associative goes to an event child. If no slot for a child is free, the event waits in
//! the backlog of its subscription. A new child receives up to `events_per_child` waiting events.

use rap_protocol::{Body, CallId, ThreadId};

use crate::budget::Verdict;
use crate::callback::event_kind;
use crate::head::{Pause, TurnInProgress};
use crate::step::StepBuilder;
use crate::texts;
use crate::title::title_of;
use crate::{
    Amounts, Arguments, Backlog, BacklogRange, Effect, Entry, Event, Head, Ignored, InputQueue, Item, Origin,
    PauseScope, Phase, Seq, Spawn, Speaker, Subscription, ThreadMessage, ToolResult, Write,
};

/// Number of entries of an event: a call and its result.
const EVENT_ENTRIES: u64 = 2;
/// Maximum number of open event children that reported themselves idle. Beyond it the oldest is closed.
const MAX_IDLE_EVENT_CHILDREN: usize = 1024;

impl StepBuilder<'_> {
    /// Handles an event that goes to a child: spawns the child at once, or adds the event to the backlog.
    pub(crate) fn handle_event_in_child(
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
        let arguments = Arguments::Synthetic {
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
        let write =
            |(number, item)| Write::Backlog { call: call.clone(), number, entry: Entry { at: now, item } };
        self.writes.extend((first..).zip(items).map(write));
        Ok(())
    }

    /// Returns the index of a subscription's backlog, which is created if needed. Backlogs may outlive their
    /// subscriptions, so the limit is twice the number of subscriptions.
    fn backlog_of(&mut self, subscription: &Subscription) -> Result<usize, Ignored> {
        let backlogs = &mut self.head.backlogs;
        if let Some(at) = backlogs.iter().position(|backlog| backlog.call == subscription.id) {
            return Ok(at);
        }
        if backlogs.len() >= 2 * self.limits.subscriptions.max(1) {
            return Err(Ignored::Full("the events of too many subscriptions wait for a child"));
        }
        let (call, tool) = (subscription.id.clone(), subscription.name.clone());
        backlogs.push(Backlog { call, tool, held: InputQueue::default(), active_children: Vec::new() });
        Ok(backlogs.len() - 1)
    }

    /// Returns whether a slot for an event child is free. Children that the model spawned do not occupy slots: their
    /// parent does not know whether they are idle.
    fn may_spawn(&self, backlog: usize) -> bool {
        self.head.active_event_children() < self.limits.children
            && self.head.backlogs[backlog].active_children.len() < self.limits.event_children
    }

    /// Spawns an event child. It inherits the history up to the last settled point.
    fn spawn_for_events(&mut self, backlog: usize, events: u32, mut items: Vec<Item>) {
        let title = event_title(&self.head.backlogs[backlog].tool, events, &items);
        items.push(Item::message(texts::event_child(events), Speaker::Runtime));
        let waiting = &mut self.head.backlogs[backlog];
        let (call, tool) = (waiting.call.clone(), waiting.tool.clone());
        let range = (!waiting.held.is_empty()).then(|| BacklogRange {
            call: call.clone(),
            first: waiting.held.take_inputs(events, EVENT_ENTRIES),
            count: u64::from(events) * EVENT_ENTRIES,
        });
        // The events are external input of the parent as well.
        self.note_external_input();
        let at = self.head.settled_up_to;
        let waited = range.as_ref().map_or(0, |range| range.count);
        let head = Head {
            origin: Origin::Event { parent: self.facts.thread.id.clone(), call, tool },
            seq: at + waited + items.len() as u64,
            settled_up_to: at,
            answered_up_to: at,
            // The child does not inherit a summary that was written after that point.
            summarised_up_to: Some(self.head.summarised_up_to).filter(|covers| *covers < at).unwrap_or(0),
            external_input_at: self.head.external_input_at,
            turns_reset_at: self.head.external_input_at,
            title,
            ..Head::new()
        };
        let entries = items.into_iter().map(|item| Entry { at: self.now, item }).collect();
        let child = self.spawn_child(head, at, range, entries);
        self.head.backlogs[backlog].active_children.push(child);
    }

    /// Adds a child. Its first turn starts at once, or when the session's budget allows it.
    pub(crate) fn spawn_child(
        &mut self,
        mut head: Head,
        at: Seq,
        backlog: Option<BacklogRange>,
        mut entries: Vec<Entry>,
    ) -> ThreadId {
        self.head.ids_made += 2;
        let (id, incarnation) =
            (self.facts.thread.derive(self.head.ids_made - 1), self.facts.thread.derive(self.head.ids_made));
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
                (head.turn, head.turns_since_external_input) = (1, 1);
                let up_to = head.seq;
                head.phase = Phase::Asking(TurnInProgress { up_to, dropped: 0, failing_since: None });
                effects.push(Effect::AskModel { turn: 1, up_to });
            }
            Some(pause) => {
                entries.push(Entry { at: self.now, item: Item::notice(&pause.why) });
                head.seq += 1;
                head.phase = Phase::Paused(pause);
            }
        }
        self.head.counted_children.push(id.clone());
        let spawn = Spawn { id: id.clone(), incarnation, at, head, backlog, entries, effects };
        self.writes.push(Write::Spawn(Box::new(spawn)));
        id
    }

    /// Frees the slot of a child.
    fn remove_from_backlogs(&mut self, child: &ThreadId) {
        for backlog in &mut self.head.backlogs {
            backlog.active_children.retain(|other| other != child);
        }
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.active_children.is_empty());
    }

    /// Spawns children for waiting events while slots are free.
    fn spawn_for_backlogs(&mut self) {
        let waits = |step: &Self, at: &usize| !step.head.backlogs[*at].held.is_empty() && step.may_spawn(*at);
        while let Some(at) = (0..self.head.backlogs.len()).find(|at| waits(self, at)) {
            let waiting = self.head.backlogs[at].held.inputs;
            self.spawn_for_events(at, waiting.min(self.limits.events_per_child.max(1)), Vec::new());
            // Subscriptions take turns: this one goes behind the others.
            self.head.backlogs[at..].rotate_left(1);
        }
    }

    /// Handles the message that a child was closed.
    pub(crate) fn forget_child(&mut self, child: &ThreadId) -> Result<(), Ignored> {
        let known = self.head.children().any(|open| open == child);
        if !known {
            return Err(Ignored::Duplicate);
        }
        self.head.counted_children.retain(|open| open != child);
        self.head.idle_event_children.retain(|open| open != child);
        self.remove_from_backlogs(child);
        self.spawn_for_backlogs();
        Ok(())
    }

    /// Handles the message that an event child is idle: its slot becomes free.
    pub(crate) fn mark_child_idle(&mut self, child: &ThreadId) -> Result<(), Ignored> {
        if !self.head.backlogs.iter().any(|backlog| backlog.active_children.contains(child)) {
            return Err(Ignored::Duplicate);
        }
        self.remove_from_backlogs(child);
        self.head.counted_children.retain(|open| open != child);
        self.head.idle_event_children.push(child.clone());
        if self.head.idle_event_children.len() > MAX_IDLE_EVENT_CHILDREN {
            let oldest = self.head.idle_event_children.remove(0);
            self.append(Item::notice(texts::idle_child_closed(&oldest)));
            self.send(oldest, ThreadMessage::Close);
        }
        self.spawn_for_backlogs();
        Ok(())
    }

    /// Drops the waiting events of a cancelled subscription.
    pub(crate) fn drop_backlog(&mut self, call: &CallId) {
        let Some(backlog) = self.head.backlogs.iter_mut().find(|backlog| backlog.call == *call) else {
            return;
        };
        let dropped = backlog.clone();
        backlog.held.clear();
        self.head.backlogs.retain(|backlog| !backlog.held.is_empty() || !backlog.active_children.is_empty());
        self.drop_events(&dropped);
    }

    pub(crate) fn drop_events(&mut self, backlog: &Backlog) {
        if !backlog.held.is_empty() {
            let events = backlog.held.entries() / EVENT_ENTRIES;
            self.writes.push(Write::DropBacklog { call: backlog.call.clone() });
            self.append(Item::notice(texts::events_dropped(&backlog.call, events)));
        }
    }

    /// Reports an event child idle if it has stopped working, so that its parent can use the slot.
    pub(crate) fn report_idle_if_stopped(&mut self) {
        let stopped = match &self.head.phase {
            Phase::Idle | Phase::Failed { .. } => true,
            // While the session's budget is exceeded, another child would be paused as well.
            Phase::Paused(pause) => pause.scope == PauseScope::Thread,
            Phase::Asking(_) | Phase::Waiting { .. } | Phase::Closed => false,
        };
        if stopped {
            self.report_idle();
        }
    }

    /// Tells the parent of an event child, once, that the child is idle.
    pub(crate) fn report_idle(&mut self) {
        if let Origin::Event { parent, .. } = &self.head.origin
            && !self.head.reported_idle
        {
            let parent = parent.clone();
            self.send(parent, ThreadMessage::EventChildIdle);
            self.head.reported_idle = true;
        }
    }
}

/// Returns the title of an event child. `items` are the entries of its only event, or empty if its events waited.
fn event_title(tool: &str, events: u32, items: &[Item]) -> Option<String> {
    let text = items.iter().find_map(|item| match item {
        Item::Result { content: Body::Text(text), .. } => Some(text.as_str()),
        _ => None,
    });
    let title = match text {
        Some(text) => format!("event of {tool}: {}", text.trim_start()),
        None if events == 1 => format!("event of {tool}"),
        None => format!("{events} events of {tool}"),
    };
    title_of(&title)
}
