//! Regression tests for defects of the first release. Each test fails there.

mod call_ids;
mod callbacks;
mod closing;
mod discovery;
mod event_children;
mod schedules;
mod sleeps;
mod subscriptions;
