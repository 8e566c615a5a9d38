//! Runs the real `rap serve` as a process, with tool servers and models inside the test process.

#![allow(dead_code, unused_imports, reason = "each test program uses another part of this")]
#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

pub mod anthropic;
pub mod http;
pub mod ids;
pub mod model;
pub mod peer;
pub mod process;
pub mod rap;
pub mod server;
pub mod stream;
pub mod tools;

use std::future::Future;
use std::time::Duration;

pub use self::rap::{Rap, Setup};
pub use self::tools::Tools;

/// Maximum time that a test waits for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Polls until `poll` returns a value.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut poll: impl FnMut() -> F) -> T {
    let seen = async {
        loop {
            if let Some(seen) = poll().await {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("timed out waiting for {what}"))
}
