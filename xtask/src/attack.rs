//! `cargo xtask attack`: builds the tests, which builds the programs under attack too, and runs `attack`.

use std::env;
use std::io;
use std::process::{Command, ExitCode, ExitStatus};

use crate::cargo;

pub(crate) fn run(arguments: &[&str]) -> ExitCode {
    build_and_run("attack", arguments)
}

/// Builds everything, and runs a program of the workspace.
pub(crate) fn build_and_run(name: &str, arguments: &[&str]) -> ExitCode {
    let ended = match build() {
        Ok(built) if !built.success() => Ok(built),
        Ok(_) => program(name, arguments).and_then(|mut program| program.status()),
        Err(error) => Err(error),
    };
    match ended {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {name} could not be run: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Builds as the test runners do, so that nothing is built twice.
fn build() -> io::Result<ExitStatus> {
    cargo().args(["test", "--workspace", "--no-run", "--quiet"]).status()
}

/// A program of the workspace, which is built into the same directory as this one.
pub(crate) fn program(name: &str, arguments: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?.with_file_name(name));
    command.args(arguments);
    Ok(command)
}
