//! A fake OpenAI server: the test sets its answers and reads its requests.

use std::ops::Deref;

use serde_json::{Value, json};

use crate::ids::short;
use crate::peer::{Peer, Reply};

const PATH: &str = "/v1/chat/completions";

pub struct ModelServer {
    peer: Peer,
}

impl Deref for ModelServer {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl ModelServer {
    pub async fn start() -> ModelServer {
        ModelServer { peer: Peer::start().await }
    }

    /// Lines for `[model]` in the configuration.
    pub fn lines(&self) -> String {
        self.lines_with_key("sk-key")
    }

    pub fn lines_with_key(&self, key: &str) -> String {
        format!("provider = \"openai\"\nname = \"gpt\"\napi_key = {key:?}\nbase_url = \"{}/v1\"", self.url)
    }

    pub fn answer(&self, reply: Reply) {
        self.answer_next(PATH, reply);
    }

    /// Sets the next answer: this text, streamed in pieces.
    pub fn says(&self, text: &str) {
        let (begin, end) = text.split_at(text.len() / 2);
        self.answer(stream(&[delta(json!({"content": begin})), delta(json!({"content": end}))], "stop"));
    }

    /// Like [`ModelServer::says`], with this number of prompt tokens in the usage.
    pub fn says_to(&self, read: u64, text: &str) {
        self.answer(stream_with_usage(&[delta(json!({"content": text}))], "stop", read));
    }

    /// Sets the next answer: these calls (id, name, arguments), streamed in pieces.
    pub fn calls(&self, calls: &[(&str, &str, Value)]) {
        let mut chunks = Vec::new();
        for (index, (id, name, _)) in calls.iter().enumerate() {
            let function = json!({"name": name, "arguments": ""});
            let call = json!({"index": index, "id": id, "type": "function", "function": function});
            chunks.push(delta(json!({"tool_calls": [call]})));
        }
        for (index, (_, _, arguments)) in calls.iter().enumerate() {
            let text = arguments.to_string();
            let (begin, end) = text.split_at(text.len() / 2);
            for piece in [begin, end] {
                let call = json!({"index": index, "function": {"arguments": piece}});
                chunks.push(delta(json!({"tool_calls": [call]})));
            }
        }
        self.answer(stream(&chunks, "tool_calls"));
    }

    /// Waits for the next model request and returns its body.
    pub async fn question(&self) -> Value {
        self.next(PATH).await.body
    }

    /// Waits for the next model request and returns its messages, one line each.
    pub async fn messages(&self) -> Vec<String> {
        messages(&self.question().await)
    }

    pub fn questions(&self) -> usize {
        self.count(PATH)
    }
}

fn delta(delta: Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn stream(chunks: &[Value], finish: &str) -> Reply {
    stream_with_usage(chunks, finish, 10)
}

fn stream_with_usage(chunks: &[Value], finish: &str, read: u64) -> Reply {
    let mut all = chunks.to_vec();
    all.push(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}));
    all.push(json!({"choices": [], "usage": {"prompt_tokens": read, "completion_tokens": 3}}));
    let body = all.iter().map(|chunk| format!("data: {chunk}\n\n")).collect::<String>() + "data: [DONE]\n\n";
    Reply::Full(200, Some(("content-type", "text/event-stream".into())), body.into())
}

/// Formats each message of a request in one line: role and content, its calls, or the call that it answers.
pub fn messages(question: &Value) -> Vec<String> {
    let line = |message: &Value| {
        let role = message["role"].as_str().unwrap();
        let content = message["content"].as_str().unwrap_or_default();
        let call = |call: &Value| {
            let function = &call["function"];
            let [name, arguments] = ["name", "arguments"].map(|key| function[key].as_str().unwrap());
            format!("{}={name}{arguments}", call["id"].as_str().unwrap())
        };
        match (message["tool_calls"].as_array(), message["tool_call_id"].as_str()) {
            (Some(calls), _) => {
                let calls = calls.iter().map(call).collect::<Vec<_>>().join(" ");
                let said = if content.is_empty() { String::new() } else { format!(" says {content}") };
                format!("{role}{said} calls {calls}")
            }
            (None, Some(id)) => format!("{role} {id}: {content}"),
            (None, None) => format!("{role}: {content}"),
        }
    };
    question["messages"].as_array().unwrap().iter().map(line).map(|line| short(&line)).collect()
}
