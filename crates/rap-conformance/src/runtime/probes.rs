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

use super::scene::{Scene, Seen};
use crate::{Probe, Verdict};

/// When a probe is at work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// With nobody else, before all others.
    Alone,
    /// With all others.
    Together,
    /// When the runtime is killed.
    Crash,
    /// When all others are done; it looks at what they saw.
    Last,
}

/// A probe with what it does.
pub(crate) struct Check {
    pub(crate) probe: Probe,
    pub(crate) phase: Phase,
    pub(crate) run: fn(Scene) -> Pin<Box<dyn Future<Output = Seen> + Send>>,
}

/// All of them, by what they are about.
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

/// What is missing is for another probe to say: this one then sees nothing.
fn unseen(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Fail { what, .. } => Verdict::not_observable(what),
        other => other,
    }
}

/// Requirements that no probe is about, and why.
pub(crate) const UNOBSERVABLE: &[(&str, &str)] = &[
    ("TR-17", "it is about the runtime's documentation"),
    ("TR-24", "the checker is reached over plain HTTP"),
    ("SE-28", "it is about what agents are told and decide"),
    ("LC-17", "it is allowed, not required"),
    ("LC-20", "the checker can not damage the runtime's state"),
    ("LC-23", "the checker can not keep the runtime from writing its state"),
    ("LC-28", "it is allowed, not required"),
    ("LC-37", "the checker can not damage the runtime's state"),
    ("LC-39", "it is about the runtime's documentation"),
];
