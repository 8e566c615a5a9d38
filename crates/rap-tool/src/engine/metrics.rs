//! What is counted, and how it reads for Prometheus.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rap_io::writer::Lane;
use rap_protocol::retry::Next;

use super::{Accepted, Engine, Refusal};
use crate::journal::outbox;

/// Counts since the process started.
#[derive(Default)]
pub(crate) struct Counters {
    accepted: AtomicU64,
    repeated: AtomicU64,
    delivered: AtomicU64,
    refused: AtomicU64,
    given_up: AtomicU64,
    retried: AtomicU64,
}

impl Counters {
    pub(super) fn took(&self, accepted: Accepted) {
        let counter = match accepted {
            Accepted::New => &self.accepted,
            Accepted::Repeat => &self.repeated,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn attempted(&self, next: Next) {
        let counter = match next {
            Next::Done => &self.delivered,
            Next::Again { .. } => &self.retried,
            Next::Refused { .. } => &self.refused,
            Next::GaveUp => &self.given_up,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Engine {
    /// All metrics in the text format of Prometheus.
    pub(crate) async fn metrics(self: &Arc<Self>) -> Result<String, Refusal> {
        let now = self.now();
        let waiting = self.writer.run(Lane::External, move |db| outbox::waiting(db, now)).await?;
        let oldest = waiting.oldest.map_or(0.0, |at| now.since(at).as_secs_f64());
        let taken = |free: usize, all: usize| (all - free.min(all)) as f64;
        let running = taken(self.calls.available_permits(), self.limits.calls);
        let subscriptions = taken(self.subscriptions.available_permits(), self.limits.subscriptions);
        let counters = &self.counters;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let rows = [
            ("rap_tool_accepted_total", "counter", "Invocations accepted.", count(&counters.accepted)),
            (
                "rap_tool_repeated_total",
                "counter",
                "Invocations that were repeats.",
                count(&counters.repeated),
            ),
            ("rap_tool_delivered_total", "counter", "Callbacks delivered.", count(&counters.delivered)),
            (
                "rap_tool_refused_total",
                "counter",
                "Callbacks refused by a runtime.",
                count(&counters.refused),
            ),
            ("rap_tool_given_up_total", "counter", "Callbacks given up.", count(&counters.given_up)),
            ("rap_tool_retried_total", "counter", "Attempts that are tried again.", count(&counters.retried)),
            ("rap_tool_running", "gauge", "Calls at work.", running),
            ("rap_tool_subscriptions", "gauge", "Active subscriptions.", subscriptions),
            (
                "rap_tool_retrying",
                "gauge",
                "Calls with a callback that waits to be tried again.",
                waiting.later,
            ),
            ("rap_tool_oldest_undelivered_seconds", "gauge", "Age of the oldest callback under way.", oldest),
        ];
        Ok(rows.iter().fold(String::new(), |mut text, (name, kind, help, value)| {
            writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}")
                .expect("bug: a String takes any text");
            text
        }))
    }
}
