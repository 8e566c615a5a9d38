//! How a run ends: chaos stops, and all that is outstanding is delivered, until nothing is left to do.

use rap_agent::{Answer, Message, OnBusy, Phase, Whereabouts};
use rap_protocol::CallId;

use super::Chaos;
use crate::sim::invariants::{Broken, broken};
use crate::sim::outside::{Callback, Request, What, text_of};
use crate::sim::world::Response;

/// How many rounds it may take until everything is at rest.
const ROUNDS: usize = 400;

impl Chaos {
    /// Chaos stops: the model answers in plain text, tools return, timers fire, until nothing is left to do.
    pub(super) fn settle(&mut self, helped: bool) -> Result<(), Broken> {
        self.world.note(|| "chaos stops".into());
        for _ in 0..ROUNDS {
            let mut worked = false;
            worked |= self.settle_work()?;
            worked |= self.settle_callbacks()?;
            worked |= self.settle_lost()?;
            worked |= self.settle_timers(helped)?;
            if !worked {
                return Ok(());
            }
        }
        broken("I12: it never comes to rest".into())
    }

    fn settle_work(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        while let Some(request) = self.world.outside.requests.pop() {
            self.world.request(request)?;
            worked = true;
        }
        while !self.world.disk.outbox.is_empty() {
            self.world.deliver_letter(0, false)?;
            worked = true;
        }
        while let Some(asked) = self.world.memory.asks.pop() {
            worked = true;
            let text = text_of(self.world.outside.word());
            self.world.answer(asked, Answer { text, ..Answer::default() })?;
        }
        while let Some((thread, call)) = self.world.memory.invocations.pop() {
            if self.world.invoke(thread, call.clone(), Response::Accepted)? {
                self.world.outside.forgotten.remove(&(thread, call.clone()));
                self.world.outside.accepted.insert((thread, call), 1);
            }
            worked = true;
        }
        while let Some(flight) = self.world.memory.flying.pop() {
            self.world.land(flight)?;
            worked = true;
        }
        while let Some((thread, no)) = self.world.memory.answers.pop() {
            self.world.deliver_answer(thread, no);
        }
        for notification in std::mem::take(&mut self.world.memory.notifications) {
            self.world.notify(notification)?;
        }
        Ok(worked)
    }

    fn settle_callbacks(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        for callback in std::mem::take(&mut self.world.outside.mail) {
            let waiting = self.world.outside.mail.len();
            self.carry(callback)?;
            worked |= self.world.outside.mail.len() == waiting;
        }
        for thread in 0..self.world.disk.threads.len() {
            let row = &self.world.disk.threads[thread];
            let theirs = row.head.open_calls().filter(|open| open.is_sent());
            let open = theirs.map(|open| &open.id);
            let forgotten = |call: &CallId| self.world.outside.forgotten.contains(&(thread, call.clone()));
            let working = open.filter(|call| !row.is_due(call) && !forgotten(call));
            let working: Vec<CallId> = working.cloned().collect();
            for call in working {
                let word = self.world.outside.word();
                let what = What::Result { word, subscription: false };
                self.world.call_back(Callback { thread, call, what })?;
                worked = true;
            }
        }
        Ok(worked)
    }

    /// What a server has forgotten has no other way to end.
    fn settle_lost(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        for query in std::mem::take(&mut self.world.memory.queries) {
            self.world.hear(query)?;
            worked = true;
        }
        for (thread, call, due) in self.world.doubtful() {
            if self.world.outside.forgotten.contains(&(thread, call.clone())) {
                self.world.now = self.world.now.max(due);
                self.world.ask_after(thread, call, Whereabouts::Gone)?;
                worked = true;
            }
        }
        Ok(worked)
    }

    fn settle_timers(&mut self, helped: bool) -> Result<bool, Broken> {
        let mut worked = self.fire(true)?;
        for thread in 0..self.world.disk.threads.len() {
            let waits = |open: &rap_agent::OpenCall| open.server.is_runtime() && open.until.is_none();
            let unapproved = self.world.disk.threads[thread].head.open_calls().find(|open| open.unapproved);
            if let Some(open) = unapproved.cloned() {
                self.world.now = self.world.now.max(open.until.expect("it lapses"));
                self.world.offer(thread, Message::TimedOut { call: open.id }, None)?;
                worked = true;
            } else if self.world.disk.threads[thread].head.batch.iter().any(waits) {
                let (word, key) = (self.world.outside.word(), self.key());
                let message = Message::Said { text: text_of(word), on_busy: OnBusy::Join };
                self.world.request(Request { thread, message, key, word: Some(word) })?;
                worked = true;
            }
        }
        for thread in 0..self.world.disk.threads.len() {
            let head = &self.world.disk.threads[thread].head;
            let stuck = matches!(head.phase, Phase::Failed { .. } | Phase::Paused { .. });
            if let Some(due) = head.due(&self.world.limits) {
                self.world.now = self.world.now.max(due);
                self.world.offer(thread, Message::Due, None)?;
                worked = true;
            } else if stuck && helped {
                let key = self.key();
                self.world.request(Request { thread, message: Message::Resume, key, word: None })?;
                worked = true;
            }
        }
        Ok(worked)
    }
}
