//! Results of the probes by requirement, as a table, as JSON and as JUnit.
//!
//! Invariants: a requirement passes only if a probe that covers it passed, no probe failed, and the requirement is not
//! in the list of unobservable ones. An exchange shows no callback URL, no token and no auth URL.

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
    /// Ids of the requirements that the probe covers. A probe without requirements checks this project's interpretation
    /// of a point that the specification leaves open; its failures are reported as warnings and never count as
    /// failures.
    pub requirements: &'static [&'static str],
    /// Behaviour that the probe expects, as a sentence.
    pub checks: &'static str,
}

/// Result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The implementation behaves as expected.
    Pass,
    /// The implementation does not behave as expected.
    Fail {
        /// Description of the failure, as a sentence.
        what: String,
        /// Requests and answers that show the failure, in order.
        exchanges: Vec<Exchange>,
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
        Verdict::Fail { what: what.into(), exchanges }
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

/// Requirements that no probe can show to be met, each with the reason. A probe may still show that one of them is not
/// met.
pub type Unobservable = [(&'static str, &'static str)];

/// Results of all probes of one implementation.
#[derive(Debug)]
pub struct Report {
    subject: Subject,
    target: String,
    unobservable: &'static Unobservable,
    outcomes: Vec<Outcome>,
    began: Instant,
    took: Duration,
}

/// Result for one requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequirementResult<'a> {
    /// At least one probe passed, none failed, and the requirement can be observed completely.
    Pass,
    /// A probe failed.
    Fail,
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
    /// Requirements of level MUST or MUST NOT that are not met.
    pub failed_must: usize,
    /// Requirements of other levels that are not met.
    pub failed_should: usize,
    /// Requirements that cannot be observed.
    pub not_observable: usize,
}

impl Report {
    /// Creates an empty report and starts its clock. `target` is the name of the implementation in the report.
    pub fn new(subject: Subject, target: impl Into<String>, unobservable: &'static Unobservable) -> Report {
        Report {
            subject,
            target: target.into(),
            unobservable,
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

    /// Returns the number of requirements by result.
    pub fn count(&self) -> Count {
        let mut count = Count::default();
        for (requirement, result) in self.requirement_results() {
            match result {
                RequirementResult::Pass => count.passed += 1,
                RequirementResult::Fail if requirement.level.is_must() => count.failed_must += 1,
                RequirementResult::Fail => count.failed_should += 1,
                RequirementResult::NotObservable { .. } => count.not_observable += 1,
            }
        }
        count
    }

    /// Returns true if the implementation conforms, as far as can be observed from outside.
    pub fn is_good(&self, strictness: Strictness) -> bool {
        let Count { failed_must, failed_should, .. } = self.count();
        failed_must == 0 && (failed_should == 0 || strictness == Strictness::Lenient)
    }

    fn result_of(&self, id: &str) -> RequirementResult<'_> {
        let mut not_observable = None;
        let mut passed = false;
        for Outcome { verdict, .. } in self.outcomes_for(id) {
            match verdict {
                Verdict::Fail { .. } => return RequirementResult::Fail,
                Verdict::Pass => passed = true,
                Verdict::NotObservable { why } => not_observable = not_observable.or(Some(why.as_str())),
            }
        }
        let reason = self.unobservable.iter().find(|(known, _)| *known == id).map(|(_, why)| *why);
        match reason {
            Some(why) => RequirementResult::NotObservable { why },
            None if passed => RequirementResult::Pass,
            None => RequirementResult::NotObservable {
                why: not_observable.unwrap_or("no probe covers this requirement"),
            },
        }
    }

    /// Outcomes of the probes that cover a requirement.
    fn outcomes_for(&self, id: &str) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(move |outcome| outcome.probe.requirements.contains(&id))
    }
}

#[cfg(test)]
mod tests;
