//! `cargo xtask storm`: builds the tests, which builds the programs too, and runs `storm`.

use std::process::{Command, ExitCode};

use crate::attack;
use crate::tally::Tally;

/// Duration of the faults in each storm of `cargo xtask test`, in seconds. Afterwards everything has to become quiet.
const SECONDS: &str = "20";
/// The same for `cargo xtask test --long`.
const LONG_SECONDS: &str = "600";

pub(crate) fn run(arguments: &[&str]) -> ExitCode {
    attack::build_and_run("storm", arguments)
}

/// Runs a short storm on each database.
pub(crate) fn short() -> Tally {
    on_each(SECONDS)
}

/// Runs a long storm on each database.
pub(crate) fn long() -> Tally {
    on_each(LONG_SECONDS)
}

fn on_each(seconds: &str) -> Tally {
    let stores = ["sqlite", "postgres"].into_iter();
    stores.map(|store| run_on(store, seconds)).fold(Tally::default(), |total, one| total + one)
}

fn run_on(store: &str, seconds: &str) -> Tally {
    let storm = attack::program("storm", &["--store", store, "--seconds", seconds]);
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
