//! What tool servers do with invocations, and what the network does with their callbacks.

use rap_agent::{CallState, Whereabouts};
use rap_protocol::CallId;

use super::{Chaos, THREADS};
use crate::sim::disk::{Place, Row};
use crate::sim::invariants::{Broken, holds};
use crate::sim::outside::{Callback, What};
use crate::sim::world::{Reply, Response};

impl Chaos {
    pub(super) fn invoke(&mut self) -> Result<(), Broken> {
        if self.world.memory.invocations.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.invocations.len());
        let (thread, call) = self.world.memory.invocations.swap_remove(at);
        // The server may have it though the runtime hears nothing of it.
        let (arrives, response) = match self.rng.below(10) {
            0 => (false, Response::Refused),
            1 => (false, Response::Nothing),
            2 => (true, Response::Nothing),
            _ => (true, Response::Accepted),
        };
        if self.world.invoke(thread, call.clone(), response)? && arrives {
            self.accept(thread, call);
        }
        Ok(())
    }

    /// A tool server has an invocation, perhaps for the second time.
    fn accept(&mut self, thread: Place, call: CallId) {
        self.world.outside.forgotten.remove(&(thread, call.clone()));
        let results = self.world.outside.accepted.entry((thread, call.clone())).or_default();
        let again = *results > 0;
        *results += 1;
        if again && self.rng.percent(50) {
            return;
        }
        match self.rng.below(10) {
            0 => {
                if self.rng.percent(50) {
                    self.world.outside.forgotten.insert((thread, call));
                }
            }
            1 | 2 => {
                for _ in 0..=self.rng.below(3) {
                    let what = self.aside();
                    self.send(thread, &call, what);
                }
                self.send_result(thread, &call);
            }
            _ => self.send_result(thread, &call),
        }
    }

    /// A call of a server that was acknowledged long ago is asked after. The server tells the truth, says nothing, or
    /// has sent the result long ago and knows nothing of it any more.
    pub(super) fn sweep(&mut self) -> Result<(), Broken> {
        let doubtful = self.world.doubtful();
        let Some((thread, call, due)) = self.rng.pick(&doubtful).cloned() else { return Ok(()) };
        if self.rng.percent(50) {
            self.world.now = self.world.now.max(due);
        }
        if due > self.world.now {
            return Ok(());
        }
        let forgotten = self.world.outside.forgotten.contains(&(thread, call.clone()));
        let honest = if forgotten { Whereabouts::Gone } else { Whereabouts::Unknown };
        let said = match self.rng.below(100) {
            0..10 => Whereabouts::Unknown,
            odd if odd < 10 + self.forgetful => Whereabouts::Gone,
            _ => honest,
        };
        self.world.ask_after(thread, call, said)
    }

    pub(super) fn hear(&mut self) -> Result<(), Broken> {
        let at = self.rng.below(self.world.memory.queries.len());
        let query = self.world.memory.queries.swap_remove(at);
        self.world.hear(query)
    }

    fn send(&mut self, thread: Place, call: &CallId, what: What) {
        self.world.outside.mail.push(Callback { thread, call: call.clone(), what });
    }

    fn send_result(&mut self, thread: Place, call: &CallId) {
        let subscription = self.rng.percent(self.subscribing);
        let word = self.world.outside.word();
        self.send(thread, call, What::Result { word, subscription });
    }

    fn aside(&mut self) -> What {
        self.events += 1;
        // Now and then the same one as before.
        let no = self.events - self.rng.below(2) as u64;
        match self.rng.below(3) {
            0 => What::SignIn(no),
            1 => What::Choice(no),
            _ => What::View(no),
        }
    }

    pub(super) fn land(&mut self) -> Result<(), Broken> {
        if self.world.memory.flying.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.flying.len());
        let flight = self.world.memory.flying.swap_remove(at);
        self.world.land(flight)
    }

    /// A tool server says something about a call that it has, or once had: an event, a question, a view, a result.
    pub(super) fn tool_speaks(&mut self) -> Result<(), Broken> {
        let accepted: Vec<&(Place, CallId)> = self.world.outside.accepted.keys().collect();
        let state = |(thread, call): &(Place, CallId)| self.world.disk.threads[*thread].calls[call].state;
        let alive = |call: &&(Place, CallId)| matches!(state(call), CallState::Open | CallState::Subscribed);
        let living: Vec<_> = accepted.iter().copied().filter(alive).collect();
        let from = if self.rng.percent(80) { &living } else { &accepted };
        let Some(call) = self.rng.pick(from).copied() else { return Ok(()) };
        let subscribed = state(call) == CallState::Subscribed;
        let (thread, call) = call.clone();
        match self.rng.below(10) {
            0 => self.send_result(thread, &call),
            1..=3 if !subscribed => {
                let what = self.aside();
                self.send(thread, &call, what);
            }
            _ => {
                let flood = if self.rng.percent(10) { 8 } else { 1 };
                for _ in 0..flood {
                    let what = self.event();
                    self.send(thread, &call, what);
                }
            }
        }
        Ok(())
    }

    fn event(&mut self) -> What {
        self.events += 1;
        let id = if self.rng.percent(70) { Some(self.events) } else { None };
        let crowded = self.world.disk.threads.len() + self.world.outside.mail.len() / 2 >= THREADS;
        let associative = crowded || self.rng.percent(60);
        let word = self.world.outside.word();
        What::Event { id, word, associative, is_final: self.rng.percent(15) }
    }

    pub(super) fn deliver(&mut self) -> Result<(), Broken> {
        if self.world.outside.mail.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.outside.mail.len());
        let callback = self.world.outside.mail.swap_remove(at);
        self.carry(callback)
    }

    /// The network brings a callback again that was answered long ago.
    pub(super) fn redeliver(&mut self) -> Result<(), Broken> {
        let Some(callback) = self.rng.pick(&self.world.outside.sent).cloned() else { return Ok(()) };
        if matches!(callback.what, What::Event { id: None, .. }) {
            return Ok(());
        }
        let word = callback.word();
        let known = self.world.outside.sent.len();
        self.carry(callback)?;
        self.world.outside.sent.truncate(known);
        let mail = &mut self.world.outside.mail;
        mail.retain(|callback| word.is_none() || callback.word() != word);
        Ok(())
    }

    /// What a tool says of a call of one thread comes to another, which began with the same history and has no such call.
    pub(super) fn misdeliver(&mut self) -> Result<(), Broken> {
        let Some(callback) = self.rng.pick(&self.world.outside.sent) else { return Ok(()) };
        let Callback { thread, call, what } = callback.clone();
        let threads = &self.world.disk.threads;
        let related = |row: &Row, other: Place| row.born.is_some_and(|(source, _)| source == other);
        let strangers: Vec<Place> = (0..threads.len())
            .filter(|other| related(&threads[thread], *other) || related(&threads[*other], thread))
            .filter(|other| !threads[*other].calls.contains_key(&call))
            .collect();
        let Some(other) = self.rng.pick(&strangers).copied() else { return Ok(()) };
        let message = Callback { thread: other, call, what }.message(&self.world.disk);
        let reply = self.world.offer(other, message, None)?;
        holds!(matches!(reply, Reply::Refused(_)), "I8: t{other} takes a word on a call of t{thread}");
        Ok(())
    }

    /// A child needs a place; past the bound of this simulation its event is lost on the way.
    pub(super) fn carry(&mut self, callback: Callback) -> Result<(), Broken> {
        let bears = matches!(callback.what, What::Event { associative: false, .. });
        if bears && self.world.disk.threads.len() >= 2 * THREADS {
            return Ok(());
        }
        self.world.call_back(callback)
    }
}
