//! Questions to users.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Time;

/// A question that waits for a user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Question {
    /// Thread of the call that asks.
    pub thread_id: String,
    /// Call that asks.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Time at which the tool asked.
    pub asked_at: Time,
    /// Arguments of the call. They are in the inbox, but not in events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Map<String, Value>>,
    /// The question itself.
    #[serde(flatten)]
    pub kind: QuestionKind,
}

/// Kind of a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(tag = "kind")]
pub enum QuestionKind {
    /// The user selects one of the choices.
    #[serde(rename = "choice")]
    Choice {
        /// Text of the question.
        prompt: String,
        /// Texts to choose from.
        choices: Vec<String>,
        /// Index of the choice that is used if the question is dismissed.
        default: usize,
    },
    /// The user signs in at a URL.
    #[serde(rename = "oauth")]
    SignIn {
        /// URL to open.
        auth_url: String,
    },
    /// A kind of a newer version. It is only read, never written.
    #[serde(other)]
    #[cfg_attr(feature = "schema", schemars(skip))]
    Unknown,
}
