//! Group commit on SQLite: one thread owns the connection and commits what waits in one transaction.
//!
//! Invariants:
//! - No caller hears anything about its job, refusals included, before the batch it ran in has ended.
//! - A batch stands as a whole or not at all. A job that fails is taken out of it by its savepoint; one that has none
//!   and wrote something takes the batch with it.
//! - Foreign code (a job, and what it drops) never runs under the queue's lock.
//! - Both lanes are bounded: past its bound the external lane refuses, the internal one makes its callers wait.
//!
//! It must never commit on behalf of a single job, retry a job, or know what a job is about.

mod batch;
mod queue;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::metrics::{Counter, Histogram};
use batch::{Batches, Watched};
use queue::{Guard, Queue, Task};

/// How many internal jobs may be queued or running; the callers of more wait for their turn.
pub const INTERNAL_JOBS: usize = 4096;

/// The handle to the writer's thread. Clones are cheap and share the thread; when the last one is dropped, the
/// thread finishes what is queued and ends by itself.
#[derive(Clone)]
pub struct Writer {
    inner: Arc<Inner>,
    waiting: Waiting,
}

/// How callers wait for the thread.
#[derive(Clone, Copy)]
enum Waiting {
    Idle,
    /// As work of the async runtime, which keeps a paused clock from running ahead of it.
    Busy,
}

/// Upper bounds for how many jobs share a commit.
const GROUP_SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// How a writer has done since it was started.
#[derive(Debug)]
pub struct WriterMetrics {
    /// How many jobs shared each commit.
    pub group_size: Histogram,
    /// How long each COMMIT took.
    pub commit_seconds: Histogram,
    /// Batches of which nothing was written.
    pub lost: Counter,
}

/// How many jobs wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// Of the internal lane.
    pub internal: usize,
    /// Of the external lane.
    pub external: usize,
}

struct Inner {
    queue: Arc<Queue>,
    metrics: Arc<WriterMetrics>,
    internal: Arc<Semaphore>,
    /// Nothing is ever sent: that the sender is gone says that the thread has ended.
    ended: watch::Receiver<()>,
}

/// The bounds of a writer.
#[derive(Debug, Clone, Copy)]
pub struct WriterLimits {
    /// How many external jobs may wait before more are refused.
    pub queue: usize,
    /// How many jobs share a commit at most.
    pub batch_jobs: usize,
    /// No job is added to a batch that is older.
    pub batch_time: Duration,
}

impl Default for WriterLimits {
    fn default() -> Self {
        WriterLimits { queue: 4096, batch_jobs: 256, batch_time: Duration::from_millis(20) }
    }
}

/// Who asks. Internal jobs go before external ones, but not without an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Work that was already accepted. Never refused for a full queue.
    Internal,
    /// A request from outside, which can be told to come back later.
    External,
}

/// Why a job's work is not in the database.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Too many external jobs wait; the job did not run.
    #[error("too much waits to be written")]
    Busy,
    /// The database failed, not the job. Nothing of the job's batch stands, except if the disk failed in the
    /// middle of the commit itself, when nobody can know. Try later.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// The job's own error; it alone was rolled back.
    #[error(transparent)]
    Sql(rusqlite::Error),
    /// The job panicked; it alone was rolled back.
    #[error("a job of the writer panicked")]
    Panicked,
    /// The writer was closed before the job was queued, or its thread broke.
    #[error("the writer is closed")]
    Closed,
}

impl Writer {
    /// Opens the database at once (this blocks) and starts the thread. After an IO error, and only then, `open`
    /// is called again.
    ///
    /// The writer sets the connection's authorizer, to keep jobs from committing.
    pub fn start(
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
        limits: WriterLimits,
    ) -> Result<Writer, Error> {
        Writer::start_watched(open, limits, || {})
    }

