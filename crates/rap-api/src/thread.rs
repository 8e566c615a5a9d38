//! Threads: conversations with agents.

use std::fmt;

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Time;
use crate::string_enum::string_enum;

string_enum! {
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
    /// Title that the client gave, else one that is made from the first message, the instructions or the event that the
    /// thread began with. Null before the first message.
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
    /// Number of children that are not closed.
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
    /// Time at which the call was made or, if it needed approval, approved.
    pub since: Time,
    /// Time at which the call is settled if nothing else happens: its timeout, the end of a sleep, the end of the time for
    /// its approval, or five minutes after a refused callback. Null if there is none.
    pub until: Option<Time>,
    /// True if the call waits until a person allows it. It is not sent before.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub needs_approval: bool,
    /// Problem of the last callback, if it was refused and no valid one came since.
    pub problem: Option<String>,
    /// Display text for users, if the tool provides one.
    pub display: Option<String>,
    /// Usual duration of such a call. Null if the tool does not state it, and in events of a stream.
    pub usually: Option<UsualDuration>,
    /// True if the call has taken far longer than usual: more than twice the longest usual duration.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub overdue: bool,
}

/// Usual duration of a call, as the author of the tool states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct UsualDuration {
    /// Shortest usual duration, in milliseconds.
    pub min_ms: u64,
    /// Longest usual duration, in milliseconds.
    pub max_ms: u64,
}

/// An active subscription of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Subscription {
    /// Call that created the subscription.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Time at which the subscription was confirmed.
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
    /// Cost, as far as the prices of the models are known. Absent if none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
}

/// Tokens and costs of a thread and of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SessionUsage {
    /// The thread alone.
    pub thread: Usage,
    /// The root thread and all its descendants, closed ones included.
    pub session: Usage,
    /// Number of threads in the session.
    pub threads: u64,
}

/// A cost in US dollars, a number in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    nanos: u64,
}

impl Cost {
    /// Returns a cost from billionths of a dollar. `None` if it is zero.
    pub fn from_nanos(nanos: u64) -> Option<Cost> {
        (nanos > 0).then_some(Cost { nanos })
    }

    /// Returns the cost in billionths of a dollar.
    pub fn nanos(self) -> u64 {
        self.nanos
    }
}

/// Writes dollars with at least two decimals, and two significant digits of a smaller cost.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dollars = self.nanos as f64 / 1e9;
        let decimals = if dollars >= 0.1 { 2 } else { (1.0 - dollars.log10().floor()).min(9.0) as usize };
        write!(f, "${dollars:.decimals$}")
    }
}

impl Serialize for Cost {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.nanos as f64 / 1e9)
    }
}

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dollars = f64::deserialize(deserializer)?;
        Ok(Cost { nanos: (dollars * 1e9).round() as u64 })
    }
}

#[cfg(feature = "schema")]
impl JsonSchema for Cost {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Cost".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "number", "minimum": 0, "description": "A cost in US dollars."})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_a_number_of_dollars() {
        let table = [
            (1_500_000_000, "$1.50"),
            (123_456_789, "$0.12"),
            (12_345_678, "$0.012"),
            (1_234, "$0.0000012"),
            (1, "$0.000000001"),
        ];
        for (nanos, expected) in table {
            let cost = Cost::from_nanos(nanos).unwrap();
            assert_eq!(cost.to_string(), expected);
            let json = serde_json::to_string(&cost).unwrap();
            assert_eq!(serde_json::from_str::<Cost>(&json).unwrap(), cost, "{json}");
        }
        assert_eq!(Cost::from_nanos(0), None);
    }
}
