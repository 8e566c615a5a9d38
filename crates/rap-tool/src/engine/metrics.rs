//! Metrics of a tool server, in the Prometheus text format.

use std::sync::Arc;

use rap_io::metrics::{Counter, Exposition};
use rap_io::writer::JobClass;
use rap_protocol::retry::Next;

use super::{Accepted, Engine, Refusal};
use crate::journal::outbox;

/// Counters since the process started.
#[derive(Default)]
pub(crate) struct Counters {
    accepted: Counter,
    repeated: Counter,
    delivered: Counter,
    refused: Counter,
    given_up: Counter,
    retried: Counter,
}

impl Counters {
    pub(super) fn count_accepted(&self, accepted: Accepted) {
        match accepted {
            Accepted::New => self.accepted.count(),
            Accepted::Repeat => self.repeated.count(),
        }
    }

    pub(super) fn count_attempt(&self, next: Next) {
        match next {
            Next::Done => self.delivered.count(),
            Next::Retry { .. } => self.retried.count(),
            Next::Refused { .. } => self.refused.count(),
            Next::GaveUp => self.given_up.count(),
        }
    }
}

impl Engine {
    /// Returns all metrics in the Prometheus text format.
    pub(crate) async fn metrics(self: &Arc<Self>) -> Result<String, Refusal> {
        let now = self.now();
        let stats = self.writer.run(JobClass::External, outbox::stats).await?;
        let oldest = stats.oldest.map_or(0.0, |at| now.since(at).as_secs_f64());
        let counters = &self.counters;
        let mut text = Exposition::default();
        text.counter("rap_tool_accepted_total", "Invocations accepted.", &counters.accepted);
        text.counter("rap_tool_repeated_total", "Invocations that were repeats.", &counters.repeated);
        text.counter("rap_tool_delivered_total", "Callbacks delivered.", &counters.delivered);
        text.counter("rap_tool_refused_total", "Callbacks refused by a runtime.", &counters.refused);
        text.counter("rap_tool_given_up_total", "Callbacks given up.", &counters.given_up);
        text.counter(
            "rap_tool_retried_total",
            "Failed callback attempts that are retried.",
            &counters.retried,
        );
        text.gauge("rap_tool_running", "Running calls.", self.calls.used());
        text.gauge("rap_tool_subscriptions", "Active subscriptions.", self.subscriptions.used());
        let help = "Calls with a callback that waits for a retry, up to 100,000.";
        text.gauge("rap_tool_retrying", help, stats.retrying);
        let help = "Age of the oldest undelivered callback, in seconds.";
        text.gauge("rap_tool_oldest_undelivered_seconds", help, oldest);
        Ok(text.finish())
    }
}
