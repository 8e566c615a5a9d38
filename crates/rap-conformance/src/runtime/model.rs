//! The scripted model: it runs the steps whose markers are in its prompt, and gives probes access to the prompts.
//!
//! The model has no state. It runs the step of every marker that is in a user message or a result of the prompt and not
//! yet in an assistant message. Therefore a request that is repeated, for example after a crash, gets the same answer.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::latch::Latch;
use super::mock_server::{Marker, MockServer, RecordedRequest, Reply};
use super::tools::MARKER;
use crate::{Exchange, RedactedMessage};

/// Built-in tool by which the model cancels a subscription.
pub(crate) const CANCEL_SUBSCRIPTION: &str = "cancel_subscription";
/// Number of messages at the end of a prompt that a report shows.
const SHOWN_MESSAGES: usize = 8;

/// Answer of the model to a marker.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScriptedStep {
    pub(crate) text: String,
    pub(crate) calls: Vec<ModelCall>,
    /// Holds the answer back until it is released.
    pub(crate) latch: Option<Latch>,
    /// Error statuses with which the first requests are answered.
    pub(crate) error_statuses: VecDeque<u16>,
}

/// Call in an answer of the model.
#[derive(Debug, Clone)]
pub(crate) struct ModelCall {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: Value,
}

/// Call in a prompt, with its results.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PromptCall {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: Value,
    pub(crate) results: Vec<String>,
}

impl PromptCall {
    /// Marker in the arguments. A synthetic call has the marker of the call that it echoes.
    pub(crate) fn marker(&self) -> &str {
        self.arguments[MARKER].as_str().unwrap_or_default()
    }
}

/// Messages and tools of a model request.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    messages: Vec<Value>,
    tools: Vec<Value>,
}

#[derive(Debug, Clone)]
pub(crate) struct ModelRequest(Arc<RecordedRequest>);

impl Deref for ModelRequest {
    type Target = Prompt;

    fn deref(&self) -> &Prompt {
        self.0.prompt.as_ref().expect("bug: a model request has a prompt")
    }
}

impl ModelRequest {
    pub(crate) fn of(request: Arc<RecordedRequest>) -> Option<ModelRequest> {
        request.prompt.is_some().then_some(ModelRequest(request))
    }

    /// Time of arrival.
    pub(crate) fn at(&self) -> Instant {
        self.0.at
    }

    /// The exchange, with the last messages of the prompt.
    pub(crate) fn exchange(&self) -> Exchange {
        let messages = &self.messages;
        let end = &messages[messages.len().saturating_sub(SHOWN_MESSAGES)..];
        let shown = json!({"messages": end}).to_string();
        let answer = &self.0.reply;
        Exchange::new(
            RedactedMessage::new(format!("POST {}", self.0.path), shown.as_bytes()),
            RedactedMessage::new(answer.status.to_string(), &answer.body),
        )
    }
}

impl Prompt {
    pub(crate) fn of(body: &Value) -> Prompt {
        let list = |name: &str| body[name].as_array().cloned().unwrap_or_default();
        Prompt { messages: list("messages"), tools: list("tools") }
    }

    /// Parameters of a tool; `None` if the tool is not offered to the model.
    pub(crate) fn offered(&self, name: &str) -> Option<&Value> {
        let found = self.tools.iter().find(|tool| tool["function"]["name"] == name)?;
        Some(&found["function"]["parameters"])
    }

    /// Number of tools with this name that are offered.
    pub(crate) fn offers(&self, name: &str) -> usize {
        self.tools.iter().filter(|tool| tool["function"]["name"] == name).count()
    }

    /// Returns true if any tool is offered. Runtimes request titles and summaries without tools.
    pub(crate) fn is_turn(&self) -> bool {
        !self.tools.is_empty()
    }

    /// Number of user messages and results that contain a text.
    pub(crate) fn count(&self, needle: &str) -> usize {
        self.inputs().filter(|message| text(message).contains(needle)).count()
    }

    pub(crate) fn has(&self, needle: &str) -> bool {
        self.count(needle) > 0
    }

    /// User messages and results.
    fn inputs(&self) -> impl Iterator<Item = &Value> {
        self.messages.iter().filter(|message| message["role"] == "user" || message["role"] == "tool")
    }

    /// Markers in user messages and results, in order.
    pub(crate) fn markers(&self, server: &MockServer) -> Vec<Marker> {
        self.inputs().flat_map(|message| server.markers(&text(message))).collect()
    }

    /// Markers in user messages and results that no assistant message contains, in order.
    pub(crate) fn pending_markers(&self, server: &MockServer) -> Vec<Marker> {
        let own = self.messages.iter().filter(|message| message["role"] == "assistant");
        let done: Vec<Marker> = own
            .flat_map(|message| server.markers(&format!("{} {}", text(message), message["tool_calls"])))
            .collect();
        let mut pending = Vec::new();
        for marker in self.markers(server) {
            if !done.contains(&marker) && !pending.contains(&marker) {
                pending.push(marker);
            }
        }
        pending
    }

