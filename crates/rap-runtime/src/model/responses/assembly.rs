//! Assembly of an answer from streamed items.
//!
//! An item is complete when its `done` event has arrived. The event at the end repeats all items; they are used if the
//! stream did not contain them, or not their `done` events.

use rap_agent::prompt::{Names, ServedModel};
use rap_agent::{Thought, ThoughtKind, Thoughts, Usage};
use serde_json::{Map, Value};

use crate::model::fields;
use crate::model::lenient::{count, extend_arguments, text, without_nul};
use crate::model::remote::{
    CALLS, CUT, FILTERED, error_in, event_type, malformed_answer, streamed_error, too_many_calls,
};
use crate::model::{ArgumentMemory, Error, ModelAnswer, ModelCall, OnDelta, body};

/// Fields of a message that are read, or that the server does not take back.
const OF_MESSAGE: &[&str] = &["type", "id", "status", "role", "content"];
/// Fields of a call that are read, or that the server does not take back.
const OF_CALL: &[&str] = &["type", "id", "status", "call_id", "name", "arguments"];
/// Maximum number of items of an answer.
const ITEMS: usize = 4 * CALLS;

/// The part of an answer that has been received.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    text: String,
    items: Vec<Item>,
    usage: Usage,
    end: Option<End>,
    /// Memory of reasoning and of additional fields, in bytes.
    value_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Whole,
    Cut,
    Filtered,
}

#[derive(Debug)]
struct Item {
    index: Option<u64>,
    done: bool,
    /// Length of the answer's text before this item, in bytes.
    at: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Message {
        /// Additional fields of the message.
        fields: Map<String, Value>,
    },
    Call {
        id: String,
        name: String,
        arguments: String,
        /// Additional fields of the call.
        fields: Map<String, Value>,
    },
    /// Reasoning, as the provider sent it.
    Reasoning(Map<String, Value>),
    /// An item that is not interpreted.
    Other,
}

impl body::Assembly for Assembly {
    fn is_done(&self) -> bool {
        self.end.is_some()
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_complete(&self) -> bool {
        self.is_done()
    }

    fn bytes(&self) -> usize {
        let item = |item: &Item| match &item.kind {
            Kind::Call { id, name, arguments, .. } => id.len() + name.len() + arguments.len(),
            Kind::Message { .. } | Kind::Reasoning(_) | Kind::Other => 0,
        };
        self.text.len() + self.items.iter().map(item).sum::<usize>() + self.value_bytes
    }

    fn arguments(&self) -> impl Iterator<Item = &str> {
        self.items.iter().filter_map(|item| match &item.kind {
            Kind::Call { arguments, .. } => Some(arguments.as_str()),
            Kind::Message { .. } | Kind::Reasoning(_) | Kind::Other => None,
        })
    }

    fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.is_done() || data.trim().is_empty() || data.trim() == "[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_str(data).map_err(|_| malformed_answer())?;
        let index = count(&event["output_index"]);
        match event_type(&event)? {
            "response.output_item.added" => self.open(index, &event["item"])?,
            "response.output_text.delta" | "response.refusal.delta" => {
                let position = self.position(index)?;
                self.extend_text(position, event["delta"].as_str().unwrap_or_default(), on_delta);
            }
            "response.function_call_arguments.delta" => {
                let position = self.position(index)?;
                if let Kind::Call { arguments, .. } = &mut self.items[position].kind {
                    extend_arguments(arguments, event["delta"].as_str().unwrap_or_default());
                }
            }
            "response.output_item.done" => self.close(index, &event["item"], on_delta)?,
            "response.completed" | "response.incomplete" => self.finish(&event["response"], on_delta)?,
            "response.failed" => {
                self.count(&event["response"]["usage"]);
                return Err(streamed_error(&event["response"]["error"]));
            }
            // Progress, summaries of reasoning, and events of later API versions.
            _ => {}
        }
        Ok(())
    }

    fn push_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        let response: Value = serde_json::from_slice(document).map_err(|_| malformed_answer())?;
        if let Some(error) = error_in(&response) {
            return Err(streamed_error(error));
        }
        if !response["output"].is_array() {
            return Err(Error::retry("the model's answer contains no output"));
        }
        self.finish(&response, on_delta)
    }
}

