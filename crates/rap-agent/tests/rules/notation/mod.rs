//! Format of the tables. A line is `input -> outcome`:
//!
//! ```text
//! said hi          -> asking 1; user hi; ask 1
//! answer: a b      -> waiting; assistant[a b]; open a; open b; invoke a; invoke b
//! returned a: 42   -> waiting; settle a Returned; a: 42
//! ```
//!
//! An outcome is the phase, then the writes, then the effects. The outcome of an input that changes nothing is
//! `ignored: REASON`.
//!
//! A call of the model is named by the id that the model gave it (`a`). Synthetic calls are named `rap_1`, `rap_2` … in
//! order of appearance, questions `#1`, `#2` …, and children `t1`, `t2` …. The thread itself is `t0`.
//!
//! [`read`] describes the inputs and the calls of an answer, [`store`] the model of the store. Only the facts that
//! `facts_needed` asks for are loaded.

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

/// Returns limits that are small enough to be reached in a table.
pub fn small_limits() -> Limits {
    Limits {
        subscriptions: 2,
        open_calls: 3,
        held: 2,
        held_bytes: 1 << 20,
        result_bytes: 1 << 20,
        questions: 2,
        children: 1,
        event_children: 1,
        events_per_child: 100,
        event_ids: 100_000,
        depth: 2,
        views: 64,
        turns_per_wake: 3,
        hold_max: Duration::from_secs(60),
        call_timeout: Some(Duration::from_secs(100)),
        approval_within: Duration::from_secs(24 * 3600),
        failed_retry_for: Duration::from_secs(3600),
        call_timeouts: std::collections::BTreeMap::new(),
        budgets: Budgets::default(),
    }
}

/// A thread with a model of its stored rows.
#[derive(Clone)]
pub struct Thread {
    pub head: Head,
    pub identity: Identity,
    pub limits: Limits,
    pub now: Timestamp,
    pub names: Names,
    pub store: Store,
}

/// Applies the lines of a table in order to a new thread and compares the outcomes.
pub fn check(table: &str) {
    check_with(small_limits(), table);
}

pub fn check_with(limits: Limits, table: &str) {
    Thread::new(limits).check(table);
}

/// Checks a table in an event child of its parent's subscription `s`.
pub fn check_event_child(table: &str) {
    event_child(small_limits()).check(table);
}

/// Checks a table in a child that call `p` spawned.
pub fn check_spawned_child(table: &str) {
    spawned_child(small_limits()).check(table);
}

/// Returns an event child of its parent's subscription `s`.
pub fn event_child(limits: Limits) -> Thread {
    let mut parent = Thread::after(limits, &["said hi", "answer: s", "subscribed s: ok", "answer done:"]);
    parent.spawn("event s: ding, child")
}

/// Returns a child that call `p` spawned.
pub fn spawned_child(limits: Limits) -> Thread {
    Thread::after(limits, &["said hi"]).spawn("answer: p=spawn(dig)")
}

/// Applies `lines` to a new thread, then applies each line of the table to a copy of it.
pub fn check_each_from(lines: &[&str], table: &str) {
    let thread = Thread::after(small_limits(), lines);
    compare(table, |line| thread.clone().take(line));
}

/// Checks a table of the amounts that each input spends: `turns, tokens, wakes`, including those of new children.
pub fn check_spending(table: &str) {
    let all = Bounds { turns: Some(u64::MAX), tokens: Some(u64::MAX), wakes: Some(u64::MAX) };
    let budgets = Budgets { per_hour: all, in_total: all };
    let mut thread = Thread::new(Limits { event_children: 2, children: 2, budgets, ..small_limits() });
    compare(table, |line| thread.spend(line));
}

pub fn compare(table: &str, mut take: impl FnMut(&str) -> String) {
    let mut differs = false;
    let mut actual = String::new();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (input, expected) = line.split_once("->").unwrap_or((line, ""));
        let outcome = take(input.trim());
        differs |= outcome != expected.trim();
        actual.push_str(&format!("        {:<26} -> {outcome}\n", input.trim()));
    }
    assert!(!differs, "expected:\n{table}\nactual:\n{actual}");
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

    /// Returns a new thread after these lines, none of which may be ignored.
    pub fn after(limits: Limits, lines: &[&str]) -> Thread {
        let mut thread = Thread::new(limits);
        thread.apply_all(lines);
        thread
    }

    pub fn apply_all(&mut self, lines: &[&str]) {
        for line in lines {
            let outcome = self.take(line);
            assert!(!outcome.starts_with("ignored"), "{line} -> {outcome}");
        }
    }

    pub fn check(&mut self, table: &str) {
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

    /// Executes a line that is not an input: it changes the time, or the paused threads in the store. Returns `false` for
    /// any other line.
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

    /// Applies an input and returns the child that it spawns.
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

    /// Loads the facts that are needed, runs the step, and stores its writes.
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
