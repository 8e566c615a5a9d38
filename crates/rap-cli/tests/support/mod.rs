//! The real `rap serve` as a process of its own, and the tool servers and models that it talks to, which live in the test.

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

/// How long anything in a test may take before the test has failed.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Looks again and again, where nothing tells that it has happened.
pub async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let seen = async {
        loop {
            if let Some(seen) = look().await {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("never: {what}"))
}
