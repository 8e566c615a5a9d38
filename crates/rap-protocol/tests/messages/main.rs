//! The messages of the protocol: golden files, validation rules, properties of all messages, and schemas.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod golden;
mod properties;
mod rules;
mod schemas;
