//! The model's side: its answers and its failures.

use std::time::Duration;

use rap_protocol::CallId;

use crate::step::{Released, Stepping};
use crate::words;
use crate::{
    Again, Answer, Arguments, BuiltIn, CallEntry, Effect, Item, OpenCall, Origin, Phase, Plan, PlannedCall,
    Queue, Seq, Server, Thoughts, Write,
};

/// The calls of an answer: the entry that makes them, and their ids.
pub(crate) struct Batch {
    pub(crate) seq: Seq,
    pub(crate) calls: Vec<CallId>,
}

/// The shortest and the longest pause before a failed thread asks again by itself.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(3600));

impl Stepping<'_> {
    pub(crate) fn take_answer(&mut self, answer: Answer) {
        let Answer { text, calls, thoughts, usage } = answer;
        self.head.usage.add(usage);
        self.head.dropped = 0;
        self.head.failing_since = None;
        if calls.is_empty() {
            self.append(Item::Assistant { text, calls: Vec::new(), thoughts });
            return self.rest();
        }
        self.head.phase = Phase::Waiting;
        self.take_calls(text, calls, thoughts);
        if self.head.is_closed() {
            return;
        }
        if self.head.batch.is_empty() {
            return self.close_batch();
        }
        // A user who spoke while the model was asked does not wait for the calls.
        if self.head.held.user {
            self.join();
        } else if !self.head.held.is_empty() {
            self.stir();
        }
    }

    /// The answer has no calls: what waits is next, or there is nothing to do.
    fn rest(&mut self) {
        if self.release(Queue::Held) == Released::Something
            || self.release(Queue::Queued) == Released::Something
        {
            return self.wake();
        }
        self.head.phase = Phase::Idle;
        if self.head.running.is_empty() {
            self.head.settled = self.head.seq;
        }
    }

    /// A thread that was made for an event ends with it, as soon as it has nothing left to do.
    pub(crate) fn close_if_done(&mut self) {
        let head = &self.head;
        let nothing_left =
            head.running.is_empty() && head.subscriptions.is_empty() && head.children.is_empty();
        let event = matches!(head.origin, Origin::Event { .. });
        if event && head.phase == Phase::Idle && nothing_left {
            self.close();
        }
    }

    /// The open calls go on in the background, what waited is written, and the model is asked.
    pub(crate) fn join(&mut self) {
        self.let_run();
        self.release(Queue::Held);
        self.wake();
    }

    fn take_calls(&mut self, text: String, planned: Vec<PlannedCall>, thoughts: Option<Thoughts>) {
        let mut calls: Vec<CallEntry> = Vec::with_capacity(planned.len());
        let mut plans = Vec::with_capacity(planned.len());
        for PlannedCall { id, call_id, name, arguments, display, plan } in planned {
            let (id, call_id) = match id {
                Some(id) if self.is_new(&id, &calls) => (id, call_id),
                unusable => (self.mint(), call_id.or(unusable)),
            };
            calls.push(CallEntry { id, call_id, name, arguments, display });
            plans.push(plan);
        }
        self.append(Item::Assistant { text, calls: calls.clone(), thoughts });
        let batch = Batch { seq: self.head.seq, calls: calls.iter().map(|call| call.id.clone()).collect() };
        let mut closing = false;
        for (call, plan) in calls.into_iter().zip(plans) {
            match plan {
                _ if closing => self.append(Item::made(call.id, words::NOT_CALLED)),
                Plan::Invoke(server) => self.invoke(call, server, batch.seq, None),
                Plan::Approve { server, prompt } => self.invoke(call, server, batch.seq, Some(prompt)),
                Plan::BuiltIn(tool) => {
                    closing = matches!(tool, BuiltIn::CloseThread { .. });
                    self.run_built_in(tool, call, &batch);
                }
                Plan::Refuse(text) => self.append(Item::made(call.id, text)),
            }
        }
        if closing {
            self.effects.retain(|effect| !matches!(effect, Effect::Invoke { .. }));
            self.close();
        }
    }

    /// Ids of the past are looked up by whoever plans the calls; this is what can go wrong since.
    fn is_new(&self, id: &CallId, batch: &[CallEntry]) -> bool {
        let ours = id.as_str().starts_with(words::MINTED_PREFIX);
        let known = self.head.is_open(id) || self.head.subscription(id).is_some();
        !ours && !known && batch.iter().all(|call| call.id != *id)
    }

    /// Begins a call; with a prompt, only when a person has allowed it.
    fn invoke(&mut self, call: CallEntry, server: Server, seq: Seq, prompt: Option<String>) {
        let limit = self.limits.open_calls;
        if self.head.open_calls().count() >= limit {
            return self.append(Item::made(call.id, words::too_many_open_calls(limit)));
        }
        let Arguments::Given(arguments) = call.arguments else {
            return self.append(Item::made(call.id, "Error: the arguments are not a JSON object"));
        };
        let open = OpenCall {
            id: call.id,
            call_id: call.call_id,
            name: call.name,
            server,
            seq,
            since: self.now,
            until: self.limits.call_timeout.map(|timeout| self.now.plus(timeout)),
            unapproved: prompt.is_some(),
        };
        match prompt {
            Some(prompt) => self.ask_for_approval(open, prompt),
            None => {
                self.head.batch.push(open.clone());
                self.writes.push(Write::Open(open.clone()));
                self.effects.push(Effect::Invoke { call: open, arguments });
            }
        }
    }

    pub(crate) fn fail(&mut self, why: String, again: Again) {
        // A question without an answer is not the model talking to itself.
        self.head.turns_awake = self.head.turns_awake.saturating_sub(1);
        let since = *self.head.failing_since.get_or_insert(self.now);
        let failing_for = self.now.since(since);
        let (shortest, longest) = RETRY_PAUSE;
        let retry_at = match again {
            Again::Later if failing_for < self.limits.failed_retry_for => {
                Some(self.now.plus(failing_for.clamp(shortest, longest)))
            }
            _ => None,
        };
        self.append(Item::notice(format!("the model could not be asked: {why}")));
        self.head.phase = Phase::Failed { why, retry_at };
    }
}
