//! A fake Anthropic server: the test sets its answers and reads its requests.

use std::ops::Deref;

use serde_json::{Value, json};

use crate::ids::short;
use crate::peer::{Peer, Reply};

const PATH: &str = "/v1/messages";

pub struct AnthropicServer {
    peer: Peer,
}

impl Deref for AnthropicServer {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl AnthropicServer {
    pub async fn start() -> AnthropicServer {
        AnthropicServer { peer: Peer::start().await }
    }

    /// Lines for `[model]` in the configuration.
    pub fn lines(&self) -> String {
        format!(
            "provider = \"anthropic\"\nname = \"claude\"\napi_key = \"sk-ant-key\"\nbase_url = \"{}\"\nthinking = 1024",
            self.url
        )
    }

    pub fn answer(&self, reply: Reply) {
        self.answer_next(PATH, reply);
    }

    /// Sets the next answer: a thinking block and this text.
    pub fn says(&self, text: &str) {
        let (begin, end) = text.split_at(text.len() / 2);
        self.answer(whole(&[thought(), text_block(1, &[begin, end])].concat(), "end_turn"));
    }

    /// Sets the next answer: a thinking block and these calls (id, name, arguments), streamed in pieces.
    pub fn calls(&self, calls: &[(&str, &str, Value)]) {
        let mut all = thought();
        for (index, (id, name, arguments)) in (1..).zip(calls) {
            let arguments = arguments.to_string();
            let (begin, end) = arguments.split_at(arguments.len() / 2);
            let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            let pieces = [begin, end].map(|piece| json!({"type": "input_json_delta", "partial_json": piece}));
            all.extend(block_of(index, block, &pieces));
        }
        self.answer(whole(&all, "tool_use"));
    }

    /// Sets the next answer: it begins with this text and never ends.
    pub fn begins(&self, text: &str) {
        let mut begun = text_block(0, &[text]);
        begun.pop();
        begun.insert(0, begin());
        self.answer(Reply::Begin(stream(&begun).into()));
    }

    /// Waits for the next model request and returns its body.
    pub async fn question(&self) -> Value {
        self.next(PATH).await.body
    }

    pub fn questions(&self) -> usize {
        self.count(PATH)
    }
}

fn begin() -> Value {
    let usage = json!({"input_tokens": 2, "cache_creation_input_tokens": 8, "cache_read_input_tokens": 90,
        "output_tokens": 1});
    json!({"type": "message_start", "message": {"role": "assistant", "content": [], "usage": usage}})
}

fn block_of(index: u64, block: Value, deltas: &[Value]) -> Vec<Value> {
    let mut all = vec![json!({"type": "content_block_start", "index": index, "content_block": block})];
    let delta = |delta: &Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
    all.extend(deltas.iter().map(delta));
    all.push(json!({"type": "content_block_stop", "index": index}));
    all
}

fn text_block(index: u64, pieces: &[&str]) -> Vec<Value> {
    let pieces: Vec<_> = pieces.iter().map(|piece| json!({"type": "text_delta", "text": piece})).collect();
    block_of(index, json!({"type": "text", "text": ""}), &pieces)
}

fn thought() -> Vec<Value> {
    let thinking = json!({"type": "thinking_delta", "thinking": "Hm."});
    let signature = json!({"type": "signature_delta", "signature": "c2ln"});
    block_of(0, json!({"type": "thinking", "thinking": "", "signature": ""}), &[thinking, signature])
}

fn whole(blocks: &[Value], reason: &str) -> Reply {
    let mut all = vec![begin()];
    all.extend_from_slice(blocks);
    all.push(
        json!({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 3}}),
    );
    all.push(json!({"type": "message_stop"}));
    Reply::Full(200, Some(("content-type", "text/event-stream".into())), stream(&all).into())
}

fn stream(events: &[Value]) -> String {
    events.iter().map(|data| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap())).collect()
}

/// Formats each message of a request in one line: role and blocks.
pub fn messages(question: &Value) -> Vec<String> {
    let block = |block: &Value| {
        let text = |key: &str| block[key].as_str().unwrap_or_default().to_owned();
        match block["type"].as_str().unwrap() {
            "text" => text("text"),
            "thinking" => format!("<{}>", text("thinking")),
            "tool_use" => format!("{}={}{}", text("id"), text("name"), block["input"]),
            "tool_result" => {
                let parts = block["content"].as_array().unwrap().iter();
                let parts: Vec<_> = parts.map(|part| part["text"].as_str().unwrap_or("[image]")).collect();
                format!("{}: {}", text("tool_use_id"), parts.join(" "))
            }
            other => panic!("a block of type {other}"),
        }
    };
    let message = |message: &Value| {
        let blocks: Vec<_> = message["content"].as_array().unwrap().iter().map(block).collect();
        format!("{} {}", message["role"].as_str().unwrap(), blocks.join(" | "))
    };
    question["messages"].as_array().unwrap().iter().map(message).map(|line| short(&line)).collect()
}
