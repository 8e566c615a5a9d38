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
        if let Some(place) = self.awaited.iter().position(|awaited| awaited == text) {
            self.awaited.remove(place);
        }
    }

    /// Takes note of an event.
    pub fn see(&mut self, event: &Event) {
        match event {
            Event::Entry(entry) => {
                if let Item::User { text, from: None } = &entry.item {
                    self.forget(text);
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
