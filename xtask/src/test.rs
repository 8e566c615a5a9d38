//! `cargo xtask test`: runs the tests of the workspace and its doc tests, then the attacks and two short storms. Their
//! output is passed through and counted.
//!
//! The last line on stdout is always `N passed, N failed`. A suite that fails without naming a failed test (it did not
//! compile, or it was killed) or that reports nothing counts as one failure.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use crate::tally::{End, Reporter, Tally};
use crate::{attack, cargo, storm};

/// Number of seeds of the simulation in each of its eight parts, in a long run.
const LONG_SEEDS: &str = "2500";

/// Scope of a test run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Usual,
    /// Also tests that take too long to run on every change.
    Long,
}

/// Runs the tests whose name contains one of the words in `filter`, or everything.
pub(crate) fn run(filter: &[&str], length: Length) -> ExitCode {
    crate::postgres::install();
    crate::browser::install();
    crate::process_tools::install();
    let tests = if has_nextest() { Suite::nextest() } else { Suite::libtest() };
    let mut total = tests.count(filter) + Suite::doc_tests().count(filter);
    if filter.is_empty() {
        total = total + attacks() + storm::short();
    }
    if length == Length::Long {
        total = total + Suite::simulation().count(&[]) + Suite::away().count(&[]) + storm::long();
    }
    if total == Tally::default() {
        eprintln!("xtask: no test ran");
    }
    println!("{total}");
    if total.failed == 0 && total.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the attacks, after all tests because they measure time.
fn attacks() -> Tally {
    match attack::program("attack", &[]) {
        Ok(command) => Suite { name: "attack", command, reporter: Reporter::Attack }.count(&[]),
        Err(error) => {
            eprintln!("xtask: attack could not be run: {error}");
            Tally { passed: 0, failed: 1 }
        }
    }
}

fn has_nextest() -> bool {
    let asked = cargo().args(["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}

struct Suite {
    name: &'static str,
    command: Command,
    reporter: Reporter,
}

impl Suite {
    fn nextest() -> Self {
        // A filter may match only doc tests, so the check that a test ran covers both suites.
        let arguments = ["nextest", "run", "--workspace", "--no-tests=pass"];
        Self::new("cargo nextest run", &arguments, Reporter::Nextest)
    }

    /// The simulation of the engine with many seeds. Its tests may take long.
    fn simulation() -> Self {
        let arguments =
            ["nextest", "run", "--profile", "long", "-p", "rap-runtime", "simulation::tests::all_invariants"];
        let mut suite = Self::new("cargo nextest run (simulation)", &arguments, Reporter::Nextest);
        suite.command.env("RAP_SIM_SEEDS", LONG_SEEDS);
        suite
    }

    /// A database that is away for a minute.
    fn away() -> Self {
        let test = "nodes_go_on_by_themselves_after_postgres_was_away";
        let arguments = ["nextest", "run", "--profile", "long", "-p", "rap-cli", "--test", "recovery", test];
        let mut suite = Self::new("cargo nextest run (database away)", &arguments, Reporter::Nextest);
        suite.command.env("RAP_AWAY_SECONDS", "60");
        suite
    }

    fn libtest() -> Self {
        let arguments = ["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests", "--examples"];
        Self::new("cargo test", &arguments, Reporter::Libtest)
    }

    fn doc_tests() -> Self {
        let arguments = ["test", "--workspace", "--no-fail-fast", "--doc"];
        Self::new("cargo test --doc", &arguments, Reporter::Libtest)
    }

    fn new(name: &'static str, arguments: &[&str], reporter: Reporter) -> Self {
        let mut command = cargo();
        // The report could not be parsed with escape codes in it.
        command.args(arguments).env("CARGO_TERM_COLOR", "never");
        Self { name, command, reporter }
    }

    fn count(mut self, filter: &[&str]) -> Tally {
        if !filter.is_empty() {
            self.command.arg("--").args(filter);
        }
        match self.watch() {
            Ok((reported, status)) => self.judge(reported, status),
            Err(error) => {
                eprintln!("xtask: {} could not be run: {error}", self.name);
                Tally { passed: 0, failed: 1 }
            }
        }
    }

    fn watch(&mut self) -> io::Result<(Option<Tally>, ExitStatus)> {
        match self.reporter {
            Reporter::Nextest => {
                let mut child = self.command.stderr(Stdio::piped()).spawn()?;
                let report = child.stderr.take().expect("bug: stderr is piped");
                finish(child, relay(report, io::stderr(), self.reporter))
            }
            Reporter::Libtest | Reporter::Attack => {
                let mut child = self.command.stdout(Stdio::piped()).spawn()?;
                let report = child.stdout.take().expect("bug: stdout is piped");
                finish(child, relay(report, io::stdout(), self.reporter))
            }
        }
    }

    fn judge(&self, reported: Option<Tally>, status: ExitStatus) -> Tally {
        let end = if status.success() { End::Success } else { End::Failure };
        let tally = Tally::judged(reported, end);
        if Some(tally) != reported {
            let name = self.name;
            eprintln!("xtask: {name} ended with {status} and named no failed test; it counts as 1 failure");
            eprintln!("xtask: usually something above did not compile");
        }
        tally
    }
}

/// Copies every line to the screen and adds up the reported results.
fn relay(report: impl Read, mut screen: impl Write, reporter: Reporter) -> io::Result<Option<Tally>> {
    let mut report = BufReader::new(report);
    let mut line = Vec::new();
    let mut total = None;
    while report.read_until(b'\n', &mut line)? > 0 {
        screen.write_all(&line)?;
        screen.flush()?;
        total = reporter.add(total, &String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok(total)
}

/// Waits for the child even if reading its report failed, so that suites do not run at the same time.
fn finish(mut child: Child, reported: io::Result<Option<Tally>>) -> io::Result<(Option<Tally>, ExitStatus)> {
    let status = child.wait()?;
    Ok((reported?, status))
}
