//! The rules of a runtime: what a thread is, and how a message changes it.
//!
//! Pure: no clock, no random, no IO. Time arrives with each message.

mod entry;
pub mod prompt;

pub use crate::entry::{Arguments, CallEntry, Entry, Item, Seq, Speaker};
