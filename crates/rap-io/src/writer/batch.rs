//! The loop of the writer's thread: takes the queued jobs, runs them in savepoints, commits, and replies.
//!
//! After any failure the connection is either outside of a transaction or closed, so that a batch never begins inside
//! the transaction of another. If the database cannot be opened, the next batch tries again; the thread sleeps until
//! then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rusqlite::hooks::{AuthAction, AuthContext, Authorization, TransactionOperation};
use rusqlite::{Connection, ErrorCode};

use super::queue::{Guard, Job, JobOutcome, Queue};
use super::{Error, WriterLimits, WriterMetrics};

const BEGIN: &str = "BEGIN IMMEDIATE";
const SAVEPOINT: &str = "SAVEPOINT rap_writer_job";
const ROLLBACK_TO: &str = "ROLLBACK TO rap_writer_job";
const RELEASE: &str = "RELEASE rap_writer_job";
// The SQL comment prevents a job from using the writer's cached COMMIT statement, which the authorizer has allowed.
const COMMIT: &str = "COMMIT -- by the writer";
const ROLLBACK: &str = "ROLLBACK";

pub(super) type Open = Box<dyn Fn() -> rusqlite::Result<Connection> + Send>;

/// Reason why a batch was rolled back.
pub(super) struct Outage {
    pub(super) why: String,
    reopen: bool,
}

impl Outage {
    pub(super) fn of(doing: &str, error: &rusqlite::Error) -> Self {
        Outage { why: format!("{doing}: {error}"), reopen: Outage::requires_reopen(error) }
    }

    fn transaction_lost(why: &str) -> Self {
        Outage { why: format!("the transaction was lost: {why}"), reopen: false }
    }

    /// Returns true if the connection may hold wrong pages or a stale file after this error.
    pub(super) fn requires_reopen(error: &rusqlite::Error) -> bool {
        matches!(
            error.sqlite_error_code(),
            Some(
                ErrorCode::SystemIoFailure
                    | ErrorCode::DatabaseCorrupt
                    | ErrorCode::NotADatabase
                    | ErrorCode::CannotOpen
                    | ErrorCode::ReadOnly
            )
        )
    }

    /// Returns true if the database caused the error, not the job, and the connection is still usable.
    pub(super) fn is_transient(error: &rusqlite::Error) -> bool {
        matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::DiskFull | ErrorCode::OutOfMemory | ErrorCode::DatabaseBusy)
        )
    }
}

/// Receives the results of batches.
pub(super) struct BatchObserver {
    pub(super) on_batch_failed: Box<dyn Fn() + Send>,
    pub(super) metrics: Arc<WriterMetrics>,
}

pub(super) struct Batches {
    open: Open,
    observer: BatchObserver,
    conn: Option<Connection>,
    in_job: Arc<AtomicBool>,
    queue: Arc<Queue>,
    limits: WriterLimits,
}

impl Batches {
    pub(super) fn open(
        open: Open,
        observer: BatchObserver,
        queue: Arc<Queue>,
        limits: WriterLimits,
    ) -> Result<Self, Error> {
        let mut batches = Batches { open, observer, conn: None, in_job: Arc::default(), queue, limits };
        batches.connect().map_err(|outage| Error::Unavailable(outage.why))?;
        Ok(batches)
    }

    /// Runs batches until the queue is closed and empty.
    pub(super) fn serve(mut self) {
        while let Some(first) = self.queue.wait() {
            let mut jobs = vec![first];
            let ended = self.batch(&mut jobs);
            if let Err(outage) = &ended {
                tracing::warn!(jobs = jobs.len(), why = outage.why, "a batch was rolled back");
                self.recover(outage);
                (self.observer.on_batch_failed)();
                self.observer.metrics.failed_batches.count();
            }
            for job in jobs {
                job.reply(ended.as_ref().err());
            }
        }
    }

