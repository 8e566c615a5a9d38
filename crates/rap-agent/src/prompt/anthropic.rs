//! Requests for `/v1/messages`: Anthropic's API.
//!
//! User and assistant alternate; the results of a batch stand at the beginning of the user's message behind it.
//!
//! What is marked for the provider's cache is a prefix of every later request of the same history: the tools, the
//! system prompt, the last answer that settled everything before it, and the last thing that is new.
//!
//! Where the model always thinks, the API takes the results of calls only in a turn that begins with a thought. A turn
//! that does not, because the runtime itself or another model made its calls, is closed by a word of the assistant, and
//! the user begins another one.

use serde_json::{Map, Value, json};

use super::names::Ids;
use super::schema::Dialect;
use super::turns::{CLOSING, Call, Part, Said, Turn, spoken, turns};
use super::{Names, Prompt, Request, Shelf, Thinking};
use crate::{Thought, ThoughtKind};

const NAME_CHARS: usize = 64;
const ID_CHARS: usize = 64;
const TOOLS: usize = 1_024;
/// Offered where the history has calls and nothing else is offered, which the API would refuse.
const NO_TOOL: &str = "no_tool_available";
/// Said for the assistant where a turn without a thought has to end.
const NOTED: &str = "(Noted.)";

/// The request for a prompt.
pub fn request(prompt: &Prompt<'_>) -> Request {
    let mut names = Names::new(NAME_CHARS);
    let shelf = Shelf { dialect: Dialect::Anthropic, most: TOOLS, render: tool };
    let (mut tools, left_out) = shelf.fill(prompt.tools, &mut names);
    let mut writer = Writer::new(names, prompt.thinking);
    let turns = turns(prompt);
    for turn in &turns {
        writer.turn(turn);
    }
    writer.end();
    let calls = |turn: &Turn<'_>| matches!(turn, Turn::Assistant { calls, .. } if !calls.is_empty());
    if tools.is_empty() && turns.iter().any(calls) {
        let schema = json!({"type": "object", "properties": {}});
        tools.push(tool(&writer.names.fit(NO_TOOL), "This is no tool. Do not call it.", schema));
    }
    let mut body = Map::new();
    body.insert("messages".into(), writer.messages.into());
    if let Some(last) = tools.last_mut() {
        cache(last);
        body.insert("tools".into(), tools.into());
    }
    if let Some(system) = spoken(prompt.system) {
        let mut system = text_block(&system);
        cache(&mut system);
        body.insert("system".into(), json!([system]));
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

/// The provider keeps what ends here.
fn cache(block: &mut Value) {
    block["cache_control"] = json!({"type": "ephemeral"});
}

struct Writer {
    names: Names,
    ids: Ids,
    messages: Vec<Value>,
    /// Results that the next message of the user begins with.
    results: Vec<Value>,
    /// Whether every turn with calls has to begin with a thought.
    thought_first: bool,
    /// Where the turn stands that is being written.
    begin: Begin,
    /// The message and the block behind which everything before was settled.
    settled: Option<(usize, usize)>,
}

/// How a turn of the assistant, which goes on over its calls and their results, has begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// Not yet: the user has spoken.
    Open,
    Thought,
    Other,
    /// It was closed by [`NOTED`], and the user has to speak.
    Closed,
}

impl Writer {
    fn new(names: Names, thinking: Thinking<'_>) -> Self {
        Writer {
            names,
            ids: Ids::new(ID_CHARS),
            messages: Vec::new(),
            results: Vec::new(),
            thought_first: matches!(thinking, Thinking::First { .. }),
            begin: Begin::Open,
            settled: None,
        }
    }

    fn turn(&mut self, turn: &Turn<'_>) {
        match turn {
            Turn::User(texts) => self.user(texts.iter().map(|text| text_block(text)).collect()),
            Turn::Assistant { said, calls } => {
                self.answer_results();
                self.assistant(said, calls);
            }
        }
    }

    fn assistant(&mut self, said: &[Said<'_>], calls: &[Call<'_>]) {
        if self.begin == Begin::Open {
            let thought = matches!(said.first(), Some(Said::Thought(_)));
            self.begin = if thought { Begin::Thought } else { Begin::Other };
        }
        let mut content: Vec<_> = said.iter().map(said_block).collect();
        // An answer that called nothing, with what woke the thread afterwards.
        let settles = calls.first().is_none_or(|call| call.synthetic);
        if settles && matches!(said.last(), Some(Said::Text(_))) {
            self.settled = Some((self.messages.len(), content.len() - 1));
        }
        for call in calls {
            content.push(self.call(call));
        }
        self.messages.push(json!({"role": "assistant", "content": content}));
        if self.thought_first && self.begin == Begin::Other && !calls.is_empty() {
            self.answer_results();
            self.messages.push(json!({"role": "assistant", "content": [text_block(NOTED)]}));
            self.begin = Begin::Closed;
        }
    }

    /// The results of the batch before, and nothing else, so that the assistant can go on.
    fn answer_results(&mut self) {
        let texts = if self.begin == Begin::Closed { vec![text_block(CLOSING)] } else { Vec::new() };
        self.user(texts);
    }

    fn user(&mut self, texts: Vec<Value>) {
        if !texts.is_empty() {
            self.begin = Begin::Open;
        }
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

    /// What is still to be said, and the marks for the cache.
    fn end(&mut self) {
        self.answer_results();
        if let Some((message, block)) = self.settled {
            cache(&mut self.messages[message]["content"][block]);
        }
        // What stands there only because something has to would not be there again.
        let filler = |message: &Value| message["content"][0] == text_block(CLOSING);
        if let Some(last) = self.messages.iter_mut().rev().find(|message| !filler(message))
            && let Some(block) = last["content"].as_array_mut().and_then(|blocks| blocks.last_mut())
        {
            cache(block);
        }
    }
}

fn said_block(said: &Said<'_>) -> Value {
    match said {
        Said::Text(text) => text_block(text),
        Said::Thought(Thought { kind: ThoughtKind::Open { text, signature }, .. }) => {
            json!({"type": "thinking", "thinking": text, "signature": signature})
        }
        Said::Thought(Thought { kind: ThoughtKind::Sealed { data }, .. }) => {
            json!({"type": "redacted_thinking", "data": data})
        }
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
