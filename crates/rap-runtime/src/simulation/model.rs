//! The simulated model: what it says is drawn from the seed.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::{Entry, Thought, ThoughtKind, Thoughts, Usage, words};
use serde_json::{Map, Value, json};

use super::disk::Place;
use super::invariants::broken;
use super::outside::text_of;
use super::state::{Sim, State};
use super::watch::FOR_CLIENTS;
use crate::model::{Answer, Error, Model, ModelCall, OnDelta, Question, Wants};
use crate::store::{WorkKind, WorkQueue};

/// What every summary begins with.
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

/// A question that the model works on. It ends when this is dropped, also if the runtime gave it up.
struct Asked<'a> {
    model: &'a SimModel,
    queue: WorkQueue,
    work: String,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.model.sim.state().fairness.end(&self.queue, &self.work);
    }
}

impl SimModel {
    /// The thread that asks, and whether it wants a summary.
    fn begin(&self, question: &Question) -> Option<(Place, bool, Asked<'_>)> {
        let mut state = self.sim.state();
        let state = &mut *state;
        let queue = WorkQueue { kind: WorkKind::Ask, destination: self.destination.clone() };
        let asking = tokio::task::try_id().and_then(|task| state.asking.get(&task).copied());
        let Some((place, up_to)) = asking else {
            state.holds(broken("I8: nobody knows who asks".into()));
            return None;
        };
        let summary = question.tools.is_empty();
        let work = format!("t{place} {}", question.turn);
        state.note(|| format!("ask t{place} turn {} up to {up_to}, summary: {summary}", question.turn));
        let checked = state.checker.asked(&state.disk, place, question.turn, up_to, summary);
        let begun = state.fairness.begin(&queue, &work, state.now());
        state.holds(checked.and(begun));
        Some((place, summary, Asked { model: self, queue, work }))
    }
}

#[async_trait]
impl Model for SimModel {
    async fn ask(&self, question: Question, _on_delta: &mut OnDelta<'_>) -> Result<Answer, Error> {
        let Some((place, summary, asked)) = self.begin(&question) else {
            return Err(Error::Refused { why: "nobody asks".into() });
        };
        let (pause, fails) = {
            let mut state = self.sim.state();
            let slow = if state.healed { 0 } else { state.mood.trouble[2] };
            let pause = if state.rng.percent(slow) { 20_000 } else { 60 };
            let pause = Duration::from_millis(state.rng.below(pause) as u64);
            (pause, !state.healed && state.rng.percent(8))
        };
        tokio::time::sleep(pause).await;
        let work = asked.work.clone();
        drop(asked);
        let mut state = self.sim.state();
        if fails {
            let error = match state.rng.below(10) {
                0..=5 => Error::Retry { why: "busy".into(), retry_after: None },
                6 => Error::Retry {
                    why: "busy".into(),
                    retry_after: Some(Duration::from_secs(state.rng.below(60) as u64)),
                },
                _ => Error::Refused { why: "no".into() },
            };
            // Without a summary, the question is asked as it is.
            if matches!(error, Error::Retry { .. }) && !summary {
                let now = state.now();
                state.fairness.failed(&work, now);
            }
            return Err(error);
        }
        if summary {
            return state.summarise();
        }
        let likely = state.mood.long;
        let long = !state.healed && state.disk.threads[place].head.coverable().is_some();
        if long && state.rng.percent(likely) {
            return Err(Error::TooLong { why: "too long".into() });
        }
        Ok(state.think(place))
    }

    fn wants(&self) -> Wants {
        Wants::Everything
    }

    fn destination(&self) -> &str {
        &self.destination
    }
}

fn usage(state: &mut State) -> Usage {
    Usage { input: 5 + state.rng.below(10) as u64, output: 2, cached: 1 }
}

