//! Entries: what a thread's history consists of.
//!
//! The entries of a thread, in order, are a valid prompt at all times: an assistant entry with calls is
//! followed by exactly their results, once each, and by nothing in between but notices, which no model sees.

use rap_protocol::{Body, CallId, Segment, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The place of an entry in its thread's history; the first one is 1.
pub type Seq = u64;

/// One append-only item of a thread's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When it came into the history, or was held for it.
    pub at: Timestamp,
    /// What it is.
    #[serde(flatten)]
    pub item: Item,
}

/// What an entry can be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Item {
    /// Something said to the model.
    User {
        /// What was said.
        text: String,
        /// Who said it.
        #[serde(default, skip_serializing_if = "Speaker::is_user")]
        from: Speaker,
    },
    /// The model's answer, or a synthetic call.
    Assistant {
        /// What it said; may be empty.
        text: String,
        /// The calls it makes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        calls: Vec<CallEntry>,
        /// What it thought on the way.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        thoughts: Option<Thoughts>,
    },
    /// The result of a call.
    Result {
        /// The call.
        call_id: CallId,
        /// What the model sees.
        content: Body,
        /// What people see instead.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        display: Vec<Segment>,
        /// Whether the runtime made it, or made the call that it answers.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        synthetic: bool,
    },
    /// What was said so far, in short. A model sees it instead of the entries that it covers; those stay where they are.
    Summary {
        /// What the model that made it said, and what the runtime knows to be open.
        text: String,
        /// It covers everything up to here: a point at which every call had a result.
        covers: Seq,
    },
    /// Something for people; no model sees it.
    Notice {
        /// What happened.
        text: String,
    },
}

/// Who speaks in a [`Item::User`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// A person or a program that uses the agent.
    #[default]
    User,
    /// The runtime itself, to tell the model where it is.
    Runtime,
    /// The model of the parent thread.
    Parent,
}

impl Speaker {
    fn is_user(&self) -> bool {
        *self == Speaker::User
    }
}

/// What a model thought before and between what it said. It is kept as it came, since some providers want it back,
/// unchanged, as long as the calls of an answer go on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Thoughts {
    /// Which model thought it. It means nothing to another one.
    pub model: String,
    /// In order.
    pub parts: Vec<Thought>,
}

/// One thought.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Thought {
    /// How much of the answer's text stands before it, in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub at: usize,
    /// What it is.
    #[serde(flatten)]
    pub kind: ThoughtKind,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// What a thought can be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThoughtKind {
    /// It can be read.
    Open {
        /// What was thought; may be empty.
        text: String,
        /// The provider's proof that it is unchanged.
        signature: String,
    },
    /// Only the provider can read it.
    Sealed {
        /// As it came.
        data: String,
    },
}

/// A call in an assistant entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallEntry {
    /// The call's id, on the wire and in the prompt. Unique in the thread and in what it inherits.
    pub id: CallId,
    /// The model's own id, where it could not be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// The tool, as the model wrote it.
    pub name: String,
    /// What it is called with.
    pub arguments: Arguments,
    /// What people see of it, where its tool has said how to show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<String>,
}

/// The arguments of a call in the history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arguments {
    /// As the model gave them.
    Given(Map<String, Value>),
    /// What the model gave is not a JSON object; the text itself.
    Unusable(String),
    /// A synthetic call: the original's arguments and `kind`.
    Echo {
        /// The original call.
        of: CallId,
        /// Such as `interrupt:ID (subscription remains active)`.
        kind: String,
        /// The original's arguments, where the original stands outside of what the thread can see.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        arguments: Option<Map<String, Value>>,
    },
}

impl Arguments {
    /// Whether the runtime made the call.
    pub fn is_synthetic(&self) -> bool {
        matches!(self, Arguments::Echo { .. })
    }
}

impl Item {
    /// Something a person said.
    pub fn said(text: impl Into<String>) -> Item {
        Item::User { text: text.into(), from: Speaker::User }
    }

    /// What a model answered, without any thoughts.
    pub fn answered(text: impl Into<String>, calls: Vec<CallEntry>) -> Item {
        Item::Assistant { text: text.into(), calls, thoughts: None }
    }

    /// Something for people.
    pub fn notice(text: impl Into<String>) -> Item {
        Item::Notice { text: text.into() }
    }

    /// How large it is where it is stored.
    pub(crate) fn bytes(&self) -> u64 {
        serde_json::to_vec(self).map_or(0, |json| json.len() as u64)
    }

    /// A result of which the runtime is the author.
    pub fn made(call_id: CallId, text: impl Into<String>) -> Item {
        Item::Result { call_id, content: Body::Text(text.into()), display: Vec::new(), synthetic: true }
    }
}
