//! Bounds the jobs of each caller that wait in the writer.
//!
//! The writer runs jobs in order. A caller's further jobs wait here, so a job of another caller waits for a bounded number
//! of jobs of each caller, and not for all of them.

use std::collections::{HashMap, HashSet};

use rap_io::writer::JobClass;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::auth::Caller;

/// Maximum number of jobs of one caller in the writer, of each class. It is enough for the batch that is written and the
/// next one, so that the writer does not wait for a caller that has more.
const JOBS: usize = 2 * super::open::BATCH_JOBS;

pub(super) struct JobTurns {
    callers: HashMap<Caller, CallerJobs>,
    /// Jobs of callers whose token was removed.
    others: CallerJobs,
}

struct CallerJobs {
    internal: Semaphore,
    external: Semaphore,
}

impl CallerJobs {
    fn new() -> Self {
        CallerJobs { internal: Semaphore::new(JOBS), external: Semaphore::new(JOBS) }
    }
}

impl JobTurns {
    pub(super) fn new(callers: &HashSet<Caller>) -> Self {
        let callers = callers.iter().map(|caller| (caller.clone(), CallerJobs::new())).collect();
        JobTurns { callers, others: CallerJobs::new() }
    }

    /// Waits until a job of the caller may be passed to the writer. The permit has to be held until the job has run.
    pub(super) async fn take(&self, caller: &Caller, class: JobClass) -> SemaphorePermit<'_> {
        let jobs = self.callers.get(caller).unwrap_or(&self.others);
        let semaphore = match class {
            JobClass::Internal => &jobs.internal,
            JobClass::External => &jobs.external,
        };
        semaphore.acquire().await.expect("bug: these semaphores are never closed")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_caller_with_many_jobs_does_not_delay_the_jobs_of_others() {
        let [first, second, former] = [1, 2, 3].map(|number| Caller::from_bytes([number; 16]));
        let turns = JobTurns::new(&HashSet::from([first.clone(), second.clone()]));
        for class in [JobClass::Internal, JobClass::External] {
            let mut held = Vec::new();
            for _ in 0..JOBS {
                held.push(turns.take(&first, class).await);
            }
            // Tokio's cooperative scheduling makes a task wait after many operations, even if each is ready.
            tokio::task::yield_now().await;
            let mut next = Box::pin(turns.take(&first, class));
            assert!(next.as_mut().now_or_never().is_none());
            for other in [&second, &former] {
                assert!(turns.take(other, class).now_or_never().is_some());
            }
            held.pop();
            assert!(next.now_or_never().is_some());
        }
    }
}
