//! Detects that a runtime is idle. Its process can then stop, if a service manager starts it for the next message.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rap_protocol::Timestamp;

use super::Engine;
use super::alerts::CLAIM;
use crate::store;

/// Longest time between two checks.
const CHECK_EVERY: Duration = Duration::from_secs(1);

impl Engine {
    /// Notes that a request arrived or a step was committed.
    pub(crate) fn note_activity(&self) {
        self.active_at.store(self.now().0, Ordering::Relaxed);
    }

    /// Waits until the runtime has been idle for `period` and has nothing to do within the next `period`. Open calls and
    /// subscriptions do not count, because their callbacks can start the process again.
    pub(crate) async fn idle_for(&self, period: Duration) {
        loop {
            match self.is_idle(period).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "cannot tell whether the runtime is idle");
                }
            }
            tokio::time::sleep(CHECK_EVERY.min(period)).await;
        }
    }

    async fn is_idle(&self, period: Duration) -> Result<bool, store::Error> {
        let now = self.now();
        // If the clock was set back, the period starts again.
        let active_at = self.active_at.fetch_min(now.0, Ordering::Relaxed).min(now.0);
        let quiet = now.minus(period).0 >= active_at;
        if !quiet || self.hub.has_listeners() || self.dispatcher.has_work() || self.notifications.has_work() {
            return Ok(false);
        }
        let soon = now.plus(period);
        let next = self.store.next_due(now).await?;
        Ok(next.is_none_or(|next| next > soon)
            && self.store.due_messages(soon, &[], 1).await?.is_empty()
            && self.store.due_timers(soon, Timestamp(i64::MIN), &[], 1).await?.is_empty()
            && !self.has_alerts_until(soon).await?
            && self.others_do_their_work(Timestamp(active_at)).await?)
    }

    /// Returns true if an alert is due until a time, or may be being sent, which postpones it by the time of a claim.
    async fn has_alerts_until(&self, until: Timestamp) -> Result<bool, store::Error> {
        let now = self.now();
        let until = until.max(now.plus(CLAIM));
        for destination in &self.settings.notify {
            // This claims none.
            let waiting = self.store.claim_alerts(&destination.key(), now, now, 0).await?;
            if waiting.next.is_some_and(|next| next <= until) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns false if another node may have died with claimed work. When its lease runs out, this node takes the work
    /// over.
    async fn others_do_their_work(&self, since: Timestamp) -> Result<bool, store::Error> {
        match self.store.fleet() {
            Some(fleet) => fleet.others_renewed(since).await,
            None => Ok(true),
        }
    }
}
