//! The simulated model. Its answers are random and determined by the seed.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::{Entry, Thought, ThoughtKind, Thoughts, Usage, texts};
use serde_json::{Map, Value, json};

use super::invariants::violation;
use super::peers::tag_text;
use super::reference::ThreadIndex;
use super::state::{Sim, State};
use super::tracker::FOR_CLIENTS;
use crate::model::{Error, HistoryScope, Model, ModelAnswer, ModelCall, ModelRequest, OnDelta};
use crate::store::{WorkKind, WorkQueue};

/// The beginning of every summary.
pub(super) const SUMMARY: &str = "much was said";

pub(super) struct SimModel {
    pub(super) sim: Arc<Sim>,
    pub(super) destination: String,
}

impl std::fmt::Debug for SimModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.destination)
    }
}

/// A request that the model is answering. It ends when this is dropped, even if the runtime gave it up.
struct InFlightRequest<'a> {
    model: &'a SimModel,
    queue: WorkQueue,
    work: String,
}

impl Drop for InFlightRequest<'_> {
    fn drop(&mut self) {
        self.model.sim.state().fairness.end(&self.queue, &self.work);
    }
}

impl SimModel {
    /// Starts a request. Returns the asking thread and whether it asks for a summary.
    fn begin(&self, request: &ModelRequest) -> Option<(ThreadIndex, bool, InFlightRequest<'_>)> {
        let mut state = self.sim.state();
        let state = &mut *state;
        let queue = WorkQueue { kind: WorkKind::Ask, destination: self.destination.clone() };
        let asking = tokio::task::try_id().and_then(|task| state.asking.get(&task).copied());
        let Some((index, up_to)) = asking else {
            state.record(violation("I8: a request of an unknown thread".into()));
            return None;
        };
        let summary = request.tools.is_empty();
        let work = format!("t{index} {}", request.turn);
        state.note(|| format!("ask t{index} turn {} up to {up_to}, summary: {summary}", request.turn));
        let checked = state.checker.on_model_request(&state.reference, index, request.turn, up_to, summary);
        let begun = state.fairness.begin(&queue, &work, state.now());
        state.record(checked.and(begun));
        Some((index, summary, InFlightRequest { model: self, queue, work }))
    }
}

#[async_trait]
impl Model for SimModel {
    async fn ask(&self, request: ModelRequest, _on_delta: &mut OnDelta<'_>) -> Result<ModelAnswer, Error> {
        let Some((index, summary, in_flight)) = self.begin(&request) else {
            return Err(Error::refused("unknown thread"));
        };
        let (pause, fails) = {
            let mut state = self.sim.state();
            let slow = if state.chaos_over { 0 } else { state.chances.server_faults[2] };
            let pause = if state.rng.percent(slow) { 20_000 } else { 60 };
            let pause = Duration::from_millis(state.rng.below(pause) as u64);
            (pause, !state.chaos_over && state.rng.percent(8))
        };
        tokio::time::sleep(pause).await;
        let work = in_flight.work.clone();
        drop(in_flight);
        let mut state = self.sim.state();
        if fails {
            let error = match state.rng.below(10) {
                0..=5 => Error::retry("busy"),
                6 => Error::Retry {
                    why: "busy".into(),
                    retry_after: Some(Duration::from_secs(state.rng.below(60) as u64)),
                },
                _ => Error::refused("no"),
            };
            // If a summary fails, the request is asked without one, so this is not a retry.
            if matches!(error, Error::Retry { .. }) && !summary {
                let now = state.now();
                state.fairness.failed(&work, now);
            }
            return Err(error);
        }
        if summary {
            return state.summarise();
        }
        let likely = state.chances.prompt_too_long;
        let long = !state.chaos_over && state.reference.threads[index].head.summarisable_up_to().is_some();
        if long && state.rng.percent(likely) {
            return Err(Error::TooLong { why: "too long".into(), window: None });
        }
        Ok(state.make_answer(index))
    }

    fn history_scope(&self) -> HistoryScope {
        HistoryScope::Full
    }

    fn destination(&self) -> &str {
        &self.destination
    }
}

fn usage(state: &mut State) -> Usage {
    Usage { input: 5 + state.rng.below(10) as u64, output: 2, cached: 1, ..Usage::default() }
}

impl State {
    /// Makes a summary, which may be empty or far too long.
    fn summarise(&mut self) -> Result<ModelAnswer, Error> {
        let usage = usage(self);
        let text = match self.rng.below(12) {
            0 if !self.chaos_over => return Err(Error::retry("busy")),
            1 if !self.chaos_over => String::new(),
            2 if self.rng.percent(2) => SUMMARY.repeat(6000),
            _ => SUMMARY.into(),
        };
        Ok(ModelAnswer { text, usage, ..ModelAnswer::default() })
    }

