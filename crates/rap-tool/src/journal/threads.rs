//! Threads: which are open, which are closed, and whose things are to be cleared away.
//!
//! A thread is known by its calls. It is open while one of them is later than its last closing.

use std::collections::HashSet;

use rap_protocol::{ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::keys::Keys;
use super::{Identity, Result, Seq, id};
use crate::auth::Caller;

/// Notes that a thread is being closed, until [`cleared`]. Whether it was open.
pub(super) fn begin_closing(
    db: &Connection,
    key: &[u8; 8],
    last_call: Option<Seq>,
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

/// The latest call of a thread.
pub(super) fn last_call(db: &Connection, keys: &mut Keys, key: &[u8; 8]) -> Result<Option<Seq>> {
    Ok(keys.beginning_with(db, key)?.into_iter().max())
}

/// What belongs to a thread has been cleared away, unless it was closed once more since this closing.
pub(super) fn cleared(db: &Connection, key: &[u8; 8], closing: Option<Seq>) -> Result<()> {
    db.prepare_cached("UPDATE closings SET pending = 0 WHERE thread_key = ?1 AND last_call = ?2")?
        .execute(params![key, closing])?;
    Ok(())
}

/// The call that the thread's last closing came after.
pub(super) fn last_closing(db: &Connection, key: &[u8; 8]) -> Result<Option<Seq>> {
    db.prepare_cached("SELECT last_call FROM closings WHERE thread_key = ?1")?
        .query_row([key], |row| row.get(0))
        .optional()
}

/// Threads whose closing was begun and not finished.
pub(crate) fn closing(db: &Connection) -> Result<Vec<(Caller, ThreadId)>> {
    db.prepare_cached("SELECT caller, thread FROM closings WHERE pending = 1")?
        .query_map([], |row| Ok((Caller::from_bytes(row.get(0)?), id(row, 1)?)))?
        .collect()
}

/// How far a look for expired threads has come: behind the call that was settled then.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LookedUpTo {
    settled_at: Timestamp,
    call: Seq,
}

/// Some of the threads that have expired.
pub(crate) struct Expired {
    pub(crate) threads: Vec<(Caller, ThreadId)>,
    pub(crate) up_to: LookedUpTo,
    /// There may be more behind it.
    pub(crate) is_full: bool,
}

/// Looks on at calls that were settled before `before`. The thread of one of them has expired if all its calls were
/// settled by then, and it was not closed meanwhile.
pub(super) fn expired(
    db: &Connection,
    keys: &mut Keys,
    (after, before): (LookedUpTo, Timestamp),
    most: u32,
) -> Result<Expired> {
    let old: Vec<(LookedUpTo, Identity, Caller, ThreadId)> = db
        .prepare_cached(
            "SELECT settled_at, seq, key, caller, thread FROM calls
             WHERE state = 3 AND (settled_at, seq) > (?1, ?2) AND settled_at < ?3 ORDER BY settled_at, seq LIMIT ?4",
        )?
        .query_map(params![after.settled_at.0, after.call, before.0, most], |row| {
            let up_to = LookedUpTo { settled_at: Timestamp(row.get(0)?), call: row.get(1)? };
            Ok((up_to, row.get(2)?, Caller::from_bytes(row.get(3)?), id(row, 4)?))
        })?
        .collect::<Result<_>>()?;
    let is_full = old.len() == most as usize;
    let up_to = old.last().map_or(after, |(up_to, ..)| *up_to);
    let (mut seen, mut threads) = (HashSet::new(), Vec::new());
    for (_, identity, caller, thread) in old {
        let key: [u8; 8] = *identity.first_chunk().expect("bug: 32 bytes");
        if !seen.insert(key) {
            continue;
        }
        let calls = keys.beginning_with(db, &key)?;
        let is_open = calls.iter().copied().max() > last_closing(db, &key)?;
        if is_open && !are_used_since(db, &calls, before)? {
            threads.push((caller, thread));
        }
    }
    Ok(Expired { threads, up_to, is_full })
}

fn are_used_since(db: &Connection, calls: &[Seq], before: Timestamp) -> Result<bool> {
    let mut statement =
        db.prepare_cached("SELECT 1 FROM calls WHERE seq = ?1 AND (state < 3 OR settled_at >= ?2)")?;
    for call in calls {
        if statement.exists(params![call, before.0])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Forgets closings that no call is left of.
pub(crate) fn forget(db: &Connection, before: Timestamp) -> Result<()> {
    db.prepare_cached("DELETE FROM closings WHERE pending = 0 AND closed_at < ?1")?.execute([before.0])?;
    Ok(())
}
