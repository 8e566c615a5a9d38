//! Removes expired rows, a bounded number per call.

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::delivery_log;
use crate::store::stored::PRUNED_ROWS as ROWS;

/// Deletes event ids of an ended subscription.
pub(super) const DELETE_EVENT_IDS: &str = "DELETE FROM seen WHERE thread = ?1 AND call = ?2 AND event IN \
     (SELECT event FROM seen WHERE thread = ?1 AND call = ?2 LIMIT ?3)";

/// Removes old idempotency keys, old delivery records, old records of where threads were moved to, and event ids of ended
/// subscriptions. Returns whether there are more.
pub(super) fn prune(
    conn: &Connection,
    keys_before: Timestamp,
    deliveries_before: Timestamp,
    departures_before: Timestamp,
) -> rusqlite::Result<bool> {
    delivery_log::prune_old(conn, deliveries_before)?;
    let mut statement = conn.prepare_cached(
        "DELETE FROM repeats WHERE digest IN (SELECT digest FROM repeats WHERE at < ?1 ORDER BY at LIMIT ?2)",
    )?;
    let keys = statement.execute(params![keys_before.0, ROWS as i64])?;
    let mut statement = conn.prepare_cached(
        "DELETE FROM departures WHERE (token_key, incarnation) IN \
         (SELECT token_key, incarnation FROM departures WHERE at < ?1 ORDER BY at LIMIT ?2)",
    )?;
    let departures = statement.execute(params![departures_before.0, ROWS as i64])?;
    Ok(prune_marks(conn)? || keys >= ROWS || departures >= ROWS)
}

fn prune_marks(conn: &Connection) -> rusqlite::Result<bool> {
    let mut ended = conn.prepare_cached("SELECT thread, call FROM ended_subscriptions LIMIT 1")?;
    let next = ended.query_row([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?)));
    let Some((thread, call)) = next.optional()? else { return Ok(false) };
    let mut marks = conn.prepare_cached(DELETE_EVENT_IDS)?;
    if marks.execute(params![thread, call, ROWS as i64])? < ROWS {
        let sql = "DELETE FROM ended_subscriptions WHERE thread = ?1 AND call = ?2";
        conn.prepare_cached(sql)?.execute(params![thread, call])?;
    }
    Ok(true)
}
