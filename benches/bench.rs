//! What the benchmarks share: how they are asked to run, and what this machine can do at all.
//!
//! `cargo bench` measures. A test runner runs the same program in small, so that a benchmark that does not work any more
//! is a test that fails; then nothing is said about figures.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// The one test that a benchmark is for a test runner.
const TEST: &str = "the_benchmark_runs";

pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// As much as it takes to see what it costs.
    Full,
    /// Enough to see that it works.
    Small,
}

impl Scale {
    pub fn of<T>(self, full: T, small: T) -> T {
        if self == Scale::Full { full } else { small }
    }

    /// Fails for a figure that was missed, if there was enough to tell.
    pub fn judge(self, met: &[bool]) -> Outcome<()> {
        if self == Scale::Full && met.contains(&false) { Err("a figure was missed".into()) } else { Ok(()) }
    }
}

/// Runs it as the command line asks, which is that of `cargo bench` or of a test runner.
pub async fn run(measure: impl AsyncFnOnce(Scale) -> Outcome<()>) -> Outcome<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| given.iter().any(|one| one == flag);
    if has("--bench") {
        return measure(Scale::Full).await;
    }
    if has("--list") {
        // It is never one of those that are ignored.
        let listed = if has("--ignored") { String::new() } else { format!("{TEST}: test\n") };
        print!("{listed}");
        return Ok(());
    }
    let mut filters = given.iter().filter(|one| !one.starts_with('-')).peekable();
    let wanted = filters.peek().is_none() || filters.any(|filter| TEST.contains(filter.as_str()));
    if !wanted || has("--ignored") {
        println!("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out");
        return Ok(());
    }
    let ended = measure(Scale::Small).await;
    let (word, passed, failed) = if ended.is_ok() { ("ok", 1, 0) } else { ("FAILED", 0, 1) };
    println!("test result: {word}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out");
    ended
}

/// A rate and its latencies.
pub struct Figure {
    pub per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
}

impl Figure {
    pub fn of(mut latencies: Vec<Duration>, elapsed: Duration) -> Figure {
        latencies.sort_unstable();
        let at = |share: f64| {
            let place = (latencies.len() as f64 * share) as usize;
            latencies.get(place).copied().unwrap_or_default()
        };
        Figure { per_second: latencies.len() as f64 / elapsed.as_secs_f64(), p50: at(0.5), p99: at(0.99) }
    }

    pub fn print(&self, name: &str) {
        println!("{name:<52} {:>10.0} {:>10.1?} {:>10.1?}", self.per_second, self.p50, self.p99);
    }

    pub fn print_heading() {
        println!("{:<52} {:>10} {:>10} {:>10}", "", "per second", "p50", "p99");
    }
}

/// What a commit costs at least on the disk of this directory.
pub fn fdatasync(directory: &Path, within: Duration) -> Outcome<Figure> {
    let mut file = File::create(directory.join("sync"))?;
    let mut latencies = Vec::new();
    let began = Instant::now();
    while began.elapsed() < within {
        let start = Instant::now();
        file.write_all(&[7; 4096])?;
        file.sync_data()?;
        latencies.push(start.elapsed());
    }
    Ok(Figure::of(latencies, began.elapsed()))
}

/// What a process takes of the memory now.
pub fn resident_bytes(process: u32) -> Outcome<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm"))?;
    let pages: u64 = statm.split(' ').nth(1).ok_or("no resident size")?.parse()?;
    Ok(pages * 4096)
}
