//! Access to the database: a writer thread and several readers or, in the simulation, one connection on the calling
//! task.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rap_io::metrics::Exposition;
use rap_io::sqlite::{open_existing, open_for_reading};
use rap_io::writer::{self, Writer, WriterLimits};
use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::Inner;
use crate::store::Error;

/// Maximum number of concurrent reads. `http::admission` bounds the long ones, and those that anybody can cause, to fewer.
const READERS: usize = 8;
/// Pause before the outcome of a failed commit is resolved.
const RESOLVE_PAUSE: Duration = Duration::from_millis(250);

pub(super) enum Access {
    Threads {
        writer: Writer,
        readers: Arc<Readers>,
    },
    #[cfg(test)]
    Inline(Inline),
}

pub(super) struct Readers {
    path: PathBuf,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Readers {
    fn take(&self) -> rusqlite::Result<Connection> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(conn) => Ok(conn),
            None => open_for_reading(&self.path),
        }
    }

    fn give_back(&self, conn: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
    }
}

impl Access {
    pub(super) fn threads(
        path: &Path,
        limits: WriterLimits,
        on_lost: impl Fn() + Send + 'static,
    ) -> Result<Access, writer::Error> {
        let file = path.to_owned();
        let open = move || {
            let conn = open_existing(&file)?;
            // No test simulates a power failure, so tests need not wait for the disk.
            #[cfg(test)]
            conn.pragma_update(None, "synchronous", "OFF")?;
            Ok(conn)
        };
        let writer = Writer::start_with_failure_hook(open, limits, on_lost)?;
        let permits = Arc::new(Semaphore::new(READERS));
        let readers = Arc::new(Readers { path: path.to_owned(), permits, idle: Mutex::default() });
        Ok(Access::Threads { writer, readers })
    }

    /// Runs a read in one short transaction.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let readers = match self {
            Access::Threads { readers, .. } => Arc::clone(readers),
            #[cfg(test)]
            Access::Inline(inline) => return Ok(inline.with(job)?),
        };
        let permit = Arc::clone(&readers.permits).acquire_owned().await.map_err(|_| Error::Closed)?;
        let read = move || {
            // The read continues if the caller stops waiting, and keeps its permit until it ends.
            let _permit = permit;
            let conn = readers.take()?;
            let done = conn.unchecked_transaction().and_then(|transaction| job(&transaction));
            if done.is_ok() {
                readers.give_back(conn);
            }
            done
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(done) => done.map_err(Error::from),
            Err(panicked) => Err(Error::Unreadable(panicked.into())),
        }
    }

    /// Runs a write outside a step. Returns when it is on disk.
    pub(super) async fn write<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        match self {
            Access::Threads { writer, .. } => Ok(writer.run(writer::JobClass::Internal, job).await?),
            #[cfg(test)]
            Access::Inline(inline) => inline.transaction(job),
        }
    }

    /// Runs a job in the next transaction, and `then` after its commit.
    pub(super) fn post(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
        then: impl FnOnce(()) + Send + 'static,
    ) -> Result<(), writer::Error> {
        match self {
            Access::Threads { writer, .. } => writer.post(job, then),
            #[cfg(test)]
            Access::Inline(inline) => {
                inline.post(job, then);
                Ok(())
            }
        }
    }

    /// Schedules the resolution of a batch of unknown outcome after a pause.
    pub(super) fn resolve_later(&self, inner: Arc<Inner>) {
        match self {
            // The writer thread has no async runtime. This is rare, so a new thread is acceptable.
            Access::Threads { .. } => drop(std::thread::spawn(move || {
                std::thread::sleep(RESOLVE_PAUSE);
                inner.schedule();
            })),
            #[cfg(test)]
            Access::Inline(_) => drop(tokio::spawn(async move {
                tokio::time::sleep(RESOLVE_PAUSE).await;
                inner.schedule();
            })),
        }
    }

    /// Keeps the messages that a transaction has applied until its commit.
    #[cfg(test)]
    pub(super) fn observe(&self, observed: Vec<Observed>) {
        if let Access::Inline(inline) = self {
            inline.observed.lock().unwrap_or_else(PoisonError::into_inner).extend(observed);
        }
    }

    pub(super) fn expose(&self, text: &mut Exposition) {
        match self {
            Access::Threads { writer, .. } => {
                let metrics = writer.metrics();
                text.histogram(
                    "rap_commit_jobs",
                    "Number of jobs that shared a commit.",
                    &metrics.group_size,
                );
                text.histogram("rap_commit_seconds", "Duration of a COMMIT.", &metrics.commit_seconds);
                text.counter(
                    "rap_commits_lost_total",
                    "Batches of which nothing was written.",
                    &metrics.failed_batches,
                );
            }
            #[cfg(test)]
            Access::Inline(_) => {}
        }
    }

    /// Closes all connections. The last connection to close checkpoints the WAL, so the writer closes last.
    pub(super) async fn close(&self) {
        match self {
            Access::Threads { writer, readers } => {
                if let Ok(all) = readers.permits.acquire_many(READERS as u32).await {
                    readers.permits.close();
                    readers.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
                    drop(all);
                }
                writer.close().await;
            }
            #[cfg(test)]
            Access::Inline(_) => {}
        }
    }
}

