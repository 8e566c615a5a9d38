//! Requests for `/chat/completions`: OpenAI and the many servers that speak like it.
//!
//! Where servers differ, the form that all of them take is used: roles alternate, a result is text alone, and
//! its images follow in a message of the user.

use serde_json::{Map, Value, json};

use super::names::Ids;
use super::schema::Dialect;
use super::turns::{Call, Part, Turn, joined, spoken, told, turns};
use super::{Names, Prompt, Request, Shelf};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 40;
/// The most calls of one assistant message; more are told in several.
const CALLS: usize = 128;
const TOOLS: usize = 128;
/// The longest description of a tool, in characters.
const DESCRIPTION_CHARS: usize = 1_024;

/// The request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let shelf = Shelf { dialect: Dialect::OpenAi, most: TOOLS, render: tool };
    let (tools, left_out) = shelf.fill(prompt.tools, &mut names);
    let mut writer = Writer { names, ids: Ids::new(ID_CHARS), messages: Vec::new(), pictures: Vec::new() };
    if let Some(system) = spoken(prompt.system) {
        writer.messages.push(json!({"role": "system", "content": system}));
    }
    for turn in turns(prompt) {
        writer.turn(&turn);
    }
    writer.show_pictures(None);
    let mut body = Map::new();
    body.insert("messages".into(), writer.messages.into());
    if !tools.is_empty() {
        body.insert("tools".into(), tools.into());
    }
    Request { body, names: writer.names, left_out }
}

fn tool(name: &str, description: &str, schema: Value) -> Value {
    let mut function = json!({"name": name, "parameters": schema});
    if let Some(description) = spoken(description.trim()) {
        function["description"] = description.chars().take(DESCRIPTION_CHARS).collect::<String>().into();
    }
    json!({"type": "function", "function": function})
}

struct Writer {
    names: Names,
    ids: Ids,
    messages: Vec<Value>,
    /// Images of results, to be shown in the next message of the user.
    pictures: Vec<Value>,
}

impl Writer {
    fn turn(&mut self, turn: &Turn<'_>) {
        match turn {
            Turn::User(texts) if self.pictures.is_empty() => {
                self.messages.push(json!({"role": "user", "content": joined(texts)}));
            }
            Turn::User(texts) => self.show_pictures(Some(joined(texts))),
            Turn::Assistant { said, calls } => {
                self.show_pictures(None);
                self.assistant(&told(said), calls);
            }
        }
    }

    fn assistant(&mut self, text: &str, calls: &[Call<'_>]) {
        if calls.is_empty() {
            self.messages.push(json!({"role": "assistant", "content": text}));
            return;
        }
        let content = if text.is_empty() { Value::Null } else { text.into() };
        for (index, batch) in calls.chunks(CALLS).enumerate() {
            let content = if index == 0 { content.clone() } else { Value::Null };
            self.batch(content, batch);
        }
    }

    fn batch(&mut self, content: Value, calls: &[Call<'_>]) {
        let ids: Vec<_> = calls.iter().map(|call| self.ids.fit(call.id)).collect();
        let told: Vec<_> = calls.iter().zip(&ids).map(|(call, id)| self.call(call, id)).collect();
        self.messages.push(json!({"role": "assistant", "content": content, "tool_calls": told}));
        for (call, id) in calls.iter().zip(ids) {
            let content = self.result(&call.result, &id);
            self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        }
    }

    fn call(&mut self, call: &Call<'_>, id: &str) -> Value {
        let arguments = Value::Object(call.arguments.clone().into_owned()).to_string();
        let function = json!({"name": self.names.fit(call.name), "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    }

    fn result(&mut self, parts: &[Part<'_>], id: &str) -> String {
        let mut texts = Vec::new();
        for part in parts {
            match part {
                Part::Text(text) => texts.push(text.clone()),
                Part::Image(image) => {
                    texts.push("[an image; it is shown below]".into());
                    let url = format!("data:{};base64,{}", image.media_type, image.data);
                    self.pictures.push(json!({"type": "text", "text": format!("[an image of {id}:]")}));
                    self.pictures.push(json!({"type": "image_url", "image_url": {"url": url}}));
                }
            }
        }
        texts.join("\n")
    }

    fn show_pictures(&mut self, text: Option<String>) {
        let mut content = std::mem::take(&mut self.pictures);
        content.extend(text.map(|text| json!({"type": "text", "text": text})));
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }
}
