//! The runtime as a library: its models against a fake server, its settings, and behaviour that needs no process.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod anthropic;
mod callbacks;
mod canned;
mod deliveries;
mod functions;
mod fuzz;
mod layers;
mod local;
mod model_memory;
mod openai;
mod responses;
mod sdk_types;
mod settings;
mod too_long;
mod toolsets;
mod window;
