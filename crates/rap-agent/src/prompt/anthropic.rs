//! Requests for `/v1/messages`: Anthropic's API.
//!
//! User and assistant messages alternate. The results of a batch are at the beginning of the user message that follows.
//!
//! Cache breakpoints are set after the tools, the system prompt, the last answer that settled everything before it, and
//! the newest block. Everything up to a breakpoint is a prefix of every later request of the same history.
//!
//! If the model always thinks, the API accepts results only in a turn that begins with a thinking block; a tool loop is part
//! of its turn. A turn that does not, because the runtime or another model made its calls, is closed by a short assistant
//! message, and a user message starts another turn. The API checks only the last turn. Earlier turns stay closed, because
//! a request has to begin like the earlier ones for the provider's cache. If the model decides when to think, no turn has
//! to begin with thinking.
//!
//! The API requires the thinking of the last answer unchanged and at its place: a text before it stays before it, and
//! thinking between two calls stays between them.

use serde_json::{Map, Value, json};

use super::messages::{
    Block, Call, NOTHING_NEW, Part, PromptMessage, add_fields, non_blank, prompt_messages,
};
use super::names::Ids;
use super::schema::Dialect;
use super::{Names, Prompt, Request, Thinking, ToolRules};
use crate::{Thought, ThoughtKind};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 64;
const MAX_TOOLS: usize = 1_024;
/// Name of a tool that is offered if the history has calls but no tool is offered. The API would refuse such a request.
const NO_TOOL: &str = "no_tool_available";
/// Assistant message that closes a turn that does not begin with a thinking block.
const NOTED: &str = "(Noted.)";
/// User message after a turn that was closed, if nobody wrote one. It is the last text that the model sees, so it says
/// what to do.
const NEW_RESULTS: &str = "(The results above are new. Respond to them now, as the task requires.)";

/// Builds the request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let rules = ToolRules { dialect: Dialect::Anthropic, max_tools: MAX_TOOLS, render: tool };
    let (mut tools, omitted_tools) = rules.offer(prompt.tools, &mut names);
    let mut writer = Writer::new(names, prompt);
    let messages = prompt_messages(prompt);
    for message in &messages {
        writer.write_message(message);
    }
    writer.finish();
    let calls = |message: &PromptMessage<'_>| matches!(message, PromptMessage::Assistant { calls, .. } if !calls.is_empty());
    if tools.is_empty() && messages.iter().any(calls) {
        let schema = json!({"type": "object", "properties": {}});
        tools.push(tool(&writer.names.fit(NO_TOOL), "This is not a tool. Do not call it.", schema));
    }
    let mut body = Map::new();
    body.insert("messages".into(), writer.messages.into());
    if let Some(last) = tools.last_mut() {
        set_cache_breakpoint(last);
        body.insert("tools".into(), tools.into());
    }
    if let Some(system) = non_blank(prompt.system) {
        let mut system = text_block(&system);
        set_cache_breakpoint(&mut system);
        body.insert("system".into(), json!([system]));
    }
    Request { body, names: writer.names, omitted_tools }
}

fn tool(name: &str, description: &str, schema: Value) -> Value {
    let mut tool = json!({"name": name, "input_schema": schema});
    if let Some(description) = non_blank(description) {
        tool["description"] = description.into();
    }
    tool
}

fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Sets a cache breakpoint after the block.
fn set_cache_breakpoint(block: &mut Value) {
    block["cache_control"] = json!({"type": "ephemeral"});
}

struct Writer {
    names: Names,
    ids: Ids,
    messages: Vec<Value>,
    /// Results at the beginning of the next user message.
    results: Vec<Value>,
    /// True if every turn with calls has to begin with a thinking block.
    always_thinks: bool,
    turn_start: AssistantTurnStart,
    /// Message and block of the last answer at which everything before was settled.
    settled: Option<(usize, usize)>,
}

/// First block of an assistant turn, which includes its calls and their results.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AssistantTurnStart {
    /// It has not begun: the last message is the user's.
    Open,
    Thought,
    Other,
    /// It was closed by [`NOTED`]; a user message must follow.
    Closed,
}

impl Writer {
    fn new(names: Names, prompt: &Prompt<'_>) -> Self {
        Writer {
            names,
            ids: Ids::new(prompt.call_ids, ID_CHARS),
            messages: Vec::new(),
            results: Vec::new(),
            always_thinks: matches!(prompt.thinking, Thinking::Always { .. }),
            turn_start: AssistantTurnStart::Open,
            settled: None,
        }
    }

