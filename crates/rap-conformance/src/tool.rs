//! Checks a tool server. The checker acts as the runtime.
//!
//! It calls one operation about fifty times and makes a few subscriptions, in threads with generated ids. It closes and
//! cancels only those. It calls no operation that is neither named by the user nor annotated as `readOnly`. Every wait is
//! bounded by [`Timeouts`].

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

use crate::report::{Outcome, Probe, Profile, Progress, Report, Subject, Verdict};
use target::Target;
pub use unobservable::GAPS;

/// Number of probes that run concurrently. Most of them wait for something that should not happen.
const CONCURRENT_PROBES: usize = 8;

/// Options of a check.
#[derive(Debug, Clone)]
pub struct Options {
    /// Base URL of the server.
    pub url: Url,
    /// Bearer token of the server; `None` if it needs none.
    pub bearer: Option<Secret>,
    /// Operation that returns quickly. If `None`, one that is annotated as `readOnly` and needs no arguments is selected.
    pub operation: Option<OperationCall>,
    /// Operation that works for two seconds or longer. If `None`, one that is annotated as `readOnly` and `longRunning` and
    /// needs no arguments is selected.
    pub slow_operation: Option<OperationCall>,
    /// Operation that has to be called in a thread before any other.
    pub setup_operation: Option<OperationCall>,
    /// Subscription that quickly sends several events, the last of them final. If `None`, subscriptions are not
    /// checked.
    pub subscription: Option<OperationCall>,
    /// Address for callbacks. If `None`, a free port of the local address that connects to the server.
    pub listen: Option<SocketAddr>,
    /// Time limits.
    pub timeouts: Timeouts,
    /// Selection of probes.
    pub profile: Profile,
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
    /// Maximum time of an acknowledgement that counts as prompt. An operation is slow if it takes twice as long.
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
            prompt: Duration::from_millis(500),
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
    /// The server does not answer.
    #[error(
        "{url} does not answer: {why}; start the server, or correct the address: it is the base URL, to which \
         /.well-known/rap-toolset is appended"
    )]
    Unreachable {
        /// Base URL of the server.
        url: String,
        /// Error of the request.
        why: String,
    },
    /// The server rejects the checker's credentials.
    #[error("{0}")]
    Unauthorized(String),
    /// The operation is not in the toolset, or its arguments violate its schema.
    #[error("{0}")]
    Operation(String),
}

/// A probe and the function that runs it.
struct Check {
    probe: Probe,
    run: for<'a> fn(&'a Target) -> BoxFuture<'a, ProbeResult>,
}

/// `Ok` if everything is as [`Probe::checks`] says. `Err` ends the probe with a verdict: a failure, a reason why nothing
/// could be observed, or a pass with a more specific description of what was seen.
type ProbeResult = Result<(), Verdict>;

/// Returns all probes of a tool server.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::ROUNDS.iter().copied().flatten().copied().flatten().map(|check| &check.probe)
}

/// Runs all probes of the profile. `progress` is called when a probe starts and when it finishes.
pub async fn check(options: Options, progress: &(dyn Fn(Progress<'_>) + Sync)) -> Result<Report, Error> {
    let profile = options.profile;
    let mut target = Target::new(options).await?;
    target.load_toolset().await?;
    target.check_credentials().await?;
    let mut report = Report::new(Subject::Tool, "", profile, GAPS);
    let total = probes().filter(|probe| probe.is_in(profile)).count();
    let mut number = 0;
    for round in probes::ROUNDS {
        let in_profile = |check: &&'static Check| check.probe.is_in(profile);
        let checks: Vec<&'static Check> = round.iter().copied().flatten().filter(in_profile).collect();
        let started = number;
        number += checks.len();
        for outcome in run(&target, &checks, started, total, progress).await {
            report.add(outcome);
        }
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
        let verdict = Verdict::of((check.run)(target).await);
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
    use crate::report::{Extent, Gap};
    use crate::requirements;

    #[test]
    fn each_probe_has_a_unique_name_and_covers_requirements_of_tools() {
        let mut names = HashSet::new();
        for probe in probes() {
            assert!(names.insert(probe.name), "{} is not unique", probe.name);
            for id in probe.requirements {
                let known = Subject::Tool.requirements().any(|requirement| requirement.id == *id);
                assert!(known, "{}: {id} is not a requirement of tools", probe.name);
            }
        }
    }

    #[test]
    fn only_additions_cover_no_requirement() {
        let additions: Vec<&str> =
            probes().filter(|probe| probe.is_addition()).map(|probe| probe.name).collect();
        let known = [
            "toolset_changes_with_its_version",
            "repeat_counts_once",
            "optional_fields_are_taken",
            "errors_begin_with_error",
            "unreadable_invocation_is_4xx",
            "call_id_is_echoed",
            "cancel_tool_call_is_served",
            "hostile_ids_are_200",
        ];
        assert_eq!(additions, known);
    }

    #[test]
    fn each_requirement_of_tools_has_a_probe_or_a_gap() {
        let probed: HashSet<&str> = probes().flat_map(|probe| probe.requirements).copied().collect();
        for requirement in Subject::Tool.requirements() {
            let gaps: Vec<&Gap> = GAPS.iter().filter(|gap| gap.id == requirement.id).collect();
            let is_probed = probed.contains(requirement.id);
            let is_listed = match gaps[..] {
                [] => is_probed,
                [Gap { extent: Extent::Part, .. }] => is_probed,
                [_] => true,
                _ => false,
            };
            assert!(is_listed, "{}", requirement.id);
        }
        assert!(GAPS.iter().all(|gap| requirements::find(gap.id).is_some()));
    }
}
