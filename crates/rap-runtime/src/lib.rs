//! A durable runtime for the Reactive Agent Protocol.

pub mod model;
mod store;
