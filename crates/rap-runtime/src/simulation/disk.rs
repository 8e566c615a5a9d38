//! The reference model of the store. It takes each committed step whole, and refuses what a database would refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rap_agent::{
    CallState, Entry, Facts, Head, Input, Item, Limits, NewQuestion, OpenCall, PastCall, Queue, Seq, Server,
    Spending, Status, Step, ThreadMessage, Write, facts_needed,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::Value;

use super::invariants::{Broken, broken};
use super::watch::arguments_of;
use crate::engine::built_in;
use crate::store::{Thread, ThreadKey};

/// A thread's number in the model, counted from 0.
pub(super) type Place = usize;

pub(super) fn place_of(key: ThreadKey) -> Place {
    i64::from_be_bytes(key.to_bytes()) as usize - 1
}

#[derive(Default)]
pub(super) struct Disk {
    pub(super) threads: Vec<Row>,
    /// Messages between threads, in the order of their numbers.
    pub(super) outbox: Vec<Outgoing>,
    /// What sessions have spent, by their root.
    pub(super) spending: BTreeMap<Place, Spending>,
}

/// A thread and everything that is keyed by it.
pub(super) struct Row {
    pub(super) thread: Arc<Thread>,
    pub(super) head: Head,
    /// The thread whose history it inherits.
    pub(super) source: Option<Place>,
    /// Its own entries; the first stands behind what is inherited.
    pub(super) entries: Vec<Entry>,
    pub(super) held: BTreeMap<(Queue, u64), Entry>,
    /// Events that wait for a child.
    pub(super) backlog: BTreeMap<(CallId, u64), Entry>,
    pub(super) calls: BTreeMap<CallId, CallRow>,
    pub(super) questions: BTreeMap<u64, QuestionRow>,
    pub(super) marks: BTreeSet<(CallId, EventId)>,
    pub(super) views: BTreeMap<(Server, String), Value>,
}

pub(super) struct CallRow {
    pub(super) open: OpenCall,
    pub(super) state: CallState,
    pub(super) timer: Option<Timestamp>,
}

pub(super) struct QuestionRow {
    pub(super) call: CallId,
    pub(super) question: NewQuestion,
    pub(super) selected: Option<usize>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outgoing {
    pub(super) sender: ThreadId,
    pub(super) receiver: ThreadId,
    pub(super) message: ThreadMessage,
}

impl Row {
    fn new(thread: Arc<Thread>, head: Head, entries: Vec<Entry>) -> Row {
        Row {
            source: thread.source.map(place_of),
            thread,
            head,
            entries,
            held: BTreeMap::new(),
            backlog: BTreeMap::new(),
            calls: BTreeMap::new(),
            questions: BTreeMap::new(),
            marks: BTreeSet::new(),
            views: BTreeMap::new(),
        }
    }

    /// The last entry that is inherited.
    pub(super) fn base(&self) -> Seq {
        self.thread.inherits
    }

    /// The last entry there is.
    pub(super) fn last(&self) -> Seq {
        self.base() + self.entries.len() as Seq
    }

    pub(super) fn past(&self, call: &CallId) -> Option<PastCall> {
        let CallRow { open, state, .. } = self.calls.get(call)?;
        let (name, server) = (open.name.clone(), open.server.clone());
        Some(PastCall { name, server, seq: open.seq, state: *state })
    }
}

impl Disk {
    pub(super) fn place(&self, id: &ThreadId) -> Option<Place> {
        self.threads.iter().position(|row| row.thread.id == *id)
    }

    /// Adds a root, or a fork whose head is as its first step left it.
    pub(super) fn add(&mut self, thread: &Arc<Thread>, head: Head) -> Result<Place, Broken> {
        let place = place_of(thread.key);
        if place != self.threads.len() {
            return broken(format!("I9: thread {} is added at {place}", thread.id));
        }
        self.threads.push(Row::new(Arc::clone(thread), head, Vec::new()));
        Ok(place)
    }

    pub(super) fn parent(&self, thread: Place) -> Option<Place> {
        self.threads[thread].thread.parent.map(place_of)
    }

