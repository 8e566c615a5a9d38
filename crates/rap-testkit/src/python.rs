//! Programs and libraries from PyPI, each set in its own virtual environment that is kept between runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the virtual environment `name` in the directory `cache`, with these packages. They are installed the first time.
pub fn environment(cache: &str, name: &str, packages: &[&str]) -> PathBuf {
    let home = Path::new(cache).join(name);
    fs::create_dir_all(&home).unwrap();
    // One test installs it while the others wait.
    let lock = File::create(home.join("lock")).unwrap();
    lock.lock().unwrap();
    let complete = home.join("complete");
    if !complete.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&home));
        run(Command::new(home.join("bin/pip")).args(["install", "--quiet"]).args(packages));
        File::create(complete).unwrap();
    }
    home
}

/// Runs a command that has to succeed.
pub fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} did not start: {error}"));
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}:\n{said}");
}
