//! Statistics of all agents.

use std::collections::BTreeMap;

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Cost, Time};

/// Figures of all agents, now and over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Figures {
    /// Number of threads by status.
    pub threads: BTreeMap<String, i64>,
    /// Number of waiting items of work by kind, such as requests to models (`ask`) and calls to send (`invoke`). Empty for a
    /// client that sees one user's threads.
    pub waiting: BTreeMap<String, u32>,
    /// Length of each interval, in seconds.
    pub step_seconds: u64,
    /// Start times of the intervals.
    pub times: Vec<Time>,
    /// Figures of each agent, by name. Empty for a client that sees one user's threads.
    pub agents: Vec<AgentFigures>,
}

/// Figures of an agent over time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct AgentFigures {
    /// Name of the agent.
    pub agent: String,
    /// Figures of the intervals in which it worked.
    pub points: Vec<FiguresPoint>,
}

/// Figures of an agent in one interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct FiguresPoint {
    /// Start of the interval.
    pub at: Time,
    /// Number of times that a thread was woken by a person, an event, a late result or a timer.
    pub wakes: u64,
    /// Number of requests to the model that were answered.
    pub turns: u64,
    /// Number of requests to the model that failed.
    pub failures: u64,
    /// Time of the requests to the model, in milliseconds.
    pub model_ms: u64,
    /// Input tokens, including cached ones.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens that were read from the provider's cache.
    pub cached: u64,
    /// Cost, as far as the prices of the models are known. Null if none is.
    pub cost: Option<Cost>,
}
