//! What goes into the ledger: how deliveries ended that did not succeed at once.
//!
//! Nobody waits for it. Lines are written together, a moment later; past the bound they are dropped.

use std::sync::{Mutex, PoisonError};

use super::Engine;
use crate::hub::Live;
use crate::store::{Fate, Kind, Line};

/// How many lines wait to be written.
const WAITING: usize = 1024;

#[derive(Default)]
pub(super) struct Ledger {
    waiting: Mutex<Vec<Line>>,
}

impl Ledger {
    /// Whether there was room.
    fn push(&self, line: Line) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let room = waiting.len() < WAITING;
        if room {
            waiting.push(line);
        }
        room
    }

    fn take(&self) -> Vec<Line> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Engine {
    /// An attempt at a delivery has ended. A success at the first one is not worth a line.
    pub(crate) fn ended(&self, kind: Kind, outcome: Fate, attempts: u32, line: impl FnOnce() -> Line) {
        self.metrics.delivery(kind, outcome);
        if outcome != Fate::Delivered || attempts > 1 {
            self.note(line());
        }
    }

    fn note(&self, line: Line) {
        let Line { topic, attempts, detail, .. } = &line;
        let thread = line.thread_id.as_ref().map(tracing::field::display);
        let (call, server) = (line.call.as_ref().map(tracing::field::display), line.server.as_deref());
        let (kind, outcome) = (line.kind.as_str(), line.outcome.as_str());
        tracing::info!(kind, thread, call, server, topic, outcome, attempts, detail, "delivery");
        if self.ledger.push(line) {
            self.unrecorded.notify_one();
        } else {
            tracing::warn!(kind, "the ledger could not keep up, and misses a delivery");
        }
    }

    pub(super) async fn write_ledger(&self) {
        let lines = self.ledger.take();
        if lines.is_empty() {
            return;
        }
        match self.store.note(lines).await {
            Ok(numbers) if self.hub.is_heard() => {
                numbers.into_iter().for_each(|no| self.hub.tell_all(Live::Delivery { no }));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the ledger misses some deliveries"),
        }
    }
}
