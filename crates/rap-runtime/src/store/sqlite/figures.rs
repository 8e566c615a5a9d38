//! Statistics of agents over time.

use rap_protocol::Timestamp;
use rusqlite::{Connection, params, params_from_iter, types::Value};

use crate::store::figures::{Figures, FiguresRow, KEPT};

fn add_sql() -> String {
    let columns = Figures::COLUMNS.join(", ");
    let values = vec!["?"; 2 + Figures::COLUMNS.len()].join(", ");
    let sums = Figures::COLUMNS.map(|column| format!("{column} = figures.{column} + excluded.{column}"));
    format!(
        "INSERT INTO figures (at, agent, {columns}) VALUES ({values}) ON CONFLICT (at, agent) DO UPDATE SET {}",
        sums.join(", ")
    )
}

/// Adds figures to those that are stored, and removes old ones.
pub(super) fn add(conn: &Connection, rows: &[FiguresRow], now: Timestamp) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(&add_sql())?;
    for FiguresRow { at, agent, figures } in rows {
        let key = [Value::Integer(at.0), Value::Text(agent.clone())];
        statement.execute(params_from_iter(key.into_iter().chain(figures.values().map(Value::Integer))))?;
    }
    let before = now.0.saturating_sub(KEPT.as_millis() as i64);
    conn.prepare_cached("DELETE FROM figures WHERE at < ?1")?.execute([before])?;
    Ok(())
}

/// Adds up the figures since a time, in intervals of `step` milliseconds.
pub(super) fn sum(conn: &Connection, since: Timestamp, step: i64) -> rusqlite::Result<Vec<FiguresRow>> {
    let sums = Figures::COLUMNS.map(|column| format!("sum({column})")).join(", ");
    let mut statement = conn.prepare_cached(&format!(
        "SELECT at / ?2 * ?2, agent, {sums} FROM figures WHERE at >= ?1 GROUP BY 1, 2 ORDER BY 2, 1"
    ))?;
    let rows = statement.query_map(params![since.0, step], |row| {
        let mut values = [0; Figures::COLUMNS.len()];
        for (column, value) in values.iter_mut().enumerate() {
            *value = row.get(column + 2)?;
        }
        let figures = Figures::from_values(values);
        Ok(FiguresRow { at: Timestamp(row.get(0)?), agent: row.get(1)?, figures })
    })?;
    rows.collect()
}

/// Counts the threads of a user by status, up to `limit` threads.
pub(super) fn statuses(conn: &Connection, user: &str, limit: u32) -> rusqlite::Result<Vec<(String, i64)>> {
    let sql = "SELECT status, count(*) FROM (SELECT status FROM threads WHERE user_id = ?1 LIMIT ?2) GROUP BY status";
    let mut statement = conn.prepare_cached(sql)?;
    let rows = statement.query_map(params![user, limit], |row| Ok((row.get(0)?, row.get(1)?)))?;
    rows.collect()
}
