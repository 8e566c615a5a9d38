//! Tools and the views that they show.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Time;
use crate::string_enum::string_enum;

/// The tool servers and their tools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Tools {
    /// Configured tool servers.
    pub servers: Vec<ToolServer>,
    /// Cursor of the next page. Null if there is none.
    #[serde(default)]
    pub next_cursor: Option<String>,
}

/// A tool server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ToolServer {
    /// Base URL of the server.
    pub url: String,
    /// Name of its toolset. Null if the toolset could not be read.
    pub name: Option<String>,
    /// Version of its toolset.
    pub version: Option<String>,
    /// Tools that are offered to models, as the server describes them.
    pub tools: Vec<Tool>,
    /// Reasons why the toolset or some of its tools are not offered.
    pub errors: Vec<String>,
    /// Health, as the last requests showed it to the node that answers, since its start. Null in answers of older runtimes.
    #[serde(default)]
    pub health: Option<ServerHealth>,
}

/// Health of a tool server. No request is sent to find it out: it tells of discovery and invocations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ServerHealth {
    /// State after the last request.
    pub state: HealthState,
    /// Time at which the server last accepted a request.
    pub last_success_at: Option<Time>,
    /// Time at which a request last failed or was refused.
    pub last_failure_at: Option<Time>,
    /// Reason of that failure.
    pub last_failure: Option<String>,
    /// Time at which the invocation that failed is sent again.
    pub next_attempt_at: Option<Time>,
}

string_enum! {
    /// State of a tool server.
    HealthState {
        /// The last request was accepted.
        Ok = "ok",
        /// The last request failed or was refused.
        Failing = "failing",
        /// The process of the server is starting.
        Starting = "starting",
        /// The process of the server has ended or could not be started. It is started again after a pause.
        Stopped = "stopped",
        /// There was no request yet.
        NotAsked = "not_asked",
    }
}

/// A tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Tool {
    /// Name of the tool.
    pub name: String,
    /// Description for the model.
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// Hints about the tool's behaviour, such as `readOnly` and `destructive`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub annotations: Map<String, Value>,
    /// Rhai expression that formats a call for users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_script: Option<String>,
}

/// The latest views of a thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Views {
    /// One view for each server and type.
    pub views: Vec<View>,
    /// Cursor of the next page. Null if there is none.
    #[serde(default)]
    pub next_cursor: Option<String>,
}

/// The latest content of a view.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct View {
    /// Type of the view, such as `progress`.
    pub view_type: String,
    /// Base URL of the tool server that sent the view.
    pub server: String,
    /// Content, as the tool sent it.
    pub content: Value,
    /// Time at which it was sent.
    pub at: Time,
}
