//! Assembly of an answer from streamed content blocks.
//!
//! A block is complete when it was closed. Incomplete thinking blocks and arguments of calls are never used.

use rap_agent::prompt::{Names, ServedModel};
use rap_agent::{Thought, ThoughtKind, Thoughts, Usage};
use serde_json::{Map, Value, json};

use crate::model::fields;
use crate::model::lenient::{self, count, extend_arguments, without_nul};
use crate::model::remote::{
    CALLS, CUT, FILTERED, error_in, event_type, malformed_answer, streamed_error, too_many_calls,
};
use crate::model::{ArgumentMemory, Error, ModelAnswer, ModelCall, OnDelta, body};

/// Maximum number of blocks of an answer.
const BLOCKS: usize = 4 * CALLS;
/// Fields of a call that are read.
const OF_CALL: &[&str] = &["type", "id", "name", "input"];
const FULL: &str = "[cut: the conversation fills the model's context window]";
const PAUSED: &str = "[cut: the model's provider paused the answer too often]";

/// The part of an answer that has been received.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    text: String,
    blocks: Vec<Block>,
    /// Index of the first block of the current message.
    first: usize,
    tokens: Tokens,
    /// Usage of the messages before the last pause.
    spent: Usage,
    state: State,
    stop: Stop,
    /// Memory of the parsed values of its blocks, in bytes.
    value_bytes: usize,
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

/// Token counts of the current message. Each covers the whole message so far, so a later one is not smaller; a server
/// that leaves one out does not take it back.
#[derive(Debug, Clone, Copy, Default)]
struct Tokens {
    fresh: u64,
    written: u64,
    cached: u64,
    output: u64,
}

#[derive(Debug)]
struct Block {
    /// `None` if the server sends no usable index. Pieces without an index belong to the last open block.
    index: Option<u64>,
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
        /// Additional fields of the call.
        fields: Map<String, Value>,
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

impl Assembly {
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
        self.tokens = Tokens::default();
        let blank = |kind: &Kind| matches!(kind, Kind::Text(text) if text.trim().is_empty());
        let kept = self.blocks.iter().filter(|block| !blank(&block.kind));
        kept.map(|block| block.kind.to_value()).collect()
    }

    fn event(&mut self, event: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let index = count(&event["index"]);
        match (self.state, event_type(event)?) {
            (State::Expected, "message_start") => {
                self.state = State::Begun;
                self.count(&event["message"]["usage"]);
            }
            (State::Begun, "content_block_start") => {
                self.open(index, &event["content_block"], on_delta)?;
            }
            (State::Begun, "content_block_delta") => self.extend(index, &event["delta"], on_delta)?,
            (State::Begun, "content_block_stop") => self.block(index)?.closed = true,
            (State::Begun, "message_delta") => {
                self.count(&event["usage"]);
                self.stop_because(&event["delta"]["stop_reason"]);
            }
            (State::Begun, "message_stop") => self.state = State::Done,
            (
                _,
                "message_start"
                | "content_block_start"
                | "content_block_delta"
                | "content_block_stop"
                | "message_delta"
                | "message_stop",
            ) => return Err(malformed_answer()),
            // `ping`, and events of later API versions.
            _ => {}
        }
        Ok(())
    }

    fn stop_because(&mut self, reason: &Value) {
        if let Some(reason) = reason.as_str() {
            self.stop = Stop::from_reason(reason);
        }
    }

    fn open(&mut self, index: Option<u64>, block: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let mut kind = Kind::parse(block)?;
        let calls = || self.blocks.iter().filter(|block| matches!(block.kind, Kind::Call { .. })).count();
        if self.blocks.len() == BLOCKS || (matches!(kind, Kind::Call { .. }) && calls() == CALLS) {
            return Err(too_many_calls());
        }
        self.value_bytes += kind.value_bytes();
        let text = if let Kind::Text(text) = &mut kind { std::mem::take(text) } else { String::new() };
        self.blocks.push(Block { index, closed: false, at: self.text.len(), kind });
        self.extend_text(self.blocks.len() - 1, &text, on_delta);
        Ok(())
    }

