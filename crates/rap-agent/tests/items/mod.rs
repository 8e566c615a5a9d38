//! Short constructors of history entries, for the tests of prompts.

#![allow(dead_code, reason = "each test program uses a different part of this module")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use rap_agent::prompt::Request;
use rap_agent::texts::event_kind;
use rap_agent::{Arguments, CallEntry, Entry, Item, Thought, ThoughtKind, Thoughts};
use rap_protocol::{Body, CallId, Content, Image, Timestamp};
use serde_json::Value;

pub fn id(text: &str) -> CallId {
    CallId::new(text).unwrap()
}

pub fn entries(items: Vec<Item>) -> Vec<Entry> {
    items.into_iter().map(|item| Entry { at: Timestamp(0), item }).collect()
}

pub fn answer(text: &str) -> Item {
    Item::assistant(text, Vec::new())
}

pub fn calls(text: &str, calls: Vec<CallEntry>) -> Item {
    Item::assistant(text, calls)
}

/// An answer with a readable thinking block at each of these positions in its text, by model `m`.
pub fn answer_with_thinking(text: &str, positions: &[usize], calls: Vec<CallEntry>) -> Item {
    let kind = |at| ThoughtKind::Readable { text: format!("thought {at}"), signature: "sig".into() };
    let parts = positions.iter().map(|at| Thought { at: *at, calls: 0, kind: kind(at) }).collect();
    let thoughts = Thoughts { model: "m".into(), parts, ..Thoughts::default() };
    Item::Assistant { text: text.into(), calls, thoughts: Some(thoughts), usage: None }
}

pub fn call(call_id: &str, name: &str, arguments: Value) -> CallEntry {
    let Value::Object(arguments) = arguments else { panic!("not an object") };
    call_with(call_id, name, Arguments::Given(arguments))
}

pub fn call_with(call_id: &str, name: &str, arguments: Arguments) -> CallEntry {
    CallEntry { id: id(call_id), model_id: None, name: name.into(), arguments, display: None }
}

pub fn synthetic_call(call_id: &str, of: &str, arguments: Option<Value>) -> CallEntry {
    let arguments = arguments.map(|value| value.as_object().unwrap().clone());
    let arguments = Arguments::Synthetic { of: id(of), kind: event_kind(&id(of)), arguments };
    call_with(call_id, "echoed", arguments)
}

pub fn returns(call_id: &str, content: Body) -> Item {
    Item::Result { call_id: id(call_id), content, display: Vec::new(), synthetic: false }
}

pub fn result(call_id: &str, text: &str) -> Item {
    returns(call_id, Body::Text(text.into()))
}

pub fn image(media_type: &str) -> Content {
    Content::Image(Image { data: "aGk=".into(), media_type: media_type.into() })
}

pub fn body(request: Request) -> Value {
    Value::Object(request.body)
}

pub fn without_cache_breakpoints(body: Value) -> Value {
    let text = body.to_string();
    let mark = "\"cache_control\":{\"type\":\"ephemeral\"}";
    serde_json::from_str(&text.replace(&format!("{mark},"), "").replace(&format!(",{mark}"), "")).unwrap()
}
