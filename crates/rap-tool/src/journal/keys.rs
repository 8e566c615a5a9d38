//! The index from the identity of a call to its row.
//!
//! Identities are hashes and arrive in random order. In an ordinary index, nearly every insert would change a page of
//! its own. So the most recent keys are kept in memory and flushed to the index in key order, a few at a time. Then
//! many inserts share a page.
//!
//! Invariants:
//! - A call is in memory or in the index, or in both after a restart. `meta` stores the number of the last call up to
//!   which all calls are in the index ('keys up to').
//! - A job changes memory after it has changed the database. When a batch fails, [`CallIndex::reset`] is called, and the
//!   calls after that number are read again.

use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};

use rusqlite::{Connection, OptionalExtension, params};

use super::{CallSeq, Identity, Result};

/// Number of keys in memory at which a flush begins. As many again may arrive during the flush. Both are read again
/// after a restart, which takes a fraction of a second.
const MEMORY_KEYS: usize = 16_384;
/// A flush continues whenever this many calls were added.
const FLUSH_EVERY: CallSeq = 64;
/// Number of keys that are flushed each time. Greater than `FLUSH_EVERY`, so that a flush comes to an end.
const FLUSH_BATCH: usize = 128;

#[derive(Default)]
pub(crate) struct CallIndex {
    /// `None` if it has to be read from the database.
    recent: Option<BTreeMap<Identity, CallSeq>>,
    flush: Option<Flush>,
    /// Number of keys that [`CallIndex::scan`] has visited since [`CallIndex::take_visited`].
    visited: usize,
}

/// A flush in progress, which goes through the recent keys in order.
#[derive(Clone, Copy)]
struct Flush {
    after: Bound<Identity>,
    /// Later calls are left for the next flush.
    up_to: CallSeq,
}

impl CallIndex {
    /// Drops the memory, which may differ from the database after a failed batch.
    pub(crate) fn reset(&mut self) {
        *self = CallIndex::default();
    }

    pub(super) fn find(&mut self, db: &Connection, identity: &Identity) -> Result<Option<CallSeq>> {
        if let Some(call) = self.recent(db)?.get(identity) {
            return Ok(Some(*call));
        }
        db.prepare_cached("SELECT call FROM call_keys WHERE key = ?1")?
            .query_row([identity], |row| row.get(0))
            .optional()
    }

    /// Visits the calls whose identity has this prefix, in no particular order, until `visit` breaks off. A call may be
    /// visited twice after a restart. No list of them is built, and their number is counted, because a caller may have
    /// any number of calls in one thread.
    pub(super) fn scan(
        &mut self,
        db: &Connection,
        key: &[u8],
        mut visit: impl FnMut(CallSeq) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let (from, to) = range(key);
        let mut visited = 0;
        for (_, call) in self.recent(db)?.range(from..=to) {
            visited += 1;
            if visit(*call)?.is_break() {
                self.visited += visited;
                return Ok(());
            }
        }
        let mut statement = db.prepare_cached("SELECT call FROM call_keys WHERE key BETWEEN ?1 AND ?2")?;
        let mut rows = statement.query(params![from, to])?;
        while let Some(row) = rows.next()? {
            visited += 1;
            if visit(row.get(0)?)?.is_break() {
                break;
            }
        }
        self.visited += visited;
        Ok(())
    }

    /// Returns how many keys were visited since the last time.
    pub(crate) fn take_visited(&mut self) -> usize {
        std::mem::take(&mut self.visited)
    }

    /// Adds a call that was just inserted.
    pub(super) fn add(&mut self, db: &Connection, identity: Identity, call: CallSeq) -> Result<()> {
        if call % FLUSH_EVERY == 0 {
            self.flush_some(db)?;
        }
        self.recent(db)?.insert(identity, call);
        Ok(())
    }

    /// Removes calls that were just deleted.
    pub(super) fn remove(&mut self, db: &Connection, identities: &[Identity]) -> Result<()> {
        for identity in identities {
            db.prepare_cached("DELETE FROM call_keys WHERE key = ?1")?.execute([identity])?;
        }
        let recent = self.recent(db)?;
        for identity in identities {
            recent.remove(identity);
        }
        Ok(())
    }

    /// Flushes the next keys to the index, if a flush is in progress or has to begin.
    fn flush_some(&mut self, db: &Connection) -> Result<()> {
        let flush = self.flush;
        let recent = self.recent(db)?;
        let Flush { after, up_to } = match flush {
            Some(flush) => flush,
            None if recent.len() < MEMORY_KEYS => return Ok(()),
            None => Flush { after: Bound::Unbounded, up_to: recent.values().copied().max().unwrap_or(0) },
        };
        let next = recent.range((after, Bound::Unbounded)).filter(|(_, call)| **call <= up_to);
        let next: Vec<(Identity, CallSeq)> =
            next.take(FLUSH_BATCH).map(|(key, call)| (*key, *call)).collect();
        for (key, call) in &next {
            db.prepare_cached("INSERT OR IGNORE INTO call_keys (key, call) VALUES (?1, ?2)")?
                .execute(params![key, call])?;
        }
        let last = next.last().filter(|_| next.len() == FLUSH_BATCH).map(|(key, _)| *key);
        if last.is_none() {
            db.prepare_cached("INSERT OR REPLACE INTO meta (name, value) VALUES ('keys up to', ?1)")?
                .execute([up_to])?;
        }
        for (key, _) in &next {
            recent.remove(key);
        }
        self.flush = last.map(|key| Flush { after: Bound::Excluded(key), up_to });
        Ok(())
    }