    /// Returns the open block with an index, or the last open block.
    fn position(&self, index: Option<u64>) -> Result<usize, Error> {
        let found = |block: &Block| !block.closed && (index.is_none() || block.index == index);
        let position = self.blocks[self.first..].iter().rposition(found).ok_or_else(malformed_answer)?;
        Ok(self.first + position)
    }

    fn block(&mut self, index: Option<u64>) -> Result<&mut Block, Error> {
        let position = self.position(index)?;
        Ok(&mut self.blocks[position])
    }

    fn extend(&mut self, index: Option<u64>, delta: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let position = self.position(index)?;
        let piece = |key: &str| delta[key].as_str().unwrap_or_default();
        match (&mut self.blocks[position].kind, delta["type"].as_str().unwrap_or_default()) {
            (Kind::Text(_), "text_delta") => self.extend_text(position, piece("text"), on_delta),
            (Kind::Call { json, .. } | Kind::Other { json, .. }, "input_json_delta") => {
                extend_arguments(json, piece("partial_json"));
            }
            (Kind::Thinking { text, .. }, "thinking_delta") => text.push_str(piece("thinking")),
            (Kind::Thinking { signature, .. }, "signature_delta") => signature.push_str(piece("signature")),
            (Kind::Other { .. }, _) => {}
            (_, "text_delta" | "input_json_delta" | "thinking_delta" | "signature_delta") => {
                return Err(malformed_answer());
            }
            _ => {}
        }
        Ok(())
    }

    /// Adds to the text of a block. Texts with another block between them are separate paragraphs.
    fn extend_text(&mut self, position: usize, more: &str, on_delta: &mut OnDelta<'_>) {
        let Kind::Text(text) = &mut self.blocks[position].kind else { return };
        let begins = text.is_empty() && !more.is_empty();
        text.push_str(more);
        if begins && !self.text.is_empty() && !self.follows_text() {
            self.push_text("\n\n", on_delta);
        }
        self.push_text(more, on_delta);
    }

    /// Returns true if the block before the last one is text, which the last one continues.
    fn follows_text(&self) -> bool {
        matches!(self.blocks.as_slice(), [.., Block { kind: Kind::Text(_), .. }, _])
    }

    fn push_text(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        let text = without_nul(text);
        if !text.is_empty() {
            self.text.push_str(&text);
            on_delta(&text);
        }
    }

    fn count(&mut self, usage: &Value) {
        let Tokens { fresh, written, cached, output } = &mut self.tokens;
        let counts = [
            (fresh, "input_tokens"),
            (written, "cache_creation_input_tokens"),
            (cached, "cache_read_input_tokens"),
            (output, "output_tokens"),
        ];
        for (total, key) in counts {
            *total = (*total).max(count(&usage[key]).unwrap_or(0));
        }
    }

    fn total(&self) -> Usage {
        let Tokens { fresh, written, cached, output } = self.tokens;
        let input = fresh.saturating_add(written).saturating_add(cached);
        Usage {
            input: self.spent.input.saturating_add(input),
            output: self.spent.output.saturating_add(output),
            cached: self.spent.cached.saturating_add(cached),
            written: self.spent.written.saturating_add(written),
            ..Usage::default()
        }
    }

    /// Returns the complete answer, with the original names of the tools.
    pub(super) fn into_answer(
        mut self,
        origin: ServedModel<'_>,
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
        let (mut calls, mut call_fields, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        let mut memory = ArgumentMemory::default();
        let last = self.blocks.len().saturating_sub(1);
        // The calls of an answer that the provider stopped are not made.
        let blocks = if stop == Stop::Refused { Vec::new() } else { self.blocks };
        for (index, block) in blocks.into_iter().enumerate() {
            let whole = block.closed && (index < last || stop == Stop::Whole || !block.kind.is_empty());
            match block.kind {
                Kind::Call { id, name, input, json, fields } => {
                    call_fields.push(fields);
                    calls.push(ModelCall {
                        arguments: match whole {
                            true => call_arguments(input, &json, &mut memory),
                            false => Err(without_nul(&json)),
                        },
                        id: if id.is_empty() { format!("call_{turn}_{}", calls.len() + 1) } else { id },
                        name: names.real(&name).to_owned(),
                    });
                }
                Kind::Thinking { text, signature } if block.closed && !signature.is_empty() => {
                    let kind = ThoughtKind::Readable { text, signature };
                    parts.push(Thought { at: block.at, calls: calls.len(), kind });
                }
                Kind::Sealed { data } if block.closed && !data.is_empty() => {
                    let kind = ThoughtKind::Redacted { data };
                    parts.push(Thought { at: block.at, calls: calls.len(), kind });
                }
                _ => {}
            }
        }
        let thoughts = Thoughts { model: origin.model.to_owned(), parts, ..Thoughts::default() };
        let thoughts = fields::keep(thoughts, origin, Map::new(), call_fields);
        let is_empty = thoughts.parts.is_empty() && thoughts.server.is_none();
        ModelAnswer { text: self.text, calls, thoughts: (!is_empty).then_some(thoughts), usage }
    }
}

impl body::Assembly for Assembly {
    fn is_done(&self) -> bool {
        self.state == State::Done
    }

