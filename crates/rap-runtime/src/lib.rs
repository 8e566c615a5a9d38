//! A durable runtime for the Reactive Agent Protocol.

mod store;
