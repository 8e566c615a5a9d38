//! Assembly of an answer from streamed chunks.
//!
//! Servers differ in how they send calls: in pieces with an index, in one piece, without an index, with the same index
//! for all, without ids, with a new id in every piece. A piece that could belong to two calls starts a new one only if
//! it names a tool.

use rap_agent::prompt::{Names, ServedModel};
use rap_agent::{Thoughts, Usage};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::model::fields;
use crate::model::lenient::{count, extend_arguments, text};
use crate::model::remote::{
    CALLS, CUT, FILTERED, error_in, malformed_answer, streamed_error, too_many_calls,
};
use crate::model::{ArgumentMemory, Error, ModelAnswer, ModelCall, OnDelta, body};

/// Fields of a message that are read, or that servers send but do not take back.
const OF_MESSAGE: &[&str] =
    &["role", "content", "tool_calls", "refusal", "annotations", "audio", "function_call", "name", "type"];
/// Fields of a call that are read.
const OF_CALL: &[&str] = &["index", "id", "type", "function"];
/// Fields of the function of a call that are read.
const OF_FUNCTION: &[&str] = &["name", "arguments"];

/// The part of an answer that has been received.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    text: String,
    calls: Vec<Call>,
    /// Additional fields of the message.
    fields: Map<String, Value>,
    usage: Usage,
    finish: Option<Finish>,
    done: bool,
    /// Number of bytes of arguments that were checked for being complete.
    checked_bytes: usize,
    /// Memory of the additional fields, in bytes.
    field_bytes: usize,
}

/// Maximum of [`Assembly::checked_bytes`]. Some servers send calls so that each piece needs a check of all pieces before.
const CHECKED_BYTES: usize = 32 * 1024 * 1024;
/// Maximum length of white space that is taken for no arguments.
const BLANK_BYTES: usize = 64;

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
    /// Additional fields of the call.
    fields: Map<String, Value>,
}

impl body::Assembly for Assembly {
    fn is_done(&self) -> bool {
        self.done
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_complete(&self) -> bool {
        self.done || self.finish.is_some()
    }

    fn bytes(&self) -> usize {
        let call = |call: &Call| call.id.len() + call.name.len() + call.arguments.len();
        self.text.len() + self.calls.iter().map(call).sum::<usize>() + self.field_bytes
    }

    fn arguments(&self) -> impl Iterator<Item = &str> {
        self.calls.iter().map(|call| call.arguments.as_str())
    }

    fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.done || data.trim().is_empty() {
            return Ok(());
        }
        if data.trim() == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk = parse(data.as_bytes())?;
        let choice = self.take_metadata(&chunk)?;
        // Some servers send the whole message in one event.
        let is_whole = choice["delta"].is_null() && self.text.is_empty() && self.calls.is_empty();
        self.piece(&choice[if is_whole { "message" } else { "delta" }], on_delta)
    }

    fn push_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let chunk = parse(document)?;
        let choice = self.take_metadata(&chunk)?;
        let message = ["message", "delta"].iter().find_map(|key| choice.get(key));
        let message = message.ok_or_else(|| Error::retry("the model's answer contains no message"))?;
        self.piece(message, on_delta)?;
        self.done = true;
        Ok(())
    }
}

