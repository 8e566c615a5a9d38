//! Closes expired threads, resumes calls after a restart, and deletes old rows.

use std::sync::Arc;
use std::time::Duration;

use rap_protocol::Timestamp;
use rusqlite::Connection;

use super::{Engine, Run};
use crate::error::ServeError;
use crate::journal::threads::{self, ScanPosition};
use crate::journal::{CallSeq, StoredCall, moving, recovery};
use crate::limits::Limits;
use crate::rules::{Ignored, Input, OnRestart};

/// Maximum number of calls that are resumed, or rows that are deleted, in one transaction.
const PAGE_SIZE: u32 = 500;

/// Bounds of the time between two maintenance rounds.
const MAX_INTERVAL: Duration = Duration::from_secs(3600);
const MIN_INTERVAL: Duration = Duration::from_millis(50);

impl Engine {
    /// Resumes the unfinished calls and thread closings of an earlier process, and starts the background tasks.
    pub(crate) async fn resume(self: &Arc<Self>) -> Result<(), ServeError> {
        let broken = || ServeError::Journal("it cannot be written".into());
        let mut last = 0;
        loop {
            let page = self.write(move |_, db| recovery::unfinished(db, last, PAGE_SIZE)).await;
            let page = page.ok_or_else(broken)?;
            let Some(call) = page.last() else { break };
            last = call.seq;
            self.resume_page(page).await.ok_or_else(broken)?;
        }
        self.tasks.spawn(Arc::clone(self).dispatch());
        self.tasks.spawn(Arc::clone(self).run_close_hooks());
        self.tasks.spawn(Arc::clone(self).run_deadlines());
        self.tasks.spawn(Arc::clone(self).run_maintenance());
        Ok(())
    }

    pub(super) async fn resume_page(self: &Arc<Self>, page: Vec<StoredCall>) -> Option<()> {
        let inputs: Vec<(CallSeq, Input)> =
            page.iter().map(|call| (call.seq, Input::Restarted(self.on_restart(&call.operation)))).collect();
        let step_all = move |engine: &Engine, db: &Connection| {
            let step =
                |(seq, input): &(CallSeq, Input)| engine.journal.step(db, *seq, input.clone(), engine.now());
            inputs.iter().map(step).collect::<rusqlite::Result<Vec<_>>>()
        };
        let stepped = self.write(step_all).await?;
        for (call, stepped) in page.into_iter().zip(stepped) {
            match stepped {
                Ok(applied) if applied.head.state.is_live() => self.restart(call),
                Err(Ignored::RunAgain) => self.restart(call),
                Ok(applied) => self.after_commit(call.seq, applied),
                Err(Ignored::Ended | Ignored::Full) => {}
            }
        }
        Some(())
    }

    /// A call of a tool that no longer exists is started as well, and ends with an error that says so.
    pub(super) fn on_restart(&self, operation: &str) -> OnRestart {
        self.offer().tools.get(operation).map_or(OnRestart::RunAgain, |offered| offered.tool.on_restart())
    }

    /// Restarts a call. It runs without a permit if the share of its caller is now smaller than the number of its
    /// unfinished calls.
    fn restart(self: &Arc<Self>, call: StoredCall) {
        let permits = if call.confirmed { &self.subscriptions } else { &self.calls };
        // The arguments were in memory before the restart, so they need no permit.
        let run = Run::new(permits.take(&call.caller), None);
        self.register(call.seq, &run);
        self.start(call, run);
    }

    /// Closes expired threads and deletes old calls at intervals, until the server stops.
    async fn run_maintenance(self: Arc<Self>) {
        let Limits { thread_ttl, remember, .. } = self.limits;
        let interval = (thread_ttl.min(remember) / 4).clamp(MIN_INTERVAL, MAX_INTERVAL);
        let mut position = ScanPosition::default();
        loop {
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.stopping.cancelled() => return,
            }
            let now = self.now();
            position = self.close_expired(position, now).await;
            // A call is kept as long as its thread may still have to be closed.
            self.delete_settled(now.minus(remember.max(thread_ttl))).await;
            self.delete_arrivals(now.minus(thread_ttl)).await;
        }
    }

    /// Closes threads that have expired, from `after` on, and returns the new scan position. Each transaction finds
    /// and closes its threads, so that no new call can come in between.
    async fn close_expired(self: &Arc<Self>, mut after: ScanPosition, now: Timestamp) -> ScanPosition {
        let before = now.minus(self.limits.thread_ttl);
        loop {
            let close_page = move |engine: &Engine, db: &Connection| {
                let expired = engine.journal.expired(db, after, before, PAGE_SIZE)?;
                for (caller, thread) in &expired.threads {
                    engine.journal.close(db, caller, thread, now)?;
                }
                Ok(expired)
            };
            let Some(expired) = self.write(close_page).await else { return after };
            for (_, thread) in expired.threads {
                tracing::info!(?thread, "closing a thread that has expired");
            }
            self.after_close(Vec::new());
            after = expired.position;
            if !expired.is_full {
                return after;
            }
        }
    }

    async fn delete_settled(self: &Arc<Self>, before: Timestamp) {
        while self.write(move |engine, db| engine.journal.delete_settled(db, before, PAGE_SIZE)).await
            == Some(PAGE_SIZE as usize)
        {
            tokio::task::yield_now().await;
        }
        while self.write(move |_, db| threads::delete_old(db, before, PAGE_SIZE)).await
            == Some(PAGE_SIZE as usize)
        {
            tokio::task::yield_now().await;
        }
    }

    /// Deletes calls and files that have arrived from another server and that nobody has asked about.
    async fn delete_arrivals(self: &Arc<Self>, before: Timestamp) {
        self.delete_arrived_files(before).await;
        while self.write(move |_, db| moving::delete_old(db, before, PAGE_SIZE)).await
            == Some(PAGE_SIZE as usize)
        {
            tokio::task::yield_now().await;
        }
    }
}
