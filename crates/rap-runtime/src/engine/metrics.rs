//! What is counted and measured, and how it reads for Prometheus. Labels are words of ours, and few.

use std::time::Instant;

use rap_io::metrics::{Counter, Exposition, Histogram};

use super::Engine;
use crate::model::{self, Answer};
use crate::store::{self, COUNTED, DeliveryKind, DeliveryOutcome};

pub(crate) struct Metrics {
    /// By kind and outcome, in the order of their lists.
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
    first: Histogram,
    whole: Histogram,
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
                first: Histogram::of_seconds(),
                whole: Histogram::of_seconds(),
            },
        }
    }
}

impl Metrics {
    /// An attempt at a delivery has ended so.
    pub(crate) fn delivery(&self, kind: DeliveryKind, outcome: DeliveryOutcome) {
        self.deliveries[kind as usize][outcome as usize].count();
    }

    /// A question goes to the model now.
    pub(super) fn asking(&self) -> Asked<'_> {
        Asked { metrics: &self.model, began: Instant::now(), silent: true }
    }
}

/// A question that is with the model.
pub(super) struct Asked<'a> {
    metrics: &'a ModelMetrics,
    began: Instant,
    silent: bool,
}

impl Asked<'_> {
    pub(super) fn said_something(&mut self) {
        if std::mem::take(&mut self.silent) {
            self.metrics.first.took(self.began.elapsed());
        }
    }

    pub(super) fn ended(&self, answer: Result<Answer, model::Error>) -> Result<Answer, model::Error> {
        let metrics = self.metrics;
        match &answer {
            Ok(answer) => {
                metrics.answered.count();
                metrics.whole.took(self.began.elapsed());
                metrics.input.add(answer.usage.input);
                metrics.cached.add(answer.usage.cached);
                metrics.output.add(answer.usage.output);
            }
            Err(model::Error::Retry { .. }) => metrics.failed.count(),
            Err(model::Error::Refused { .. } | model::Error::TooLong { .. }) => metrics.refused.count(),
        }
        answer
    }
}

impl Engine {
    /// All metrics in the text format of Prometheus.
    pub(crate) async fn exposition(&self) -> Result<String, store::Error> {
        let census = self.store.census().await?;
        let mut text = Exposition::default();
        let threads = census.threads.iter().map(|(status, count)| (label("status", status), count));
        text.family("rap_threads", "gauge", "Threads by status.", threads);
        text.gauge("rap_threads_set_aside", "Threads whose step panicked.", census.set_aside);
        text.gauge("rap_streams", "Event streams that are open.", self.hub.listeners());
        self.store.expose(&mut text);
        let waiting = census.waiting.iter().map(|(kind, count)| (label("kind", kind), count));
        let help = format!("What is on disk and still to be done, counted up to {COUNTED}.");
        text.family("rap_effects_waiting", "gauge", &help, waiting);
        let under_way =
            self.dispatcher.running().into_iter().chain([("notify", self.notifications.running())]);
        let under_way = under_way.map(|(kind, count)| (label("kind", kind), count));
        text.family("rap_effects_under_way", "gauge", "What is being done.", under_way);
        self.delivering(&mut text);
        self.asking(&mut text);
        Ok(text.finish())
    }

    fn delivering(&self, text: &mut Exposition) {
        let metrics = &self.metrics;
        let counts = DeliveryKind::ALL.iter().zip(&metrics.deliveries).flat_map(|(kind, counts)| {
            let sample = |(outcome, count): (&DeliveryOutcome, &Counter)| {
                (format!("kind=\"{}\",outcome=\"{}\"", kind.as_str(), outcome.as_str()), count.get())
            };
            DeliveryOutcome::ALL.iter().zip(counts).map(sample).collect::<Vec<_>>()
        });
        text.family("rap_deliveries_total", "counter", "Attempts at deliveries.", counts);
        text.histogram("rap_invoke_seconds", "How long tool servers took to answer.", &metrics.invoke);
        let help = "From the arrival of a callback until it is on disk.";
        text.histogram("rap_callback_seconds", help, &metrics.callback);
    }

    fn asking(&self, text: &mut Exposition) {
        let model = &self.metrics.model;
        let outcomes =
            [("answered", &model.answered), ("failed", &model.failed), ("refused", &model.refused)];
        let outcomes = outcomes.map(|(outcome, count)| (label("outcome", outcome), count.get()));
        text.family("rap_model_questions_total", "counter", "Questions to the model.", outcomes);
        let tokens = [("input", &model.input), ("cached", &model.cached), ("output", &model.output)];
        let tokens = tokens.map(|(kind, count)| (label("kind", kind), count.get()));
        let help = "Tokens of answers; those that were cached are part of the input.";
        text.family("rap_model_tokens_total", "counter", help, tokens);
        let help = "From a question until the first words of its answer.";
        text.histogram("rap_model_first_words_seconds", help, &model.first);
        text.histogram("rap_model_seconds", "From a question until its whole answer.", &model.whole);
    }
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{value}\"")
}
