//! Programs and libraries from npm, each set in its own directory that is kept between runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::python::run;

/// Clients of MCP, the inspector and the official conformance suite, with exact versions.
const MCP: [&str; 5] = [
    "node@22",
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/client@2.4.0",
    "@modelcontextprotocol/inspector@2.12.0",
    "@modelcontextprotocol/conformance@0.1.16",
];

/// Returns a directory with clients of MCP and the official conformance suite.
pub fn mcp_packages(cache: &str) -> PathBuf {
    packages(cache, "mcp-clients-1", &MCP)
}

/// Returns the directory `name` in the directory `cache`, with these packages in `node_modules`. They are installed the
/// first time. Programs of the packages are in `node_modules/.bin`; a script in that directory can import the packages.
pub fn packages(cache: &str, name: &str, packages: &[&str]) -> PathBuf {
    let home = Path::new(cache).join(name);
    fs::create_dir_all(&home).unwrap();
    // One test installs them while the others wait.
    let lock = File::create(home.join("lock")).unwrap();
    lock.lock().unwrap();
    let complete = home.join("complete");
    if !complete.exists() {
        fs::write(home.join("package.json"), r#"{"private": true, "type": "module"}"#).unwrap();
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]);
        run(npm.args(packages).current_dir(&home));
        File::create(complete).unwrap();
    }
    home
}

/// Returns the program `name` of the packages that were installed into `home`.
pub fn program(home: &Path, name: &str) -> PathBuf {
    home.join("node_modules/.bin").join(name)
}
