//! Metrics of the engine and their Prometheus text format. All label values come from fixed sets or from the configuration.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use rap_io::metrics::{Counter, Exposition, Histogram, label};

use super::Engine;
use crate::model::{self, Model, ModelAnswer};
use crate::settings::Settings;
use crate::store::{self, COUNT_LIMIT, DeliveryKind, DeliveryOutcome};

pub(crate) struct Metrics {
    /// Indexed by kind and outcome, in the order of their `ALL` lists.
    deliveries: [[Counter; DeliveryOutcome::ALL.len()]; DeliveryKind::ALL.len()],
    pub(super) invoke: Histogram,
    pub(crate) callback: Histogram,
    first_text: Histogram,
    total: Histogram,
    /// The configured models of each agent, by their positions in its list.
    models: HashMap<String, Vec<ModelMetrics>>,
}

/// Requests of one agent to one of its models.
struct ModelMetrics {
    /// Labels `agent`, `model` and `provider`. Two models of an agent have the same ones if only their servers differ.
    labels: String,
    answered: Counter,
    failed: Counter,
    refused: Counter,
    input: Counter,
    cached: Counter,
    output: Counter,
    /// In billionths of a dollar.
    cost: Counter,
}

impl Metrics {
    pub(super) fn new(settings: &Settings) -> Self {
        let models = settings.agents.iter().map(|agent| {
            let models = settings.models(agent).map(|model| ModelMetrics::new(&agent.name, model));
            (agent.name.clone(), models.collect())
        });
        Metrics {
            deliveries: Default::default(),
            invoke: Histogram::of_seconds(),
            callback: Histogram::of_seconds(),
            first_text: Histogram::of_seconds(),
            total: Histogram::of_seconds(),
            models: models.collect(),
        }
    }

    /// Returns the metrics of an agent's model. `None` for an agent that is not configured; it asks no model.
    fn model(&self, agent: &str, position: usize) -> Option<&ModelMetrics> {
        self.models.get(agent)?.get(position)
    }

    /// Counts an attempt at a delivery.
    pub(crate) fn count_delivery(&self, kind: DeliveryKind, outcome: DeliveryOutcome) {
        self.deliveries[kind as usize][outcome as usize].count();
    }

    /// Counts the tokens of a request to the model without an answer.
    pub(super) fn count_unused(&self, agent: &str, position: usize, usage: &model::Usage) {
        if let Some(model) = self.model(agent, position) {
            model.add_usage(usage);
        }
    }

    /// Starts to measure a request to the model at a position of the agent's list.
    pub(super) fn start_request(&self, agent: &str, position: usize) -> RequestTimer<'_> {
        let model = self.model(agent, position);
        RequestTimer { metrics: self, model, began: Instant::now(), awaiting_text: true }
    }
}

/// Measures one request to the model.
pub(super) struct RequestTimer<'a> {
    metrics: &'a Metrics,
    model: Option<&'a ModelMetrics>,
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
        if answer.is_ok() {
            self.metrics.total.observe_duration(self.began.elapsed());
        }
        if let Some(model) = self.model {
            model.count(&answer);
        }
        answer
    }
}

impl ModelMetrics {
    fn new(agent: &str, model: &dyn Model) -> Self {
        let labels = [("agent", agent), ("model", model.name()), ("provider", model.provider())];
        ModelMetrics {
            labels: labels.map(|(name, value)| label(name, value)).join(","),
            answered: Counter::default(),
            failed: Counter::default(),
            refused: Counter::default(),
            input: Counter::default(),
            cached: Counter::default(),
            output: Counter::default(),
            cost: Counter::default(),
        }
    }

    fn count(&self, answer: &Result<ModelAnswer, model::Error>) {
        match answer {
            Ok(answer) => {
                self.answered.count();
                self.add_usage(&answer.usage);
            }
            Err(model::Error::Retry { .. }) => self.failed.count(),
            Err(model::Error::Refused { .. } | model::Error::TooLong { .. }) => self.refused.count(),
        }
    }

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
        if let Some(telemetry) = &self.telemetry {
            telemetry.expose(&mut text);
        }
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
        let metrics = &self.metrics;
        let outcomes: [Part; 3] = [
            ("outcome=\"answered\",", |model| &model.answered),
            ("outcome=\"failed\",", |model| &model.failed),
            ("outcome=\"refused\",", |model| &model.refused),
        ];
        let help = "Requests to models, by agent and model.";
        text.family("rap_model_questions_total", "counter", help, metrics.by_model(&outcomes));
        let tokens: [Part; 3] = [
            ("kind=\"input\",", |model| &model.input),
            ("kind=\"cached\",", |model| &model.cached),
            ("kind=\"output\",", |model| &model.output),
        ];
        let help =
            "Tokens used by requests to models, by agent and model. Cached tokens are part of the input.";
        text.family("rap_model_tokens_total", "counter", help, metrics.by_model(&tokens));
        let help =
            "Cost of requests to models in US dollars, by agent and model, as far as prices are known.";
        let costs = metrics.by_model(&[("", |model| &model.cost)]);
        let costs = costs.into_iter().map(|(labels, billionths)| (labels, billionths as f64 / 1e9));
        text.family("rap_model_cost_dollars_total", "counter", help, costs);
        let help = "Time from a request until the first text of its answer.";
        text.histogram("rap_model_first_words_seconds", help, &metrics.first_text);
        text.histogram("rap_model_seconds", "Time from a request until its complete answer.", &metrics.total);
    }
}

/// A label with a comma after it, and the counter that it stands for.
type Part = (&'static str, fn(&ModelMetrics) -> &Counter);

impl Metrics {
    /// Returns the counters of all models, summed up where the labels are the same.
    fn by_model(&self, parts: &[Part]) -> BTreeMap<String, u64> {
        let mut samples = BTreeMap::new();
        for model in self.models.values().flatten() {
            for (part, counter) in parts {
                *samples.entry(format!("{part}{}", model.labels)).or_default() += counter(model).get();
            }
        }
        samples
    }
}
