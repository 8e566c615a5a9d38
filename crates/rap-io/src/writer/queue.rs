//! What waits for the writer's thread: two lanes under one lock, and the job as the thread sees it.
//!
//! The lock is held for single operations on the lanes only, and no job is run or dropped under it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::batch::Outage;
use super::{Error, Lane, Queued};

/// A job without its types. It is run at most once, then answered.
pub(super) trait Job: Send {
    fn guard(&self) -> Guard;
    fn run(&mut self, conn: &Connection) -> Ran;
    /// Answers the caller: what the job returned, or that its batch fell to an outage.
    fn reply(self: Box<Self>, outage: Option<&Outage>);
}

/// What keeps a job that fails from its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    Savepoint,
    None,
}

/// What a job's run means for its batch.
pub(super) enum Ran {
    /// Its work stands.
    Kept,
    /// Its work has to be undone, for the reason given; the batch goes on.
    Undone(String),
    /// The connection can not be trusted any more.
    Broke(Outage),
}

pub(super) struct Task<T, U, F, A> {
    job: Option<F>,
    guard: Guard,
    outcome: Option<Result<T, Error>>,
    then: A,
    reply: oneshot::Sender<Result<U, Error>>,
    /// Held until the job is answered, which bounds the internal lane.
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
        Task { job: Some(job), guard, outcome: None, then, reply, _permit: permit }
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

    fn run(&mut self, conn: &Connection) -> Ran {
        let job = self.job.take().expect("bug: a job is run once");
        // Unwind safe: what the job did to the database is rolled back, and it owned everything else.
        let (outcome, ran) = match catch_unwind(AssertUnwindSafe(|| job(conn))) {
            Ok(Ok(value)) => (Ok(value), Ran::Kept),
            Ok(Err(error)) => judge(error),
            Err(_panic) => (Err(Error::Panicked), Ran::Undone("a job panicked".into())),
        };
        self.outcome = Some(outcome);
        ran
    }

    fn reply(self: Box<Self>, outage: Option<&Outage>) {
        let outcome = match outage {
            Some(outage) => Err(Error::Unavailable(outage.why.clone())),
            None => self.outcome.expect("bug: a job of a committed batch has run"),
        };
        let then = self.then;
        let outcome = outcome.and_then(|value| {
            catch_unwind(AssertUnwindSafe(|| then(value))).map_err(|_panic| Error::Panicked)
        });
        // A caller that is gone need not hear.
        self.reply.send(outcome).ok();
    }
}

fn judge<T>(error: rusqlite::Error) -> (Result<T, Error>, Ran) {
    let why = error.to_string();
    if Outage::spoils(&error) {
        return (Err(Error::Unavailable(why)), Ran::Broke(Outage::of("a job", &error)));
    }
    if Outage::passes(&error) {
        return (Err(Error::Unavailable(why.clone())), Ran::Undone(why));
    }
    (Err(Error::Sql(error)), Ran::Undone(why))
}

pub(super) struct Queue {
    lanes: Mutex<Lanes>,
    wake: Condvar,
    external_limit: usize,
}

#[derive(Default)]
struct Lanes {
    internal: VecDeque<Box<dyn Job>>,
    external: VecDeque<Box<dyn Job>>,
    /// How many internal jobs have been taken since the last external one.
    in_a_row: usize,
    closed: bool,
}

/// So many internal jobs go before an external one that waits; without an end, a flood of them would shut everybody
/// out, those who could end it included.
pub(super) const INTERNAL_IN_A_ROW: usize = 16;

impl Lanes {
    fn pop(&mut self) -> Option<Box<dyn Job>> {
        if self.in_a_row >= INTERNAL_IN_A_ROW || self.internal.is_empty() {
            self.in_a_row = 0;
            return self.external.pop_front().or_else(|| self.internal.pop_front());
        }
        self.in_a_row += 1;
        self.internal.pop_front()
    }
}

impl Queue {
    pub(super) fn new(external_limit: usize) -> Self {
        Queue { lanes: Mutex::default(), wake: Condvar::new(), external_limit }
    }

    pub(super) fn push(&self, lane: Lane, job: Box<dyn Job>) -> Result<(), Error> {
        let mut lanes = self.lock();
        if lanes.closed {
            return Err(Error::Closed);
        }
        match lane {
            Lane::Internal => lanes.internal.push_back(job),
            Lane::External if lanes.external.len() >= self.external_limit => return Err(Error::Busy),
            Lane::External => lanes.external.push_back(job),
        }
        self.wake.notify_one();
        Ok(())
    }

    pub(super) fn queued(&self) -> Queued {
        let lanes = self.lock();
        Queued { internal: lanes.internal.len(), external: lanes.external.len() }
    }

    /// The next job, if one waits.
    pub(super) fn next(&self) -> Option<Box<dyn Job>> {
        self.lock().pop()
    }

    /// Waits for the next job. `None` when the queue is closed and empty.
    pub(super) fn wait(&self) -> Option<Box<dyn Job>> {
        let mut lanes = self.lock();
        loop {
            if let Some(job) = lanes.pop() {
                return Some(job);
            }
            if lanes.closed {
                return None;
            }
            lanes = self.wake.wait(lanes).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_one();
    }

    /// Closes and drops what waits; its callers see that their answer will not come.
    pub(super) fn abandon(&self) {
        let left = {
            let mut lanes = self.lock();
            lanes.closed = true;
            (std::mem::take(&mut lanes.internal), std::mem::take(&mut lanes.external))
        };
        drop(left);
    }

    /// No code under the lock can leave the lanes half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_flood_of_internal_jobs_does_not_shut_out_the_external_ones() {
        let queue = Queue::new(10);
        let seen = std::sync::Arc::default();
        for _ in 0..3 * INTERNAL_IN_A_ROW {
            queue.push(Lane::Internal, job("internal", &seen)).unwrap();
        }
        queue.push(Lane::External, job("external", &seen)).unwrap();
        let conn = Connection::open_in_memory().unwrap();
        while let Some(mut job) = queue.next() {
            job.run(&conn);
        }
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 3 * INTERNAL_IN_A_ROW + 1);
        assert_eq!(seen.iter().position(|name| *name == "external"), Some(INTERNAL_IN_A_ROW));
    }
}
