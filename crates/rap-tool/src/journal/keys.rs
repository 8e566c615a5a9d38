//! Which call has which identity.
//!
//! Identities come in no order: in an index of all of them, nearly each new one would change a page of its own. So the
//! latest are kept in memory, and are carried over to the index in its order, a few whenever a few have come. Then
//! many share a page.
//!
//! Invariants:
//! - A call is in memory or in the index, or in both after a restart. Up to the mark, all are in the index.
//! - Memory follows the database, as the last act of a job. Whoever loses a batch calls [`Keys::forget`]; what lies
//!   behind the mark is then read again.

use std::collections::BTreeMap;
use std::ops::Bound;

use rusqlite::{Connection, OptionalExtension, params};

use super::{Identity, Result, Seq};

/// How many are kept in memory before they are carried over, and how many may come meanwhile. Both are read again after
/// a restart, in a fraction of a second.
const KEPT: usize = 16_384;
/// After so many new ones …
const NEW: Seq = 64;
/// … so many are carried over. More than come, so that an end is reached.
const CARRIED: usize = 128;

#[derive(Default)]
pub(crate) struct Keys {
    /// `None`: has to be read.
    latest: Option<BTreeMap<Identity, Seq>>,
    carrying: Option<Carrying>,
}

/// A walk through the latest in the order of the index.
#[derive(Clone, Copy)]
struct Carrying {
    behind: Bound<Identity>,
    /// Later calls wait for the next one.
    up_to: Seq,
}

impl Keys {
    /// What is remembered may not be true.
    pub(crate) fn forget(&mut self) {
        *self = Keys::default();
    }

    /// The call of this identity.
    pub(super) fn find(&mut self, db: &Connection, identity: &Identity) -> Result<Option<Seq>> {
        if let Some(call) = self.latest(db)?.get(identity) {
            return Ok(Some(*call));
        }
        db.prepare_cached("SELECT call FROM call_keys WHERE key = ?1")?
            .query_row([identity], |row| row.get(0))
            .optional()
    }

    /// The calls whose identity begins so, in no order.
    pub(super) fn beginning_with(&mut self, db: &Connection, key: &[u8]) -> Result<Vec<Seq>> {
        let (from, to) = range(key);
        let latest = self.latest(db)?;
        let mut calls: Vec<Seq> = latest.range(from..=to).map(|(_, call)| *call).collect();
        let mut statement =
            db.prepare_cached("SELECT key, call FROM call_keys WHERE key BETWEEN ?1 AND ?2")?;
        let mut rows = statement.query(params![from, to])?;
        while let Some(row) = rows.next()? {
            if !latest.contains_key(&row.get::<_, Identity>(0)?) {
                calls.push(row.get(1)?);
            }
        }
        Ok(calls)
    }

    /// Remembers a call that was just written.
    pub(super) fn add(&mut self, db: &Connection, identity: Identity, call: Seq) -> Result<()> {
        if call % NEW == 0 {
            self.carry(db)?;
        }
        self.latest(db)?.insert(identity, call);
        Ok(())
    }

    /// Calls that were just deleted.
    pub(super) fn remove(&mut self, db: &Connection, identities: &[Identity]) -> Result<()> {
        for identity in identities {
            db.prepare_cached("DELETE FROM call_keys WHERE key = ?1")?.execute([identity])?;
        }
        let latest = self.latest(db)?;
        for identity in identities {
            latest.remove(identity);
        }
        Ok(())
    }

    /// Carries some over to the index, if there are many.
    fn carry(&mut self, db: &Connection) -> Result<()> {
        let carrying = self.carrying;
        let latest = self.latest(db)?;
        let Carrying { behind, up_to } = match carrying {
            Some(carrying) => carrying,
            None if latest.len() < KEPT => return Ok(()),
            None => Carrying { behind: Bound::Unbounded, up_to: latest.values().copied().max().unwrap_or(0) },
        };
        let next = latest.range((behind, Bound::Unbounded)).filter(|(_, call)| **call <= up_to);
        let next: Vec<(Identity, Seq)> = next.take(CARRIED).map(|(key, call)| (*key, *call)).collect();
        for (key, call) in &next {
            db.prepare_cached("INSERT OR IGNORE INTO call_keys (key, call) VALUES (?1, ?2)")?
                .execute(params![key, call])?;
        }
        let last = next.last().filter(|_| next.len() == CARRIED).map(|(key, _)| *key);
        if last.is_none() {
            db.prepare_cached("INSERT OR REPLACE INTO meta (name, value) VALUES ('keys up to', ?1)")?
                .execute([up_to])?;
        }
        for (key, _) in &next {
            latest.remove(key);
        }
        self.carrying = last.map(|key| Carrying { behind: Bound::Excluded(key), up_to });
        Ok(())
    }

