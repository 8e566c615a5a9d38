//! `cargo xtask fuzz`: runs the fuzz targets for longer than the tests do, with optimisation and overflow checks.
//!
//! The targets are tests, so that every run of the tests gives each of them some thousand inputs.

use std::io::{self, BufRead, BufReader};
use std::process::{ExitCode, Stdio};

use crate::cargo;

/// Executions of each target if nothing else is asked for.
const RUNS: &str = "1000000";

struct Target {
    name: &'static str,
    /// Package and test program.
    program: [&'static str; 4],
    test: &'static str,
}

const RUNTIME: [&str; 4] = ["-p", "rap-runtime", "--test", "runtime"];

const TARGETS: [Target; 8] = [
    Target { name: "callbacks", program: RUNTIME, test: "fuzz::callbacks" },
    Target { name: "invocations", program: RUNTIME, test: "fuzz::invocations" },
    Target { name: "notifications", program: RUNTIME, test: "fuzz::notifications" },
    Target { name: "toolsets", program: RUNTIME, test: "fuzz::toolsets" },
    Target { name: "schemas", program: RUNTIME, test: "fuzz::schemas" },
    Target { name: "event_streams", program: RUNTIME, test: "fuzz::event_streams" },
    Target { name: "tokens", program: ["-p", "rap-runtime", "--lib", "-q"], test: "token::tests::fuzz" },
    Target {
        name: "configurations",
        program: ["-p", "rap-cli", "--lib", "-q"],
        test: "config::tests::fuzz::configurations",
    },
];

/// Runs the selected targets one after the other. `words` is `[TARGET] [--runs N] [--seconds N]`.
pub(crate) fn run(words: &[&str]) -> ExitCode {
    let (mut selected, mut runs, mut seconds) = (None, RUNS, None);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match (*word, words.clone().next()) {
            ("--runs", Some(count)) => runs = count,
            ("--seconds", Some(count)) => seconds = Some(*count),
            (name, _) if TARGETS.iter().any(|target| target.name == name) => {
                selected = Some(name);
                continue;
            }
            _ => return usage(word),
        }
        words.next();
    }
    let targets = TARGETS.iter().filter(|target| selected.is_none_or(|name| name == target.name));
    let failed = targets.filter(|target| !passes(target, runs, seconds)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(word: &str) -> ExitCode {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    eprintln!("xtask: `{word}` is not a target or an option of fuzz; the targets are {}", names.join(", "));
    ExitCode::from(2)
}

fn passes(target: &Target, runs: &str, seconds: Option<&str>) -> bool {
    passed_one_test(target, runs, seconds).unwrap_or_else(|error| {
        eprintln!("xtask: the target {} could not be run: {error}", target.name);
        false
    })
}

/// Runs the test of a target. If it does not exist, no test passes, and that is a failure.
fn passed_one_test(target: &Target, runs: &str, seconds: Option<&str>) -> io::Result<bool> {
    let mut command = cargo();
    command.args(["test", "--profile", "fuzz"]).args(target.program);
    command.args(["--", "--exact", target.test, "--nocapture"]).env("RAP_FUZZ_RUNS", runs);
    command.envs(seconds.map(|seconds| ("RAP_FUZZ_SECONDS", seconds)));
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let report = child.stdout.take().expect("bug: stdout is piped");
    let mut passed = false;
    for line in BufReader::new(report).lines() {
        passed |= line?.contains("ok. 1 passed");
    }
    let status = child.wait()?;
    if !passed {
        eprintln!("xtask: the target {} failed ({status})", target.name);
    }
    Ok(passed)
}
