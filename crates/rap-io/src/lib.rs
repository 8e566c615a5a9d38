//! IO code that tool servers and the runtime share: a group-commit writer for SQLite, a lock for data directories,
//! encryption of stored secrets, an HTTP client with a URL policy, a parser for server-sent events, metrics, and
//! serving with graceful shutdown.
//!
//! This crate does not know the messages of the protocol, and must contain none of its rules.

pub mod client;
pub mod lock;
pub mod metrics;
pub mod secret_box;
pub mod serve;
pub mod sqlite;
pub mod sse;
pub mod writer;
