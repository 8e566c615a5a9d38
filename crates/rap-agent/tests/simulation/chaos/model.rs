//! What the model does: it answers, late or twice, fails, and makes calls with ids of all kinds.

use std::time::Duration;

use rap_agent::{
    Again, Answer, Arguments, Birth, BuiltIn, Cause, Item, Plan, PlannedCall, Server, Thought, ThoughtKind,
    Thoughts, Usage, words,
};
use rap_protocol::CallId;
use serde_json::{Map, Value};

use super::{Chaos, THREADS};
use crate::sim::disk::{Place, name};
use crate::sim::fault::Fault;
use crate::sim::invariants::Broken;
use crate::sim::outside::text_of;
use crate::sim::watch::{FOR_CLIENTS, SCHEDULED};
use crate::sim::world::{Asked, SUMMARY, World};

impl Chaos {
    pub(super) fn answer(&mut self) -> Result<(), Broken> {
        if self.world.memory.asks.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.asks.len());
        let asked = self.world.memory.asks.swap_remove(at);
        if self.rng.percent(8) {
            let again = if self.rng.percent(60) { Again::Later } else { Again::No };
            return self.world.fail(asked, again);
        }
        if asked.summary.is_some() {
            return self.summarise(asked);
        }
        let long = self.world.disk.threads[asked.thread].head.coverable().is_some();
        if long && self.rng.percent(self.long) {
            self.world.begin_summary(asked);
            return Ok(());
        }
        let answer = self.think(&asked);
        self.world.answer(asked, answer)
    }

    /// The model has made a summary, or could not, or said nothing, or far too much.
    fn summarise(&mut self, asked: Asked) -> Result<(), Broken> {
        match self.rng.below(12) {
            0 => self.world.do_without_summary(asked, false),
            1 => self.world.do_without_summary(asked, true),
            2 if self.rng.percent(2) => self.world.summarise(asked, SUMMARY.repeat(6000)),
            _ => self.world.summarise(asked, SUMMARY.into()),
        }
    }

    /// An answer that comes though its question was given up, or was answered before.
    pub(super) fn stale_answer(&mut self) -> Result<(), Broken> {
        let thread = self.thread();
        let turns = self.world.disk.threads[thread].head.turn;
        let asked = match self.rng.pick(&self.world.memory.stale).cloned() {
            Some(asked) if self.rng.percent(70) => asked,
            _ if turns > 1 => {
                let turn = 1 + self.rng.below(turns as usize - 1) as u64;
                Asked { thread, turn, up_to: 0, summary: None }
            }
            _ => return Ok(()),
        };
        match self.rng.below(10) {
            0 | 1 => return self.world.fail(asked, Again::Later),
            2 => return self.world.summarise(asked, SUMMARY.into()),
            _ => {}
        }
        let answer = self.think(&asked);
        self.world.answer(asked, answer)
    }

    fn think(&mut self, asked: &Asked) -> Answer {
        let mut calls: Vec<PlannedCall> = Vec::new();
        if self.rng.percent(self.talkative) {
            for _ in 0..=self.rng.below(3) {
                let call = self.plan(asked.thread, &calls);
                calls.push(call);
            }
        }
        let word = self.world.outside.word();
        let usage = Usage { input: 10, output: 2, cached: 1 };
        // Every other answer comes after a thought.
        let kind = ThoughtKind::Open { text: "hm".into(), signature: "s".into() };
        let thoughts = Thoughts { model: "m".into(), parts: vec![Thought { at: 0, kind }] };
        let thoughts = word.is_multiple_of(2).then_some(thoughts);
        Answer { text: text_of(word), calls, thoughts, usage }
    }

    /// What the model worker does with a call: the model's id is used where it is new in all that the thread sees.
    fn plan(&mut self, thread: Place, batch: &[PlannedCall]) -> PlannedCall {
        let number = self.world.outside.word();
        let own = self.model_id(thread, number, batch);
        let trusted = self.world.fault == Fault::TrustsIds;
        let known = |id: &CallId| !trusted && sees_call(&self.world, thread, id);
        let (id, call_id) = match own {
            Some(id) if known(&id) => (None, Some(id)),
            own => (own, None),
        };
        let given = Arguments::Given(Map::from_iter([("of".to_owned(), Value::from(number))]));
        let server = Server(format!("s{}", self.rng.below(2)));
        let (name, arguments, plan) = match self.rng.below(20) {
            0 => ("nonsense", given, Plan::Refuse("Error: there is no tool nonsense".into())),
            1 => ("look", Arguments::Unusable("{".into()), Plan::Refuse("Error: no JSON".into())),
            2 => ("look", Arguments::Unusable("{".into()), Plan::Invoke(server)),
            3..=8 => {
                let (name, tool) = self.built_in(thread, batch);
                (name, given, Plan::BuiltIn(tool))
            }
            9 | 10 => ("look", given, Plan::Approve { server, prompt: "Really?".into() }),
            11 if self.world.disk.cause(thread) == Cause::Event
                && self.world.fault != Fault::TrustsEvents =>
            {
                (FOR_CLIENTS, given, Plan::Refuse("Error: there is no tool touch".into()))
            }
            11 => (FOR_CLIENTS, given, Plan::Invoke(server)),
            _ => ("look", given, Plan::Invoke(server)),
        };
        PlannedCall { id, call_id, name: name.into(), arguments, display: None, plan }
    }

    fn built_in(&mut self, thread: Place, batch: &[PlannedCall]) -> (&'static str, BuiltIn) {
        let row = &self.world.disk.threads[thread];
        let spawns = |call: &PlannedCall| matches!(call.plan, Plan::BuiltIn(BuiltIn::SpawnThread { .. }));
        let room = self.world.disk.threads.len() < 2 * THREADS && !batch.iter().any(spawns);
        let later = self.world.now.plus(Duration::from_secs(self.rng.below(40) as u64));
        match self.rng.below(12) {
            0 | 1 if room => {
                let (parent, child) = (name(thread), name(self.world.disk.threads.len()));
                let depth = self.world.disk.ancestors(thread) + 1;
                let birth = Birth { parent, depth, child, arguments: Map::new() };
                (words::SPAWN_THREAD, BuiltIn::SpawnThread { instructions: "dig".into(), birth })
            }
            2 => (words::REPORT_TO_PARENT, BuiltIn::ReportToParent { report: self.spoken() }),
            3 if self.rng.percent(40) => {
                let report = self.rng.percent(50).then(|| self.spoken());
                (words::CLOSE_THREAD, BuiltIn::CloseThread { report })
            }
            4 | 5 => {
                let child = self.rng.pick(&row.head.children).cloned().unwrap_or(name(thread));
                let (thread_id, message) = (child.as_str().to_owned(), self.spoken());
                (words::SEND_MESSAGE_TO_CHILD, BuiltIn::SendMessageToChild { thread_id, message })
            }
            6 => (words::SLEEP, BuiltIn::Sleep { until: later }),
            7 => (words::WAIT, BuiltIn::Wait),
            8 => {
                let confirmation = SCHEDULED.into();
                (words::SCHEDULE, BuiltIn::Schedule { next: later, confirmation })
            }
            _ => {
                let tool_call_id = self.subscription(thread);
                (words::CANCEL_SUBSCRIPTION, BuiltIn::CancelSubscription { tool_call_id })
            }
        }
    }

    pub(super) fn spoken(&mut self) -> String {
        text_of(self.world.outside.word())
    }

    fn model_id(&mut self, thread: Place, number: u64, batch: &[PlannedCall]) -> Option<CallId> {
        if !self.rng.percent(self.odd_ids) {
            return CallId::new(format!("c{number}")).ok();
        }
        match self.rng.below(4) {
            0 => None,
            1 => CallId::new(format!("rap_{}", 1 + self.rng.below(9))).ok(),
            2 => batch.last().and_then(|call| call.id.clone()),
            _ => {
                // One of its own, or one that another thread with the same beginning has made since.
                let threads = &self.world.disk.threads;
                let source = threads[thread].born.map_or(thread, |(source, _)| source);
                let from = if self.rng.percent(50) { thread } else { source };
                let known: Vec<&CallId> = threads[from].calls.keys().collect();
                self.rng.pick(&known).map(|id| (*id).clone())
            }
        }
    }

    /// What the model takes for a subscription of its own.
    fn subscription(&mut self, thread: Place) -> String {
        let from = if self.rng.percent(85) { thread } else { self.thread() };
        let row = &self.world.disk.threads[from];
        let active: Vec<&CallId> =
            row.head.subscriptions.iter().map(|subscription| &subscription.id).collect();
        match self.rng.pick(&active) {
            Some(id) => id.as_str().to_owned(),
            None => "no such thing".into(),
        }
    }
}

/// Whether a call of that id is somewhere in what the thread sees.
fn sees_call(world: &World, thread: Place, id: &CallId) -> bool {
    let row = &world.disk.threads[thread];
    world.disk.visible(thread, row.last()).into_iter().any(|entry| match &entry.item {
        Item::Assistant { calls, .. } => calls.iter().any(|call| call.id == *id),
        _ => false,
    })
}