impl Assembly {
    fn open(&mut self, index: Option<u64>, item: &Value) -> Result<(), Error> {
        let kind = Kind::parse(item);
        self.value_bytes += kind.value_bytes();
        let calls = || self.items.iter().filter(|item| matches!(item.kind, Kind::Call { .. })).count();
        if self.items.len() == ITEMS || (matches!(kind, Kind::Call { .. }) && calls() == CALLS) {
            return Err(too_many_calls());
        }
        self.items.push(Item { index, done: false, at: self.text.len(), kind });
        Ok(())
    }

    /// Returns the position of the open item with an index, or of the last open item.
    fn position(&self, index: Option<u64>) -> Result<usize, Error> {
        let found = |item: &Item| !item.done && (index.is_none() || item.index == index);
        self.items.iter().rposition(found).ok_or_else(malformed_answer)
    }

    fn extend_text(&mut self, position: usize, more: &str, on_delta: &mut OnDelta<'_>) {
        let at = self.items[position].at;
        // Texts of two messages are separate paragraphs.
        if at == self.text.len() && at > 0 && !more.is_empty() {
            self.push_text("\n\n", on_delta);
        }
        self.push_text(more, on_delta);
    }

    fn push_text(&mut self, text: &str, on_delta: &mut OnDelta<'_>) {
        let text = without_nul(text);
        if !text.is_empty() {
            self.text.push_str(&text);
            on_delta(&text);
        }
    }

    /// Replaces what was streamed of the item with an index by the whole item.
    fn close(&mut self, index: Option<u64>, whole: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        if self.position(index).is_err() {
            self.open(index, whole)?;
        }
        self.close_at(self.position(index)?, whole, on_delta);
        Ok(())
    }

    fn close_at(&mut self, position: usize, whole: &Value, on_delta: &mut OnDelta<'_>) {
        let item = &mut self.items[position];
        let (at, is_message) = (item.at, matches!(item.kind, Kind::Message { .. }));
        if whole["type"].is_string() {
            item.kind = Kind::parse(whole);
            let value_bytes = item.kind.value_bytes();
            self.value_bytes += value_bytes;
        }
        if is_message && at == self.text.len() {
            self.extend_text(position, &message_text(whole), on_delta);
        }
        // A call whose arguments were cut by a limit is not complete.
        self.items[position].done = whole["status"] != "incomplete";
    }

    fn count(&mut self, tokens: &Value) {
        let details = &tokens["input_tokens_details"];
        let number = |value: &Value| count(value).unwrap_or(0);
        self.usage = Usage {
            input: number(&tokens["input_tokens"]),
            output: number(&tokens["output_tokens"]),
            cached: number(&details["cached_tokens"]),
            written: number(&details["cache_write_tokens"]),
            ..Usage::default()
        };
    }

    fn finish(&mut self, response: &Value, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        self.count(&response["usage"]);
        let reason = response["incomplete_details"]["reason"].as_str();
        let end = match (response["status"].as_str(), reason) {
            (_, Some("content_filter")) => End::Filtered,
            (Some("incomplete"), _) | (_, Some(_)) => End::Cut,
            _ => End::Whole,
        };
        let output = response["output"].as_array().map_or(&[][..], |output| output);
        if self.items.is_empty() {
            output.iter().try_for_each(|item| self.close(None, item, on_delta))?;
        }
        self.close_open_items(output, end, on_delta);
        self.end = Some(end);
        Ok(())
    }

    /// Completes the items whose `done` event is missing, from the items at the end of the response. Of a response that was
    /// cut, only those are taken that are complete.
    fn close_open_items(&mut self, output: &[Value], end: End, on_delta: &mut OnDelta<'_>) {
        for position in 0..self.items.len() {
            let item = &self.items[position];
            let index = item.index.map_or(position, |index| usize::try_from(index).unwrap_or(usize::MAX));
            let whole = output.get(index).filter(|whole| item.kind.is_same(whole));
            let is_complete = |whole: &&Value| end == End::Whole || whole["status"] == "completed";
            if let Some(whole) = whole.filter(is_complete).filter(|_| !item.done) {
                self.close_at(position, whole, on_delta);
            }
        }
    }

