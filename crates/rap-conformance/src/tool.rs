//! Checks a tool server: the checker plays the runtime.
//!
//! It calls one operation some fifty times and subscribes a few times, in threads whose names it makes up; it
//! closes and cancels only those. Every wait has an end: [`Patience`].

mod choice;
mod inbox;
mod probes;
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

/// How many probes run at the same time: most of them wait for something that should not happen.
const AT_ONCE: usize = 8;

/// What to check, and with what.
#[derive(Debug, Clone)]
pub struct Options {
    /// The base URL of the server.
    pub url: Url,
    /// The token that it wants.
    pub bearer: Option<Secret>,
    /// An operation that returns soon. Without it, one that needs no arguments is picked.
    pub operation: Option<Order>,
    /// A subscription that sends several events soon, the last of them final.
    pub subscription: Option<Order>,
    /// Where callbacks arrive. Without it, a port of the address that the server sees.
    pub listen: Option<SocketAddr>,
    /// How long to wait for what.
    pub patience: Patience,
}

/// An operation with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    /// Its name.
    pub operation: String,
    /// What it is called with.
    pub arguments: Map<String, Value>,
}

/// How long the checker waits.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For the answer to a request.
    pub answer: Duration,
    /// An acknowledgement that takes longer is late.
    pub prompt: Duration,
    /// For a result, an event, or another attempt at one.
    pub result: Duration,
    /// Until silence is believed.
    pub quiet: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            answer: Duration::from_secs(10),
            prompt: Duration::from_secs(1),
            result: Duration::from_secs(15),
            quiet: Duration::from_secs(2),
        }
    }
}

/// Why nothing was checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Callbacks could not be received.
    #[error("can not listen for callbacks on {address}: {source}; name another address with --listen")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The URL is not one that a tool server can have.
    #[error("{0}")]
    Url(String),
    /// The operation or its arguments do not fit the toolset.
    #[error("{0}")]
    Order(String),
}

/// One probe and how it is made.
struct Check {
    probe: Probe,
    run: for<'a> fn(&'a Target) -> BoxFuture<'a, Found>,
}

/// Nothing is wrong, or else.
type Found = Result<(), Verdict>;

/// All probes of a tool server.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::STAGES.iter().copied().flatten().copied().flatten().map(|check| &check.probe)
}

/// Runs all probes. `progress` is told when each begins and ends.
pub async fn check(options: Options, progress: &(dyn Fn(Progress<'_>) + Sync)) -> Result<Report, Error> {
    let mut report = Report::new(Subject::Tool, "", UNOBSERVABLE);
    let mut target = Target::new(options).await?;
    let of = probes().count();
    let mut number = 0;
    for stage in probes::STAGES {
        let checks: Vec<&'static Check> = stage.iter().copied().flatten().collect();
        let begun = number;
        number += checks.len();
        for outcome in run(&target, &checks, begun, of, progress).await {
            report.add(outcome);
        }
        target.learn().await?;
    }
    report.set_target(target.describe());
    Ok(report)
}

/// Runs the probes of one stage; what comes back is in their order.
async fn run(
    target: &Target,
    checks: &[&'static Check],
    begun: usize,
    of: usize,
    progress: &(dyn Fn(Progress<'_>) + Sync),
) -> Vec<Outcome> {
    let running = checks.iter().enumerate().map(|(index, check)| async move {
        let probe = &check.probe;
        progress(Progress::Begins { probe, number: begun + index + 1, of });
        let start = Instant::now();
        let verdict = (check.run)(target).await.err().unwrap_or(Verdict::Pass);
        let outcome = Outcome { probe, verdict, took: start.elapsed() };
        progress(Progress::Done(&outcome));
        (index, outcome)
    });
    let mut outcomes: Vec<(usize, Outcome)> =
        futures_util::stream::iter(running).buffer_unordered(AT_ONCE).collect().await;
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::requirements;

    #[test]
    fn each_probe_has_a_name_of_its_own_and_names_requirements_of_tools() {
        let mut names = HashSet::new();
        for probe in probes() {
            assert!(names.insert(probe.name), "{} is there twice", probe.name);
            assert!(!probe.requirements.is_empty(), "{}", probe.name);
            for id in probe.requirements {
                let known = Subject::Tool.requirements().any(|requirement| requirement.id == *id);
                assert!(known, "{}: {id} is no requirement of tools", probe.name);
            }
        }
    }

    #[test]
    fn each_requirement_of_tools_has_a_probe_or_a_reason_why_there_is_none() {
        let probed: HashSet<&str> = probes().flat_map(|probe| probe.requirements).copied().collect();
        for requirement in Subject::Tool.requirements() {
            let reasons = UNOBSERVABLE.iter().filter(|(id, _)| *id == requirement.id).count();
            assert!(reasons == 1 || reasons == 0 && probed.contains(requirement.id), "{}", requirement.id);
        }
        assert!(UNOBSERVABLE.iter().all(|(id, _)| requirements::find(id).is_some()));
    }
}
