//! Waiting for a condition.

use std::future::Future;
use std::time::{Duration, Instant};

/// Maximum time that a test waits for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// State of a condition that a test waits for: a `bool`, or an `Option` with the value that the test needs.
pub trait Condition {
    type Value;

    /// Returns the value if the condition holds.
    fn value(self) -> Option<Self::Value>;
}

impl Condition for bool {
    type Value = ();

    fn value(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Condition for Option<T> {
    type Value = T;

    fn value(self) -> Option<T> {
        self
    }
}

/// Polls until the condition holds, and returns its value, or `None` if it did not hold within `limit`.
pub async fn poll<C: Condition, F: Future<Output = C>>(
    limit: Duration,
    mut check: impl FnMut() -> F,
) -> Option<C::Value> {
    let holds = async {
        loop {
            if let Some(value) = check().await.value() {
                return value;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::time::timeout(limit, holds).await.ok()
}

/// Polls until the condition holds, and returns its value. Panics after [`PATIENCE`].
pub async fn until<C: Condition, F: Future<Output = C>>(what: &str, check: impl FnMut() -> F) -> C::Value {
    poll(PATIENCE, check).await.unwrap_or_else(|| panic!("timed out waiting for {what}"))
}

/// Like [`poll`], for code that is not asynchronous.
pub fn block_poll<C: Condition>(limit: Duration, mut check: impl FnMut() -> C) -> Option<C::Value> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = check().value() {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Like [`until`], for tests that are not asynchronous.
pub fn block_until<C: Condition>(what: &str, check: impl FnMut() -> C) -> C::Value {
    block_poll(PATIENCE, check).unwrap_or_else(|| panic!("timed out waiting for {what}"))
}
