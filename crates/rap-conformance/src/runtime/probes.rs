//! The probes of a runtime.

mod callbacks;
mod invocations;
mod notifications;
mod recovery;
mod subscriptions;
mod toolsets;
mod turns;

use std::future::Future;
use std::pin::Pin;

use super::scenario::{ProbeResult, Scenario};
use crate::{Probe, Verdict};

/// Phase in which a probe runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Before all others, one at a time.
    First,
    /// Concurrently with the other probes of this phase.
    Concurrent,
    /// Around the one restart of the runtime.
    Crash,
    /// After all others. The probe examines the recorded requests.
    Last,
}

/// A probe and the function that runs it.
pub(crate) struct Check {
    pub(crate) probe: Probe,
    pub(crate) phase: Phase,
    pub(crate) run: fn(Scenario) -> Pin<Box<dyn Future<Output = ProbeResult> + Send>>,
}

/// All probes, by topic.
pub(crate) fn all() -> impl Iterator<Item = &'static Check> {
    let groups = [
        toolsets::CHECKS,
        invocations::CHECKS,
        callbacks::CHECKS,
        subscriptions::CHECKS,
        notifications::CHECKS,
        turns::CHECKS,
        recovery::CHECKS,
    ];
    groups.into_iter().flatten()
}

/// Turns a failure into not observable, if it is the failure of another probe.
fn as_not_observable(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Fail { what, .. } => Verdict::not_observable(what),
        other => other,
    }
}

/// Requirements that no probe covers, with the reasons.
pub(crate) const UNOBSERVABLE: &[(&str, &str)] = &[
    ("TR-17", "this concerns the runtime's documentation"),
    ("TR-24", "the runtime reaches the checker over plain HTTP"),
    ("SE-28", "this concerns instructions to agents and their decisions"),
    ("LC-17", "this is permitted, but not required"),
    ("LC-20", "the checker cannot corrupt the runtime's state"),
    ("LC-23", "the checker cannot prevent the runtime from writing its state"),
    ("LC-28", "this is permitted, but not required"),
    ("LC-37", "the checker cannot corrupt the runtime's state"),
    ("LC-39", "this concerns the runtime's documentation"),
];
