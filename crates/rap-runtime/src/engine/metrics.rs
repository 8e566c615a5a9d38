//! Metrics of the engine and their Prometheus text format. All label values come from fixed sets.

use std::time::{Duration, Instant};

use rap_io::metrics::{Counter, Exposition, Histogram};

use super::Engine;
use crate::model::{self, ModelAnswer};
use crate::store::{self, COUNT_LIMIT, DeliveryKind, DeliveryOutcome};

pub(crate) struct Metrics {
    /// Indexed by kind and outcome, in the order of their `ALL` lists.
    deliveries: [[Counter; DeliveryOutcome::ALL.len()]; DeliveryKind::ALL.len()],
    pub(super) invoke: Histogram,
    pub(crate) callback: Histogram,
    model: ModelMetrics,
}

struct ModelMetrics {
    answered: Counter,
    failed: Counter,
    refused: Counter,
    input: Counter,
    cached: Counter,
    output: Counter,
    /// In billionths of a dollar.
    cost: Counter,
    first_text: Histogram,
    total: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics {
            deliveries: Default::default(),
            invoke: Histogram::of_seconds(),
            callback: Histogram::of_seconds(),
            model: ModelMetrics {
                answered: Counter::default(),
                failed: Counter::default(),
                refused: Counter::default(),
                input: Counter::default(),
                cached: Counter::default(),
                output: Counter::default(),
                cost: Counter::default(),
                first_text: Histogram::of_seconds(),
                total: Histogram::of_seconds(),
            },
        }
    }
}

impl Metrics {
    /// Counts an attempt at a delivery.
    pub(crate) fn count_delivery(&self, kind: DeliveryKind, outcome: DeliveryOutcome) {
        self.deliveries[kind as usize][outcome as usize].count();
    }

    /// Counts the tokens of a request to the model without an answer.
    pub(super) fn count_unused(&self, usage: &model::Usage) {
        self.model.add_usage(usage);
    }

    /// Starts to measure a request to the model.
    pub(super) fn start_request(&self) -> RequestTimer<'_> {
        RequestTimer { metrics: &self.model, began: Instant::now(), awaiting_text: true }
    }
}

/// Measures one request to the model.
pub(super) struct RequestTimer<'a> {
    metrics: &'a ModelMetrics,
    began: Instant,
    awaiting_text: bool,
}

impl RequestTimer<'_> {
    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn on_first_text(&mut self) {
        if std::mem::take(&mut self.awaiting_text) {
            self.metrics.first_text.observe_duration(self.began.elapsed());
        }
    }

    pub(super) fn finish(
        &self,
        answer: Result<ModelAnswer, model::Error>,
    ) -> Result<ModelAnswer, model::Error> {
        let metrics = self.metrics;
        match &answer {
            Ok(answer) => {
                metrics.answered.count();
                metrics.total.observe_duration(self.began.elapsed());
                metrics.add_usage(&answer.usage);
            }
            Err(model::Error::Retry { .. }) => metrics.failed.count(),
            Err(model::Error::Refused { .. } | model::Error::TooLong { .. }) => metrics.refused.count(),
        }
        answer
    }
}

impl ModelMetrics {
    fn add_usage(&self, usage: &model::Usage) {
        self.input.add(usage.input);
        self.cached.add(usage.cached);
        self.output.add(usage.output);
        self.cost.add(usage.cost);
    }
}

impl Engine {
    /// Returns all metrics in the Prometheus text format.
    pub(crate) async fn exposition(&self) -> Result<String, store::Error> {
        let counts = self.store.counts().await?;
        let mut text = Exposition::default();
        let threads = counts.threads.iter().map(|(status, count)| (label("status", status), count));
        text.family("rap_threads", "gauge", "Threads by status.", threads);
        let set_aside = counts.disabled + counts.damaged as usize;
        let help = "Threads whose step panicked, or whose stored rows are damaged.";
        text.gauge("rap_threads_set_aside", help, set_aside);
        text.gauge("rap_streams", "Open event streams.", self.hub.listener_count());
        text.gauge("rap_nodes", "Nodes that share the database.", self.nodes().await?.len());
        self.store.expose(&mut text);
        let waiting = counts.waiting.iter().map(|(kind, count)| (label("kind", kind), count));
        let help = format!("Stored effects that are not done yet, counted up to {COUNT_LIMIT}.");
        text.family("rap_effects_waiting", "gauge", &help, waiting);
        let in_progress =
            self.dispatcher.in_progress().into_iter().chain([("notify", self.notifications.in_progress())]);
        let in_progress = in_progress.map(|(kind, count)| (label("kind", kind), count));
        text.family("rap_effects_under_way", "gauge", "Effects that are in progress.", in_progress);
        self.expose_deliveries(&mut text);
        self.expose_model(&mut text);
        Ok(text.finish())
    }

    fn expose_deliveries(&self, text: &mut Exposition) {
        let metrics = &self.metrics;
        let counts = DeliveryKind::ALL.iter().zip(&metrics.deliveries).flat_map(|(kind, counts)| {
            let sample = |(outcome, count): (&DeliveryOutcome, &Counter)| {
                (format!("kind=\"{}\",outcome=\"{}\"", kind.as_str(), outcome.as_str()), count.get())
            };
            DeliveryOutcome::ALL.iter().zip(counts).map(sample).collect::<Vec<_>>()
        });
        text.family("rap_deliveries_total", "counter", "Attempts at deliveries.", counts);
        text.histogram(
            "rap_invoke_seconds",
            "Time until a tool server answers an invocation.",
            &metrics.invoke,
        );
        let help = "Time from the arrival of a callback until it is stored.";
        text.histogram("rap_callback_seconds", help, &metrics.callback);
    }

    fn expose_model(&self, text: &mut Exposition) {
        let model = &self.metrics.model;
        let outcomes =
            [("answered", &model.answered), ("failed", &model.failed), ("refused", &model.refused)];
        let outcomes = outcomes.map(|(outcome, count)| (label("outcome", outcome), count.get()));
        text.family("rap_model_questions_total", "counter", "Requests to the model.", outcomes);
        let tokens = [("input", &model.input), ("cached", &model.cached), ("output", &model.output)];
        let tokens = tokens.map(|(kind, count)| (label("kind", kind), count.get()));
        let help = "Tokens used by requests to the model. Cached tokens are part of the input.";
        text.family("rap_model_tokens_total", "counter", help, tokens);
        let help = "Cost of requests to the model in US dollars, as far as prices are known.";
        let dollars = model.cost.get() as f64 / 1e9;
        text.family("rap_model_cost_dollars_total", "counter", help, [(String::new(), dollars)]);
        let help = "Time from a request until the first text of its answer.";
        text.histogram("rap_model_first_words_seconds", help, &model.first_text);
        text.histogram("rap_model_seconds", "Time from a request until its complete answer.", &model.total);
    }
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{value}\"")
}
