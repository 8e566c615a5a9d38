//! IO code that tool servers and the runtime share: a group-commit writer for SQLite, a lock for data directories, warnings
//! about exposed files, encryption of stored secrets, an HTTP client with a URL policy, a parser for server-sent events, metrics,
//! serving with graceful shutdown, reading request bodies, and validation of arguments on threads of its own.
//!
//! With the feature `client` alone, there are only the HTTP client and the parser for server-sent events.
//!
//! This crate does not know the messages of the protocol, and must contain none of its rules.

#[cfg(feature = "server")]
pub mod body;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "server")]
pub mod exposure;
#[cfg(feature = "server")]
pub mod lock;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
pub mod secret_box;
#[cfg(feature = "server")]
pub mod serve;
#[cfg(feature = "server")]
pub mod sqlite;
#[cfg(feature = "client")]
pub mod sse;
#[cfg(feature = "server")]
pub mod validation;
#[cfg(feature = "server")]
pub mod writer;
