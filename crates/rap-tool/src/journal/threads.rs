//! Threads: who was here, who is gone, and whose things are to be cleared away.

use rap_protocol::{ThreadId, Timestamp};
use rusqlite::{Connection, params};

use super::{Result, id};
use crate::auth::Caller;

/// Notes that a thread is in use; one that was closed is open again.
pub(super) fn open(db: &Connection, caller: &Caller, thread: &ThreadId, now: Timestamp) -> Result<()> {
    db.prepare_cached(
        "INSERT INTO threads (caller, thread, last_seen) VALUES (?1, ?2, ?3)
         ON CONFLICT DO UPDATE SET last_seen = excluded.last_seen, closing = 0",
    )?
    .execute(params![caller.bytes(), thread.as_str(), now.0])?;
    Ok(())
}

/// Notes that something of a thread has just come to its end.
pub(super) fn touch(db: &Connection, caller: &Caller, thread: &ThreadId, now: Timestamp) -> Result<()> {
    db.prepare_cached("UPDATE threads SET last_seen = ?3 WHERE caller = ?1 AND thread = ?2")?
        .execute(params![caller.bytes(), thread.as_str(), now.0])?;
    Ok(())
}

/// Notes that a thread is being closed, until [`forget`]. Whether it was known, and not being closed already.
pub(super) fn begin_closing(db: &Connection, caller: &Caller, thread: &ThreadId) -> Result<bool> {
    let changed = db
        .prepare_cached("UPDATE threads SET closing = 1 WHERE caller = ?1 AND thread = ?2 AND closing = 0")?
        .execute(params![caller.bytes(), thread.as_str()])?;
    Ok(changed > 0)
}

/// Its things have been cleared away; unless it was opened again meanwhile, nothing is left to remember.
pub(crate) fn forget(db: &Connection, caller: &Caller, thread: &ThreadId) -> Result<()> {
    db.prepare_cached("DELETE FROM threads WHERE caller = ?1 AND thread = ?2 AND closing = 1")?
        .execute(params![caller.bytes(), thread.as_str()])?;
    Ok(())
}

/// Threads whose closing was begun and not finished.
pub(crate) fn closing(db: &Connection) -> Result<Vec<(Caller, ThreadId)>> {
    db.prepare_cached("SELECT caller, thread FROM threads WHERE closing = 1")?
        .query_map([], |row| Ok((Caller::from_bytes(row.get(0)?), id(row, 1)?)))?
        .collect()
}

/// Some of the threads that nobody has used since `before`. Those with a running call or an active
/// subscription are in use, and count as used `now`.
pub(crate) fn expired(
    db: &Connection,
    before: Timestamp,
    now: Timestamp,
    most: u32,
) -> Result<Vec<(Caller, ThreadId)>> {
    let old: Vec<(Caller, ThreadId, bool)> = db
        .prepare_cached(
            "SELECT caller, thread, EXISTS (SELECT 1 FROM calls
                                            WHERE calls.caller = threads.caller AND calls.thread = threads.thread
                                              AND state < 3)
             FROM threads WHERE last_seen < ?1 AND closing = 0 ORDER BY last_seen LIMIT ?2",
        )?
        .query_map(params![before.0, most], |row| {
            Ok((Caller::from_bytes(row.get(0)?), id(row, 1)?, row.get(2)?))
        })?
        .collect::<Result<_>>()?;
    let mut expired = Vec::new();
    for (caller, thread, in_use) in old {
        if in_use {
            touch(db, &caller, &thread, now)?;
        } else {
            expired.push((caller, thread));
        }
    }
    Ok(expired)
}
