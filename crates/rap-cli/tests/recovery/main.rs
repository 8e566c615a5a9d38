//! Recovery: after crashes, disk failures and an upgrade from the first release, everything acknowledged is there
//! exactly once and continues.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod alerts;
mod backup;
mod crash_points;
#[allow(clippy::duplicate_mod, reason = "the same tests run on both databases")]
#[path = "crash_points.rs"]
mod crash_points_on_postgres;
mod crashes;
#[allow(clippy::duplicate_mod, reason = "the same tests run on both databases")]
#[allow(dead_code, reason = "other tests use functions of the first one")]
#[path = "crashes.rs"]
mod crashes_on_postgres;
mod damage;
mod disk;
mod failing_calls;
mod failover;
mod first_release;
mod fleet;
mod fleet_changes;
mod fleet_example;
mod fleet_tools;
mod moving;
mod postgres;
mod support;
