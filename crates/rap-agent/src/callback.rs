//! The tools' side: results, events, questions to people, views.

use rap_protocol::{AuthUrl, Body, CallId, Content};
use serde_json::Value;

use crate::step::{Stepping, take};
use crate::words;
use crate::{
    Birth, CallState, Choice, Effect, Event, Ignored, Item, NewQuestion, OpenCall, Outcome, PastCall,
    Question, QuestionKind, Queue, Subscription, Write,
};

impl Stepping<'_> {
    pub(crate) fn take_result(
        &mut self,
        call: CallId,
        result: Outcome,
        past: Option<PastCall>,
    ) -> Result<(), Ignored> {
        // What no server has, none can have a word on.
        if self.head.open_calls().any(|open| open.id == call && !open.is_sent()) {
            return Err(Ignored::UnknownCall);
        }
        if let Some(open) = take(&mut self.head.batch, &call) {
            let Outcome { content, display, .. } = self.confirm(open, result);
            self.append(Item::Result { call_id: call, content, display, synthetic: false });
            self.move_on();
            return Ok(());
        }
        // The room for results behind placeholders is bounded by the number of open calls.
        if let Some(open) = take(&mut self.head.running, &call) {
            let name = open.name.clone();
            let result = self.confirm(open, result);
            let items = self.synthetic(&name, &call, words::late_kind(&call), result);
            self.take_input(items);
            return Ok(());
        }
        self.take_late_result(call, result, past.ok_or(Ignored::UnknownCall)?)
    }

    fn take_late_result(&mut self, call: CallId, mut result: Outcome, past: PastCall) -> Result<(), Ignored> {
        match past.state {
            CallState::Failed | CallState::TimedOut => {}
            CallState::Interrupted => return Err(Ignored::SettledCall),
            CallState::Returned | CallState::Subscribed | CallState::Ended => return Err(Ignored::Duplicate),
            CallState::Open => return Err(Ignored::UnknownCall),
        }
        self.room(Queue::Held)?;
        if result.subscription {
            add_note(&mut result.content, words::too_late_to_subscribe());
            self.effects.push(Effect::NotifyCancel { call: call.clone() });
        }
        let items = self.synthetic(&past.name, &call, words::late_kind(&call), result);
        self.settle(call, CallState::Returned);
        self.take_input(items);
        Ok(())
    }

    /// Settles an open call by its result, which may confirm a subscription.
    fn confirm(&mut self, open: OpenCall, mut result: Outcome) -> Outcome {
        let limit = self.limits.subscriptions;
        let OpenCall { id, name, server, seq, .. } = open;
        if !result.subscription {
            self.settle(id, CallState::Returned);
        } else if self.head.subscriptions.len() >= limit {
            add_note(&mut result.content, words::too_many_subscriptions(limit));
            self.settle(id.clone(), CallState::Returned);
            self.effects.push(Effect::NotifyCancel { call: id });
        } else {
            self.settle(id.clone(), CallState::Subscribed);
            let since = self.now;
            self.head.subscriptions.push(Subscription { id, name, server, seq, since, next: None });
        }
        result
    }

    /// An open call gets a result of the runtime's own.
    pub(crate) fn give_up(&mut self, call: &CallId, state: CallState, text: String) -> Result<(), Ignored> {
        if let Some(open) = take(&mut self.head.batch, call) {
            self.settle(open.id.clone(), state);
            self.append(Item::made(open.id, text));
            self.move_on();
        } else if let Some(open) = take(&mut self.head.running, call) {
            self.settle(open.id, state);
            let result = Outcome { content: Body::Text(text), display: Vec::new(), subscription: false };
            let items = self.synthetic(&open.name, call, words::late_kind(call), result);
            self.take_input(items);
        } else {
            return Err(Ignored::SettledCall);
        }
        Ok(())
    }

    pub(crate) fn time_out(&mut self, call: &CallId) -> Result<(), Ignored> {
        let open = self.head.open_calls().find(|open| open.id == *call).ok_or(Ignored::SettledCall)?;
        let until = open.until.filter(|until| *until <= self.now).ok_or(Ignored::NotDue)?;
        if open.server.is_runtime() {
            self.rouse(|own| own.id == *call);
            // Time that passes is something from outside.
            self.head.turns_awake = 0;
            self.move_on();
            return Ok(());
        }
        if open.unapproved {
            let text = words::lapsed(until.since(open.since));
            return self.give_up(call, CallState::Interrupted, text);
        }
        let text = words::timed_out(until.since(open.since));
        self.give_up(call, CallState::TimedOut, text)
    }

    pub(crate) fn take_event(
        &mut self,
        call: CallId,
        event: Event,
        past: Option<PastCall>,
        seen: bool,
        birth: Option<Birth>,
    ) -> Result<(), Ignored> {
        let Some(subscription) = self.head.subscription(&call).cloned() else {
            let open = self.head.is_open(&call);
            return Err(match past {
                _ if open => Ignored::NotYetSubscribed,
                Some(_) => Ignored::EndedSubscription,
                None => Ignored::UnknownCall,
            });
        };
        if seen {
            return Err(Ignored::Duplicate);
        }
        match birth {
            Some(birth) if !event.associative && birth.depth <= self.limits.depth => {
                self.take_aside(&subscription, &event, birth)?
            }
            _ => self.take_inline(&subscription, &event)?,
        }
        if event.is_final {
            self.head.subscriptions.retain(|subscription| subscription.id != call);
            self.settle(call, CallState::Ended);
        } else if let Some(event) = event.id {
            self.writes.push(Write::Seen { call, event });
        }
        Ok(())
    }

    pub(crate) fn take_inline(&mut self, subscription: &Subscription, event: &Event) -> Result<(), Ignored> {
        self.room(Queue::Held)?;
        let items =
            self.synthetic(&subscription.name, &subscription.id, kind(subscription, event), happened(event));
        self.take_input(items);
        Ok(())
    }

    pub(crate) fn want_sign_in(&mut self, call: CallId, url: AuthUrl) -> Result<(), Ignored> {
        let sign_in = |question: &&Question| question.call == call && question.kind == QuestionKind::SignIn;
        let asked = self.head.questions.iter().find(sign_in).map(|question| question.no);
        let no = match asked {
            Some(no) => no,
            None => self.question(call.clone(), QuestionKind::SignIn)?,
        };
        self.writes.push(Write::Ask { no, call, question: NewQuestion::SignIn(url) });
        Ok(())
    }

    pub(crate) fn want_choice(&mut self, call: CallId, choice: Choice) -> Result<(), Ignored> {
        let kind = QuestionKind::Choice {
            choices: choice.choices.len(),
            default: choice.default,
            digest: choice.digest,
        };
        let same = |question: &Question| matches!(question.kind, QuestionKind::Choice { digest, .. } if digest == choice.digest);
        if self.head.questions.iter().any(|question| question.call == call && same(question)) {
            return Err(Ignored::Duplicate);
        }
        let no = self.question(call.clone(), kind)?;
        self.writes.push(Write::Ask { no, call, question: NewQuestion::Choice(choice) });
        Ok(())
    }

    fn question(&mut self, call: CallId, kind: QuestionKind) -> Result<u64, Ignored> {
        if !self.head.open_calls().any(|open| open.id == call && open.is_sent()) {
            return Err(Ignored::SettledCall);
        }
        if self.head.questions.len() >= self.limits.questions {
            return Err(Ignored::Full("too many questions wait for a person"));
        }
        self.head.minted += 1;
        let no = self.head.minted;
        self.head.questions.push(Question { no, call, kind, answered: false });
        Ok(no)
    }

    pub(crate) fn view(&mut self, call: &CallId, view_type: String, content: Value) -> Result<(), Ignored> {
        let open = self.head.open_calls().find(|open| open.id == *call && open.is_sent());
        let open = open.map(|open| &open.server);
        let active = || self.head.subscription(call).map(|subscription| &subscription.server);
        let server = open.or_else(active).cloned().ok_or(Ignored::SettledCall)?;
        self.writes.push(Write::View { server, view_type, content });
        Ok(())
    }
}

pub(crate) fn kind(subscription: &Subscription, event: &Event) -> String {
    if event.is_final { words::final_kind(&subscription.id) } else { words::event_kind(&subscription.id) }
}

pub(crate) fn happened(event: &Event) -> Outcome {
    Outcome { content: Body::Text(event.text.clone()), display: Vec::new(), subscription: false }
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
