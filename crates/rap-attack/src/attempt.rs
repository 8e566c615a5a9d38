//! Attempts as values, and their results.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::stage::Stage;

/// A run of an attempt, which returns its tries.
pub(crate) type Run = Pin<Box<dyn Future<Output = Tries> + Send>>;

/// Something that an attacker tries, a bounded number of times.
pub(crate) struct Attempt {
    pub(crate) name: &'static str,
    /// Topic in the tables of docs/security.md.
    pub(crate) topic: &'static str,
    /// Condition under which the attacker succeeds, besides leaving the bounds of [`crate::watch`].
    pub(crate) success: &'static str,
    pub(crate) run: fn(Arc<Stage>) -> Run,
}

impl Attempt {
    /// Topics whose attempts use much CPU time, memory or many connections, by the set of servers on which they run.
    const COSTLY: [&[&str]; 2] =
        [&["connections"], &["callers", "events", "models", "responses", "validation"]];

    /// Returns the only set of servers on which the attempt may run, or `None` if it may run on any.
    pub(crate) fn set(&self) -> Option<usize> {
        Self::COSTLY.iter().position(|topics| topics.contains(&self.topic))
    }

    /// Without filters, every attempt matches.
    pub(crate) fn matches(&self, filters: &[String]) -> bool {
        filters.is_empty()
            || filters.iter().any(|filter| self.name.contains(filter) || self.topic.contains(filter))
    }
}

/// Makes an [`Attempt`] of a topic, its name, its success and an async function.
macro_rules! attempt {
    ($topic:expr, $name:expr, $success:expr, $run:path) => {
        $crate::attempt::Attempt {
            topic: $topic,
            name: $name,
            success: $success,
            run: |stage| Box::pin($run(stage)),
        }
    };
}
pub(crate) use attempt;

/// Tries of an attempt, and those that succeeded.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    pub(crate) count: usize,
    pub(crate) successes: Vec<String>,
    /// Part that could not be tried on this machine.
    pub(crate) note: Option<String>,
}

impl Tries {
    pub(crate) fn new() -> Tries {
        Tries::default()
    }

    /// Counts a try. `what` describes it if the attacker succeeded.
    pub(crate) fn add(&mut self, what: impl fmt::Display, succeeded: bool) {
        self.count += 1;
        if succeeded {
            self.successes.push(what.to_string());
        }
    }
}

/// Costs of an attempt.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    /// Largest memory of a process, in bytes.
    pub(crate) rss: u64,
    /// CPU time of all processes.
    pub(crate) cpu: Duration,
    /// Longest time that a bystander waited.
    pub(crate) latency: Duration,
}

/// Result of an attempt.
pub(crate) struct Outcome {
    pub(crate) name: &'static str,
    pub(crate) topic: &'static str,
    pub(crate) tries: Tries,
    pub(crate) cost: Cost,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tries = &self.tries;
        write!(f, "{}: {} tries, {} successes", self.name, tries.count, tries.successes.len())?;
        if let Some(note) = &tries.note {
            write!(f, " ({note})")?;
        }
        // A few successes say enough.
        tries.successes.iter().take(5).try_for_each(|what| write!(f, "\n            SUCCESS {what}"))
    }
}
