//! Input from tools: results, events, questions to the user, views, and timers of calls.

use std::time::Duration;

use rap_protocol::{AuthUrl, Body, CallId, Content};
use serde_json::Value;

use crate::head::CallbackProblem;
use crate::step::{StepBuilder, TurnReason};
use crate::texts;
use crate::{
    CallState, Choice, Effect, Event, Ignored, Item, NewQuestion, OpenCall, PastCall, Question, QuestionKind,
    Queue, Subscription, ToolResult, Write,
};

/// Time after which a call whose callback was refused is settled, if no valid callback follows.
pub(crate) const REFUSED_CALLBACK_GRACE: Duration = Duration::from_secs(5 * 60);
/// A shorter sleep does not count as external input.
const LONG_SLEEP: Duration = Duration::from_secs(10);

impl StepBuilder<'_> {
    pub(crate) fn handle_result(&mut self, call: CallId, result: ToolResult) -> Result<(), Ignored> {
        // A call that was never sent cannot be answered.
        if self.head.open_call(&call).is_some_and(|open| !open.is_sent()) {
            return Err(Ignored::UnknownCall);
        }
        if let Some(open) = self.take_from_batch(&call) {
            let result = self.limit_size(result);
            let ToolResult { content, display, .. } = self.settle_with_result(open, result);
            self.append(Item::Result { call_id: call, content, display, synthetic: false });
            self.note_external_input();
            self.continue_batch(TurnReason::Continue);
            return Ok(());
        }
        // A late result of an open call is never refused: the limit of open calls bounds their number.
        if let Some(open) = self.take_from_background(&call) {
            let name = open.name.clone();
            let result = self.limit_size(result);
            let result = self.settle_with_result(open, result);
            let items = self.synthetic(&name, &call, texts::late_kind(&call), result);
            self.handle_input(items, TurnReason::External);
            return Ok(());
        }
        let past = self.facts.call.take().ok_or(Ignored::UnknownCall)?;
        self.handle_late_result(call, result, past)
    }

    fn handle_late_result(
        &mut self,
        call: CallId,
        mut result: ToolResult,
        past: PastCall,
    ) -> Result<(), Ignored> {
        match past.state {
            CallState::Failed | CallState::TimedOut => {}
            CallState::Interrupted => return Err(Ignored::SettledCall),
            CallState::Returned | CallState::Subscribed | CallState::Ended => return Err(Ignored::Duplicate),
            CallState::Open => return Err(Ignored::UnknownCall),
        }
        self.check_space(Queue::UntilBatchCloses)?;
        if result.subscription {
            add_note(&mut result.content, texts::too_late_to_subscribe());
            self.effects.push(Effect::NotifyCancel { call: call.clone() });
        }
        let items = self.synthetic(&past.name, &call, texts::late_kind(&call), result);
        self.settle(call, CallState::Returned);
        self.handle_input(items, TurnReason::External);
        Ok(())
    }

    /// Replaces a result that does not fit into the next prompt together with the others. Its call is settled
    /// nevertheless.
    fn limit_size(&mut self, result: ToolResult) -> ToolResult {
        let (bytes, limit) = (result.bytes(), self.limits.result_bytes);
        let total = self.head.result_bytes.saturating_add(bytes);
        if total > limit {
            let subscription = result.subscription;
            return ToolResult { subscription, ..ToolResult::text(texts::result_too_large(bytes, limit)) };
        }
        self.head.result_bytes = total;
        result
    }

    /// Settles an open call by its result, which may confirm a subscription.
    fn settle_with_result(&mut self, open: OpenCall, mut result: ToolResult) -> ToolResult {
        let limit = self.limits.subscriptions;
        if !result.subscription {
            self.settle(open.id, CallState::Returned);
        } else if self.head.subscriptions.len() >= limit {
            add_note(&mut result.content, texts::too_many_subscriptions(limit));
            self.settle(open.id.clone(), CallState::Returned);
            self.effects.push(Effect::NotifyCancel { call: open.id });
        } else {
            self.settle(open.id.clone(), CallState::Subscribed);
            let subscription = Subscription::new(open, self.now);
            self.head.subscriptions.push(subscription);
        }
        result
    }

    /// Settles an open call with a result that the runtime wrote.
    pub(crate) fn settle_with_text(
        &mut self,
        call: &CallId,
        state: CallState,
        text: String,
    ) -> Result<(), Ignored> {
        if let Some(open) = self.take_from_batch(call) {
            self.settle(open.id.clone(), state);
            self.append(Item::runtime_result(open.id, text));
            self.continue_batch(TurnReason::Continue);
        } else if let Some(open) = self.take_from_background(call) {
            self.settle(open.id, state);
            let items = self.synthetic(&open.name, call, texts::late_kind(call), ToolResult::text(text));
            self.handle_input(items, TurnReason::External);
        } else {
            return Err(Ignored::SettledCall);
        }
        Ok(())
    }

    /// Handles the timer of a call: a schedule, the end of a sleep, a timeout, or the end of the grace period after a
    /// refused callback.
    pub(crate) fn handle_timer(&mut self, call: &CallId) -> Result<(), Ignored> {
        if self.head.subscription(call).is_some() {
            return self.handle_schedule_timer(call);
        }
        let open = self.head.open_call(call).ok_or(Ignored::SettledCall)?.clone();
        if open.timer().is_none_or(|at| at > self.now) {
            // The timer is due earlier than before if the clock was set back.
            return if self.moved_timers.contains(call) { Ok(()) } else { Err(Ignored::NotDue) };
        }
        if let Some(CallbackProblem { why, settle_at }) = open.problem
            && open.until.is_none_or(|until| settle_at < until)
        {
            return self.settle_with_text(call, CallState::Failed, texts::result_refused(&why));
        }
        let Some(until) = open.until else { return Err(Ignored::NotDue) };
        if open.server.is_runtime() {
            self.end_sleeps(|own| own.id == *call);
            let long = until.since(open.since) >= LONG_SLEEP;
            if long {
                self.note_external_input();
                self.reset_turns();
            }
            self.continue_batch(if long { TurnReason::External } else { TurnReason::Continue });
            return Ok(());
        }
        if open.unapproved {
            let text = texts::approval_expired(until.since(open.since));
            return self.settle_with_text(call, CallState::Interrupted, text);
        }
        self.settle_with_text(call, CallState::TimedOut, texts::timed_out(until.since(open.since)))
    }

    /// Records that a callback of the call was refused. Users see the reason, and the call is settled after a while.
    pub(crate) fn record_problem(&mut self, call: &CallId, why: String) -> Result<(), Ignored> {
        let settle_at = self.now.plus(REFUSED_CALLBACK_GRACE);
        let open = self.open_call_mut(call).filter(|open| open.is_sent()).ok_or(Ignored::SettledCall)?;
        match &mut open.problem {
            // A repetition of the same problem does not postpone the settlement.
            Some(problem) if problem.why == why => return Err(Ignored::Duplicate),
            Some(problem) => problem.why = why,
            problem => *problem = Some(CallbackProblem { why, settle_at }),
        }
        let at = open.timer();
        self.writes.push(Write::Timer { call: call.clone(), at });
        Ok(())
    }

    /// Forgets an earlier problem of the call after a valid callback.
    fn clear_problem(&mut self, call: &CallId) {
        let Some(open) = self.open_call_mut(call) else { return };
        if open.problem.take().is_some() {
            let at = open.timer();
            self.writes.push(Write::Timer { call: call.clone(), at });
        }
    }

    pub(crate) fn handle_event(&mut self, call: CallId, event: Event) -> Result<(), Ignored> {
        let Some(subscription) = self.head.subscription(&call).cloned() else {
            return Err(match self.facts.call {
                _ if self.head.is_open(&call) => Ignored::NotYetSubscribed,
                Some(_) => Ignored::EndedSubscription,
                None => Ignored::UnknownCall,
            });
        };
        if self.facts.event_is_known {
            return Err(Ignored::Duplicate);
        }
        if !event.associative && self.facts.thread.depth < self.limits.depth {
            self.handle_event_in_child(&subscription, &event)?;
        } else {
            self.handle_event_inline(&subscription, &event)?;
        }
        if event.is_final {
            self.head.subscriptions.retain(|subscription| subscription.id != call);
            self.settle(call, CallState::Ended);
        } else if let Some(event) = event.id {
            self.record_event_id(call, event);
        }
        Ok(())
    }

    /// Records the id of an event. Beyond the limit the oldest id is deleted, and the user is told once.
    fn record_event_id(&mut self, call: CallId, event: rap_protocol::EventId) {
        let bound = self.limits.event_ids;
        let Some(subscription) = self.head.subscriptions.iter_mut().find(|active| active.id == call) else {
            return;
        };
        subscription.recorded_event_ids += 1;
        let number = subscription.recorded_event_ids;
        if number == bound + 1 {
            self.append(Item::notice(texts::event_ids_forgotten(&call, bound)));
        }
        self.writes.push(Write::RecordEventId { call, event, number, forget: number.saturating_sub(bound) });
    }

    pub(crate) fn handle_event_inline(
        &mut self,
        subscription: &Subscription,
        event: &Event,
    ) -> Result<(), Ignored> {
        self.check_space(Queue::UntilBatchCloses)?;
        let (kind, result) = (event_kind(subscription, event), ToolResult::text(&event.text));
        let items = self.synthetic(&subscription.name, &subscription.id, kind, result);
        self.handle_input(items, TurnReason::External);
        Ok(())
    }

    /// Ends an active subscription that its tool server has lost. A last event tells the model.
    pub(crate) fn lose_subscription(&mut self, call: &CallId) -> Result<(), Ignored> {
        let subscription = self.head.subscription(call).cloned().ok_or(Ignored::EndedSubscription)?;
        let event =
            Event { id: None, text: texts::SUBSCRIPTION_LOST.into(), associative: true, is_final: true };
        self.handle_event_inline(&subscription, &event)?;
        self.head.subscriptions.retain(|active| active.id != *call);
        self.settle(call.clone(), CallState::Ended);
        Ok(())
    }

    pub(crate) fn request_sign_in(&mut self, call: CallId, url: AuthUrl) -> Result<(), Ignored> {
        let sign_in = |question: &&Question| question.call == call && question.kind == QuestionKind::SignIn;
        let asked = self.head.questions.iter().find(sign_in).map(|question| question.number);
        let number = match asked {
            Some(number) => number,
            None => self.new_question(call.clone(), QuestionKind::SignIn)?,
        };
        self.clear_problem(&call);
        self.writes.push(Write::Question { number, call, question: NewQuestion::SignIn(url) });
        Ok(())
    }

    pub(crate) fn request_choice(&mut self, call: CallId, choice: Choice) -> Result<(), Ignored> {
        let kind = QuestionKind::Choice {
            choices: choice.choices.len(),
            default: choice.default,
            digest: choice.digest,
        };
        let same = |question: &Question| matches!(question.kind, QuestionKind::Choice { digest, .. } if digest == choice.digest);
        if self.head.questions.iter().any(|question| question.call == call && same(question)) {
            // A repeated question is ignored, but it is a valid callback.
            let problem = self.head.open_call(&call).is_some_and(|open| open.problem.is_some());
            self.clear_problem(&call);
            return if problem { Ok(()) } else { Err(Ignored::Duplicate) };
        }
        let number = self.new_question(call.clone(), kind)?;
        self.clear_problem(&call);
        self.writes.push(Write::Question { number, call, question: NewQuestion::Choice(choice) });
        Ok(())
    }

    fn new_question(&mut self, call: CallId, kind: QuestionKind) -> Result<u64, Ignored> {
        if !self.head.open_call(&call).is_some_and(OpenCall::is_sent) {
            return Err(Ignored::SettledCall);
        }
        if !self.head.may_ask_user(self.limits) {
            return Err(Ignored::Full("too many questions wait for the user"));
        }
        Ok(self.add_question(call, kind))
    }

    /// Stores a view of an open call, a call that has returned, or an active subscription.
    pub(crate) fn store_view(
        &mut self,
        call: &CallId,
        view_type: String,
        content: Value,
    ) -> Result<(), Ignored> {
        let open = self.head.open_call(call).filter(|open| open.is_sent()).map(|open| open.server.clone());
        let active = || self.head.subscription(call).map(|subscription| subscription.server.clone());
        let returned = || {
            let past = self.facts.call.as_ref()?;
            (past.state == CallState::Returned).then(|| past.server.clone())
        };
        let server = open.or_else(active).or_else(returned).filter(|server| !server.is_runtime());
        let server = server.ok_or(Ignored::SettledCall)?;
        self.clear_problem(call);
        self.writes.push(Write::View { server, view_type, content });
        Ok(())
    }
}

impl Subscription {
    pub(crate) fn new(open: OpenCall, since: rap_protocol::Timestamp) -> Subscription {
        let OpenCall { id, model_id, name, server, seq, .. } = open;
        Subscription {
            id,
            model_id,
            name,
            server,
            seq,
            since,
            next: None,
            next_unknown: false,
            recorded_event_ids: 0,
        }
    }
}

pub(crate) fn event_kind(subscription: &Subscription, event: &Event) -> String {
    if event.is_final { texts::final_kind(&subscription.id) } else { texts::event_kind(&subscription.id) }
}

fn add_note(content: &mut Body, note: String) {
    match content {
        Body::Text(text) => {
            text.push_str("\n\n");
            text.push_str(&note);
        }
        Body::Content(items) => items.push(Content::Text { text: note }),
    }
}
