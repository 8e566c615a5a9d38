//! Counts of threads and of waiting work, without scanning whole tables.

use rap_agent::Status;
use rusqlite::Connection;

use crate::store::{COUNT_LIMIT, StoreCounts};

/// Queries for waiting work by kind. Each reads partial indexes that contain nothing else.
const WAITING: [(&str, &str); 4] = [
    (
        "ask",
        "SELECT 1 FROM threads WHERE ask IS NOT NULL AND ask_attempts = 0 \
         UNION ALL SELECT 1 FROM threads WHERE ask_attempts > 0",
    ),
    (
        "invoke",
        "SELECT 1 FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 \
         UNION ALL SELECT 1 FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0",
    ),
    ("answer", "SELECT 1 FROM questions WHERE answer_at IS NOT NULL"),
    ("letter", "SELECT 1 FROM letters"),
];

pub(super) fn counts(conn: &Connection, disabled: usize) -> rusqlite::Result<StoreCounts> {
    let mut threads = Status::ALL.map(|status| (status.as_str(), 0));
    conn.prepare_cached("SELECT * FROM thread_counts")?.query_row([], |row| {
        threads.iter_mut().try_for_each(|(status, count)| {
            *count = row.get(*status)?;
            Ok(())
        })
    })?;
    let waiting = WAITING.into_iter().map(|(kind, rows)| {
        let sql = format!("SELECT count(*) FROM ({rows} LIMIT {COUNT_LIMIT})");
        Ok((kind, conn.prepare_cached(&sql)?.query_row([], |row| row.get(0))?))
    });
    let waiting = waiting.collect::<rusqlite::Result<_>>()?;
    let damaged = format!(
        "SELECT count(*) FROM (SELECT 1 FROM damaged d JOIN threads t ON t.no = d.thread AND t.version = d.version \
         LIMIT {COUNT_LIMIT})"
    );
    let damaged = conn.prepare_cached(&damaged)?.query_row([], |row| row.get(0))?;
    Ok(StoreCounts { threads, waiting, disabled, damaged })
}
