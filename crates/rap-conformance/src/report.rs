//! Results of the probes by requirement, as a table, as JSON and as JUnit.
//!
//! Invariants: a requirement passes only if all probes that cover it passed, and no [`Gap`] is listed for it. Each row
//! says what was seen. An exchange shows no callback URL, no token and no auth URL.

mod exchange;
mod json;
mod junit;
mod table;

use std::time::{Duration, Instant};

pub use exchange::{Exchange, RedactedMessage};

use crate::requirements::{self, Requirement, Who};

/// Check of one behaviour of an implementation.
#[derive(Debug, PartialEq, Eq)]
pub struct Probe {
    /// Unique name, in lower case with underscores.
    pub name: &'static str,
    /// Ids of the requirements that the probe covers. A probe without requirements is an addition: it checks this
    /// project's interpretation of a point that the specification leaves open. It runs only in [`Profile::Rap`], and
    /// its failure counts as an unmet SHOULD.
    pub requirements: &'static [&'static str],
    /// Behaviour that the probe expects, as a sentence.
    pub checks: &'static str,
}

impl Probe {
    /// Returns true if the probe checks a point that the specification leaves open.
    pub fn is_addition(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Returns true if the probe runs in a profile.
    pub fn is_in(&self, profile: Profile) -> bool {
        profile == Profile::Rap || !self.is_addition()
    }
}

/// Selection of probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Profile {
    /// Only the requirements of the specification.
    #[default]
    Spec,
    /// Also this project's interpretation of points that the specification leaves open.
    Rap,
}

/// Weight of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// The failure counts at the level of the requirement.
    Requirement,
    /// The failure concerns a part of the requirement that the specification only recommends.
    Recommendation,
}

/// Result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The implementation behaves as expected.
    Pass {
        /// Description of what was seen, if that is more specific than [`Probe::checks`].
        seen: Option<String>,
    },
    /// The implementation does not behave as expected.
    Fail {
        /// Description of the failure, as a sentence.
        what: String,
        /// Requests and answers that show the failure, in order.
        exchanges: Vec<Exchange>,
        /// Weight of the failure.
        weight: Weight,
    },
    /// The behaviour cannot be observed from outside, or not with the given options.
    NotObservable {
        /// Reason, and what the user can do about it.
        why: String,
    },
}

impl Verdict {
    /// Creates a [`Verdict::Fail`].
    pub fn fail(what: impl Into<String>, exchanges: Vec<Exchange>) -> Verdict {
        Verdict::Fail { what: what.into(), exchanges, weight: Weight::Requirement }
    }

    /// Creates a [`Verdict::Fail`] about something that is only recommended.
    pub fn not_recommended(what: impl Into<String>, exchanges: Vec<Exchange>) -> Verdict {
        Verdict::Fail { what: what.into(), exchanges, weight: Weight::Recommendation }
    }

    /// Creates a [`Verdict::Pass`] with a description of what was seen.
    pub fn seen(what: impl Into<String>) -> Verdict {
        Verdict::Pass { seen: Some(what.into()) }
    }

    /// Returns true for [`Verdict::Pass`].
    pub fn is_pass(&self) -> bool {
        matches!(self, Verdict::Pass { .. })
    }

    /// Verdict of a probe that returned this: as expected, or as it says.
    pub(crate) fn of(outcome: Result<(), Verdict>) -> Verdict {
        outcome.err().unwrap_or(Verdict::Pass { seen: None })
    }

    /// Creates a [`Verdict::NotObservable`].
    pub fn not_observable(why: impl Into<String>) -> Verdict {
        Verdict::NotObservable { why: why.into() }
    }
}

/// A probe and its result.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Probe that ran.
    pub probe: &'static Probe,
    /// Result of the probe.
    pub verdict: Verdict,
    /// Duration of the probe.
    pub took: Duration,
}

/// Progress of a run, passed to the caller's callback.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A probe has started.
    Started {
        /// Probe that has started.
        probe: &'static Probe,
        /// Number of the probe, from 1.
        number: usize,
        /// Total number of probes.
        total: usize,
    },
    /// A probe has finished.
    Finished(&'a Outcome),
}

/// Kind of implementation that is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A tool server.
    Tool,
    /// A runtime.
    Runtime,
}

impl Subject {
    /// Returns the requirements for this kind of implementation.
    pub fn requirements(self) -> impl Iterator<Item = &'static Requirement> {
        let who = match self {
            Subject::Tool => Who::Tool,
            Subject::Runtime => Who::Runtime,
        };
        requirements::all()
            .iter()
            .filter(move |requirement| requirement.who == who || requirement.who == Who::Both)
    }

    /// Name on the command line.
    fn name(self) -> &'static str {
        match self {
            Subject::Tool => "tool",
            Subject::Runtime => "runtime",
        }
    }
}

/// Treatment of requirements of level SHOULD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// An unmet SHOULD is a warning.
    Lenient,
    /// An unmet SHOULD is a failure.
    Strict,
}

/// Part of a requirement that no probe can see. A probe may still show that the requirement is not met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// Id of the requirement.
    pub id: &'static str,
    /// Extent of what cannot be seen.
    pub extent: Extent,
    /// Reason, or description of the part that is not seen.
    pub why: &'static str,
}

/// Extent of a [`Gap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// No probe can show that the requirement is met.
    Whole,
    /// A probe shows that the requirement is met in part.
    Part,
}

impl Gap {
    /// Creates a gap for a requirement that no probe can show to be met.
    pub const fn whole(id: &'static str, why: &'static str) -> Gap {
        Gap { id, extent: Extent::Whole, why }
    }

