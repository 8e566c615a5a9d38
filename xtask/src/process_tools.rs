//! Installs the programs with which tests examine processes, and a library that changes their clock, where they are missing.

use std::fs;
use std::process::{Command, Stdio};

use crate::postgres::install_packages;

/// Each program is Debian's package of that name: valgrind counts instructions, strace makes system calls fail.
const PROGRAMS: [&str; 2] = ["valgrind", "strace"];
/// Debian's package of a library that changes the clock of a process, for the storms.
const CLOCK_LIBRARY: &str = "libfaketime";

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
    if !has_clock_library() && !install_packages(&[CLOCK_LIBRARY]) {
        eprintln!(
            "xtask: {CLOCK_LIBRARY} is missing, so no clock jumps in storms (Debian: apt-get install {CLOCK_LIBRARY})"
        );
    }
}

fn has_clock_library() -> bool {
    let directories = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    directories.map(|directory| directory.path().join("faketime")).any(|path| path.exists())
}
