//! Built-in tools. They run in call order inside the step of the answer that calls them. A sleep or wait is an open call
//! that the runtime executes itself; any other input ends it.

use std::time::Duration;

use rap_protocol::{CallId, ThreadId, Timestamp};

use crate::prompt::short_call_id;
use crate::step::{StepBuilder, TurnReason};
use crate::texts;
use crate::title::title_of;
use crate::turn::AnswerCalls;
use crate::{
    BuiltIn, CallEntry, CallState, Entry, Event, Head, Ignored, Item, NextTime, Occurrence, OpenCall, Origin,
    Phase, Server, Subscription, ThreadMessage, Write,
};

/// Pause before the next time of a schedule is computed again if it could not be computed.
const RESCHEDULE: Duration = Duration::from_secs(3600);
/// Pause before the last occurrence of a schedule is tried again if the held input was full.
const FULL_PAUSE: Duration = Duration::from_secs(60);

impl StepBuilder<'_> {
    pub(crate) fn run_built_in(&mut self, tool: BuiltIn, call: CallEntry, answer: &AnswerCalls) {
        let text = match tool {
            BuiltIn::CancelSubscription { tool_call_id } => self.cancel_subscription_by_model(&tool_call_id),
            BuiltIn::SpawnThread { instructions } => self.spawn(&instructions, &call, answer),
            BuiltIn::ReportToParent { report } => self.report(report),
            BuiltIn::CloseThread { report } => self.announce_closing(report),
            BuiltIn::SendMessageToChild { thread_id, message } => self.message_child(&thread_id, message),
            BuiltIn::Sleep { duration } => return self.sleep_until(call, answer, self.now.plus(duration)),
            BuiltIn::SleepUntil { until } => return self.sleep_until(call, answer, until),
            BuiltIn::Wait => return self.sleep(call, answer, None),
            BuiltIn::Schedule { next, confirmation } => {
                self.schedule(call.clone(), answer, next, confirmation)
            }
        };
        self.append(Item::runtime_result(call.id, text));
    }

    fn cancel_subscription_by_model(&mut self, tool_call_id: &str) -> String {
        let active = &self.head.subscriptions;
        let by_id = active.iter().find(|active| active.id.as_str() == tool_call_id);
        // The model may use the id that it gave the call, if only one subscription has it.
        let mut own = active
            .iter()
            .filter(|active| active.model_id.as_ref().is_some_and(|own| own.as_str() == tool_call_id));
        let by_own_id = own.next().filter(|_| own.next().is_none());
        // Some models see a short form of the id. The result names the id of the wire.
        let by_short_id = active.iter().find(|active| short_call_id(active.id.as_str()) == tool_call_id);
        let named = by_id.or(by_own_id).map(|active| (active.id.clone(), tool_call_id.to_owned()));
        let named = named.or(by_short_id.map(|active| (active.id.clone(), active.id.to_string())));
        let Some((call, name)) = named else {
            let active = active.iter().map(|subscription| subscription.id.as_str());
            return texts::no_such_subscription(tool_call_id, active);
        };
        self.end_subscription(&call);
        texts::subscription_cancelled(&name)
    }

    /// Spawns a child that inherits the history up to the answer that spawns it. In the child, the other calls of that
    /// answer have a result that says that the parent handles them.
    fn spawn(&mut self, instructions: &str, call: &CallEntry, answer: &AnswerCalls) -> String {
        if self.facts.thread.depth >= self.limits.depth {
            return texts::too_deep(self.limits.depth);
        }
        if self.head.counted_children.len() - self.head.active_event_children() >= self.limits.children {
            return texts::too_many_children(self.limits.children);
        }
        let result = |other: &CallId| match *other == call.id {
            true => Item::runtime_result(
                other.clone(),
                format!("{}{instructions}", texts::CHILD_INSTRUCTIONS_PREFIX),
            ),
            false => Item::runtime_result(other.clone(), texts::HANDLED_BY_PARENT),
        };
        let entry = |item| Entry { at: self.now, item };
        let entries: Vec<Entry> = answer.ids.iter().map(result).map(entry).collect();
        let origin = Origin::Spawn { parent: self.facts.thread.id.clone(), call: call.id.clone() };
        let head = Head {
            origin,
            seq: answer.seq + entries.len() as u64,
            settled_up_to: self.head.settled_up_to,
            answered_up_to: self.head.answered_up_to,
            summarised_up_to: self.head.summarised_up_to,
            external_input_at: self.head.external_input_at,
            turns_reset_at: self.head.external_input_at,
            title: title_of(instructions),
            owes_report: true,
            ..Head::new()
        };
        let child = self.spawn_child(head, answer.seq, None, entries);
        // The child's reports repeat the arguments of this call. It is stored so that they are found even if a summary
        // covers it.
        let open = self.open_runtime_call(call.clone(), answer, None);
        self.settle(open.id, CallState::Returned);
        texts::spawned(&child)
    }

    pub(crate) fn report(&mut self, text: String) -> String {
        let Some((parent, call, tool)) = self.head.origin.parent() else {
            return "Error: this thread has no parent; tell the user instead".into();
        };
        let (to, call, tool) = (parent.clone(), call.clone(), tool.to_owned());
        let external_input_at = self.head.external_input_at;
        self.head.owes_report = false;
        self.send(to, ThreadMessage::Report { call, tool, text, external_input_at });
        "the report was sent".into()
    }

    /// Sends the last report and returns the result of `close_thread`. The thread is closed after all calls of the answer
    /// have results.
    fn announce_closing(&mut self, report: Option<String>) -> String {
        let active = self.head.subscriptions.iter().map(|subscription| subscription.id.as_str());
        let text = texts::closing(active);
        if let Some(report) = report.filter(|_| !self.head.origin.is_root()) {
            self.report(report);
        }
        text
    }

    fn message_child(&mut self, child: &str, text: String) -> String {
        let Some(to) = self.head.children().find(|open| open.as_str() == child).cloned() else {
            return texts::no_such_child(child, self.head.children().map(ThreadId::as_str));
        };
        self.send(to, ThreadMessage::Text { text, external_input_at: self.head.external_input_at });
        "the message was sent".into()
    }

    fn sleep_until(&mut self, call: CallEntry, answer: &AnswerCalls, until: Timestamp) {
        if until <= self.now {
            return self.append(Item::runtime_result(call.id, texts::SLEEP_OVER));
        }
        self.sleep(call, answer, Some(until));
    }

    fn sleep(&mut self, call: CallEntry, answer: &AnswerCalls, until: Option<Timestamp>) {
        let limit = self.limits.open_calls;
        if self.head.open_calls().count() >= limit {
            return self.append(Item::runtime_result(call.id, texts::too_many_open_calls(limit)));
        }
        let open = self.open_runtime_call(call, answer, until);
        self.add_to_batch(open);
    }

    /// Adds a call that the runtime executes itself.
    fn open_runtime_call(
        &mut self,
        call: CallEntry,
        answer: &AnswerCalls,
        until: Option<Timestamp>,
    ) -> OpenCall {
        let CallEntry { id, model_id, name, .. } = call;
        let (server, seq, since) = (Server::runtime(), answer.seq, self.now);
        let open =
            OpenCall { id, model_id, name, server, seq, since, until, unapproved: false, problem: None };
        self.writes.push(Write::Open(open.clone()));
        open
    }

    /// Ends the sleeps and waits of the batch that `which` selects.
    pub(crate) fn end_sleeps(&mut self, which: impl Fn(&OpenCall) -> bool) {
        let own = self.head.batch().iter().filter(|call| call.server.is_runtime() && which(call));
        for id in own.map(|call| call.id.clone()).collect::<Vec<_>>() {
            let Some(call) = self.take_from_batch(&id) else { continue };
            let over = call.until.is_some_and(|until| until <= self.now);
            self.append(Item::runtime_result(
                id.clone(),
                if over { texts::SLEEP_OVER } else { texts::SLEEP_ENDED_EARLY },
            ));
            self.settle(id, CallState::Returned);
        }
    }

    /// Ends sleeps and waits because input was held.
    pub(crate) fn end_sleeps_for_input(&mut self) {
        if !matches!(self.head.phase, Phase::Waiting { .. }) || self.held_must_wait() {
            return;
        }
        self.end_sleeps(|_| true);
        if self.head.batch().is_empty() {
            self.close_batch(TurnReason::Continue);
        }
    }

    /// Adds a schedule, which is a subscription of the runtime itself.
    fn schedule(
        &mut self,
        call: CallEntry,
        answer: &AnswerCalls,
        next: Timestamp,
        confirmation: String,
    ) -> String {
        let limit = self.limits.subscriptions;
        if self.head.subscriptions.len() >= limit {
            return texts::too_many_subscriptions(limit);
        }
        let open = self.open_runtime_call(call, answer, None);
        self.settle(open.id.clone(), CallState::Subscribed);
        self.writes.push(Write::Timer { call: open.id.clone(), at: Some(next) });
        let subscription = Subscription::new(open, self.now);
        self.head.subscriptions.push(Subscription { next: Some(next), ..subscription });
        confirmation
    }

    /// Handles the timer of a schedule. The text is added to the thread unless its held input is full. The timer is set
    /// again in both cases.
    pub(crate) fn handle_schedule_timer(&mut self, call: &CallId) -> Result<(), Ignored> {
        let subscription = self.head.subscription(call).cloned().ok_or(Ignored::EndedSubscription)?;
        let occurrence = self.facts.schedule.take();
        let next = occurrence.as_ref().map_or(NextTime::Unknown, |occurrence| occurrence.next);
        if let Some(at) = subscription.next.filter(|at| *at > self.now) {
            return match next {
                // The clock was set back, and an occurrence comes earlier now.
                NextTime::At(earlier) if earlier < at => {
                    self.set_schedule_timer(call, earlier, subscription.next_unknown);
                    Ok(())
                }
                _ => Err(Ignored::NotDue),
            };
        }
        if subscription.next.is_none() {
            return Err(Ignored::NotDue);
        }
        let is_final = next == NextTime::Never;
        let mut full = false;
        if let Some(Occurrence { text, .. }) = occurrence
            && (!subscription.next_unknown || is_final)
        {
            let event = Event { id: None, text, associative: true, is_final };
            match self.handle_event_inline(&subscription, &event) {
                Err(Ignored::Full(_)) => full = true,
                taken => taken?,
            }
        }
        let at = match next {
            // If held input is full, an occurrence is skipped. Only the last one is tried again.
            NextTime::Never if full => self.now.plus(FULL_PAUSE),
            NextTime::Never => {
                self.head.subscriptions.retain(|active| active.id != *call);
                self.settle(call.clone(), CallState::Ended);
                return Ok(());
            }
            NextTime::At(at) => at,
            NextTime::Unknown => self.now.plus(RESCHEDULE),
        };
        self.set_schedule_timer(call, at, next == NextTime::Unknown);
        Ok(())
    }

    fn set_schedule_timer(&mut self, call: &CallId, at: Timestamp, next_unknown: bool) {
        if let Some(active) = self.head.subscriptions.iter_mut().find(|active| active.id == *call) {
            (active.next, active.next_unknown) = (Some(at), next_unknown);
            self.writes.push(Write::Timer { call: call.clone(), at: Some(at) });
        }
    }
}