impl Assembly {
    /// Reads the error, usage and finish reason of a chunk. Returns its first choice.
    fn take_metadata<'a>(&mut self, chunk: &'a Value) -> Result<&'a Value, Error> {
        if let Some(error) = error_in(chunk) {
            return Err(streamed_error(error));
        }
        self.usage = later_usage(self.usage, &chunk["usage"]);
        let choice = &chunk["choices"][0];
        self.finish = match &choice["finish_reason"] {
            Value::String(reason) => match reason.as_str() {
                "" => self.finish,
                "error" => return Err(Error::retry("the model's server failed in the middle of the answer")),
                "length" => Some(Finish::Cut),
                "content_filter" => Some(Finish::Filtered),
                _ => Some(Finish::Whole),
            },
            // Some servers send the number of a reason. 0 means that there is none.
            Value::Number(number) if number.as_u64() != Some(0) => Some(Finish::Whole),
            _ => self.finish,
        };
        Ok(choice)
    }

    fn piece(&mut self, piece: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        for text in texts(&piece["content"]).into_iter().chain(piece["refusal"].as_str()) {
            self.push_text(text, on_delta);
        }
        self.field_bytes += fields::add(&mut self.fields, piece, OF_MESSAGE);
        match &piece["tool_calls"] {
            Value::Array(calls) => calls.iter().try_for_each(|call| self.call(call)),
            call @ Value::Object(_) => self.call(call),
            _ => Ok(()),
        }
    }

    fn push_text(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        let text = text.replace('\0', "");
        if !text.is_empty() {
            self.text.push_str(&text);
            on_delta(&text);
        }
    }

    fn call(&mut self, piece: &Value) -> Result<(), Error> {
        let (index, id, name) =
            (count(&piece["index"]), text(&piece["id"]), text(&piece["function"]["name"]));
        let found = match self.find(index, &id, &name) {
            Some(found) => found,
            None if self.calls.len() == CALLS => return Err(too_many_calls()),
            None => {
                self.calls.push(Call { index, ..Call::default() });
                self.calls.len() - 1
            }
        };
        let call = &mut self.calls[found];
        self.field_bytes += fields::add(&mut call.fields, piece, OF_CALL);
        let mut function = Map::new();
        fields::add(&mut function, &piece["function"], OF_FUNCTION);
        if !function.is_empty() {
            self.field_bytes += fields::add(&mut call.fields, &json!({"function": function}), &[]);
        }
        if call.id.is_empty() {
            call.id = id;
        }
        if call.name != name {
            call.name.push_str(&name);
        }
        match &piece["function"]["arguments"] {
            Value::Null => {}
            Value::String(text) => extend_arguments(&mut call.arguments, text),
            whole => extend_arguments(&mut call.arguments, &whole.to_string()),
        }
        Ok(())
    }

    /// Returns the index of the call that a piece continues, or `None` if it starts a new one.
    fn find(&mut self, index: Option<u64>, id: &str, name: &str) -> Option<usize> {
        let last = self.calls.len().checked_sub(1)?;
        let found = match index {
            Some(_) => self.calls.iter().rposition(|call| call.index == index)?,
            None if id.is_empty() => last,
            None => match self.calls.iter().rposition(|call| call.id == id) {
                Some(found) => return Some(found),
                None => last,
            },
        };
        let (call, checked) = (&self.calls[found], &mut self.checked_bytes);
        let other_id = !id.is_empty() && !call.id.is_empty() && id != call.id;
        let is_new = match (name.is_empty(), other_id) {
            (true, _) => false,
            // The name is repeated with a new id in every piece.
            (false, true) => name != call.name || !call.is_incomplete(checked),
            (false, false) if index.is_none() && !id.is_empty() => true,
            (false, false) => (id.is_empty() || call.id.is_empty()) && call.is_complete(checked),
        };
        if is_new { None } else { Some(found) }
    }

    /// Returns the complete answer of a model, with the original names of the tools.
    pub(super) fn into_answer(
        mut self,
        origin: ServedModel<'_>,
        turn: u64,
        names: &Names,
        on_delta: &mut OnDelta<'_>,
    ) -> ModelAnswer {
        let note = match self.finish {
            Some(Finish::Cut) => Some(CUT),
            Some(Finish::Filtered) => Some(FILTERED),
            Some(Finish::Whole) | None => None,
        };
        if let Some(note) = note {
            let space = if self.text.is_empty() { "" } else { "\n" };
            self.push_text(&format!("{space}{note}"), on_delta);
        }
        let thoughts = self.thoughts(origin);
        let mut memory = ArgumentMemory::default();
        let calls = self.calls.into_iter().enumerate().map(|(index, call)| ModelCall {
            arguments: call.arguments(note.is_some(), &mut memory),
            id: if call.id.is_empty() { format!("call_{turn}_{}", index + 1) } else { call.id },
            name: names.real(&call.name).to_owned(),
        });
        ModelAnswer { calls: calls.collect(), text: self.text, thoughts, usage: self.usage }
    }

    /// Takes the additional fields, if there are any.
    fn thoughts(&mut self, origin: ServedModel<'_>) -> Option<Thoughts> {
        let fields = std::mem::take(&mut self.fields);
        let call_fields = self.calls.iter_mut().map(|call| std::mem::take(&mut call.fields)).collect();
        let thoughts = Thoughts { model: origin.model.to_owned(), ..Thoughts::default() };
        let thoughts = fields::keep(thoughts, origin, fields, call_fields);
        thoughts.server.is_some().then_some(thoughts)
    }
}

