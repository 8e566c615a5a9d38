//! The IO that tool servers and the runtime share: a group-commit writer for SQLite, the lock of a data
//! directory, a box for secrets at rest, an HTTP client that obeys a URL policy, a reader of event streams, metrics, and
//! a server's sockets and signals.
//!
//! It knows nothing of the protocol's messages, and must never hold a rule that belongs to them.

pub mod client;
pub mod lock;
pub mod metrics;
pub mod secret_box;
pub mod serve;
pub mod sqlite;
pub mod sse;
pub mod writer;
