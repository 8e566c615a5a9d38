//! Language models that decide what an agent does next.
//!
//! A model keeps no state between requests and never accesses the store. An answer is complete or an error: an
//! interrupted stream is never treated as an answer. No error text contains a key or the path of a URL.

pub mod anthropic;
mod body;
mod fields;
mod lenient;
mod memory;
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

pub use memory::AnswerMemory;
pub(crate) use memory::{ModelMemory, size_of};
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
    /// Memory of the answer. Keep a clone for as long as the answer is in memory.
    pub memory: AnswerMemory,
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

/// Memory that is left for the parsed arguments of an answer's calls, besides their texts, in bytes.
struct ArgumentMemory(usize);

impl Default for ArgumentMemory {
    fn default() -> Self {
        ArgumentMemory(body::PARSED_BYTES)
    }
}

impl ArgumentMemory {
    /// Parses the arguments of a call. The error is the text itself. NUL characters are removed.
    fn parse(&mut self, text: &str) -> Result<Map<String, Value>, String> {
        let text = lenient::without_nul(text);
        let Ok(bytes) = check_json(text.as_bytes(), self.0) else { return Err(text) };
        let mut arguments: Map<String, Value> = serde_json::from_str(&text).map_err(|_| text)?;
        self.0 -= bytes;
        rap_agent::remove_nul(&mut arguments);
        Ok(arguments)
    }
}

#[cfg(test)]
mod tests {
    use rap_testkit::fuzz::Fuzz;
    use serde_json::json;

    use super::*;

    /// Each call alone may need that much, but not all of an answer's 256.
    #[test]
    fn the_arguments_of_all_calls_of_an_answer_share_their_memory() {
        let text = format!("{{\"a\": [{}0]}}", "0,".repeat(body::PARSED_BYTES / 32 / 2));
        let mut memory = ArgumentMemory::default();
        assert!(memory.parse(&text).is_ok());
        assert_eq!(memory.parse(&text), Err(text));
        assert!(memory.parse("{\"a\": 1}").is_ok(), "small ones still fit");
        assert!(memory.parse("{\"a\": ").is_err());
    }

    /// Fuzz target: an answer does not depend on how its bytes are split, and nothing in it breaks a rule of the
    /// history. The last byte selects the provider.
    #[test]
    fn fuzz() {
        let events = |events: &[Value]| -> String {
            events
                .iter()
                .map(|event| format!("data: {event}\n\n"))
                .chain(["data: [DONE]\n\n".into()])
                .collect()
        };
        let call = json!({"index": 0, "id": "c", "function": {"name": "work", "arguments": "{\"a\": [1]}"}});
        let delta = json!({"content": "hi", "reasoning_content": "so", "tool_calls": [call]});
        let openai = [
            json!({"choices": [{"delta": delta}], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}),
            json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}),
        ];
        let message = json!({"type": "message", "content": [{"text": "hi"}]});
        let item = json!({"type": "function_call", "call_id": "c", "name": "work", "arguments": "{}"});
        let reasoning = json!({"type": "reasoning", "encrypted_content": "x", "summary": []});
        let responses = [
            json!({"type": "response.output_item.added", "output_index": 0, "item": message}),
            json!({"type": "response.output_text.delta", "output_index": 0, "delta": "hi"}),
            json!({"type": "response.output_item.done", "output_index": 1, "item": item}),
            json!({"type": "response.output_item.done", "output_index": 2, "item": reasoning}),
            json!({"type": "response.completed", "response": {"status": "completed", "output": [message, item]}}),
        ];
        let block = json!({"type": "tool_use", "id": "c", "name": "work", "input": {}});
        let anthropic = [
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 7}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "so"}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}}),
            json!({"type": "content_block_stop", "index": 0}),
            json!({"type": "content_block_start", "index": 1, "content_block": block}),
            json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
            json!({"type": "content_block_stop", "index": 1}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}}),
            json!({"type": "message_stop"}),
        ];
        let whole = json!({"choices": [{"message": delta, "finish_reason": "stop"}]});
        let output = json!({"status": "completed", "output": [message, item, reasoning]});
        let content = json!({"content": [{"type": "text", "text": "hi"}, block], "stop_reason": "tool_use"});
        let seeds = [
            (events(&openai), "o"),
            (events(&responses), "r"),
            (events(&anthropic), "a"),
            (whole.to_string(), "o"),
            (output.to_string(), "r"),
            (content.to_string(), "a"),
        ];
        let seeds = seeds.iter().map(|(body, kind)| [body.as_bytes(), kind.as_bytes()].concat()).collect();
        let words = &[
            "data: ",
            "\n\n",
            "[DONE]",
            "\"index\":0,",
            "\"index\":1,",
            "\"id\":\"d\",",
            "\\u0000",
            "{}",
            "[]",
            "null",
        ];
        Fuzz { name: "answers", seeds, words }.run(|input| {
            let Some((kind, body)) = input.split_last() else { return String::new() };
            let assemble = |cut: usize| {
                let (begin, end) = body.split_at(cut);
                match kind {
                    b'r' => responses::assemble(begin, end),
                    b'a' => anthropic::assemble(begin, end),
                    _ => openai::assemble(begin, end),
                }
            };
            let whole = assemble(body.len());
            for cut in [0, 1, body.len() / 3, body.len() / 2] {
                assert_eq!(assemble(cut.min(body.len())), whole, "cut at {cut}");
            }
            match whole {
                Ok(answer) => {
                    let calls = &answer.calls;
                    assert!(calls.len() <= remote::CALLS && !answer.text.contains('\0'));
                    assert!(calls.iter().all(|call| !call.id.is_empty() && !call.id.contains('\0')));
                    assert!(calls.iter().all(|call| !call.name.contains('\0')));
                    let valid = calls.iter().filter(|call| call.arguments.is_ok()).count();
                    format!(
                        "{} {valid} {} {}",
                        calls.len(),
                        answer.thoughts.is_some(),
                        answer.text.len().min(64)
                    )
                }
                Err(error) => error.to_string().chars().take(60).collect(),
            }
        });
    }
}