    fn usage(&self) -> Usage {
        self.total()
    }

    fn is_complete(&self) -> bool {
        self.is_done()
    }

    fn bytes(&self) -> usize {
        let block = |block: &Block| match &block.kind {
            Kind::Text(text) => text.len(),
            Kind::Call { id, name, json, .. } => id.len() + name.len() + json.len(),
            Kind::Thinking { text, signature } => text.len() + signature.len(),
            Kind::Sealed { data } => data.len(),
            Kind::Other { json, .. } => json.len(),
        };
        self.text.len() + self.blocks.iter().map(block).sum::<usize>() + self.value_bytes
    }

    fn arguments(&self) -> impl Iterator<Item = &str> {
        self.blocks.iter().filter_map(|block| match &block.kind {
            Kind::Call { json, .. } => Some(json.as_str()),
            Kind::Text(_) | Kind::Thinking { .. } | Kind::Sealed { .. } | Kind::Other { .. } => None,
        })
    }

    fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.is_done() || data.trim().is_empty() || data.trim() == "[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).map_err(|_| malformed_answer())?;
        self.event(&event, on_delta)
    }

    fn push_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let message: Value = serde_json::from_slice(document).map_err(|_| malformed_answer())?;
        if let Some(error) = error_in(&message) {
            return Err(streamed_error(error));
        }
        let Value::Array(blocks) = &message["content"] else {
            return Err(Error::retry("the model's answer contains no message"));
        };
        for block in blocks {
            self.open(None, block, on_delta)?;
            self.block(None)?.closed = true;
        }
        self.count(&message["usage"]);
        self.stop_because(&message["stop_reason"]);
        self.state = State::Done;
        Ok(())
    }
}

/// Returns the arguments of a complete call. Some servers send them when the block starts. No text means no arguments.
fn call_arguments(
    input: Value,
    json: &str,
    memory: &mut ArgumentMemory,
) -> Result<Map<String, Value>, String> {
    match (json.trim().is_empty(), input) {
        (false, _) => memory.parse(json),
        (true, Value::Object(mut input)) => {
            rap_agent::remove_nul(&mut input);
            Ok(input)
        }
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
    fn parse(block: &Value) -> Result<Kind, Error> {
        let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
        Ok(match block["type"].as_str().ok_or_else(malformed_answer)? {
            "text" => Kind::Text(text("text")),
            "tool_use" => {
                let (id, name) = (lenient::text(&block["id"]), lenient::text(&block["name"]));
                let input = block["input"].clone();
                let fields = fields::of_item(block, OF_CALL);
                Kind::Call { id, name, input, json: String::new(), fields }
            }
            "thinking" => Kind::Thinking { text: text("thinking"), signature: text("signature") },
            "redacted_thinking" => Kind::Sealed { data: text("data") },
            _ => Kind::Other { block: block.clone(), json: String::new() },
        })
    }

    /// Returns the memory of the parsed values that it keeps, in bytes.
    fn value_bytes(&self) -> usize {
        match self {
            Kind::Call { input, fields, .. } => fields::memory_of(input) + fields::memory(fields),
            Kind::Other { block, .. } => fields::memory_of(block),
            Kind::Text(_) | Kind::Thinking { .. } | Kind::Sealed { .. } => 0,
        }
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
            Kind::Call { id, name, input, json, .. } => {
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
