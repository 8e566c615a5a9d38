//! Moving a session to another runtime.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Request to move a session to another runtime.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Migrate {
    /// Base URL of the other runtime.
    pub to: String,
    /// Admin token of the other runtime.
    pub token: String,
    /// Ends open calls whose results cannot arrive at the other runtime, because it has another key. Otherwise a session
    /// with such calls is not moved.
    #[serde(default)]
    pub end_calls: bool,
}

/// State of a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Move {
    /// `moving`, `moved`, `failed`: then the session continues here, or `lost`: the other runtime had the session, and does
    /// not confirm that it has it now. Its records stay here, out of use, until it is moved again.
    pub state: String,
    /// The reason of `failed` and `lost`.
    #[serde(default)]
    pub why: Option<String>,
}

/// Properties of a runtime that matter to sessions that move there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Destination {
    /// Identifies the key of the runtime. With the same key, open calls can send their results.
    pub key_id: String,
    /// Identifies all keys of the runtime, if it has older ones as well. With all keys of the other runtime, open calls
    /// can send their results.
    #[serde(default)]
    pub key_ids: Vec<String>,
    /// Base of its callback URLs.
    pub public_url: String,
    /// Its tool servers.
    pub tool_servers: Vec<DestinationServer>,
}

/// A tool server of a runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct DestinationServer {
    /// Name of its toolset. Absent if its toolset could not be fetched.
    pub name: Option<String>,
    /// Its base URL as configured; for a server that the runtime starts, `command:` and a name.
    pub url: String,
    /// Base URL at which it takes the state of sessions at the moment. Absent if it does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

impl DestinationServer {
    /// Returns the base URL under which the server is reached at the moment.
    pub fn at(&self) -> &str {
        self.address.as_deref().unwrap_or(&self.url)
    }
}

/// Request to put a session that has arrived into use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StartSession {
    /// Ends open calls whose results cannot arrive here.
    #[serde(default)]
    pub end_calls: bool,
}

/// A session that has arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ArrivedSession {
    /// Number of open calls and subscriptions that continue.
    pub open_calls: usize,
    /// Number of open calls and subscriptions that were ended.
    pub ended_calls: usize,
}

impl std::fmt::Debug for Migrate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Migrate").field("to", &self.to).finish_non_exhaustive()
    }
}
