//! The real binary against a real runtime: what each command prints, and how it exits.

#![allow(clippy::unwrap_used)]

mod alone;
mod chat;
mod chat_on_a_terminal;
mod demo;
mod documented;
mod fake;
mod following;
mod listings;
mod mistakes;
mod model;
mod odd_answers;
mod orders;
mod support;