    /// Creates a gap for a requirement of which a probe sees a part.
    pub const fn part(id: &'static str, why: &'static str) -> Gap {
        Gap { id, extent: Extent::Part, why }
    }
}

/// Results of all probes of one implementation.
#[derive(Debug)]
pub struct Report {
    subject: Subject,
    target: String,
    profile: Profile,
    gaps: &'static [Gap],
    outcomes: Vec<Outcome>,
    began: Instant,
    took: Duration,
}

/// Result for one requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequirementResult<'a> {
    /// All probes passed, and the requirement can be observed completely.
    Pass,
    /// At least one probe passed and none failed, but a part of the requirement was not or cannot be observed.
    Partial {
        /// Part that was not seen.
        unseen: &'a str,
    },
    /// A probe failed.
    Fail(Weight),
    /// No probe could show that the requirement is met.
    NotObservable {
        /// Reason.
        why: &'a str,
    },
}

/// Number of requirements by result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Count {
    /// Requirements that are met, as far as can be observed.
    pub passed: usize,
    /// Requirements that are met in the part that can be observed.
    pub partial: usize,
    /// Requirements of level MUST or MUST NOT that are not met.
    pub failed_must: usize,
    /// Requirements of other levels that are not met, and recommendations within a MUST.
    pub failed_should: usize,
    /// Requirements that cannot be observed.
    pub not_observable: usize,
    /// Probes without a requirement that failed.
    pub failed_additions: usize,
}

impl Report {
    /// Creates an empty report and starts its clock. `target` is the name of the implementation in the report.
    pub fn new(
        subject: Subject,
        target: impl Into<String>,
        profile: Profile,
        gaps: &'static [Gap],
    ) -> Report {
        Report {
            subject,
            target: target.into(),
            profile,
            gaps,
            outcomes: Vec::new(),
            began: Instant::now(),
            took: Duration::ZERO,
        }
    }

    /// Sets the name of the implementation in the report.
    pub fn set_target(&mut self, target: impl Into<String>) {
        self.target = target.into();
    }

    /// Adds the outcome of a probe.
    pub fn add(&mut self, outcome: Outcome) {
        self.took = self.began.elapsed();
        self.outcomes.push(outcome);
    }

    /// Returns the outcomes of all probes, in the order in which they were added.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Returns the result for each requirement, in the order of the specification.
    pub fn requirement_results(&self) -> impl Iterator<Item = (&'static Requirement, RequirementResult<'_>)> {
        self.subject.requirements().map(|requirement| (requirement, self.result_of(requirement.id)))
    }

    /// Returns what the probes of a requirement saw that passed.
    pub fn seen(&self, id: &str) -> impl Iterator<Item = &str> {
        self.outcomes_for(id).filter_map(|Outcome { probe, verdict, .. }| match verdict {
            Verdict::Pass { seen } => Some(seen.as_deref().unwrap_or(probe.checks)),
            _ => None,
        })
    }

    /// Returns the number of requirements by result.
    pub fn count(&self) -> Count {
        let mut count = Count::default();
        for (requirement, result) in self.requirement_results() {
            match result {
                RequirementResult::Pass => count.passed += 1,
                RequirementResult::Partial { .. } => count.partial += 1,
                RequirementResult::Fail(weight) if is_must(requirement, weight) => count.failed_must += 1,
                RequirementResult::Fail(_) => count.failed_should += 1,
                RequirementResult::NotObservable { .. } => count.not_observable += 1,
            }
        }
        let failed = |outcome: &&Outcome| matches!(outcome.verdict, Verdict::Fail { .. });
        let failed = self.outcomes.iter().filter(failed);
        count.failed_additions = failed.filter(|outcome| outcome.probe.is_addition()).count();
        count
    }

    /// Returns true if the implementation conforms, as far as can be observed from outside.
    pub fn is_good(&self, strictness: Strictness) -> bool {
        let Count { failed_must, failed_should, failed_additions, .. } = self.count();
        failed_must == 0 && (failed_should + failed_additions == 0 || strictness == Strictness::Lenient)
    }

    fn result_of(&self, id: &str) -> RequirementResult<'_> {
        let (mut not_observable, mut passed, mut failed) = (None, false, None);
        for Outcome { verdict, .. } in self.outcomes_for(id) {
            match verdict {
                Verdict::Fail { weight: Weight::Requirement, .. } => failed = Some(Weight::Requirement),
                Verdict::Fail { weight, .. } => failed = failed.or(Some(*weight)),
                Verdict::Pass { .. } => passed = true,
                Verdict::NotObservable { why } => not_observable = not_observable.or(Some(why.as_str())),
            }
        }
        if let Some(weight) = failed {
            return RequirementResult::Fail(weight);
        }
        match self.gaps.iter().find(|gap| gap.id == id) {
            Some(Gap { extent: Extent::Part, why, .. }) if passed => {
                RequirementResult::Partial { unseen: why }
            }
            Some(Gap { extent: Extent::Whole, why, .. }) => RequirementResult::NotObservable { why },
            _ => match (passed, not_observable) {
                (true, None) => RequirementResult::Pass,
                (true, Some(unseen)) => RequirementResult::Partial { unseen },
                (false, why) => RequirementResult::NotObservable {
                    why: why.unwrap_or("no probe covers this requirement"),
                },
            },
        }
    }

    /// Outcomes of the probes that cover a requirement.
    fn outcomes_for(&self, id: &str) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(move |outcome| outcome.probe.requirements.contains(&id))
    }
}

/// Returns true if a failure of this weight means that the implementation does not conform.
fn is_must(requirement: &Requirement, weight: Weight) -> bool {
    requirement.level.is_must() && weight == Weight::Requirement
}

#[cfg(test)]
mod tests;
