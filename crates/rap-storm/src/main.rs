//! `cargo xtask storm`: runs a runtime or a fleet, tool servers, a model and clients as processes on loopback, and
//! kills, freezes and cuts them off at random. A ledger in this process knows every message that was acknowledged. In
//! the end, every message has to be in exactly one place, every call has to have exactly one result, every event has to
//! have arrived once, and no thread may be stuck.
//!
//! A seed repeats the choice of faults and messages, but not their timing, which depends on the machine.

#![allow(clippy::unwrap_used, reason = "a panic fails the run")]

mod bystanders;
mod check;
mod clients;
mod clock;
mod disk;
mod faults;
mod load;
mod model;
mod server;
mod stage;
mod tools;
mod unreliable;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::clients::Ledger;
use crate::stage::{Database, Stage};

/// Time in which everything has to become quiet after the last fault.
const QUIET_WITHIN: Duration = Duration::from_secs(300);
/// Interval of the progress lines.
const PROGRESS: Duration = Duration::from_secs(10);

const USAGE: &str = "\
usage: storm [--seconds N] [--seed N] [--store sqlite|postgres] [--threads N]
       storm --load CONNECTIONS [--seconds N]

  --seconds N   how long faults happen (20)
  --seed N      choice of faults and messages (random)
  --store NAME  database of the runtime (sqlite); with postgres two nodes share it
  --threads N   number of threads that are used at the same time (16)
  --load N      no faults, but ten times the load that the runtime can carry, and N connections that say or read nothing";

#[derive(Debug, Clone)]
struct Options {
    seconds: u64,
    seed: u64,
    database: Database,
    threads: usize,
    /// Number of connections, if there is load instead of faults.
    load: Option<usize>,
}

fn options() -> Option<Options> {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let mut options =
        Options { seconds: 20, seed: now % 100_000, database: Database::Sqlite, threads: 16, load: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next()?;
        match name.as_str() {
            "--seconds" => options.seconds = value.parse().ok()?,
            "--seed" => options.seed = value.parse().ok()?,
            "--threads" => {
                options.threads = value.parse().ok().filter(|threads| (1..=1000).contains(threads))?
            }
            "--load" => options.load = Some(value.parse().ok()?),
            "--store" if value == "sqlite" => options.database = Database::Sqlite,
            "--store" if value == "postgres" => options.database = Database::Postgres,
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    if tools::is_requested() {
        return tools::run();
    }
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let violations = runtime.block_on(async {
        tokio::select! {
            violations = run(&options) => violations,
            _ = tokio::signal::ctrl_c() => vec!["interrupted".to_owned()],
        }
    });
    // Connections of clients and fake servers need not end in an orderly way.
    runtime.shutdown_background();
    for violation in violations.iter().take(50) {
        println!("VIOLATION {violation}");
    }
    println!("storm {}", if violations.is_empty() { "passed" } else { "failed" });
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run(options: &Options) -> Vec<String> {
    let Options { seconds, seed, database, threads, load } = *options;
    if let Some(connections) = load {
        println!("load on SQLite: {seconds} s, {connections} connections");
        return load::run(connections, seconds).await;
    }
    println!("storm on {database}: seed {seed}, {seconds} s of faults, {threads} threads at a time");
    let stage = Stage::start(database, seed).await;
    let ledger = Ledger::new(&stage.url);
    clients::warm_up(&ledger).await;
    let began = Instant::now();
    let clients = clients::start(&ledger, threads, seed);
    let faults = faults::start(&stage, seed);
    while began.elapsed() < Duration::from_secs(seconds) {
        let rest = Duration::from_secs(seconds).saturating_sub(began.elapsed());
        tokio::time::sleep(rest.min(PROGRESS)).await;
        println!(
            "{:>5.0} s: {}; {}",
            began.elapsed().as_secs_f64(),
            ledger.summary(),
            stage.faults.summary()
        );
    }
    faults.end().await;
    stage.recover().await;
    clients.end(QUIET_WITHIN).await;
    let mut violations = ledger.check_all().await;
    violations.extend(stage.check().await);
    println!("{:>5.0} s: {}; {}", began.elapsed().as_secs_f64(), ledger.summary(), stage.faults.summary());
    if !violations.is_empty() {
        println!("logs and databases are kept in {}", stage.keep().display());
    }
    violations
}
