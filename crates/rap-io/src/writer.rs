//! Group commit for SQLite: one thread owns the connection and runs all waiting jobs in one transaction.
//!
//! Invariants:
//! - A caller gets the result of its job, even an error, only after the batch of the job has ended.
//! - A batch is committed completely or not at all. A job that fails is rolled back to its savepoint. If it has no
//!   savepoint and has written something, the whole batch fails.
//! - Code of callers (a job, and the destructors of its values) never runs under the lock of the queue.
//! - Both queues are bounded. If the external queue is full, a job is refused; if the internal queue is full, the
//!   caller waits.
//!
//! A job cannot commit by itself: only its batch is committed. The writer never retries a job, and knows nothing about the
//! content of jobs.

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
use batch::{BatchObserver, Batches};
use queue::{Guard, Queue, Task};

/// Maximum number of internal jobs that are queued or running. Callers of further jobs wait.
pub const INTERNAL_JOBS: usize = 4096;

/// Handle to the writer's thread. Clones are cheap and share the thread. When the last one is dropped, the thread
/// runs the queued jobs and ends.
#[derive(Clone)]
pub struct Writer {
    inner: Arc<Inner>,
    wait_mode: WaitMode,
}

/// Wait of a caller for the result of its job.
#[derive(Clone, Copy)]
enum WaitMode {
    Async,
    /// In a blocking task of tokio, which keeps a paused test clock from advancing meanwhile.
    Blocking,
}

/// Histogram buckets for the number of jobs per commit.
const GROUP_SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// Metrics of a writer since its start.
#[derive(Debug)]
pub struct WriterMetrics {
    /// Number of jobs per commit.
    pub group_size: Histogram,
    /// Duration of each COMMIT, in seconds.
    pub commit_seconds: Histogram,
    /// Number of batches that were rolled back.
    pub failed_batches: Counter,
}

/// Number of queued jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// Number of internal jobs.
    pub internal: usize,
    /// Number of external jobs.
    pub external: usize,
}

struct Inner {
    queue: Arc<Queue>,
    metrics: Arc<WriterMetrics>,
    internal: Arc<Semaphore>,
    /// Closes when the thread has ended. Nothing is ever sent.
    ended: watch::Receiver<()>,
}

/// Limits of a writer.
#[derive(Debug, Clone, Copy)]
pub struct WriterLimits {
    /// Maximum number of queued external jobs. Further ones are refused.
    pub queue: usize,
    /// Maximum number of jobs per commit.
    pub batch_jobs: usize,
    /// Age of a batch after which no further job is added to it.
    pub batch_time: Duration,
}

impl Default for WriterLimits {
    fn default() -> Self {
        WriterLimits { queue: 4096, batch_jobs: 256, batch_time: Duration::from_millis(20) }
    }
}

/// Priority of a job. Internal jobs run before external ones, but cannot starve them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobClass {
    /// Work that was already accepted. Never refused for a full queue.
    Internal,
    /// A request from outside. Refused with [`Error::Busy`] if the queue is full.
    External,
}

/// Reason why a job was not committed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The queue of external jobs is full. The job did not run.
    #[error("too many writes are queued")]
    Busy,
    /// The database failed, not the job. The batch of the job was rolled back, unless the disk failed during the
    /// COMMIT itself: then the outcome is unknown. Try again later.
    #[error("the database is not available: {0}")]
    Unavailable(String),
    /// The job returned this error. Only this job was rolled back.
    #[error(transparent)]
    Sql(rusqlite::Error),
    /// The job panicked, and only this job was rolled back; or `then` panicked after the commit.
    #[error("a database job panicked")]
    Panicked,
    /// The writer was closed before the job was queued, or its thread panicked.
    #[error("the writer is closed")]
    Closed,
}

impl Writer {
    /// Opens the database, which blocks, and starts the thread. Calls `open` again only after an IO error.
    ///
    /// The writer sets the authorizer of the connection, to prevent jobs from committing.
    pub fn start(
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
        limits: WriterLimits,
    ) -> Result<Writer, Error> {
        Writer::start_with_failure_hook(open, limits, || {})
    }

