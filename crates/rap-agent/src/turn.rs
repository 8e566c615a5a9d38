//! Turns: answers of the model and failed requests.

use std::time::Duration;

use rap_protocol::CallId;

use crate::head::LONGEST_PAUSE;
use crate::step::{StepBuilder, TurnReason};
use crate::texts;
use crate::{
    Arguments, BuiltIn, CallEntry, Effect, Ignored, Item, OpenCall, Phase, Plan, PlannedCall, Queue, Seq,
    Server, Thoughts, ThreadMessage, TurnAnswer, TurnRetry, Usage, Write,
};

pub(crate) struct AnswerCalls {
    /// Number of the assistant entry that contains them.
    pub(crate) seq: Seq,
    pub(crate) ids: Vec<CallId>,
}

/// Shortest and longest pause before a failed thread retries.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(30), LONGEST_PAUSE);

impl StepBuilder<'_> {
    pub(crate) fn handle_answer(&mut self, answer: TurnAnswer) {
        let TurnAnswer { text, calls, thoughts, usage } = answer;
        if let Some(up_to) = self.head.prompt_up_to() {
            self.head.answered_up_to = up_to;
        }
        self.head.prompt_tokens = usage.input;
        self.add_usage(usage);
        let usage = (usage != Usage::default()).then_some(usage);
        (self.dropped, self.failing_since) = (0, None);
        if calls.is_empty() {
            self.append(Item::Assistant { text, calls: Vec::new(), thoughts, usage });
            return self.finish_turn();
        }
        self.head.phase = Phase::Waiting { batch: Vec::new() };
        self.handle_calls(text, calls, thoughts, usage);
        if self.head.is_closed() {
            return;
        }
        if self.head.batch().is_empty() {
            return self.close_batch(TurnReason::Continue);
        }
        // A user message that arrived during the turn does not wait for the calls.
        if self.head.held.user {
            self.join();
        } else if !self.head.held.is_empty() && !self.held_must_wait() {
            self.end_sleeps_for_input();
        } else if !self.head.queued.is_empty() && self.is_sleeping() {
            self.continue_batch(TurnReason::Continue);
        }
    }

    /// Ends a turn whose answer has no calls. Held input starts the next turn; without any the thread becomes idle.
    fn finish_turn(&mut self) {
        let queued = if self.held_must_wait() { self.release(Queue::UntilIdle) } else { None };
        let released = queued
            .or_else(|| self.release(Queue::UntilBatchCloses))
            .or_else(|| self.release(Queue::UntilIdle));
        if let Some(reason) = released {
            return self.ask(reason);
        }
        self.head.phase = Phase::Idle;
        if self.head.background.is_empty() {
            self.head.settled_up_to = self.head.seq;
        }
    }

    /// Closes an event child that has nothing left to do.
    pub(crate) fn close_if_done(&mut self) {
        let head = &self.head;
        let nothing_left =
            head.background.is_empty() && head.subscriptions.is_empty() && head.children().next().is_none();
        if head.origin.is_event() && head.phase == Phase::Idle && nothing_left {
            self.close();
        }
    }

    /// Moves the open calls to the background, appends held input, and asks the model.
    pub(crate) fn join(&mut self) {
        self.move_batch_to_background();
        let reason = self.release(Queue::UntilBatchCloses).unwrap_or(TurnReason::External);
        self.ask(reason);
    }

    fn handle_calls(
        &mut self,
        text: String,
        planned: Vec<PlannedCall>,
        thoughts: Option<Thoughts>,
        usage: Option<Usage>,
    ) {
        let mut calls: Vec<CallEntry> = Vec::with_capacity(planned.len());
        let mut plans = Vec::with_capacity(planned.len());
        for PlannedCall { model_id, name, arguments, display, plan } in planned {
            calls.push(CallEntry { id: self.new_call_id(), model_id, name, arguments, display });
            plans.push(plan);
        }
        self.append(Item::Assistant { text, calls: calls.clone(), thoughts, usage });
        let answer =
            AnswerCalls { seq: self.head.seq, ids: calls.iter().map(|call| call.id.clone()).collect() };
        let closes = |plan: &Plan| matches!(plan, Plan::BuiltIn(BuiltIn::CloseThread { .. }));
        let closing = plans.iter().position(closes);
        for (at, (call, plan)) in calls.into_iter().zip(plans).enumerate() {
            match plan {
                // A closed thread could not receive the results.
                Plan::Invoke(_) | Plan::Approve { .. } if closing.is_some() => {
                    self.append(Item::runtime_result(call.id, texts::NOT_CALLED));
                }
                Plan::BuiltIn(_) if closing.is_some_and(|closing| closing < at) => {
                    self.append(Item::runtime_result(call.id, texts::NOT_CALLED));
                }
                Plan::Invoke(server) => self.invoke(call, server, answer.seq, None),
                Plan::Approve { server, prompt } => self.invoke(call, server, answer.seq, Some(prompt)),
                Plan::BuiltIn(tool) => self.run_built_in(tool, call, &answer),
                Plan::Refuse(text) => self.append(Item::runtime_result(call.id, text)),
            }
        }
        if closing.is_some() {
            self.close();
        }
    }

    /// Opens a call. If `prompt` is set, the user has to allow the call before it is sent.
    fn invoke(&mut self, call: CallEntry, server: Server, seq: Seq, prompt: Option<String>) {
        let limit = self.limits.open_calls;
        if self.head.open_calls().count() >= limit {
            return self.append(Item::runtime_result(call.id, texts::too_many_open_calls(limit)));
        }
        let Arguments::Given(arguments) = call.arguments else {
            return self.append(Item::runtime_result(call.id, "Error: the arguments are not a JSON object"));
        };
        let open = OpenCall {
            id: call.id,
            model_id: call.model_id,
            name: call.name,
            until: self.limits.call_timeout_of(&server).map(|timeout| self.now.plus(timeout)),
            server,
            seq,
            since: self.now,
            unapproved: prompt.is_some(),
            problem: None,
        };
        match prompt {
            Some(prompt) => self.ask_for_approval(open, prompt),
            None => {
                self.add_to_batch(open.clone());
                self.writes.push(Write::Open(open.clone()));
                self.effects.push(Effect::Invoke { call: open, arguments });
            }
        }
    }

    /// Handles the due time of a thread: a failed turn is retried, a pause ends, or held input is released.
    pub(crate) fn handle_due(&mut self) -> Result<(), Ignored> {
        if !self.head.is_due(self.limits, self.now) {
            return Err(Ignored::NotDue);
        }
        match self.head.phase {
            Phase::Waiting { .. } if self.head.held.is_empty() => self.report_idle(),
            Phase::Waiting { .. } if self.held_must_wait() => return Err(Ignored::NotDue),
            Phase::Waiting { .. } => self.join(),
            // The budget's hour is over. The turn counts as a wake, but not as new external input.
            Phase::Paused(_) => {
                self.close_batch(TurnReason::Session { external_input_at: self.head.external_input_at })
            }
            // A failed thread retries. Held input is released with the retry.
            _ => self.close_batch(TurnReason::Continue),
        }
        Ok(())
    }

    pub(crate) fn fail(&mut self, why: String, retry: TurnRetry) {
        // A failed turn is not counted in `turns_since_external_input`.
        self.head.turns_since_external_input = self.head.turns_since_external_input.saturating_sub(1);
        // If the clock was set back, the time starts again. Otherwise the thread would retry for longer than it may.
        let since = self.failing_since.filter(|since| *since <= self.now).unwrap_or(self.now);
        let failing_for = self.now.since(since);
        let (shortest, longest) = RETRY_PAUSE;
        let in_time = failing_for < self.limits.failed_retry_for;
        // No user watches an event child, so it retries whatever the reason, and is closed when the retries end.
        let is_event_child = self.head.origin.is_event();
        let retries = in_time && (retry == TurnRetry::Later || is_event_child);
        let retry_at = retries.then(|| self.now.plus(failing_for.clamp(shortest, longest)));
        self.append(Item::notice(format!("the model request failed: {why}")));
        let given_up = (is_event_child && !in_time).then(|| why.clone());
        self.head.phase = Phase::Failed { why, since, retry_at };
        if let Some(why) = given_up {
            self.close_failed(&why);
        }
    }

    /// Closes an event child whose requests to the model failed for too long, and sends its parent a notice.
    fn close_failed(&mut self, why: &str) {
        if let Some((parent, call, tool)) = self.head.origin.parent() {
            let (parent, text) = (parent.clone(), texts::event_child_failed(call, tool, why));
            self.send(parent, ThreadMessage::Notice { text });
        }
        self.close();
    }
}
