//! Runs work whose time grows with a body, such as signing it, without blocking an async worker.

use std::future::pending;
use std::panic::resume_unwind;

/// Size up to which a body is hashed on the async worker, in bytes. That takes less than a millisecond.
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

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_large_body_is_hashed_on_another_thread() {
        let here = thread::current().id();
        assert_eq!(hash(HASHED_INLINE, move || thread::current().id()).await, here);
        assert_ne!(hash(HASHED_INLINE + 1, move || thread::current().id()).await, here);
    }
}
