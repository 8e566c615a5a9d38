//! Test support for the workspace. It runs `rap serve` and tool servers as processes, and has fake tool servers and models,
//! an HTTP client that can send invalid requests, a reader of event streams, and functions that wait for an event.
//!
//! It depends on neither `rap-runtime` nor `rap-tool`, so that both can use it in their tests.

#![allow(missing_docs, reason = "it is private to the workspace, and most names say enough")]
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

pub mod anthropic;
pub mod bench;
pub mod browser;
pub mod canned;
pub mod certificates;
pub mod client;
pub mod collector;
pub mod fuzz;
pub mod http;
pub mod ids;
pub mod manual_model;
pub mod marked;
pub mod model;
pub mod node;
pub mod peer;
mod port;
pub mod postgres;
mod process;
pub mod programs;
pub mod proxy;
pub mod python;
mod rap;
mod rng;
pub mod sdk_types;
pub mod stream;
pub mod tools;
mod wait;

pub use self::client::Client;
pub use self::port::Port;
pub use self::process::Process;
pub use self::rap::{Rap, Setup};
pub use self::rng::Rng;
pub use self::tools::Tools;
pub use self::wait::{Condition, PATIENCE, block_poll, block_until, poll, until};
