//! Runs the real binary against a real runtime: output and exit code of each command.

#![allow(clippy::unwrap_used)]

mod bench;
mod chat;
mod chat_on_a_terminal;
mod check;
mod check_runtime;
mod command;
mod demo;
mod documented;
mod errors;
mod fake;
mod following;
mod hidden;
mod invalid_answers;
mod listings;
#[cfg(feature = "mcp")]
mod mcp_serve;
mod models_check;
mod questions;
mod standalone;
mod support;
mod thread_actions;
mod tokens;
mod top;
