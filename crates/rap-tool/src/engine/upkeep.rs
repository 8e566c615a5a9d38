//! Closing threads, resuming after a restart, and clearing away what is over.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use rap_protocol::{ThreadId, Timestamp};
use rusqlite::Connection;

use super::{Engine, Run};
use crate::auth::Caller;
use crate::error::ServeError;
use crate::journal::threads::{self, LookedUpTo};
use crate::journal::{Applied, Seq, StoredCall, recovery};
use crate::limits::Limits;
use crate::rules::{Ignored, Input, OnRestart};

/// How many calls are resumed, or rows cleared away, in one transaction.
const AT_ONCE: u32 = 500;

/// The longest time between two rounds of clearing away, and the shortest.
const ROUND: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_millis(50));

impl Engine {
    /// Acts on the closing of a thread that is on disk: its handlers stop, its hook runs.
    pub(super) fn closed(self: &Arc<Self>, caller: Caller, thread: ThreadId, closed: Vec<(Seq, Applied)>) {
        for (seq, applied) in closed {
            self.follow(seq, applied);
        }
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.clear_away(caller, thread).await });
    }

    async fn clear_away(self: Arc<Self>, caller: Caller, thread: ThreadId) {
        let (owner, id) = (caller.clone(), thread.clone());
        let closing = self.write(move |engine, db| engine.book.last_closing(db, &owner, &id)).await.flatten();
        if let Some(hook) = &self.on_close {
            // The author's code runs inside the future, where a panic is caught.
            let cleared = async { hook(self.thread(&caller, &thread)).await };
            let cleared = AssertUnwindSafe(cleared).catch_unwind();
            let cleared = tokio::select! {
                cleared = cleared => cleared,
                // It runs again after the restart.
                () = self.ended.cancelled() => return,
            };
            match cleared {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(?thread, ?error, "clearing up after a thread failed"),
                Err(_) => tracing::error!(?thread, "clearing up after a thread panicked"),
            }
        }
        self.write(move |engine, db| engine.book.cleared(db, &caller, &thread, closing)).await;
    }

    /// Picks up what an earlier process has left: nothing that it acknowledged is lost.
    pub(crate) async fn resume(self: &Arc<Self>) -> Result<(), ServeError> {
        let broken = || ServeError::Journal("it can not be written".into());
        let mut last = 0;
        loop {
            let page = self.write(move |_, db| recovery::unfinished(db, last, AT_ONCE)).await;
            let page = page.ok_or_else(broken)?;
            let Some(call) = page.last() else { break };
            last = call.seq;
            self.resume_page(page).await.ok_or_else(broken)?;
        }
        for (caller, thread) in self.write(|_, db| threads::closing(db)).await.ok_or_else(broken)? {
            self.closed(caller, thread, Vec::new());
        }
        let (dispatcher, caretaker) = (Arc::clone(self), Arc::clone(self));
        self.tasks.spawn(dispatcher.dispatch());
        self.tasks.spawn(caretaker.care());
        Ok(())
    }

    async fn resume_page(self: &Arc<Self>, page: Vec<StoredCall>) -> Option<()> {
        let inputs: Vec<(Seq, Input)> =
            page.iter().map(|call| (call.seq, Input::Restarted(self.on_restart(&call.operation)))).collect();
        let step_all = move |engine: &Engine, db: &Connection| {
            let step = |(seq, input): &(Seq, Input)| engine.book.step(db, *seq, input.clone(), engine.now());
            inputs.iter().map(step).collect::<rusqlite::Result<Vec<_>>>()
        };
        let stepped = self.write(step_all).await?;
        for (call, stepped) in page.into_iter().zip(stepped) {
            match stepped {
                Ok(applied) if applied.head.state.is_live() => self.restart(call),
                Err(Ignored::RunAgain) => self.restart(call),
                Ok(applied) => self.follow(call.seq, applied),
                Err(Ignored::Over | Ignored::Full) => {}
            }
        }
        Some(())
    }

    /// A call of a tool that is gone is started too: it ends with an error that says so.
    fn on_restart(&self, operation: &str) -> OnRestart {
        self.tools.get(operation).map_or(OnRestart::RunAgain, |offered| offered.tool.on_restart())
    }

    /// What was running before the restart has a place, even where the limits have become smaller.
    fn restart(self: &Arc<Self>, call: StoredCall) {
        let places = if call.confirmed { &self.subscriptions } else { &self.calls };
        let run = Run::new(Arc::clone(places).try_acquire_owned().ok());
        self.register(call.seq, &run);
        self.start(call, run);
    }

    /// Clears away what is over, until the server stops.
    async fn care(self: Arc<Self>) {
        let Limits { thread_ttl, remember, .. } = self.limits;
        let round = (thread_ttl.min(remember) / 4).clamp(ROUND.1, ROUND.0);
        let mut looked_up_to = LookedUpTo::default();
        loop {
            tokio::select! {
                () = tokio::time::sleep(round) => {}
                () = self.stopping.cancelled() => return,
            }
            let now = self.now();
            looked_up_to = self.close_expired(looked_up_to, now).await;
            // A call is needed for as long as its thread may have to be closed.
            self.forget_settled(now.minus(remember.max(thread_ttl))).await;
        }
    }

    /// Closes threads whose closing never came; how far it has looked. One transaction finds and closes them: no
    /// call comes between.
    async fn close_expired(self: &Arc<Self>, mut after: LookedUpTo, now: Timestamp) -> LookedUpTo {
        let before = now.minus(self.limits.thread_ttl);
        loop {
            let close_page = move |engine: &Engine, db: &Connection| {
                let expired = engine.book.expired(db, after, before, AT_ONCE)?;
                for (caller, thread) in &expired.threads {
                    engine.book.close(db, caller, thread, now)?;
                }
                Ok(expired)
            };
            let Some(expired) = self.write(close_page).await else { return after };
            for (caller, thread) in expired.threads {
                tracing::info!(?thread, "closing a thread that has not been used for long");
                self.closed(caller, thread, Vec::new());
            }
            after = expired.up_to;
            if !expired.is_full {
                return after;
            }
        }
    }

    async fn forget_settled(self: &Arc<Self>, before: Timestamp) {
        while self.write(move |engine, db| engine.book.forget_settled(db, before, AT_ONCE)).await
            == Some(AT_ONCE as usize)
        {
            tokio::task::yield_now().await;
        }
        self.write(move |_, db| threads::forget(db, before)).await;
    }
}
