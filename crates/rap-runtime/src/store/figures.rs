//! Statistics: the work of agents, added up by interval of ten minutes.

use std::time::Duration;

use rap_protocol::Timestamp;

/// Length of the intervals that figures are stored for.
pub(crate) const PART: Duration = Duration::from_secs(600);
/// Time for which figures are kept.
pub(crate) const KEPT: Duration = Duration::from_secs(90 * 24 * 3600);

/// Work of an agent within an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Figures {
    /// Turns that were begun by a person, an event, a late result or a timer. Unlike the wakes of a budget, these include
    /// messages of people.
    pub(crate) wakes: u64,
    /// Requests to the model that were answered.
    pub(crate) turns: u64,
    /// Requests to the model that failed.
    pub(crate) failures: u64,
    /// Time of these requests, in milliseconds.
    pub(crate) model_ms: u64,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) cached: u64,
    /// In billionths of a dollar.
    pub(crate) cost: u64,
}

impl Figures {
    /// Columns of the table, in the order of [`Figures::values`].
    pub(super) const COLUMNS: [&str; 8] =
        ["wakes", "turns", "failures", "model_ms", "input", "output", "cached", "cost"];

    pub(super) fn values(&self) -> [i64; 8] {
        let Figures { wakes, turns, failures, model_ms, input, output, cached, cost } = *self;
        [wakes, turns, failures, model_ms, input, output, cached, cost]
            .map(|value| i64::try_from(value).unwrap_or(i64::MAX))
    }

    pub(super) fn from_values(values: [i64; 8]) -> Figures {
        let [wakes, turns, failures, model_ms, input, output, cached, cost] =
            values.map(|value| u64::try_from(value).unwrap_or(0));
        Figures { wakes, turns, failures, model_ms, input, output, cached, cost }
    }

    pub(crate) fn add(&mut self, more: &Figures) {
        self.wakes += more.wakes;
        self.turns += more.turns;
        self.failures += more.failures;
        self.model_ms += more.model_ms;
        self.input += more.input;
        self.output += more.output;
        self.cached += more.cached;
        self.cost += more.cost;
    }
}

/// Figures of an agent in the interval that begins at `at`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FiguresRow {
    pub(crate) at: Timestamp,
    pub(crate) agent: String,
    pub(crate) figures: Figures,
}
