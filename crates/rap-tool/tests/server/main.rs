//! Tool servers over real HTTP, with a fake runtime in the test process.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod bounds;
mod calls;
mod cleanup;
mod compiler;
mod crash_points;
mod delivery;
mod direction;
mod hostile;
mod identity;
mod interaction;
mod memory;
mod migration;
mod mounted;
mod notifications;
mod oauth;
mod output;
mod processes;
mod python;
mod restart;
mod serving;
mod subscriptions;
mod support;
mod trust;
mod versions;
