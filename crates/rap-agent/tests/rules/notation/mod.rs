//! Rules as tables. A line is `input -> consequences`, in a few words:
//!
//! ```text
//! said hi          -> asking 1; user hi; ask 1
//! answer: a b      -> waiting; assistant[a b]; open a; open b; invoke a; invoke b
//! returned a: 42   -> waiting; settle a Returned; a: 42
//! ```
//!
//! First the phase, then the writes, then the effects. An input that changes nothing is `ignored: why`.
//!
//! A call has the model's own id as its name (`a`), a call that the runtime made is `rap_1`, `rap_2` … in order of
//! appearance, a question `#1`, `#2` …, a child `t1`, `t2` …. The thread itself is `t0`.
//!
//! The inputs and the calls of an answer are described in [`read`], the model of the store in [`store`]. Facts are
//! loaded only as far as `facts_needed` asks for them.

mod names;
pub mod read;
mod show;
mod store;

use std::time::Duration;

use rap_agent::{
    Bounds, Budgets, Head, Identity, Ignored, Input, Limits, Occurrence, Spawn, Step, Write, facts_needed,
    step,
};
use rap_protocol::{CallId, ThreadId, Timestamp};

pub use names::Names;
pub use store::Store;

/// Bounds that a table can reach.
pub fn narrow() -> Limits {
    Limits {
        subscriptions: 2,
        open_calls: 3,
        held: 2,
        held_bytes: 1 << 20,
        questions: 2,
        children: 1,
        event_children: 1,
        events_per_child: 100,
        event_marks: 100_000,
        depth: 2,
        views: 64,
        turns_per_wake: 3,
        hold_max: Duration::from_secs(60),
        call_timeout: Some(Duration::from_secs(100)),
        approval_within: Duration::from_secs(24 * 3600),
        failed_retry_for: Duration::from_secs(3600),
        budgets: Budgets::default(),
    }
}

/// A thread, and what a store would know of it.
#[derive(Clone)]
pub struct Thread {
    pub head: Head,
    pub identity: Identity,
    pub limits: Limits,
    pub now: Timestamp,
    pub names: Names,
    pub store: Store,
}

/// Plays a table line by line.
pub fn check(table: &str) {
    check_with(narrow(), table);
}

pub fn check_with(limits: Limits, table: &str) {
    Thread::new(limits).play(table);
}

/// Plays a table in a child that was spawned for an event of its parent's subscription `s`.
pub fn check_child(table: &str) {
    event_child(narrow()).play(table);
}

/// Plays a table in a child that was spawned by call `p`.
pub fn check_spawned(table: &str) {
    spawned_child(narrow()).play(table);
}

/// A child that was spawned for an event of its parent's subscription `s`.
pub fn event_child(limits: Limits) -> Thread {
    let mut parent = Thread::after(limits, &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    parent.spawn("event s: ding, child")
}

/// A child that was spawned by call `p`.
pub fn spawned_child(limits: Limits) -> Thread {
    Thread::after(limits, &["said hi"]).spawn("answer: p=spawn(dig)")
}

/// Brings a thread into a state, then tries each line of the table from there.
pub fn from(lines: &[&str], table: &str) {
    let thread = Thread::after(narrow(), lines);
    compare(table, |line| thread.clone().take(line));
}

/// Plays a table of what each input spends: `turns, tokens, wakes`, those of new children included.
pub fn check_spending(table: &str) {
    let all = Bounds { turns: Some(u64::MAX), tokens: Some(u64::MAX), wakes: Some(u64::MAX) };
    let budgets = Budgets { per_hour: all, in_total: all };
    let mut thread = Thread::new(Limits { event_children: 2, children: 2, budgets, ..narrow() });
    compare(table, |line| thread.spend(line));
}

pub fn compare(table: &str, mut take: impl FnMut(&str) -> String) {
    let mut differs = false;
    let mut real = String::new();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (input, expected) = line.split_once("->").unwrap_or((line, ""));
        let outcome = take(input.trim());
        differs |= outcome != expected.trim();
        real.push_str(&format!("        {:<26} -> {outcome}\n", input.trim()));
    }
    assert!(!differs, "expected:\n{table}\nreally:\n{real}");
}

