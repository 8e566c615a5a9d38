//! A model of the store. It applies the writes of a step and loads exactly the facts that are needed. It panics on a write
//! that a real store could not apply.

use std::collections::BTreeMap;

use rap_agent::{
    Arguments, BacklogRange, CallState, Effect, Entry, Facts, FactsNeeded, Head, Identity, Item, Occurrence,
    PastCall, Phase, Queue, Seq, Server, Spawn, Spending, Step, Write,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};

use super::Names;

#[derive(Clone)]
pub struct Store {
    calls: BTreeMap<CallId, PastCall>,
    timers: BTreeMap<CallId, Timestamp>,
    marks: BTreeMap<(CallId, EventId), u64>,
    history: BTreeMap<Seq, Entry>,
    held: BTreeMap<(Queue, u64), Entry>,
    backlogs: BTreeMap<(CallId, u64), Entry>,
    /// Entries of each child when it was spawned, without the inherited ones.
    spawned: Vec<(ThreadId, BTreeMap<Seq, Entry>)>,
    pub spending: Spending,
    /// Other threads of the session that its budget has paused.
    pub paused: Vec<ThreadId>,
}

impl Store {
    pub fn new() -> Store {
        Store {
            calls: BTreeMap::new(),
            timers: BTreeMap::new(),
            marks: BTreeMap::new(),
            history: BTreeMap::new(),
            held: BTreeMap::new(),
            backlogs: BTreeMap::new(),
            spawned: Vec::new(),
            spending: Spending::new(Timestamp(0)),
            paused: Vec::new(),
        }
    }

    pub fn of_child(&self, child: &ThreadId) -> Store {
        let history = self.entries_of(child).clone();
        Store { history, spending: self.spending, ..Store::new() }
    }

    pub fn children(&self) -> impl Iterator<Item = &ThreadId> {
        self.spawned.iter().map(|(child, _)| child)
    }

    /// Returns the entries of a child when it was spawned, without the inherited ones.
    pub fn entries_of(&self, child: &ThreadId) -> &BTreeMap<Seq, Entry> {
        &self.spawned.iter().find(|(known, _)| known == child).expect("a child").1
    }

    pub fn history(&self) -> impl Iterator<Item = &Item> {
        self.history.values().map(|entry| &entry.item)
    }

    pub fn load(&self, needs: &FactsNeeded, thread: Identity, occurrence: Option<Occurrence>) -> Facts {
        let FactsNeeded { call, event, arguments, schedule, spending, paused } = needs;
        Facts {
            call: call.as_ref().and_then(|call| self.calls.get(call).cloned()),
            event_is_known: event.as_ref().is_some_and(|event| self.marks.contains_key(event)),
            arguments: arguments.as_ref().map(|(call, seq)| self.arguments(call, *seq)).unwrap_or_default(),
            schedule: schedule.as_ref().and(occurrence),
            spending: spending.then_some(self.spending),
            paused: if *paused { self.paused.clone() } else { Vec::new() },
            ..Facts::of(thread)
        }
    }

    fn arguments(&self, call: &CallId, seq: Seq) -> serde_json::Map<String, serde_json::Value> {
        let entry = self.history.get(&seq).map(|entry| &entry.item);
        let Some(Item::Assistant { calls, .. }) = entry else { panic!("entry {seq} makes no calls") };
        let made = calls.iter().find(|made| made.id == *call);
        match made.map(|made| &made.arguments) {
            Some(Arguments::Given(arguments)) => arguments.clone(),
            other => panic!("the arguments of {call} in {seq} are {other:?}"),
        }
    }

    pub fn write(&mut self, step: &Step, needs: &FactsNeeded, names: &mut Names) {
        for write in &step.writes {
            self.write_one(write, needs);
            if let Write::Append { entry, .. } = write {
                names.register(&entry.item);
            }
        }
        let sends = step.writes.iter().any(|write| matches!(write, Write::Send { .. }));
        let delivers = step.effects.iter().filter(|effect| **effect == Effect::Deliver).count();
        assert_eq!(delivers, usize::from(sends));
    }

