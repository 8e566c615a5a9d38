//! Baseline: the rows of a round trip, written directly through the group-commit writer.

use std::path::Path;
use std::time::{Duration, Instant};

use rap_io::sqlite::{migrate, open_sqlite};
use rap_io::writer::{JobClass, Writer, WriterLimits};
use rusqlite::{Connection, params};
use serde_json::json;

use crate::store::sqlite::MIGRATIONS;
use rap_io::bench::{BenchResult, Figure};

/// Writes the rows of round trips as the runtime does, in two jobs each, without any other work.
pub async fn bare(path: &Path, producers: usize, measured: Duration) -> BenchResult<Figure> {
    // The baseline has the same tables, indexes and triggers.
    migrate(&open_sqlite(path)?, MIGRATIONS)?;
    let file = path.to_owned();
    let limits = WriterLimits { batch_jobs: 64, ..WriterLimits::default() };
    let writer = Writer::start(move || open_sqlite(&file), limits)?;
    let head = bare_head();
    for number in 1..=producers as i64 {
        let head = head.clone();
        writer.run(JobClass::External, move |conn| insert_bare_thread(conn, number, &head)).await?;
    }
    let began = Instant::now();
    let producer = |number: i64| {
        let (writer, head) = (writer.clone(), head.clone());
        async move {
            let mut latencies = Vec::new();
            let mut turn = 0;
            while began.elapsed() < measured {
                let start = Instant::now();
                turn += 1;
                let (first, second) = (head.clone(), head.clone());
                writer.run(JobClass::Internal, move |conn| bare_call(conn, number, turn, &first)).await?;
                writer.run(JobClass::External, move |conn| bare_result(conn, number, turn, &second)).await?;
                latencies.push(start.elapsed());
            }
            BenchResult::Ok(latencies)
        }
    };
    let all: Vec<_> = (1..=producers as i64).map(|number| tokio::spawn(producer(number))).collect();
    let mut latencies = Vec::new();
    for one in all {
        latencies.extend(one.await??);
    }
    let figure = Figure::of(latencies, began.elapsed());
    writer.close().await;
    Ok(figure)
}

fn bare_head() -> String {
    json!({"phase": "waiting", "turn": 1000, "turns_awake": 1000, "seq": 2001, "settled": 0, "minted": 0,
        "batch": [{"id": "rap_0123456789abcdef_1000", "call_id": "call_1000_1", "name": "echo", "server": "http://127.0.0.1:40000", "seq": 2001,
        "since": 1_794_821_400_123_i64}], "usage": {"input": 0, "output": 0, "cached": 0}})
    .to_string()
}

fn insert_bare_thread(conn: &Connection, number: i64, head: &str) -> rusqlite::Result<usize> {
    conn.execute(
        "INSERT INTO threads (no, id, root, born_at, ancestors, incarnation, agent, created_at, updated_at, version, \
         status, head) VALUES (?1, 'thread' || ?1, ?1, 0, '[]', 0, 'default', 0, 0, 1, 'waiting', ?2)",
        params![number, head],
    )
}

fn update_bare_head(
    conn: &Connection,
    number: i64,
    turn: i64,
    head: &str,
    ask: Option<i64>,
) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "UPDATE threads SET head = ?3, version = version + 1, status = ?4, ask = ?5, ask_at = ?2, ask_attempts = 0, \
         ask_to = CASE WHEN ?5 IS NULL THEN NULL ELSE 'scripted' END, due = NULL, updated_at = ?2 WHERE no = ?1",
    )?;
    let status = if ask.is_some() { "running" } else { "waiting" };
    statement.execute(params![number, turn, head, status, ask])?;
    Ok(())
}

fn insert_bare_entry(conn: &Connection, key: i64, body: &str) -> rusqlite::Result<()> {
    conn.prepare_cached("INSERT INTO entries (key, body) VALUES (?1, ?2)")?.execute(params![key, body])?;
    Ok(())
}

fn bare_call(conn: &Connection, number: i64, turn: i64, head: &str) -> rusqlite::Result<()> {
    update_bare_head(conn, number, turn, head, None)?;
    let body = "{\"at\":1794821400123,\"kind\":\"assistant\",\"text\":\"\",\"calls\":[{\"id\":\"rap_0123456789abcdef_1000\",\
                \"call_id\":\"call_1000_1\",\"name\":\"echo\",\"arguments\":{\"given\":{\"text\":\"hello\"}}}]}";
    insert_bare_entry(conn, (number << 32) | (2 * turn), body)?;
    let mut statement = conn.prepare_cached(
        "INSERT INTO calls (thread, id, state, call_id, name, server, seq, since, invoke_at, root) \
         VALUES (?1, 'rap_0123456789abcdef_' || ?2, 0, 'call_' || ?2 || '_1', 'echo', 'http://127.0.0.1:40000', ?2, \
         1794821400123, 1794821400123, ?1)",
    )?;
    statement.execute(params![number, turn])?;
    Ok(())
}

fn bare_result(conn: &Connection, number: i64, turn: i64, head: &str) -> rusqlite::Result<()> {
    update_bare_head(conn, number, turn, head, Some(turn))?;
    let body = "{\"at\":1794821400123,\"kind\":\"result\",\"call_id\":\"rap_0123456789abcdef_1000\",\"content\":{\"text\":\"hello\"}}";
    insert_bare_entry(conn, (number << 32) | (2 * turn + 1), body)?;
    let mut statement = conn.prepare_cached(
        "UPDATE calls SET state = 1, invoke_at = NULL, until = NULL WHERE thread = ?1 AND id = 'rap_0123456789abcdef_' || ?2",
    )?;
    statement.execute(params![number, turn])?;
    Ok(())
}
