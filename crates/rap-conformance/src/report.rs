//! What the probes saw, by requirement, as a table, as JSON and as JUnit.
//!
//! Invariants: a requirement passes only if a probe that is about it passed, none failed, and nothing of it remains
//! out of sight; an exchange
//! shows no callback URL, no token and no auth URL.

mod exchange;
mod json;
mod junit;
mod table;

use std::time::{Duration, Instant};

pub use exchange::{Exchange, Shown};

use crate::requirements::{self, Requirement, Who};

/// One observation that can be made of an implementation.
#[derive(Debug, PartialEq, Eq)]
pub struct Probe {
    /// A name of its own, in lower case with underscores.
    pub name: &'static str,
    /// The ids of the requirements that it is about. A probe without any is about this project's reading of what the
    /// specification leaves open: what it finds is told, and never counts against an implementation.
    pub requirements: &'static [&'static str],
    /// What it checks, in a sentence.
    pub checks: &'static str,
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is as it should be.
    Pass,
    /// It is not.
    Fail {
        /// What is wrong, in a sentence.
        what: String,
        /// What was said, in order, that shows it.
        exchanges: Vec<Exchange>,
    },
    /// This can not be seen from outside, or not with what the checker was given.
    NotObservable {
        /// Why, and what would help.
        why: String,
    },
}

impl Verdict {
    /// It is not as it should be.
    pub fn fail(what: impl Into<String>, exchanges: Vec<Exchange>) -> Verdict {
        Verdict::Fail { what: what.into(), exchanges }
    }

    /// It can not be seen.
    pub fn not_observable(why: impl Into<String>) -> Verdict {
        Verdict::NotObservable { why: why.into() }
    }
}

/// A probe with what it found.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The probe.
    pub probe: &'static Probe,
    /// What it found.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// How far a run is. It is told to whoever wants to show it.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A probe begins.
    Begins {
        /// The probe.
        probe: &'static Probe,
        /// Its number, from 1.
        number: usize,
        /// Of how many.
        of: usize,
    },
    /// A probe is done.
    Done(&'a Outcome),
}

/// What is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A tool server.
    Tool,
    /// A runtime.
    Runtime,
}

impl Subject {
    /// The requirements that it has to meet.
    pub fn requirements(self) -> impl Iterator<Item = &'static Requirement> {
        let who = match self {
            Subject::Tool => Who::Tool,
            Subject::Runtime => Who::Runtime,
        };
        requirements::all()
            .iter()
            .filter(move |requirement| requirement.who == who || requirement.who == Who::Both)
    }

    /// How it is called on the command line.
    fn word(self) -> &'static str {
        match self {
            Subject::Tool => "tool",
            Subject::Runtime => "runtime",
        }
    }
}

/// Whether SHOULD counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// What does not meet a SHOULD gets a warning.
    Lenient,
    /// What does not meet a SHOULD fails.
    Strict,
}

/// Requirements that no probe can show to be met, each with the reason why it can not be seen from outside. A probe
/// may still show that one is not.
pub type Unobservable = [(&'static str, &'static str)];

/// What the probes saw of one implementation.
#[derive(Debug)]
pub struct Report {
    subject: Subject,
    target: String,
    unobservable: &'static Unobservable,
    outcomes: Vec<Outcome>,
    began: Instant,
    took: Duration,
}

/// How an implementation stands to one requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing<'a> {
    /// Probes are about it, at least one passed, none failed, and they can see all of it.
    Pass,
    /// It is not met.
    Fail,
    /// Nothing was seen of it.
    NotObservable {
        /// Why not.
        why: &'a str,
    },
}

/// How many requirements stand how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Count {
    /// These are met, as far as can be seen.
    pub passed: usize,
    /// These MUST are not met.
    pub failed_must: usize,
    /// These others are not met.
    pub failed_should: usize,
    /// Nothing can be seen of these.
    pub not_observable: usize,
}

impl Report {
    /// A report on nothing yet; its time begins now. `target` is how the implementation is called in it.
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

    /// Calls the implementation something else, once more is known of it.
    pub fn set_target(&mut self, target: impl Into<String>) {
        self.target = target.into();
    }

    /// Adds what a probe found.
    pub fn add(&mut self, outcome: Outcome) {
        self.took = self.began.elapsed();
        self.outcomes.push(outcome);
    }

    /// What each probe found, in the order in which they ran.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// How the implementation stands to each requirement, in the order of the specification.
    pub fn standings(&self) -> impl Iterator<Item = (&'static Requirement, Standing<'_>)> {
        self.subject.requirements().map(|requirement| (requirement, self.standing(requirement.id)))
    }

    /// How many requirements stand how.
    pub fn count(&self) -> Count {
        let mut count = Count::default();
        for (requirement, standing) in self.standings() {
            match standing {
                Standing::Pass => count.passed += 1,
                Standing::Fail if requirement.level.is_must() => count.failed_must += 1,
                Standing::Fail => count.failed_should += 1,
                Standing::NotObservable { .. } => count.not_observable += 1,
            }
        }
        count
    }

    /// Whether the implementation may be called conforming, as far as can be seen from outside.
    pub fn is_good(&self, strictness: Strictness) -> bool {
        let Count { failed_must, failed_should, .. } = self.count();
        failed_must == 0 && (failed_should == 0 || strictness == Strictness::Lenient)
    }

    fn standing(&self, id: &str) -> Standing<'_> {
        let mut hidden = None;
        let mut passed = false;
        for Outcome { verdict, .. } in self.about(id) {
            match verdict {
                Verdict::Fail { .. } => return Standing::Fail,
                Verdict::Pass => passed = true,
                Verdict::NotObservable { why } => hidden = hidden.or(Some(why.as_str())),
            }
        }
        let reason = self.unobservable.iter().find(|(known, _)| *known == id).map(|(_, why)| *why);
        match reason {
            Some(why) => Standing::NotObservable { why },
            None if passed => Standing::Pass,
            None => Standing::NotObservable { why: hidden.unwrap_or("no probe is about it") },
        }
    }

    /// The probes that are about a requirement.
    fn about(&self, id: &str) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(move |outcome| outcome.probe.requirements.contains(&id))
    }
}

#[cfg(test)]
mod tests;