    fn make_answer(&mut self, index: ThreadIndex) -> ModelAnswer {
        let mut calls: Vec<ModelCall> = Vec::new();
        if !self.chaos_over && self.rng.percent(self.chances.tool_calls) {
            for _ in 0..=self.rng.below(3) {
                let call = self.call(index, &calls);
                calls.push(call);
            }
        }
        let tag = self.peers.next_tag();
        // Every second answer has thoughts.
        let kind = ThoughtKind::Readable { text: "hm".into(), signature: "s".into() };
        let thoughts = Thoughts {
            model: "m".into(),
            parts: vec![Thought { at: 0, calls: 0, kind }],
            ..Thoughts::default()
        };
        let thoughts = tag.is_multiple_of(2).then_some(thoughts);
        ModelAnswer { text: tag_text(tag), calls, thoughts, usage: usage(self) }
    }

    fn call(&mut self, index: ThreadIndex, batch: &[ModelCall]) -> ModelCall {
        let number = self.peers.next_number();
        let id = match self.rng.below(8) {
            0 => String::new(),
            1 => format!("rap_{}", self.rng.below(9)),
            2 => batch.last().map_or("c".into(), |call| call.id.clone()),
            _ => format!("c{number}"),
        };
        let given = Map::from_iter([("of".to_owned(), Value::from(number))]);
        let (name, arguments) = match self.rng.below(20) {
            0 => ("nonsense".to_owned(), Ok(given)),
            1 => ("look0".into(), Err("{".into())),
            2 => ("look1".into(), Ok(Map::from_iter([("of".to_owned(), "text".into())]))),
            3..=8 => self.built_in(index, batch),
            9 | 10 => (format!("wipe{}", self.rng.below(2)), Ok(given)),
            11 => (FOR_CLIENTS.into(), Ok(given)),
            _ => (format!("look{}", self.rng.below(2)), Ok(given)),
        };
        ModelCall { id, name, arguments }
    }

    fn built_in(
        &mut self,
        index: ThreadIndex,
        batch: &[ModelCall],
    ) -> (String, Result<Map<String, Value>, String>) {
        let spawned = batch.iter().any(|call| call.name == texts::SPAWN_THREAD);
        let room = self.reference.threads.len() < 2 * super::chaos::THREADS && !spawned;
        let (name, arguments) = match self.rng.below(12) {
            0 | 1 if room => (texts::SPAWN_THREAD, json!({"instructions": "dig"})),
            2 => (texts::REPORT_TO_PARENT, json!({"report": self.tagged_text()})),
            3 if self.rng.percent(40) => {
                let report = self.rng.percent(50).then(|| self.tagged_text());
                (texts::CLOSE_THREAD, report.map_or(json!({}), |report| json!({"report": report})))
            }
            4 | 5 => {
                let children: Vec<String> =
                    self.reference.threads[index].head.children().map(ToString::to_string).collect();
                let child = self.rng.pick(&children).cloned().unwrap_or_else(|| "nobody".into());
                (texts::SEND_MESSAGE_TO_CHILD, json!({"thread_id": child, "message": self.tagged_text()}))
            }
            6 => (texts::SLEEP, json!({"seconds": self.rng.below(40)})),
            7 => (texts::WAIT, json!({})),
            8 => {
                let cron = ["* * * * *", "*/20 * * * * *", "0 0 1 1 *"][self.rng.below(3)];
                (texts::SCHEDULE, json!({"cron": cron, "text": super::tracker::TICK}))
            }
            _ => (texts::CANCEL_SUBSCRIPTION, json!({"tool_call_id": self.subscription(index)})),
        };
        let Value::Object(arguments) = arguments else { unreachable!("an object") };
        (name.into(), Ok(arguments))
    }

    fn tagged_text(&mut self) -> String {
        tag_text(self.peers.next_tag())
    }

    /// Returns an id that the model uses as one of its subscriptions. It may be wrong.
    fn subscription(&mut self, index: ThreadIndex) -> String {
        let from = if self.rng.percent(85) { index } else { self.rng.below(self.reference.threads.len()) };
        let head = &self.reference.threads[from].head;
        let active: Vec<String> = head.subscriptions().iter().map(|active| active.id.to_string()).collect();
        self.rng.pick(&active).cloned().unwrap_or_else(|| "no such thing".into())
    }

    /// Passes a history that is sent to the model to the visitor.
    pub(super) fn show(&mut self, entries: &[Entry]) {
        if let Some(visitor) = &mut self.visitor {
            visitor(entries);
        }
    }
}
