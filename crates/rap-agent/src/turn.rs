//! The model's side: its answers and its failures.

use std::time::Duration;

use rap_protocol::CallId;

use crate::step::{Stepping, Wake};
use crate::words;
use crate::{
    Again, Answer, Arguments, BuiltIn, CallEntry, Effect, Item, OpenCall, Phase, Plan, PlannedCall, Queue,
    Seq, Server, Thoughts, ThreadMessage, Write,
};

/// The calls of an answer.
pub(crate) struct AnswerCalls {
    /// The assistant entry that makes them.
    pub(crate) seq: Seq,
    pub(crate) ids: Vec<CallId>,
}

/// The shortest and the longest pause before a failed thread asks again by itself.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(3600));

impl Stepping<'_> {
    pub(crate) fn take_answer(&mut self, answer: Answer) {
        let Answer { text, calls, thoughts, usage } = answer;
        if let Some(up_to) = self.head.asking_up_to() {
            self.head.answered = up_to;
        }
        self.head.prompt_tokens = usage.input;
        self.add_usage(usage);
        (self.dropped, self.failing_since) = (0, None);
        if calls.is_empty() {
            self.append(Item::Assistant { text, calls: Vec::new(), thoughts });
            return self.finish_turn();
        }
        self.head.phase = Phase::Waiting { batch: Vec::new() };
        self.take_calls(text, calls, thoughts);
        if self.head.is_closed() {
            return;
        }
        if self.head.batch().is_empty() {
            return self.close_batch(Wake::Continue);
        }
        // A user who spoke while the model was asked does not wait for the calls.
        if self.head.held.user {
            self.join();
        } else if !self.head.held.is_empty() && !self.held_must_wait() {
            self.end_sleeps_for_input();
        } else if !self.head.queued.is_empty() && self.is_sleeping() {
            self.continue_batch(Wake::Continue);
        }
    }

    /// The answer has no calls: held input is next, or the thread is idle.
    fn finish_turn(&mut self) {
        let queued = if self.held_must_wait() { self.release(Queue::Queued) } else { None };
        let released = queued.or_else(|| self.release(Queue::Held)).or_else(|| self.release(Queue::Queued));
        if let Some(wake) = released {
            return self.ask(wake);
        }
        self.head.phase = Phase::Idle;
        if self.head.background.is_empty() {
            self.head.settled = self.head.seq;
        }
    }

    /// A thread that was made for events is closed when it has nothing left to do.
    pub(crate) fn close_if_done(&mut self) {
        let head = &self.head;
        let nothing_left =
            head.background.is_empty() && head.subscriptions.is_empty() && head.children().next().is_none();
        if head.origin.is_event() && head.phase == Phase::Idle && nothing_left {
            self.close();
        }
    }

    /// The open calls go on in the background, held input is written, and the model is asked.
    pub(crate) fn join(&mut self) {
        self.move_batch_to_background();
        let wake = self.release(Queue::Held).unwrap_or(Wake::Outside);
        self.ask(wake);
    }

    fn take_calls(&mut self, text: String, planned: Vec<PlannedCall>, thoughts: Option<Thoughts>) {
        let mut calls: Vec<CallEntry> = Vec::with_capacity(planned.len());
        let mut plans = Vec::with_capacity(planned.len());
        for PlannedCall { call_id, name, arguments, display, plan } in planned {
            calls.push(CallEntry { id: self.new_call_id(), call_id, name, arguments, display });
            plans.push(plan);
        }
        self.append(Item::Assistant { text, calls: calls.clone(), thoughts });
        let answer =
            AnswerCalls { seq: self.head.seq, ids: calls.iter().map(|call| call.id.clone()).collect() };
        let closes = |plan: &Plan| matches!(plan, Plan::BuiltIn(BuiltIn::CloseThread { .. }));
        let closing = plans.iter().position(closes);
        for (at, (call, plan)) in calls.into_iter().zip(plans).enumerate() {
            match plan {
                // Nobody would be there for the results.
                Plan::Invoke(_) | Plan::Approve { .. } if closing.is_some() => {
                    self.append(Item::made(call.id, words::NOT_CALLED));
                }
                Plan::BuiltIn(_) if closing.is_some_and(|closing| closing < at) => {
                    self.append(Item::made(call.id, words::NOT_CALLED));
                }
                Plan::Invoke(server) => self.invoke(call, server, answer.seq, None),
                Plan::Approve { server, prompt } => self.invoke(call, server, answer.seq, Some(prompt)),
                Plan::BuiltIn(tool) => self.run_built_in(tool, call, &answer),
                Plan::Refuse(text) => self.append(Item::made(call.id, text)),
            }
        }
        if closing.is_some() {
            self.close();
        }
    }

    /// Opens a call; with a prompt, a person has to allow it first.
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

    pub(crate) fn fail(&mut self, why: String, again: Again) {
        // A question without an answer is not the model talking to itself.
        self.head.turns_awake = self.head.turns_awake.saturating_sub(1);
        let since = *self.failing_since.get_or_insert(self.now);
        let failing_for = self.now.since(since);
        let (shortest, longest) = RETRY_PAUSE;
        let in_time = failing_for < self.limits.failed_retry_for;
        // Nobody looks after a thread for events: it tries again whatever the reason, and is closed in the end.
        let for_events = self.head.origin.is_event();
        let retries = in_time && (again == Again::Later || for_events);
        let retry_at = retries.then(|| self.now.plus(failing_for.clamp(shortest, longest)));
        self.append(Item::notice(format!("the model could not be asked: {why}")));
        let given_up = (for_events && !in_time).then(|| why.clone());
        self.head.phase = Phase::Failed { why, since, retry_at };
        if let Some(why) = given_up {
            self.close_failed(&why);
        }
    }

    /// Closes a thread for events that could not ask the model for too long, and tells people at its parent.
    fn close_failed(&mut self, why: &str) {
        if let Some((parent, call, tool)) = self.head.origin.parent() {
            let (parent, text) = (parent.clone(), words::event_child_failed(call, tool, why));
            self.send(parent, ThreadMessage::Notice { text });
        }
        self.close();
    }
}
