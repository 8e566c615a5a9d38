//! Threads: conversations with agents.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Time;
use crate::word::words;

words! {
    /// Status of a thread: the first that applies.
    Status {
        /// Accepts no input any more.
        Closed = "closed",
        /// The model request failed.
        Failed = "failed",
        /// A model request is in progress.
        Running = "running",
        /// Waits for an answer, a sign-in, an approval or `resume`.
        NeedsYou = "needs_you",
        /// Waits for open calls.
        Waiting = "waiting",
        /// Waits for input.
        Idle = "idle",
    }
}

/// A thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Thread {
    /// Id of the thread.
    pub id: String,
    /// Parent thread. Null for the root of a session.
    pub parent: Option<String>,
    /// Root thread of the session.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub root: String,
    /// Thread whose history a fork begins with.
    pub forked_from: Option<String>,
    /// Name of the agent.
    pub agent: String,
    /// Title that the client gave.
    pub title: Option<String>,
    /// End user on whose behalf tools are called.
    pub user_id: Option<String>,
    /// Current status.
    pub status: Status,
    /// Reason why the thread has failed or is paused.
    pub why: Option<String>,
    /// Time at which a failed or paused thread continues automatically.
    pub retry_at: Option<Time>,
    /// Open calls.
    pub waiting_on: Vec<OpenCall>,
    /// Active subscriptions.
    pub subscriptions: Vec<Subscription>,
    /// Number of active child threads.
    pub children: usize,
    /// Number of inputs that wait because the thread is busy.
    pub held: u32,
    /// Number of the current turn.
    pub turn: u64,
    /// Tokens that the thread has used.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub usage: Usage,
    /// Time at which the thread was created.
    pub created_at: Time,
    /// Time of the last change.
    pub updated_at: Time,
}

/// An open call of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct OpenCall {
    /// Id of the call.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Time at which the call was made.
    pub since: Time,
    /// Time at which the call times out, or a sleep ends. Null if it never does.
    pub until: Option<Time>,
    /// Problem of the last callback, if it was refused and no valid one came since.
    pub problem: Option<String>,
    /// Display text for users, if the tool provides one.
    pub display: Option<String>,
}

/// An active subscription of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Subscription {
    /// Call that created the subscription.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Time at which the call was made.
    pub since: Time,
}

/// Number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Usage {
    /// Input tokens, including cached ones.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens that were read from the provider's cache.
    pub cached: u64,
}
