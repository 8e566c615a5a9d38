//! Installs the programs with which tests examine processes, where they are missing.

use std::process::{Command, Stdio};

use crate::postgres::install_packages;

/// Each program is Debian's package of that name: valgrind counts instructions, strace makes system calls fail.
const PROGRAMS: [&str; 2] = ["valgrind", "strace"];

/// Installs the programs. Tests that need a missing one check nothing.
pub(crate) fn install() {
    for program in PROGRAMS {
        let mut version = Command::new(program);
        version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        if !version.status().is_ok_and(|status| status.success()) && !install_packages(&[program]) {
            eprintln!(
                "xtask: {program} is missing, so the tests that need it check nothing (Debian: apt-get install {program})"
            );
        }
    }
}
