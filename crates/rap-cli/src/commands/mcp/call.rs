//! State of one tool call, as its callbacks change it.
//!
//! A call lives in memory only: it ends with this process, which tells the tool servers so. State decides what a callback
//! changes, not the time at which it arrives; a repeated callback changes nothing.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_protocol::{
    AuthUrl, Body, CallId, Callback, EventId, ResponseUrl, SubscriptionEvent, ThreadId, ToolName, UserChoice,
};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// Maximum number of events that are kept of one subscription. The oldest ones make room for new ones.
pub(super) const EVENTS: usize = 1_000;
/// Maximum size of the events that are kept of one subscription, in bytes.
pub(super) const EVENT_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of progress reports of one call that wait to be sent. The oldest ones make room for new ones.
const PROGRESS: usize = 64;
/// Maximum number of questions of one call.
const QUESTIONS: usize = 100;

/// A call that was sent to a tool server.
pub(super) struct Call {
    pub(super) id: CallId,
    pub(super) group: ThreadId,
    pub(super) tool: ToolName,
    state: Mutex<State>,
    /// Counts the changes of the state.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    result: Option<Outcome>,
    subscription: Subscription,
    /// Questions that nobody has answered yet, oldest first.
    questions: VecDeque<Question>,
    /// All questions so far, so that a repeated message is not a new question.
    asked: Vec<ResponseUrl>,
    signs_in: Option<AuthUrl>,
    progress: VecDeque<Progress>,
    /// Number of progress reports so far.
    progress_count: usize,
}

/// Result of a call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    pub(super) body: Body,
    /// True if the call continues as a subscription.
    pub(super) is_subscription: bool,
}

#[derive(Default)]
struct Subscription {
    events: VecDeque<Event>,
    bytes: usize,
    /// Number of events so far.
    count: u64,
    ended: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Event {
    number: u64,
    id: Option<EventId>,
    text: String,
    is_final: bool,
}

/// Question of a tool to a person.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Question {
    Choice(UserChoice),
    SignIn(AuthUrl),
}

/// Progress that the tool has reported.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Progress {
    /// Part of the work that is done, from 0 to 1.
    pub(super) fraction: Option<f64>,
    pub(super) text: String,
}

/// Next change of a call that its caller has to react to.
pub(super) enum Change {
    Settled(Outcome),
    Question(Question),
    /// The time is over, and the call is still running.
    StillRunning,
    Cancelled,
}

/// Effect of a callback.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// It changed nothing: it is a repetition, or it is late.
    Ignored,
    Changed,
    /// The call is now a subscription, or has a new event.
    Resource,
}

impl Call {
    pub(super) fn new(id: CallId, group: ThreadId, tool: ToolName) -> Call {
        Call { id, group, tool, state: Mutex::default(), changes: watch::Sender::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Applies a callback whose ids are those of this call.
    pub(super) fn apply(&self, callback: Callback) -> Applied {
        let applied = self.state().apply(callback);
        if applied != Applied::Ignored {
            self.changed();
        }
        applied
    }

    /// Settles the call with a result that its server did not send. Returns false if it had one.
    pub(super) fn settle(&self, text: String) -> bool {
        let outcome = Outcome { body: Body::Text(text), is_subscription: false };
        let settled = self.state().settle(outcome);
        if settled {
            self.changed();
        }
        settled
    }

    /// Ends a subscription, so that no more events are accepted.
    pub(super) fn end_subscription(&self) {
        self.state().subscription.ended = true;
        self.changed();
    }

    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.state().result.clone()
    }

    /// Returns true if the server still has to be told when the call is not wanted any more.
    pub(super) fn is_open(&self) -> bool {
        let state = self.state();
        match &state.result {
            None => true,
            Some(outcome) => outcome.is_subscription && !state.subscription.ended,
        }
    }

    pub(super) fn progress(&self) -> Option<Progress> {
        self.state().progress.back().cloned()
    }

    /// Returns the number of progress reports so far, and those after the first `known` ones.
    pub(super) fn progress_after(&self, known: usize) -> (usize, Vec<Progress>) {
        let state = self.state();
        let new = state.progress_count.saturating_sub(known).min(state.progress.len());
        (state.progress_count, state.progress.iter().skip(state.progress.len() - new).cloned().collect())
    }

    /// Number of changes so far. It changes with every callback that changes something.
    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Waits for the next change that the caller has to react to.
    pub(super) async fn next(&self, until: Instant, cancelled: &CancellationToken) -> Change {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(change) = self.state().next() {
                return change;
            }
            tokio::select! {
                () = cancelled.cancelled() => return Change::Cancelled,
                changed = timeout_at(until, changes.changed()) => {
                    if changed.is_err() {
                        return Change::StillRunning;
                    }
                }
            }
        }
    }

    /// Waits until the call has a result.
    pub(super) async fn settled(&self) {
        let mut changes = self.changes.subscribe();
        while self.outcome().is_none() && changes.changed().await.is_ok() {}
    }

