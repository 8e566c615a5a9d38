//! A simple reference implementation of the store in memory. It stores each committed step and reports writes that a
//! database would refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rap_agent::{
    CallState, Entry, Facts, Head, Input, Item, Limits, NewQuestion, OpenCall, PastCall, Queue, Seq, Server,
    Spending, Status, Step, ThreadMessage, Write, facts_needed,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::Value;

use super::invariants::{Violation, violation};
use super::tracker::arguments_of;
use crate::engine::built_in;
use crate::store::{Thread, ThreadKey};

/// Index of a thread in the reference store. It is one less than the thread's number in the database.
pub(super) type ThreadIndex = usize;

pub(super) fn index_of(key: ThreadKey) -> ThreadIndex {
    i64::from_be_bytes(key.to_bytes()) as usize - 1
}

#[derive(Default)]
pub(super) struct ReferenceStore {
    pub(super) threads: Vec<Row>,
    /// Messages between threads, in commit order.
    pub(super) outbox: Vec<Outgoing>,
    /// Spending of sessions, by their root.
    pub(super) spending: BTreeMap<ThreadIndex, Spending>,
}

/// A thread and everything that is stored for it.
pub(super) struct Row {
    pub(super) thread: Arc<Thread>,
    pub(super) head: Head,
    /// The thread whose history it inherits.
    pub(super) source: Option<ThreadIndex>,
    /// Its own entries. The first one follows the inherited entries.
    pub(super) entries: Vec<Entry>,
    pub(super) held: BTreeMap<(Queue, u64), Entry>,
    /// Events that wait for an event child.
    pub(super) backlog: BTreeMap<(CallId, u64), Entry>,
    pub(super) calls: BTreeMap<CallId, CallRow>,
    pub(super) questions: BTreeMap<u64, QuestionRow>,
    pub(super) event_ids: BTreeSet<(CallId, EventId)>,
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
            source: thread.source.map(index_of),
            thread,
            head,
            entries,
            held: BTreeMap::new(),
            backlog: BTreeMap::new(),
            calls: BTreeMap::new(),
            questions: BTreeMap::new(),
            event_ids: BTreeSet::new(),
            views: BTreeMap::new(),
        }
    }

    /// Returns the last inherited entry.
    pub(super) fn base(&self) -> Seq {
        self.thread.inherits
    }

    /// Returns the last entry.
    pub(super) fn last(&self) -> Seq {
        self.base() + self.entries.len() as Seq
    }

    pub(super) fn past(&self, call: &CallId) -> Option<PastCall> {
        let CallRow { open, state, .. } = self.calls.get(call)?;
        let (name, server) = (open.name.clone(), open.server.clone());
        Some(PastCall { name, server, seq: open.seq, state: *state })
    }
}

impl ReferenceStore {
    pub(super) fn index(&self, id: &ThreadId) -> Option<ThreadIndex> {
        self.threads.iter().position(|row| row.thread.id == *id)
    }

    /// Adds a root, or a fork with the head after its first step.
    pub(super) fn add(&mut self, thread: &Arc<Thread>, head: Head) -> Result<ThreadIndex, Violation> {
        let index = index_of(thread.key);
        if index != self.threads.len() {
            return violation(format!("I9: thread {} is added at index {index}", thread.id));
        }
        self.threads.push(Row::new(Arc::clone(thread), head, Vec::new()));
        Ok(index)
    }

    pub(super) fn parent(&self, thread: ThreadIndex) -> Option<ThreadIndex> {
        self.threads[thread].thread.parent.map(index_of)
    }

    /// Returns the root of a thread's session.
    pub(super) fn root(&self, thread: ThreadIndex) -> ThreadIndex {
        self.parent(thread).map_or(thread, |parent| self.root(parent))
    }

    /// Returns the number of a thread's ancestors.
    pub(super) fn depth(&self, thread: ThreadIndex) -> usize {
        self.parent(thread).map_or(0, |parent| self.depth(parent) + 1)
    }

    /// Returns the history of a thread up to an entry: the inherited entries, then its own.
    pub(super) fn visible(&self, thread: ThreadIndex, up_to: Seq) -> Vec<&Entry> {
        let row = &self.threads[thread];
        let mut entries = match row.source {
            Some(source) => self.visible(source, row.base().min(up_to)),
            None => Vec::new(),
        };
        let own = up_to.saturating_sub(row.base()) as usize;
        entries.extend(row.entries.iter().take(own));
        entries
    }

