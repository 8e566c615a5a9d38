//! Tools and the views that they show.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Time;

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
