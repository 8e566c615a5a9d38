//! Requests for `/v1/messages`: Anthropic's API.
//!
//! User and assistant alternate; the results of a batch stand at the beginning of the user's message behind it.

use serde_json::{Map, Value, json};

use super::names::Ids;
use super::schema::Dialect;
use super::turns::{Call, Part, Turn, spoken, turns};
use super::{Names, Prompt, Request, Shelf};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 64;
const TOOLS: usize = 1_024;
/// Offered where the history has calls and nothing else is offered, which the API would refuse.
const NO_TOOL: &str = "no_tool_available";

/// The request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let shelf = Shelf { dialect: Dialect::Anthropic, most: TOOLS, render: tool };
    let (mut tools, left_out) = shelf.fill(prompt.tools, &mut names);
    let mut writer = Writer { names, ids: Ids::new(ID_CHARS), messages: Vec::new(), results: Vec::new() };
    let turns = turns(prompt);
    for turn in &turns {
        writer.turn(turn);
    }
    writer.user(Vec::new());
    let calls = |turn: &Turn<'_>| matches!(turn, Turn::Assistant { calls, .. } if !calls.is_empty());
    if tools.is_empty() && turns.iter().any(calls) {
        let schema = json!({"type": "object", "properties": {}});
        tools.push(tool(&writer.names.fit(NO_TOOL), "This is no tool. Do not call it.", schema));
    }
    let mut body = Map::new();
    body.insert("messages".into(), writer.messages.into());
    if !tools.is_empty() {
        body.insert("tools".into(), tools.into());
    }
    if let Some(system) = spoken(prompt.system) {
        body.insert("system".into(), system.into());
    }
    Request { body, names: writer.names, left_out }
}

fn tool(name: &str, description: &str, schema: Value) -> Value {
    let mut tool = json!({"name": name, "input_schema": schema});
    if let Some(description) = spoken(description) {
        tool["description"] = description.into();
    }
    tool
}

fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

struct Writer {
    names: Names,
    ids: Ids,
    messages: Vec<Value>,
    /// Results that the next message of the user begins with.
    results: Vec<Value>,
}

impl Writer {
    fn turn(&mut self, turn: &Turn<'_>) {
        match turn {
            Turn::User(texts) => self.user(texts.iter().map(|text| text_block(text)).collect()),
            Turn::Assistant { texts, calls } => {
                self.user(Vec::new());
                let mut content: Vec<_> = texts.iter().map(|text| text_block(text)).collect();
                for call in calls {
                    content.push(self.call(call));
                }
                self.messages.push(json!({"role": "assistant", "content": content}));
            }
        }
    }

    fn user(&mut self, texts: Vec<Value>) {
        let mut content = std::mem::take(&mut self.results);
        content.extend(texts);
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }

    fn call(&mut self, call: &Call<'_>) -> Value {
        let id = self.ids.fit(call.id);
        let content: Vec<_> = call.result.iter().map(result_block).collect();
        self.results.push(json!({"type": "tool_result", "tool_use_id": id, "content": content}));
        let input = Value::Object(call.arguments.clone().into_owned());
        json!({"type": "tool_use", "id": id, "name": self.names.fit(call.name), "input": input})
    }
}

fn result_block(part: &Part<'_>) -> Value {
    match part {
        Part::Text(text) => text_block(text),
        Part::Image(image) => json!({
            "type": "image",
            "source": {"type": "base64", "media_type": image.media_type, "data": image.data},
        }),
    }
}
