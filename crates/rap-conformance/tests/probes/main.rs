//! Tests of the probes: a correct implementation passes all of them, and each fault is found by the expected probes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod faulty_server;
mod runtime;
mod sample_runtime;
mod tool;
