//! The engine that runs agents.

pub mod model;
