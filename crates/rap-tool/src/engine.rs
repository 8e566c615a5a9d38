//! The IO around the rules: accepts calls, stores them, runs their handlers and delivers their messages.
//!
//! Every change of a call loads its head, steps it and writes the result in one transaction, and acts only after the
//! commit. Three things must never happen: a 200 before the commit, an effect of a step that was not committed, and a
//! caller that waits for the callback of another.

mod accept;
mod closing;
mod deadlines;
mod delivery;
mod files;
mod job_turns;
pub(crate) mod metrics;
mod moving;
mod open;
mod questions;
mod run;
mod upkeep;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::BoxFuture;
use futures_util::task::AtomicWaker;
use rap_io::lock::DirLock;
use rap_io::validation::Validations;
use rap_io::writer::{Error as WriteError, JobClass, Writer};
use rap_protocol::{ThreadId, Timestamp, UrlRules};
use rusqlite::Connection;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{Caller, Callers};
use crate::call::Thread;
use crate::clock::Clock;
use crate::error::Error;
use crate::journal::outbox::{FairOrder, Retry};
use crate::journal::{Applied, CallSeq, Journal, recovery};
use crate::limits::Limits;
use crate::oauth::Tokens;
use crate::rate::Limiter;
use crate::rules::{Dropped, Ignored, Input, StopCause};
use crate::scrub::Scrubber;
use crate::shares::{self, Permit, Pool};
use crate::tool::Tool;

use job_turns::JobTurns;

pub(crate) use accept::{Accepted, Refusal};
pub(crate) use delivery::Outgoing;
pub(crate) use open::{EngineConfig, Externals, open};
pub(crate) use questions::{AnswerOutcome, Answered, CHOICE_PATH, CONSENT_PATH};

/// Values that handlers share, by type; see `ToolServer::state`.
pub(crate) type States = HashMap<TypeId, Arc<dyn Any + Send + Sync>>;

pub(crate) use files::FILES_PATH;
pub use moving::Migration;
pub(crate) use moving::{ArrivalRefused, IMPORT_BYTES, IMPORT_PATH, MigrateHook, Migrated};

/// The hook of `ToolServer::on_close_thread`.
pub(crate) type CloseHook = Arc<dyn Fn(Thread) -> BoxFuture<'static, Result<(), Error>> + Send + Sync>;

/// A tool and the compiled schema of its arguments.
pub(crate) struct Offered {
    pub(crate) tool: Tool,
    pub(crate) schema: rap_protocol::InputSchema,
}

/// Maximum number of versions of a toolset whose invocations are accepted. Beyond it, the oldest is forgotten.
const KEPT_VERSIONS: usize = 256;

/// The tools that are offered at the moment. They are replaced as a whole.
pub(crate) struct Offer {
    /// The toolset as JSON, as it is served.
    pub(crate) manifest: Bytes,
    /// Versions of the toolset that invocations may name, the oldest first. The last one is the version of the manifest.
    pub(crate) versions: Vec<String>,
    pub(crate) tools: HashMap<String, Arc<Offered>>,
}