    /// The root of a thread's session.
    pub(super) fn root(&self, thread: Place) -> Place {
        self.parent(thread).map_or(thread, |parent| self.root(parent))
    }

    /// Number of a thread's ancestors.
    pub(super) fn depth(&self, thread: Place) -> usize {
        self.parent(thread).map_or(0, |parent| self.depth(parent) + 1)
    }

    /// What a thread sees up to an entry: what it inherits, then its own.
    pub(super) fn visible(&self, thread: Place, up_to: Seq) -> Vec<&Entry> {
        let row = &self.threads[thread];
        let mut entries = match row.source {
            Some(source) => self.visible(source, row.base().min(up_to)),
            None => Vec::new(),
        };
        let own = up_to.saturating_sub(row.base()) as usize;
        entries.extend(row.entries.iter().take(own));
        entries
    }

    /// The facts that the rules need for a step.
    pub(super) fn facts(&self, thread: Place, input: &Input, limits: &Limits, now: Timestamp) -> Facts {
        let row = &self.threads[thread];
        let needs = facts_needed(&row.head, input, limits);
        let mut facts = Facts::of(row.thread.identity());
        let arguments = |call: &CallId| {
            let mut entries = row.entries.iter();
            entries.find_map(|entry| arguments_of(entry, call)).cloned().unwrap_or_default()
        };
        facts.call = needs.call.as_ref().and_then(|call| row.past(call));
        facts.event_is_known = needs.event.as_ref().is_some_and(|mark| row.marks.contains(mark));
        if let Some((call, _)) = &needs.arguments {
            facts.arguments = arguments(call);
        }
        if let Some((call, _)) = &needs.schedule {
            facts.schedule = Some(built_in::occurrence(&arguments(call), now));
        }
        let root = self.root(thread);
        if needs.paused {
            let others = self.threads.iter().enumerate().filter(|(other, row)| {
                *other != thread && self.root(*other) == root && row.head.status() == Status::NeedsYou
            });
            facts.paused = others.map(|(_, row)| row.thread.id.clone()).collect();
        }
        if needs.spending {
            facts.spending = Some(self.spending.get(&root).copied().unwrap_or_else(|| Spending::new(now)));
        }
        facts
    }

    /// Stores a step: all of it.
    pub(super) fn commit(
        &mut self,
        thread: Place,
        step: &Step,
        children: &[Arc<Thread>],
    ) -> Result<(), Broken> {
        let mut children = children.iter();
        for write in &step.writes {
            match write {
                Write::Spawn(spawn) => {
                    let Some(child) = children.next() else {
                        return broken(format!("I4: child {} is not stored", spawn.id));
                    };
                    self.spawn(thread, spawn, child)?;
                }
                Write::Send { to, message } => {
                    let sender = self.threads[thread].thread.id.clone();
                    self.outbox.push(Outgoing { sender, receiver: to.clone(), message: message.clone() });
                }
                Write::Spending(spending) => {
                    self.spending.insert(self.root(thread), *spending);
                }
                write => self.write(thread, write)?,
            }
        }
        self.threads[thread].head = step.head.clone();
        Ok(())
    }

    fn spawn(&mut self, parent: Place, spawn: &rap_agent::Spawn, child: &Arc<Thread>) -> Result<(), Broken> {
        let mut own = Vec::new();
        if let Some(range) = &spawn.backlog {
            let backlog = &mut self.threads[parent].backlog;
            for no in range.first..range.first + range.count {
                match backlog.remove(&(range.call.clone(), no)) {
                    Some(entry) => own.push(entry),
                    None => {
                        return broken(format!(
                            "I1: {} takes {no} of {}, which is not there",
                            spawn.id, range.call
                        ));
                    }
                }
            }
        }
        own.extend(spawn.entries.iter().cloned());
        let same =
            child.id == spawn.id && child.incarnation == spawn.incarnation && child.inherits == spawn.at;
        if place_of(child.key) != self.threads.len() || !same {
            return broken(format!("I9: {} is added as {child:?}", spawn.id));
        }
        self.threads.push(Row::new(Arc::clone(child), spawn.head.clone(), own));
        Ok(())
    }

