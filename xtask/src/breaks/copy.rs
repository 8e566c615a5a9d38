//! The copy of the work tree that breaks are applied to.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{env, io};

use rustix::process::{Pid, Signal, kill_process_group};

use super::{Break, Outcome, TIME_LIMIT, Tests, broken, failed_tests};
use crate::{cargo, root};

/// Time limit of a build. The first one compiles all dependencies.
const BUILD_TIME_LIMIT: Duration = Duration::from_secs(3600);
/// Number of seeds in each part of the simulation.
const SEEDS: &str = "20";
const POLL: Duration = Duration::from_millis(50);

/// A copy of the work tree, with a target directory of its own.
pub(super) struct Copy {
    tree: PathBuf,
    target: PathBuf,
    output: PathBuf,
}

impl Copy {
    pub(super) fn of_work_tree() -> io::Result<Copy> {
        // The path of this program is TARGET/debug/xtask.
        let program = env::current_exe()?;
        let target = program.ancestors().nth(2).ok_or_else(|| io::Error::other("no target directory"))?;
        let scratch = target.join("breaks");
        let copy = Copy {
            tree: scratch.join("tree"),
            target: scratch.join("target"),
            output: scratch.join("output"),
        };
        if copy.tree.exists() {
            fs::remove_dir_all(&copy.tree)?;
        }
        let mut git = Command::new("git");
        git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root());
        let listed = git.output()?;
        if !listed.status.success() {
            return Err(io::Error::other("git could not list the files of the work tree"));
        }
        let listed = String::from_utf8(listed.stdout).map_err(io::Error::other)?;
        for file in listed.split_terminator('\0').filter(|file| root().join(file).is_file()) {
            let to = copy.tree.join(file);
            fs::create_dir_all(to.parent().unwrap_or(Path::new("")))?;
            fs::copy(root().join(file), to)?;
        }
        Ok(copy)
    }

    pub(super) fn try_break(&self, one: &Break) -> io::Result<Outcome> {
        let file = self.tree.join(&one.file);
        let text = fs::read_to_string(&file)?;
        let Some(broken) = broken(&text, one) else { return Ok(Outcome::DoesNotApply) };
        fs::write(&file, broken)?;
        let outcome = self.test(one.tests);
        fs::write(&file, text)?;
        outcome
    }

    pub(super) fn test(&self, tests: Tests) -> io::Result<Outcome> {
        if self.cargo_test(tests, "--no-run", BUILD_TIME_LIMIT)? != Some(true) {
            return Ok(Outcome::DoesNotCompile);
        }
        let ended = self.cargo_test(tests, "--no-fail-fast", TIME_LIMIT)?;
        let failed = failed_tests(&String::from_utf8_lossy(&fs::read(&self.output)?));
        Ok(match ended {
            _ if !failed.is_empty() => Outcome::Caught(failed),
            Some(true) => Outcome::NotCaught,
            Some(false) => Outcome::Died,
            None => Outcome::TimedOut,
        })
    }

    /// Runs `cargo test`. Returns whether it succeeded; `None` if it did not end in time.
    fn cargo_test(&self, tests: Tests, option: &str, limit: Duration) -> io::Result<Option<bool>> {
        let output = File::create(&self.output)?;
        let mut command = cargo();
        command.arg("test").args(tests.arguments()).arg(option).current_dir(&self.tree);
        command.env("CARGO_TARGET_DIR", &self.target).env("CARGO_TERM_COLOR", "never");
        // The same random inputs in every run, and no shrinking.
        command.env("PROPTEST_RNG_SEED", "1").env("PROPTEST_MAX_SHRINK_ITERS", "0");
        command.env("RAP_SIM_SEEDS", SEEDS);
        command.stdout(output.try_clone()?).stderr(output);
        wait(command, limit)
    }
}

/// Runs a command. After the time limit, kills it and all its child processes.
fn wait(mut command: Command, limit: Duration) -> io::Result<Option<bool>> {
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let (mut child, started) = (command.spawn()?, Instant::now());
    while started.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        sleep(POLL);
    }
    let group = Pid::from_child(&child);
    kill_process_group(group, Signal::KILL)?;
    child.wait()?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_command_that_ends_in_time_returns_its_result() {
        assert_eq!(wait(shell("exit 0"), BUILD_TIME_LIMIT).unwrap(), Some(true));
        assert_eq!(wait(shell("exit 1"), BUILD_TIME_LIMIT).unwrap(), Some(false));
    }

    /// Cargo starts the tests, so killing only cargo would leave them running.
    #[test]
    fn a_command_that_takes_too_long_is_killed_with_its_children() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut command = shell("sleep 600 & wait");
        command.stdout(writer).stderr(Stdio::null());
        assert_eq!(wait(command, POLL).unwrap(), None);
        // The pipe ends when all processes that can write to it are gone.
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}