    /// Runs and commits `jobs`, and adds queued jobs to them meanwhile. On an error, all of `jobs` have failed, and
    /// some may not have run.
    fn batch(&mut self, jobs: &mut Vec<Box<dyn Job>>) -> Result<(), Outage> {
        if let Err(outage) = self.begin() {
            // The queued jobs would fail in the same way, each after its own timeout.
            self.fill(jobs);
            return Err(outage);
        }
        let began = Instant::now();
        let conn = self.conn.as_ref().expect("bug: a batch has a connection");
        let mut finished = 0;
        while let Some(job) = jobs.get_mut(finished) {
            self.run(conn, job.as_mut())?;
            finished += 1;
            if finished < self.limits.batch_jobs && began.elapsed() < self.limits.batch_time {
                jobs.extend(self.queue.next());
            }
        }
        let committing = Instant::now();
        crate::crash::point("before_commit");
        execute(conn, COMMIT)?;
        crate::crash::point("after_commit");
        self.observer.metrics.commit_seconds.observe_duration(committing.elapsed());
        self.observer.metrics.group_size.observe(jobs.len() as f64);
        Ok(())
    }

    fn begin(&mut self) -> Result<(), Outage> {
        execute(self.connect()?, BEGIN)
    }

    fn connect(&mut self) -> Result<&Connection, Outage> {
        let conn = match self.conn.take() {
            Some(conn) => conn,
            None => self.open_guarded().map_err(|error| Outage::of("open", &error))?,
        };
        Ok(self.conn.insert(conn))
    }

    /// Opens the database and denies COMMIT inside jobs, which would commit a part of the batch.
    fn open_guarded(&self) -> rusqlite::Result<Connection> {
        let mut conn = (self.open)()?;
        let in_job = Arc::clone(&self.in_job);
        conn.authorizer(Some(move |context: AuthContext<'_>| match context.action {
            // rusqlite reports COMMIT as an unknown operation.
            AuthAction::Transaction { operation: TransactionOperation::Unknown }
                if in_job.load(Ordering::Relaxed) =>
            {
                Authorization::Deny
            }
            _ => Authorization::Allow,
        }))?;
        Ok(conn)
    }

    fn fill(&self, jobs: &mut Vec<Box<dyn Job>>) {
        while jobs.len() < self.limits.batch_jobs
            && let Some(job) = self.queue.next()
        {
            jobs.push(job);
        }
    }

    fn run(&self, conn: &Connection, job: &mut dyn Job) -> Result<(), Outage> {
        if job.guard() == Guard::None {
            return self.run_unguarded(conn, job);
        }
        execute(conn, SAVEPOINT)?;
        self.in_job.store(true, Ordering::Relaxed);
        let outcome = job.run(conn);
        self.in_job.store(false, Ordering::Relaxed);
        match outcome {
            JobOutcome::ConnectionBroken(outage) => return Err(outage),
            JobOutcome::Succeeded if conn.is_autocommit() => {
                return Err(Outage::transaction_lost("a job ended it"));
            }
            JobOutcome::Failed(why) if conn.is_autocommit() => return Err(Outage::transaction_lost(&why)),
            JobOutcome::Succeeded => {}
            JobOutcome::Failed(_) => execute(conn, ROLLBACK_TO)?,
        }
        // Also releases savepoints that the job has left open.
        execute(conn, RELEASE)
    }

    fn run_unguarded(&self, conn: &Connection, job: &mut dyn Job) -> Result<(), Outage> {
        let before = conn.total_changes();
        self.in_job.store(true, Ordering::Relaxed);
        let outcome = job.run(conn);
        self.in_job.store(false, Ordering::Relaxed);
        match outcome {
            JobOutcome::ConnectionBroken(outage) => Err(outage),
            JobOutcome::Succeeded if conn.is_autocommit() => Err(Outage::transaction_lost("a job ended it")),
            JobOutcome::Succeeded => Ok(()),
            JobOutcome::Failed(_) if !conn.is_autocommit() && conn.total_changes() == before => Ok(()),
            JobOutcome::Failed(why) => Err(Outage::transaction_lost(&why)),
        }
    }

    fn recover(&mut self, outage: &Outage) {
        let Some(conn) = &self.conn else { return };
        let stuck = !conn.is_autocommit() && execute(conn, ROLLBACK).is_err();
        if outage.reopen || stuck {
            self.conn = None;
        }
    }
}

fn execute(conn: &Connection, sql: &str) -> Result<(), Outage> {
    let done = conn.prepare_cached(sql).and_then(|mut statement| statement.execute([]));
    done.map(|_| ()).map_err(|error| Outage::of(sql, &error))
}