    /// The same, and `on_lost` is called on the writer's thread whenever nothing of a batch stands, before any other
    /// job runs: whoever remembers what jobs wrote has to forget it.
    pub fn start_watched(
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
        limits: WriterLimits,
        on_lost: impl Fn() + Send + 'static,
    ) -> Result<Writer, Error> {
        let queue = Arc::new(Queue::new(limits.queue));
        let metrics = Arc::new(WriterMetrics {
            group_size: Histogram::new(GROUP_SIZES),
            commit_seconds: Histogram::of_seconds(),
            lost: Counter::default(),
        });
        let watched = Watched { on_lost: Box::new(on_lost), metrics: Arc::clone(&metrics) };
        let batches = Batches::open(Box::new(open), watched, Arc::clone(&queue), limits)?;
        let (ending, ended) = watch::channel(());
        let ending = Ending { queue: Arc::clone(&queue), _ended: ending };
        thread::Builder::new()
            .name("rap-writer".into())
            .spawn(move || {
                let _ending = ending;
                batches.serve();
            })
            .map_err(|error| Error::Unavailable(format!("no thread: {error}")))?;
        let internal = Arc::new(Semaphore::new(INTERNAL_JOBS));
        Ok(Writer { inner: Arc::new(Inner { queue, metrics, internal, ended }), waiting: Waiting::Idle })
    }

    /// Runs `job` in a savepoint of the next batch; resolves only after that batch's COMMIT.
    ///
    /// Jobs of a lane run in the order in which these futures are first polled. Dropping the future once the job
    /// is queued does not stop the job: it runs and commits, and nobody hears of it.
    ///
    /// A job must not end the transaction: COMMIT is refused to it, and a ROLLBACK fails its whole batch. It
    /// must not use deferred foreign keys, which fail in the batch's COMMIT and so for everybody in it.
    pub async fn run<T: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.run_then(lane, job, |value| value).await
    }

    /// The same, and `then` acts on what the job returned: after the COMMIT, on the writer's thread, whether or not
    /// anybody waits for the answer any more. It must be quick. If it panics, what the job wrote stands.
    pub async fn run_then<T: Send + 'static, U: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        self.submit(lane, Guard::Savepoint, job, then).await
    }

    /// The same without a savepoint of its own, which is faster: if such a job fails after it wrote something, nothing
    /// of its whole batch stands. It is for jobs that fail only if the database does.
    pub async fn run_unguarded<T: Send + 'static, U: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        self.submit(lane, Guard::None, job, then).await
    }

    /// Queues a job and returns at once. It runs without a savepoint of its own, as with [`Writer::run_unguarded`], in the
    /// internal lane, whose bound does not apply: the caller bounds how many jobs it posts.
    pub fn post<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Error> {
        let (reply, _) = oneshot::channel();
        self.inner.queue.push(Lane::Internal, Box::new(Task::new(job, then, Guard::None, reply, None)))
    }

    async fn submit<T: Send + 'static, U: Send + 'static>(
        &self,
        lane: Lane,
        guard: Guard,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        let permit = match lane {
            Lane::External => None,
            Lane::Internal => {
                Some(Arc::clone(&self.inner.internal).acquire_owned().await.map_err(|_| Error::Closed)?)
            }
        };
        let (reply, answer) = oneshot::channel();
        self.inner.queue.push(lane, Box::new(Task::new(job, then, guard, reply, permit)))?;
        let answer = match self.waiting {
            Waiting::Idle => answer.await.ok(),
            Waiting::Busy => {
                tokio::task::spawn_blocking(move || answer.blocking_recv().ok()).await.ok().flatten()
            }
        };
        // Without an answer the thread has ended, which it only does when the writer is closed or broken.
        answer.unwrap_or(Err(Error::Closed))
    }

    /// How it has done.
    pub fn metrics(&self) -> &WriterMetrics {
        &self.inner.metrics
    }

    /// How many jobs wait.
    pub fn queued(&self) -> Queued {
        self.inner.queue.queued()
    }

    /// A handle for tests whose clock is paused: the clock stands still while a job runs, as if it took no time.
    #[must_use]
    pub fn holding_the_clock(self) -> Writer {
        Writer { waiting: Waiting::Busy, ..self }
    }

    /// Takes no more jobs, finishes those that are queued, commits and closes the database. Resolves when all
    /// that is done. Any clone may close; the others then get [`Error::Closed`].
    pub async fn close(&self) {
        self.inner.close();
        let mut ended = self.inner.ended.clone();
        while ended.changed().await.is_ok() {}
    }
}

impl Inner {
    fn close(&self) {
        self.internal.close();
        self.queue.close();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

/// Dropped as the thread's last act, be it by a panic: no caller may wait for a thread that is gone.
struct Ending {
    queue: Arc<Queue>,
    _ended: watch::Sender<()>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.queue.abandon();
    }
}
