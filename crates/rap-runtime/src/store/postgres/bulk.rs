//! Writes the steps of a round in bulk: one statement for all rows of a kind, whatever thread they belong to.
//!
//! Writes of one step that touch the same table keep their order. Others may be carried out in any order, since the heads
//! of all threads in the batch are locked.

use std::collections::{BTreeMap, HashSet};

use rap_agent::Status;
use rap_protocol::Timestamp;

use super::kinds::COUNT;
use super::statement::{Statement, clean};
use crate::store::{SessionKey, ThreadKey};

/// Tables, as far as the order of writes to them matters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    Threads,
    Work,
    Entries,
    Held,
    Backlog,
    Calls,
    Questions,
    EventIds,
    Views,
    Outbox,
    Requests,
    Toolsets,
}

pub(super) const TABLES: usize = 12;

/// A statement that writes any number of rows. Its parameters are the columns of the rows, as arrays.
pub(super) struct Kind {
    sql: &'static str,
    tables: &'static [Table],
    /// Number of leading columns that identify a row. One statement writes a row at most once. 0 if rows never collide.
    keyed: usize,
    /// True if the last parameter is the number of rows that must have been written. If it is wrong, the statement fails.
    checked: bool,
}

impl Kind {
    pub(super) const fn new(sql: &'static str, tables: &'static [Table], keyed: usize) -> Kind {
        Kind { sql, tables, keyed, checked: false }
    }

    pub(super) const fn checked(sql: &'static str, tables: &'static [Table], keyed: usize) -> Kind {
        Kind { sql, tables, keyed, checked: true }
    }

    #[cfg(test)]
    pub(super) fn sql(&self) -> &'static str {
        self.sql
    }
}

/// A value of a row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Value {
    Number(Option<i64>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(Some(number))
    }
}

impl From<Option<i64>> for Value {
    fn from(number: Option<i64>) -> Value {
        Value::Number(number)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(Some(number.cast_signed()))
    }
}

impl From<Timestamp> for Value {
    fn from(at: Timestamp) -> Value {
        Value::Number(Some(at.0))
    }
}

impl From<Option<Timestamp>> for Value {
    fn from(at: Option<Timestamp>) -> Value {
        Value::Number(at.map(|at| at.0))
    }
}

impl From<ThreadKey> for Value {
    fn from(thread: ThreadKey) -> Value {
        Value::Number(Some(thread.number()))
    }
}

impl From<Option<ThreadKey>> for Value {
    fn from(thread: Option<ThreadKey>) -> Value {
        Value::Number(thread.map(ThreadKey::number))
    }
}

impl From<SessionKey> for Value {
    fn from(session: SessionKey) -> Value {
        session.0.into()
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(Some(clean(text)))
    }
}

impl From<Option<&str>> for Value {
    fn from(text: Option<&str>) -> Value {
        Value::Text(text.map(clean))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(Some(text))
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Value {
        Value::Bytes(bytes)
    }
}

macro_rules! row {
    ($($value:expr),* $(,)?) => { vec![$(Value::from($value)),*] };
}

pub(super) use row;

/// The rows that one statement writes.
struct Group {
    kind: &'static Kind,
    rows: Vec<Vec<Value>>,
    keys: HashSet<Vec<Value>>,
    /// Number of rows that a checked statement must write.
    expected: i64,
}

impl Group {
    fn statement(self) -> Statement {
        let mut statement = Statement::new(self.kind.sql);
        let columns = self.rows.first().map_or(0, Vec::len);
        let mut rows: Vec<std::vec::IntoIter<Value>> = self.rows.into_iter().map(Vec::into_iter).collect();
        for _ in 0..columns {
            let (mut numbers, mut texts, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
            for value in rows.iter_mut().filter_map(Iterator::next) {
                match value {
                    Value::Number(number) => numbers.push(number),
                    Value::Text(text) => texts.push(text),
                    Value::Bytes(content) => bytes.push(content),
                }
            }
            statement = match (numbers.is_empty(), texts.is_empty()) {
                (false, _) => statement.with(numbers),
                (true, false) => statement.with(texts),
                (true, true) => statement.with(bytes),
            };
        }
        if self.kind.checked { statement.with(self.expected) } else { statement }
    }
}

/// Collects the writes of a round.
#[derive(Default)]
pub(super) struct Bulk {
    groups: Vec<Group>,
    counts: BTreeMap<&'static str, i64>,
    /// For each table, the first group that the next write of the current step may be in.
    positions: [usize; TABLES],
}

impl Bulk {
    /// Begins a step. Its writes may be in the same statements as those of other threads.
    pub(super) fn begin_step(&mut self) {
        self.positions = [0; TABLES];
    }

    pub(super) fn add(&mut self, kind: &'static Kind, row: Vec<Value>, expected: i64) {
        let from = kind.tables.iter().map(|table| self.positions[*table as usize]).max().unwrap_or(0);
        let key = row[..kind.keyed].to_vec();
        let fits =
            |group: &Group| std::ptr::eq(group.kind, kind) && (kind.keyed == 0 || !group.keys.contains(&key));
        let at = (from..self.groups.len()).find(|at| fits(&self.groups[*at])).unwrap_or_else(|| {
            self.groups.push(Group { kind, rows: Vec::new(), keys: HashSet::new(), expected: 0 });
            self.groups.len() - 1
        });
        self.groups[at].rows.push(row);
        self.groups[at].keys.insert(key);
        self.groups[at].expected += expected;
        for table in kind.tables {
            self.positions[*table as usize] = at;
        }
    }

    pub(super) fn put(&mut self, kind: &'static Kind, row: Vec<Value>) {
        self.add(kind, row, 1);
    }

    /// Returns the statements that carry out the writes.
    pub(super) fn statements(mut self) -> Vec<Statement> {
        self.begin_step();
        for (status, change) in std::mem::take(&mut self.counts) {
            if change != 0 {
                self.put(&COUNT, row![status, change]);
            }
        }
        self.groups.into_iter().map(Group::statement).collect()
    }

    /// Counts a thread whose status has changed.
    pub(super) fn count(&mut self, old: Option<Status>, new: Status) {
        if old != Some(new) {
            *self.counts.entry(new.as_str()).or_default() += 1;
            if let Some(old) = old {
                *self.counts.entry(old.as_str()).or_default() -= 1;
            }
        }
    }
}