impl State {
    /// The model has made a summary, or said nothing, or far too much.
    fn summarise(&mut self) -> Result<Answer, Error> {
        let usage = usage(self);
        let text = match self.rng.below(12) {
            0 if !self.healed => return Err(Error::Retry { why: "busy".into(), retry_after: None }),
            1 if !self.healed => String::new(),
            2 if self.rng.percent(2) => SUMMARY.repeat(6000),
            _ => SUMMARY.into(),
        };
        Ok(Answer { text, usage, ..Answer::default() })
    }

    fn think(&mut self, place: Place) -> Answer {
        let mut calls: Vec<ModelCall> = Vec::new();
        if !self.healed && self.rng.percent(self.mood.talkative) {
            for _ in 0..=self.rng.below(3) {
                let call = self.call(place, &calls);
                calls.push(call);
            }
        }
        let word = self.outside.word();
        // Every other answer comes after a thought.
        let kind = ThoughtKind::Open { text: "hm".into(), signature: "s".into() };
        let thoughts = Thoughts { model: "m".into(), parts: vec![Thought { at: 0, kind }] };
        let thoughts = word.is_multiple_of(2).then_some(thoughts);
        Answer { text: text_of(word), calls, thoughts, usage: usage(self) }
    }

    fn call(&mut self, place: Place, batch: &[ModelCall]) -> ModelCall {
        let number = self.outside.number();
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
            3..=8 => self.built_in(place, batch),
            9 | 10 => (format!("wipe{}", self.rng.below(2)), Ok(given)),
            11 => (FOR_CLIENTS.into(), Ok(given)),
            _ => (format!("look{}", self.rng.below(2)), Ok(given)),
        };
        ModelCall { id, name, arguments }
    }

    fn built_in(
        &mut self,
        place: Place,
        batch: &[ModelCall],
    ) -> (String, Result<Map<String, Value>, String>) {
        let spawned = batch.iter().any(|call| call.name == words::SPAWN_THREAD);
        let room = self.disk.threads.len() < 2 * super::chaos::THREADS && !spawned;
        let (name, arguments) = match self.rng.below(12) {
            0 | 1 if room => (words::SPAWN_THREAD, json!({"instructions": "dig"})),
            2 => (words::REPORT_TO_PARENT, json!({"report": self.spoken()})),
            3 if self.rng.percent(40) => {
                let report = self.rng.percent(50).then(|| self.spoken());
                (words::CLOSE_THREAD, report.map_or(json!({}), |report| json!({"report": report})))
            }
            4 | 5 => {
                let children: Vec<String> =
                    self.disk.threads[place].head.children().map(ToString::to_string).collect();
                let child = self.rng.pick(&children).cloned().unwrap_or_else(|| "nobody".into());
                (words::SEND_MESSAGE_TO_CHILD, json!({"thread_id": child, "message": self.spoken()}))
            }
            6 => (words::SLEEP, json!({"seconds": self.rng.below(40)})),
            7 => (words::WAIT, json!({})),
            8 => {
                let cron = ["* * * * *", "*/20 * * * * *", "0 0 1 1 *"][self.rng.below(3)];
                (words::SCHEDULE, json!({"cron": cron, "text": super::watch::TICK}))
            }
            _ => (words::CANCEL_SUBSCRIPTION, json!({"tool_call_id": self.subscription(place)})),
        };
        let Value::Object(arguments) = arguments else { unreachable!("an object") };
        (name.into(), Ok(arguments))
    }

    fn spoken(&mut self) -> String {
        text_of(self.outside.word())
    }

    /// What the model takes for a subscription of its own.
    fn subscription(&mut self, place: Place) -> String {
        let from = if self.rng.percent(85) { place } else { self.rng.below(self.disk.threads.len()) };
        let head = &self.disk.threads[from].head;
        let active: Vec<String> = head.subscriptions().iter().map(|active| active.id.to_string()).collect();
        self.rng.pick(&active).cloned().unwrap_or_else(|| "no such thing".into())
    }

    /// A history goes to the model.
    pub(super) fn show(&mut self, entries: &[Entry]) {
        if let Some(visitor) = &mut self.visitor {
            visitor(entries);
        }
    }
}
