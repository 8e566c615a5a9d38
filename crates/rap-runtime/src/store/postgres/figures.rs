//! Statistics of agents over time.

use rap_protocol::Timestamp;

use super::connect::Connections;
use super::heads::timestamp;
use super::statement::{Failure, Statement, get};
use crate::store::figures::{Figures, FiguresRow, KEPT};

fn add_sql() -> String {
    let columns = Figures::COLUMNS.join(", ");
    let values: Vec<_> = (1..=2 + Figures::COLUMNS.len()).map(|number| format!("${number}")).collect();
    let sums = Figures::COLUMNS.map(|column| format!("{column} = figures.{column} + excluded.{column}"));
    format!(
        "INSERT INTO figures (at, agent, {columns}) VALUES ({}) ON CONFLICT (at, agent) DO UPDATE SET {}",
        values.join(", "),
        sums.join(", ")
    )
}

/// Returns the statements that add figures to those that are stored, and remove old ones.
pub(super) fn add(mut rows: Vec<FiguresRow>, now: Timestamp) -> Vec<Statement> {
    // All nodes lock rows in the same order.
    rows.sort_by(|a, b| (a.at, &a.agent).cmp(&(b.at, &b.agent)));
    let add = |row: &FiguresRow| {
        let statement = Statement::new(add_sql()).with(row.at.0).text(&row.agent);
        row.figures.values().into_iter().fold(statement, Statement::with)
    };
    let before = now.0.saturating_sub(KEPT.as_millis() as i64);
    let old = Statement::new("DELETE FROM figures WHERE at < $1").with(before);
    rows.iter().map(add).chain([old]).collect()
}

/// Adds up the figures since a time, in intervals of `step` milliseconds.
pub(super) async fn sum(
    connections: &Connections,
    since: Timestamp,
    step: i64,
) -> Result<Vec<FiguresRow>, Failure> {
    let sums = Figures::COLUMNS.map(|column| format!("sum({column})::bigint")).join(", ");
    let sql =
        format!("SELECT at / $2 * $2, agent, {sums} FROM figures WHERE at >= $1 GROUP BY 1, 2 ORDER BY 2, 1");
    let statement = Statement::new(sql).with(since.0).with(step);
    let read = |row: &tokio_postgres::Row| {
        let mut values = [0; Figures::COLUMNS.len()];
        for (column, value) in values.iter_mut().enumerate() {
            *value = get(row, column + 2)?;
        }
        let figures = Figures::from_values(values);
        Ok(FiguresRow { at: timestamp(row, 0)?, agent: get(row, 1)?, figures })
    };
    connections.read_one(statement).await?.iter().map(read).collect()
}

/// Counts the threads of a user by status, up to `limit` threads.
pub(super) async fn statuses(
    connections: &Connections,
    user: &str,
    limit: u32,
) -> Result<Vec<(String, i64)>, Failure> {
    let sql = "SELECT status, count(*) FROM (SELECT status FROM threads WHERE user_id = $1 LIMIT $2) AS t GROUP BY status";
    let statement = Statement::new(sql).text(user).with(i64::from(limit));
    let rows = connections.read_one(statement).await?;
    rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
}
