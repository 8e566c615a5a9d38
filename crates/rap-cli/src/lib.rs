//! Implementation of the `rap` command, without the parsing of its command line.
//!
//! Only `main` reads the process environment; here it arrives as data. Only `commands` writes to the terminal.

pub mod commands;
pub mod config;
mod idle;
pub mod init;
pub mod serve;
mod status_text;
mod suggestion;
mod table;
mod time_format;
pub mod tool_process;
mod transcript;
mod web;
