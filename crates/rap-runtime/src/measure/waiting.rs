//! Cost of many waiting threads and timers.

use std::path::Path;
use std::time::{Duration, Instant};

use rap_io::client::Client;
use rap_io::sqlite::open_sqlite;
use rusqlite::Connection;
use serde_json::Value;

use super::Sizes;
use super::client::{client, get_from, held_call, open_thread, post_to, until};
use super::process::BenchProcess;
use rap_io::bench::BenchResult;

/// Cost of sleeping threads.
pub struct Sleeping {
    /// Memory of the process, in bytes.
    pub resident: u64,
    pub added: u64,
    pub first_answer: Duration,
}

pub async fn sleeping(data: &Path, sizes: &Sizes) -> BenchResult<Sleeping> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    post_to(&client, format!("{}/hold", tool.url), Value::Null).await?;
    // One thread waits for a result that is held back. The others are copies of it.
    let runtime = BenchProcess::busy_runtime(data, &tool)?;
    open_thread(&client, &runtime, "sleeper1", "go").await?;
    let held = held_call(&client, &tool).await?;
    tokio::time::sleep(sizes.warm_up).await;
    let alone = runtime.resident_bytes()?;
    let mut started = Instant::now();
    let runtime = runtime.restart(data, &tool, || {
        let conn = open_sqlite(&data.join("rap.db"))?;
        multiply(&conn, "threads", sizes.sleeping, &[("no", "x"), ("root", "x"), ("id", "'sleeper' || x")])?;
        multiply(&conn, "calls", sizes.sleeping, &[("thread", "x")])?;
        multiply(&conn, "entries", sizes.sleeping, &[("key", "(x << 32) | (key & 4294967295)")])?;
        // Closing the connection checkpoints the rows, which is not part of the start.
        drop(conn);
        started = Instant::now();
        Ok(())
    })?;
    let url = held["callback_url"].as_str().ok_or("no callback URL")?.to_owned();
    post_to(&client, url, held["result"].clone()).await?;
    let first_answer = started.elapsed();
    tokio::time::sleep(sizes.warm_up).await;
    let crowded = runtime.resident_bytes()?;
    Ok(Sleeping { resident: crowded, added: crowded.saturating_sub(alone), first_answer })
}

/// Copies all rows of a table until there are `count` of each, numbered by `x`. The columns in `others` get new values.
fn multiply(conn: &Connection, table: &str, count: u32, others: &[(&str, &str)]) -> BenchResult<()> {
    let mut columns = conn.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let columns = columns.query_map([table], |row| row.get(0))?.collect::<rusqlite::Result<Vec<String>>>()?;
    let value = |column: &String| {
        let other = others.iter().find(|(name, _)| name == column);
        other.map_or(column.clone(), |(_, value)| (*value).to_owned())
    };
    let values: Vec<String> = columns.iter().map(value).collect();
    conn.execute_batch(&format!(
        "CREATE TEMP TABLE copied AS SELECT * FROM {table};
         WITH RECURSIVE n (x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM n WHERE x < {count})
         INSERT INTO {table} ({}) SELECT {} FROM n, copied;
         DROP TABLE copied;",
        columns.join(", "),
        values.join(", "),
    ))?;
    Ok(())
}

/// Cost of timers.
pub struct Timers {
    pub added: u64,
    pub start: Duration,
    /// Delay of a timer that is due soon.
    pub late: Duration,
    pub listed: Duration,
}

pub async fn timers(data: &Path, sizes: &Sizes) -> BenchResult<Timers> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    let runtime = with_timer(&client, &tool, &data.join("one")).await?;
    short_sleep(&client, &runtime, sizes).await?;
    let alone = runtime.resident_bytes()?;
    drop(runtime);

    let data = data.join("many");
    let runtime = with_timer(&client, &tool, &data).await?;
    let mut started = Instant::now();
    let runtime = runtime.restart(&data, &tool, || {
        let conn = open_sqlite(&data.join("rap.db"))?;
        multiply(&conn, "threads", sizes.timers, &[("no", "x"), ("root", "x"), ("id", "'sleeper' || x")])?;
        // Each timer is a millisecond later than the one before.
        multiply(&conn, "calls", sizes.timers, &[("thread", "x"), ("until", "until + x")])?;
        drop(conn);
        started = Instant::now();
        Ok(())
    })?;
    get_from(&client, format!("{}/v1/threads/sleeper1", runtime.url)).await?;
    let start = started.elapsed();
    let late = short_sleep(&client, &runtime, sizes).await?;
    let crowded = runtime.resident_bytes()?;
    let asked = Instant::now();
    let timers = get_from(&client, format!("{}/v1/timers", runtime.url)).await?;
    let listed = asked.elapsed();
    if timers["timers"].as_array().is_none_or(Vec::is_empty) {
        return Err(format!("no timers are listed: {timers}").into());
    }
    Ok(Timers { added: crowded.saturating_sub(alone), start, late, listed })
}

/// Starts a runtime with a thread that sleeps for years.
async fn with_timer(client: &Client, tool: &BenchProcess, data: &Path) -> BenchResult<BenchProcess> {
    let runtime = BenchProcess::command_runtime(data, tool)?;
    open_thread(client, &runtime, "sleeper1", "call sleep {\"seconds\": 1e8}").await?;
    until(client, &runtime, "sleeper1", |thread| thread["status"] == "waiting").await?;
    Ok(runtime)
}

/// Lets a thread sleep for a short time. Returns the delay of its timer.
async fn short_sleep(client: &Client, runtime: &BenchProcess, sizes: &Sizes) -> BenchResult<Duration> {
    let id = "nap";
    let message = format!("call sleep {{\"seconds\": {}}}", sizes.warm_up.as_secs_f64());
    open_thread(client, runtime, id, &message).await?;
    let asleep = until(client, runtime, id, |thread| thread["status"] != "running").await?;
    until(client, runtime, id, |thread| thread["status"] == "idle").await?;
    let history = get_from(client, format!("{}/v1/threads/{id}/history", runtime.url)).await?;
    let entries = history["entries"].as_array().ok_or("no entries")?;
    let result = entries.iter().find(|entry| entry["kind"] == "result").ok_or("no result")?;
    let time =
        |value: &Value| -> BenchResult<jiff::Timestamp> { Ok(value.as_str().ok_or("no time")?.parse()?) };
    let late = time(&result["at"])?.duration_since(time(&asleep["waiting_on"][0]["until"])?);
    Ok(late.try_into().map_err(|_| "the timer fired too early")?)
}
