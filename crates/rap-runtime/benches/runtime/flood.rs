//! A subscription that sends without a pause: a few threads at a time work it off, and nothing is lost.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rap_io::client::Client;
use rap_io::sqlite::open_sqlite;
use serde_json::{Value, json};
use url::Url;

use crate::bench::Outcome;
use crate::client::{client, get_from, held_call, open_thread, post_to, until};
use crate::process::Process;

const SENDERS: u32 = 64;
/// The pause of a sender that was told to come back later.
const PAUSE: Duration = Duration::from_millis(20);
/// How many threads work on the events of one subscription at a time, as the runtime is configured.
const AT_WORK: usize = 4;
const WATCHER: &str = "watcher";
/// What the thread is told, in order. A thread that events make is in its first turn.
const GREETING: &str = "say hello";
const SUBSCRIBE: &str = "call echo {\"text\": \"watch\"}";
/// The same for a model that takes its time.
const SLOWLY: &str = "[[turn]]\nsay = \"noted\"\nsleep = 0.5\n\
                      [[turn]]\ncalls = [{name = \"echo\", arguments = {text = \"watch\"}}]\n\
                      [[turn]]\nsay = \"hello\"\n";

/// Who works on the events.
#[derive(Clone, Copy)]
pub enum Worker {
    /// A model that reads them and answers at once.
    Quick,
    /// One that answers after half a second; so they wait, and their senders as well.
    Slow,
}

/// What a flood of events costs.
pub struct Flood {
    pub per_second: f64,
    /// Until the last one was worked off.
    pub elapsed: Duration,
    /// How often a sender was told to come back later.
    pub refused: u32,
    pub before: u64,
    /// The most after a tenth of them.
    pub tenth: u64,
    pub peak: u64,
    pub children: usize,
    /// How many of them were there at a time.
    pub together: usize,
}

pub async fn flood(data: &Path, events: u32, worker: Worker) -> Outcome<Flood> {
    let (client, tool) = (client(), Process::echo()?);
    post_to(&client, format!("{}/hold", tool.url), Value::Null).await?;
    let runtime = match worker {
        Worker::Quick => Process::obedient_runtime(data, &tool)?,
        Worker::Slow => Process::scripted_runtime(data, &tool, SLOWLY)?,
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
        return Err(format!("nobody is at work and events wait: {subscriptions}").into());
    }
    let peak = runtime.peak_bytes()?;
    drop(runtime);
    let (children, together) = account(&data.join("rap.db"), events)?;
    Ok(Flood { per_second, elapsed, refused, before, tenth, peak, children, together })
}

/// The tool's side of the subscription.
#[derive(Clone)]
struct Source {
    client: Client,
    url: Url,
    call: Value,
}

impl Source {
    /// Sends the events of these numbers until each is taken; how often one was not.
    async fn send(&self, from: u32, to: u32) -> Outcome<u32> {
        let next = Arc::new(AtomicU32::new(from));
        let send = |source: Source, next: Arc<AtomicU32>| async move {
            let mut refused = 0;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= to {
                    return Outcome::Ok(refused);
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

    /// Whether it was taken.
    async fn send_once(&self, number: u32) -> Outcome<bool> {
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

/// Fails unless each event stands in the history of one child, once; how many children there were, and how many at a
/// time.
fn account(database: &Path, events: u32) -> Outcome<(usize, usize)> {
    let conn = open_sqlite(database)?;
    let sql = "SELECT count(*), count(DISTINCT word) FROM (SELECT body ->> '$.content.text' AS word FROM entries \
               WHERE body ->> '$.kind' = 'result') WHERE word LIKE 'event %' AND substr(word, 7) + 0 < ?1";
    let heard: (u32, u32) = conn.query_row(sql, [events], |row| Ok((row.get(0)?, row.get(1)?)))?;
    if heard != (events, events) {
        let (all, each) = heard;
        return Err(format!("of {events} events {each} are in a history, {all} times").into());
    }
    let mut lives =
        conn.prepare("SELECT created_at, updated_at, status FROM threads WHERE parent IS NOT NULL")?;
    let lives = lives.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    let lives: Vec<(i64, i64, String)> = lives.collect::<rusqlite::Result<_>>()?;
    if let Some((.., status)) = lives.iter().find(|(.., status)| status != "closed") {
        return Err(format!("a thread that was made for events is {status}").into());
    }
    // Who has gone makes room for whoever comes in the same millisecond.
    let mut moves: Vec<(i64, i32)> =
        lives.iter().flat_map(|(from, to, _)| [(*from, 1), (to.max(&(from + 1)).to_owned(), -1)]).collect();
    moves.sort_unstable();
    let mut there = 0;
    let counts = moves.into_iter().map(|(_, step)| {
        there += step;
        there
    });
    let together = counts.max().unwrap_or(0) as usize;
    if together > AT_WORK {
        return Err(format!("{together} threads worked on events at a time, and {AT_WORK} may").into());
    }
    Ok((lives.len(), together))
}
