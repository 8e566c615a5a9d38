//! Histories of threads.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::string_enum::string_enum;
use crate::{Time, Usage};

/// Entries of a history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Entries {
    /// The entries, in order.
    pub entries: Vec<Entry>,
    /// The value of `after` for the next page, if there are more entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_after: Option<u64>,
}

/// An entry of a history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Entry {
    /// Sequence number in the thread, starting at 1.
    pub seq: u64,
    /// Time at which the input arrived; held input keeps it.
    pub at: Time,
    /// Content, by kind.
    #[serde(flatten)]
    pub item: Item,
}

/// Content of an entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Item {
    /// A message to the model.
    User {
        /// Text of the message; may be empty if there is further content.
        text: String,
        /// Further content after the text: texts and images, as in results.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        content: Vec<Value>,
        /// Sender, if it is not the user: `runtime` or `parent`.
        #[serde(skip_serializing_if = "Option::is_none")]
        from: Option<Sender>,
    },
    /// An answer of the model, with its calls.
    Assistant {
        /// Text of the answer; may be empty.
        text: String,
        /// Calls, in order.
        #[serde(default)]
        #[cfg_attr(feature = "schema", schemars(!default))]
        calls: Vec<Call>,
        /// Tokens and cost of the turn. Absent for synthetic calls and in the histories of earlier versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// The result of a call.
    Result {
        /// Id of the call.
        call_id: String,
        /// Content for the model.
        content: Content,
        /// Content for users, shown instead of `content`: the first segment that the client supports.
        #[serde(default)]
        #[cfg_attr(feature = "schema", schemars(!default))]
        display: Vec<Value>,
        /// True if the runtime made the result or its call.
        #[serde(default)]
        #[cfg_attr(feature = "schema", schemars(!default))]
        synthetic: bool,
    },
    /// A summary. The model sees it instead of the entries up to `covers`.
    Summary {
        /// Text of the summary.
        text: String,
        /// Sequence number of the last entry that the summary replaces.
        covers: u64,
    },
    /// A notice for users. The model does not see it.
    Notice {
        /// Text of the notice.
        text: String,
    },
    /// A kind of a newer version. It is only read, never written.
    #[serde(other)]
    #[cfg_attr(feature = "schema", schemars(skip))]
    Unknown,
}

string_enum! {
    /// Sender of a message that is not from the user.
    Sender {
        /// The parent thread.
        Parent = "parent",
        /// The runtime.
        Runtime = "runtime",
    }
}

/// A text, or a list of texts and images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(untagged)]
pub enum Content {
    /// A text.
    Text(String),
    /// Items such as `{"type": "text", "text": "…"}` and `{"type": "image", "data": "…", "mediaType": "image/png"}`.
    Items(Vec<Value>),
}

impl Content {
    /// Returns the content as one text. An image is `[image]`.
    ///
    /// ```
    /// use rap_api::Content;
    ///
    /// let json = r#"[{"type": "text", "text": "a chart:"}, {"type": "image", "data": "", "mediaType": "image/png"}]"#;
    /// assert_eq!(serde_json::from_str::<Content>(json)?.to_text(), "a chart: [image]");
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn to_text(&self) -> String {
        match self {
            Content::Text(text) => text.clone(),
            Content::Items(items) => {
                let texts = items.iter().map(|item| item["text"].as_str().unwrap_or("[image]"));
                texts.collect::<Vec<_>>().join(" ")
            }
        }
    }
}

/// Returns the text for users in the `display` of a result: its first segment that is a text or a diff.
pub fn display_text(display: &[Value]) -> Option<String> {
    let segment = |segment: &Value| {
        let content = &segment["content"];
        match segment["type"].as_str()? {
            "text" => content.as_str().map(str::to_owned),
            "diff" => Some(format!("{}\n{}", content["path"].as_str()?, content["patch"].as_str()?)),
            _ => None,
        }
    };
    display.iter().find_map(segment)
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Call {
    /// Id of the call.
    pub id: String,
    /// Id that the model gave the call, if any.
    pub model_id: Option<String>,
    /// Name of the tool.
    pub name: String,
    /// An object, or the model's text if it is not a JSON object.
    pub arguments: Value,
    /// Display text for users.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub display: String,
    /// True if the runtime made the call, to present an event or a late result to the model.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub synthetic: bool,
}
