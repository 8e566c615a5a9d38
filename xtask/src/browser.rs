//! Installs Chromium and Node.js for the tests of the web interface where they are missing.

use std::path::Path;
use std::process::{Command, Stdio};

/// Installs Debian's packages. A failure is reported, and the tests that need them then fail.
pub(crate) fn install() {
    let mut missing = Vec::new();
    if !["chromium", "chromium-browser", "google-chrome"]
        .iter()
        .any(|name| Path::new("/usr/bin").join(name).exists())
    {
        missing.push("chromium");
    }
    for program in ["node", "npm"] {
        let found =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !found.is_ok_and(|status| status.success()) {
            missing.push(if program == "node" { "nodejs" } else { "npm" });
        }
    }
    if missing.is_empty() {
        return;
    }
    eprintln!(
        "xtask: installing Debian's packages for the tests of the web interface: {}",
        missing.join(", ")
    );
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let install = [&["install", "-y", "--no-install-recommends"], &*missing].concat();
    let installed = apt(&install) || (apt(&["update"]) && apt(&install));
    if !installed {
        eprintln!("xtask: that failed; install them by hand");
    }
}