pub fn id(text: &str) -> CallId {
    CallId::new(text).expect("an id")
}

pub fn thread_id(text: &str) -> ThreadId {
    ThreadId::new(text).expect("an id")
}

impl Thread {
    pub fn new(limits: Limits) -> Thread {
        Thread::with(Identity { id: thread_id("t0"), incarnation: 7, depth: 0 }, limits)
    }

    pub fn with(identity: Identity, limits: Limits) -> Thread {
        let (names, store) = (Names::default(), Store::new());
        Thread { head: Head::new(), identity, limits, now: Timestamp(0), names, store }
    }

    /// A thread that has taken these lines.
    pub fn after(limits: Limits, lines: &[&str]) -> Thread {
        let mut thread = Thread::new(limits);
        thread.take_all(lines);
        thread
    }

    pub fn take_all(&mut self, lines: &[&str]) {
        for line in lines {
            let outcome = self.take(line);
            assert!(!outcome.starts_with("ignored"), "{line} -> {outcome}");
        }
    }

    pub fn play(&mut self, table: &str) {
        compare(table, |line| self.take(line));
    }

    pub fn take(&mut self, line: &str) -> String {
        if self.is_preparation(line) {
            return "prepared".into();
        }
        let (input, occurrence) = read::input(self, line);
        match self.step_with(input, occurrence) {
            Ok(step) => show::step(&step, &mut self.names),
            Err(why) => format!("ignored: {why:?}").replace('"', ""),
        }
    }

    /// Lets time pass, or changes what the store knows of other threads.
    pub fn is_preparation(&mut self, line: &str) -> bool {
        let seconds = |text: &str| text.trim_end_matches('s').parse::<i64>().expect("seconds") * 1000;
        if let Some(text) = line.strip_prefix("after ") {
            self.now.0 += seconds(text);
        } else if let Some(text) = line.strip_prefix("clock back ") {
            self.now.0 -= seconds(text);
        } else if let Some(others) = line.strip_prefix("paused elsewhere ") {
            self.store.paused = others.split(' ').map(thread_id).collect();
        } else {
            return false;
        }
        true
    }

    /// The child that an input spawns.
    pub fn spawn(&mut self, line: &str) -> Thread {
        let step = self.step_line(line).expect("a step");
        let spawned = step.writes.into_iter().find_map(|write| match write {
            Write::Spawn(spawn) => Some(*spawn),
            _ => None,
        });
        let Spawn { id, incarnation, head, .. } = spawned.expect("a child");
        let identity = Identity { id: id.clone(), incarnation, depth: self.identity.depth + 1 };
        let names = self.names.without_threads();
        let store = self.store.of_child(&id);
        Thread { head, identity, limits: self.limits.clone(), now: self.now, names, store }
    }

    pub fn step_line(&mut self, line: &str) -> Result<Step, Ignored> {
        let (input, occurrence) = read::input(self, line);
        self.step_with(input, occurrence)
    }

    pub fn step(&mut self, input: Input) -> Result<Step, Ignored> {
        self.step_with(input, None)
    }

    /// Loads the facts that are asked for, takes the step and writes what follows.
    fn step_with(&mut self, input: Input, occurrence: Option<Occurrence>) -> Result<Step, Ignored> {
        let needs = facts_needed(&self.head, &input, &self.limits);
        let facts = self.store.load(&needs, self.identity.clone(), occurrence);
        let step = step(self.head.clone(), input, facts, self.now, &self.limits)?;
        self.store.write(&step, &needs, &mut self.names);
        self.head = step.head.clone();
        self.store.check(&self.head);
        Ok(step)
    }

    fn spend(&mut self, line: &str) -> String {
        let before = self.store.spending.total;
        if self.take(line) == "prepared" {
            return "prepared".into();
        }
        let after = self.store.spending.total;
        let spent = [after.turns - before.turns, after.tokens - before.tokens, after.wakes - before.wakes];
        spent.map(|amount| amount.to_string()).join(", ")
    }
}