    fn write_message(&mut self, message: &PromptMessage<'_>) {
        match message {
            PromptMessage::User(parts) => self.user(parts.iter().map(part_json).collect()),
            PromptMessage::Assistant { blocks, calls, .. } => {
                self.push_results();
                self.assistant(blocks, calls);
            }
        }
    }

    fn assistant(&mut self, blocks: &[Block<'_>], calls: &[Call<'_>]) {
        // Items are those of another API on the same server.
        let is_item = |thought: &Thought| matches!(thought.kind, ThoughtKind::Item { .. });
        let is_own = |block: &&Block<'_>| !matches!(block, Block::Thought(thought) if is_item(thought));
        let blocks: Vec<_> = blocks.iter().filter(is_own).collect();
        if self.turn_start == AssistantTurnStart::Open {
            let thought = matches!(blocks.first(), Some(Block::Thought(_)));
            self.turn_start = if thought { AssistantTurnStart::Thought } else { AssistantTurnStart::Other };
        }
        let mut content: Vec<_> = blocks.iter().map(|block| block_json(block)).collect();
        // True if the model made no calls in this answer. Synthetic calls of later input may be in the same message.
        let settles = calls.first().is_none_or(|call| call.synthetic);
        if settles && matches!(blocks.last(), Some(Block::Text(_))) {
            self.settled = Some((self.messages.len(), content.len() - 1));
        }
        for call in calls {
            let thoughts = call.thoughts.iter().filter(|thought| !is_item(thought));
            content.extend(thoughts.map(|thought| thought_json(thought)));
            content.push(self.call(call));
        }
        self.messages.push(json!({"role": "assistant", "content": content}));
        if self.always_thinks && self.turn_start == AssistantTurnStart::Other && !calls.is_empty() {
            self.push_results();
            self.messages.push(json!({"role": "assistant", "content": [text_block(NOTED)]}));
            self.turn_start = AssistantTurnStart::Closed;
        }
    }

    /// Writes the results of the previous batch as a user message, so that an assistant message can follow.
    fn push_results(&mut self) {
        let texts = if self.turn_start == AssistantTurnStart::Closed {
            vec![text_block(NEW_RESULTS)]
        } else {
            Vec::new()
        };
        self.user(texts);
    }

    fn user(&mut self, parts: Vec<Value>) {
        if !parts.is_empty() {
            self.turn_start = AssistantTurnStart::Open;
        }
        let mut content = std::mem::take(&mut self.results);
        content.extend(parts);
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }

    fn call(&mut self, call: &Call<'_>) -> Value {
        let id = self.ids.fit(call.id);
        let content: Vec<_> = call.result.iter().map(part_json).collect();
        self.results.push(json!({"type": "tool_result", "tool_use_id": id, "content": content}));
        let input = Value::Object(call.arguments.clone().into_owned());
        let mut value =
            json!({"type": "tool_use", "id": id, "name": self.names.fit(call.name), "input": input});
        add_fields(&mut value, Some("tool_use"), call.fields);
        value
    }

    /// Writes the remaining results and sets the cache breakpoints in the messages.
    fn finish(&mut self) {
        self.push_results();
        if let Some((message, block)) = self.settled {
            set_cache_breakpoint(&mut self.messages[message]["content"][block]);
        }
        // Filler messages are not part of later requests, so no breakpoint is set after them.
        let fillers = [NEW_RESULTS, NOTHING_NEW].map(text_block);
        let filler = |message: &Value| fillers.contains(&message["content"][0]);
        if let Some(last) = self.messages.iter_mut().rev().find(|message| !filler(message))
            && let Some(block) = last["content"].as_array_mut().and_then(|blocks| blocks.last_mut())
        {
            set_cache_breakpoint(block);
        }
    }
}

fn block_json(block: &Block<'_>) -> Value {
    match block {
        Block::Text(text) => text_block(text),
        Block::Thought(thought) => thought_json(thought),
    }
}

fn thought_json(thought: &Thought) -> Value {
    match &thought.kind {
        ThoughtKind::Readable { text, signature } => {
            json!({"type": "thinking", "thinking": text, "signature": signature})
        }
        ThoughtKind::Redacted { data } => json!({"type": "redacted_thinking", "data": data}),
        ThoughtKind::Item { item } => Value::Object(item.clone()),
    }
}

fn part_json(part: &Part<'_>) -> Value {
    match part {
        Part::Text(text) => text_block(text),
        Part::Image(image) => json!({
            "type": "image",
            "source": {"type": "base64", "media_type": image.media_type, "data": image.data},
        }),
    }
}
