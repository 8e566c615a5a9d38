//! `rap serve` as a process, over real HTTP, with fake tool servers and models in the test process.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod agents;
mod anthropic;
mod api;
mod approval;
mod budgets;
mod busy;
mod callbacks;
mod children;
mod defects;
mod direction;
mod display;
mod files;
mod forks;
mod invocations;
mod kitchen_sink;
mod lost_calls;
mod metrics;
mod models;
mod notifications;
mod openapi;
mod people;
mod secrets;
mod streams;
mod subscriptions;
mod summaries;
mod time;
mod tokens;
