//! Bodies of requests, and of responses that are not a resource such as a thread. A runtime refuses unknown fields in
//! requests.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Maximum length of a thread id that a client chooses, in characters.
pub const ID_CHARS: usize = 128;
/// Maximum number of further content items of a message: texts and images.
pub const CONTENT_ITEMS: usize = 20;
/// Media types of images that a message may contain.
pub const IMAGE_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];
/// Maximum size of an image in a message, in bytes of base64.
pub const IMAGE_BYTES: usize = 5 * 1024 * 1024;
/// Maximum length of a title, in characters.
pub const TITLE_CHARS: usize = 256;

/// Regular expression of an id on the wire, which is up to 256 bytes of text without control characters. It counts
/// characters, so it is stricter for text beyond ASCII.
#[cfg(feature = "schema")]
pub const ID_PATTERN: &str = r"^([ -~]{1,256}|[^\u0000-\u001f\u007f-\u009f]{1,64})$";

/// Returns the JSON Schema of a content item of a message.
#[cfg(feature = "schema")]
fn content_schema() -> Value {
    let text = serde_json::json!({"type": "object", "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}}});
    let image = serde_json::json!({"type": "object", "required": ["type", "data", "mediaType"],
        "properties": {"type": {"const": "image"}, "mediaType": {"enum": IMAGE_TYPES},
            "data": {"type": "string", "description": "The image in base64.", "minLength": 4, "maxLength": IMAGE_BYTES,
                "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"}}});
    serde_json::json!({"oneOf": [text, image]})
}

/// Request to create a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateThread {
    /// Id of the thread. Generated if absent.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")))]
    pub id: Option<String>,
    /// Name of a configured agent. The first one if absent.
    pub agent: Option<String>,
    /// End user on whose behalf tools are called.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = ID_PATTERN)))]
    pub user_id: Option<String>,
    /// Title for people.
    #[cfg_attr(feature = "schema", schemars(length(max = TITLE_CHARS)))]
    pub title: Option<String>,
    /// First message of the user.
    pub message: Option<String>,
    /// Further content of the first message: texts and images, as in the result of a tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(extend("items" = content_schema(), "maxItems" = CONTENT_ITEMS)))]
    pub content: Vec<Value>,
}

/// Request to send a message to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SendMessage {
    /// Text of the message; may be empty if there is further content.
    pub text: String,
    /// Further content after the text: texts and images, as in the result of a tool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(extend("items" = content_schema(), "maxItems" = CONTENT_ITEMS)))]
    pub content: Vec<Value>,
    /// Handling of the message if the thread is busy.
    #[serde(default)]
    pub on_busy: OnBusy,
}

impl SendMessage {
    /// A message that a busy agent answers at once.
    pub fn new(text: impl Into<String>) -> SendMessage {
        SendMessage { text: text.into(), content: Vec::new(), on_busy: OnBusy::Join }
    }
}

/// Handling of a message to a busy agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
pub enum OnBusy {
    /// Answer it now; open calls continue in the background, and an answer in progress is dropped.
    #[default]
    Join,
    /// Cancel open calls and the answer in progress, then answer it.
    Interrupt,
    /// Keep it until the thread is idle.
    Enqueue,
    /// Refuse it.
    Reject,
}

/// An answer to a question: `selected`, or `dismiss`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(feature = "schema", schemars(extend("oneOf" = [
    {"required": ["selected"], "properties": {"selected": {"type": "integer"}, "dismiss": {"const": false}}},
    {"required": ["dismiss"], "properties": {"selected": {"type": "null"}, "dismiss": {"const": true}}},
])))]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Index of the choice, starting at 0.
    #[serde(default, deserialize_with = "whole_number", skip_serializing_if = "Option::is_none")]
    pub selected: Option<u32>,
    /// Selects the default choice.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dismiss: bool,
}

impl Answer {
    /// Selects a choice by its index, starting at 0.
    pub fn select(index: u32) -> Answer {
        Answer { selected: Some(index), dismiss: false }
    }

    /// Dismisses the question; the default choice is used.
    pub fn dismiss() -> Answer {
        Answer { selected: None, dismiss: true }
    }
}

/// Request to fork a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// Last entry that the fork inherits, or the nearest one before it at which every call has its result. The last
    /// entry of the thread if absent.
    #[serde(default, deserialize_with = "whole_number")]
    #[cfg_attr(feature = "schema", schemars(range(max = u32::MAX)))]
    pub at: Option<u32>,
}

/// Accepts whole numbers that are written with a fraction, such as `1.0`.
fn whole_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let Some(given) = Option::<f64>::deserialize(deserializer)? else { return Ok(None) };
    let whole = given.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&given);
    let wrong = || serde::de::Error::custom(format!("expected a whole number from 0 to {}", u32::MAX));
    if whole { Ok(Some(given as u32)) } else { Err(wrong()) }
}

/// Request to delete sessions that have been closed for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Prune {
    /// Number of seconds since a session was closed. `retention.closed_threads` of the runtime if absent.
    #[serde(default, deserialize_with = "whole_number", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(max = u32::MAX)))]
    pub closed_for: Option<u32>,
    /// Only counts the sessions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// Number of sessions that are being deleted, or would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Pruned {
    /// Number of sessions.
    pub sessions: u64,
}

/// The turn that a message started or will be part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Turn {
    /// Number of the turn.
    pub turn: u64,
}

/// An empty object: the request was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Done {}

/// An error response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ErrorBody {
    /// The error itself.
    pub error: ErrorReason,
}

/// A stable error code, and a sentence that tells the reader what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ErrorReason {
    /// Stable code, such as `thread_closed`.
    pub code: String,
    /// Text for people. It may change.
    pub message: String,
}