/// A running tool server without its sockets.
pub(crate) struct Engine {
    pub(crate) limits: Limits,
    pub(crate) callers: Callers,
    pub(crate) states: States,
    /// Tokens of users; see `Call::access_token`.
    pub(crate) tokens: Tokens,
    pub(crate) scrubber: Arc<Scrubber>,
    /// Answers to questions, by the caller whose call asked; `None` if the URL names none.
    pub(crate) answers: Limiter<Option<Caller>>,
    pub(crate) scrapes: Limiter<()>,
    pub(crate) notifications: Limiter<Caller>,
    /// Bounds the bytes of request bodies in memory.
    pub(crate) request_memory: shares::Memory,
    pub(crate) counters: metrics::Counters,
    pub(crate) public_url: String,
    /// URL to which browsers are sent after a sign-in.
    pub(crate) consent_url: String,
    /// Parent of the threads' directories.
    pub(crate) directories: PathBuf,
    callback_rules: UrlRules,
    offer: RwLock<Arc<Offer>>,
    validations: Validations<Caller>,
    on_close: Option<CloseHook>,
    migrations: moving::Migrations,
    arrived_files: files::ArrivedFiles,
    invocations: Limiter<Caller>,
    /// Bounds the notifications that are not written yet.
    pending_notifications: Pool,
    calls: Pool,
    /// Bounds the large invocations that are parsed at the same time.
    parsers: Semaphore,
    /// Bounds the size of the arguments of running calls.
    arguments: Pool,
    subscriptions: Pool,
    journal: Journal,
    writer: Writer,
    job_turns: JobTurns,
    outgoing: Outgoing,
    clock: Clock,
    runs: Mutex<HashMap<CallSeq, Arc<Run>>>,
    /// Notified when a handler has ended.
    run_ended: Notify,
    deadlines: Mutex<deadlines::Deadlines>,
    /// Notified when there is an earlier deadline than before.
    deadline_changed: Notify,
    early: Mutex<HashMap<Caller, accept::EarlyCancels>>,
    close_hooks: Mutex<closing::CloseHooks>,
    /// Notified when the hook of a closed thread may run.
    closings: Notify,
    queues: Mutex<delivery::DeliveryQueues>,
    turns: Mutex<FairOrder>,
    /// Retries that are not stored yet. Bounded by `Limits::deliveries`.
    retries: Mutex<Vec<Retry>>,
    /// Held while retries are stored.
    retry_turn: tokio::sync::Mutex<()>,
    /// Wakes the dispatcher: an outbox message may be due.
    due: Notify,
    /// Cancelled when shutdown begins: nothing new is started.
    stopping: CancellationToken,
    /// Cancelled at the end of the shutdown time: running work is dropped.
    ended: CancellationToken,
    tasks: TaskTracker,
    /// Runtime for tasks that are spawned from the writer's thread.
    runtime: Handle,
    /// Lock of the data directory; `None` if the journal is in memory.
    _lock: Option<DirLock>,
}

/// A running handler.
pub(crate) struct Run {
    /// Reason why the handler has to return. Empty while it may continue.
    stopped: OnceLock<StopCause>,
    /// Notified when something happens that the handler may wait for: an answer, room in the outbox, a cancellation.
    pub(crate) changed: Notify,
    /// The task of the handler. It is woken when the handler is stopped and when the server stops.
    task: AtomicWaker,
    /// Counts the run against `Limits::calls` or, once confirmed, against `Limits::subscriptions`.
    permit: Mutex<Option<Permit>>,
    /// Counts large arguments, which the handler has in memory.
    _arguments: Option<Box<Permit>>,
    seq: OnceLock<CallSeq>,
    /// Number of choices that the handler has asked for.
    pub(crate) choices_asked: AtomicU32,
    /// Number of sign-ins that the handler has asked for.
    pub(crate) sign_ins: AtomicU32,
}

impl Run {
    fn new(permit: Option<Permit>, arguments: Option<Permit>) -> Arc<Self> {
        Arc::new(Run {
            stopped: OnceLock::new(),
            changed: Notify::new(),
            task: AtomicWaker::new(),
            permit: Mutex::new(permit),
            _arguments: arguments.map(Box::new),
            seq: OnceLock::new(),
            choices_asked: AtomicU32::new(0),
            sign_ins: AtomicU32::new(0),
        })
    }

    /// Tells the handler to return. Only the first cause counts.
    fn stop(&self, cause: StopCause) {
        if self.stopped.set(cause).is_ok() {
            self.changed.notify_waiters();
            self.task.wake();
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop_cause().is_some()
    }

    fn stop_cause(&self) -> Option<StopCause> {
        self.stopped.get().copied()
    }

    /// Returns true if the handler was stopped by something else than its own final event.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.stop_cause().is_some_and(|cause| cause != StopCause::Finished)
    }