    fn latest(&mut self, db: &Connection) -> Result<&mut BTreeMap<Identity, Seq>> {
        let latest = match self.latest.take() {
            Some(latest) => latest,
            None => db
                .prepare_cached(
                    "SELECT key, seq FROM calls
                     WHERE seq > coalesce((SELECT value FROM meta WHERE name = 'keys up to'), 0)",
                )?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<Result<_>>()?,
        };
        Ok(self.latest.insert(latest))
    }
}

/// The first and the last identity that begin so.
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

    /// An identity without any order, as of one of 1,000 threads.
    fn identity(call: Seq) -> Identity {
        let mut identity = [0; 32];
        identity[..8].copy_from_slice(&thread(call % 1_000));
        identity[8..16]
            .copy_from_slice(&call.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.cast_signed()).to_be_bytes());
        identity
    }

    fn thread(number: Seq) -> [u8; 8] {
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64.cast_signed()).to_be_bytes()
    }

    fn write(db: &Connection, keys: &mut Keys, calls: std::ops::RangeInclusive<Seq>) {
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

    fn count(db: &Connection) -> Seq {
        db.query_row("SELECT count(*) FROM call_keys", [], |row| row.get(0)).unwrap()
    }

    const MANY: Seq = 3 * KEPT as Seq;

    fn all_are_found(db: &Connection, keys: &mut Keys, calls: std::ops::RangeInclusive<Seq>) {
        for call in calls.clone().step_by(7) {
            assert_eq!(keys.find(db, &identity(call)).unwrap(), Some(call));
        }
        let mut found = keys.beginning_with(db, &thread(5)).unwrap();
        found.sort_unstable();
        assert_eq!(found, calls.filter(|call| call % 1_000 == 5).collect::<Vec<_>>());
    }

    #[test]
    fn a_call_is_found_wherever_its_key_is_and_after_every_loss() {
        let db = journal();
        let mut keys = Keys::default();
        // It stops in the middle of carrying over.
        let last = MANY + 10 * NEW;
        write(&db, &mut keys, 1..=last);
        assert!(keys.carrying.is_some());
        assert!(keys.latest(&db).unwrap().len() < 3 * KEPT);
        all_are_found(&db, &mut keys, 1..=last);
        assert_eq!(keys.find(&db, &identity(last + 1)).unwrap(), None);
        keys.forget();
        all_are_found(&db, &mut keys, 1..=last);
        // What was carried over before is carried over again.
        write(&db, &mut keys, last + 1..=2 * MANY);
        all_are_found(&db, &mut keys, 1..=2 * MANY);
        keys.forget();
        assert!(keys.latest(&db).unwrap().len() < 3 * KEPT);
        all_are_found(&db, &mut keys, 1..=2 * MANY);
    }

    #[test]
    fn what_a_lost_batch_carried_over_is_found_again() {
        let db = journal();
        let mut keys = Keys::default();
        write(&db, &mut keys, 1..=MANY);
        let before = count(&db);
        db.execute_batch("BEGIN").unwrap();
        write(&db, &mut keys, MANY + 1..=MANY + 8 * NEW);
        assert!(count(&db) > before);
        db.execute_batch("ROLLBACK").unwrap();
        keys.forget();
        all_are_found(&db, &mut keys, 1..=MANY);
        assert_eq!(keys.find(&db, &identity(MANY + 1)).unwrap(), None);
        write(&db, &mut keys, MANY + 1..=2 * MANY);
        all_are_found(&db, &mut keys, 1..=2 * MANY);
    }

    #[test]
    fn a_call_that_was_deleted_is_new_again() {
        let db = journal();
        let mut keys = Keys::default();
        write(&db, &mut keys, 1..=MANY);
        for call in [1, MANY] {
            db.execute("DELETE FROM calls WHERE seq = ?1", [call]).unwrap();
            keys.remove(&db, &[identity(call)]).unwrap();
            assert_eq!(keys.find(&db, &identity(call)).unwrap(), None, "{call}");
        }
        keys.forget();
        all_are_found(&db, &mut keys, 2..=MANY - 1);
        assert_eq!(keys.find(&db, &identity(MANY)).unwrap(), None);
    }
}
