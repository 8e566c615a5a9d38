//! The writer's thread: takes what waits, runs it in savepoints, commits, answers.
//!
//! After any failure the connection is either out of every transaction or gone; a batch never begins inside
//! the remains of another. A database that can not be opened is tried again by the next batch, and the thread
//! sleeps until there is one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rusqlite::hooks::{AuthAction, AuthContext, Authorization, TransactionOperation};
use rusqlite::{Connection, ErrorCode};

use super::queue::{Guard, Job, Queue, Ran};
use super::{Error, WriterLimits, WriterMetrics};

const BEGIN: &str = "BEGIN IMMEDIATE";
const SAVEPOINT: &str = "SAVEPOINT rap_writer_job";
const ROLLBACK_TO: &str = "ROLLBACK TO rap_writer_job";
const RELEASE: &str = "RELEASE rap_writer_job";
// The comment keeps a job from finding our cached COMMIT, which was prepared when it was allowed.
const COMMIT: &str = "COMMIT -- by the writer";
const ROLLBACK: &str = "ROLLBACK";

pub(super) type Open = Box<dyn Fn() -> rusqlite::Result<Connection> + Send>;

/// Why nothing of a batch stands.
pub(super) struct Outage {
    pub(super) why: String,
    reopen: bool,
}

impl Outage {
    pub(super) fn of(doing: &str, error: &rusqlite::Error) -> Self {
        Outage { why: format!("{doing}: {error}"), reopen: Outage::spoils(error) }
    }

    fn lost(why: &str) -> Self {
        Outage { why: format!("the transaction was lost: {why}"), reopen: false }
    }

    /// After such an error the connection may hold wrong pages or a stale file.
    pub(super) fn spoils(error: &rusqlite::Error) -> bool {
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

    /// Such an error is the database's and not the job's, but the connection is still good.
    pub(super) fn passes(error: &rusqlite::Error) -> bool {
        matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::DiskFull | ErrorCode::OutOfMemory | ErrorCode::DatabaseBusy)
        )
    }
}

/// Who is told how batches end.
pub(super) struct Watched {
    pub(super) on_lost: Box<dyn Fn() + Send>,
    pub(super) metrics: Arc<WriterMetrics>,
}

pub(super) struct Batches {
    open: Open,
    watched: Watched,
    conn: Option<Connection>,
    in_job: Arc<AtomicBool>,
    queue: Arc<Queue>,
    limits: WriterLimits,
}

impl Batches {
    pub(super) fn open(
        open: Open,
        watched: Watched,
        queue: Arc<Queue>,
        limits: WriterLimits,
    ) -> Result<Self, Error> {
        let mut batches = Batches { open, watched, conn: None, in_job: Arc::default(), queue, limits };
        batches.connect().map_err(|outage| Error::Unavailable(outage.why))?;
        Ok(batches)
    }

    /// Serves until the queue is closed and empty.
    pub(super) fn serve(mut self) {
        while let Some(first) = self.queue.wait() {
            let mut jobs = vec![first];
            let ended = self.batch(&mut jobs);
            if let Err(outage) = &ended {
                tracing::warn!(jobs = jobs.len(), why = outage.why, "nothing of a batch was written");
                self.recover(outage);
                (self.watched.on_lost)();
                self.watched.metrics.lost.count();
            }
            for job in jobs {
                job.reply(ended.as_ref().err());
            }
        }
    }

    /// Adds what waits to `jobs`, runs and commits it. On an error all of `jobs` have to hear of it, and some
    /// may not have run.
    fn batch(&mut self, jobs: &mut Vec<Box<dyn Job>>) -> Result<(), Outage> {
        if let Err(outage) = self.begin() {
            // Whoever waits would meet the same outage, each after a time-out of its own.
            self.fill(jobs);
            return Err(outage);
        }
        let began = Instant::now();
        let conn = self.conn.as_ref().expect("bug: begun without a connection");
        let mut ran = 0;
        while let Some(job) = jobs.get_mut(ran) {
            self.run(conn, job.as_mut())?;
            ran += 1;
            if ran < self.limits.batch_jobs && began.elapsed() < self.limits.batch_time {
                jobs.extend(self.queue.next());
            }
        }
        let committing = Instant::now();
        execute(conn, COMMIT)?;
        self.watched.metrics.commit_seconds.took(committing.elapsed());
        self.watched.metrics.group_size.observe(jobs.len() as f64);
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

    /// A COMMIT inside a job would write a part of its batch, so it is refused.
    fn open_guarded(&self) -> rusqlite::Result<Connection> {
        let mut conn = (self.open)()?;
        let in_job = Arc::clone(&self.in_job);
        conn.authorizer(Some(move |context: AuthContext<'_>| match context.action {
            // COMMIT is the operation that rusqlite has no name for.
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
        let ran = job.run(conn);
        self.in_job.store(false, Ordering::Relaxed);
        match ran {
            Ran::Broke(outage) => return Err(outage),
            Ran::Kept if conn.is_autocommit() => return Err(Outage::lost("a job ended it")),
            Ran::Undone(why) if conn.is_autocommit() => return Err(Outage::lost(&why)),
            Ran::Kept => {}
            Ran::Undone(_) => execute(conn, ROLLBACK_TO)?,
        }
        // Closes the savepoints that the job left open as well.
        execute(conn, RELEASE)
    }

    fn run_unguarded(&self, conn: &Connection, job: &mut dyn Job) -> Result<(), Outage> {
        let before = conn.total_changes();
        self.in_job.store(true, Ordering::Relaxed);
        let ran = job.run(conn);
        self.in_job.store(false, Ordering::Relaxed);
        match ran {
            Ran::Broke(outage) => Err(outage),
            Ran::Kept if conn.is_autocommit() => Err(Outage::lost("a job ended it")),
            Ran::Kept => Ok(()),
            Ran::Undone(_) if !conn.is_autocommit() && conn.total_changes() == before => Ok(()),
            Ran::Undone(why) => Err(Outage::lost(&why)),
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
