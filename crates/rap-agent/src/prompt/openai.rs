//! Requests for `/chat/completions`: the API of OpenAI and compatible servers.
//!
//! Where servers differ, the form that all of them accept is used: roles alternate, results contain only text, and the
//! images of results follow in a user message.

use serde_json::{Map, Value, json};

use super::messages::{Call, Part, PromptMessage, join_paragraphs, non_blank, text_of, turns};
use super::names::Ids;
use super::schema::Dialect;
use super::{Names, Prompt, Request, ToolRules};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 40;
/// Maximum number of calls in one assistant message. More calls are split into several messages.
const MAX_CALLS: usize = 128;
const MAX_TOOLS: usize = 128;
/// Maximum length of a tool's description, in characters.
const DESCRIPTION_CHARS: usize = 1_024;

/// Builds the request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let rules = ToolRules { dialect: Dialect::OpenAi, max_tools: MAX_TOOLS, render: tool };
    let (tools, omitted_tools) = rules.offer(prompt.tools, &mut names);
    let mut writer = Writer { names, ids: Ids::new(ID_CHARS), messages: Vec::new(), images: Vec::new() };
    if let Some(system) = non_blank(prompt.system) {
        writer.messages.push(json!({"role": "system", "content": system}));
    }
    for turn in turns(prompt) {
        writer.turn(&turn);
    }
    writer.push_images(None);
    let mut body = Map::new();
    body.insert("messages".into(), writer.messages.into());
    if !tools.is_empty() {
        body.insert("tools".into(), tools.into());
    }
    Request { body, names: writer.names, omitted_tools }
}

fn tool(name: &str, description: &str, schema: Value) -> Value {
    let mut function = json!({"name": name, "parameters": schema});
    if let Some(description) = non_blank(description.trim()) {
        function["description"] = description.chars().take(DESCRIPTION_CHARS).collect::<String>().into();
    }
    json!({"type": "function", "function": function})
}

struct Writer {
    names: Names,
    ids: Ids,
    messages: Vec<Value>,
    /// Images of results, for the next user message.
    images: Vec<Value>,
}

impl Writer {
    fn turn(&mut self, turn: &PromptMessage<'_>) {
        match turn {
            PromptMessage::User(texts) if self.images.is_empty() => {
                self.messages.push(json!({"role": "user", "content": join_paragraphs(texts)}));
            }
            PromptMessage::User(texts) => self.push_images(Some(join_paragraphs(texts))),
            PromptMessage::Assistant { blocks, calls } => {
                self.push_images(None);
                self.assistant(&text_of(blocks), calls);
            }
        }
    }

    fn assistant(&mut self, text: &str, calls: &[Call<'_>]) {
        if calls.is_empty() {
            self.messages.push(json!({"role": "assistant", "content": text}));
            return;
        }
        let content = if text.is_empty() { Value::Null } else { text.into() };
        for (index, batch) in calls.chunks(MAX_CALLS).enumerate() {
            let content = if index == 0 { content.clone() } else { Value::Null };
            self.batch(content, batch);
        }
    }

    fn batch(&mut self, content: Value, calls: &[Call<'_>]) {
        let ids: Vec<_> = calls.iter().map(|call| self.ids.fit(call.id)).collect();
        let tool_calls: Vec<_> = calls.iter().zip(&ids).map(|(call, id)| self.call(call, id)).collect();
        self.messages.push(json!({"role": "assistant", "content": content, "tool_calls": tool_calls}));
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
                    self.images.push(json!({"type": "text", "text": format!("[an image of {id}:]")}));
                    self.images.push(json!({"type": "image_url", "image_url": {"url": url}}));
                }
            }
        }
        texts.join("\n")
    }

    fn push_images(&mut self, text: Option<String>) {
        let mut content = std::mem::take(&mut self.images);
        content.extend(text.map(|text| json!({"type": "text", "text": text})));
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }
}
