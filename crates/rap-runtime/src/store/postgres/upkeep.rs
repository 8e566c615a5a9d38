//! Counts, toolsets, and the removal of expired rows.

use rap_agent::Status;
use rap_protocol::Timestamp;
use tokio_postgres::Row;

use super::connect::Connections;
use super::delivery_log;
use super::heads::timestamp;
use super::statement::{Failure, Statement, get};
use crate::store::stored::PRUNED_ROWS;
use crate::store::{COUNT_LIMIT, SessionKey, SessionToolset, Source, StoreCounts, StoredToolset};

/// Queries for waiting work by kind. Each reads indexes that contain nothing else.
const WAITING: [(&str, &str); 4] = [
    ("ask", "SELECT 1 FROM asks"),
    (
        "invoke",
        "SELECT 1 FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 \
         UNION ALL SELECT 1 FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0",
    ),
    (
        "answer",
        "SELECT 1 FROM questions WHERE answer_at IS NOT NULL AND attempts = 0 \
         UNION ALL SELECT 1 FROM questions WHERE answer_at IS NOT NULL AND attempts > 0",
    ),
    ("letter", "SELECT 1 FROM outbox"),
];

pub(super) async fn counts(connections: &Connections, disabled: usize) -> Result<StoreCounts, Failure> {
    let threads = "SELECT status, sum(change)::bigint FROM thread_counts GROUP BY status";
    let mut statements = vec![Statement::new(threads)];
    let count =
        |rows: &str| format!("SELECT count(*) FROM (SELECT 1 FROM ({rows}) AS r LIMIT {COUNT_LIMIT}) AS r");
    statements.extend(WAITING.map(|(_, rows)| Statement::new(count(rows))));
    statements.push(Statement::new(count(
        "SELECT 1 FROM damaged d JOIN threads t ON t.no = d.thread AND t.version = d.version",
    )));
    let found = connections.read(statements).await?;
    let mut threads = Status::ALL.map(|status| (status.as_str(), 0));
    for row in &found[0] {
        let status: &str = get(row, 0)?;
        for (_, count) in threads.iter_mut().filter(|(name, _)| *name == status) {
            *count = get(row, 1)?;
        }
    }
    let waiting = WAITING.iter().zip(&found[1..]).map(|((kind, _), rows)| {
        let count = rows.first().map_or(Ok(0), |row| get::<i64>(row, 0))?;
        Ok((*kind, u32::try_from(count).unwrap_or(COUNT_LIMIT)))
    });
    let damaged = found.last().and_then(|rows| rows.first()).map_or(Ok(0), |row| get::<i64>(row, 0))?;
    let damaged = u32::try_from(damaged).unwrap_or(COUNT_LIMIT);
    Ok(StoreCounts { threads, waiting: waiting.collect::<Result<_, Failure>>()?, disabled, damaged })
}

/// Removes old idempotency keys, old delivery records, old records of where threads were moved to, and event ids of ended
/// subscriptions, and adds up the counts of threads. Returns whether there are more.
pub(super) async fn prune(
    connections: &Connections,
    keys_before: Timestamp,
    deliveries_before: Timestamp,
    departures_before: Timestamp,
) -> Result<bool, Failure> {
    let keys = "WITH gone AS (DELETE FROM requests WHERE digest IN \
                (SELECT digest FROM requests WHERE at < $1 ORDER BY at LIMIT $2) RETURNING 1) \
                SELECT count(*) FROM gone";
    let marks = "WITH ended AS (SELECT thread, call FROM ended_subscriptions LIMIT 1 FOR UPDATE SKIP LOCKED), \
                 gone AS (DELETE FROM event_ids e USING ended WHERE e.thread = ended.thread AND e.call = ended.call \
                 AND e.event IN (SELECT event FROM event_ids i WHERE i.thread = ended.thread AND i.call = ended.call \
                 LIMIT $1) RETURNING 1), \
                 done AS (DELETE FROM ended_subscriptions s USING ended WHERE s.thread = ended.thread \
                 AND s.call = ended.call AND (SELECT count(*) FROM gone) < $1) \
                 SELECT count(*) FROM ended";
    let sums = "WITH gone AS (DELETE FROM thread_counts RETURNING status, change) \
                INSERT INTO thread_counts (status, change) \
                SELECT status, sum(change)::bigint FROM gone GROUP BY status HAVING sum(change) <> 0";
    let departures = "WITH gone AS (DELETE FROM departures WHERE (token_key, incarnation) IN \
                      (SELECT token_key, incarnation FROM departures WHERE at < $1 ORDER BY at LIMIT $2) RETURNING 1) \
                      SELECT count(*) FROM gone";
    let rows = PRUNED_ROWS as i64;
    let found = connections
        .write(vec![
            Statement::new(keys).with(keys_before.0).with(rows),
            Statement::new(marks).with(rows),
            Statement::new(departures).with(departures_before.0).with(rows),
            delivery_log::prune_old(deliveries_before),
            Statement::new(sums),
        ])
        .await?;
    let count = |at: usize| found[at].first().map_or(Ok(0), |row| get::<i64>(row, 0));
    Ok(count(0)? >= rows || count(1)? > 0 || count(2)? >= rows)
}

pub(super) async fn session_toolsets(
    connections: &Connections,
    session: SessionKey,
) -> Result<Vec<SessionToolset>, Failure> {
    let sql = "SELECT server, hash, error, fetched_at FROM session_tools WHERE session = $1 ORDER BY server";
    let toolset = |row: &Row| {
        let hash: Option<String> = get(row, 1)?;
        Ok(SessionToolset {
            session,
            server: get(row, 0)?,
            toolset: hash.map(|hash| StoredToolset { hash, body: None }),
            error: get(row, 2)?,
            fetched_at: timestamp(row, 3)?,
            source: Source::Fetched,
        })
    };
    connections.read_one(Statement::new(sql).session(session)).await?.iter().map(toolset).collect()
}

pub(super) async fn toolset(connections: &Connections, hash: &str) -> Result<Option<Vec<u8>>, Failure> {
    let statement = Statement::new("SELECT body FROM toolsets WHERE hash = $1").text(hash);
    connections.read_one(statement).await?.first().map(|row| get(row, 0)).transpose()
}

/// Returns the hash of the toolset that was fetched last from a server, by any session.
pub(super) async fn newest_toolset(
    connections: &Connections,
    server: &str,
) -> Result<Option<String>, Failure> {
    let sql = "SELECT hash FROM session_tools WHERE server = $1 AND hash IS NOT NULL \
               ORDER BY fetched_at DESC LIMIT 1";
    connections.read_one(Statement::new(sql).text(server)).await?.first().map(|row| get(row, 0)).transpose()
}
