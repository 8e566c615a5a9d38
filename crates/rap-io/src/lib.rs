//! Internal to the crates of `rap`, without any promise of stability: IO code that tool servers and the runtime share,
//! with a group-commit writer for SQLite, a lock for data directories, warnings about exposed files, encryption of
//! stored secrets, an HTTP client with a URL policy, a parser for server-sent events, metrics, serving with TLS and
//! graceful shutdown, reading request bodies, credentials and signatures of requests, validation of arguments on
//! threads of its own, and log output that shows hidden characters.
//!
//! With the feature `client` alone, there are only the HTTP client and the parser for server-sent events.
//!
//! This crate does not know the messages of the protocol, and must contain none of its rules.

#[cfg(feature = "server")]
#[doc(hidden)]
pub mod bench;
#[cfg(feature = "server")]
pub mod body;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "server")]
#[doc(hidden)]
pub mod crash;
#[cfg(feature = "server")]
pub mod credentials;
#[cfg(feature = "server")]
pub mod exposure;
#[cfg(feature = "server")]
pub mod hashing;
#[cfg(feature = "server")]
pub mod introspection;
#[cfg(feature = "server")]
pub mod keyring;
#[cfg(feature = "server")]
pub mod lock;
#[cfg(feature = "server")]
pub mod log;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
pub mod moving;
#[cfg(feature = "server")]
pub mod oauth;
#[cfg(feature = "server")]
pub mod proxy;
#[cfg(feature = "server")]
pub mod reloading;
#[cfg(feature = "server")]
pub mod secret_box;
#[cfg(feature = "server")]
pub mod serve;
#[cfg(feature = "server")]
pub mod sigv4;
#[cfg(feature = "server")]
pub mod sqlite;
#[cfg(feature = "client")]
pub mod sse;
#[cfg(feature = "server")]
pub mod tls;
#[cfg(feature = "server")]
pub mod validation;
#[cfg(feature = "server")]
pub mod webhook;
#[cfg(feature = "server")]
pub mod writer;
