//! Command line of the benchmarks. [`rap_io::bench`] has statistics and the baselines of this machine.
//!
//! `cargo bench` measures. A test runner runs the same program at a small scale, so that a broken benchmark is a
//! failing test; results are not compared with their targets then.

pub use rap_io::bench::{BenchResult, Figure, Server, fdatasync, parent_is_gone, resident_bytes, role};

/// Name of the single test that a benchmark reports to a test runner.
const TEST: &str = "the_benchmark_runs";

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
