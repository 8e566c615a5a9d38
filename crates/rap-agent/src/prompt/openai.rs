//! Requests for `/chat/completions`: the API of OpenAI and compatible servers.
//!
//! Where servers differ, the form that all of them accept is used: roles alternate, results contain only text, and the
//! images of results follow in a user message.

use std::borrow::Cow;

use rap_protocol::Image;
use serde_json::{Map, Value, json};

use super::messages::{
    Call, Part, PromptMessage, add_fields, join_paragraphs, non_blank, prompt_messages, text_of, text_result,
};
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

/// Field in which some servers send the model's thinking. They require it in every message with calls.
const REASONING: &str = "reasoning_content";

/// Builds the request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let rules = ToolRules { dialect: Dialect::OpenAi, max_tools: MAX_TOOLS, render: tool };
    let (tools, omitted_tools) = rules.offer(prompt.tools, &mut names);
    let messages = prompt_messages(prompt);
    let mut writer = Writer {
        names,
        ids: Ids::new(prompt.call_ids, ID_CHARS),
        messages: Vec::new(),
        images: Vec::new(),
        reasons: messages.iter().any(has_reasoning),
    };
    if let Some(system) = non_blank(prompt.system) {
        writer.messages.push(json!({"role": "system", "content": system}));
    }
    for message in &messages {
        writer.write_message(message);
    }
    writer.user(&[]);
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
    /// True if the server sends [`REASONING`].
    reasons: bool,
}

fn has_reasoning(turn: &PromptMessage<'_>) -> bool {
    matches!(turn, PromptMessage::Assistant { fields: Some(fields), .. } if fields.contains_key(REASONING))
}

impl Writer {
    fn write_message(&mut self, message: &PromptMessage<'_>) {
        match message {
            PromptMessage::User(parts) => self.user(parts),
            PromptMessage::Assistant { blocks, calls, fields } => {
                self.user(&[]);
                self.assistant(&text_of(blocks), calls, *fields);
            }
        }
    }

    fn assistant(&mut self, text: &str, calls: &[Call<'_>], fields: Option<&Map<String, Value>>) {
        if calls.is_empty() {
            let mut message = json!({"role": "assistant", "content": text});
            add_fields(&mut message, None, fields);
            // Servers require it only with calls, and some refuse it without.
            if let Value::Object(members) = &mut message {
                members.remove(REASONING);
            }
            self.messages.push(message);
            return;
        }
        let content = if text.is_empty() { Value::Null } else { text.into() };
        for (index, batch) in calls.chunks(MAX_CALLS).enumerate() {
            let (content, fields) = if index == 0 { (content.clone(), fields) } else { (Value::Null, None) };
            self.batch(content, batch, fields);
        }
    }

    fn batch(&mut self, content: Value, calls: &[Call<'_>], fields: Option<&Map<String, Value>>) {
        let ids: Vec<_> = calls.iter().map(|call| self.ids.fit(call.id)).collect();
        let tool_calls: Vec<_> = calls.iter().zip(&ids).map(|(call, id)| self.call(call, id)).collect();
        let mut message = json!({"role": "assistant", "content": content, "tool_calls": tool_calls});
        add_fields(&mut message, None, fields);
        if self.reasons && message.get(REASONING).is_none() {
            message[REASONING] = "".into();
        }
        self.messages.push(message);
        for (call, id) in calls.iter().zip(ids) {
            let content = text_result(&call.result, &id, &mut self.images, "text", image_json);
            self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        }
    }

    fn call(&mut self, call: &Call<'_>, id: &str) -> Value {
        let arguments = Value::Object(call.arguments.clone().into_owned()).to_string();
        let mut function = json!({"name": self.names.fit(call.name), "arguments": arguments});
        let of_function = call.fields.and_then(|fields| fields.get("function")?.as_object());
        add_fields(&mut function, None, of_function);
        let mut value = json!({"id": id, "type": "function", "function": function});
        add_fields(&mut value, None, call.fields);
        value
    }

    /// Writes a message of the user, after the images of the results before it. One without images is a text.
    fn user(&mut self, parts: &[Part<'_>]) {
        let mut content = std::mem::take(&mut self.images);
        let mut texts = Vec::new();
        let paragraphs = |texts: &mut Vec<Cow<'_, str>>| {
            let text = (!texts.is_empty()).then(|| join_paragraphs(texts));
            texts.clear();
            text.map(|text| json!({"type": "text", "text": text}))
        };
        for part in parts {
            match part {
                Part::Text(text) => texts.push(text.clone()),
                Part::Image(image) => {
                    content.extend(paragraphs(&mut texts));
                    content.push(image_json(image));
                }
            }
        }
        if content.is_empty() && !texts.is_empty() {
            self.messages.push(json!({"role": "user", "content": join_paragraphs(&texts)}));
            return;
        }
        content.extend(paragraphs(&mut texts));
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }
}

fn image_json(image: &Image) -> Value {
    let url = format!("data:{};base64,{}", image.media_type, image.data);
    json!({"type": "image_url", "image_url": {"url": url}})
}
