//! A subscription that sends events without a pause. A few threads at a time process them, and no event is lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rap_io::client::Client;
use rap_io::sqlite::open_sqlite;
use serde_json::{Value, json};
use url::Url;

use rap_runtime::measure::client::{client, get_from, held_call, open_thread, post_to, until};
use rap_runtime::measure::process::BenchProcess;
use rap_testkit::bench::BenchResult;

const SENDERS: u32 = 64;
/// Pause of a sender after a 503.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of concurrent event children of a subscription, as the runtime is configured.
const MAX_CHILDREN: usize = 4;
const WATCHER: &str = "watcher";
/// Messages to the thread, in order. An event child is in its first turn.
const GREETING: &str = "say hello";
const SUBSCRIBE: &str = "call echo {\"text\": \"watch\"}";
/// The same as a scenario, for a slow model.
const SLOW_SCRIPT: &str = "[[turn]]\nsay = \"noted\"\nsleep = 0.5\n\
                      [[turn]]\ncalls = [{name = \"echo\", arguments = {text = \"watch\"}}]\n\
                      [[turn]]\nsay = \"hello\"\n";

/// Model that processes the events.
#[derive(Clone, Copy)]
pub enum Worker {
    /// Answers at once.
    Quick,
    /// Answers after half a second, so that events and their senders have to wait.
    Slow,
}

/// Cost of a flood of events.
pub struct Flood {
    pub per_second: f64,
    /// Time until the last event was processed.
    pub elapsed: Duration,
    /// Number of events that were rejected with 503 and retried.
    pub refused: u32,
    pub before: u64,
    /// Peak memory after a tenth of the events, in bytes.
    pub tenth: u64,
    pub peak: u64,
    pub children: usize,
    /// Maximum number of concurrent children.
    pub at_once: usize,
}

pub async fn flood(data: &Path, events: u32, worker: Worker) -> BenchResult<Flood> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    post_to(&client, format!("{}/hold", tool.url), Value::Null).await?;
    let runtime = match worker {
        Worker::Quick => BenchProcess::command_runtime(data, &tool)?,
        Worker::Slow => BenchProcess::scripted_runtime(data, &tool, SLOW_SCRIPT)?,
    };
    let is_idle = |thread: &Value| thread["status"] == "idle";
    open_thread(&client, &runtime, WATCHER, GREETING).await?;
    until(&client, &runtime, WATCHER, is_idle).await?;
    let messages = format!("{}/v1/threads/{WATCHER}/messages", runtime.url);
    post_to(&client, messages, json!({"text": SUBSCRIBE})).await?;
    let mut held = held_call(&client, &tool).await?;
    held["result"]["subscription"] = true.into();
    let url = held["callback_url"].as_str().ok_or("no callback URL")?.to_owned();
    post_to(&client, url.clone(), held["result"].clone()).await?;
    until(&client, &runtime, WATCHER, is_idle).await?;
    let source = Source { client, url: Url::parse(&url)?, call: held["result"]["id"].clone() };

    let before = runtime.resident_bytes()?;
    let began = Instant::now();
    let mut refused = source.send(0, events / 10).await?;
    let tenth = runtime.peak_bytes()?;
    refused += source.send(events / 10, events).await?;
    let per_second = f64::from(events) / began.elapsed().as_secs_f64();
    until(&source.client, &runtime, WATCHER, |thread| thread["children"] == 0).await?;
    let elapsed = began.elapsed();
    let subscriptions = get_from(&source.client, format!("{}/v1/subscriptions", runtime.url)).await?;
    if subscriptions["subscriptions"][0]["waiting"] != 0 {
        return Err(format!("events wait although no child is active: {subscriptions}").into());
    }
    let peak = runtime.peak_bytes()?;
    drop(runtime);
    let (children, at_once) = check_database(&data.join("rap.db"), events)?;
    Ok(Flood { per_second, elapsed, refused, before, tenth, peak, children, at_once })
}

/// The sender of the subscription's events.
#[derive(Clone)]
struct Source {
    client: Client,
    url: Url,
    call: Value,
}

impl Source {
    /// Sends the events with numbers from `from` to `to`, and retries each until it is accepted. Returns the number of
    /// 503s.
    async fn send(&self, from: u32, to: u32) -> BenchResult<u32> {
        let next = Arc::new(AtomicU32::new(from));
        let send = |source: Source, next: Arc<AtomicU32>| async move {
            let mut refused = 0;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= to {
                    return BenchResult::Ok(refused);
                }
                while !source.send_once(number).await? {
                    refused += 1;
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        let senders: Vec<_> =
            (0..SENDERS).map(|_| tokio::spawn(send(self.clone(), Arc::clone(&next)))).collect();
        let mut refused = 0;
        for sender in senders {
            refused += sender.await??;
        }
        Ok(refused)
    }

    /// Returns true if the event was accepted, and false for a 503.
    async fn send_once(&self, number: u32) -> BenchResult<bool> {
        let event = json!({
            "type": "subscription_event",
            "group_id": WATCHER,
            "tool_call_id": self.call,
            "event_id": format!("event_{number}"),
            "text": format!("event {number}"),
        });
        let reply = self.client.post_json(&self.url, &[], event.to_string().into()).await?;
        match reply.status {
            200 => Ok(true),
            503 => Ok(false),
            status => Err(format!("{status}: {}", String::from_utf8_lossy(&reply.body)).into()),
        }
    }
}

/// Checks that each event is in the history of exactly one child. Returns the number of children, in total and at a
/// time.
fn check_database(database: &Path, events: u32) -> BenchResult<(usize, usize)> {
    let conn = open_sqlite(database)?;
    let sql = "SELECT count(*), count(DISTINCT word) FROM (SELECT body ->> '$.content.text' AS word FROM entries \
               WHERE body ->> '$.kind' = 'result') WHERE word LIKE 'event %' AND substr(word, 7) + 0 < ?1";
    let found: (u32, u32) = conn.query_row(sql, [events], |row| Ok((row.get(0)?, row.get(1)?)))?;
    if found != (events, events) {
        let (all, each) = found;
        return Err(format!("{each} of {events} events are in a history, {all} times in total").into());
    }
    let mut lifetimes =
        conn.prepare("SELECT created_at, updated_at, status FROM threads WHERE parent IS NOT NULL")?;
    let lifetimes = lifetimes.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    let lifetimes: Vec<(i64, i64, String)> = lifetimes.collect::<rusqlite::Result<_>>()?;
    if let Some((.., status)) = lifetimes.iter().find(|(.., status)| status != "closed") {
        return Err(format!("an event child is {status}").into());
    }
    // A thread that was closed does not overlap with one that was created in the same millisecond.
    let mut changes: Vec<(i64, i32)> = lifetimes
        .iter()
        .flat_map(|(from, to, _)| [(*from, 1), (to.max(&(from + 1)).to_owned(), -1)])
        .collect();
    changes.sort_unstable();
    let mut active = 0;
    let counts = changes.into_iter().map(|(_, step)| {
        active += step;
        active
    });
    let at_once = counts.max().unwrap_or(0) as usize;
    if at_once > MAX_CHILDREN {
        return Err(
            format!("{at_once} event children were active at a time, more than {MAX_CHILDREN}").into()
        );
    }
    Ok((lifetimes.len(), at_once))
}
