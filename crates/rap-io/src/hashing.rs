//! Runs work whose time grows with a body, such as signing or parsing it, without blocking other tasks.

use std::future::pending;
use std::panic::resume_unwind;

use tokio::runtime::{Handle, RuntimeFlavor};

/// Size up to which a body is hashed or parsed on the async worker, in bytes. That takes about a millisecond.
const HASHED_INLINE: usize = 128 * 1024;

/// Runs a job that hashes this many bytes. A long one runs on a thread of its own.
pub async fn hash<T: Send + 'static>(bytes: usize, job: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes <= HASHED_INLINE {
        return job();
    }
    match tokio::task::spawn_blocking(job).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The tokio runtime is ending, and this future with it.
            Err(_) => pending().await,
        },
    }
}

/// Size of a job that may take long, if its size is not known.
pub const LONG: usize = usize::MAX;

/// Runs a job that hashes, parses or encodes this many bytes on the calling thread. Before a long one, the other tasks of
/// the thread go to another one, so that they do not wait for it. Other futures of the calling task, such as those of a
/// `select!`, do.
pub fn in_place<T>(bytes: usize, job: impl FnOnce() -> T) -> T {
    // The single thread of the other kind of runtime cannot give its tasks away.
    let has_others = |handle: Handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread;
    let is_worker = || Handle::try_current().is_ok_and(has_others);
    if bytes > HASHED_INLINE && is_worker() { tokio::task::block_in_place(job) } else { job() }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_large_body_is_hashed_on_another_thread() {
        let here = thread::current().id();
        assert_eq!(hash(HASHED_INLINE, move || thread::current().id()).await, here);
        assert_ne!(hash(HASHED_INLINE + 1, move || thread::current().id()).await, here);
        assert_eq!(in_place(HASHED_INLINE + 1, || thread::current().id()), here);
    }

    /// With one worker, the job can end only if another thread runs the task that it waits for.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn other_tasks_continue_during_a_long_job() {
        let long = tokio::spawn(async {
            let (sender, receiver) = std::sync::mpsc::channel();
            tokio::spawn(async move { sender.send(()) });
            in_place(HASHED_INLINE + 1, move || receiver.recv())
        });
        assert_eq!(long.await.unwrap(), Ok(()));
    }
}
