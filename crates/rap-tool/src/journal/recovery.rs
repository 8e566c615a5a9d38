//! Reads unfinished calls at startup, and deletes settled ones.

use rap_protocol::Timestamp;
use rusqlite::{Connection, Row, params};

use super::{CallSeq, Identity, Result, StoredCall, id, json, optional_id};
use crate::auth::Caller;
use crate::rules::State;

const STORED_CALL: &str = "seq, caller, thread, call_id, operation, arguments, ancestors, user_id, subscription, cursor, key, accepted_at, traceparent";

/// Returns the next `limit` calls after `after` whose handlers have not finished.
pub(crate) fn unfinished(db: &Connection, after: CallSeq, limit: u32) -> Result<Vec<StoredCall>> {
    let sql = format!("SELECT {STORED_CALL} FROM calls WHERE state < 2 AND seq > ?1 ORDER BY seq LIMIT ?2");
    db.prepare_cached(&sql)?.query_map(params![after, limit], stored_call)?.collect()
}

/// Returns a call, if its handler has not finished and it was not cancelled.
pub(super) fn unfinished_call(db: &Connection, call: CallSeq) -> Result<Option<StoredCall>> {
    let sql = format!("SELECT {STORED_CALL} FROM calls WHERE seq = ?1 AND state < 2 AND NOT cancelled");
    db.prepare_cached(&sql)?.query_map([call], stored_call)?.next().transpose()
}

/// Returns those of these calls whose handlers have not finished.
pub(crate) fn unfinished_of(db: &Connection, calls: &[CallSeq]) -> Result<Vec<StoredCall>> {
    let sql = format!("SELECT {STORED_CALL} FROM calls WHERE seq = ?1 AND state < 2");
    let mut statement = db.prepare_cached(&sql)?;
    let mut found = Vec::new();
    for call in calls {
        found.extend(statement.query_map([call], stored_call)?.next().transpose()?);
    }
    Ok(found)
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
        accepted_at: Timestamp(row.get(11)?),
        trace: super::trace(row, 12)?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{MIGRATIONS, outbox};

    #[test]
    fn a_journal_of_the_second_version_keeps_its_calls_and_event_ids() {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, &MIGRATIONS[..2]).unwrap();
        db.execute(
            "INSERT INTO calls (key, caller, thread, call_id, operation, origin, state, subscription, events_wait,
                                deliver_at, accepted_at)
             VALUES (?1, ?2, 't', 'c', 'watch', 1, 1, 1, 1, 0, 7)",
            params![[1u8; 32], [2u8; 16]],
        )
        .unwrap();
        let body = br#"{"type":"subscription_event","event_id":"0101010101010101-1"}"#;
        db.execute("INSERT INTO outbox (call, kind, body, created_at) VALUES (1, 1, ?1, 0)", [body]).unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        let calls = unfinished(&db, 0, 9).unwrap();
        assert_eq!((calls.len(), calls[0].confirmed, calls[0].accepted_at), (1, true, Timestamp(7)));
        assert!(unfinished_call(&db, 1).unwrap().is_some());
        let event = outbox::first(&db, 1).unwrap().unwrap();
        assert_eq!(event.body, body);
    }
}
