//! When an agent has come to rest: what was said is in its history, the model is not asked, and no call is open.

use std::collections::HashSet;

use crate::api::{CallState, Item, Status};
use crate::client::Event;

/// Watches a thread's events for that moment.
#[derive(Debug, Default)]
pub struct Rest {
    /// What has to be in the history first.
    awaited: Vec<String>,
    open: HashSet<String>,
    status: Option<Status>,
    /// Whether the runtime itself says that it waits for somebody, and not a call.
    paused: bool,
}

impl Rest {
    /// Waits for this to be said first.
    pub fn expecting(text: &str) -> Rest {
        let mut rest = Rest::default();
        rest.expect(text);
        rest
    }

    /// Waits for this to be said, too.
    pub fn expect(&mut self, text: &str) {
        self.awaited.push(text.to_owned());
    }

    /// What was expected was not said.
    pub fn forget(&mut self, text: &str) {
        self.find(text);
    }

    fn find(&mut self, text: &str) -> Option<String> {
        let place = self.awaited.iter().position(|awaited| awaited == text)?;
        Some(self.awaited.remove(place))
    }

    /// Takes note of an event.
    pub fn see(&mut self, event: &Event) {
        match event {
            Event::Entry(entry) => {
                // It wakes the agent; what the thread was at before is out of date.
                if let Item::User { text, from: None } = &entry.item
                    && self.find(text).is_some()
                {
                    self.status = None;
                }
            }
            Event::Call(news) => {
                match news.state {
                    CallState::Open => self.open.insert(news.call.call_id.clone()),
                    CallState::Settled => self.open.remove(&news.call.call_id),
                };
            }
            Event::Status(news) => {
                self.status = Some(news.status);
                self.paused = news.why.is_some();
            }
            _ => {}
        }
    }

    /// A new connection tells the calls that are open from the beginning.
    pub fn start_over(&mut self) {
        self.open.clear();
        self.status = None;
    }

    /// Something was done that the thread will say something about.
    pub fn wait_for_status(&mut self) {
        self.status = None;
    }

    /// What the thread is at, if that was said since.
    pub fn status(&self) -> Option<Status> {
        self.status
    }

    /// Whether it has come to rest.
    pub fn is_reached(&self) -> bool {
        let settled = match self.status {
            Some(Status::Idle) => self.open.is_empty(),
            Some(Status::Failed | Status::Closed) => true,
            Some(Status::NeedsYou) => self.paused,
            _ => false,
        };
        settled && self.awaited.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn status(status: &str, why: Value) -> Event {
        Event::Status(serde_json::from_value(json!({"status": status, "turn": 1, "why": why})).unwrap())
    }

    fn call(state: &str) -> Event {
        let since = "1970-01-01T00:00:00.000Z";
        let news = json!({"call_id": "c", "tool": "t", "since": since, "until": null, "state": state});
        Event::Call(serde_json::from_value(news).unwrap())
    }

    fn user(text: &str) -> Event {
        let at = "1970-01-01T00:00:00.000Z";
        Event::Entry(
            serde_json::from_value(json!({"seq": 1, "at": at, "kind": "user", "text": text})).unwrap(),
        )
    }

    /// Whether rest is reached after each event.
    fn check(rest: &mut Rest, events: &[(Event, bool)]) {
        for (number, (event, reached)) in events.iter().enumerate() {
            rest.see(event);
            assert_eq!(rest.is_reached(), *reached, "after event {number}: {event:?}");
        }
    }

    #[test]
    fn what_was_said_has_to_be_taken_up_first() {
        let idle = || status("idle", Value::Null);
        let events = [
            (idle(), false),
            (user("other"), false),
            (idle(), false),
            (user("hi"), false),
            (status("running", Value::Null), false),
            (idle(), true),
        ];
        check(&mut Rest::expecting("hi"), &events);
    }

    #[test]
    fn an_open_call_is_no_rest_and_a_question_neither() {
        let events = [
            (status("idle", Value::Null), true),
            (call("open"), false),
            (status("needs_you", Value::Null), false),
            (status("waiting", Value::Null), false),
            (call("settled"), false),
            (status("idle", Value::Null), true),
            (status("needs_you", json!("paused")), true),
            (status("failed", json!("no model")), true),
        ];
        check(&mut Rest::default(), &events);
    }
}