    fn write_one(&mut self, write: &Write, needs: &FactsNeeded) {
        match write {
            Write::Append { seq, entry } => self.append(*seq, entry.clone()),
            Write::Hold { queue, number, entry } => {
                let last = self.held.keys().filter(|(other, _)| other == queue).max();
                assert!(
                    last.is_none_or(|(_, last)| last + 1 == *number),
                    "entry {number} of {queue:?} leaves a gap"
                );
                assert!(self.held.insert((*queue, *number), entry.clone()).is_none());
            }
            Write::Release { queue, first, count, seq } => {
                for (number, seq) in (*first..first + count).zip(*seq..) {
                    let entry = self.held.remove(&(*queue, number)).expect("released entries are held");
                    self.append(seq, entry);
                }
            }
            Write::Open(open) => {
                let (name, server, seq) = (open.name.clone(), open.server.clone(), open.seq);
                let past = PastCall { name, server, seq, state: CallState::Open };
                assert_eq!(
                    self.calls.insert(open.id.clone(), past),
                    None,
                    "the call id {} is unique",
                    open.id
                );
                self.set_timer(&open.id, open.until);
            }
            Write::Approve(open) => self.set_timer(&open.id, open.timer()),
            Write::Settle { call, state } => {
                self.calls.get_mut(call).expect("only opened calls are settled").state = *state;
                self.timers.remove(call);
            }
            Write::Timer { call, at } => self.set_timer(call, *at),
            Write::RecordEventId { call, event, number, forget } => {
                self.marks.insert((call.clone(), event.clone()), *number);
                self.marks.retain(|(of, _), number| of != call || *number > *forget);
            }
            Write::Backlog { call, number, entry } => {
                let last = self.backlogs.keys().filter(|(of, _)| of == call).max();
                assert!(
                    last.is_none_or(|(_, last)| last + 1 == *number),
                    "entry {number} of the backlog leaves a gap"
                );
                assert!(self.backlogs.insert((call.clone(), *number), entry.clone()).is_none());
            }
            Write::DropBacklog { call } => self.backlogs.retain(|(of, _), _| of != call),
            Write::Spawn(spawn) => self.spawn(spawn),
            Write::Spending(spending) => {
                assert!(needs.spending, "spending is written only if it was needed");
                self.spending = *spending;
            }
            Write::View { server, .. } => assert_eq!(*server, Server("https://tools.example".into())),
            Write::Question { .. } | Write::Answer { .. } | Write::DropQuestions { .. } => {}
            Write::Send { .. } => {}
        }
    }

    fn append(&mut self, seq: Seq, entry: Entry) {
        let last = self.history.keys().max();
        assert!(last.is_none_or(|last| last + 1 == seq), "entry {seq} leaves a gap");
        assert!(self.history.insert(seq, entry).is_none(), "entry {seq} exists already");
    }

    fn set_timer(&mut self, call: &CallId, at: Option<Timestamp>) {
        match at {
            Some(at) => self.timers.insert(call.clone(), at),
            None => self.timers.remove(call),
        };
    }

    fn spawn(&mut self, spawn: &Spawn) {
        let mut entries = Vec::new();
        if let Some(BacklogRange { call, first, count }) = &spawn.backlog {
            let oldest = self.backlogs.keys().filter(|(of, _)| of == call).min();
            assert_eq!(oldest.map(|(_, number)| number), Some(first), "the oldest events go first");
            for number in *first..first + count {
                entries.push(
                    self.backlogs
                        .remove(&(call.clone(), number))
                        .expect("the entries of the range are in the backlog"),
                );
            }
        }
        entries.extend(spawn.entries.iter().cloned());
        assert_eq!(spawn.head.seq(), spawn.at + entries.len() as u64);
        let ask =
            spawn.head.turn_in_progress().map(|turn| Effect::AskModel { turn, up_to: spawn.head.seq() });
        assert_eq!(spawn.effects, ask.into_iter().collect::<Vec<_>>());
        check_stored_form(&spawn.head);
        self.spawned.push((spawn.id.clone(), (spawn.at + 1..).zip(entries).collect()));
    }

    /// Checks that the stored rows and the head agree.
    pub fn check(&self, head: &Head) {
        check_stored_form(head);
        assert_eq!(self.history.keys().max().copied().unwrap_or(0), head.seq());
        let open = head.open_calls().filter_map(|call| Some((call.id.clone(), call.timer()?)));
        let schedules =
            head.subscriptions().iter().filter_map(|active| Some((active.id.clone(), active.next?)));
        assert_eq!(self.timers, open.chain(schedules).collect(), "the timers of calls and schedules");
        let count = |queue| self.held.keys().filter(|(of, _)| *of == queue).count() as u64;
        assert_eq!(
            (count(Queue::UntilBatchCloses), count(Queue::UntilIdle)),
            (head.held().entries(), head.queued().entries())
        );
        let waiting: u64 = head.backlogs().iter().map(|backlog| backlog.held.entries()).sum();
        assert_eq!(self.backlogs.len() as u64, waiting);
        for (id, call) in &self.calls {
            let open = call.state == CallState::Open;
            assert_eq!(open, head.is_open(id), "{id} is stored as {:?}", call.state);
            assert_eq!(call.state == CallState::Subscribed, head.subscription(id).is_some(), "{id}");
        }
        self.check_history(head);
    }

    /// I5: after an assistant entry, only the results of its calls and notices follow until every call has its result.
    fn check_history(&self, head: &Head) {
        let mut missing: Vec<&CallId> = Vec::new();
        for item in self.history() {
            match item {
                Item::Notice { .. } => {}
                Item::Result { call_id, .. } => missing.retain(|call| *call != call_id),
                Item::Assistant { calls, .. } => {
                    assert_eq!(missing, Vec::<&CallId>::new(), "calls without a result");
                    missing.extend(calls.iter().map(|call| &call.id));
                }
                Item::User { .. } | Item::Summary { .. } => {
                    assert_eq!(missing, Vec::<&CallId>::new(), "calls without a result");
                }
            }
        }
        let batch: Vec<&CallId> = head.batch().iter().map(|call| &call.id).collect();
        assert_eq!(missing, batch, "{:?}", matches!(head.phase(), Phase::Waiting { .. }));
    }
}

fn check_stored_form(head: &Head) {
    let json = serde_json::to_string(head).expect("every head can be serialized");
    assert_eq!(serde_json::from_str::<Head>(&json).expect("every stored head can be read"), *head, "{json}");
}
