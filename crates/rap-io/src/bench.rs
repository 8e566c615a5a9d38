//! Shared code of benchmarks: statistics, limits of this machine, and servers in processes of their own. Not part of the
//! public API.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

pub type BenchResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Variables that tell a process what it serves, and with which arguments.
const ROLE: &str = "RAP_BENCH_ROLE";
const ARGUMENTS: &str = "RAP_BENCH_ARGUMENTS";

/// A rate and its latencies.
#[derive(Debug, Clone)]
pub struct Figure {
    pub per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
    /// Latencies in steps of one percent, from the smallest to the largest.
    pub percentiles: Vec<Duration>,
}

impl Figure {
    pub fn of(mut latencies: Vec<Duration>, elapsed: Duration) -> Figure {
        latencies.sort_unstable();
        let at = |share: f64| {
            let index = (latencies.len() as f64 * share) as usize;
            latencies.get(index).or(latencies.last()).copied().unwrap_or_default()
        };
        Figure {
            per_second: latencies.len() as f64 / elapsed.as_secs_f64(),
            p50: at(0.5),
            p99: at(0.99),
            percentiles: (0..=100).map(|percent| at(f64::from(percent) / 100.0)).collect(),
        }
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

/// Waits until the process that started this one is gone.
pub async fn parent_is_gone() {
    let read = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    drop(read.await);
}

/// Returns the role of this process and its arguments. `None` if a benchmark did not start it.
pub fn role() -> Option<(String, Vec<String>)> {
    let role = std::env::var(ROLE).ok()?;
    let arguments = std::env::var(ARGUMENTS).unwrap_or_default();
    Some((role, arguments.split('\n').map(str::to_owned).collect()))
}

/// A server in a process of its own. It is killed on drop.
pub struct Server {
    /// URL without a path.
    pub url: String,
    child: Child,
    /// The server ends when this is closed, so that none is left when the benchmark is killed.
    _stdin: ChildStdin,
}

impl Server {
    /// Returns a command that runs this program in a role.
    pub fn command(role: &str, arguments: &[&str]) -> BenchResult<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        // The program may have subcommands, of which the benchmark is one.
        command.args(std::env::args().nth(1).filter(|word| !word.starts_with('-')));
        command.env(ROLE, role).env(ARGUMENTS, arguments.join("\n"));
        Ok(command)
    }

    /// Starts a server, and waits until it says on stderr that it listens.
    pub fn start(mut command: Command) -> BenchResult<Server> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let (Some(stdin), Some(stderr)) = (child.stdin.take(), child.stderr.take()) else {
            unreachable!("bug: both are piped")
        };
        let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
        let mut said = String::new();
        for line in lines.by_ref() {
            if let Some((_, address)) = line.split_once("listening on ") {
                let url = if address.contains("://") { address.into() } else { format!("http://{address}") };
                // The pipe is read to its end, so that the server never waits for it.
                std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
                return Ok(Server { url, child, _stdin: stdin });
            }
            said.push_str(&line);
            said.push('\n');
        }
        child.kill().ok();
        child.wait().ok();
        Err(format!("a server of the benchmark did not start: {said}").into())
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
