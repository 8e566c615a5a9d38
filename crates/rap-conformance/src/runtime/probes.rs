//! The probes of a runtime.

mod callbacks;
mod cancel_subscription;
mod invocations;
mod notifications;
mod recovery;
mod subscriptions;
mod toolsets;
mod turns;
mod user_messages;

use std::future::Future;
use std::pin::Pin;

use super::scenario::{ProbeResult, Scenario};
use crate::{Gap, Probe, Verdict};

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
        user_messages::CHECKS,
        subscriptions::CHECKS,
        cancel_subscription::CHECKS,
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

/// Requirements that no probe covers, or not completely, with the reasons.
pub(crate) const GAPS: &[Gap] = &[
    Gap::part("TC-06", "whether the runtime reads the answer: only its effect can be seen"),
    Gap::part("TC-07", "an attempt that times out: the runtime decides how long it waits"),
    Gap::part("CN-06", "whether the runtime reads the answer: only its effect can be seen"),
    Gap::part("CN-07", "an attempt that times out: the runtime decides how long it waits"),
    Gap::part("TR-05", "whether the runtime reads the acknowledgement: only its effect can be seen"),
    Gap::whole("TR-17", "this concerns the runtime's documentation"),
    Gap::whole("TR-24", "the runtime reaches the checker over plain HTTP"),
    Gap::part("TR-25", "events that are sent again: without an id they are new events"),
    Gap::part("SE-21", "the runtime's log"),
    Gap::whole("SE-28", "this concerns instructions to agents and their decisions"),
    Gap::part("LC-16", "messages that are handled at the same time and leave no trace in a prompt"),
    Gap::whole("LC-17", "this is permitted, but not required"),
    Gap::whole("LC-20", "the checker cannot corrupt the runtime's state"),
    Gap::part("LC-22", "the report of the error"),
    Gap::whole("LC-23", "the checker cannot prevent the runtime from writing its state"),
    Gap::whole("LC-28", "this is permitted, but not required"),
    Gap::whole("LC-37", "the checker cannot corrupt the runtime's state"),
    Gap::whole("LC-39", "this concerns the runtime's documentation"),
];
