//! Chromium, driven by a script for Node.js with packages from npm, which are kept between runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::python;

/// Packages that the scripts use.
const PACKAGES: [&str; 2] = ["playwright-core@1.55.0", "axe-core@4.10.3"];
/// Names under which distributions install Chromium.
const CHROMIUM: [&str; 3] = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

/// Returns a command that runs a script with Node.js. The script finds its packages and Chromium by the variables
/// `PAGE_MODULES` and `PAGE_CHROMIUM`. The packages are installed in the directory `cache` the first time.
pub fn script(cache: &str, script: &Path) -> Command {
    let chromium = CHROMIUM.iter().find(|path| Path::new(path).exists());
    let chromium = chromium.expect(
        "Chromium is missing: run `cargo xtask test`, which installs it, or apt-get install chromium",
    );
    let mut command = Command::new("node");
    command.arg(script).env("PAGE_MODULES", packages(cache)).env("PAGE_CHROMIUM", chromium);
    command.stdin(Stdio::null());
    command
}

fn packages(cache: &str) -> PathBuf {
    let home = Path::new(cache).join("browser-1");
    fs::create_dir_all(&home).unwrap();
    // One test installs them while the others wait.
    let lock = File::create(home.join("lock")).unwrap();
    lock.lock().unwrap();
    let complete = home.join("complete");
    if !complete.exists() {
        let install = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"];
        python::run(Command::new("npm").args(install).arg(&home).args(PACKAGES));
        File::create(complete).unwrap();
    }
    home
}
