//! What is stored: the model of a store. A commit takes a step whole, and refuses what a database would refuse.
//!
//! Nothing else survives a crash.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::{
    CallState, Cause, Doubt, Effect, Entry, ForkPoint, Head, Letter, Message, NewQuestion, OpenCall,
    PastCall, Queue, Seq, Server, Spending, Step, Write,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::Value;

use super::fault::Fault;
use super::invariants::{Broken, broken};

/// A thread's place in the store; its id is `t` and the number.
pub type Place = usize;

pub fn name(thread: Place) -> ThreadId {
    ThreadId::new(format!("t{thread}")).expect("a short id")
}

pub fn place(id: &ThreadId) -> Place {
    id.as_str()[1..].parse().expect("an id of ours")
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Disk {
    pub threads: Vec<Row>,
    pub outbox: Vec<Outgoing>,
    /// What sessions have spent, by their root.
    pub spending: BTreeMap<Place, Spending>,
    /// The fault of a store that reads past the birth of a child.
    pub shares: bool,
    pub letters: u64,
}

/// A thread and everything that is keyed by it.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub head: Head,
    /// The parent, or the thread that it was forked from, and up to where its history is inherited.
    pub born: Option<(Place, Seq)>,
    /// Its own entries; the first stands behind what is inherited.
    pub entries: Vec<Entry>,
    pub held: BTreeMap<(Queue, u64), Entry>,
    /// Events that wait for a child.
    pub shelf: BTreeMap<(CallId, u64), Entry>,
    pub calls: BTreeMap<CallId, CallRow>,
    pub questions: BTreeMap<u64, QuestionRow>,
    pub marks: BTreeSet<(CallId, EventId)>,
    pub views: BTreeMap<(Server, String), Value>,
    /// Idempotency keys of clients.
    pub keys: BTreeSet<u64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct CallRow {
    pub open: OpenCall,
    pub state: CallState,
    /// What is known of it since its server took it.
    pub acknowledged: Option<Doubt>,
    /// When it fires, where it is the runtime's own.
    pub timer: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct QuestionRow {
    pub call: CallId,
    pub question: NewQuestion,
    pub selected: Option<usize>,
    pub delivered: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    pub no: u64,
    pub from: Place,
    pub to: Place,
    pub letter: Letter,
}

impl Outgoing {
    pub fn message(&self) -> Message {
        self.letter.clone().into_message(name(self.from))
    }
}

impl Row {
    fn new(head: Head, born: Option<(Place, Seq)>, entries: Vec<Entry>) -> Row {
        Row {
            head,
            born,
            entries,
            held: BTreeMap::new(),
            shelf: BTreeMap::new(),
            calls: BTreeMap::new(),
            questions: BTreeMap::new(),
            marks: BTreeSet::new(),
            views: BTreeMap::new(),
            keys: BTreeSet::new(),
        }
    }

    /// The last entry that is inherited.
    pub fn base(&self) -> Seq {
        self.born.map_or(0, |(_, at)| at)
    }

    /// The last entry there is.
    pub fn last(&self) -> Seq {
        self.base() + self.entries.len() as Seq
    }

    pub fn past(&self, call: &CallId) -> Option<PastCall> {
        let row = self.calls.get(call)?;
        Some(PastCall { name: row.open.name.clone(), seq: row.open.seq, state: row.state })
    }

    /// Whether the call's invocation is still due.
    pub fn is_due(&self, call: &CallId) -> bool {
        let due = |row: &CallRow| row.state == CallState::Open && row.acknowledged.is_none();
        self.calls.get(call).is_some_and(|row| due(row) && row.open.is_sent())
    }

    /// Calls of the runtime's own and when they fire, as they are stored.
    pub fn timers(&self) -> impl Iterator<Item = (&CallId, Timestamp)> {
        self.calls.iter().filter_map(|(call, row)| Some((call, row.timer?)))
    }
}

impl Disk {
    pub fn add_root(&mut self) -> Place {
        self.threads.push(Row::new(Head::new(), None, Vec::new()));
        self.threads.len() - 1
    }

    /// Makes a root that begins with a part of a thread's history.
    pub fn fork(&mut self, source: Place, point: ForkPoint, fault: Fault) -> Place {
        let head = self.threads[source].head.fork(point);
        let mut fork = Row::new(head, Some((source, point.at)), Vec::new());
        if fault == Fault::ForksSubscriptions {
            fork.head.subscriptions = self.threads[source].head.subscriptions.clone();
        }
        self.threads.push(fork);
        self.threads.len() - 1
    }

    pub fn parent(&self, thread: Place) -> Option<Place> {
        self.threads[thread].head.origin.parent().map(|(parent, ..)| place(parent))
    }

    /// The root of a thread's session.
    pub fn root(&self, thread: Place) -> Place {
        self.parent(thread).map_or(thread, |parent| self.root(parent))
    }

    /// How many ancestors a thread has.
    pub fn ancestors(&self, thread: Place) -> usize {
        self.parent(thread).map_or(0, |parent| self.ancestors(parent) + 1)
    }

    /// What set a thread going.
    pub fn cause(&self, thread: Place) -> Cause {
        let of_parent = || self.parent(thread).map_or(Cause::Client, |parent| self.cause(parent));
        self.threads[thread].head.origin.cause().unwrap_or_else(of_parent)
    }

    /// What a thread sees up to an entry: what it inherits, then its own.
    pub fn visible(&self, thread: Place, up_to: Seq) -> Vec<&Entry> {
        let row = &self.threads[thread];
        let mut entries = match row.born {
            Some((parent, _)) if self.shares => self.visible(parent, Seq::MAX),
            Some((parent, at)) => self.visible(parent, at.min(up_to)),
            None => Vec::new(),
        };
        let own = up_to.saturating_sub(row.base()) as usize;
        entries.extend(row.entries.iter().take(own));
        entries
    }

    /// Stores a step: all of it.
    pub fn commit(
        &mut self,
        thread: Place,
        step: &Step,
        key: Option<u64>,
        fault: Fault,
    ) -> Result<(), Broken> {
        for write in &step.writes {
            self.write(thread, write, fault)?;
        }
        for effect in &step.effects {
            let Effect::Tell { to, letter } = effect else { continue };
            self.letters += 1;
            self.outbox.push(Outgoing {
                no: self.letters,
                from: thread,
                to: place(to),
                letter: letter.clone(),
            });
        }
        let row = &mut self.threads[thread];
        row.head = step.head.clone();
        row.keys.extend(key.filter(|_| fault != Fault::ForgetsKeys));
        Ok(())
    }

    fn write(&mut self, thread: Place, write: &Write, fault: Fault) -> Result<(), Broken> {
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
                let mut released = Vec::new();
                for no in *first..*first + *count {
                    match row.held.remove(&(*queue, no)) {
                        Some(entry) => released.push(entry),
                        None => return broken(format!("I1: t{thread} releases {no}, which is not held")),
                    }
                }
                if fault == Fault::ReversesHeld {
                    released.chunks_mut(2).for_each(|pair| pair.reverse());
                    released.reverse();
                }
                row.entries.extend(released);
            }
            Write::Open(open) => {
                let timer = open.until.filter(|_| open.server.is_runtime());
                let call = CallRow { open: open.clone(), state: CallState::Open, acknowledged: None, timer };
                if row.calls.insert(open.id.clone(), call).is_some() {
                    return broken(format!("I6: t{thread} makes call {} twice", open.id));
                }
            }
            Write::Dispatch(open) => match row.calls.get_mut(&open.id) {
                Some(row) => row.open = open.clone(),
                None => return broken(format!("I4: t{thread} sends {}, which it never made", open.id)),
            },
            Write::Settle { call, state } => {
                let Some(row) = row.calls.get_mut(call) else {
                    return broken(format!("I4: t{thread} settles {call}, which it never made"));
                };
                row.state = *state;
                row.timer = None;
                if *state == CallState::Ended {
                    self.threads[thread].marks.retain(|(of, _)| of != call);
                }
            }
            Write::Ask { no, call, question } => {
                let (call, question) = (call.clone(), question.clone());
                row.questions.insert(*no, QuestionRow { call, question, selected: None, delivered: false });
            }
            Write::Answer { no, selected } => match row.questions.get_mut(no) {
                Some(question) => question.selected = Some(*selected),
                None => return broken(format!("I4: t{thread} answers {no}, which nobody asked")),
            },
            Write::Forget { call } => row.questions.retain(|_, question| question.call != *call),
            Write::View { server, view_type, content } => {
                row.views.insert((server.clone(), view_type.clone()), content.clone());
            }
            Write::Timer { call, at } => match row.calls.get_mut(call) {
                Some(row) => row.timer = *at,
                None => return broken(format!("I4: t{thread} has a timer of {call}, which it never made")),
            },
            Write::Seen { call, event } => {
                if fault != Fault::ForgetsMarks {
                    row.marks.insert((call.clone(), event.clone()));
                }
            }
            Write::Shelve { call, no, entry } => {
                if row.shelf.insert((call.clone(), *no), entry.clone()).is_some() {
                    return broken(format!("I1: t{thread} shelves {no} of {call} twice"));
                }
            }
            Write::Discard { call } => row.shelf.retain(|(of, _), _| of != call),
            Write::Born { child, at, head, shelf, entries } => {
                let mut own = Vec::new();
                if let Some((call, count)) = shelf {
                    let (taken, left) =
                        std::mem::take(&mut row.shelf).into_iter().partition(|((of, _), _)| of == call);
                    row.shelf = left;
                    own.extend::<Vec<Entry>>(BTreeMap::into_values(taken).collect());
                    if own.len() as u64 != *count {
                        return broken(format!(
                            "I1: {child} takes {count} of {call}, there are {}",
                            own.len()
                        ));
                    }
                }
                own.extend(entries.iter().cloned());
                if place(child) != self.threads.len() {
                    return broken(format!("I9: {child} is born twice"));
                }
                self.threads.push(Row::new((**head).clone(), Some((thread, *at)), own));
            }
        }
        Ok(())
    }
}
