//! The queues of the writer's thread, and the type-erased job.
//!
//! The lock is held only for single operations on the queues. No job is run or dropped under it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::batch::Outage;
use super::{Error, JobClass, Queued};

/// A type-erased job. It is run at most once; then its caller gets the result.
pub(super) trait Job: Send {
    fn guard(&self) -> Guard;
    fn run(&mut self, conn: &Connection) -> JobOutcome;
    /// Sends the result of the job to the caller, or an error if its batch was rolled back.
    fn reply(self: Box<Self>, outage: Option<&Outage>);
}

/// Protects a batch from a job that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    Savepoint,
    None,
}

/// Result of running a job, as far as its batch is concerned.
pub(super) enum JobOutcome {
    Succeeded,
    /// The job has to be rolled back, for this reason. The batch continues.
    Failed(String),
    /// The connection is no longer usable.
    ConnectionBroken(Outage),
}

pub(super) struct Task<T, U, F, A> {
    job: Option<F>,
    guard: Guard,
    result: Option<Result<T, Error>>,
    then: A,
    reply: oneshot::Sender<Result<U, Error>>,
    /// Bounds the number of internal jobs. Held until the caller has its result.
    _permit: Option<OwnedSemaphorePermit>,
}

impl<T, U, F, A> Task<T, U, F, A> {
    pub(super) fn new(
        job: F,
        then: A,
        guard: Guard,
        reply: oneshot::Sender<Result<U, Error>>,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Task { job: Some(job), guard, result: None, then, reply, _permit: permit }
    }
}

impl<T, U, F, A> Job for Task<T, U, F, A>
where
    T: Send,
    U: Send,
    F: FnOnce(&Connection) -> rusqlite::Result<T> + Send,
    A: FnOnce(T) -> U + Send,
{
    fn guard(&self) -> Guard {
        self.guard
    }

    fn run(&mut self, conn: &Connection) -> JobOutcome {
        let job = self.job.take().expect("bug: a job is run once");
        // Unwind safe: the job's changes to the database are rolled back, and it owns everything else.
        let (result, outcome) = match catch_unwind(AssertUnwindSafe(|| job(conn))) {
            Ok(Ok(value)) => (Ok(value), JobOutcome::Succeeded),
            Ok(Err(error)) => classify(error),
            Err(_panic) => (Err(Error::Panicked), JobOutcome::Failed("a job panicked".into())),
        };
        self.result = Some(result);
        outcome
    }

    fn reply(self: Box<Self>, outage: Option<&Outage>) {
        let outcome = match outage {
            Some(outage) => Err(Error::Unavailable(outage.why.clone())),
            None => self.result.expect("bug: a job of a committed batch has run"),
        };
        let then = self.then;
        let outcome = outcome.and_then(|value| {
            catch_unwind(AssertUnwindSafe(|| then(value))).map_err(|_panic| Error::Panicked)
        });
        // The caller may have dropped its future.
        self.reply.send(outcome).ok();
    }
}

fn classify<T>(error: rusqlite::Error) -> (Result<T, Error>, JobOutcome) {
    let why = error.to_string();
    if Outage::requires_reopen(&error) {
        return (Err(Error::Unavailable(why)), JobOutcome::ConnectionBroken(Outage::of("a job", &error)));
    }
    if Outage::is_transient(&error) {
        return (Err(Error::Unavailable(why.clone())), JobOutcome::Failed(why));
    }
    (Err(Error::Sql(error)), JobOutcome::Failed(why))
}

pub(super) struct Queue {
    queues: Mutex<JobQueues>,
    wake: Condvar,
    external_limit: usize,
}

#[derive(Default)]
struct JobQueues {
    internal: VecDeque<Box<dyn Job>>,
    external: VecDeque<Box<dyn Job>>,
    /// Number of internal jobs taken since the last external one.
    internal_in_a_row: usize,
    closed: bool,
}

/// Number of internal jobs that may run before a waiting external job. Without this bound, a flood of internal jobs
/// would also keep out the external requests that could stop it.
pub(super) const INTERNAL_IN_A_ROW: usize = 16;

impl JobQueues {
    fn pop(&mut self) -> Option<Box<dyn Job>> {
        if self.internal_in_a_row >= INTERNAL_IN_A_ROW || self.internal.is_empty() {
            self.internal_in_a_row = 0;
            return self.external.pop_front().or_else(|| self.internal.pop_front());
        }
        self.internal_in_a_row += 1;
        self.internal.pop_front()
    }
}

impl Queue {
    pub(super) fn new(external_limit: usize) -> Self {
        Queue { queues: Mutex::default(), wake: Condvar::new(), external_limit }
    }

    pub(super) fn push(&self, class: JobClass, job: Box<dyn Job>) -> Result<(), Error> {
        let mut queues = self.lock();
        if queues.closed {
            return Err(Error::Closed);
        }
        match class {
            JobClass::Internal => queues.internal.push_back(job),
            JobClass::External if queues.external.len() >= self.external_limit => return Err(Error::Busy),
            JobClass::External => queues.external.push_back(job),
        }
        self.wake.notify_one();
        Ok(())
    }

    pub(super) fn queued(&self) -> Queued {
        let queues = self.lock();
        Queued { internal: queues.internal.len(), external: queues.external.len() }
    }

    /// Returns the next job without waiting.
    pub(super) fn next(&self) -> Option<Box<dyn Job>> {
        self.lock().pop()
    }

    /// Waits for the next job. Returns `None` when the queue is closed and empty.
    pub(super) fn wait(&self) -> Option<Box<dyn Job>> {
        let mut queues = self.lock();
        loop {
            if let Some(job) = queues.pop() {
                return Some(job);
            }
            if queues.closed {
                return None;
            }
            queues = self.wake.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_one();
    }

    /// Closes the queue and drops all jobs, so that their callers stop waiting.
    pub(super) fn abandon(&self) {
        let left = {
            let mut queues = self.lock();
            queues.closed = true;
            (std::mem::take(&mut queues.internal), std::mem::take(&mut queues.external))
        };
        drop(left);
    }

    /// No code under the lock can leave the queues in an inconsistent state, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, JobQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &'static str, seen: &std::sync::Arc<Mutex<Vec<&'static str>>>) -> Box<dyn Job> {
        let seen = std::sync::Arc::clone(seen);
        let (reply, _) = oneshot::channel();
        let run = move |_: &Connection| {
            seen.lock().unwrap().push(name);
            Ok(())
        };
        Box::new(Task::new(run, |()| (), Guard::Savepoint, reply, None))
    }

    #[test]
    fn a_flood_of_internal_jobs_does_not_starve_external_ones() {
        let queue = Queue::new(10);
        let seen = std::sync::Arc::default();
        for _ in 0..3 * INTERNAL_IN_A_ROW {
            queue.push(JobClass::Internal, job("internal", &seen)).unwrap();
        }
        queue.push(JobClass::External, job("external", &seen)).unwrap();
        let conn = Connection::open_in_memory().unwrap();
        while let Some(mut job) = queue.next() {
            job.run(&conn);
        }
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 3 * INTERNAL_IN_A_ROW + 1);
        assert_eq!(seen.iter().position(|name| *name == "external"), Some(INTERNAL_IN_A_ROW));
    }
}