    /// Returns the facts that a step needs.
    pub(super) fn facts(&self, thread: ThreadIndex, input: &Input, limits: &Limits, now: Timestamp) -> Facts {
        let row = &self.threads[thread];
        let needs = facts_needed(&row.head, input, limits);
        let mut facts = Facts::of(row.thread.identity());
        let arguments = |call: &CallId| {
            let mut entries = row.entries.iter();
            entries.find_map(|entry| arguments_of(entry, call)).cloned().unwrap_or_default()
        };
        facts.call = needs.call.as_ref().and_then(|call| row.past(call));
        facts.event_is_known = needs.event.as_ref().is_some_and(|event| row.event_ids.contains(event));
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

    /// Stores a step completely.
    pub(super) fn commit(
        &mut self,
        thread: ThreadIndex,
        step: &Step,
        children: &[Arc<Thread>],
    ) -> Result<(), Violation> {
        let mut children = children.iter();
        for write in &step.writes {
            match write {
                Write::Spawn(spawn) => {
                    let Some(child) = children.next() else {
                        return violation(format!("I4: child {} is not stored", spawn.id));
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

    fn spawn(
        &mut self,
        parent: ThreadIndex,
        spawn: &rap_agent::Spawn,
        child: &Arc<Thread>,
    ) -> Result<(), Violation> {
        let mut own = Vec::new();
        if let Some(range) = &spawn.backlog {
            let backlog = &mut self.threads[parent].backlog;
            for number in range.first..range.first + range.count {
                match backlog.remove(&(range.call.clone(), number)) {
                    Some(entry) => own.push(entry),
                    None => {
                        return violation(format!(
                            "I1: {} takes event {number} of {}, which is not in the backlog",
                            spawn.id, range.call
                        ));
                    }
                }
            }
        }
        own.extend(spawn.entries.iter().cloned());
        let same =
            child.id == spawn.id && child.incarnation == spawn.incarnation && child.inherits == spawn.at;
        if index_of(child.key) != self.threads.len() || !same {
            return violation(format!("I9: {} is added as {child:?}", spawn.id));
        }
        self.threads.push(Row::new(Arc::clone(child), spawn.head.clone(), own));
        Ok(())
    }

    fn write(&mut self, thread: ThreadIndex, write: &Write) -> Result<(), Violation> {
        let row = &mut self.threads[thread];
        match write {
            Write::Append { seq, entry } => {
                if *seq != row.last() + 1 {
                    return violation(format!("I4: t{thread} appends entry {seq} after {}", row.last()));
                }
                row.entries.push(entry.clone());
            }
            Write::Hold { queue, number, entry } => {
                if row.held.insert((*queue, *number), entry.clone()).is_some() {
                    return violation(format!("I1: t{thread} holds input {number} twice in {queue:?}"));
                }
            }
            Write::Release { queue, first, count, seq } => {
                if *seq != row.last() + 1 {
                    return violation(format!(
                        "I4: t{thread} releases held input to entry {seq} after {}",
                        row.last()
                    ));
                }
                for number in *first..*first + *count {
                    match row.held.remove(&(*queue, number)) {
                        Some(entry) => row.entries.push(entry),
                        None => {
                            return violation(format!(
                                "I1: t{thread} releases input {number}, which is not held"
                            ));
                        }
                    }
                }
            }
            Write::Open(open) => {
                let call = CallRow { open: open.clone(), state: CallState::Open, timer: open.timer() };
                if row.calls.insert(open.id.clone(), call).is_some() {
                    return violation(format!("I6: t{thread} makes call {} twice", open.id));
                }
            }
            Write::Approve(open) => match row.calls.get_mut(&open.id) {
                Some(row) => (row.open, row.timer) = (open.clone(), open.timer()),
                None => {
                    return violation(format!("I4: t{thread} sends call {}, which it never made", open.id));
                }
            },
            Write::Settle { call, state } => {
                let Some(settled) = row.calls.get_mut(call) else {
                    return violation(format!("I4: t{thread} settles call {call}, which it never made"));
                };
                (settled.state, settled.timer) = (*state, None);
                if *state == CallState::Ended {
                    row.event_ids.retain(|(of, _)| of != call);
                }
            }
            Write::Question { number, call, question } => {
                let (call, question) = (call.clone(), question.clone());
                row.questions.insert(*number, QuestionRow { call, question, selected: None });
            }
            Write::Answer { number, selected } => match row.questions.get_mut(number) {
                Some(question) => question.selected = Some(*selected),
                None => {
                    return violation(format!(
                        "I4: t{thread} answers question {number}, which was not asked"
                    ));
                }
            },
            Write::DropQuestions { call } => row.questions.retain(|_, question| question.call != *call),
            Write::View { server, view_type, content } => {
                row.views.insert((server.clone(), view_type.clone()), content.clone());
            }
            Write::Timer { call, at } => match row.calls.get_mut(call) {
                Some(row) => row.timer = *at,
                None => {
                    return violation(format!(
                        "I4: t{thread} sets a timer for call {call}, which it never made"
                    ));
                }
            },
            Write::RecordEventId { call, event, .. } => {
                _ = row.event_ids.insert((call.clone(), event.clone()))
            }
            Write::Backlog { call, number, entry } => {
                if row.backlog.insert((call.clone(), *number), entry.clone()).is_some() {
                    return violation(format!(
                        "I1: t{thread} stores event {number} of {call} twice in the backlog"
                    ));
                }
            }
            Write::DropBacklog { call } => row.backlog.retain(|(of, _), _| of != call),
            Write::Spawn(_) | Write::Send { .. } | Write::Spending(_) => {}
        }
        Ok(())
    }

    /// Removes a message between threads, because its receiver has applied or refused it. Returns false if it is not
    /// stored.
    pub(super) fn remove_message(
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

/// Returns whether an entry is an answer of the model, not a synthetic one.
pub(super) fn is_answer(item: &Item) -> bool {
    match item {
        Item::Assistant { calls, .. } => !calls.iter().any(|call| call.arguments.is_synthetic()),
        _ => false,
    }
}
