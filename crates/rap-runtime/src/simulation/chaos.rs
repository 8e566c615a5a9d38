//! Random actions of clients and tools, determined by the seed.

use std::time::Duration;

use rap_agent::{CallState, OnBusy, Phase};
use rap_protocol::{CallId, ThreadId};
use serde_json::json;

use super::peers::{Request, RequestKind};
use super::reference::ThreadIndex;
use super::state::State;

/// Number of threads above which clients and tools create no more.
pub(super) const THREADS: usize = 12;
pub(super) const ACTIONS: usize = 11;
/// Weight of each action.
pub(super) const USUAL_WEIGHTS: [usize; ACTIONS] = [20, 30, 4, 6, 14, 5, 1, 6, 3, 8, 4];

impl State {
    /// Carries out a random action. Returns the pause until the next one.
    pub(super) fn next_action(&mut self) -> Duration {
        let weights = self.chances.weights;
        let action = if self.reference.threads.is_empty() { 7 } else { self.rng.weighted(&weights) };
        match action {
            0 => self.send_message(),
            1 => self.send_tool_callback(),
            2 => self.command("interrupt"),
            3 => self.cancel(),
            4 => self.choose(),
            5 => self.command("resume"),
            6 => self.command("close"),
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
        self.peers.send(request, at);
    }

    /// Returns a random thread, more likely one that is open and busy.
    fn some_thread(&mut self) -> ThreadIndex {
        let threads = &self.reference.threads;
        let mut thread = self.rng.below(threads.len());
        for _ in 0..2 {
            if matches!(threads[thread].head.phase(), Phase::Idle | Phase::Closed) {
                thread = self.rng.below(threads.len());
            }
        }
        thread
    }

    fn id(&self, thread: ThreadIndex) -> ThreadId {
        self.reference.threads[thread].thread.id.clone()
    }

    fn create(&mut self) {
        if self.reference.threads.len() >= THREADS / 2 {
            return self.send_message();
        }
        let number = self.peers.next_number();
        let tag = self.rng.percent(60).then(|| self.peers.next_tag());
        let agent = ["one", "two"][self.rng.below(2)];
        self.send(Request::create(&format!("root{number}"), agent, tag, number));
    }

    fn send_message(&mut self) {
        let thread = self.some_thread();
        let kinds = [OnBusy::Join, OnBusy::Join, OnBusy::Interrupt, OnBusy::Enqueue, OnBusy::Reject];
        let on_busy = kinds[self.rng.below(kinds.len())];
        self.send_message_to(thread, on_busy);
    }

    pub(super) fn send_message_to(&mut self, thread: ThreadIndex, on_busy: OnBusy) {
        let (tag, key) = (self.peers.next_tag(), self.peers.next_number());
        self.send(Request::message(&self.id(thread), tag, on_busy, key));
    }

    fn command(&mut self, command: &str) {
        let thread = self.some_thread();
        self.command_to(thread, command);
    }

    pub(super) fn command_to(&mut self, thread: ThreadIndex, command: &str) {
        self.send(Request::command(&self.id(thread), command, json!({})));
    }

    /// Returns a call of the thread, in a few cases one that does not exist.
    fn some_call(&mut self, thread: ThreadIndex) -> CallId {
        let row = &self.reference.threads[thread];
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
        self.command_to(thread, &format!("calls/{call}/cancel"));
    }

    fn choose(&mut self) {
        let rows = self.reference.threads.iter().enumerate();
        let asked =
            rows.flat_map(|(thread, row)| row.questions.values().map(move |row| (thread, row.call.clone())));
        let asked: Vec<(ThreadIndex, CallId)> = asked.collect();
        let Some((thread, call)) = self.rng.pick(&asked).cloned() else { return };
        let body = match self.rng.below(4) {
            0 => json!({"dismiss": true}),
            selected => json!({"selected": selected - 1}),
        };
        let request = Request::command(&self.id(thread), &format!("calls/{call}/choice"), body);
        self.send(request);
    }

    /// Forks a thread at a random entry, own or inherited.
    fn fork(&mut self) {
        if self.reference.threads.len() >= THREADS {
            return;
        }
        let source = self.rng.below(self.reference.threads.len());
        let last = self.reference.threads[source].last();
        let back = if self.rng.percent(50) { self.rng.below(4) } else { self.rng.below(last as usize + 1) };
        let at = self.rng.percent(90).then(|| last.saturating_sub(back as u64));
        let key = self.peers.next_number();
        self.send(Request::fork(&self.id(source), at, key));
    }

    /// A tool server sends a callback for a call that it has accepted.
    fn send_tool_callback(&mut self) {
        let state = |call: &CallId, thread: ThreadIndex| {
            self.reference.threads.get(thread).and_then(|row| row.calls.get(call)).map(|row| row.state)
        };
        let accepted: Vec<(CallId, Option<CallState>)> = self
            .peers
            .accepted
            .iter()
            .map(|(call, known)| (call.clone(), state(call, known.index)))
            .collect();
        let alive =
            |state: &Option<CallState>| matches!(state, Some(CallState::Open | CallState::Subscribed));
        let living: Vec<_> = accepted.iter().filter(|(_, state)| alive(state)).cloned().collect();
        let from = if self.rng.percent(80) { &living } else { &accepted };
        let Some((call, state)) = self.rng.pick(from).cloned() else { return };
        match self.rng.below(10) {
            0 => self.send_result(&call),
            1..=3 if state != Some(CallState::Subscribed) => self.send_question_or_view(&call),
            _ => {
                let flood = if self.rng.percent(10) { 8 } else { 1 };
                for _ in 0..flood {
                    self.send_event(&call);
                }
            }
        }
    }

    /// The network delivers an old callback again, in some cases with the wrong thread in its body.
    fn repeat(&mut self) {
        let Some(mut request) = self.rng.pick(&self.peers.answered_callbacks).cloned() else { return };
        if request.kind == RequestKind::EventWithoutId {
            return;
        }
        if self.rng.percent(20) {
            let other = self.rng.below(self.reference.threads.len());
            request.body["group_id"] = self.id(other).as_str().into();
        }
        request.tag = None;
        self.send(request);
    }
}
