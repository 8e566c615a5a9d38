//! Requests for `/responses`: OpenAI's API whose requests and answers are lists of items.
//!
//! An answer's reasoning items are sent back unchanged and at their position: before the text or the call that they led to.
//! The server keeps no state, so every request contains the whole conversation. Results contain only text, and the images
//! of results follow in a user message.

use rap_protocol::Image;
use serde_json::{Map, Value, json};

use super::messages::{
    Block, Call, Part, PromptMessage, add_fields, non_blank, prompt_messages, text_result,
};
use super::names::Ids;
use super::schema::Dialect;
use super::{Names, Prompt, Request, ToolRules};
use crate::{Thought, ThoughtKind};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 64;
const MAX_TOOLS: usize = 128;
/// Maximum length of a tool's description, in characters.
const DESCRIPTION_CHARS: usize = 1_024;

/// Builds the request for a prompt. Its body has `input`, and `tools` and `instructions` if there are any.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let rules = ToolRules { dialect: Dialect::OpenAi, max_tools: MAX_TOOLS, render: tool };
    let (tools, omitted_tools) = rules.offer(prompt.tools, &mut names);
    let ids = Ids::new(prompt.call_ids, ID_CHARS);
    let mut writer = Writer { names, ids, items: Vec::new(), images: Vec::new() };
    for message in prompt_messages(prompt) {
        writer.write_message(&message);
    }
    writer.user(Vec::new());
    let mut body = Map::new();
    body.insert("input".into(), writer.items.into());
    if !tools.is_empty() {
        body.insert("tools".into(), tools.into());
    }
    if let Some(system) = non_blank(prompt.system) {
        body.insert("instructions".into(), system.into());
    }
    Request { body, names: writer.names, omitted_tools }
}

fn tool(name: &str, description: &str, schema: Value) -> Value {
    // Strict mode supports only a subset of JSON Schema, and the schemas of tools may use all of it.
    let mut tool = json!({"type": "function", "name": name, "parameters": schema, "strict": false});
    if let Some(description) = non_blank(description.trim()) {
        tool["description"] = description.chars().take(DESCRIPTION_CHARS).collect::<String>().into();
    }
    tool
}

struct Writer {
    names: Names,
    ids: Ids,
    items: Vec<Value>,
    /// Images of results, for the next user message.
    images: Vec<Value>,
}

impl Writer {
    fn write_message(&mut self, message: &PromptMessage<'_>) {
        match message {
            PromptMessage::User(parts) => {
                let part = |part: &Part<'_>| match part {
                    Part::Text(text) => json!({"type": "input_text", "text": text}),
                    Part::Image(image) => image_json(image),
                };
                self.user(parts.iter().map(part).collect());
            }
            PromptMessage::Assistant { blocks, calls, fields } => {
                self.user(Vec::new());
                self.assistant(blocks, calls, *fields);
            }
        }
    }

    fn user(&mut self, parts: Vec<Value>) {
        let mut content = std::mem::take(&mut self.images);
        content.extend(parts);
        if !content.is_empty() {
            self.items.push(json!({"type": "message", "role": "user", "content": content}));
        }
    }

    fn assistant(&mut self, blocks: &[Block<'_>], calls: &[Call<'_>], fields: Option<&Map<String, Value>>) {
        let last_text = blocks.iter().rposition(|block| matches!(block, Block::Text(_)));
        for (index, block) in blocks.iter().enumerate() {
            match block {
                Block::Text(text) => {
                    let mut message = json!({"role": "assistant", "content": text});
                    add_fields(&mut message, Some("message"), fields.filter(|_| last_text == Some(index)));
                    self.items.push(message);
                }
                Block::Thought(thought) => self.items.extend(item_json(thought)),
            }
        }
        let mut results = Vec::new();
        for call in calls {
            self.items.extend(call.thoughts.iter().filter_map(|thought| item_json(thought)));
            let id = self.ids.fit(call.id);
            let arguments = Value::Object(call.arguments.clone().into_owned()).to_string();
            let name = self.names.fit(call.name);
            let mut item =
                json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments});
            add_fields(&mut item, Some("function_call"), call.fields);
            self.items.push(item);
            let output = text_result(&call.result, &id, &mut self.images, "input_text", image_json);
            results.push(json!({"type": "function_call_output", "call_id": id, "output": output}));
        }
        self.items.extend(results);
    }
}

/// Returns an item as the provider sent it. `None` for thinking of another API.
fn item_json(thought: &Thought) -> Option<Value> {
    match &thought.kind {
        ThoughtKind::Item { item } => Some(Value::Object(item.clone())),
        ThoughtKind::Readable { .. } | ThoughtKind::Redacted { .. } => None,
    }
}

fn image_json(image: &Image) -> Value {
    let url = format!("data:{};base64,{}", image.media_type, image.data);
    json!({"type": "input_image", "image_url": url, "detail": "auto"})
}
