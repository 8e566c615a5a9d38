//! The runtime's own tools. They run in call order inside the step of the answer that calls them. A sleep or wait is an
//! open call of the runtime itself, which any other input ends.

use std::time::Duration;

use rap_protocol::{CallId, ThreadId, Timestamp};

use crate::step::{Stepping, Wake};
use crate::turn::AnswerCalls;
use crate::words;
use crate::{
    BuiltIn, CallEntry, CallState, Entry, Event, Head, Ignored, Item, NextTime, Occurrence, OpenCall, Origin,
    Phase, Server, Subscription, ThreadMessage, Write,
};

/// A schedule whose next time cannot be computed is looked at again after this time.
const RESCHEDULE: Duration = Duration::from_secs(3600);
/// The last occurrence of a schedule that finds no room is tried again after this time.
const ROOM_PAUSE: Duration = Duration::from_secs(60);

impl Stepping<'_> {
    pub(crate) fn run_built_in(&mut self, tool: BuiltIn, call: CallEntry, answer: &AnswerCalls) {
        let text = match tool {
            BuiltIn::CancelSubscription { tool_call_id } => self.cancel_by_model(&tool_call_id),
            BuiltIn::SpawnThread { instructions } => self.spawn(&instructions, &call, answer),
            BuiltIn::ReportToParent { report } => self.report(report),
            BuiltIn::CloseThread { report } => self.announce_closing(report),
            BuiltIn::SendMessageToChild { thread_id, message } => self.message_child(&thread_id, message),
            BuiltIn::Sleep { until } if until <= self.now => words::SLEPT.into(),
            BuiltIn::Sleep { until } => return self.sleep(call, answer, Some(until)),
            BuiltIn::Wait => return self.sleep(call, answer, None),
            BuiltIn::Schedule { next, confirmation } => {
                self.schedule(call.clone(), answer, next, confirmation)
            }
        };
        self.append(Item::made(call.id, text));
    }

    fn cancel_by_model(&mut self, tool_call_id: &str) -> String {
        let active = &self.head.subscriptions;
        let by_id = active.iter().find(|active| active.id.as_str() == tool_call_id);
        // The model may use its own id, if that names one subscription only.
        let mut own = active
            .iter()
            .filter(|active| active.call_id.as_ref().is_some_and(|own| own.as_str() == tool_call_id));
        let by_own_id = own.next().filter(|_| own.next().is_none());
        let Some(call) = by_id.or(by_own_id).map(|active| active.id.clone()) else {
            let active = active.iter().map(|subscription| subscription.id.as_str());
            return words::no_such_subscription(tool_call_id, active);
        };
        self.end_subscription(&call);
        words::subscription_cancelled(tool_call_id)
    }

    /// Spawns a child that sees the history up to the answer that starts it. It is not concerned with the other calls
    /// of that answer.
    fn spawn(&mut self, instructions: &str, call: &CallEntry, answer: &AnswerCalls) -> String {
        if self.facts.thread.depth >= self.limits.depth {
            return words::too_deep(self.limits.depth);
        }
        if self.head.children.len() - self.head.at_work() >= self.limits.children {
            return words::too_many_children(self.limits.children);
        }
        let result = |other: &CallId| match *other == call.id {
            true => Item::made(other.clone(), format!("{}{instructions}", words::CHILD_OPENING)),
            false => Item::made(other.clone(), words::NOT_YOURS),
        };
        let entry = |item| Entry { at: self.now, item };
        let entries: Vec<Entry> = answer.ids.iter().map(result).map(entry).collect();
        let origin = Origin::Spawn { parent: self.facts.thread.id.clone(), call: call.id.clone() };
        let head = Head {
            origin,
            seq: answer.seq + entries.len() as u64,
            settled: self.head.settled,
            answered: self.head.answered,
            summarised: self.head.summarised,
            heard: self.head.heard,
            reset_for: self.head.heard,
            ..Head::new()
        };
        let child = self.spawn_child(head, answer.seq, None, entries);
        // The child's reports repeat the arguments of this call, also when a summary covers it.
        let open = self.open_own_call(call.clone(), answer, None);
        self.settle(open.id, CallState::Returned);
        words::spawned(&child)
    }

    fn report(&mut self, text: String) -> String {
        let Some((parent, call, tool)) = self.head.origin.parent() else {
            return "Error: this thread has no parent; say it to the user".into();
        };
        let (to, call, tool) = (parent.clone(), call.clone(), tool.to_owned());
        let heard = self.head.heard;
        self.send(to, ThreadMessage::Report { call, tool, text, heard });
        "the report is on its way".into()
    }

    /// The closing itself comes when the rest of the answer has its results.
    fn announce_closing(&mut self, report: Option<String>) -> String {
        let active = self.head.subscriptions.iter().map(|subscription| subscription.id.as_str());
        let text = words::closing(active);
        if let Some(report) = report.filter(|_| !self.head.origin.is_root()) {
            self.report(report);
        }
        text
    }

    fn message_child(&mut self, child: &str, text: String) -> String {
        let Some(to) = self.head.children().find(|open| open.as_str() == child).cloned() else {
            return words::no_such_child(child, self.head.children().map(ThreadId::as_str));
        };
        self.send(to, ThreadMessage::Text { text, heard: self.head.heard });
        "the message is on its way".into()
    }

    fn sleep(&mut self, call: CallEntry, answer: &AnswerCalls, until: Option<Timestamp>) {
        let limit = self.limits.open_calls;
        if self.head.open_calls().count() >= limit {
            return self.append(Item::made(call.id, words::too_many_open_calls(limit)));
        }
        let open = self.open_own_call(call, answer, until);
        self.add_to_batch(open);
    }

    /// Adds a call that the runtime carries out itself.
    fn open_own_call(&mut self, call: CallEntry, answer: &AnswerCalls, until: Option<Timestamp>) -> OpenCall {
        let CallEntry { id, call_id, name, .. } = call;
        let (server, seq, since) = (Server::runtime(), answer.seq, self.now);
        let open =
            OpenCall { id, call_id, name, server, seq, since, until, unapproved: false, problem: None };
        self.writes.push(Write::Open(open.clone()));
        open
    }

    /// Ends sleeps and waits of the batch: their time has come, or something else has happened.
    pub(crate) fn end_sleeps(&mut self, which: impl Fn(&OpenCall) -> bool) {
        let own = self.head.batch().iter().filter(|call| call.server.is_runtime() && which(call));
        for id in own.map(|call| call.id.clone()).collect::<Vec<_>>() {
            let Some(call) = self.take_from_batch(&id) else { continue };
            let over = call.until.is_some_and(|until| until <= self.now);
            self.append(Item::made(id.clone(), if over { words::SLEPT } else { words::ENDED }));
            self.settle(id, CallState::Returned);
        }
    }

    /// Input is held: it ends sleeps and waits.
    pub(crate) fn end_sleeps_for_input(&mut self) {
        if !matches!(self.head.phase, Phase::Waiting { .. }) || self.held_must_wait() {
            return;
        }
        self.end_sleeps(|_| true);
        if self.head.batch().is_empty() {
            self.close_batch(Wake::Continue);
        }
    }

    /// A schedule is a subscription of the runtime itself.
    fn schedule(
        &mut self,
        call: CallEntry,
        answer: &AnswerCalls,
        next: Timestamp,
        confirmation: String,
    ) -> String {
        let limit = self.limits.subscriptions;
        if self.head.subscriptions.len() >= limit {
            return words::too_many_subscriptions(limit);
        }
        let open = self.open_own_call(call, answer, None);
        self.settle(open.id.clone(), CallState::Subscribed);
        self.writes.push(Write::Timer { call: open.id.clone(), at: Some(next) });
        let subscription = Subscription::new(open, self.now);
        self.head.subscriptions.push(Subscription { next: Some(next), ..subscription });
        confirmation
    }

    /// The timer of a schedule: the text enters the history if there is room, and the timer is set anew in any case.
    pub(crate) fn fire_schedule(&mut self, call: &CallId) -> Result<(), Ignored> {
        let subscription = self.head.subscription(call).cloned().ok_or(Ignored::EndedSubscription)?;
        if subscription.next.is_none_or(|next| next > self.now) {
            return Err(Ignored::NotDue);
        }
        let occurrence = self.facts.schedule.take();
        let next = occurrence.as_ref().map_or(NextTime::Unknown, |occurrence| occurrence.next);
        let is_final = next == NextTime::Never;
        let mut full = false;
        if let Some(Occurrence { text, .. }) = occurrence
            && (!subscription.unscheduled || is_final)
        {
            let event = Event { id: None, text, associative: true, is_final };
            match self.take_inline(&subscription, &event) {
                Err(Ignored::Full(_)) => full = true,
                taken => taken?,
            }
        }
        let at = match next {
            // Without room an occurrence is skipped, but the last one is tried again.
            NextTime::Never if full => self.now.plus(ROOM_PAUSE),
            NextTime::Never => {
                self.head.subscriptions.retain(|active| active.id != *call);
                self.settle(call.clone(), CallState::Ended);
                return Ok(());
            }
            NextTime::At(at) => at,
            NextTime::Unknown => self.now.plus(RESCHEDULE),
        };
        if let Some(active) = self.head.subscriptions.iter_mut().find(|active| active.id == *call) {
            (active.next, active.unscheduled) = (Some(at), next == NextTime::Unknown);
            self.writes.push(Write::Timer { call: call.clone(), at: Some(at) });
        }
        Ok(())
    }
}
