//! `rap bench`: measures this machine with and without `rap`, in one run.
//!
//! Every part is a process of its own: the runtime, a tool, a tool server, and a router without a handler. Nothing
//! leaves the machine.

mod plot;
mod report;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use rap_io::bench::{BenchResult, fdatasync};
use rap_runtime::measure::process::BenchProcess;
use rap_runtime::measure::{self, Sizes, bare, trips, waiting};
use rap_tool::measure as tool;

use super::{print, print_json};
use report::{Rate, Report, RoundTrips, SleepingThreads, ToolServer, Turn};

/// Arguments of `rap bench`.
#[derive(Args)]
pub struct Bench {
    /// Measure for a few seconds in small sizes. This shows that everything works; the figures mean little.
    #[arg(long)]
    quick: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Write plots as SVG files into this directory, which is created.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Directory for the databases of the measurement, whose disk is measured [default: the current one]. They are removed
    /// at the end.
    #[arg(long, value_name = "DIR", default_value = ".", hide_default_value = true)]
    data: PathBuf,
}

/// Numbers of threads, and sizes of the parts.
struct Plan {
    /// Numbers of threads that make round trips at the same time. They include `compared`.
    threads: &'static [usize],
    /// Number of threads that the limits of the machine are measured with.
    compared: usize,
    sleeping: &'static [u32],
    sizes: Sizes,
    tool: tool::Sizes,
}

const FULL: Plan = Plan {
    threads: &[1, 8, 64, 256, 1_000],
    compared: 64,
    sleeping: &[1_000, 100_000, 1_000_000],
    sizes: Sizes {
        measured: Duration::from_secs(5),
        warm_up: Duration::from_secs(1),
        late_turn: 5_000,
        turns_window: 200,
        sleeping: 0,
        timers: 0,
        events: 0,
    },
    tool: tool::Sizes {
        sync: Duration::from_secs(2),
        rounds: 10,
        round: Duration::from_millis(500),
        subscriptions: 100_000,
        deliveries: 50_000,
        delays: 1_000,
    },
};

const QUICK: Plan = Plan {
    threads: &[1, 8],
    compared: 8,
    sleeping: &[10, 100],
    sizes: Sizes {
        measured: Duration::from_millis(100),
        warm_up: Duration::from_millis(50),
        late_turn: 40,
        turns_window: 20,
        sleeping: 0,
        timers: 0,
        events: 0,
    },
    tool: tool::Sizes {
        sync: Duration::from_millis(50),
        rounds: 2,
        round: Duration::from_millis(50),
        subscriptions: 64,
        deliveries: 64,
        delays: 20,
    },
};

/// Runs the command, or serves as one of its parts.
pub async fn run(arguments: Bench) -> anyhow::Result<()> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| anyhow!("{error}");
    if measure::serve_role().await.map_err(failed)? || tool::serve_role().await.map_err(failed)? {
        return Ok(());
    }
    let data = tempfile::Builder::new().prefix("rap-bench-").tempdir_in(&arguments.data);
    let data = data.with_context(|| format!("cannot write to {}", arguments.data.display()))?;
    let plan = if arguments.quick { &QUICK } else { &FULL };
    let report = measure_all(data.path(), plan).await.map_err(failed)?;
    if let Some(directory) = &arguments.plots {
        write_plots(directory, &report)?;
    }
    if arguments.json {
        return print_json(&serde_json::to_value(&report)?);
    }
    Ok(print(&report.text())?)
}

fn write_plots(directory: &Path, report: &Report) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(directory)?;
        for (name, svg) in report.plots() {
            std::fs::write(directory.join(name), svg)?;
        }
        Ok(())
    };
    write().with_context(|| format!("cannot write plots to {}", directory.display()))
}

/// Shows on a terminal what is measured now.
struct Progress {
    done: usize,
    parts: usize,
    is_shown: bool,
}

impl Progress {
    fn new(plan: &Plan) -> Progress {
        // Besides these: three limits of the machine, the long conversation, and three parts of the tool server.
        let parts = plan.threads.len() + plan.sleeping.len() + 7;
        Progress { done: 0, parts, is_shown: std::io::stderr().is_terminal() }
    }

    fn begin(&mut self, what: &str) {
        self.done += 1;
        if self.is_shown {
            eprint!("\r\x1b[K[{}/{}] {what} …", self.done, self.parts);
            // Progress that cannot be shown does not matter.
            std::io::stderr().flush().ok();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            eprint!("\r\x1b[K");
        }
    }
}

async fn measure_all(data: &Path, plan: &Plan) -> BenchResult<Report> {
    let (mut progress, sizes, compared) = (Progress::new(plan), &plan.sizes, plan.compared);
    progress.begin("fdatasync of the disk");
    let sync = fdatasync(data, sizes.warm_up)?;
    progress.begin("bare group commit");
    let bare_1 = bare::bare(&data.join("bare1.db"), 1, sizes.measured).await?;
    let bare = bare::bare(&data.join("bare.db"), compared, sizes.measured).await?;
    progress.begin("loopback router");
    let router = trips::posts(&BenchProcess::echo()?.url, compared, sizes.measured).await?;
    let mut round_trips = Vec::new();
    for threads in plan.threads {
        progress.begin(&format!("round trips of {threads} threads"));
        let figure = trips::round_trips(&data.join(format!("trips{threads}")), *threads, sizes).await?;
        round_trips.push(RoundTrips::new(*threads, &figure));
    }
    progress.begin("a long conversation");
    let long = trips::long_conversation(&data.join("long"), sizes).await?;
    let mut sleeping = Vec::new();
    for threads in plan.sleeping {
        progress.begin(&format!("{threads} sleeping threads"));
        let sizes = Sizes { sleeping: *threads, ..plan.sizes };
        let slept = waiting::sleeping(&data.join(format!("sleeping{threads}")), &sizes).await?;
        sleeping.push(SleepingThreads::new(*threads, &slept));
    }
    let tool_server = tool_server(data, &plan.tool, &mut progress).await?;
    Ok(Report {
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        compared,
        fdatasync: Rate::new(&sync),
        bare_1: Rate::new(&bare_1),
        bare: Rate::new(&bare),
        router: Rate::new(&router),
        round_trips,
        history: long.medians.iter().map(|(turn, took)| Turn::new(*turn, *took)).collect(),
        sleeping,
        tool_server,
    })
}

async fn tool_server(data: &Path, sizes: &tool::Sizes, progress: &mut Progress) -> BenchResult<ToolServer> {
    progress.begin("invocations of a tool server");
    let (router, server) = (tool::start("router", data)?, tool::start("tool", &data.join("hold"))?);
    let (bare, durable) = tool::in_turns(&router, &server, 64, sizes).await?;
    drop((router, server));
    progress.begin("results of a tool server");
    let results_per_second = tool::deliveries(&data.join("echo"), sizes.deliveries).await?;
    let delays = tool::delivery_delays(&data.join("time"), sizes.delays).await?;
    progress.begin("subscriptions of a tool server");
    let subscription_bytes = tool::subscriptions(&data.join("wait"), sizes.subscriptions).await?;
    Ok(ToolServer {
        router: Rate::new(&bare),
        invocations: Rate::new(&durable),
        share_of_router: durable.per_second / bare.per_second,
        results_per_second,
        result_delay: Rate::new(&delays),
        subscriptions: sizes.subscriptions,
        subscription_bytes,
    })
}
