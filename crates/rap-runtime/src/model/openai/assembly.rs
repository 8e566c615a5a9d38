//! Assembly of an answer from streamed chunks.
//!
//! Servers differ in how they send calls: in pieces with an index, in one piece, without an index, with the same index
//! for all, without ids. A piece that could belong to two calls starts a new one only if it names a tool.

use rap_agent::Usage;
use rap_agent::prompt::Names;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::remote::{CALLS, CUT, FILTERED, error_message, malformed_answer, too_many_calls};
use crate::model::{Error, ModelAnswer, ModelCall, OnDelta, arguments};

/// The part of an answer that has been received.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    text: String,
    calls: Vec<Call>,
    usage: Usage,
    finish: Option<Finish>,
    done: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Whole,
    Cut,
    Filtered,
}

#[derive(Debug, Default)]
struct Call {
    index: Option<u64>,
    id: String,
    name: String,
    arguments: String,
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Tokens>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Piece>,
    message: Option<Piece>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Piece {
    content: Option<Value>,
    refusal: Option<String>,
    tool_calls: Option<Vec<CallPiece>>,
}

#[derive(Deserialize)]
struct CallPiece {
    index: Option<u64>,
    id: Option<String>,
    function: Option<FunctionPiece>,
}

#[derive(Deserialize)]
struct FunctionPiece {
    name: Option<String>,
    arguments: Option<Value>,
}

#[derive(Deserialize)]
struct Tokens {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<TokenDetails>,
}

#[derive(Deserialize)]
struct TokenDetails {
    cached_tokens: Option<u64>,
}

impl Assembly {
    /// Returns true if the stream has ended.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Returns true if the server has ended the answer.
    pub(super) fn is_complete(&self) -> bool {
        self.done || self.finish.is_some()
    }

    /// Adds the data of one event.
    pub(super) fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.done || data.trim().is_empty() {
            return Ok(());
        }
        if data.trim() == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let mut chunk = parse(data.as_bytes())?;
        let choice = self.take_metadata(&mut chunk)?;
        if let Some(piece) = choice.and_then(|choice| choice.delta) {
            self.piece(piece, on_delta)?;
        }
        Ok(())
    }

    /// Adds an answer that came as one document. It is complete if it can be parsed.
    pub(super) fn push_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let mut chunk = parse(document)?;
        let choice = self.take_metadata(&mut chunk)?;
        let Some(piece) = choice.and_then(|choice| choice.message.or(choice.delta)) else {
            return Err(Error::retry("the model's answer contains no message"));
        };
        self.piece(piece, on_delta)?;
        self.done = true;
        Ok(())
    }

    /// Takes the error, usage and finish reason of a chunk. Returns its first choice.
    fn take_metadata(&mut self, chunk: &mut Chunk) -> Result<Option<Choice>, Error> {
        if let Some(error) = chunk.error.take() {
            return Err(Error::retry(format!("the model's server: {}", error_message(&error))));
        }
        if let Some(tokens) = chunk.usage.take() {
            self.usage = tokens.usage();
        }
        let choice = chunk.choices.take().and_then(|choices| choices.into_iter().next());
        match choice.as_ref().and_then(|choice| choice.finish_reason.as_deref()) {
            None | Some("") => {}
            Some("error") => {
                return Err(Error::retry("the model's server failed in the middle of the answer"));
            }
            Some("length") => self.finish = Some(Finish::Cut),
            Some("content_filter") => self.finish = Some(Finish::Filtered),
            Some(_) => self.finish = Some(Finish::Whole),
        }
        Ok(choice)
    }

    fn piece(&mut self, piece: Piece, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        for text in piece.content.as_ref().into_iter().flat_map(texts).chain(piece.refusal.as_deref()) {
            self.push_text(text, on_delta);
        }
        for call in piece.tool_calls.into_iter().flatten() {
            self.call(call)?;
        }
        Ok(())
    }

    fn push_text(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_delta(text);
        }
    }

    fn call(&mut self, piece: CallPiece) -> Result<(), Error> {
        let id = piece.id.unwrap_or_default();
        let function = piece.function.unwrap_or(FunctionPiece { name: None, arguments: None });
        let name = function.name.unwrap_or_default();
        let index = match self.find(piece.index, &id, &name) {
            Some(index) => index,
            None if self.calls.len() == CALLS => return Err(too_many_calls()),
            None => {
                self.calls.push(Call { index: piece.index, ..Call::default() });
                self.calls.len() - 1
            }
        };
        let call = &mut self.calls[index];
        if call.id.is_empty() {
            call.id = id;
        }
        if call.name != name {
            call.name.push_str(&name);
        }
        match function.arguments {
            Some(Value::String(text)) => call.arguments.push_str(&text),
            Some(Value::Null) | None => {}
            Some(whole) => call.arguments.push_str(&whole.to_string()),
        }
        Ok(())
    }

    /// Returns the index of the call that a piece continues, or `None` if it starts a new one.
    fn find(&self, index: Option<u64>, id: &str, name: &str) -> Option<usize> {
        let index = match index {
            Some(_) => self.calls.iter().rposition(|call| call.index == index)?,
            None if id.is_empty() => self.calls.len().checked_sub(1)?,
            None => return self.calls.iter().rposition(|call| call.id == id),
        };
        let call = &self.calls[index];
        let other_id = !id.is_empty() && !call.id.is_empty() && id != call.id;
        let unnamed = id.is_empty() || call.id.is_empty();
        let again = unnamed && !name.is_empty() && call.is_complete();
        if other_id || again { None } else { Some(index) }
    }

    /// Returns the complete answer, with the original names of the tools.
    pub(super) fn into_answer(mut self, turn: u64, names: &Names, on_delta: &mut OnDelta<'_>) -> ModelAnswer {
        let note = match self.finish {
            Some(Finish::Cut) => Some(CUT),
            Some(Finish::Filtered) => Some(FILTERED),
            Some(Finish::Whole) | None => None,
        };
        if let Some(note) = note {
            let space = if self.text.is_empty() { "" } else { "\n" };
            self.push_text(&format!("{space}{note}"), on_delta);
        }
        let calls = std::mem::take(&mut self.calls);
        let calls = calls.into_iter().enumerate().map(|(index, call)| ModelCall {
            arguments: call.arguments(note.is_some()),
            id: if call.id.is_empty() { format!("call_{turn}_{}", index + 1) } else { call.id },
            name: names.real(&call.name).to_owned(),
        });
        ModelAnswer { calls: calls.collect(), text: self.text, thoughts: None, usage: self.usage }
    }
}

impl Call {
    fn is_complete(&self) -> bool {
        self.arguments.ends_with('}')
            && !self.name.is_empty()
            && serde_json::from_str::<Map<String, Value>>(&self.arguments).is_ok()
    }

    /// Parses the arguments. No text means no arguments, unless the answer was cut before they were sent.
    fn arguments(&self, cut: bool) -> Result<Map<String, Value>, String> {
        if self.arguments.trim().is_empty() && !cut {
            return Ok(Map::new());
        }
        arguments(&self.arguments)
    }
}

impl Tokens {
    fn usage(&self) -> Usage {
        let cached = self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens);
        Usage {
            input: self.prompt_tokens.unwrap_or(0),
            output: self.completion_tokens.unwrap_or(0),
            cached: cached.unwrap_or(0),
        }
    }
}

fn parse(data: &[u8]) -> Result<Chunk, Error> {
    serde_json::from_slice(data).map_err(|_| malformed_answer())
}

/// Returns the text of a content, or the texts of its parts.
fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => Vec::new(),
    }
}
