//! Language models that decide what an agent does next.
//!
//! A model keeps no state between requests and never accesses the store. An answer is complete or an error: an
//! interrupted stream is never treated as an answer. No error text contains a key or the path of a URL.

pub mod anthropic;
mod body;
mod fields;
mod lenient;
pub mod openai;
mod prices;
mod provider;
mod remote;
mod reply;
pub mod responses;
pub mod scripted;
mod too_long;
mod window;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
pub use rap_agent::Usage;
pub use rap_agent::prompt::CallIds;
use rap_agent::{Entry, Thoughts};
use rap_protocol::{InputSchema, check_json};
use serde_json::{Map, Value};

pub use prices::Prices;
pub use provider::{Build, Kind, Options, Provider};

/// A request to a model.
#[derive(Debug, Clone)]
pub struct ModelRequest {
    /// System prompt.
    pub system: String,
    /// Entries of the history in order, as far as the model [needs](Model::history_scope) them.
    pub entries: Vec<Entry>,
    /// Tools that the model may call.
    pub tools: Arc<[OfferedTool]>,
    /// Number of the turn in its thread, starting at 1.
    pub turn: u64,
    /// True if the model accepts images.
    pub images: bool,
    /// Receives the tokens that the server has counted so far.
    pub spent: Spent,
}

/// Tokens that a server has counted for a request so far. They are known even if the request is dropped before its end.
#[derive(Debug, Clone, Default)]
pub struct Spent(Arc<Mutex<Usage>>);

impl Spent {
    /// Sets the number of tokens so far.
    pub fn set(&self, usage: Usage) {
        *self.usage() = usage;
    }

    /// Returns the number of tokens so far, and starts again at none.
    pub fn take(&self) -> Usage {
        std::mem::take(&mut *self.usage())
    }

    /// Ignores poisoning: no code under the lock can panic.
    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tool that a model may call.
#[derive(Debug, Clone)]
pub struct OfferedTool {
    /// Name by which the model calls it.
    pub name: String,
    /// Description for the model.
    pub description: String,
    /// Schema of its arguments.
    pub schema: InputSchema,
}

/// Answer of a model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ModelAnswer {
    /// Text of the answer. May be empty.
    pub text: String,
    /// Calls of tools, in order.
    pub calls: Vec<ModelCall>,
    /// Thinking blocks that the provider requires in later requests.
    pub thoughts: Option<Thoughts>,
    /// Number of tokens that the answer has used.
    pub usage: Usage,
}

/// A call that a model makes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCall {
    /// Id that the model gave the call, in any format.
    pub id: String,
    /// Name of the tool as the toolset defines it, or any text if there is no such tool.
    pub name: String,
    /// Arguments, or the model's text if it is not a JSON object.
    pub arguments: Result<Map<String, Value>, String>,
}

/// Reason why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Temporary failure: the request can be repeated.
    #[error("{why}")]
    Retry {
        /// Description of the failure.
        why: String,
        /// Time that the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The request does not fit into the context window of the model.
    #[error("{why}")]
    TooLong {
        /// Message of the server.
        why: String,
        /// Size of the window in tokens, if the server names it.
        window: Option<u64>,
    },
    /// Permanent failure: repeating the request will not help.
    #[error("{why}")]
    Refused {
        /// Description of the failure.
        why: String,
        /// True if the server refuses every request, such as because of a wrong key. Otherwise only this request is
        /// known to be refused.
        every_request: bool,
    },
}

impl Error {
    pub(crate) fn retry(why: impl Into<String>) -> Self {
        Error::Retry { why: why.into(), retry_after: None }
    }

    pub(crate) fn refused(why: impl Into<String>) -> Self {
        Error::Refused { why: why.into(), every_request: false }
    }
}

/// Part of the history that a model needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryScope {
    /// The whole history.
    Full,
    /// The entries from the last message of a user ([`rap_agent::Speaker::User`]) on. The whole history if there is
    /// none.
    SinceLastUser,
    /// No entries.
    None,
}

/// Callback that receives the text of an answer while it is streamed.
pub type OnDelta<'a> = dyn FnMut(&str) + Send + 'a;

/// A model that can be asked.
///
/// Each provider implements this trait and defines a [`Provider`]. Errors are shown to users, so they must contain
/// neither a key nor the path of a URL.
#[async_trait]
pub trait Model: Send + Sync + fmt::Debug {
    /// Sends a request and returns the complete answer. The text is also passed to `on_delta` while it is streamed.
    /// After an error, that text is void.
    async fn ask(&self, request: ModelRequest, on_delta: &mut OnDelta<'_>) -> Result<ModelAnswer, Error>;

    /// Returns the size of the context window in tokens, or `None` if it is unknown.
    async fn window(&self) -> Option<u64> {
        None
    }

    /// Returns true if the size of the context window is a default, because nothing is known about it.
    async fn assumes_window(&self) -> bool {
        false
    }

    /// Returns the name of the model, for people.
    fn name(&self) -> &str {
        "the model"
    }

    /// Returns the name of its provider, for people and metrics.
    fn provider(&self) -> &str {
        "custom"
    }

    /// Returns the part of the history that it needs.
    fn history_scope(&self) -> HistoryScope {
        HistoryScope::Full
    }

    /// Returns the name of the model's server. Models with the same destination share the slots for requests. It is
    /// the base URL of the server, without user name and key.
    fn destination(&self) -> &str;
}

/// Parses the arguments of a call. The error is the text itself. NUL characters are removed.
fn arguments(text: &str) -> Result<Map<String, Value>, String> {
    let text = lenient::without_nul(text);
    if check_json(text.as_bytes(), body::PARSED_BYTES).is_err() {
        return Err(text);
    }
    let mut arguments: Map<String, Value> = serde_json::from_str(&text).map_err(|_| text)?;
    rap_agent::remove_nul(&mut arguments);
    Ok(arguments)
}
