//! Checks that records are a whole session, one record at a time, and that nothing in them refers to another session.
//!
//! A file may come from anybody. A database holds sessions of different users, and some of its rows find others by a number
//! or an id: entries by the key of their thread, messages and children by ids of threads. So these are checked here, before
//! anything is written.

use std::collections::{BTreeMap, HashMap, HashSet};

use rap_agent::Head;
use rap_protocol::ThreadId;
use sha2::{Digest, Sha256};

use super::{CALL, Cell, ENTRY, Header, Record, Row, ThreadRecord};

/// Maximum number of threads of a session that can be moved.
const THREADS: usize = 1_000_000;
/// Largest number of an entry. SQLite stores the key of the thread in the bits above.
const LAST_ENTRY: u64 = u32::MAX as u64;
/// Largest version of a head. No thread has that many steps.
const LAST_VERSION: i64 = 1 << 53;

/// The records of one session that have been read so far.
#[derive(Default)]
pub(crate) struct Checker {
    header: Option<Header>,
    threads: HashMap<ThreadId, Known>,
    /// Threads that were named and have to be in the session.
    named: HashSet<ThreadId>,
    records: u64,
    ended: bool,
}

/// A thread of the session.
struct Known {
    parent: Option<ThreadId>,
    /// Number of its last entry.
    last: u64,
    /// Its entries so far.
    entries: Numbers,
}

/// A set of numbers, as ranges: the first number of each and its last one. Numbers that come in order need one range.
#[derive(Default)]
struct Numbers(BTreeMap<u64, u64>);

impl Numbers {
    /// Adds a number. Returns false if it was there.
    fn insert(&mut self, number: u64) -> bool {
        let before = self.0.range(..=number).next_back().map(|(first, last)| (*first, *last));
        if before.is_some_and(|(_, last)| number <= last) {
            return false;
        }
        let last = self.0.remove(&(number + 1)).unwrap_or(number);
        let first = before.filter(|(_, last)| last + 1 == number).map_or(number, |(first, _)| first);
        self.0.insert(first, last);
        true
    }
}

impl Checker {
    /// Takes the next record. Returns why it cannot follow those before it.
    pub(crate) fn take(&mut self, record: &Record) -> Result<(), String> {
        if self.ended {
            *self = Checker::default();
        }
        match (record, &self.header) {
            (Record::Session(header), None) => self.header = Some(header.clone()),
            (Record::Session(_), Some(_)) => {
                return Err("another session begins, but the one before it has no end".into());
            }
            (_, None) => return Err("expected the first record of a session".into()),
            (Record::Thread(thread), Some(header)) => {
                let is_first = self.threads.is_empty();
                if is_first != (thread.id == header.session) || is_first != thread.parent.is_none() {
                    return Err(format!(
                        "thread {}: a session has one root thread, which comes first",
                        thread.id
                    ));
                }
                self.thread(thread).map_err(|why| format!("thread {}: {why}", thread.id))?;
            }
            (Record::Row(row), Some(_)) => {
                self.row(row).map_err(|why| format!("{}: {why}", row.table().name))?;
            }
            (Record::End(records), Some(_)) => {
                if *records != self.records || self.threads.is_empty() {
                    return Err(format!(
                        "the session has {records} records, but {} of them are here",
                        self.records
                    ));
                }
                if let Some(missing) = self.named.iter().find(|id| !self.threads.contains_key(*id)) {
                    return Err(format!("it refers to thread {missing}, which is not in the session"));
                }
                self.ended = true;
            }
            (Record::Store { .. } | Record::StoreEnd { .. }, Some(_)) => {
                return Err("this record does not belong to a session".into());
            }
        }
        self.records += 1;
        Ok(())
    }

