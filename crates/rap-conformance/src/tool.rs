//! Checks a tool server. The checker acts as the runtime.
//!
//! It calls one operation about fifty times and makes a few subscriptions, in threads with generated ids. It closes and
//! cancels only those. Every wait is bounded by [`Timeouts`].

mod inbox;
mod probes;
mod selection;
mod target;
mod unobservable;

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use rap_protocol::Secret;
use serde_json::{Map, Value};
use url::Url;

use crate::report::{Outcome, Probe, Progress, Report, Subject, Verdict};
use target::Target;
pub use unobservable::UNOBSERVABLE;

/// Number of probes that run concurrently. Most of them wait for something that should not happen.
const CONCURRENT_PROBES: usize = 8;

/// Options of a check.
#[derive(Debug, Clone)]
pub struct Options {
    /// Base URL of the server.
    pub url: Url,
    /// Bearer token of the server; `None` if it needs none.
    pub bearer: Option<Secret>,
    /// Operation that returns quickly. If `None`, a safe operation that needs no arguments is selected.
    pub operation: Option<OperationCall>,
    /// Subscription that quickly sends several events, the last of them final. If `None`, subscriptions are not
    /// checked.
    pub subscription: Option<OperationCall>,
    /// Address for callbacks. If `None`, a free port of the local address that connects to the server.
    pub listen: Option<SocketAddr>,
    /// Time limits.
    pub timeouts: Timeouts,
}

/// Operation with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationCall {
    /// Name of the operation.
    pub operation: String,
    /// Arguments of the call.
    pub arguments: Map<String, Value>,
}

/// Time limits of the checker.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Maximum wait for the answer to a request.
    pub answer: Duration,
    /// Maximum time of an acknowledgement that counts as prompt.
    pub prompt: Duration,
    /// Maximum wait for a result, an event, or a retry of one.
    pub result: Duration,
    /// Time without a message after which none is expected any more.
    pub quiet: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            answer: Duration::from_secs(10),
            prompt: Duration::from_secs(1),
            result: Duration::from_secs(15),
            quiet: Duration::from_secs(2),
        }
    }
}

/// Reason why nothing was checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checker cannot listen for callbacks.
    #[error("cannot listen for callbacks on {address}: {source}; choose another address with --listen")]
    Listen {
        /// Address that was tried.
        address: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The URL or the token is not valid.
    #[error("{0}")]
    Url(String),
    /// The operation is not in the toolset, or its arguments violate its schema.
    #[error("{0}")]
    Operation(String),
}

/// A probe and the function that runs it.
struct Check {
    probe: Probe,
    run: for<'a> fn(&'a Target) -> BoxFuture<'a, ProbeResult>,
}

/// `Ok` if the probe passed.
type ProbeResult = Result<(), Verdict>;

/// Returns all probes of a tool server.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::ROUNDS.iter().copied().flatten().copied().flatten().map(|check| &check.probe)
}

/// Runs all probes. `progress` is called when a probe starts and when it finishes.
pub async fn check(options: Options, progress: &(dyn Fn(Progress<'_>) + Sync)) -> Result<Report, Error> {
    let mut report = Report::new(Subject::Tool, "", UNOBSERVABLE);
    let mut target = Target::new(options).await?;
    let total = probes().count();
    let mut number = 0;
    for round in probes::ROUNDS {
        let checks: Vec<&'static Check> = round.iter().copied().flatten().collect();
        let started = number;
        number += checks.len();
        for outcome in run(&target, &checks, started, total, progress).await {
            report.add(outcome);
        }
        target.load_toolset().await?;
    }
    report.set_target(target.describe());
    Ok(report)
}

/// Runs the probes of one round concurrently and returns their outcomes in order.
async fn run(
    target: &Target,
    checks: &[&'static Check],
    started: usize,
    total: usize,
    progress: &(dyn Fn(Progress<'_>) + Sync),
) -> Vec<Outcome> {
    let running = checks.iter().enumerate().map(|(index, check)| async move {
        let probe = &check.probe;
        progress(Progress::Started { probe, number: started + index + 1, total });
        let start = Instant::now();
        let verdict = (check.run)(target).await.err().unwrap_or(Verdict::Pass);
        let outcome = Outcome { probe, verdict, took: start.elapsed() };
        progress(Progress::Finished(&outcome));
        (index, outcome)
    });
    let mut outcomes: Vec<(usize, Outcome)> =
        futures_util::stream::iter(running).buffer_unordered(CONCURRENT_PROBES).collect().await;
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::requirements;

    #[test]
    fn each_probe_has_a_unique_name_and_covers_requirements_of_tools() {
        let mut names = HashSet::new();
        for probe in probes() {
            assert!(names.insert(probe.name), "{} is not unique", probe.name);
            assert!(!probe.requirements.is_empty(), "{}", probe.name);
            for id in probe.requirements {
                let known = Subject::Tool.requirements().any(|requirement| requirement.id == *id);
                assert!(known, "{}: {id} is not a requirement of tools", probe.name);
            }
        }
    }

    #[test]
    fn each_requirement_of_tools_has_a_probe_or_is_listed_as_unobservable() {
        let probed: HashSet<&str> = probes().flat_map(|probe| probe.requirements).copied().collect();
        for requirement in Subject::Tool.requirements() {
            let reasons = UNOBSERVABLE.iter().filter(|(id, _)| *id == requirement.id).count();
            assert!(reasons == 1 || reasons == 0 && probed.contains(requirement.id), "{}", requirement.id);
        }
        assert!(UNOBSERVABLE.iter().all(|(id, _)| requirements::find(id).is_some()));
    }
}
