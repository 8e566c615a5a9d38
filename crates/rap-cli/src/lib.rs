//! What the command `rap` is made of, apart from the command line itself.
//!
//! Nothing here reads the process environment or writes to the terminal; `main` does both.

pub mod config;
pub mod init;