    /// Resolves when [`Run::is_cancelled`] returns true.
    pub(crate) async fn cancelled(&self) {
        self.until(Run::is_cancelled).await;
    }

    /// Resolves when the run was stopped.
    async fn stopped(&self) {
        self.until(Run::is_stopped).await;
    }

    async fn until(&self, holds: fn(&Run) -> bool) {
        loop {
            let changed = self.changed.notified();
            if holds(self) {
                return;
            }
            changed.await;
        }
    }
}

/// Wakes the dispatcher when a commit is not awaited to its end, because then nothing delivers what it wrote. The
/// dispatcher reads the outbox after that write, since the writer runs jobs in order.
struct DispatchOnDrop<'a> {
    due: Option<&'a Notify>,
}

impl DispatchOnDrop<'_> {
    fn disarm(mut self) {
        self.due = None;
    }
}

impl Drop for DispatchOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(due) = self.due {
            due.notify_one();
        }
    }
}

/// Maximum pause between attempts of a commit.
const COMMIT_PAUSE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("bug: nothing panics under a lock")
}

impl Engine {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the tools that are offered at the moment.
    pub(crate) fn offer(&self) -> Arc<Offer> {
        Arc::clone(&self.offer.read().expect("bug: nothing panics under a lock"))
    }

    /// Replaces the tools. Invocations of earlier versions are still accepted.
    pub(crate) fn replace_offer(&self, mut offer: Offer) {
        let mut current = self.offer.write().expect("bug: nothing panics under a lock");
        let is_new = |version: &&String| !offer.versions.contains(*version);
        let mut versions: Vec<String> = current.versions.iter().filter(is_new).cloned().collect();
        versions.append(&mut offer.versions);
        offer.versions = versions.split_off(versions.len().saturating_sub(KEPT_VERSIONS));
        *current = Arc::new(offer);
    }

    /// Returns the PKCE verifier of a call. It is the same after a restart.
    pub(crate) fn pkce_verifier(&self, identity: &[u8; 32]) -> String {
        let mac = self.journal.key.mac(&[b"pkce verifier", identity]);
        mac.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    pub(crate) fn thread(&self, caller: &Caller, thread: &ThreadId) -> Thread {
        Thread::new(thread.clone(), caller.clone(), self.journal.key.clone())
    }

    /// Replaces the call permit of a run by a subscription permit.
    pub(crate) fn admit_subscription(&self, caller: &Caller, run: &Run) -> Result<(), Error> {
        let used_up =
            || Error::new("the share of subscriptions of this caller is used up; cancel some first");
        let permit = self.subscriptions.take(caller).ok_or_else(used_up)?;
        *lock(&run.permit) = Some(permit);
        Ok(())
    }

    /// Applies an input to a call. Returns when the step is on disk, and retries until then, even while the disk is
    /// full. If the future is dropped, the step may or may not be written; if it is, its message is delivered.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        caller: &Caller,
        call: CallSeq,
        input: Input,
        cursor: Option<String>,
    ) -> Result<(), Ignored> {
        let step = move |engine: &Engine, db: &Connection| {
            let stepped = engine.journal.step(db, call, input.clone(), engine.now())?;
            if let (Ok(_), Some(cursor)) = (&stepped, &cursor) {
                recovery::save_cursor(db, call, cursor)?;
            }
            Ok(stepped)
        };
        let dispatch_guard = DispatchOnDrop { due: Some(&self.due) };
        let read_epoch = self.read_epoch();
        let written = self.write_for(caller, step).await;
        dispatch_guard.disarm();
        match written {
            Some(Ok(mut applied)) => {
                let first = applied.first.take();
                self.after_commit(call, applied);
                if let Some(message) = first {
                    self.deliver_fresh(delivery::FreshMessage { message, read_epoch });
                }
                Ok(())
            }
            Some(Err(ignored)) => Err(ignored),
            None => Err(Ignored::Ended),
        }
    }

