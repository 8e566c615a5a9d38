//! Open, closed and expired threads.
//!
//! There is no table of threads: a thread exists if it has calls. It is open if one of them is later than its last
//! closing.

use std::collections::HashSet;

use rap_protocol::{ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::keys::Keys;
use super::{CallSeq, Identity, Result, id};
use crate::auth::Caller;

/// Records that a thread is being closed; [`finish_closing`] ends this. Returns false if the thread was not open.
pub(super) fn begin_closing(
    db: &Connection,
    key: &[u8; 8],
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

pub(super) fn last_call(db: &Connection, keys: &mut Keys, key: &[u8; 8]) -> Result<Option<CallSeq>> {
    Ok(keys.with_prefix(db, key)?.into_iter().max())
}

/// Records that the close hook has finished, unless the thread was closed again after `closing`.
pub(super) fn finish_closing(db: &Connection, key: &[u8; 8], closing: Option<CallSeq>) -> Result<()> {
    db.prepare_cached("UPDATE closings SET pending = 0 WHERE thread_key = ?1 AND last_call = ?2")?
        .execute(params![key, closing])?;
    Ok(())
}

/// Returns the last call before the thread was last closed.
pub(super) fn last_closed_call(db: &Connection, key: &[u8; 8]) -> Result<Option<CallSeq>> {
    db.prepare_cached("SELECT last_call FROM closings WHERE thread_key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()
}

/// Returns the threads whose close hook has not finished.
pub(crate) fn closing(db: &Connection) -> Result<Vec<(Caller, ThreadId)>> {
    db.prepare_cached("SELECT caller, thread FROM closings WHERE pending = 1")?
        .query_map([], |row| Ok((Caller::from_bytes(row.get(0)?), id(row, 1)?)))?
        .collect()
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
    keys: &mut Keys,
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
    for (_, identity, caller, thread) in old {
        let key: [u8; 8] = *identity.first_chunk().expect("bug: 32 bytes");
        if !seen.insert(key) {
            continue;
        }
        let calls = keys.with_prefix(db, &key)?;
        let is_open = calls.iter().copied().max() > last_closed_call(db, &key)?;
        if is_open && !any_used_since(db, &calls, before)? {
            threads.push((caller, thread));
        }
    }
    Ok(Expired { threads, position, is_full })
}

fn any_used_since(db: &Connection, calls: &[CallSeq], before: Timestamp) -> Result<bool> {
    let mut statement =
        db.prepare_cached("SELECT 1 FROM calls WHERE seq = ?1 AND (state < 3 OR settled_at >= ?2)")?;
    for call in calls {
        if statement.exists(params![call, before.0])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Deletes closings whose calls are all deleted.
pub(crate) fn delete_old(db: &Connection, before: Timestamp) -> Result<()> {
    db.prepare_cached("DELETE FROM closings WHERE pending = 0 AND closed_at < ?1")?.execute([before.0])?;
    Ok(())
}
