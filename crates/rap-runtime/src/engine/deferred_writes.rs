//! Deferred writes: accepted invocations and the delivery log. Nothing waits for them, so they are written together
//! after a short pause.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Engine;
use crate::hub::LiveEvent;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, Signal, WorkKey};

/// Time that records wait before they are written together. A call that returns earlier is never marked as accepted,
/// which is harmless: invocations are sent at least once.
const RECORD_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of deliveries that wait to be written. More are dropped.
const MAX_PENDING: usize = 8192;

#[derive(Default)]
pub(super) struct DeferredRecords {
    pending: Mutex<Vec<DeliveryRecord>>,
}

impl DeferredRecords {
    /// Returns false if the queue was full and the record was dropped.
    fn push(&self, record: DeliveryRecord) -> bool {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let room = pending.len() < MAX_PENDING;
        if room {
            pending.push(record);
        }
        room
    }

    fn take(&self) -> Vec<DeliveryRecord> {
        std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Engine {
    /// Counts an attempt at a delivery, and records it unless it succeeded at the first attempt.
    pub(crate) fn delivery_ended(
        &self,
        kind: DeliveryKind,
        outcome: DeliveryOutcome,
        attempts: u32,
        record: impl FnOnce() -> DeliveryRecord,
    ) {
        self.metrics.count_delivery(kind, outcome);
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
        if self.deferred.push(record) {
            self.record_due.notify_one();
        } else {
            tracing::warn!(kind, "a delivery is not recorded: too many are waiting to be written");
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
        let records = self.deferred.take();
        if records.is_empty() {
            return;
        }
        match self.store.record_deliveries(records).await {
            Ok(ids) => {
                for id in ids {
                    self.tell_peers(|| Signal::Delivery { id: id.clone() });
                    self.hub.publish_to_all(LiveEvent::Delivery { id });
                }
            }
            Err(error) => tracing::warn!(why = error.with_sources(), "deliveries could not be recorded"),
        }
    }
}
