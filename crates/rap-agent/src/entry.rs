//! Entries: the items of a thread's history.
//!
//! The entries of a thread, in order, are a valid prompt at all times. After an assistant entry with calls come exactly
//! the results of these calls, once each. Only notices, which no model sees, may stand in between.

use rap_protocol::{Body, CallId, Content, Segment, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Usage;

/// Number of an entry in its thread's history, counted from 1.
pub type Seq = u64;

/// An entry of a thread's history. The history is append-only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Time at which the input arrived. Held input keeps its time when it is written into the history.
    pub at: Timestamp,
    /// Content of the entry.
    #[serde(flatten)]
    pub item: Item,
}

/// Content of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Item {
    /// A message to the model.
    User {
        /// Text of the message; may be empty if there is further content.
        text: String,
        /// Further content after the text: texts and images.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        content: Vec<Content>,
        /// Author of the message.
        #[serde(default, skip_serializing_if = "Speaker::is_user")]
        from: Speaker,
    },
    /// An answer of the model, or a synthetic call that the runtime made.
    Assistant {
        /// Text of the answer; may be empty.
        text: String,
        /// Calls of the answer, in order.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        calls: Vec<CallEntry>,
        /// Thinking that came with the answer; `None` if there was none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        thoughts: Option<Thoughts>,
        /// Tokens and cost of the turn; `None` if the runtime made the entry.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The result of a call.
    Result {
        /// Call that the result belongs to.
        call_id: CallId,
        /// Content for the model.
        content: Body,
        /// Content that users see instead; empty if they see `content`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        display: Vec<Segment>,
        /// True if the runtime wrote the result, or made the call that it belongs to.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        synthetic: bool,
    },
    /// A summary of earlier entries. The model sees it instead of the entries that it covers, which stay in the history.
    Summary {
        /// Text that the model wrote, followed by the runtime's list of open calls, subscriptions and children.
        text: String,
        /// Last entry that the summary covers. Every call up to there had a result.
        covers: Seq,
    },
    /// A notice for the user. No model sees it.
    Notice {
        /// Text of the notice.
        text: String,
    },
}

/// Author of an [`Item::User`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// The user: a person or a program.
    #[default]
    User,
    /// The runtime, which gives the model instructions about its thread.
    Runtime,
    /// The model of the parent thread.
    Parent,
}

impl Speaker {
    fn is_user(&self) -> bool {
        *self == Speaker::User
    }
}

/// Parts of an answer that only its provider understands: thinking before and between its texts and calls, and fields
/// that are not part of the provider's documented format. They are stored unchanged, because some providers require
/// them back unchanged while the calls of the answer are open.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Thoughts {
    /// Model that returned them. They are sent back only to this model.
    pub model: String,
    /// Base URL of the server, without secrets. [`ThoughtKind::Item`] and the fields are sent back only to this server.
    /// `None` if there are neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Thinking blocks, in the order of the answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Thought>,
    /// Additional fields of the answer's message.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub fields: Map<String, Value>,
    /// Additional fields of each call, in the order of the calls. Empty if no call has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub call_fields: Vec<Map<String, Value>>,
}

/// One thinking block of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Thought {
    /// Position in the answer's text, in bytes from its start.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at: usize,
    /// Number of calls of the answer before it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub calls: usize,
    /// Content of the block.
    #[serde(flatten)]
    pub kind: ThoughtKind,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// Content of a thinking block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThoughtKind {
    /// Text that can be read.
    #[serde(rename = "open")]
    Readable {
        /// Text of the block; may be empty.
        text: String,
        /// Signature by which the provider verifies that the block is unchanged.
        signature: String,
    },
    /// Encrypted content that only the provider can read.
    #[serde(rename = "sealed")]
    Redacted {
        /// Data as the provider sent it.
        data: String,
    },
    /// An item of a provider whose answers are lists of items.
    Item {
        /// The item as the provider sent it.
        item: Map<String, Value>,
    },
}

/// A call in an assistant entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallEntry {
    /// Id on the wire and in the prompt, made by the runtime. It is unique in the thread and in the history that the
    /// thread inherits.
    pub id: CallId,
    /// Id that the model gave the call; `None` if it was malformed or the runtime made the call.
    #[serde(rename = "call_id", default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<CallId>,
    /// Name of the tool, as the model wrote it.
    pub name: String,
    /// Arguments of the call.
    pub arguments: Arguments,
    /// Text that users see for the call, from the tool's `displayScript`; `None` if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<String>,
}

/// Arguments of a call in the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arguments {
    /// The arguments that the model gave.
    Given(Map<String, Value>),
    /// The model's text, which is not a JSON object.
    Unusable(String),
    /// The arguments of a synthetic call: those of the original call, and `kind`.
    #[serde(rename = "echo")]
    Synthetic {
        /// Id of the original call.
        of: CallId,
        /// Reason for the synthetic call, such as `interrupt:ID (subscription remains active)`.
        kind: String,
        /// Arguments of the original call. `None` if the original call is in the thread's own visible history.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        arguments: Option<Map<String, Value>>,
    },
}

impl Arguments {
    /// Returns whether the runtime made the call.
    pub fn is_synthetic(&self) -> bool {
        matches!(self, Arguments::Synthetic { .. })
    }
}

/// Removes NUL characters from the names and texts of a call's arguments. Neither tools nor model servers nor databases
/// accept them.
pub fn remove_nul(arguments: &mut Map<String, Value>) {
    let mut values: Vec<&mut Value> = Vec::new();
    remove_nul_from_names(arguments);
    values.extend(arguments.values_mut());
    while let Some(value) = values.pop() {
        match value {
            Value::String(text) => text.retain(|c| c != '\0'),
            Value::Array(items) => values.extend(items),
            Value::Object(members) => {
                remove_nul_from_names(members);
                values.extend(members.values_mut());
            }
            _ => {}
        }
    }
}

fn remove_nul_from_names(members: &mut Map<String, Value>) {
    if members.keys().any(|name| name.contains('\0')) {
        let old = std::mem::take(members);
        members.extend(old.into_iter().map(|(name, value)| (name.replace('\0', ""), value)));
    }
}

impl Item {
    /// Returns a message of the user.
    pub fn user(text: impl Into<String>) -> Item {
        Item::message(text, Speaker::User)
    }

    /// Returns a message that is a text.
    pub fn message(text: impl Into<String>, from: Speaker) -> Item {
        Item::User { text: text.into(), content: Vec::new(), from }
    }

    /// Returns an answer of the model without thinking.
    pub fn assistant(text: impl Into<String>, calls: Vec<CallEntry>) -> Item {
        Item::Assistant { text: text.into(), calls, thoughts: None, usage: None }
    }

    /// Returns a notice for the user.
    pub fn notice(text: impl Into<String>) -> Item {
        Item::Notice { text: text.into() }
    }

    /// Size of the stored JSON.
    pub(crate) fn bytes(&self) -> u64 {
        serde_json::to_vec(self).map_or(0, |json| json.len() as u64)
    }

    /// Returns a result that the runtime wrote.
    pub fn runtime_result(call_id: CallId, text: impl Into<String>) -> Item {
        Item::Result { call_id, content: Body::Text(text.into()), display: Vec::new(), synthetic: true }
    }
}
