//! Detects when a thread is idle: the messages sent to it are in its history, no model request is in progress and no
//! call is open. A thread that failed, was closed or is paused counts as idle too: nothing happens before a retry or a
//! person.

use std::collections::HashSet;

use rap_api::{CallEventKind, Item, Status, ThreadEvent};

/// Follows the events of a thread and knows whether it is idle.
#[derive(Debug, Default)]
pub struct IdleDetector {
    /// Messages that have to appear in the history first.
    awaited: Vec<String>,
    /// Ids of open calls.
    open: HashSet<String>,
    /// Last status; `None` if it is out of date.
    status: Option<Status>,
    /// True if `needs_you` has a reason: then the runtime paused the thread, and no call asks the user.
    paused: bool,
}

impl IdleDetector {
    /// A detector that expects this message in the history.
    pub fn expecting(text: &str) -> IdleDetector {
        let mut detector = IdleDetector::default();
        detector.expect(text);
        detector
    }

    /// Expects another message in the history.
    pub fn expect(&mut self, text: &str) {
        self.awaited.push(text.to_owned());
    }

    /// Expects this message no longer, because it was not accepted.
    pub fn cancel_expected(&mut self, text: &str) {
        self.remove_expected(text);
    }

    fn remove_expected(&mut self, text: &str) -> Option<String> {
        let index = self.awaited.iter().position(|awaited| awaited == text)?;
        Some(self.awaited.remove(index))
    }

    pub fn observe(&mut self, event: &ThreadEvent) {
        match event {
            ThreadEvent::Entry(entry) => {
                // The message wakes the agent, so the last status is out of date.
                if let Item::User { text, from: None, .. } = &entry.item
                    && self.remove_expected(text).is_some()
                {
                    self.status = None;
                }
            }
            ThreadEvent::Call(update) => {
                match update.state {
                    CallEventKind::Opened => self.open.insert(update.call.call_id.clone()),
                    _ => self.open.remove(&update.call.call_id),
                };
            }
            ThreadEvent::Status(update) => {
                self.status = Some(update.status);
                self.paused = update.why.is_some();
            }
            _ => {}
        }
    }

    /// Forgets open calls and status, because a new connection sends all of them again.
    pub fn reconnected(&mut self) {
        self.open.clear();
        self.status = None;
    }

    /// Forgets the status, because a request was made that changes it.
    pub fn forget_status(&mut self) {
        self.status = None;
    }

    /// Returns the status; `None` if it is out of date.
    pub fn status(&self) -> Option<Status> {
        self.status
    }

    pub fn is_idle(&self) -> bool {
        let stopped = match self.status {
            Some(Status::Idle) => self.open.is_empty(),
            Some(Status::Failed | Status::Closed) => true,
            Some(Status::NeedsYou) => self.paused,
            _ => false,
        };
        stopped && self.awaited.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn status(status: &str, why: Value) -> ThreadEvent {
        ThreadEvent::Status(serde_json::from_value(json!({"status": status, "turn": 1, "why": why})).unwrap())
    }

    fn call(state: &str) -> ThreadEvent {
        let since = "1970-01-01T00:00:00.000Z";
        let update = json!({"call_id": "c", "tool": "t", "since": since, "until": null, "state": state});
        ThreadEvent::Call(serde_json::from_value(update).unwrap())
    }

    fn user(text: &str) -> ThreadEvent {
        let at = "1970-01-01T00:00:00.000Z";
        ThreadEvent::Entry(
            serde_json::from_value(json!({"seq": 1, "at": at, "kind": "user", "text": text})).unwrap(),
        )
    }

    /// Checks after each event whether the thread counts as idle.
    fn check(detector: &mut IdleDetector, events: &[(ThreadEvent, bool)]) {
        for (number, (event, idle)) in events.iter().enumerate() {
            detector.observe(event);
            assert_eq!(detector.is_idle(), *idle, "after event {number}: {event:?}");
        }
    }

    #[test]
    fn a_thread_is_not_idle_before_it_took_the_message() {
        let idle = || status("idle", Value::Null);
        let events = [
            (idle(), false),
            (user("other"), false),
            (idle(), false),
            (user("hi"), false),
            (status("running", Value::Null), false),
            (idle(), true),
        ];
        check(&mut IdleDetector::expecting("hi"), &events);
    }

    #[test]
    fn a_thread_with_an_open_call_or_question_is_not_idle() {
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
        check(&mut IdleDetector::default(), &events);
    }
}
