//! The runtime's own tools. They run in call order inside the step of the answer that calls them; what sleeps or waits
//! is an open call of the runtime itself, which any other input ends.

use rap_protocol::{Body, CallId, ThreadId, Timestamp};

use crate::step::{Stepping, take};
use crate::turn::Batch;
use crate::words;
use crate::{
    Birth, BuiltIn, CallEntry, CallState, Effect, Entry, Event, Head, Ignored, Item, Letter, OpenCall,
    Origin, Outcome, Phase, Queue, Server, Subscription, Write,
};

impl Stepping<'_> {
    pub(crate) fn run_built_in(&mut self, tool: BuiltIn, call: CallEntry, batch: &Batch) {
        let text = match tool {
            BuiltIn::CancelSubscription { tool_call_id } => self.cancel_by_model(&tool_call_id),
            BuiltIn::SpawnThread { instructions, birth } => self.spawn(&instructions, birth, &call.id, batch),
            BuiltIn::ReportToParent { report } => self.report(report),
            BuiltIn::CloseThread { report } => self.announce_closing(report),
            BuiltIn::SendMessageToChild { thread_id, message } => self.tell_child(&thread_id, message),
            BuiltIn::Sleep { until } if until <= self.now => words::SLEPT.into(),
            BuiltIn::Sleep { until } => return self.sleep(call, batch, Some(until)),
            BuiltIn::Wait => return self.sleep(call, batch, None),
            BuiltIn::Schedule { next, confirmation } => {
                self.schedule(call.clone(), batch, next, confirmation)
            }
        };
        self.append(Item::made(call.id, text));
    }

    fn cancel_by_model(&mut self, tool_call_id: &str) -> String {
        let subscriptions = &mut self.head.subscriptions;
        let Some(at) = subscriptions.iter().position(|subscription| subscription.id.as_str() == tool_call_id)
        else {
            let active = subscriptions.iter().map(|subscription| subscription.id.as_str());
            return words::no_such_subscription(tool_call_id, active);
        };
        let Subscription { id, server, .. } = subscriptions.remove(at);
        self.settle_cancelled(id.clone(), !server.is_runtime(), CallState::Ended);
        self.drop_backlog(&id);
        words::subscription_cancelled(tool_call_id)
    }

    /// A child sees the history up to the answer that starts it; of the calls there, only its own concerns it.
    fn spawn(&mut self, instructions: &str, birth: Birth, call: &CallId, batch: &Batch) -> String {
        let Birth { parent, depth, child, .. } = birth;
        if depth > self.limits.depth {
            return words::too_deep(self.limits.depth);
        }
        if self.head.children.len() >= self.limits.children {
            return words::too_many_children(self.limits.children);
        }
        let result = |other: &CallId| match other == call {
            true => Item::made(other.clone(), format!("{}{instructions}", words::CHILD_OPENING)),
            false => Item::made(other.clone(), words::NOT_YOURS),
        };
        let entry = |item| Entry { at: self.now, item };
        let entries: Vec<Entry> = batch.calls.iter().map(result).map(entry).collect();
        let seq = batch.seq + entries.len() as u64;
        let head = Head {
            phase: Phase::Asking { up_to: seq },
            origin: Origin::Spawn { parent, call: call.clone() },
            turn: 1,
            turns_awake: 1,
            seq,
            settled: self.head.settled,
            minted: self.head.minted,
            ..Head::new()
        };
        let started = words::spawned(&child);
        self.head.children.push(child.clone());
        self.writes.push(Write::Born { child, at: batch.seq, head: Box::new(head), shelf: None, entries });
        started
    }

    fn report(&mut self, text: String) -> String {
        let Some((parent, call, tool)) = self.head.origin.parent() else {
            return "Error: this thread has no parent; say it to the user".into();
        };
        let (to, call, tool) = (parent.clone(), call.clone(), tool.to_owned());
        self.effects.push(Effect::Tell { to, letter: Letter::Report { call, tool, text } });
        "the report is on its way".into()
    }

    /// The closing itself comes when the rest of the answer has its results.
    fn announce_closing(&mut self, report: Option<String>) -> String {
        let active = self.head.subscriptions.iter().map(|subscription| subscription.id.as_str());
        let text = words::closing(active);
        if let Some(report) = report.filter(|_| self.head.origin != Origin::Root) {
            self.report(report);
        }
        text
    }

    fn tell_child(&mut self, child: &str, text: String) -> String {
        let Some(to) = self.head.children.iter().find(|open| open.as_str() == child).cloned() else {
            return words::no_such_child(child, self.head.children.iter().map(ThreadId::as_str));
        };
        self.effects.push(Effect::Tell { to, letter: Letter::Say { text } });
        "the message is on its way".into()
    }

    fn sleep(&mut self, call: CallEntry, batch: &Batch, until: Option<Timestamp>) {
        let limit = self.limits.open_calls;
        if self.head.open_calls().count() >= limit {
            return self.append(Item::made(call.id, words::too_many_open_calls(limit)));
        }
        let open = self.own_call(call, batch, until);
        self.head.batch.push(open);
    }

    /// The row of a call that the runtime carries out itself.
    fn own_call(&mut self, call: CallEntry, batch: &Batch, until: Option<Timestamp>) -> OpenCall {
        let CallEntry { id, call_id, name, .. } = call;
        let (server, seq, since) = (Server::runtime(), batch.seq, self.now);
        let open = OpenCall { id, call_id, name, server, seq, since, until, unapproved: false };
        self.writes.push(Write::Open(open.clone()));
        open
    }

    /// Ends calls of the runtime's own: their time has come, or something else has.
    pub(crate) fn rouse(&mut self, which: impl Fn(&OpenCall) -> bool) {
        let own = self.head.batch.iter().filter(|call| call.server.is_runtime() && which(call));
        for id in own.map(|call| call.id.clone()).collect::<Vec<_>>() {
            let Some(call) = take(&mut self.head.batch, &id) else { continue };
            let over = call.until.is_some_and(|until| until <= self.now);
            self.append(Item::made(id.clone(), if over { words::SLEPT } else { words::ROUSED }));
            self.settle(id, CallState::Returned);
        }
    }

    /// Input is held: it ends what sleeps or waits.
    pub(crate) fn stir(&mut self) {
        if self.head.phase != Phase::Waiting {
            return;
        }
        self.rouse(|_| true);
        if self.head.batch.is_empty() {
            self.close_batch();
        }
    }

    /// A schedule is a subscription of the runtime itself.
    fn schedule(&mut self, call: CallEntry, batch: &Batch, next: Timestamp, confirmation: String) -> String {
        let limit = self.limits.subscriptions;
        if self.head.subscriptions.len() >= limit {
            return words::too_many_subscriptions(limit);
        }
        let OpenCall { id, name, server, seq, since, .. } = self.own_call(call, batch, None);
        self.settle(id.clone(), CallState::Subscribed);
        self.writes.push(Write::Timer { call: id.clone(), at: Some(next) });
        self.head.subscriptions.push(Subscription { id, name, server, seq, since, next: Some(next) });
        confirmation
    }

    pub(crate) fn tick(
        &mut self,
        call: &CallId,
        text: String,
        next: Option<Timestamp>,
    ) -> Result<(), Ignored> {
        let found = self.head.subscriptions.iter().position(|subscription| subscription.id == *call);
        let at = found.ok_or(Ignored::EndedSubscription)?;
        let subscription = self.head.subscriptions[at].clone();
        if subscription.next.is_none_or(|next| next > self.now) {
            return Err(Ignored::NotDue);
        }
        let event = Event { id: None, text, associative: true, is_final: next.is_none() };
        self.take_inline(&subscription, &event)?;
        if next.is_none() {
            self.head.subscriptions.remove(at);
            self.settle(call.clone(), CallState::Ended);
        } else {
            self.head.subscriptions[at].next = next;
            self.writes.push(Write::Timer { call: call.clone(), at: next });
        }
        Ok(())
    }

    pub(crate) fn take_report(&mut self, child: &ThreadId, call: &CallId, tool: &str, text: String) {
        let result = Outcome { content: Body::Text(text), display: Vec::new(), subscription: false };
        let items = self.synthetic(tool, call, words::report_kind(call, child), result);
        self.take_letter(items);
    }

    /// What another thread of ours says finds room always: how much that is, is bounded by how often its model is
    /// asked and by the number of threads.
    pub(crate) fn take_letter(&mut self, items: Vec<Item>) {
        self.take_input(items);
        let held = self.held(Queue::Held);
        held.inputs = held.inputs.saturating_sub(1);
    }
}
