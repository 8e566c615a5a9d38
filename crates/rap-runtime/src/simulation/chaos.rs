//! Chaos: what people and tools do next is drawn from the seed.

use std::time::Duration;

use rap_agent::{CallState, OnBusy, Phase};
use rap_protocol::{CallId, ThreadId};
use serde_json::json;

use super::disk::Place;
use super::outside::{Request, What};
use super::state::State;

/// Number of threads beyond which no more are made on purpose.
pub(super) const THREADS: usize = 12;
pub(super) const ACTIONS: usize = 11;
/// How likely each action is.
pub(super) const USUAL: [usize; ACTIONS] = [20, 30, 4, 6, 14, 5, 1, 6, 3, 8, 4];

impl State {
    /// Somebody does something. Returns the pause until the next action.
    pub(super) fn act(&mut self) -> Duration {
        let weights = self.mood.weights;
        let action = if self.disk.threads.is_empty() { 7 } else { self.rng.weighted(&weights) };
        match action {
            0 => self.say(),
            1 => self.tool_speaks(),
            2 => self.order("interrupt"),
            3 => self.cancel(),
            4 => self.choose(),
            5 => self.order("resume"),
            6 => self.order("close"),
            7 => self.create(),
            8 => self.fork(),
            9 => self.repeat(),
            _ => {
                let seconds = [1, 5, 40, 70, 400, 4000][self.rng.below(6)];
                return Duration::from_secs(seconds);
            }
        }
        Duration::from_millis(self.rng.below(300) as u64)
    }

    fn send(&mut self, request: Request) {
        let at = self.later(20);
        self.outside.send(request, at);
    }

    /// A thread, rather one that is open and busy.
    fn some_thread(&mut self) -> Place {
        let threads = &self.disk.threads;
        let mut thread = self.rng.below(threads.len());
        for _ in 0..2 {
            if matches!(threads[thread].head.phase(), Phase::Idle | Phase::Closed) {
                thread = self.rng.below(threads.len());
            }
        }
        thread
    }

    fn id(&self, thread: Place) -> ThreadId {
        self.disk.threads[thread].thread.id.clone()
    }

    fn create(&mut self) {
        if self.disk.threads.len() >= THREADS / 2 {
            return self.say();
        }
        let no = self.outside.number();
        let word = self.rng.percent(60).then(|| self.outside.word());
        let agent = ["one", "two"][self.rng.below(2)];
        self.send(Request::create(&format!("root{no}"), agent, word, no));
    }

    fn say(&mut self) {
        let thread = self.some_thread();
        let kinds = [OnBusy::Join, OnBusy::Join, OnBusy::Interrupt, OnBusy::Enqueue, OnBusy::Reject];
        let on_busy = kinds[self.rng.below(kinds.len())];
        self.say_to(thread, on_busy);
    }

    pub(super) fn say_to(&mut self, thread: Place, on_busy: OnBusy) {
        let (word, key) = (self.outside.word(), self.outside.number());
        self.send(Request::message(&self.id(thread), word, on_busy, key));
    }

    fn order(&mut self, order: &str) {
        let thread = self.some_thread();
        self.order_to(thread, order);
    }

    pub(super) fn order_to(&mut self, thread: Place, order: &str) {
        self.send(Request::order(&self.id(thread), order, json!({})));
    }

    /// A call of the thread: mostly one that was made, sometimes one that was not.
    fn some_call(&mut self, thread: Place) -> CallId {
        let row = &self.disk.threads[thread];
        let mut open: Vec<CallId> = row.head.open_calls().map(|open| open.id.clone()).collect();
        open.extend(row.head.subscriptions().iter().map(|active| active.id.clone()));
        let known: Vec<CallId> = row.calls.keys().cloned().collect();
        let from = if self.rng.percent(70) { open } else { known };
        match self.rng.pick(&from) {
            Some(call) if !self.rng.percent(5) => call.clone(),
            _ => CallId::new("nobody").expect("a short id"),
        }
    }

    fn cancel(&mut self) {
        let thread = self.some_thread();
        let call = self.some_call(thread);
        self.order_to(thread, &format!("calls/{call}/cancel"));
    }

    fn choose(&mut self) {
        let rows = self.disk.threads.iter().enumerate();
        let asked =
            rows.flat_map(|(thread, row)| row.questions.values().map(move |row| (thread, row.call.clone())));
        let asked: Vec<(Place, CallId)> = asked.collect();
        let Some((thread, call)) = self.rng.pick(&asked).cloned() else { return };
        let body = match self.rng.below(4) {
            0 => json!({"dismiss": true}),
            selected => json!({"selected": selected - 1}),
        };
        let request = Request::order(&self.id(thread), &format!("calls/{call}/choice"), body);
        self.send(request);
    }

    /// Forks a thread somewhere: at its end, in what it inherits, or far behind.
    fn fork(&mut self) {
        if self.disk.threads.len() >= THREADS {
            return;
        }
        let source = self.rng.below(self.disk.threads.len());
        let last = self.disk.threads[source].last();
        let back = if self.rng.percent(50) { self.rng.below(4) } else { self.rng.below(last as usize + 1) };
        let at = self.rng.percent(90).then(|| last.saturating_sub(back as u64));
        let key = self.outside.number();
        self.send(Request::fork(&self.id(source), at, key));
    }

    /// A tool server says something about a call that it has, or once had.
    fn tool_speaks(&mut self) {
        let state = |call: &CallId, thread: Place| {
            self.disk.threads.get(thread).and_then(|row| row.calls.get(call)).map(|row| row.state)
        };
        let accepted: Vec<(CallId, Option<CallState>)> = self
            .outside
            .accepted
            .iter()
            .map(|(call, known)| (call.clone(), state(call, known.place)))
            .collect();
        let alive =
            |state: &Option<CallState>| matches!(state, Some(CallState::Open | CallState::Subscribed));
        let living: Vec<_> = accepted.iter().filter(|(_, state)| alive(state)).cloned().collect();
        let from = if self.rng.percent(80) { &living } else { &accepted };
        let Some((call, state)) = self.rng.pick(from).cloned() else { return };
        match self.rng.below(10) {
            0 => self.send_result(&call),
            1..=3 if state != Some(CallState::Subscribed) => self.aside(&call),
            _ => {
                let flood = if self.rng.percent(10) { 8 } else { 1 };
                for _ in 0..flood {
                    self.event(&call);
                }
            }
        }
    }

    /// The network brings a callback again that was answered long ago, perhaps to the thread of another call.
    fn repeat(&mut self) {
        let Some(mut request) = self.rng.pick(&self.outside.sent).cloned() else { return };
        if request.what == What::NamelessEvent {
            return;
        }
        if self.rng.percent(20) {
            let other = self.rng.below(self.disk.threads.len());
            request.body["group_id"] = self.id(other).as_str().into();
        }
        request.word = None;
        self.send(request);
    }
}