    /// Puts a question back that was not answered.
    pub(super) fn ask_again(&self, question: Question) {
        self.state().questions.push_front(question);
        self.changed();
    }

    /// Returns true if the call has a result or an event after `after`.
    pub(super) fn has_content_after(&self, after: u64) -> bool {
        self.state().has_content_after(after)
    }

    /// Waits until the call has a result or an event after `after`, at most for `time`.
    pub(super) async fn wait_for_content_after(&self, after: u64, time: Duration) {
        let mut changes = self.changes.subscribe();
        let until = Instant::now() + time;
        loop {
            changes.borrow_and_update();
            if self.has_content_after(after) || timeout_at(until, changes.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Describes the call with its events after `after`: the content of its resource.
    pub(super) fn describe(&self, after: u64) -> Value {
        let state = self.state();
        let mut shown = json!({"id": self.id.as_str(), "tool": self.tool.as_str()});
        match &state.result {
            None => shown["status"] = "running".into(),
            Some(outcome) if outcome.is_subscription => {
                let subscription = &state.subscription;
                shown["status"] = if subscription.ended { "ended" } else { "active" }.into();
                shown["confirmation"] = json!(outcome.body);
                shown["events"] = subscription.after(after).collect();
                shown["forgotten"] = subscription.forgotten().into();
            }
            Some(outcome) => {
                shown["status"] = "done".into();
                shown["result"] = json!(outcome.body);
            }
        }
        if let Some(progress) = state.progress.back() {
            shown["progress"] = json!({"fraction": progress.fraction, "text": progress.text});
        }
        shown
    }
}

impl State {
    fn apply(&mut self, callback: Callback) -> Applied {
        match callback {
            Callback::ToolResult(result) => {
                let is_subscription = result.subscription;
                match self.settle(Outcome { body: result.body, is_subscription }) {
                    false => Applied::Ignored,
                    true if is_subscription => Applied::Resource,
                    true => Applied::Changed,
                }
            }
            Callback::SubscriptionEvent(event) => self.event(event),
            Callback::UserChoice(choice) => {
                let is_new = !self.asked.contains(&choice.response_url) && self.asked.len() < QUESTIONS;
                if self.result.is_some() || !is_new {
                    return Applied::Ignored;
                }
                self.asked.push(choice.response_url.clone());
                self.questions.push_back(Question::Choice(choice));
                Applied::Changed
            }
            Callback::Oauth(oauth) => {
                if self.result.is_some() || self.signs_in.as_ref() == Some(&oauth.auth_url) {
                    return Applied::Ignored;
                }
                self.signs_in = Some(oauth.auth_url.clone());
                self.questions.retain(|question| !matches!(question, Question::SignIn(_)));
                self.questions.push_back(Question::SignIn(oauth.auth_url));
                Applied::Changed
            }
            Callback::ViewUpdate(view) if view.view_type == "progress" && self.result.is_none() => {
                self.progress.push_back(Progress::read(&view.content));
                self.progress_count += 1;
                if self.progress.len() > PROGRESS {
                    self.progress.pop_front();
                }
                Applied::Changed
            }
            Callback::ViewUpdate(_) => Applied::Ignored,
        }
    }

    fn settle(&mut self, outcome: Outcome) -> bool {
        if self.result.is_some() {
            return false;
        }
        self.result = Some(outcome);
        self.questions.clear();
        self.signs_in = None;
        true
    }

    fn event(&mut self, event: SubscriptionEvent) -> Applied {
        let is_active = self.result.as_ref().is_some_and(|outcome| outcome.is_subscription);
        let subscription = &mut self.subscription;
        let is_known = |known: &Event| event.event_id.is_some() && known.id == event.event_id;
        if !is_active || subscription.ended || subscription.events.iter().any(is_known) {
            return Applied::Ignored;
        }
        subscription.count += 1;
        subscription.bytes += event.text.len();
        subscription.ended = event.is_final;
        subscription.events.push_back(Event {
            number: subscription.count,
            id: event.event_id,
            text: event.text,
            is_final: event.is_final,
        });
        while subscription.events.len() > EVENTS
            || subscription.bytes > EVENT_BYTES && subscription.events.len() > 1
        {
            let Some(oldest) = subscription.events.pop_front() else { break };
            subscription.bytes -= oldest.text.len();
        }
        Applied::Resource
    }

    fn next(&mut self) -> Option<Change> {
        match &self.result {
            Some(outcome) => Some(Change::Settled(outcome.clone())),
            None => self.questions.pop_front().map(Change::Question),
        }
    }

    fn has_content_after(&self, after: u64) -> bool {
        match &self.result {
            None => false,
            Some(outcome) if outcome.is_subscription => {
                self.subscription.ended || self.subscription.count > after
            }
            Some(_) => true,
        }
    }
}

impl Subscription {
    fn after(&self, after: u64) -> impl Iterator<Item = Value> {
        let shown =
            |event: &Event| json!({"number": event.number, "text": event.text, "final": event.is_final});
        self.events.iter().filter(move |event| event.number > after).map(shown)
    }

    fn forgotten(&self) -> u64 {
        self.count - self.events.len() as u64
    }
}

impl Progress {
    /// Reads `{"fraction": 0.5, "text": "halfway"}`. The text of any other content is its JSON.
    fn read(content: &Value) -> Progress {
        let fraction = content["fraction"].as_f64().filter(|fraction| (0.0..=1.0).contains(fraction));
        match content["text"].as_str() {
            Some(text) => Progress { fraction, text: text.to_owned() },
            None if fraction.is_some() => Progress { fraction, text: String::new() },
            None => Progress { fraction, text: content.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rap_protocol::parse_callback;

    fn call() -> Call {
        let id = CallId::new("c").unwrap();
        Call::new(id, ThreadId::new("g").unwrap(), ToolName::new("tick").unwrap())
    }

    fn apply(call: &Call, message: &Value) -> Applied {
        let mut message = message.clone();
        message["group_id"] = "g".into();
        let field = if message["type"] == "subscription_event" { "tool_call_id" } else { "id" };
        message[field] = "c".into();
        call.apply(parse_callback(message.to_string().as_bytes()).unwrap())
    }

    fn event(text: &str) -> Value {
        json!({"type": "subscription_event", "text": text})
    }

    #[test]
    fn a_call_takes_one_result() {
        let call = call();
        assert_eq!(apply(&call, &json!({"type": "tool_result", "text": "one"})), Applied::Changed);
        assert_eq!(apply(&call, &json!({"type": "tool_result", "text": "two"})), Applied::Ignored);
        assert_eq!(apply(&call, &event("three")), Applied::Ignored);
        assert_eq!(call.outcome().unwrap().body, Body::Text("one".into()));
        assert!(!call.is_open());
    }

    #[test]
    fn events_are_counted_and_the_oldest_are_forgotten() {
        let call = call();
        assert_eq!(apply(&call, &event("early")), Applied::Ignored);
        let confirmed = json!({"type": "tool_result", "text": "yes", "subscription": true});
        assert_eq!(apply(&call, &confirmed), Applied::Resource);
        for number in 1..=EVENTS + 5 {
            assert_eq!(apply(&call, &event(&format!("tick {number}"))), Applied::Resource);
        }
        let shown = call.describe(EVENTS as u64 + 3);
        assert_eq!(shown["forgotten"], 5);
        assert_eq!(shown["events"][0], json!({"number": EVENTS + 4, "text": "tick 1004", "final": false}));
        assert_eq!(shown["status"], "active");
    }

    #[test]
    fn a_repeated_event_and_one_after_the_final_event_change_nothing() {
        let call = call();
        apply(&call, &json!({"type": "tool_result", "text": "yes", "subscription": true}));
        let named =
            |id: &str| json!({"type": "subscription_event", "text": "x", "event_id": id, "final": id == "2"});
        assert_eq!(apply(&call, &named("1")), Applied::Resource);
        assert_eq!(apply(&call, &named("1")), Applied::Ignored);
        assert!(call.is_open());
        assert_eq!(apply(&call, &named("2")), Applied::Resource);
        assert_eq!(apply(&call, &named("3")), Applied::Ignored);
        assert!(!call.is_open());
    }

    #[test]
    fn events_are_bounded_by_their_size() {
        let call = call();
        apply(&call, &json!({"type": "tool_result", "text": "yes", "subscription": true}));
        let large = "x".repeat(EVENT_BYTES / 2);
        for _ in 0..4 {
            apply(&call, &event(&large));
        }
        assert_eq!(call.describe(0)["forgotten"], 2);
    }

    #[test]
    fn a_repeated_question_is_one_question() {
        let call = call();
        let question = |url: &str| json!({"type": "user_choice", "prompt": "Which?", "choices": ["a"], "default": 0, "response_url": url});
        assert_eq!(apply(&call, &question("http://127.0.0.1:1/a")), Applied::Changed);
        assert_eq!(apply(&call, &question("http://127.0.0.1:1/a")), Applied::Ignored);
        assert_eq!(apply(&call, &question("http://127.0.0.1:1/b")), Applied::Changed);
        assert!(matches!(call.state().next(), Some(Change::Question(Question::Choice(_)))));
    }

    #[test]
    fn progress_is_read_leniently() {
        let read = |content: Value| Progress::read(&content);
        assert_eq!(
            read(json!({"fraction": 0.5, "text": "half"})),
            Progress { fraction: Some(0.5), text: "half".into() }
        );
        assert_eq!(
            read(json!({"fraction": 7})),
            Progress { fraction: None, text: "{\"fraction\":7}".into() }
        );
        assert_eq!(read(json!("hm")), Progress { fraction: None, text: "\"hm\"".into() });
    }
}