    /// Returns the complete answer of a model, with the original names of the tools.
    pub(super) fn into_answer(
        mut self,
        origin: ServedModel<'_>,
        turn: u64,
        names: &Names,
        on_delta: &mut OnDelta<'_>,
    ) -> ModelAnswer {
        let note = match self.end {
            Some(End::Cut) => Some(CUT),
            Some(End::Filtered) => Some(FILTERED),
            Some(End::Whole) | None => None,
        };
        if let Some(note) = note {
            let space = if self.text.is_empty() { "" } else { "\n" };
            self.push_text(&format!("{space}{note}"), on_delta);
        }
        let (mut calls, mut call_fields, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        // The texts of several messages become one, with the fields of all. The last value of a field is kept.
        let (mut message_fields, mut memory) = (Map::new(), ArgumentMemory::default());
        for item in self.items {
            match item.kind {
                Kind::Message { fields } => message_fields.extend(fields),
                Kind::Call { id, name, arguments: text, fields } => {
                    call_fields.push(fields);
                    calls.push(ModelCall {
                        arguments: call_arguments(&text, item.done, &mut memory),
                        id: if id.is_empty() { format!("call_{turn}_{}", calls.len() + 1) } else { id },
                        name: names.real(&name).to_owned(),
                    });
                }
                Kind::Reasoning(value) if item.done => {
                    let kind = ThoughtKind::Item { item: value };
                    parts.push(Thought { at: item.at, calls: calls.len(), kind });
                }
                _ => {}
            }
        }
        let server = (!parts.is_empty()).then(|| origin.server.to_owned());
        let thoughts = Thoughts { model: origin.model.to_owned(), server, parts, ..Thoughts::default() };
        let thoughts = fields::keep(thoughts, origin, message_fields, call_fields);
        let thoughts = thoughts.server.is_some().then_some(thoughts);
        ModelAnswer { text: self.text, calls, thoughts, usage: self.usage }
    }
}

impl Kind {
    fn parse(item: &Value) -> Kind {
        match item["type"].as_str() {
            Some("message") => Kind::Message { fields: fields::of_item(item, OF_MESSAGE) },
            Some("function_call") => Kind::Call {
                id: text(&item["call_id"]),
                name: text(&item["name"]),
                arguments: text(&item["arguments"]),
                fields: fields::of_item(item, OF_CALL),
            },
            Some("reasoning") => {
                let members = item.as_object().into_iter().flatten();
                let given = members.filter(|(_, value)| !value.is_null());
                Kind::Reasoning(given.map(|(name, value)| (name.clone(), value.clone())).collect())
            }
            _ => Kind::Other,
        }
    }

    /// Returns the memory of the parsed values that it keeps, in bytes.
    fn value_bytes(&self) -> usize {
        match self {
            Kind::Message { fields } | Kind::Call { fields, .. } | Kind::Reasoning(fields) => {
                fields::memory(fields)
            }
            Kind::Other => 0,
        }
    }

    /// Returns true if an item at the end of the response may be this one. A call has the same name and id.
    fn is_same(&self, whole: &Value) -> bool {
        match (self, Kind::parse(whole)) {
            (Kind::Call { id, name, .. }, Kind::Call { id: other, name: of_other, .. }) => {
                *name == of_other && (id.is_empty() || *id == other)
            }
            (Kind::Message { .. }, Kind::Message { .. }) | (Kind::Reasoning(_), Kind::Reasoning(_)) => true,
            _ => false,
        }
    }
}

/// Parses the arguments of a call. No text means no arguments.
fn call_arguments(
    text: &str,
    is_whole: bool,
    memory: &mut ArgumentMemory,
) -> Result<Map<String, Value>, String> {
    match is_whole {
        true if text.trim().is_empty() => Ok(Map::new()),
        true => memory.parse(text),
        false => Err(without_nul(text)),
    }
}

/// Returns the text of a message, or its refusal.
fn message_text(item: &Value) -> String {
    let parts = item["content"].as_array().into_iter().flatten();
    let texts = parts.filter_map(|part| part["text"].as_str().or(part["refusal"].as_str()));
    texts.collect()
}
