//! `cargo xtask attack`: builds the tests, which builds the programs under attack too, and runs `attack`.

use std::env;
use std::io;
use std::process::{Command, ExitCode, ExitStatus};

use crate::cargo;

pub(crate) fn run(arguments: &[&str]) -> ExitCode {
    let ended = match build() {
        Ok(built) if !built.success() => Ok(built),
        Ok(_) => command(arguments).and_then(|mut attack| attack.status()),
        Err(error) => Err(error),
    };
    match ended {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: attack could not be run: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Builds as the test runners do, so that nothing is built twice.
fn build() -> io::Result<ExitStatus> {
    cargo().args(["test", "--workspace", "--no-run", "--quiet"]).status()
}

/// The program `attack`, which is built into the same directory as this one.
pub(crate) fn command(arguments: &[&str]) -> io::Result<Command> {
    let mut command = Command::new(env::current_exe()?.with_file_name("attack"));
    command.args(arguments);
    Ok(command)
}
