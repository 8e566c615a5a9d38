//! The real binary against a real runtime: what each command prints, and how it exits.

#![allow(clippy::unwrap_used)]

mod chat;
mod demo;
mod listings;
mod mistakes;
mod orders;
mod support;