    /// Like [`Writer::start`], with a hook. Calls `on_batch_failed` on the writer's thread when a batch was rolled
    /// back, before the next job runs. Caches of what jobs have written have to be dropped then.
    pub fn start_with_failure_hook(
        open: impl Fn() -> rusqlite::Result<Connection> + Send + 'static,
        limits: WriterLimits,
        on_batch_failed: impl Fn() + Send + 'static,
    ) -> Result<Writer, Error> {
        let queue = Arc::new(Queue::new(limits.queue));
        let metrics = Arc::new(WriterMetrics {
            group_size: Histogram::new(GROUP_SIZES),
            commit_seconds: Histogram::of_seconds(),
            failed_batches: Counter::default(),
        });
        let observer =
            BatchObserver { on_batch_failed: Box::new(on_batch_failed), metrics: Arc::clone(&metrics) };
        let batches = Batches::open(Box::new(open), observer, Arc::clone(&queue), limits)?;
        let (ending, ended) = watch::channel(());
        let ending = ExitGuard { queue: Arc::clone(&queue), _ended: ending };
        thread::Builder::new()
            .name("rap-writer".into())
            .spawn(move || {
                let _ending = ending;
                batches.serve();
            })
            .map_err(|error| {
                Error::Unavailable(format!("the writer thread could not be started: {error}"))
            })?;
        let internal = Arc::new(Semaphore::new(INTERNAL_JOBS));
        Ok(Writer { inner: Arc::new(Inner { queue, metrics, internal, ended }), wait_mode: WaitMode::Async })
    }

    /// Runs `job` in a savepoint of the next batch. Returns after the COMMIT of that batch.
    ///
    /// Jobs of a class run in the order in which their futures are first polled. Dropping the future after the job
    /// was queued does not stop the job: it runs and is committed.
    ///
    /// A job must not end the transaction: its COMMIT is refused, and its ROLLBACK makes the whole batch fail. It
    /// must not use deferred foreign keys, because a violation would make the COMMIT of the whole batch fail.
    pub async fn run<T: Send + 'static>(
        &self,
        class: JobClass,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.run_then(class, job, |value| value).await
    }

    /// Like [`Writer::run`], and calls `then` with the result of the job after the COMMIT. `then` runs on the
    /// writer's thread, even if the caller has dropped the future, and must be quick. If it panics, the job stays
    /// committed.
    pub async fn run_then<T: Send + 'static, U: Send + 'static>(
        &self,
        class: JobClass,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        self.submit(class, Guard::Savepoint, job, then).await
    }

    /// Like [`Writer::run_then`] without a savepoint, which is faster. If such a job fails after it has written
    /// something, its whole batch is rolled back. For jobs that fail only if the database fails.
    pub async fn run_unguarded<T: Send + 'static, U: Send + 'static>(
        &self,
        class: JobClass,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        self.submit(class, Guard::None, job, then).await
    }

    /// Queues an internal job and returns at once. The job runs without a savepoint, as with
    /// [`Writer::run_unguarded`]. [`INTERNAL_JOBS`] does not apply: the caller has to bound the number of posted
    /// jobs.
    pub fn post<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) + Send + 'static,
    ) -> Result<(), Error> {
        let (reply, _) = oneshot::channel();
        self.inner.queue.push(JobClass::Internal, Box::new(Task::new(job, then, Guard::None, reply, None)))
    }

    async fn submit<T: Send + 'static, U: Send + 'static>(
        &self,
        class: JobClass,
        guard: Guard,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        then: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Error> {
        let permit = match class {
            JobClass::External => None,
            JobClass::Internal => {
                Some(Arc::clone(&self.inner.internal).acquire_owned().await.map_err(|_| Error::Closed)?)
            }
        };
        let (reply, answer) = oneshot::channel();
        self.inner.queue.push(class, Box::new(Task::new(job, then, guard, reply, permit)))?;
        let answer = match self.wait_mode {
            WaitMode::Async => answer.await.ok(),
            WaitMode::Blocking => {
                tokio::task::spawn_blocking(move || answer.blocking_recv().ok()).await.ok().flatten()
            }
        };
        // Without an answer the thread has ended: the writer was closed, or the thread panicked.
        answer.unwrap_or(Err(Error::Closed))
    }

    /// Returns the metrics of the writer.
    pub fn metrics(&self) -> &WriterMetrics {
        &self.inner.metrics
    }

    /// Returns the number of queued jobs.
    pub fn queued(&self) -> Queued {
        self.inner.queue.queued()
    }

    /// Returns a handle for tests with a paused clock. The clock does not advance while a job runs.
    #[must_use]
    pub fn for_paused_clock(self) -> Writer {
        Writer { wait_mode: WaitMode::Blocking, ..self }
    }

    /// Refuses new jobs, runs and commits the queued ones, and closes the database. Returns when all of that is done.
    /// Closes the writer for all clones, which then return [`Error::Closed`].
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

/// Dropped when the thread ends, even by a panic, so that no caller waits for a thread that has ended.
struct ExitGuard {
    queue: Arc<Queue>,
    _ended: watch::Sender<()>,
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.queue.abandon();
    }
}
