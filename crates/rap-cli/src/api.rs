//! What the API gives, as far as the commands look at it. What is new in it is passed over.

use rap_protocol::Timestamp;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::age;

/// A time as the API writes it.
pub fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = String::deserialize(deserializer)?;
    age::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text} is no time")))
}

pub(crate) fn maybe_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Timestamp>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.as_deref().and_then(age::parse))
}

/// What a thread is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It takes nothing any more.
    Closed,
    /// The model could not be asked.
    Failed,
    /// The model is being asked.
    Running,
    /// Somebody has to answer.
    NeedsYou,
    /// It waits for calls.
    Waiting,
    /// It waits for somebody to say something.
    Idle,
}

impl Status {
    /// As people read it.
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

/// A page of threads.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Page {
    /// The threads.
    pub threads: Vec<Thread>,
    /// Where the next page begins.
    pub next_cursor: Option<String>,
}

/// A thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Thread {
    /// Its id.
    pub id: String,
    /// The thread that it came from.
    pub parent: Option<String>,
    /// Whose it is.
    pub agent: String,
    /// What it is called.
    pub title: Option<String>,
    /// What it is at.
    pub status: Status,
    /// Why it has failed or is paused.
    #[serde(default)]
    pub why: Option<String>,
    /// When a failed one asks again by itself.
    #[serde(default, deserialize_with = "maybe_time")]
    pub retry_at: Option<Timestamp>,
    /// Its open calls.
    pub waiting_on: Vec<Waiting>,
    /// What it is subscribed to.
    pub subscriptions: Vec<Subscription>,
    /// How many children are at work.
    pub children: u64,
    /// How many inputs wait.
    pub held: u64,
    /// How often the model was asked.
    pub turn: u64,
    /// When it was made.
    #[serde(deserialize_with = "time")]
    pub created_at: Timestamp,
    /// When it was last changed.
    #[serde(deserialize_with = "time")]
    pub updated_at: Timestamp,
}

/// An open call of a thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Waiting {
    /// The call.
    pub call_id: String,
    /// What was called.
    pub tool: String,
    /// The call, as its tool wants people to see it.
    #[serde(default)]
    pub display: Option<String>,
    /// When.
    #[serde(deserialize_with = "time")]
    pub since: Timestamp,
    /// When it is given up.
    #[serde(default, deserialize_with = "maybe_time")]
    pub until: Option<Timestamp>,
}

/// A subscription of a thread.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Subscription {
    /// The call that made it.
    pub call_id: String,
    /// What was called.
    pub tool: String,
    /// When.
    #[serde(deserialize_with = "time")]
    pub since: Timestamp,
}

/// Something that happens by itself.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Timer {
    /// The thread.
    pub thread_id: String,
    /// The call that it is of.
    pub call_id: Option<String>,
    /// What was called.
    pub tool: Option<String>,
    /// `sleep`, `schedule`, `timeout` or `retry`.
    pub kind: String,
    /// When.
    #[serde(deserialize_with = "time")]
    pub at: Timestamp,
}

/// A question that waits for a person.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Question {
    /// The thread.
    pub thread_id: String,
    /// The call that asks.
    pub call_id: String,
    /// The tool that asks.
    pub tool: String,
    /// When.
    #[serde(deserialize_with = "time")]
    pub asked_at: Timestamp,
    /// What is asked.
    #[serde(flatten)]
    pub asked: Asked,
}

/// What is asked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind")]
pub enum Asked {
    /// To choose.
    #[serde(rename = "choice")]
    Choice {
        /// What the tool says.
        prompt: String,
        /// Between what.
        choices: Vec<String>,
        /// What is taken if nobody chooses.
        default: usize,
    },
    /// To sign in.
    #[serde(rename = "oauth")]
    SignIn {
        /// Where.
        auth_url: String,
    },
}

/// An entry of a history.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Entry {
    /// Its place.
    pub seq: u64,
    /// When it came.
    #[serde(deserialize_with = "time")]
    pub at: Timestamp,
    /// What it is.
    #[serde(flatten)]
    pub item: Item,
}

/// What an entry can be.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Item {
    /// Something said to the model.
    User {
        /// What.
        text: String,
        /// By whom, if not by the user.
        #[serde(default)]
        from: Option<String>,
    },
    /// The model's answer.
    Assistant {
        /// What it said.
        text: String,
        /// What it calls.
        #[serde(default)]
        calls: Vec<Call>,
    },
    /// The result of a call.
    Result {
        /// The call.
        call_id: String,
        /// A text, or items.
        content: Value,
        /// What people see instead: the first of these that can be shown.
        #[serde(default)]
        display: Vec<Value>,
        /// Whether the runtime made it.
        #[serde(default)]
        synthetic: bool,
    },
    /// Something for people.
    Notice {
        /// What.
        text: String,
    },
    /// Something that this version does not know.
    #[serde(other)]
    Other,
}

/// A call in an answer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Call {
    /// Its id.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What it is called with.
    pub arguments: Value,
    /// Both, as its tool wants people to see them.
    #[serde(default)]
    pub display: Option<String>,
    /// Whether the runtime made it, to tell the model of an event or a late result.
    #[serde(default)]
    pub synthetic: bool,
}

/// A piece of an answer in progress.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Delta {
    /// Which question it answers.
    pub turn: u64,
    /// Which attempt at it; what an earlier one said is void.
    pub attempt: u64,
    /// The piece.
    pub text: String,
}

/// What a thread is at now.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StatusNews {
    /// What it is at.
    pub status: Status,
    /// How often the model was asked.
    pub turn: u64,
    /// How many inputs wait.
    #[serde(default)]
    pub held: u64,
    /// Why it has failed or is paused.
    #[serde(default)]
    pub why: Option<String>,
}

/// A call that was made or has settled.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct CallNews {
    /// The call.
    #[serde(flatten)]
    pub call: Waiting,
    /// Which of both.
    pub state: CallState,
}

/// Whether a call is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// It is.
    Open,
    /// It was.
    Settled,
}

/// What a tool wants people to see of a result: the first of its segments that a terminal can show.
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

/// What a result says, as one text.
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
