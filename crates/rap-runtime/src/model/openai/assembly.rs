//! An answer put together from its pieces.
//!
//! Servers differ in how they send calls: in pieces with an index, whole, without an index, with the same index
//! for all, without ids. A piece that could belong to two calls begins a new one only if it names a tool.

use rap_agent::Usage;
use rap_agent::prompt::Names;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::model::remote::{CALLS, CUT, FILTERED, error_message, garbled, too_many_calls};
use crate::model::{Answer, Error, ModelCall, OnDelta, arguments};

/// What came so far.
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
    /// Whether nothing is to come.
    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    /// Whether the server said that the answer is at its end.
    pub(super) fn is_complete(&self) -> bool {
        self.done || self.finish.is_some()
    }

    /// Takes the data of one event.
    pub(super) fn take(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.done || data.trim().is_empty() {
            return Ok(());
        }
        if data.trim() == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let mut chunk = parse(data.as_bytes())?;
        let choice = self.take_around(&mut chunk)?;
        if let Some(piece) = choice.and_then(|choice| choice.delta) {
            self.piece(piece, on_delta)?;
        }
        Ok(())
    }

    /// Takes an answer that came as one document, which is whole if it can be read.
    pub(super) fn take_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let mut chunk = parse(document)?;
        let choice = self.take_around(&mut chunk)?;
        let Some(piece) = choice.and_then(|choice| choice.message.or(choice.delta)) else {
            return Err(Error::retry("the model's answer holds no message"));
        };
        self.piece(piece, on_delta)?;
        self.done = true;
        Ok(())
    }

    /// Everything but the piece itself.
    fn take_around(&mut self, chunk: &mut Chunk) -> Result<Option<Choice>, Error> {
        if let Some(error) = chunk.error.take() {
            return Err(Error::retry(format!("the model's server: {}", error_message(&error))));
        }
        if let Some(tokens) = chunk.usage.take() {
            self.usage = tokens.usage();
        }
        let choice = chunk.choices.take().and_then(|choices| choices.into_iter().next());
        match choice.as_ref().and_then(|choice| choice.finish_reason.as_deref()) {
            None | Some("") => {}
            Some("error") => return Err(Error::retry("the model's server gave up in the middle")),
            Some("length") => self.finish = Some(Finish::Cut),
            Some("content_filter") => self.finish = Some(Finish::Filtered),
            Some(_) => self.finish = Some(Finish::Whole),
        }
        Ok(choice)
    }

    fn piece(&mut self, piece: Piece, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        for text in piece.content.as_ref().into_iter().flat_map(texts).chain(piece.refusal.as_deref()) {
            self.say(text, on_delta);
        }
        for call in piece.tool_calls.into_iter().flatten() {
            self.call(call)?;
        }
        Ok(())
    }

    fn say(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        if !text.is_empty() {
            self.text.push_str(text);
            on_delta(text);
        }
    }

    fn call(&mut self, piece: CallPiece) -> Result<(), Error> {
        let id = piece.id.unwrap_or_default();
        let function = piece.function.unwrap_or(FunctionPiece { name: None, arguments: None });
        let name = function.name.unwrap_or_default();
        let place = match self.find(piece.index, &id, &name) {
            Some(place) => place,
            None if self.calls.len() == CALLS => return Err(too_many_calls()),
            None => {
                self.calls.push(Call { index: piece.index, ..Call::default() });
                self.calls.len() - 1
            }
        };
        let call = &mut self.calls[place];
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

    /// The call that a piece goes on with; nothing if it begins a new one.
    fn find(&self, index: Option<u64>, id: &str, name: &str) -> Option<usize> {
        let place = match index {
            Some(_) => self.calls.iter().rposition(|call| call.index == index)?,
            None if id.is_empty() => self.calls.len().checked_sub(1)?,
            None => return self.calls.iter().rposition(|call| call.id == id),
        };
        let call = &self.calls[place];
        let other_id = !id.is_empty() && !call.id.is_empty() && id != call.id;
        let unnamed = id.is_empty() || call.id.is_empty();
        let again = unnamed && !name.is_empty() && call.is_complete();
        if other_id || again { None } else { Some(place) }
    }

    /// The whole answer, with the real names of the tools.
    pub(super) fn into_answer(mut self, turn: u64, names: &Names, on_delta: &mut OnDelta<'_>) -> Answer {
        let note = match self.finish {
            Some(Finish::Cut) => Some(CUT),
            Some(Finish::Filtered) => Some(FILTERED),
            Some(Finish::Whole) | None => None,
        };
        if let Some(note) = note {
            let space = if self.text.is_empty() { "" } else { "\n" };
            self.say(&format!("{space}{note}"), on_delta);
        }
        let calls = std::mem::take(&mut self.calls);
        let calls = calls.into_iter().enumerate().map(|(place, call)| ModelCall {
            arguments: call.arguments(note.is_some()),
            id: if call.id.is_empty() { format!("call_{turn}_{}", place + 1) } else { call.id },
            name: names.real(&call.name).to_owned(),
        });
        Answer { calls: calls.collect(), text: self.text, thoughts: None, usage: self.usage }
    }
}

impl Call {
    fn is_complete(&self) -> bool {
        self.arguments.ends_with('}')
            && !self.name.is_empty()
            && serde_json::from_str::<Map<String, Value>>(&self.arguments).is_ok()
    }

    /// No text at all means no arguments, unless the answer was cut before they came.
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
    serde_json::from_slice(data).map_err(|_| garbled())
}

/// A text, or the texts of several parts.
fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => Vec::new(),
    }
}
