//! Deletes closed sessions: those that a client deletes, and those that are older than the retention allows.

use std::sync::Arc;
use std::time::Duration;

use rap_protocol::ThreadId;
use tokio::time::Instant;

use super::Engine;
use crate::store::deletion::RECHECK;
use crate::store::{self, Expiry, Remaining, Visibility};

/// Pause between two batches, so that messages of other sessions are applied in between.
const BATCH_PAUSE: Duration = Duration::from_millis(5);
/// Pause after a failure of the store.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// Longest pause between two searches for sessions to delete, which another node may have marked.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Shortest and longest interval at which expired sessions are searched for. In between, it is a tenth of the retention.
const EXPIRE_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));

impl Engine {
    /// Marks a closed session. It is hidden at once, and deleted soon.
    pub(crate) async fn delete_session(
        &self,
        id: &ThreadId,
        visible: &Visibility,
    ) -> Result<(), store::Error> {
        self.store.delete_session(id, visible).await?;
        self.deletions_due.notify_one();
        Ok(())
    }

    /// Counts or marks the sessions that have been closed for a time. Returns their number.
    pub(crate) async fn expire_sessions(
        &self,
        closed_for: Duration,
        expiry: Expiry,
    ) -> Result<u64, store::Error> {
        let before = self.now().minus(closed_for);
        let (mut sessions, mut after) = (0, None);
        loop {
            let expired = self.store.expire_sessions(before, after, expiry).await?;
            sessions += expired.sessions;
            if expiry == Expiry::Delete && expired.sessions > 0 {
                self.deletions_due.notify_one();
            }
            after = expired.next;
            if after.is_none() || self.stop.is_cancelled() {
                return Ok(sessions);
            }
        }
    }

    /// Deletes marked sessions in batches, and marks expired ones.
    pub(super) async fn run_deletions(self: Arc<Self>) {
        let mut expire_at = Instant::now();
        loop {
            if let Some(closed_for) = self.settings.retention
                && expire_at <= Instant::now()
            {
                match self.expire_sessions(closed_for, Expiry::Delete).await {
                    Ok(0) => {}
                    Ok(sessions) => tracing::info!(sessions, "closed sessions have expired and are deleted"),
                    Err(store::Error::Closed) => return,
                    Err(error) => {
                        tracing::warn!(why = error.with_sources(), "expired sessions could not be looked up");
                    }
                }
                let (shortest, longest) = EXPIRE_EVERY;
                expire_at = Instant::now() + (closed_for / 10).clamp(shortest, longest);
            }
            let mut pause = match self.store.delete_batch().await {
                Ok(Remaining::Some) => BATCH_PAUSE,
                Ok(Remaining::Waiting) => RECHECK,
                Ok(Remaining::None) => LONGEST_PAUSE,
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "rows of a deleted session were not deleted");
                    FAILURE_PAUSE
                }
            };
            if self.settings.retention.is_some() {
                pause = pause.min((expire_at - Instant::now()).max(BATCH_PAUSE));
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.deletions_due.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}
