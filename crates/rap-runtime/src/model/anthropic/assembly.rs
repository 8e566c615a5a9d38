//! Assembly of an answer from streamed content blocks.
//!
//! A block is complete when it was closed. Incomplete thinking blocks and arguments of calls are never used.

use rap_agent::prompt::Names;
use rap_agent::{Thought, ThoughtKind, Thoughts, Usage};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::model::remote::{CALLS, CUT, FILTERED, error_message, malformed_answer, too_many_calls};
use crate::model::{Error, ModelAnswer, ModelCall, OnDelta, arguments};

/// Maximum number of blocks of an answer.
const BLOCKS: usize = 4 * CALLS;
const FULL: &str = "[cut: the conversation fills the model's context window]";
const PAUSED: &str = "[cut: the model's provider paused the answer too often]";

/// The part of an answer that has been received.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    text: String,
    blocks: Vec<Block>,
    /// Index of the first block of the current message.
    first: usize,
    usage: Usage,
    /// Usage of the messages before the last pause.
    spent: Usage,
    state: State,
    stop: Stop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Expected,
    Begun,
    Done,
}

/// Reason why the model stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stop {
    #[default]
    Whole,
    Cut,
    Full,
    Refused,
    Paused,
}

#[derive(Debug)]
struct Block {
    index: u64,
    closed: bool,
    /// Length of the answer's text before this block, in bytes.
    at: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Text(String),
    Call {
        id: String,
        name: String,
        input: Value,
        json: String,
    },
    Thinking {
        text: String,
        signature: String,
    },
    Sealed {
        data: String,
    },
    /// A block that is not interpreted. It has to be sent back after a pause.
    Other {
        block: Value,
        json: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event {
    MessageStart {
        message: Begin,
    },
    ContentBlockStart {
        index: u64,
        content_block: Value,
    },
    ContentBlockDelta {
        index: u64,
        delta: Delta,
    },
    ContentBlockStop {
        index: u64,
    },
    MessageDelta {
        delta: End,
        usage: Option<Tokens>,
    },
    MessageStop,
    Error {
        error: Value,
    },
    /// `ping`, and events of later API versions.
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Begin {
    usage: Option<Tokens>,
}

#[derive(Deserialize)]
struct End {
    stop_reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Delta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Tokens {
    input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

impl Assembly {
    /// Returns true if the server has ended the message.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Returns true if the provider paused the turn and it can be resumed. A turn with calls cannot, because their
    /// results come first.
    pub(super) fn is_paused(&self) -> bool {
        self.stop == Stop::Paused && !self.blocks.iter().any(|block| matches!(block.kind, Kind::Call { .. }))
    }

    /// Prepares for the next message after a pause. Returns all blocks so far, unchanged.
    pub(super) fn pause(&mut self) -> Vec<Value> {
        self.state = State::Expected;
        self.stop = Stop::Whole;
        self.first = self.blocks.len();
        self.spent = self.total();
        self.usage = Usage::default();
        let blank = |kind: &Kind| matches!(kind, Kind::Text(text) if text.trim().is_empty());
        let kept = self.blocks.iter().filter(|block| !blank(&block.kind));
        kept.map(|block| block.kind.to_value()).collect()
    }

    /// Adds the data of one event.
    pub(super) fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.is_done() || data.trim().is_empty() {
            return Ok(());
        }
        let event = serde_json::from_str(data).map_err(|_| malformed_answer())?;
        match (self.state, event) {
            (_, Event::Error { error }) => return Err(failure(&error)),
            (_, Event::Other) => {}
            (State::Expected, Event::MessageStart { message }) => {
                self.state = State::Begun;
                self.count(message.usage);
            }
            (State::Begun, Event::ContentBlockStart { index, content_block }) => {
                self.open(index, content_block, on_delta)?;
            }
            (State::Begun, Event::ContentBlockDelta { index, delta }) => {
                self.extend(index, delta, on_delta)?;
            }
            (State::Begun, Event::ContentBlockStop { index }) => self.block(index)?.closed = true,
            (State::Begun, Event::MessageDelta { delta, usage }) => {
                self.count(usage);
                if let Some(reason) = delta.stop_reason {
                    self.stop = Stop::from_reason(&reason);
                }
            }
            (State::Begun, Event::MessageStop) => self.state = State::Done,
            _ => return Err(malformed_answer()),
        }
        Ok(())
    }

    fn open(&mut self, index: u64, block: Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let mut kind = Kind::parse(block)?;
        let calls = || self.blocks.iter().filter(|block| matches!(block.kind, Kind::Call { .. })).count();
        if self.blocks.len() == BLOCKS || (matches!(kind, Kind::Call { .. }) && calls() == CALLS) {
            return Err(too_many_calls());
        }
        let text = if let Kind::Text(text) = &mut kind { std::mem::take(text) } else { String::new() };
        self.blocks.push(Block { index, closed: false, at: self.text.len(), kind });
        if text.is_empty() {
            return Ok(());
        }
        self.extend(index, Delta::Text { text }, on_delta)
    }

    fn block(&mut self, index: u64) -> Result<&mut Block, Error> {
        let mut blocks = self.blocks[self.first..].iter_mut().rev();
        blocks.find(|block| block.index == index && !block.closed).ok_or_else(malformed_answer)
    }

    fn extend(&mut self, index: u64, delta: Delta, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let block = self.block(index)?;
        match (&mut block.kind, delta) {
            (Kind::Text(text), Delta::Text { text: more }) => {
                let begins = text.is_empty() && !more.is_empty();
                text.push_str(&more);
                let apart = begins && !self.text.is_empty() && !self.follows_text();
                if apart {
                    self.push_text("\n\n", on_delta);
                }
                self.push_text(&more, on_delta);
            }
            (Kind::Call { json, .. } | Kind::Other { json, .. }, Delta::InputJson { partial_json }) => {
                json.push_str(&partial_json);
            }
            (Kind::Thinking { text, .. }, Delta::Thinking { thinking }) => text.push_str(&thinking),
            (Kind::Thinking { signature, .. }, Delta::Signature { signature: more }) => {
                signature.push_str(&more);
            }
            (_, Delta::Other) | (Kind::Other { .. }, _) => {}
            _ => return Err(malformed_answer()),
        }
        Ok(())
    }

    /// Returns true if the block before the last one is text, which the last one continues.
    fn follows_text(&self) -> bool {
        matches!(self.blocks.as_slice(), [.., Block { kind: Kind::Text(_), .. }, _])
    }

    fn push_text(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_delta(text);
        }
    }

    /// Updates the usage. Later numbers cover the whole message and replace earlier ones.
    fn count(&mut self, tokens: Option<Tokens>) {
        let Some(tokens) = tokens else { return };
        if let Some(fresh) = tokens.input_tokens {
            let cached = tokens.cache_read_input_tokens.unwrap_or(0);
            let written = tokens.cache_creation_input_tokens.unwrap_or(0);
            self.usage.cached = cached;
            self.usage.input = fresh.saturating_add(written).saturating_add(cached);
        }
        self.usage.output = tokens.output_tokens.unwrap_or(self.usage.output);
    }

    fn total(&self) -> Usage {
        Usage {
            input: self.spent.input.saturating_add(self.usage.input),
            output: self.spent.output.saturating_add(self.usage.output),
            cached: self.spent.cached.saturating_add(self.usage.cached),
        }
    }

    /// Returns the complete answer, with the original names of the tools.
    pub(super) fn into_answer(
        mut self,
        model: &str,
        turn: u64,
        names: &Names,
        on_delta: &mut OnDelta<'_>,
    ) -> ModelAnswer {
        let (usage, stop) = (self.total(), self.stop);
        let note = match stop {
            Stop::Paused if self.is_paused() => Some(PAUSED),
            Stop::Whole | Stop::Paused => None,
            Stop::Cut => Some(CUT),
            Stop::Full => Some(FULL),
            Stop::Refused => Some(FILTERED),
        };
        if let Some(note) = note {
            let space = if self.text.is_empty() { "" } else { "\n" };
            self.push_text(&format!("{space}{note}"), on_delta);
        }
        let (mut calls, mut parts) = (Vec::new(), Vec::new());
        let last = self.blocks.len().saturating_sub(1);
        // The calls of an answer that the provider stopped are not made.
        let blocks = if stop == Stop::Refused { Vec::new() } else { self.blocks };
        for (index, block) in blocks.into_iter().enumerate() {
            let whole = block.closed && (index < last || stop == Stop::Whole || !block.kind.is_empty());
            match block.kind {
                Kind::Call { id, name, input, json } => calls.push(ModelCall {
                    arguments: if whole { call_arguments(input, &json) } else { Err(json) },
                    id: if id.is_empty() { format!("call_{turn}_{}", calls.len() + 1) } else { id },
                    name: names.real(&name).to_owned(),
                }),
                Kind::Thinking { text, signature } if block.closed && !signature.is_empty() => {
                    parts.push(Thought { at: block.at, kind: ThoughtKind::Readable { text, signature } });
                }
                Kind::Sealed { data } if block.closed && !data.is_empty() => {
                    parts.push(Thought { at: block.at, kind: ThoughtKind::Redacted { data } });
                }
                _ => {}
            }
        }
        let thoughts = (!parts.is_empty()).then(|| Thoughts { model: model.to_owned(), parts });
        ModelAnswer { text: self.text, calls, thoughts, usage }
    }
}

/// Returns the arguments of a complete call. Some servers send them when the block starts. No text means no arguments.
fn call_arguments(input: Value, json: &str) -> Result<Map<String, Value>, String> {
    match (json.trim().is_empty(), input) {
        (false, _) => arguments(json),
        (true, Value::Object(input)) => Ok(input),
        (true, Value::Null) => Ok(Map::new()),
        (true, other) => Err(other.to_string()),
    }
}

impl Stop {
    fn from_reason(reason: &str) -> Stop {
        match reason {
            "max_tokens" => Stop::Cut,
            "model_context_window_exceeded" => Stop::Full,
            "refusal" => Stop::Refused,
            "pause_turn" => Stop::Paused,
            // `end_turn`, `tool_use`, `stop_sequence`, and reasons of later API versions.
            _ => Stop::Whole,
        }
    }
}

impl Kind {
    fn parse(block: Value) -> Result<Kind, Error> {
        let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
        Ok(match block["type"].as_str().ok_or_else(malformed_answer)? {
            "text" => Kind::Text(text("text")),
            "tool_use" => {
                let (id, name, input) = (text("id"), text("name"), block["input"].clone());
                Kind::Call { id, name, input, json: String::new() }
            }
            "thinking" => Kind::Thinking { text: text("thinking"), signature: text("signature") },
            "redacted_thinking" => Kind::Sealed { data: text("data") },
            _ => Kind::Other { block, json: String::new() },
        })
    }

    /// Returns true for a call without any arguments so far.
    fn is_empty(&self) -> bool {
        matches!(self, Kind::Call { json, .. } if json.trim().is_empty())
    }

    /// Returns the block as the provider sent it.
    fn to_value(&self) -> Value {
        let with_input = |mut block: Value, json: &str| {
            if let Ok(input) = serde_json::from_str::<Value>(json) {
                block["input"] = input;
            }
            block
        };
        match self {
            Kind::Text(text) => json!({"type": "text", "text": text}),
            Kind::Call { id, name, input, json } => {
                with_input(json!({"type": "tool_use", "id": id, "name": name, "input": input}), json)
            }
            Kind::Thinking { text, signature } => {
                json!({"type": "thinking", "thinking": text, "signature": signature})
            }
            Kind::Sealed { data } => json!({"type": "redacted_thinking", "data": data}),
            Kind::Other { block, json } => with_input(block.clone(), json),
        }
    }
}

/// Converts an error event, which follows a response status of 200.
fn failure(error: &Value) -> Error {
    let why = format!("the model's server: {}", error_message(error));
    match error["type"].as_str() {
        Some(
            "invalid_request_error"
            | "authentication_error"
            | "permission_error"
            | "not_found_error"
            | "request_too_large"
            | "billing_error",
        ) => Error::refused(why),
        _ => Error::retry(why),
    }
}
