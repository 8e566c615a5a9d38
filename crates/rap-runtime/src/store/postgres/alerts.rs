//! Alerts that wait to be sent. An attempt claims its alert by a later due time, so that no two nodes send it at once.

use rap_protocol::{ThreadId, Timestamp};
use tokio_postgres::Row;

use super::connect::Connections;
use super::heads::{timestamp, timestamp_or_none};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::alert::{Alert, ClaimedAlerts};

pub(super) async fn claim(
    connections: &Connections,
    destination: &str,
    now: Timestamp,
    until: Timestamp,
    limit: usize,
) -> Result<ClaimedAlerts, Failure> {
    let sql = "UPDATE alerts SET due = $3, attempts = attempts + 1 WHERE no IN (\
               SELECT no FROM alerts WHERE destination = $1 AND due <= $2 ORDER BY due, no LIMIT $4 \
               FOR UPDATE SKIP LOCKED) RETURNING no, thread, state, reason, at, attempts";
    let claim = Statement::new(sql).text(destination).with(now.0).with(until.0).with(limit as i64);
    let next = Statement::new("SELECT min(due) FROM alerts WHERE destination = $1").text(destination);
    let rows = connections.write(vec![claim, next]).await?;
    let mut alerts = rows[0].iter().map(alert).collect::<Result<Vec<Alert>, Failure>>()?;
    alerts.sort_by_key(|alert| alert.number);
    let next = rows[1].first().map(|row| timestamp_or_none(row, 0)).transpose()?.flatten();
    Ok(ClaimedAlerts { alerts, next })
}

pub(super) fn postpone(number: i64, at: Timestamp) -> Statement {
    Statement::new("UPDATE alerts SET due = $2 WHERE no = $1").with(number).with(at.0)
}

pub(super) fn remove(number: i64) -> Statement {
    Statement::new("DELETE FROM alerts WHERE no = $1").with(number)
}

/// Removes alerts that were made before a time, also those for destinations that are no longer configured.
pub(super) fn expire(before: Timestamp) -> Statement {
    Statement::new("DELETE FROM alerts WHERE at < $1").with(before.0)
}

fn alert(row: &Row) -> Result<Alert, Failure> {
    Ok(Alert {
        number: get(row, 0)?,
        thread: ThreadId::new(get::<String>(row, 1)?).map_err(unreadable)?,
        state: get(row, 2)?,
        reason: get(row, 3)?,
        at: timestamp(row, 4)?,
        attempts: get::<i64>(row, 5)?.try_into().unwrap_or(u32::MAX),
    })
}
