//! Confinement of a process tree by Landlock, where the kernel has it.

use std::ffi::OsString;
use std::io;

/// Degree to which this system confines processes; see [`Program::writable`](super::Program::writable).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confinement {
    /// Processes write only where they are permitted to.
    Full,
    /// The kernel has an older version, which leaves some ways to change files.
    Partial,
    /// The kernel has no Landlock: processes are not confined.
    None,
}

/// Tries out how far this system confines processes.
pub fn confinement() -> Confinement {
    // The confinement applies to a thread, which ends here.
    let tried = std::thread::spawn(|| confine(&[])).join();
    tried.map_or(Confinement::None, |confined| confined.unwrap_or(Confinement::None))
}

/// Lets the calling thread, and every process that it starts, write only below these paths.
#[cfg(target_os = "linux")]
pub(super) fn confine(writable: &[OsString]) -> io::Result<Confinement> {
    use landlock::{
        ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
        path_beneath_rules,
    };
    // Reading stays permitted everywhere, so only the rights to change files are handled. Version 5 added device
    // control, which terminals need, and is left alone.
    let rights = AccessFs::from_write(ABI::V4);
    let confined = || -> Result<RulesetStatus, landlock::RulesetError> {
        let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort).handle_access(rights)?;
        let rules = rules.create()?.add_rules(path_beneath_rules(writable, rights))?;
        Ok(rules.restrict_self()?.ruleset)
    };
    match confined().map_err(io::Error::other)? {
        RulesetStatus::FullyEnforced => Ok(Confinement::Full),
        RulesetStatus::PartiallyEnforced => Ok(Confinement::Partial),
        RulesetStatus::NotEnforced => Ok(Confinement::None),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn confine(_: &[OsString]) -> io::Result<Confinement> {
    Ok(Confinement::None)
}
