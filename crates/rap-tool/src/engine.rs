//! The shell around the rules: what is accepted is written down, run, answered and delivered.
//!
//! Every change of a call goes through [`Engine::commit`] or one of the jobs here: load, step, write in one
//! transaction, and only then act. What must never happen: a 200 before the commit, an effect of a step that
//! was not committed, a wait of one caller for another's callback.

mod accept;
mod asking;
mod delivery;
pub(crate) mod metrics;
mod open;
mod run;
mod upkeep;

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::BoxFuture;
use rap_io::lock::DirLock;
use rap_io::writer::{Error as WriteError, Lane, Writer};
use rap_protocol::{ThreadId, Timestamp};
use rusqlite::Connection;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{Caller, Callers};
use crate::call::Thread;
use crate::clock::Clock;
use crate::error::Error;
use crate::journal::{Applied, Book, Seq, recovery};
use crate::limits::Limits;
use crate::rate::Limiter;
use crate::rules::{Dropped, Ignored, Input};
use crate::tool::Tool;

pub(crate) use accept::{Accepted, Refusal};
pub(crate) use asking::{Answered, CHOICE_PATH, CONSENT_PATH};
pub(crate) use delivery::Outgoing;
pub(crate) use open::{Parts, Place, open};

/// What an author shares with the handlers, by its type.
pub(crate) type States = HashMap<TypeId, Arc<dyn Any + Send + Sync>>;

/// What runs when a thread is closed.
pub(crate) type CloseHook = Arc<dyn Fn(Thread) -> BoxFuture<'static, Result<(), Error>> + Send + Sync>;

/// A tool and the compiled schema of its arguments.
pub(crate) struct Offered {
    pub(crate) name: Arc<str>,
    pub(crate) tool: Tool,
    pub(crate) schema: rap_protocol::InputSchema,
}

/// A running tool server, but for its sockets.
pub(crate) struct Engine {
    pub(crate) limits: Limits,
    pub(crate) callers: Callers,
    /// The toolset as it is served, and its version.
    pub(crate) manifest: Bytes,
    pub(crate) version: String,
    pub(crate) states: States,
    pub(crate) answers: Limiter<()>,
    pub(crate) scrapes: Limiter<()>,
    pub(crate) notifications: Limiter<Caller>,
    /// Bounds what is in memory of requests that arrive.
    pub(crate) arriving: Arc<Semaphore>,
    pub(crate) counters: metrics::Counters,
    public_url: String,
    tools: HashMap<String, Offered>,
    on_close: Option<CloseHook>,
    invocations: Limiter<Caller>,
    /// Bounds the notifications that wait to be written.
    notified: Arc<Semaphore>,
    calls: Arc<Semaphore>,
    subscriptions: Arc<Semaphore>,
    book: Book,
    writer: Writer,
    outgoing: Outgoing,
    clock: Clock,
    runs: Mutex<HashMap<Seq, Arc<Run>>>,
    early: Mutex<accept::EarlyCancels>,
    lanes: Mutex<delivery::Lanes>,
    /// Something may be due for delivery.
    due: Notify,
    /// The server is stopping: nothing new begins.
    stopping: CancellationToken,
    /// The time to finish is over.
    ended: CancellationToken,
    tasks: TaskTracker,
    /// Where tasks run that the writer's thread starts.
    runtime: Handle,
    _lock: DirLock,
}

/// A handler at work.
pub(crate) struct Run {
    /// Nobody wants its result any more.
    stopped: AtomicBool,
    /// Something that it may be waiting for has happened: an answer, room for another event, the end.
    pub(crate) news: Notify,
    /// Its place among the calls, or among the subscriptions.
    place: Mutex<Option<OwnedSemaphorePermit>>,
    seq: OnceLock<Seq>,
    /// How many choices its handler has asked for.
    pub(crate) asked: AtomicU32,
}

impl Run {
    fn new(place: Option<OwnedSemaphorePermit>) -> Arc<Self> {
        let place = Mutex::new(place);
        let (seq, asked) = (OnceLock::new(), AtomicU32::new(0));
        Arc::new(Run { stopped: AtomicBool::new(false), news: Notify::new(), place, seq, asked })
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.news.notify_waiters();
    }

    /// Whether nobody wants the result any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Resolves when nobody wants the result any more.
    pub(crate) async fn stopped(&self) {
        loop {
            let news = self.news.notified();
            if self.is_stopped() {
                return;
            }
            news.await;
        }
    }

    /// Resolves this long after that.
    async fn stopped_for(&self, grace: Duration) {
        self.stopped().await;
        Box::pin(tokio::time::sleep(grace)).await;
    }
}

/// Nobody acts on a commit that is not waited for, so the dispatcher has to look. Its look comes after the write,
/// since the writer takes one after the other.
struct Abandoned<'a> {
    due: Option<&'a Notify>,
}

impl Abandoned<'_> {
    fn not(mut self) {
        self.due = None;
    }
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if let Some(due) = self.due {
            due.notify_one();
        }
    }
}

/// The longest pause before a commit is tried again.
const COMMIT_PAUSE: Duration = Duration::from_secs(5);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("bug: nothing panics under a lock")
}