    fn thread(&mut self, thread: &ThreadRecord) -> Result<(), String> {
        let head: Head = serde_json::from_str(&thread.head).map_err(|error| format!("head: {error}"))?;
        if thread.parent.as_ref().is_some_and(|parent| !self.threads.contains_key(parent)) {
            return Err("its parent does not come before it".into());
        }
        // A root inherits nothing: its history comes with it.
        let source = thread.source.as_ref().filter(|_| thread.parent.is_some());
        let inheritable = match source {
            Some(source) => self.threads.get(source).ok_or("its parent does not come before it")?.last,
            None => 0,
        };
        if thread.inherits > inheritable {
            return Err(match thread.parent {
                Some(_) => "it inherits more than there is".into(),
                None => "a root thread inherits nothing".into(),
            });
        }
        if !self.are_ancestors(thread) {
            return Err("its ancestors are not those of its parent".into());
        }
        if head.origin().parent().is_some_and(|(parent, ..)| Some(parent) != thread.parent.as_ref()) {
            return Err("its head names another parent".into());
        }
        if head.seq() > LAST_ENTRY || !(1..=LAST_VERSION).contains(&thread.version) {
            return Err("its number of entries or its version is too large".into());
        }
        let known = Known { parent: thread.parent.clone(), last: head.seq(), entries: Numbers::default() };
        if self.threads.len() >= THREADS || self.threads.insert(thread.id.clone(), known).is_some() {
            return Err("it occurs twice, or the session has too many threads".into());
        }
        self.named.extend(head.children().cloned());
        Ok(())
    }

    /// Returns true if a thread has its parent and the ancestors of that as ancestors, root first.
    fn are_ancestors(&self, thread: &ThreadRecord) -> bool {
        let mut expected = thread.parent.as_ref();
        for ancestor in thread.ancestors.iter().rev() {
            if expected != Some(ancestor) {
                return false;
            }
            expected = self.threads.get(ancestor).and_then(|known| known.parent.as_ref());
        }
        expected.is_none()
    }

    fn row(&mut self, row: &Row) -> Result<(), String> {
        let known = match &row.thread {
            None => None,
            Some(thread) => match self.threads.get_mut(thread) {
                Some(known) => Some(known),
                None => return Err(format!("thread {thread} is not in the session")),
            },
        };
        let number = |name| match row.cell(name) {
            Some(Cell::Number(Some(number))) => u64::try_from(*number).ok(),
            _ => None,
        };
        let text = |name| match row.cell(name) {
            Some(Cell::Text(Some(text))) => text.as_str(),
            _ => "",
        };
        match (row.table, row.table().name) {
            (ENTRY, _) => match (known, number("seq")) {
                (Some(known), Some(seq)) if (1..=known.last).contains(&seq) => {
                    if known.entries.insert(seq) {
                        Ok(())
                    } else {
                        Err(format!("entry {seq} occurs twice"))
                    }
                }
                _ => Err("its thread has no entry with this number".into()),
            },
            (CALL, _) if number("seq").is_none_or(|seq| seq > LAST_ENTRY) => {
                Err("its entry has no valid number".into())
            }
            (_, "message") => {
                for name in ["sender", "receiver"] {
                    let id = ThreadId::new(text(name)).map_err(|error| format!("{name}: {error}"))?;
                    self.named.insert(id);
                }
                Ok(())
            }
            // Sessions share documents, so a wrong one would be that of others.
            (_, "toolset_document") => match row.cell("body") {
                Some(Cell::Bytes(body)) if hex(&Sha256::digest(body)) == text("hash") => Ok(()),
                _ => Err("its hash is not that of the document".into()),
            },
            _ => Ok(()),
        }
    }

    /// Returns true if no session has begun, or the last one is complete.
    pub(crate) fn is_between_sessions(&self) -> bool {
        self.ended || self.header.is_none()
    }

    /// Returns true if the session is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.ended
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_taken_once_in_any_order() {
        let mut numbers = Numbers::default();
        let taken = [3, 1, 2, 2, 5, 4, 1, 3, 5].map(|number| numbers.insert(number));
        assert_eq!(taken, [true, true, true, false, true, true, false, false, false]);
        assert_eq!(numbers.0, BTreeMap::from([(1, 5)]));
    }
}