    fn write(&mut self, thread: Place, write: &Write) -> Result<(), Broken> {
        let row = &mut self.threads[thread];
        match write {
            Write::Append { seq, entry } => {
                if *seq != row.last() + 1 {
                    return broken(format!("I4: t{thread} appends {seq} behind {}", row.last()));
                }
                row.entries.push(entry.clone());
            }
            Write::Hold { queue, no, entry } => {
                if row.held.insert((*queue, *no), entry.clone()).is_some() {
                    return broken(format!("I1: t{thread} holds {no} twice in {queue:?}"));
                }
            }
            Write::Release { queue, first, count, seq } => {
                if *seq != row.last() + 1 {
                    return broken(format!("I4: t{thread} releases to {seq} behind {}", row.last()));
                }
                for no in *first..*first + *count {
                    match row.held.remove(&(*queue, no)) {
                        Some(entry) => row.entries.push(entry),
                        None => return broken(format!("I1: t{thread} releases {no}, which is not held")),
                    }
                }
            }
            Write::Open(open) => {
                let call = CallRow { open: open.clone(), state: CallState::Open, timer: open.timer() };
                if row.calls.insert(open.id.clone(), call).is_some() {
                    return broken(format!("I6: t{thread} makes call {} twice", open.id));
                }
            }
            Write::Approve(open) => match row.calls.get_mut(&open.id) {
                Some(row) => (row.open, row.timer) = (open.clone(), open.timer()),
                None => return broken(format!("I4: t{thread} sends {}, which it never made", open.id)),
            },
            Write::Settle { call, state } => {
                let Some(settled) = row.calls.get_mut(call) else {
                    return broken(format!("I4: t{thread} settles {call}, which it never made"));
                };
                (settled.state, settled.timer) = (*state, None);
                if *state == CallState::Ended {
                    row.marks.retain(|(of, _)| of != call);
                }
            }
            Write::Question { no, call, question } => {
                let (call, question) = (call.clone(), question.clone());
                row.questions.insert(*no, QuestionRow { call, question, selected: None });
            }
            Write::Answer { no, selected } => match row.questions.get_mut(no) {
                Some(question) => question.selected = Some(*selected),
                None => return broken(format!("I4: t{thread} answers {no}, which nobody asked")),
            },
            Write::DropQuestions { call } => row.questions.retain(|_, question| question.call != *call),
            Write::View { server, view_type, content } => {
                row.views.insert((server.clone(), view_type.clone()), content.clone());
            }
            Write::Timer { call, at } => match row.calls.get_mut(call) {
                Some(row) => row.timer = *at,
                None => return broken(format!("I4: t{thread} has a timer of {call}, which it never made")),
            },
            Write::Mark { call, event, .. } => _ = row.marks.insert((call.clone(), event.clone())),
            Write::Backlog { call, no, entry } => {
                if row.backlog.insert((call.clone(), *no), entry.clone()).is_some() {
                    return broken(format!("I1: t{thread} keeps {no} of {call} twice"));
                }
            }
            Write::DropBacklog { call } => row.backlog.retain(|(of, _), _| of != call),
            Write::Spawn(_) | Write::Send { .. } | Write::Spending(_) => {}
        }
        Ok(())
    }

    /// A message between threads was taken or refused by its receiver.
    pub(super) fn take_message(
        &mut self,
        sender: &ThreadId,
        receiver: &ThreadId,
        message: &ThreadMessage,
    ) -> bool {
        let same =
            |out: &Outgoing| out.sender == *sender && out.receiver == *receiver && out.message == *message;
        let at = self.outbox.iter().position(same);
        at.map(|at| self.outbox.remove(at)).is_some()
    }
}

/// Whether it is something that the model said.
pub(super) fn is_answer(item: &Item) -> bool {
    match item {
        Item::Assistant { calls, .. } => !calls.iter().any(|call| call.arguments.is_synthetic()),
        _ => false,
    }
}
