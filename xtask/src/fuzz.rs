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

const TARGETS: [Target; 10] = [
    Target { name: "callbacks", program: RUNTIME, test: "fuzz::callbacks" },
    Target { name: "invocations", program: RUNTIME, test: "fuzz::invocations" },
    Target { name: "notifications", program: RUNTIME, test: "fuzz::notifications" },
    Target { name: "toolsets", program: RUNTIME, test: "fuzz::toolsets" },
    Target { name: "schemas", program: RUNTIME, test: "fuzz::schemas" },
    Target { name: "event_streams", program: RUNTIME, test: "fuzz::event_streams" },
    Target { name: "transfers", program: RUNTIME, test: "fuzz::transfers" },
    Target { name: "answers", program: ["-p", "rap-runtime", "--lib", "-q"], test: "model::tests::fuzz" },
    Target { name: "tokens", program: ["-p", "rap-runtime", "--lib", "-q"], test: "token::tests::fuzz" },
    Target {
        name: "configurations",
        program: ["-p", "rap-cli", "--lib", "-q"],
        test: "config::tests::fuzz::configurations",
    },
];

/// Outcome of a target: the numbers of its last line, and whether it passed.
struct Outcome {
    name: &'static str,
    counts: Option<Counts>,
    passed: bool,
}

/// Numbers in the line that a target ends with.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    executions: String,
    seconds: String,
    per_second: String,
    inputs: String,
}

impl Counts {
    /// Reads `fuzz NAME: 12 executions in 3.4 s, 5 per second, 6 inputs in the corpus`.
    fn parse(line: &str) -> Option<Counts> {
        let words: Vec<&str> = line.strip_prefix("fuzz ")?.split_once(": ")?.1.split(' ').collect();
        let [executions, "executions", "in", seconds, "s,", per_second, "per", "second,", inputs, ..] =
            words.as_slice()
        else {
            return None;
        };
        let [executions, seconds, per_second, inputs] =
            [executions, seconds, per_second, inputs].map(|word| (*word).to_owned());
        Some(Counts { executions, seconds, per_second, inputs })
    }
}

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
    let outcomes: Vec<Outcome> = targets.map(|target| outcome(target, runs, seconds)).collect();
    print!("{}", table(&outcomes));
    if outcomes.iter().all(|outcome| outcome.passed) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(word: &str) -> ExitCode {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    eprintln!("xtask: `{word}` is not a target or an option of fuzz; the targets are {}", names.join(", "));
    ExitCode::from(2)
}

/// The table of all targets, which can be copied into docs/testing.md.
fn table(outcomes: &[Outcome]) -> String {
    let mut text = "\n| target | executions | seconds | per second | inputs in the corpus | outcome |\n\
                    |---|---|---|---|---|---|\n"
        .to_owned();
    for Outcome { name, counts, passed } in outcomes {
        let [executions, seconds, per_second, inputs] = match counts {
            Some(counts) => [&counts.executions, &counts.seconds, &counts.per_second, &counts.inputs],
            None => [const { &String::new() }; 4],
        };
        let outcome = if *passed { "passed" } else { "FAILED" };
        text += &format!("| {name} | {executions} | {seconds} | {per_second} | {inputs} | {outcome} |\n");
    }
    text
}

fn outcome(target: &Target, runs: &str, seconds: Option<&str>) -> Outcome {
    let name = target.name;
    run_target(target, runs, seconds).unwrap_or_else(|error| {
        eprintln!("xtask: the target {name} could not be run: {error}");
        Outcome { name, counts: None, passed: false }
    })
}

/// Runs the test of a target, and passes its output on. If it does not exist, no test passes, and that is a failure.
fn run_target(target: &Target, runs: &str, seconds: Option<&str>) -> io::Result<Outcome> {
    let mut command = cargo();
    command.args(["test", "--profile", "fuzz"]).args(target.program);
    command.args(["--", "--exact", target.test, "--nocapture"]).env("RAP_FUZZ_RUNS", runs);
    command.envs(seconds.map(|seconds| ("RAP_FUZZ_SECONDS", seconds)));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (report, progress) = (child.stdout.take(), child.stderr.take());
    let report = report.expect("bug: stdout is piped");
    let progress = BufReader::new(progress.expect("bug: stderr is piped"));
    let relaying = std::thread::spawn(move || {
        let mut counts = None;
        for line in progress.lines().map_while(Result::ok) {
            eprintln!("{line}");
            counts = Counts::parse(&line).or(counts);
        }
        counts
    });
    let mut passed = false;
    for line in BufReader::new(report).lines() {
        passed |= line?.contains("ok. 1 passed");
    }
    let status = child.wait()?;
    let counts = relaying.join().unwrap_or_default();
    if !passed {
        eprintln!("xtask: the target {} failed ({status})", target.name);
    }
    Ok(Outcome { name: target.name, counts, passed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_numbers_of_each_target_and_marks_failures() {
        let line = "fuzz schemas: 1000 executions in 2.5 s, 400 per second, 17 inputs in the corpus";
        assert_eq!(Counts::parse("fuzz schemas: 256 of 1000 after 10s"), None);
        let outcomes = [
            Outcome { name: "schemas", counts: Counts::parse(line), passed: true },
            Outcome { name: "tokens", counts: None, passed: false },
        ];
        let table = table(&outcomes);
        assert!(table.contains("| schemas | 1000 | 2.5 | 400 | 17 | passed |"), "{table}");
        assert!(table.contains("| tokens |  |  |  |  | FAILED |"), "{table}");
    }
}