/// The outcome of the next commit in the simulation.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommitFault {
    None,
    /// The commit writes nothing, and the caller gets an error.
    Lost,
    /// The commit succeeds, and the caller gets an error.
    Unknown,
}

/// A message that a transaction has applied.
#[cfg(test)]
pub(crate) struct Observed {
    pub(crate) message: crate::store::Message,
    pub(crate) now: rap_protocol::Timestamp,
    pub(crate) outcome: ObservedOutcome,
}

#[cfg(test)]
pub(crate) enum ObservedOutcome {
    Done {
        thread: Arc<crate::store::Thread>,
        step: Box<rap_agent::Step>,
        children: Vec<Arc<crate::store::Thread>>,
    },
    Repeated,
    Ignored {
        thread: crate::store::ThreadKey,
        why: rap_agent::Ignored,
    },
    Refused(String),
}

#[cfg(test)]
type OnLost = Box<dyn Fn() + Send + Sync>;

/// One connection that runs all work on the calling task.
#[cfg(test)]
#[derive(Clone)]
pub(crate) struct Inline {
    conn: Arc<Mutex<Connection>>,
    fault: Arc<dyn Fn() -> CommitFault + Send + Sync>,
    observer: Arc<dyn Fn(Vec<Observed>) + Send + Sync>,
    /// The messages that the transaction in progress has applied.
    observed: Arc<Mutex<Vec<Observed>>>,
    on_lost: Arc<Mutex<Option<OnLost>>>,
}

#[cfg(test)]
impl Inline {
    /// `fault` determines the outcome of the next commit. `observer` gets the messages of each commit that succeeded,
    /// even if the caller gets an error.
    pub(crate) fn new(
        conn: Connection,
        fault: impl Fn() -> CommitFault + Send + Sync + 'static,
        observer: impl Fn(Vec<Observed>) + Send + Sync + 'static,
    ) -> Inline {
        // It does the work of all connections. Without room for their statements, a fifth of the time is spent on
        // preparing them.
        conn.set_prepared_statement_cache_capacity(512);
        Inline {
            conn: Arc::new(Mutex::new(conn)),
            fault: Arc::new(fault),
            observer: Arc::new(observer),
            observed: Arc::default(),
            on_lost: Arc::default(),
        }
    }

    fn observed(&self) -> Vec<Observed> {
        std::mem::take(&mut self.observed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn with<T>(&self, job: impl FnOnce(&Connection) -> T) -> T {
        job(&self.conn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn on_lost(&self, on_lost: impl Fn() + Send + Sync + 'static) {
        *self.on_lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(on_lost));
    }

    fn transaction<T>(&self, job: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, Error> {
        self.with(|conn| {
            let transaction = conn.unchecked_transaction()?;
            let done = job(&transaction);
            let observed = self.observed();
            let done = done?;
            let fault = (self.fault)();
            if fault == CommitFault::Lost {
                transaction.rollback()?;
                // Refusals in a batch without a step are valid although nothing was committed.
                if !observed.iter().any(|one| matches!(one.outcome, ObservedOutcome::Done { .. })) {
                    (self.observer)(
                        observed.into_iter().filter(|one| one.message.outbox.is_none()).collect(),
                    );
                }
                return Err(Error::Unavailable("the simulated commit was lost".into()));
            }
            transaction.commit()?;
            (self.observer)(observed);
            match fault {
                CommitFault::Unknown => {
                    Err(Error::Unavailable("the outcome of the simulated commit is unknown".into()))
                }
                _ => Ok(done),
            }
        })
    }

    fn post(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
        then: impl FnOnce(()) + Send + 'static,
    ) {
        let inline = self.clone();
        tokio::spawn(async move {
            match inline.transaction(job) {
                Ok(()) => then(()),
                Err(_) => {
                    let on_lost = inline.on_lost.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(on_lost) = &*on_lost {
                        on_lost();
                    }
                }
            }
        });
    }
}
