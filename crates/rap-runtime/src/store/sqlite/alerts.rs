//! Alerts that wait to be sent.

use rap_protocol::{ThreadId, Timestamp};
use rusqlite::{Connection, Row, params};

use super::heads::unreadable;
use crate::store::alert::{Alert, ClaimedAlerts, NewAlert, WAITING};

pub(super) fn add(conn: &Connection, alert: &NewAlert<'_>) -> rusqlite::Result<()> {
    let NewAlert { destination, thread, state, reason, at } = alert;
    let sql = "INSERT INTO alerts (destination, thread, state, reason, at, due) SELECT ?1, ?2, ?3, ?4, ?5, ?5 \
               WHERE (SELECT count(*) FROM (SELECT 1 FROM alerts WHERE destination = ?1 LIMIT ?6)) < ?6";
    conn.prepare_cached(sql)?.execute(params![destination, thread, state, reason, at.0, WAITING])?;
    Ok(())
}

/// Makes all alerts due. No attempt of an earlier process is in progress.
pub(super) fn release(conn: &Connection) -> rusqlite::Result<()> {
    conn.execute("UPDATE alerts SET due = at WHERE due > at", []).map(drop)
}

pub(super) fn claim(
    conn: &Connection,
    destination: &str,
    now: Timestamp,
    until: Timestamp,
    limit: usize,
) -> rusqlite::Result<ClaimedAlerts> {
    let sql = "UPDATE alerts SET due = ?3, attempts = attempts + 1 WHERE no IN (\
               SELECT no FROM alerts WHERE destination = ?1 AND due <= ?2 ORDER BY due, no LIMIT ?4) \
               RETURNING no, thread, state, reason, at, attempts";
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map(params![destination, now.0, until.0, limit as i64], alert)?;
    let mut alerts = rows.collect::<rusqlite::Result<Vec<Alert>>>()?;
    alerts.sort_by_key(|alert| alert.number);
    let sql = "SELECT min(due) FROM alerts WHERE destination = ?1";
    let next: Option<i64> = conn.prepare_cached(sql)?.query_row([destination], |row| row.get(0))?;
    Ok(ClaimedAlerts { alerts, next: next.map(Timestamp) })
}

pub(super) fn postpone(conn: &Connection, number: i64, at: Timestamp) -> rusqlite::Result<()> {
    conn.prepare_cached("UPDATE alerts SET due = ?2 WHERE no = ?1")?.execute([number, at.0]).map(drop)
}

pub(super) fn remove(conn: &Connection, number: i64) -> rusqlite::Result<()> {
    conn.prepare_cached("DELETE FROM alerts WHERE no = ?1")?.execute([number]).map(drop)
}

/// Removes alerts that were made before a time, also those for destinations that are no longer configured.
pub(super) fn expire(conn: &Connection, before: Timestamp) -> rusqlite::Result<()> {
    conn.prepare_cached("DELETE FROM alerts WHERE at < ?1")?.execute([before.0]).map(drop)
}

fn alert(row: &Row<'_>) -> rusqlite::Result<Alert> {
    Ok(Alert {
        number: row.get(0)?,
        thread: ThreadId::new(row.get::<_, String>(1)?).map_err(unreadable)?,
        state: row.get(2)?,
        reason: row.get(3)?,
        at: Timestamp(row.get(4)?),
        attempts: row.get(5)?,
    })
}
