//! Open, closed and expired threads.
//!
//! There is no table of threads: a thread exists if it has calls. It is open if one of them is later than its last
//! closing.

use std::collections::HashSet;
use std::ops::ControlFlow;

use rap_protocol::{ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::keys::CallIndex;
use super::{CallSeq, Identity, Result, id};
use crate::auth::Caller;

/// Common prefix of the identities of all calls of a caller's thread.
pub(crate) type ThreadKey = [u8; 8];

/// Records that a thread is being closed; [`finish_closing`] ends this. Returns false if the thread was not open.
pub(super) fn begin_closing(
    db: &Connection,
    key: &ThreadKey,
    last_call: Option<CallSeq>,
    (caller, thread): (&Caller, &ThreadId),
    now: Timestamp,
) -> Result<bool> {
    let Some(last_call) = last_call else { return Ok(false) };
    let closed = db
        .prepare_cached(
            "INSERT INTO closings (thread_key, caller, thread, last_call, pending, closed_at)
             VALUES (?1, ?2, ?3, ?4, 1, ?5)
             ON CONFLICT DO UPDATE SET last_call = excluded.last_call, pending = 1, closed_at = excluded.closed_at
             WHERE last_call < excluded.last_call",
        )?
        .execute(params![key, caller.bytes(), thread.as_str(), last_call, now.0])?;
    Ok(closed > 0)
}

pub(super) fn last_call(db: &Connection, keys: &mut CallIndex, key: &ThreadKey) -> Result<Option<CallSeq>> {
    let mut last = None;
    keys.scan(db, key, |call| {
        last = last.max(Some(call));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(last)
}

/// Records that the close hook has finished, unless the thread was closed again after `last_call`.
pub(crate) fn finish_closing(db: &Connection, key: &ThreadKey, last_call: CallSeq) -> Result<()> {
    db.prepare_cached("UPDATE closings SET pending = 0 WHERE thread_key = ?1 AND last_call = ?2")?
        .execute(params![key, last_call])?;
    Ok(())
}

/// Returns the last call before the thread was last closed.
pub(super) fn last_closed_call(db: &Connection, key: &ThreadKey) -> Result<Option<CallSeq>> {
    db.prepare_cached("SELECT last_call FROM closings WHERE thread_key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()
}

/// A closed thread whose close hook has not finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Closing {
    pub(crate) key: ThreadKey,
    pub(crate) caller: Caller,
    pub(crate) thread: ThreadId,
    /// The last call before the thread was closed.
    pub(crate) last_call: CallSeq,
}

/// Returns the threads whose close hook has not finished, except those in `running`: for each caller the `limit` that were
/// closed first.
pub(crate) fn closing(db: &Connection, running: &HashSet<ThreadKey>, limit: u32) -> Result<Vec<Closing>> {
    let mut found = Vec::new();
    let mut caller = Vec::new();
    while let Some(following) = db
        .prepare_cached(
            "SELECT min(caller) FROM closings INDEXED BY closings_pending WHERE pending = 1 AND caller > ?1",
        )?
        .query_row([&caller], |row| row.get::<_, Option<Vec<u8>>>(0))?
    {
        caller = following;
        let mut statement = db.prepare_cached(
            "SELECT thread_key, caller, thread, last_call FROM closings INDEXED BY closings_pending
             WHERE pending = 1 AND caller = ?1 ORDER BY closed_at LIMIT ?2",
        )?;
        let closings =
            statement.query_map(params![caller, i64::from(limit) + running.len() as i64], |row| {
                let caller = Caller::from_bytes(row.get(1)?);
                Ok(Closing { key: row.get(0)?, caller, thread: id(row, 2)?, last_call: row.get(3)? })
            })?;
        let waits = |closing: &Result<Closing>| !closing.as_ref().is_ok_and(|it| running.contains(&it.key));
        for closing in closings.filter(waits).take(limit as usize) {
            found.push(closing?);
        }
    }
    Ok(found)
}

/// Position of the scan for expired threads: the last settled call that was read.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ScanPosition {
    settled_at: Timestamp,
    call: CallSeq,
}

/// One page of expired threads.
pub(crate) struct Expired {
    pub(crate) threads: Vec<(Caller, ThreadId)>,
    pub(crate) position: ScanPosition,
    /// The page is full, so there may be more.
    pub(crate) is_full: bool,
}

/// Reads the next calls that were settled before `before`. A thread has expired if it is open and all its calls were
/// settled before `before`.
pub(super) fn expired(
    db: &Connection,
    keys: &mut CallIndex,
    (after, before): (ScanPosition, Timestamp),
    limit: u32,
) -> Result<Expired> {
    let old: Vec<(ScanPosition, Identity, Caller, ThreadId)> = db
        .prepare_cached(
            "SELECT settled_at, seq, key, caller, thread FROM calls
             WHERE state = 3 AND (settled_at, seq) > (?1, ?2) AND settled_at < ?3 ORDER BY settled_at, seq LIMIT ?4",
        )?
        .query_map(params![after.settled_at.0, after.call, before.0, limit], |row| {
            let position = ScanPosition { settled_at: Timestamp(row.get(0)?), call: row.get(1)? };
            Ok((position, row.get(2)?, Caller::from_bytes(row.get(3)?), id(row, 4)?))
        })?
        .collect::<Result<_>>()?;
    let is_full = old.len() == limit as usize;
    let position = old.last().map_or(after, |(position, ..)| *position);
    let (mut seen, mut threads) = (HashSet::new(), Vec::new());
    for (at, identity, caller, thread) in old {
        let key: ThreadKey = *identity.first_chunk().expect("bug: 32 bytes");
        // If only a later call has opened the thread again, the scan comes to that one, too.
        let opens = Some(at.call) > last_closed_call(db, &key)?;
        if opens && seen.insert(key) && !any_used_since(db, keys, &key, before)? {
            threads.push((caller, thread));
        }
    }
    Ok(Expired { threads, position, is_full })
}

fn any_used_since(db: &Connection, keys: &mut CallIndex, key: &ThreadKey, before: Timestamp) -> Result<bool> {
    let mut statement =
        db.prepare_cached("SELECT 1 FROM calls WHERE seq = ?1 AND (state < 3 OR settled_at >= ?2)")?;
    let mut found = false;
    keys.scan(db, key, |call| {
        found = statement.exists(params![call, before.0])?;
        Ok(if found { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(found)
}

/// Deletes at most `limit` closings whose calls are all deleted. Returns how many.
pub(crate) fn delete_old(db: &Connection, before: Timestamp, limit: u32) -> Result<usize> {
    db.prepare_cached(
        "DELETE FROM closings WHERE thread_key IN
           (SELECT thread_key FROM closings WHERE pending = 0 AND closed_at < ?1 LIMIT ?2)",
    )?
    .execute(params![before.0, limit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MIGRATIONS;

    #[test]
    fn the_closings_of_each_caller_are_read_page_by_page_in_order() {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        let key = |number: u8| [number; 8];
        for (number, caller, pending) in [(1, 1_u8, 1), (2, 1, 1), (3, 1, 0), (4, 1, 1), (5, 2, 1), (6, 1, 1)]
        {
            db.execute(
                "INSERT INTO closings (thread_key, caller, thread, last_call, pending, closed_at)
                 VALUES (?1, ?2, 't', 7, ?3, ?4)",
                params![key(number), [caller; 16], pending, 100 - i64::from(number)],
            )
            .unwrap();
        }
        let keys = |running: &[u8], limit| {
            let running = running.iter().map(|number| key(*number)).collect();
            let closings = closing(&db, &running, limit).unwrap();
            closings.into_iter().map(|closing| closing.key[0]).collect::<Vec<u8>>()
        };
        assert_eq!(keys(&[], 2), [6, 4, 5]);
        assert_eq!(keys(&[6, 2, 5], 2), [4, 1]);
        finish_closing(&db, &key(6), 6).unwrap();
        assert_eq!(keys(&[], 1), [6, 5], "it was closed again");
        finish_closing(&db, &key(6), 7).unwrap();
        assert_eq!(keys(&[], 9), [4, 2, 1, 5]);
        assert_eq!(delete_old(&db, Timestamp(1_000), 1).unwrap(), 1);
        assert_eq!(delete_old(&db, Timestamp(1_000), 1).unwrap(), 1);
        assert_eq!(delete_old(&db, Timestamp(1_000), 1).unwrap(), 0);
        assert_eq!(keys(&[], 9), [4, 2, 1, 5]);
    }
}