impl Engine {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Whether the server is on its way down.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// The thread of a caller, with the key that it is known by here.
    fn thread(&self, caller: &Caller, thread: &ThreadId) -> Thread {
        Thread::new(thread.clone(), caller.clone(), self.book.key.clone())
    }

    /// Gives a run a place among the subscriptions instead of one among the calls.
    pub(crate) fn admit_subscription(&self, run: &Run) -> Result<(), Error> {
        match Arc::clone(&self.subscriptions).try_acquire_owned() {
            Ok(place) => {
                *lock(&run.place) = Some(place);
                Ok(())
            }
            Err(_) => {
                Err(Error::new("this server has as many subscriptions as it can hold; cancel some first"))
            }
        }
    }

    /// Takes a call one step further. Returns when that is on disk: what was accepted is kept until it can be
    /// written, however long the disk is full. What a handler did not wait for is written or not; if it is, it is
    /// delivered.
    pub(crate) async fn commit(
        self: &Arc<Self>,
        call: Seq,
        input: Input,
        cursor: Option<String>,
    ) -> Result<(), Ignored> {
        let step = move |engine: &Engine, db: &Connection| {
            let stepped = engine.book.step(db, call, input.clone(), engine.now())?;
            if let (Ok(_), Some(cursor)) = (&stepped, &cursor) {
                recovery::save_cursor(db, call, cursor)?;
            }
            Ok(stepped)
        };
        let abandoned = Abandoned { due: Some(&self.due) };
        let looks = self.looks();
        let written = self.write(step).await;
        abandoned.not();
        match written {
            Some(Ok(mut applied)) => {
                let first = applied.first.take();
                self.follow(call, applied);
                if let Some(letter) = first {
                    self.deliver_at_hand(delivery::AtHand { letter, looks });
                }
                Ok(())
            }
            Some(Err(ignored)) => Err(ignored),
            None => Err(Ignored::Over),
        }
    }

    /// Stores where a subscription stands.
    pub(crate) async fn save_cursor(self: &Arc<Self>, call: Seq, cursor: String) {
        self.write(move |_, db| recovery::save_cursor(db, call, &cursor)).await;
    }

    /// Writes until it is written. `None`: the server is gone, or the job is broken.
    async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl Fn(&Engine, &Connection) -> rusqlite::Result<T> + Clone + Send + 'static,
    ) -> Option<T> {
        let (mut pause, mut failed) = (Duration::from_millis(50), false);
        loop {
            let (engine, job) = (Arc::clone(self), job.clone());
            match self.writer.run(Lane::Internal, move |db| job(&engine, db)).await {
                Ok(done) => {
                    if failed {
                        // An attempt that seemed to fail may have been written: what it posted is due.
                        self.due.notify_one();
                    }
                    return Some(done);
                }
                Err(WriteError::Closed) => return None,
                Err(WriteError::Panicked) => {
                    tracing::error!("a write to the journal panicked and was dropped; this is a bug");
                    return None;
                }
                Err(error) => tracing::warn!(%error, "the journal can not be written; trying again"),
            }
            failed = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(COMMIT_PAUSE);
        }
    }

    /// Acts on a step that is on disk.
    fn follow(self: &Arc<Self>, call: Seq, applied: Applied) {
        if applied.stops_handler() {
            self.stop(call);
        }
        if applied.dropped == Dropped::Everything {
            self.interrupt_delivery(call);
        }
        let before = applied.before.events_wait + applied.before.asides_wait;
        if applied.head.events_wait + applied.head.asides_wait < before {
            self.tell_news(call);
        }
        if let Some(letter) = applied.first {
            self.deliver(letter.call, letter.origin);
        }
    }

    /// Tells a handler that nobody waits for it any more.
    fn stop(&self, call: Seq) {
        let run = lock(&self.runs).get(&call).cloned();
        if let Some(run) = run {
            run.stop();
        }
    }

    fn tell_news(&self, call: Seq) {
        let run = lock(&self.runs).get(&call).cloned();
        if let Some(run) = run {
            run.news.notify_waiters();
        }
    }

    /// Stops: subscriptions at once, since they will be resumed; calls and deliveries when they are done, or when
    /// the time is over. Nothing that was accepted is lost either way.
    pub(crate) async fn shut_down(self: &Arc<Self>) {
        self.stopping.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.limits.stop_within, self.tasks.wait()).await.is_err() {
            tracing::warn!(calls = lock(&self.runs).len(), "still at work when the time to finish was over");
        }
        self.ended.cancel();
        // Handlers that block their thread can not be dropped; they are not waited for.
        if tokio::time::timeout(Duration::from_secs(1), self.tasks.wait()).await.is_err() {
            tracing::warn!("a handler blocks its thread and could not be stopped");
        }
        if let Err(error) = self.writer.run(Lane::Internal, recovery::stopped_in_order).await {
            tracing::warn!(%error, "could not note that the server stopped in order");
        }
        self.writer.close().await;
    }

    /// Ends as a crash does: handlers and deliveries are dropped where they stand, and nothing is noted.
    pub(crate) async fn crash(&self) {
        self.stopping.cancel();
        self.ended.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.writer.close().await;
    }
}
