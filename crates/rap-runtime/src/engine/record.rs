//! Records that nobody waits for: accepted invocations and the ledger of deliveries. They are written together, a moment
//! later.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Engine;
use crate::hub::Live;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, WorkKey};

/// How long records may wait to be written. A call that returns before is never marked as accepted: at least once is
/// promised anyway.
const RECORD_PAUSE: Duration = Duration::from_millis(100);
/// Deliveries that wait to be written; beyond it they are dropped.
const WAITING: usize = 8192;

#[derive(Default)]
pub(super) struct Ledger {
    waiting: Mutex<Vec<DeliveryRecord>>,
}

impl Ledger {
    /// Returns whether there was room.
    fn push(&self, record: DeliveryRecord) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let room = waiting.len() < WAITING;
        if room {
            waiting.push(record);
        }
        room
    }

    fn take(&self) -> Vec<DeliveryRecord> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Engine {
    /// An attempt at a delivery has ended. A success at the first attempt is not recorded.
    pub(crate) fn delivery_ended(
        &self,
        kind: DeliveryKind,
        outcome: DeliveryOutcome,
        attempts: u32,
        record: impl FnOnce() -> DeliveryRecord,
    ) {
        self.metrics.delivery(kind, outcome);
        if outcome != DeliveryOutcome::Delivered || attempts > 1 {
            self.record_delivery(record());
        }
    }

    pub(crate) fn record_delivery(&self, record: DeliveryRecord) {
        let DeliveryRecord { topic, attempts, detail, .. } = &record;
        let thread = record.thread_id.as_ref().map(tracing::field::display);
        let (call, server) = (record.call.as_ref().map(tracing::field::display), record.server.as_deref());
        let (kind, outcome) = (record.kind.as_str(), record.outcome.as_str());
        tracing::info!(kind, thread, call, server, topic, outcome, attempts, detail, "delivery");
        if self.ledger.push(record) {
            self.record_due.notify_one();
        } else {
            tracing::warn!(kind, "the ledger misses a delivery: too many wait to be written");
        }
    }

    pub(super) async fn record(self: Arc<Self>) {
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return self.record_now().await,
                () = self.record_due.notified() => {}
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(RECORD_PAUSE) => {}
            }
            self.record_now().await;
        }
    }

    pub(super) async fn record_now(&self) {
        self.write_ledger().await;
        let accepted = self.dispatcher.take_accepted();
        if accepted.is_empty() {
            return;
        }
        if let Err(error) = self.store.acknowledge(accepted.clone(), self.now()).await {
            tracing::warn!(why = error.with_sources(), "accepted invocations could not be recorded");
            self.dispatcher.keep_accepted(accepted);
            self.pause_for_store().await;
            return self.record_due.notify_one();
        }
        for (thread, call) in accepted {
            self.dispatcher.end(&WorkKey::Invoke { thread, call });
        }
    }

    async fn write_ledger(&self) {
        let records = self.ledger.take();
        if records.is_empty() {
            return;
        }
        match self.store.record_deliveries(records).await {
            Ok(ids) if self.hub.is_heard() => {
                ids.into_iter().for_each(|id| self.hub.tell_all(Live::Delivery { id }));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(why = error.with_sources(), "the ledger misses some deliveries"),
        }
    }
}
