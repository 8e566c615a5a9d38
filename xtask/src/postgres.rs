//! Installs Postgres and the pooler pgbouncer for the tests where they are missing. The tests start their own servers.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// File that keeps Debian's package from making and starting a server of its own.
const CLUSTER_SETTINGS: &str = "/etc/postgresql-common/createcluster.conf";

/// Directory of programs of the system, which is not in every search path.
const SYSTEM_PROGRAMS: &str = "/usr/sbin";

/// Installs Debian's packages if no server programs are found. A failure is reported, and the tests that need them then
/// fail.
pub(crate) fn install() {
    if is_installed() {
        return;
    }
    eprintln!("xtask: Postgres or pgbouncer is missing; installing Debian's packages");
    let settings = Path::new(CLUSTER_SETTINGS);
    let no_server = match settings.exists() {
        true => Ok(()),
        false => fs::create_dir_all("/etc/postgresql-common")
            .and_then(|()| fs::write(settings, "create_main_cluster = false\n")),
    };
    if no_server.is_err() || !install_packages(&["postgresql", "pgbouncer"]) {
        eprintln!("xtask: that failed; install them by hand (Debian: apt-get install postgresql pgbouncer)");
    }
}

/// Installs Debian's packages. Returns false if that fails.
pub(crate) fn install_packages(packages: &[&str]) -> bool {
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    apt(&install) || (apt(&["update"]) && apt(&install))
}

fn is_installed() -> bool {
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut debian = debian.map(|version| version.path().join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path: Vec<_> = std::env::split_paths(&path).chain([SYSTEM_PROGRAMS.into()]).collect();
    let in_path = |program: &str| path.iter().any(|directory| directory.join(program).exists());
    (debian.any(|directory| directory.join("initdb").exists()) || in_path("initdb")) && in_path("pgbouncer")
}
