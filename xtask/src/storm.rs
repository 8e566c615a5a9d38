//! `cargo xtask storm`: builds the tests, which builds the programs too, and runs `storm`.

use std::process::{Command, ExitCode};

use crate::attack;
use crate::tally::Tally;

/// Duration of the faults in each storm of `cargo xtask test`, in seconds. Afterwards everything has to become quiet.
const SECONDS: &str = "30";
/// The same for `cargo xtask test --long`.
const LONG_SECONDS: &str = "600";
/// How long the load of `cargo xtask test` lasts, in seconds.
const LOAD_SECONDS: &str = "5";
/// Number of connections during a load, for the two lengths.
const CONNECTIONS: &str = "500";
const LONG_CONNECTIONS: &str = "10000";

pub(crate) fn run(arguments: &[&str]) -> ExitCode {
    crate::postgres::install();
    crate::process_tools::install();
    attack::build_and_run("storm", arguments)
}

/// Runs a short storm on each database, and a small load.
pub(crate) fn short() -> Tally {
    on_each(SECONDS) + run_with(&["--load", CONNECTIONS, "--seconds", LOAD_SECONDS])
}

/// Runs a long storm on each database, and the whole load.
pub(crate) fn long() -> Tally {
    on_each(LONG_SECONDS) + run_with(&["--load", LONG_CONNECTIONS, "--seconds", LONG_SECONDS])
}

fn on_each(seconds: &str) -> Tally {
    let stores = ["sqlite", "postgres"].into_iter();
    stores
        .map(|store| run_with(&["--store", store, "--seconds", seconds]))
        .fold(Tally::default(), |total, one| total + one)
}

fn run_with(arguments: &[&str]) -> Tally {
    let storm = attack::program("storm", arguments);
    let ended = storm.and_then(|mut storm: Command| storm.status());
    match ended {
        Ok(status) if status.success() => Tally { passed: 1, failed: 0 },
        Ok(_) => Tally { passed: 0, failed: 1 },
        Err(error) => {
            eprintln!("xtask: storm could not be run: {error}");
            Tally { passed: 0, failed: 1 }
        }
    }
}