impl Call {
    /// Returns true if all arguments were received. `checked` counts the bytes that this has cost; beyond
    /// [`CHECKED_BYTES`], a call is taken for incomplete.
    fn is_complete(&self, checked: &mut usize) -> bool {
        if self.name.is_empty() || !self.arguments.ends_with('}') || *checked >= CHECKED_BYTES {
            return false;
        }
        *checked += self.arguments.len();
        let is_object = self.arguments.trim_start().starts_with('{');
        is_object && serde_json::from_str::<IgnoredAny>(&self.arguments).is_ok()
    }

    /// Returns true if a part of the arguments was received.
    fn is_incomplete(&self, checked: &mut usize) -> bool {
        let is_blank = self.arguments.len() <= BLANK_BYTES && self.arguments.trim().is_empty();
        !is_blank && !self.is_complete(checked)
    }

    /// Parses the arguments. No text means no arguments, unless the answer was cut before they were sent.
    fn arguments(&self, cut: bool, memory: &mut ArgumentMemory) -> Result<Map<String, Value>, String> {
        if self.arguments.trim().is_empty() && !cut {
            return Ok(Map::new());
        }
        memory.parse(&self.arguments)
    }
}

/// Returns the token counts after a chunk. A chunk without a count does not take an earlier one back.
fn later_usage(usage: Usage, tokens: &Value) -> Usage {
    let details = &tokens["prompt_tokens_details"];
    // The first of these fields that a server sends.
    let number = |old: u64, fields: &[&Value]| fields.iter().find_map(|field| count(field)).unwrap_or(old);
    Usage {
        input: number(usage.input, &[&tokens["prompt_tokens"]]),
        output: number(usage.output, &[&tokens["completion_tokens"]]),
        cached: number(usage.cached, &[&details["cached_tokens"], &tokens["prompt_cache_hit_tokens"]]),
        written: number(usage.written, &[&details["cache_write_tokens"], &details["cache_creation_tokens"]]),
        ..usage
    }
}

fn parse(data: &[u8]) -> Result<Value, Error> {
    let chunk: Option<Value> = serde_json::from_slice(data).ok();
    chunk.filter(Value::is_object).ok_or_else(malformed_answer)
}

/// Returns the text of a content, or the texts of its parts.
fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each piece has to be compared with all pieces before it, because it may begin another call.
    #[test]
    fn pieces_without_an_index_are_checked_within_a_budget() {
        let mut assembly = Assembly::default();
        let piece = |arguments: &str| json!({"function": {"name": "work", "arguments": arguments}});
        assembly.call(&piece(&format!("{{\"a\": [{}", "1,".repeat(1 << 20)))).unwrap();
        for _ in 0..100 {
            assembly.call(&piece("}")).unwrap();
        }
        assert_eq!(assembly.calls.len(), 1);
        let longest = assembly.calls[0].arguments.len();
        assert!(assembly.checked_bytes <= CHECKED_BYTES + longest, "{}", assembly.checked_bytes);
    }
}
