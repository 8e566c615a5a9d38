//! Models: who is asked what an agent does next.
//!
//! A model holds no state between questions and never sees the store. An answer is whole or it is an error: a
//! stream that was cut is never taken for an answer. No error text holds a key or the path of a URL.

pub mod anthropic;
pub mod openai;
mod provider;
mod remote;
mod reply;
pub mod scripted;
mod window;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
pub use rap_agent::Usage;
use rap_agent::{Entry, Thoughts};
use rap_protocol::InputSchema;
use serde_json::{Map, Value};

pub use provider::{Build, Kind, Options, Provider};

/// What a model is asked.
#[derive(Debug, Clone)]
pub struct Question {
    /// What the agent is told about itself.
    pub system: String,
    /// The history, as much of it as the model [wants](Model::wants), in order.
    pub entries: Vec<Entry>,
    /// What it may call.
    pub tools: Arc<[Offered]>,
    /// The turn's number in its thread; the first one is 1.
    pub turn: u64,
    /// Whether the model takes images.
    pub images: bool,
}

/// A tool that a model may call.
#[derive(Debug, Clone)]
pub struct Offered {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: String,
    /// What its arguments have to look like.
    pub schema: InputSchema,
}

/// What a model answered.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// What it said; may be empty.
    pub text: String,
    /// What it calls, in order.
    pub calls: Vec<ModelCall>,
    /// What it thought on the way, where its provider wants to see that again.
    pub thoughts: Option<Thoughts>,
    /// What it cost.
    pub usage: Usage,
}

/// A call that a model makes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCall {
    /// The model's own id for it. Nothing is promised about its form.
    pub id: String,
    /// The tool's real name; any text if there is no such tool.
    pub name: String,
    /// Its arguments, or the text that is not a JSON object.
    pub arguments: Result<Map<String, Value>, String>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Asking again may help.
    #[error("{why}")]
    Retry {
        /// What happened.
        why: String,
        /// How long the server asks us to wait.
        retry_after: Option<Duration>,
    },
    /// The question is longer than what the model can read.
    #[error("{why}")]
    TooLong {
        /// What the server said.
        why: String,
    },
    /// Asking the same again will not help.
    #[error("{why}")]
    Refused {
        /// What happened.
        why: String,
    },
}

impl Error {
    fn retry(why: impl Into<String>) -> Self {
        Error::Retry { why: why.into(), retry_after: None }
    }

    fn refused(why: impl Into<String>) -> Self {
        Error::Refused { why: why.into() }
    }
}

/// How much of the history a model needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// All of it.
    Everything,
    /// From the last entry on that a person said ([`rap_agent::Speaker::User`]); all of it if nobody did.
    SinceLastUser,
    /// None of it.
    Nothing,
}

/// Receiver of an answer's text while it comes.
pub type OnDelta<'a> = dyn FnMut(&str) + Send + 'a;

/// A model that can be asked.
///
/// A provider is one file that implements this and has a [`Provider`] to name it by. Its errors are shown to people, so
/// they must hold neither a key nor the path of a URL.
#[async_trait]
pub trait Model: Send + Sync + fmt::Debug {
    /// Asks, and returns the whole answer. Its text is also given to `on_delta`, piece by piece as it comes; after an
    /// error, those pieces are void.
    async fn ask(&self, question: Question, on_delta: &mut OnDelta<'_>) -> Result<Answer, Error>;

    /// Number of tokens that it can read at once. `None` where nobody knows.
    async fn window(&self) -> Option<u64> {
        None
    }

    /// Part of the history that it needs.
    fn wants(&self) -> Wants {
        Wants::Everything
    }

    /// Name of the server that answers: models with the same destination share the slots for questions. It is the
    /// server's base URL, without a user and without any key.
    fn destination(&self) -> &str;
}

/// The arguments of a call, from the text that a model wrote.
fn arguments(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|_| text.to_owned())
}
