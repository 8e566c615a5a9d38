//! Development tasks of the project, run as `cargo xtask TASK`.
//!
//! A task runs all of its parts even if an early one fails, so that one run shows every problem. A run that checked
//! nothing is a failure.

mod attack;
mod breaks;
mod browser;
mod comments;
mod fuzz;
mod lint;
mod picture;
mod postgres;
mod process_tools;
mod requirements;
mod storm;
mod tally;
mod test;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use test::Length;

const USAGE: &str = "\
usage: cargo xtask TASK

  test [-- FILTER…]  run all tests, doc tests, attacks and short storms, or the tests whose name contains a FILTER
  test --long        the same, then 20,000 seeds of the simulation, a database that is away for a minute, ten minutes of storm on each
                     database and ten minutes of overload; takes 90 minutes
  lint               check formatting, clippy, rustdoc, packages, comments and requirements; warnings are errors
  attack [FILTER…]   attack a runtime and a tool server on loopback; docs/security.md says with what. --weakened attacks
                     servers that accept everything, to show that this is noticed
  storm [--seconds N] [--seed N] [--store sqlite|postgres] [--threads N]
                     kill, freeze and cut off running servers at random, and check that nothing was lost or doubled
  storm --load CONNECTIONS [--seconds N]
                     offer a runtime ten times the load that it can carry, and check that nothing accepted was lost
  requirements       write docs/conformance.md, which lists what proves each requirement of the specification;
                     with --check, write nothing and report what is missing or out of date
  breaks [FILTER]    apply the deliberate bugs of xtask/breaks.toml one at a time and show which tests fail; with
                     FILTER, only those whose name or kind of tests contains it
  fuzz [TARGET] [--runs N] [--seconds N]
                     run the fuzz targets, each for N executions (1,000,000) or N seconds
  picture [BINARY]   write docs/demo.svg, the picture in the README, from the output of the demo; builds `rap` if no
                     binary is named
  help               show this text";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] | ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        ["test"] => test::run(&[], Length::Usual),
        ["test", "--long"] => test::run(&[], Length::Long),
        ["test", "--", filter @ ..] => test::run(filter, Length::Usual),
        ["attack", arguments @ ..] => attack::run(arguments),
        ["storm", arguments @ ..] => storm::run(arguments),
        ["lint"] => lint::run(),
        ["breaks"] => breaks::run(""),
        ["breaks", filter] => breaks::run(filter),
        ["fuzz", words @ ..] => fuzz::run(words),
        ["picture"] => picture::run(None),
        ["picture", binary] => picture::run(Some(binary)),
        ["requirements"] => requirements::write(),
        ["requirements", "--check"] => requirements::check(),
        unknown => {
            eprintln!("xtask: `{}` is not a task\n\n{USAGE}", unknown.join(" "));
            ExitCode::from(2)
        }
    }
}

/// The cargo that runs this program, with the environment that it would have in a shell.
fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // `cargo run` sets these variables for xtask. Some build scripts watch them (ring's does), so with them each switch
    // between a plain `cargo build` and an xtask would rebuild many crates.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}

/// Root directory of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("bug: xtask is a member of the workspace")
        .to_owned()
}
