//! Recovery: after crashes, disk failures and an upgrade from the first release, everything acknowledged is there exactly once
//! and continues.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod crashes;
mod disk;
mod first_release;
mod postgres;
mod support;
