//! Reads unfinished calls at startup, and deletes settled ones.

use rap_protocol::Timestamp;
use rusqlite::{Connection, Row, params};

use super::{CallSeq, Identity, Result, StoredCall, id, json, optional_id};
use crate::auth::Caller;
use crate::rules::State;

const STORED_CALL: &str =
    "seq, caller, thread, call_id, operation, arguments, ancestors, user_id, subscription, cursor, key";

/// Returns the next `limit` calls after `after` whose handlers have not finished.
pub(crate) fn unfinished(db: &Connection, after: CallSeq, limit: u32) -> Result<Vec<StoredCall>> {
    let sql = format!("SELECT {STORED_CALL} FROM calls WHERE state < 2 AND seq > ?1 ORDER BY seq LIMIT ?2");
    db.prepare_cached(&sql)?.query_map(params![after, limit], stored_call)?.collect()
}

/// Returns a call, if its handler has not finished.
pub(super) fn unfinished_call(db: &Connection, call: CallSeq) -> Result<Option<StoredCall>> {
    let sql = format!("SELECT {STORED_CALL} FROM calls WHERE seq = ?1 AND state < 2");
    db.prepare_cached(&sql)?.query_map([call], stored_call)?.next().transpose()
}

fn stored_call(row: &Row<'_>) -> Result<StoredCall> {
    Ok(StoredCall {
        seq: row.get(0)?,
        caller: Caller::from_bytes(row.get(1)?),
        thread: id(row, 2)?,
        id: id(row, 3)?,
        operation: row.get(4)?,
        arguments: json(row, 5)?.unwrap_or_default(),
        ancestors: json(row, 6)?.unwrap_or_default(),
        user_id: optional_id(row, 7)?,
        confirmed: row.get(8)?,
        cursor: json(row, 9)?,
        identity: row.get(10)?,
    })
}

pub(crate) fn save_cursor(db: &Connection, call: CallSeq, cursor: &str) -> Result<()> {
    db.prepare_cached("UPDATE calls SET cursor = ?2 WHERE seq = ?1 AND state < 2")?
        .execute(params![call, cursor])?;
    Ok(())
}

/// Resets the restart counts of running calls at a graceful shutdown, which does not count as a crash.
pub(crate) fn reset_restart_counts(db: &Connection) -> Result<()> {
    db.execute("UPDATE calls SET restarts = 0 WHERE state < 2 AND restarts > 0", [])?;
    Ok(())
}

/// Deletes at most `limit` calls that were settled before `before`. Returns their identities.
pub(super) fn delete_settled(db: &Connection, before: Timestamp, limit: u32) -> Result<Vec<Identity>> {
    db.prepare_cached(
        "DELETE FROM calls WHERE seq IN (SELECT seq FROM calls WHERE state = ?1 AND settled_at < ?2 LIMIT ?3)
         RETURNING key",
    )?
    .query_map(params![State::Settled as u8, before.0, limit], |row| row.get(0))?
    .collect()
}