    /// Stores the cursor of a subscription.
    pub(crate) async fn save_cursor(self: &Arc<Self>, caller: &Caller, call: CallSeq, cursor: String) {
        self.write_for(caller, move |_, db| recovery::save_cursor(db, call, &cursor)).await;
    }

    /// Like [`Engine::write`], for a job that a caller has caused.
    async fn write_for<T: Send + 'static>(
        self: &Arc<Self>,
        caller: &Caller,
        job: impl Fn(&Engine, &Connection) -> rusqlite::Result<T> + Clone + Send + 'static,
    ) -> Option<T> {
        let _turn = self.job_turns.take(caller, JobClass::Internal).await;
        self.write(job).await
    }

    /// Runs a write job and retries until it is committed. `None` if the writer is closed or the job panicked.
    async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl Fn(&Engine, &Connection) -> rusqlite::Result<T> + Clone + Send + 'static,
    ) -> Option<T> {
        let (mut pause, mut failed) = (Duration::from_millis(50), false);
        loop {
            let (engine, job) = (Arc::clone(self), job.clone());
            match self.writer.run(JobClass::Internal, move |db| job(&engine, db)).await {
                Ok(done) => {
                    if failed {
                        // An attempt that reported a failure may have been committed, with a message in the outbox.
                        self.due.notify_one();
                    }
                    return Some(done);
                }
                Err(WriteError::Closed) => return None,
                Err(WriteError::Panicked) => {
                    tracing::error!("a write to the journal panicked and was dropped; this is a bug");
                    return None;
                }
                Err(error) => tracing::warn!(%error, "the journal cannot be written; trying again"),
            }
            failed = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(COMMIT_PAUSE);
        }
    }

    /// Performs the effects of a step that is on disk.
    fn after_commit(self: &Arc<Self>, call: CallSeq, applied: Applied) {
        if applied.stops_handler() {
            self.stop(call, applied.cause);
        }
        if applied.dropped == Dropped::Everything {
            self.interrupt_delivery(call);
        }
        let before = applied.before.events_wait + applied.before.user_messages_wait;
        if applied.head.events_wait + applied.head.user_messages_wait < before {
            self.wake_handler(call);
        }
        if let Some(message) = applied.first {
            self.deliver(&message);
        }
    }

    fn stop(&self, call: CallSeq, cause: StopCause) {
        let run = lock(&self.runs).get(&call).cloned();
        if let Some(run) = run {
            run.stop(cause);
        }
    }

    fn wake_handler(&self, call: CallSeq) {
        let run = lock(&self.runs).get(&call).cloned();
        if let Some(run) = run {
            run.changed.notify_waiters();
        }
    }

    /// Shuts down. Subscriptions end at once, since they are resumed after a restart. Calls and deliveries have
    /// `Limits::stop_within` to finish. The journal keeps everything that was accepted.
    pub(crate) async fn shut_down(self: &Arc<Self>) {
        self.stopping.cancel();
        self.wake_runs();
        self.tasks.close();
        if tokio::time::timeout(self.limits.stop_within, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                calls = lock(&self.runs).len(),
                "some calls were still running at the end of the shutdown time"
            );
        }
        self.ended.cancel();
        self.wake_runs();
        // Handlers that block their thread cannot be dropped, so the server does not wait for them.
        if tokio::time::timeout(Duration::from_secs(1), self.tasks.wait()).await.is_err() {
            tracing::warn!("a handler blocks its thread and could not be stopped");
        }
        if let Err(error) = self.writer.run(JobClass::Internal, recovery::reset_restart_counts).await {
            tracing::warn!(%error, "could not record the graceful shutdown");
        }
        self.writer.close().await;
    }

    /// Simulates a crash: drops handlers and deliveries, and writes nothing more.
    pub(crate) async fn crash(&self) {
        self.stopping.cancel();
        self.ended.cancel();
        self.wake_runs();
        self.tasks.close();
        self.tasks.wait().await;
        self.writer.close().await;
    }
}
