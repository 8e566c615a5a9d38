//! Runs the close hooks of threads that were closed.
//!
//! The hooks that wait for a slot are in the journal, not in memory. Callers share the slots; see `shares.rs`.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use rap_protocol::ThreadId;
use rusqlite::Connection;

use super::{CloseHook, Engine, lock};
use crate::auth::Caller;
use crate::call::Thread;
use crate::journal::threads::{self, Closing, ThreadKey};
use crate::journal::{Applied, CallSeq};
use crate::shares::Slots;

/// Maximum number of close hooks that run at the same time.
const HOOKS: usize = 256;

/// Maximum number of closings of one caller that are read at once.
const PAGE: u32 = 64;

/// The close hooks that are running.
pub(super) struct CloseHooks {
    slots: Slots,
    threads: HashSet<ThreadKey>,
}

impl CloseHooks {
    pub(super) fn new(callers: &Arc<HashSet<Caller>>) -> Self {
        CloseHooks { slots: Slots::new(HOOKS, callers), threads: HashSet::new() }
    }
}

impl Engine {
    /// Acts on a committed thread closing: stops the handlers and lets the close hook run.
    pub(super) fn after_close(self: &Arc<Self>, closed: Vec<(CallSeq, Applied)>) {
        for (seq, applied) in closed {
            self.after_commit(seq, applied);
        }
        self.closings.notify_one();
    }

    /// Runs the hooks of closed threads, until the server stops.
    pub(super) async fn run_close_hooks(self: Arc<Self>) {
        loop {
            let running = Arc::new(lock(&self.close_hooks).threads.clone());
            let read = move |_: &Engine, db: &Connection| threads::closing(db, &running, PAGE);
            let Some(closings) = self.write(read).await else { return };
            let started = closings.into_iter().filter(|closing| self.start_closing(closing)).count();
            if started > 0 {
                continue;
            }
            tokio::select! {
                biased;
                () = self.closings.notified() => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Starts the hook of a closed thread. Returns false if no slot is free.
    fn start_closing(self: &Arc<Self>, closing: &Closing) -> bool {
        let mut hooks = lock(&self.close_hooks);
        if hooks.threads.contains(&closing.key) || !hooks.slots.take(&closing.caller) {
            return false;
        }
        hooks.threads.insert(closing.key);
        let (engine, closing) = (Arc::clone(self), closing.clone());
        self.tasks.spawn(async move {
            engine.finish_closing(&closing).await;
            let mut hooks = lock(&engine.close_hooks);
            hooks.threads.remove(&closing.key);
            hooks.slots.release(&closing.caller);
            // The thread may have been closed again meanwhile, or another one waits for the slot.
            engine.closings.notify_one();
        });
        true
    }

    async fn finish_closing(self: &Arc<Self>, closing: &Closing) {
        let Closing { key, caller, thread, last_call } = closing.clone();
        tokio::select! {
            () = self.run_close_hook(&caller, &thread) => {}
            // The hook runs again after the restart.
            () = self.ended.cancelled() => return,
        }
        self.write_for(&caller, move |_, db| threads::finish_closing(db, &key, last_call)).await;
    }

    async fn run_close_hook(self: &Arc<Self>, caller: &Caller, thread: &ThreadId) {
        let closed = self.thread(caller, thread);
        if let Some(hook) = &self.on_close {
            self.run_hook(hook, closed.clone()).await;
        }
        self.remove_directory(&closed).await;
    }

    async fn run_hook(&self, hook: &CloseHook, closed: Thread) {
        let thread = closed.id().clone();
        // The author's code runs inside the future, where a panic is caught.
        let cleared = AssertUnwindSafe(async { hook(closed).await }).catch_unwind();
        match tokio::time::timeout(self.limits.close_within, cleared).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(?thread, ?error, "the close hook of a thread failed"),
            Ok(Err(_)) => tracing::error!(?thread, "the close hook of a thread panicked"),
            Err(_) => {
                tracing::warn!(?thread, "the close hook of a thread did not finish in time; dropped it")
            }
        }
    }
}
