//! Prompts: a test for each rule, and random histories that are checked against strict models of the providers.

#![allow(clippy::unwrap_used)]

mod bounded;
#[path = "../items/mod.rs"]
mod items;
mod rules;
mod strict;
mod summary;
mod thinking;
