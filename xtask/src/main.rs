//! The project's own chores, run as `cargo xtask CHORE`.
//!
//! A chore runs all of its parts even when an early one failed, so that one run shows everything there is to
//! mend, and it never calls a run good that checked nothing.

mod breaks;
mod lint;
mod requirements;
mod tally;
mod test;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask CHORE

  test [-- FILTER…]  run all tests and doc tests, or those whose name contains a FILTER
  lint               check formatting, clippy, rustdoc and requirements; every warning is an error
  requirements       write docs/conformance.md: what proves each requirement of the specification;
                     with --check, write nothing and say what is missing or out of date
  breaks [FILTER]    break the rules one at a time, as xtask/breaks.toml says, and show which tests fail; only the
                     breaks whose name or kind of tests contains FILTER
  help               show this";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] | ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        ["test"] => test::run(&[]),
        ["test", "--", filter @ ..] => test::run(filter),
        ["lint"] => lint::run(),
        ["breaks"] => breaks::run(""),
        ["breaks", filter] => breaks::run(filter),
        ["requirements"] => requirements::write(),
        ["requirements", "--check"] => requirements::check(),
        unknown => {
            eprintln!("xtask: `{}` is not a chore\n\n{USAGE}", unknown.join(" "));
            ExitCode::from(2)
        }
    }
}

/// The cargo that runs us, with the environment it would have in a plain shell.
fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // `cargo run` describes xtask in these variables. Build scripts watch them (ring's does), so passing them
    // on would rebuild half the tree each time a plain `cargo build` and an xtask take turns.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&name);
        }
    }
    cargo
}

/// The root of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("bug: xtask lies in the workspace").to_owned()
}