    /// Calls of the history, each with the results that directly follow it.
    pub(crate) fn calls(&self) -> Vec<PromptCall> {
        let mut calls = Vec::new();
        for (at, message) in self.messages.iter().enumerate() {
            let results: Vec<&Value> =
                self.messages[at + 1..].iter().take_while(|message| message["role"] == "tool").collect();
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let of = |result: &&&Value| result["tool_call_id"] == call["id"];
                let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
                calls.push(PromptCall {
                    id: call["id"].as_str().unwrap_or_default().into(),
                    name: call["function"]["name"].as_str().unwrap_or_default().into(),
                    arguments: serde_json::from_str(arguments).unwrap_or(Value::Null),
                    results: results.iter().filter(of).map(|result| text(result)).collect(),
                });
            }
        }
        calls
    }

    /// The call with this marker that the model made. Synthetic calls with the same marker come after it.
    pub(crate) fn call_of(&self, marker: &str) -> Option<PromptCall> {
        self.calls().into_iter().find(|call| call.marker() == marker)
    }

    /// Results of the call with this marker.
    pub(crate) fn results_of(&self, marker: &str) -> Vec<String> {
        self.call_of(marker).map(|call| call.results).unwrap_or_default()
    }

    /// Result of the `cancel_subscription` call for a subscription. Such a call has no argument for a marker.
    pub(crate) fn result_of_cancelling(&self, subscription: &str) -> Option<String> {
        let cancels = |call: &PromptCall| {
            call.name == CANCEL_SUBSCRIPTION && call.arguments["tool_call_id"] == *subscription
        };
        self.calls().into_iter().find(cancels)?.results.pop()
    }

    /// The call that has a result with this text.
    pub(crate) fn call_with_result(&self, needle: &str) -> Option<PromptCall> {
        self.calls().into_iter().find(|call| call.results.iter().any(|result| result.contains(needle)))
    }

    /// Reason why a model API would reject the prompt: a call without its result after it, or a result without a call. A
    /// second result of a call is the failure of another probe.
    pub(crate) fn fault(&self) -> Option<String> {
        let (mut open, mut closed): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
        for message in &self.messages {
            if message["role"] == "tool" {
                let id = message["tool_call_id"].as_str().unwrap_or_default();
                let Some(at) = open.iter().position(|open| *open == id) else {
                    if closed.contains(&id) {
                        continue;
                    }
                    return Some(format!(
                        "there is a result of `{id}`, but no open call with this id before it"
                    ));
                };
                closed.push(open.remove(at));
                continue;
            }
            if let Some(id) = open.first() {
                return Some(format!("the call `{id}` has no result directly after it"));
            }
            let calls = message["tool_calls"].as_array().into_iter().flatten();
            open = calls.map(|call| call["id"].as_str().unwrap_or_default()).collect();
            closed.clear();
        }
        open.first().map(|id| format!("the call `{id}` has no result"))
    }
}

/// Text of a message whose content is a string or a list of parts.
fn text(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

/// Error answer of the model.
pub(crate) fn error_reply(status: u16) -> Reply {
    let body = json!({"error": {"message": "the model is not available", "type": "server_error"}});
    Reply { status, ..Reply::json(&body) }
}

/// Answer that combines these steps, streamed if the request asks for it.
pub(crate) fn answer(steps: &[&ScriptedStep], request: &Value) -> Reply {
    let texts: Vec<&str> =
        steps.iter().map(|step| step.text.as_str()).filter(|text| !text.is_empty()).collect();
    let text = if texts.is_empty() { "Noted.".to_owned() } else { texts.join("\n") };
    let offered = request["tools"].as_array().is_some_and(|tools| !tools.is_empty());
    let calls: Vec<&ModelCall> =
        if offered { steps.iter().flat_map(|step| &step.calls).collect() } else { Vec::new() };
    if request["stream"] == true { streamed(&text, &calls) } else { whole(&text, &calls) }
}

fn finish(calls: &[&ModelCall]) -> &'static str {
    if calls.is_empty() { "stop" } else { "tool_calls" }
}

fn tool_call(call: &ModelCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": call.id, "type": "function", "function": function})
}

fn whole(text: &str, calls: &[&ModelCall]) -> Reply {
    let mut message = json!({"role": "assistant", "content": text});
    if !calls.is_empty() {
        message["tool_calls"] = calls.iter().map(|call| tool_call(call)).collect();
    }
    let choice = json!({"index": 0, "message": message, "finish_reason": finish(calls)});
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2});
    let id = "chatcmpl-rapcheck";
    Reply::json(&json!({
        "id": id, "object": "chat.completion", "created": 1, "model": "rapcheck", "choices": [choice], "usage": usage,
    }))
}

fn streamed(text: &str, calls: &[&ModelCall]) -> Reply {
    let mut deltas = vec![json!({"role": "assistant", "content": text})];
    for (index, call) in calls.iter().enumerate() {
        let mut delta = tool_call(call);
        delta["index"] = json!(index);
        deltas.push(json!({"tool_calls": [delta]}));
    }
    let mut body = String::new();
    let mut event = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "chatcmpl-rapcheck", "object": "chat.completion.chunk", "created": 1, "model": "rapcheck",
            "choices": choices, "usage": usage,
        });
        body.push_str(&format!("data: {chunk}\n\n"));
    };
    for delta in deltas {
        event(json!([{"index": 0, "delta": delta, "finish_reason": null}]), Value::Null);
    }
    event(json!([{"index": 0, "delta": {}, "finish_reason": finish(calls)}]), Value::Null);
    event(json!([]), json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}));
    body.push_str("data: [DONE]\n\n");
    Reply { status: 200, kind: Some("text/event-stream"), body: body.into() }
}
