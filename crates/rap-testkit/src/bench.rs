//! Shared code of the benchmarks: command line, statistics and baselines of this machine.
//!
//! `cargo bench` measures. A test runner runs the same program at a small scale, so that a broken benchmark is a
//! failing test; results are not compared with their targets then.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Name of the single test that a benchmark reports to a test runner.
const TEST: &str = "the_benchmark_runs";

pub type BenchResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Scale of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Large enough for meaningful measurements.
    Full,
    /// Just large enough to show that the benchmark works.
    Small,
}

impl Scale {
    pub fn of<T>(self, full: T, small: T) -> T {
        if self == Scale::Full { full } else { small }
    }

    /// Fails if a target was missed at full scale.
    pub fn check(self, met: &[bool]) -> BenchResult<()> {
        if self == Scale::Full && met.contains(&false) { Err("a target was missed".into()) } else { Ok(()) }
    }
}

/// Runs a benchmark as requested by the command line of `cargo bench` or a test runner.
pub async fn run(measure: impl AsyncFnOnce(Scale) -> BenchResult<()>) -> BenchResult<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    if has("--bench") {
        return measure(Scale::Full).await;
    }
    if has("--list") {
        // The test is never ignored.
        let listed = if has("--ignored") { String::new() } else { format!("{TEST}: test\n") };
        print!("{listed}");
        return Ok(());
    }
    let mut filters = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
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

/// A rate and the percentiles of its latencies.
pub struct Figure {
    pub per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
}

impl Figure {
    pub fn of(mut latencies: Vec<Duration>, elapsed: Duration) -> Figure {
        latencies.sort_unstable();
        let at = |share: f64| {
            let index = (latencies.len() as f64 * share) as usize;
            latencies.get(index).copied().unwrap_or_default()
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

/// Measures `fdatasync` in a directory, which is the lower bound of a commit.
pub fn fdatasync(directory: &Path, within: Duration) -> BenchResult<Figure> {
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

/// Returns the resident memory of a process, in bytes.
pub fn resident_bytes(process: u32) -> BenchResult<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm"))?;
    let pages: u64 = statm.split(' ').nth(1).ok_or("no resident size")?.parse()?;
    Ok(pages * 4096)
}

/// Waits until the process that started this one is gone; see [`Process`](crate::Process).
pub async fn parent_is_gone() {
    let read = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    drop(read.await);
}