    fn recent(&mut self, db: &Connection) -> Result<&mut BTreeMap<Identity, CallSeq>> {
        let recent = match self.recent.take() {
            Some(recent) => recent,
            None => db
                .prepare_cached(
                    "SELECT key, seq FROM calls
                     WHERE seq > coalesce((SELECT value FROM meta WHERE name = 'keys up to'), 0)",
                )?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<Result<_>>()?,
        };
        Ok(self.recent.insert(recent))
    }
}

/// Returns the first and the last identity with this prefix.
fn range(key: &[u8]) -> (Identity, Identity) {
    let (mut from, mut to) = ([0; 32], [0xff; 32]);
    from[..key.len()].copy_from_slice(key);
    to[..key.len()].copy_from_slice(key);
    (from, to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MIGRATIONS;

    fn journal() -> Connection {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        db
    }

    /// A pseudo-random identity, in one of 1,000 threads.
    fn identity(call: CallSeq) -> Identity {
        let mut identity = [0; 32];
        identity[..8].copy_from_slice(&thread(call % 1_000));
        identity[8..16]
            .copy_from_slice(&call.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.cast_signed()).to_be_bytes());
        identity
    }

    fn thread(number: CallSeq) -> [u8; 8] {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.cast_signed()).to_be_bytes()
    }

    fn write(db: &Connection, keys: &mut CallIndex, calls: std::ops::RangeInclusive<CallSeq>) {
        for call in calls {
            db.prepare_cached(
                "INSERT INTO calls (seq, key, caller, thread, call_id, operation, origin, state, accepted_at)
                 VALUES (?1, ?2, x'', '', '', '', 0, 0, 0)",
            )
            .unwrap()
            .execute(params![call, identity(call)])
            .unwrap();
            keys.add(db, identity(call), call).unwrap();
        }
    }

    fn count(db: &Connection) -> CallSeq {
        db.query_row("SELECT count(*) FROM call_keys", [], |row| row.get(0)).unwrap()
    }

    const MANY: CallSeq = 3 * MEMORY_KEYS as CallSeq;

    fn check_all_are_found(db: &Connection, keys: &mut CallIndex, calls: std::ops::RangeInclusive<CallSeq>) {
        for call in calls.clone().step_by(7) {
            assert_eq!(keys.find(db, &identity(call)).unwrap(), Some(call));
        }
        let mut found = Vec::new();
        let visit = |call| {
            found.push(call);
            Ok(ControlFlow::Continue(()))
        };
        keys.scan(db, &thread(5), visit).unwrap();
        let visited = found.len();
        assert_eq!(keys.take_visited(), visited);
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, calls.filter(|call| call % 1_000 == 5).collect::<Vec<_>>());
    }

    #[test]
    fn a_call_is_found_in_memory_and_in_the_index_and_after_a_reset() {
        let db = journal();
        let mut keys = CallIndex::default();
        // Stops in the middle of a flush.
        let last = MANY + 10 * FLUSH_EVERY;
        write(&db, &mut keys, 1..=last);
        assert!(keys.flush.is_some());
        assert!(keys.recent(&db).unwrap().len() < 3 * MEMORY_KEYS);
        check_all_are_found(&db, &mut keys, 1..=last);
        assert_eq!(keys.find(&db, &identity(last + 1)).unwrap(), None);
        keys.reset();
        check_all_are_found(&db, &mut keys, 1..=last);
        // Keys that were flushed before are flushed again.
        write(&db, &mut keys, last + 1..=2 * MANY);
        check_all_are_found(&db, &mut keys, 1..=2 * MANY);
        keys.reset();
        assert!(keys.recent(&db).unwrap().len() < 3 * MEMORY_KEYS);
        check_all_are_found(&db, &mut keys, 1..=2 * MANY);
    }

    #[test]
    fn keys_that_a_failed_batch_flushed_are_found_again() {
        let db = journal();
        let mut keys = CallIndex::default();
        write(&db, &mut keys, 1..=MANY);
        let before = count(&db);
        db.execute_batch("BEGIN").unwrap();
        write(&db, &mut keys, MANY + 1..=MANY + 8 * FLUSH_EVERY);
        assert!(count(&db) > before);
        db.execute_batch("ROLLBACK").unwrap();
        keys.reset();
        check_all_are_found(&db, &mut keys, 1..=MANY);
        assert_eq!(keys.find(&db, &identity(MANY + 1)).unwrap(), None);
        write(&db, &mut keys, MANY + 1..=2 * MANY);
        check_all_are_found(&db, &mut keys, 1..=2 * MANY);
    }

    #[test]
    fn a_call_that_was_deleted_is_new_again() {
        let db = journal();
        let mut keys = CallIndex::default();
        write(&db, &mut keys, 1..=MANY);
        for call in [1, MANY] {
            db.execute("DELETE FROM calls WHERE seq = ?1", [call]).unwrap();
            keys.remove(&db, &[identity(call)]).unwrap();
            assert_eq!(keys.find(&db, &identity(call)).unwrap(), None, "{call}");
        }
        keys.reset();
        check_all_are_found(&db, &mut keys, 2..=MANY - 1);
        assert_eq!(keys.find(&db, &identity(MANY)).unwrap(), None);
    }
}
