//! Round trips: rate, latency, and their cost in a long conversation.

use std::path::Path;
use std::time::{Duration, Instant};

use rap_io::client::Client;
use serde_json::json;

use super::Sizes;
use super::client::{client, open_thread, post_to};
use super::process::BenchProcess;
use rap_io::bench::{BenchResult, Figure};

/// Number of places in a long conversation at which turns are measured.
const PARTS: u64 = 11;

pub async fn posts(url: &str, connections: usize, measured: Duration) -> BenchResult<Figure> {
    let client = client();
    let began = Instant::now();
    let poster = || {
        let (client, url) = (client.clone(), format!("{url}/empty"));
        async move {
            let mut latencies = Vec::new();
            while began.elapsed() < measured {
                let start = Instant::now();
                post_to(&client, url.clone(), json!({"text": "hello"})).await?;
                latencies.push(start.elapsed());
            }
            BenchResult::Ok(latencies)
        }
    };
    let all: Vec<_> = (0..connections).map(|_| tokio::spawn(poster())).collect();
    let mut latencies = Vec::new();
    for one in all {
        latencies.extend(one.await??);
    }
    Ok(Figure::of(latencies, began.elapsed()))
}

/// Takes the turns since the last call, with their durations.
pub async fn take_trips(client: &Client, tool: &BenchProcess) -> BenchResult<Vec<(u64, Duration)>> {
    let trips = post_to(client, format!("{}/trips", tool.url), json!({})).await?;
    let trips: Vec<(u64, u64)> = serde_json::from_value(trips)?;
    Ok(trips.into_iter().map(|(turn, took)| (turn, Duration::from_micros(took))).collect())
}

pub async fn round_trips(data: &Path, threads: usize, sizes: &Sizes) -> BenchResult<Figure> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    let runtime = BenchProcess::busy_runtime(data, &tool)?;
    for thread in 0..threads {
        open_thread(&client, &runtime, &format!("thread{thread}"), "go").await?;
    }
    tokio::time::sleep(sizes.warm_up).await;
    take_trips(&client, &tool).await?;
    let began = Instant::now();
    tokio::time::sleep(sizes.measured).await;
    let trips = take_trips(&client, &tool).await?;
    let elapsed = began.elapsed();
    Ok(Figure::of(trips.into_iter().map(|(_, took)| took).collect(), elapsed))
}

/// Cost of a late turn, as a multiple of the cost of turn 10.
pub struct LongConversation {
    pub time: f64,
    pub bytes: f64,
    /// Median duration of consecutive turns, by the number of the first of them.
    pub medians: Vec<(u64, Duration)>,
}

pub async fn long_conversation(data: &Path, sizes: &Sizes) -> BenchResult<LongConversation> {
    let (client, tool) = (client(), BenchProcess::echo()?);
    let runtime = BenchProcess::busy_runtime(data, &tool)?;
    open_thread(&client, &runtime, "long", "go").await?;
    let mut trips: Vec<(u64, Duration)> = Vec::new();
    let mut written: Vec<(u64, u64)> = Vec::new();
    let inside = |from: u64, turn: u64| (from..from + sizes.turns_window).contains(&turn);
    while trips.last().is_none_or(|(turn, _)| *turn < sizes.late_turn + sizes.turns_window) {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let new = take_trips(&client, &tool).await?;
        if let Some((turn, _)) = new.last() {
            written.push((*turn, runtime.written_bytes()?));
        }
        trips.extend(new);
    }
    let median = |from: u64| {
        let mut together: Vec<Duration> =
            trips.iter().filter(|(turn, _)| inside(from, *turn)).map(|(_, took)| *took).collect();
        together.sort_unstable();
        together[together.len() / 2].as_secs_f64()
    };
    let bytes = |from: u64| {
        let together: Vec<_> = written.iter().filter(|(turn, _)| inside(from, *turn)).collect();
        let [first, .., last] = together[..] else { return f64::NAN };
        (last.1 - first.1) as f64 / (last.0 - first.0) as f64
    };
    let late = sizes.late_turn;
    let medians = (0..PARTS).map(|part| 10 + part * (late - 10) / (PARTS - 1));
    let medians = medians.map(|turn| (turn, Duration::from_secs_f64(median(turn)))).collect();
    Ok(LongConversation { time: median(late) / median(10), bytes: bytes(late) / bytes(10), medians })
}
