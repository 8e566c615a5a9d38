//! Prompts: their rules, summaries, thinking, and what is kept of large histories.

#![allow(clippy::unwrap_used)]

mod bounded;
#[path = "../items/mod.rs"]
mod items;
mod rules;
mod strict;
mod summary;
mod thinking;
