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
mod deletion;
mod direction;
mod display;
mod durations;
mod fallbacks;
mod files;
mod forks;
mod images;
mod invocations;
mod kitchen_sink;
mod litellm;
mod lost_calls;
mod mcp;
mod metrics;
mod models;
mod notifications;
mod openapi;
mod operations;
mod people;
mod repo_watcher;
mod secrets;
mod shipped_tools;
mod started_servers;
mod streams;
mod subscriptions;
mod summaries;
mod time;
mod tokens;
mod traces;
mod trust;
mod until_idle;
