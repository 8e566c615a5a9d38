//! The model of the storm. It makes every call that a user has asked for and that is not in the conversation yet, so a lost
//! or repeated message leads to a missing or repeated call. Some answers fail.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use rap_testkit::Rng;
use rap_testkit::peer::{self, Reply, Request};
use serde_json::{Value, json};

/// Starts the model server. Returns its URL.
pub(crate) async fn start(seed: u64) -> String {
    let rng = Arc::new(Mutex::new(Rng(seed ^ 0x0DE1)));
    peer::serve(move |request| {
        let number = rng.lock().unwrap().below(100);
        async move { answer(&request, number) }
    })
    .await
}

/// Starts a model server that answers every request. Returns its URL.
pub(crate) async fn start_reliable() -> String {
    peer::serve(|request| async move { reliable_answer(&request) }).await
}

pub(crate) fn reliable_answer(request: &Request) -> Reply {
    answer(request, 99)
}

/// Lines of the configuration of a model at a URL.
pub(crate) fn lines(url: &str) -> String {
    format!(
        "provider = \"openai\"\nname = \"storm\"\napi_key = \"key\"\nbase_url = \"{url}/v1\"\nwindow = 100000"
    )
}

/// `number` is a random one from 0 to 99.
fn answer(request: &Request, number: usize) -> Reply {
    if !request.path.ends_with("/chat/completions") {
        return Reply::Status(404);
    }
    let stream = stream(&pending(&request.body));
    let body = |text: &str| {
        Reply::Full(200, Some(("content-type", "text/event-stream".into())), text.to_owned().into())
    };
    match number {
        0..4 => Reply::Status(500),
        4..6 => Reply::Full(429, Some(("retry-after", "0.1".into())), "busy".into()),
        // The connection ends in the middle of the answer.
        6..9 => body(&stream[..stream.len() / 2]),
        9 => Reply::Full(200, Some(("content-type", "text/html".into())), "<html>not a model</html>".into()),
        _ => body(&stream),
    }
}

/// Returns the calls, with their name and arguments, that users asked for and that no answer contains.
fn pending(body: &Value) -> Vec<(String, Value)> {
    let (mut wanted, mut made) = (Vec::new(), HashSet::new());
    for message in body["messages"].as_array().into_iter().flatten() {
        match message["role"].as_str() {
            Some("user") => wanted.extend(texts(&message["content"]).iter().flat_map(|text| requested(text))),
            Some("assistant") => {
                let calls = message["tool_calls"].as_array().into_iter().flatten();
                made.extend(calls.filter_map(|call| mark_of(call["function"]["arguments"].as_str()?)));
            }
            _ => {}
        }
    }
    let mut seen = HashSet::new();
    wanted.retain(|(_, arguments): &(String, Value)| {
        let mark = arguments["mark"].as_str().unwrap_or_default().to_owned();
        !made.contains(&mark) && seen.insert(mark)
    });
    wanted
}

fn mark_of(arguments: &str) -> Option<String> {
    let arguments: Value = serde_json::from_str(arguments).ok()?;
    Some(arguments["mark"].as_str()?.to_owned())
}

fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Returns the calls that a message asks for, in lines such as `call once {…}`.
fn requested(text: &str) -> Vec<(String, Value)> {
    let call = |line: &str| {
        let (name, arguments) = line.trim().strip_prefix("call ")?.split_once(' ')?;
        Some((name.to_owned(), serde_json::from_str(arguments).ok()?))
    };
    text.lines().filter_map(call).collect()
}

fn stream(calls: &[(String, Value)]) -> String {
    let delta = if calls.is_empty() {
        json!({"content": "noted"})
    } else {
        let call = |(index, (name, arguments)): (usize, &(String, Value))| {
            let function = json!({"name": name, "arguments": arguments.to_string()});
            json!({"index": index, "id": format!("c{index}"), "type": "function", "function": function})
        };
        json!({"tool_calls": calls.iter().enumerate().map(call).collect::<Vec<_>>()})
    };
    let finish = if calls.is_empty() { "stop" } else { "tool_calls" };
    let chunks = [
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}),
    ];
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect::<String>() + "data: [DONE]\n\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_that_are_not_in_the_conversation_are_made() {
        let call = |mark: &str| json!({"function": {"name": "once", "arguments": json!({"mark": mark}).to_string()}});
        let body = json!({"messages": [
            {"role": "user", "content": "call once {\"mark\": \"a\"}\ncall again {\"mark\": \"b\"}"},
            {"role": "assistant", "tool_calls": [call("a")]},
            {"role": "user", "content": [{"type": "text", "text": "call again {\"mark\": \"b\"}"}]},
        ]});
        assert_eq!(pending(&body), [("again".to_owned(), json!({"mark": "b"}))]);
    }
}
