//! Requests for `/v1/messages`: Anthropic's API.
//!
//! User and assistant messages alternate. The results of a batch are at the beginning of the user message that follows.
//!
//! Cache breakpoints are set after the tools, the system prompt, the last answer that settled everything before it, and
//! the newest block. Everything up to a breakpoint is a prefix of every later request of the same history.
//!
//! If the model always thinks, the API accepts results only in a turn that begins with a thinking block. A turn that does
//! not, because the runtime or another model made its calls, is closed by a short assistant message, and a user
//! message starts another turn.

use serde_json::{Map, Value, json};

use super::messages::{Block, CONTINUE, Call, Part, PromptMessage, non_blank, turns};
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

/// Builds the request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let rules = ToolRules { dialect: Dialect::Anthropic, max_tools: MAX_TOOLS, render: tool };
    let (mut tools, omitted_tools) = rules.offer(prompt.tools, &mut names);
    let mut writer = Writer::new(names, prompt.thinking);
    let turns = turns(prompt);
    for turn in &turns {
        writer.turn(turn);
    }
    writer.finish();
    let calls = |turn: &PromptMessage<'_>| matches!(turn, PromptMessage::Assistant { calls, .. } if !calls.is_empty());
    if tools.is_empty() && turns.iter().any(calls) {
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
    /// How the current assistant turn began.
    turn_start: TurnStart,
    /// Message and block of the last answer at which everything before was settled.
    settled: Option<(usize, usize)>,
}

/// How an assistant turn, which includes its calls and their results, began.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TurnStart {
    /// It has not begun: the last message is the user's.
    Open,
    Thought,
    Other,
    /// It was closed by [`NOTED`]; a user message must follow.
    Closed,
}

impl Writer {
    fn new(names: Names, thinking: Thinking<'_>) -> Self {
        Writer {
            names,
            ids: Ids::new(ID_CHARS),
            messages: Vec::new(),
            results: Vec::new(),
            always_thinks: matches!(thinking, Thinking::Always { .. }),
            turn_start: TurnStart::Open,
            settled: None,
        }
    }

    fn turn(&mut self, turn: &PromptMessage<'_>) {
        match turn {
            PromptMessage::User(texts) => self.user(texts.iter().map(|text| text_block(text)).collect()),
            PromptMessage::Assistant { blocks, calls } => {
                self.push_results();
                self.assistant(blocks, calls);
            }
        }
    }

    fn assistant(&mut self, blocks: &[Block<'_>], calls: &[Call<'_>]) {
        if self.turn_start == TurnStart::Open {
            let thought = matches!(blocks.first(), Some(Block::Thought(_)));
            self.turn_start = if thought { TurnStart::Thought } else { TurnStart::Other };
        }
        let mut content: Vec<_> = blocks.iter().map(block_json).collect();
        // The answer made no calls; only the synthetic calls of later input may follow it in the same message.
        let settles = calls.first().is_none_or(|call| call.synthetic);
        if settles && matches!(blocks.last(), Some(Block::Text(_))) {
            self.settled = Some((self.messages.len(), content.len() - 1));
        }
        for call in calls {
            content.push(self.call(call));
        }
        self.messages.push(json!({"role": "assistant", "content": content}));
        if self.always_thinks && self.turn_start == TurnStart::Other && !calls.is_empty() {
            self.push_results();
            self.messages.push(json!({"role": "assistant", "content": [text_block(NOTED)]}));
            self.turn_start = TurnStart::Closed;
        }
    }

    /// Writes the results of the previous batch as a user message, so that an assistant message can follow.
    fn push_results(&mut self) {
        let texts =
            if self.turn_start == TurnStart::Closed { vec![text_block(CONTINUE)] } else { Vec::new() };
        self.user(texts);
    }

    fn user(&mut self, texts: Vec<Value>) {
        if !texts.is_empty() {
            self.turn_start = TurnStart::Open;
        }
        let mut content = std::mem::take(&mut self.results);
        content.extend(texts);
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": content}));
        }
    }

    fn call(&mut self, call: &Call<'_>) -> Value {
        let id = self.ids.fit(call.id);
        let content: Vec<_> = call.result.iter().map(result_json).collect();
        self.results.push(json!({"type": "tool_result", "tool_use_id": id, "content": content}));
        let input = Value::Object(call.arguments.clone().into_owned());
        json!({"type": "tool_use", "id": id, "name": self.names.fit(call.name), "input": input})
    }

    /// Writes the remaining results and sets the cache breakpoints in the messages.
    fn finish(&mut self) {
        self.push_results();
        if let Some((message, block)) = self.settled {
            set_cache_breakpoint(&mut self.messages[message]["content"][block]);
        }
        // Filler messages are not part of later requests, so no breakpoint is set after them.
        let filler = |message: &Value| message["content"][0] == text_block(CONTINUE);
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
        Block::Thought(Thought { kind: ThoughtKind::Readable { text, signature }, .. }) => {
            json!({"type": "thinking", "thinking": text, "signature": signature})
        }
        Block::Thought(Thought { kind: ThoughtKind::Redacted { data }, .. }) => {
            json!({"type": "redacted_thinking", "data": data})
        }
    }
}

fn result_json(part: &Part<'_>) -> Value {
    match part {
        Part::Text(text) => text_block(text),
        Part::Image(image) => json!({
            "type": "image",
            "source": {"type": "base64", "media_type": image.media_type, "data": image.data},
        }),
    }
}
