//! `cargo xtask lint`: checks formatting, clippy and rustdoc, with warnings as errors, that every crate can be
//! packaged, the width of comments, and the evidence for each requirement.

use std::process::{Command, ExitCode};

use crate::{cargo, comments, requirements};

pub(crate) fn run() -> ExitCode {
    let mut failed: Vec<&str> =
        [("fmt", fmt()), ("clippy", clippy()), ("doc", doc()), ("package", package())]
            .into_iter()
            .filter_map(failure)
            .collect();
    if comments::check() != ExitCode::SUCCESS {
        failed.push("comments");
    }
    if requirements::check() != ExitCode::SUCCESS {
        failed.push("requirements");
    }
    if failed.is_empty() {
        println!("lint passed");
        return ExitCode::SUCCESS;
    }
    eprintln!("lint failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn failure((name, mut check): (&'static str, Command)) -> Option<&'static str> {
    match check.status() {
        Ok(status) if status.success() => None,
        Ok(_) => Some(name),
        Err(error) => {
            eprintln!("xtask: {name} did not start: {error}");
            Some(name)
        }
    }
}

fn fmt() -> Command {
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check"]);
    fmt
}

fn clippy() -> Command {
    let mut clippy = cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    clippy
}

fn doc() -> Command {
    let mut doc = cargo();
    doc.args(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    doc
}

/// Packages every published crate, without building it again. Fails if one depends on a crate that is not published. It
/// is offline because clippy has already fetched all dependencies.
fn package() -> Command {
    let mut package = cargo();
    package.args([
        "package",
        "--workspace",
        "--exclude",
        "xtask",
        "--exclude",
        "rap-testkit",
        "--exclude",
        "rap-attack",
        "--exclude",
        "rap-storm",
        "--no-verify",
        "--allow-dirty",
        "--offline",
    ]);
    package.arg("--quiet");
    package
}
