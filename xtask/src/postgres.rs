//! Installs Postgres for the tests where it is missing. The tests start their own servers.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// File that keeps Debian's package from making and starting a server of its own.
const CLUSTER_SETTINGS: &str = "/etc/postgresql-common/createcluster.conf";

/// Installs Debian's package if no server programs are found. A failure is reported, and the tests that need Postgres then
/// fail.
pub(crate) fn install() {
    if is_installed() {
        return;
    }
    eprintln!("xtask: Postgres is missing; installing Debian's package postgresql");
    let settings = Path::new(CLUSTER_SETTINGS);
    let no_server = match settings.exists() {
        true => Ok(()),
        false => fs::create_dir_all("/etc/postgresql-common")
            .and_then(|()| fs::write(settings, "create_main_cluster = false\n")),
    };
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let install = ["install", "-y", "--no-install-recommends", "postgresql"];
    let installed = no_server.is_ok() && (apt(&install) || (apt(&["update"]) && apt(&install)));
    if !installed {
        eprintln!("xtask: that failed; install Postgres by hand (Debian: apt-get install postgresql)");
    }
}

fn is_installed() -> bool {
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut debian = debian.map(|version| version.path().join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut path = std::env::split_paths(&path);
    debian.any(|directory| directory.join("initdb").exists())
        || path.any(|directory| directory.join("initdb").exists())
}
