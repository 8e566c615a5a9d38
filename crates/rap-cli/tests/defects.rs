//! Regression tests for defects of the first release. Each test fails there.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

#[path = "defects/call_ids.rs"]
mod call_ids;
#[path = "defects/callbacks.rs"]
mod callbacks;
#[path = "defects/closing.rs"]
mod closing;
#[path = "defects/discovery.rs"]
mod discovery;
#[path = "defects/event_children.rs"]
mod event_children;
#[path = "defects/schedules.rs"]
mod schedules;
#[path = "defects/sleeps.rs"]
mod sleeps;
#[path = "defects/subscriptions.rs"]
mod subscriptions;
mod support;
