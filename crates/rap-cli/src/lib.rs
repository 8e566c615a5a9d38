//! What the command `rap` is made of, apart from the command line itself.
//!
//! Nothing here reads the process environment; `main` does. Only `commands` write to the terminal.

pub mod age;
pub mod api;
pub mod client;
pub mod commands;
pub mod config;
pub mod init;
mod nearest;
pub mod rest;
pub mod serve;
pub mod table;
pub mod transcript;
pub mod waits;
