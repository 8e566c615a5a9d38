//! Types of the client API, with the fields that the commands use. Unknown fields are ignored.

use rap_agent::texts;
use rap_protocol::Timestamp;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::time_format;

/// Deserializes an RFC 3339 timestamp.
pub fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = String::deserialize(deserializer)?;
    time_format::parse(&text)
        .ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not an RFC 3339 timestamp in UTC")))
}

pub(crate) fn optional_time<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Timestamp>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.as_deref().and_then(time_format::parse))
}

/// Status of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Accepts no input any more.
    Closed,
    /// The model request failed.
    Failed,
    /// A model request is in progress.
    Running,
    /// Waits for an answer or for `resume`.
    NeedsYou,
    /// Waits for open calls.
    Waiting,
    /// Waits for input.
    Idle,
}

impl Status {
    /// The status as shown to people.
    pub fn word(self) -> &'static str {
        match self {
            Status::Closed => "closed",
            Status::Failed => "failed",
            Status::Running => "running",
            Status::NeedsYou => "needs you",
            Status::Waiting => "waiting",
            Status::Idle => "idle",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Page {
    pub threads: Vec<Thread>,
    /// Cursor of the next page; `None` on the last page.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Thread {
    pub id: String,
    /// Id of the parent thread; `None` for a root thread.
    pub parent: Option<String>,
    /// Name of the agent that answers in it.
    pub agent: String,
    pub title: Option<String>,
    pub status: Status,
    /// Reason why it failed or is paused.
    #[serde(default)]
    pub why: Option<String>,
    /// Time of the next automatic attempt of a failed thread.
    #[serde(default, deserialize_with = "optional_time")]
    pub retry_at: Option<Timestamp>,
    /// Open calls.
    pub waiting_on: Vec<OpenCall>,
    /// Active subscriptions.
    pub subscriptions: Vec<Subscription>,
    /// Number of children at work.
    pub children: u64,
    /// Number of held inputs.
    pub held: u64,
    /// Number of turns so far.
    pub turn: u64,
    #[serde(deserialize_with = "time")]
    pub created_at: Timestamp,
    #[serde(deserialize_with = "time")]
    pub updated_at: Timestamp,
}

/// An open call of a thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct OpenCall {
    pub call_id: String,
    pub tool: String,
    /// Text that the tool wants people to see for this call.
    #[serde(default)]
    pub display: Option<String>,
    /// Time at which the call was made.
    #[serde(deserialize_with = "time")]
    pub since: Timestamp,
    /// Time at which it times out, or at which a sleep ends; `None` without a timeout.
    #[serde(default, deserialize_with = "optional_time")]
    pub until: Option<Timestamp>,
    /// Why the runtime refused the last callback of the call, if it did.
    #[serde(default)]
    pub problem: Option<String>,
}

impl OpenCall {
    /// Returns whether the call is one of the runtime's own tools, which no tool server executes.
    pub fn is_built_in(&self) -> bool {
        texts::BUILT_IN.contains(&self.tool.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Subscription {
    /// Id of the call that made the subscription.
    pub call_id: String,
    pub tool: String,
    #[serde(deserialize_with = "time")]
    pub since: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Timer {
    pub thread_id: String,
    /// Call that the timer belongs to; `None` for the retry of a failed thread.
    pub call_id: Option<String>,
    pub tool: Option<String>,
    /// `sleep`, `schedule`, `timeout` or `retry`.
    pub kind: String,
    /// Due time.
    #[serde(deserialize_with = "time")]
    pub at: Timestamp,
}

/// A question that waits for a person.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Question {
    pub thread_id: String,
    pub call_id: String,
    /// Tool that asks.
    pub tool: String,
    #[serde(deserialize_with = "time")]
    pub asked_at: Timestamp,
    #[serde(flatten)]
    pub kind: QuestionKind,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind")]
pub enum QuestionKind {
    /// Asks the user to choose one of several texts.
    #[serde(rename = "choice")]
    Choice {
        prompt: String,
        choices: Vec<String>,
        /// Index of the choice that is used when the question is dismissed.
        default: usize,
    },
    /// Asks the user to sign in at a URL.
    #[serde(rename = "oauth")]
    SignIn { auth_url: String },
}

/// An entry of a history.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Entry {
    /// Sequence number in the history, from 1.
    pub seq: u64,
    #[serde(deserialize_with = "time")]
    pub at: Timestamp,
    #[serde(flatten)]
    pub item: Item,
}

/// Content of an entry.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Item {
    /// A message to the model.
    User {
        text: String,
        /// `parent` or `runtime`; `None` if the user sent it.
        #[serde(default)]
        from: Option<String>,
    },
    /// An answer of the model.
    Assistant {
        text: String,
        #[serde(default)]
        calls: Vec<Call>,
    },
    /// The result of a call.
    Result {
        call_id: String,
        /// A string, or an array of content items.
        content: Value,
        /// Alternatives for display: the first that the terminal can show replaces the content.
        #[serde(default)]
        display: Vec<Value>,
        /// True if the runtime made the result.
        #[serde(default)]
        synthetic: bool,
    },
    /// A summary that the model sees instead of all entries up to `covers`.
    Summary {
        text: String,
        /// Sequence number of the last entry that the summary replaces.
        covers: u64,
    },
    /// A message to people that the model does not see.
    Notice { text: String },
    /// A kind of entry that this version does not know.
    #[serde(other)]
    Other,
}

/// A tool call in an answer of the model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Call {
    pub id: String,
    /// Name of the tool.
    pub name: String,
    pub arguments: Value,
    /// Text that the tool wants people to see for this call.
    #[serde(default)]
    pub display: Option<String>,
    /// True if the runtime made the call to report an event or a late result to the model.
    #[serde(default)]
    pub synthetic: bool,
}

/// A piece of an answer in progress.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Delta {
    pub turn: u64,
    /// Attempt within the turn. Text of an earlier attempt is void.
    pub attempt: u64,
    pub text: String,
}

/// Event: the current status of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StatusEvent {
    pub status: Status,
    /// Number of turns so far.
    pub turn: u64,
    /// Number of held inputs.
    #[serde(default)]
    pub held: u64,
    /// Reason why the thread failed or is paused.
    #[serde(default)]
    pub why: Option<String>,
}

/// Event: a call was made or has settled.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CallEvent {
    #[serde(flatten)]
    pub call: OpenCall,
    pub state: CallState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    Open,
    Settled,
}

/// Returns the display text of a result: the first display segment that a terminal can show.
pub fn displayed(display: &[Value]) -> Option<String> {
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

/// Returns the content of a result as one text.
pub fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let piece = |item: &Value| item["text"].as_str().unwrap_or("[image]").to_owned();
            items.iter().map(piece).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}
