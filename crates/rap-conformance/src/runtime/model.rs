//! The model: it does what the marks in its prompt tell it, and shows what the runtime put into the prompt.
//!
//! It has no memory. Its answer follows from the prompt alone: every mark that something said, returned or happened
//! brings, and that no assistant message shows as done, is done now. So a question that is asked twice, after a crash
//! or because somebody spoke in between, is answered the same way twice.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::gate::Gate;
use super::stage::{Asked, Mark, Reply, Stage};
use super::tools::MARK;
use crate::{Exchange, Shown};

/// The built-in tool by which the model ends a subscription.
pub(crate) const CANCEL_SUBSCRIPTION: &str = "cancel_subscription";
/// How many messages at the end of a prompt a report shows.
const SHOWN: usize = 8;

/// What the model does about a mark.
#[derive(Debug, Clone, Default)]
pub(crate) struct Step {
    pub(crate) text: String,
    pub(crate) calls: Vec<ModelCall>,
    /// Holds the answer back.
    pub(crate) gate: Option<Gate>,
    /// First the question is refused with these.
    pub(crate) refusals: VecDeque<u16>,
}

/// A call as the model makes it.
#[derive(Debug, Clone)]
pub(crate) struct ModelCall {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: Value,
}

/// A call in a prompt with what follows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Told {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: Value,
    pub(crate) results: Vec<String>,
}

impl Told {
    /// The mark in its arguments. A synthetic call has that of the call it echoes.
    pub(crate) fn mark(&self) -> &str {
        self.arguments[MARK].as_str().unwrap_or_default()
    }
}

/// What the model was asked.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    messages: Vec<Value>,
    tools: Vec<Value>,
}

/// A request that brought a prompt.
#[derive(Debug, Clone)]
pub(crate) struct Question(Arc<Asked>);

impl Deref for Question {
    type Target = Prompt;

    fn deref(&self) -> &Prompt {
        self.0.prompt.as_ref().expect("bug: a question has a prompt")
    }
}

impl Question {
    pub(crate) fn of(asked: Arc<Asked>) -> Option<Question> {
        asked.prompt.is_some().then_some(Question(asked))
    }

    /// When it came.
    pub(crate) fn at(&self) -> Instant {
        self.0.at
    }

    /// The end of the prompt, which is what matters.
    pub(crate) fn exchange(&self) -> Exchange {
        let messages = &self.messages;
        let end = &messages[messages.len().saturating_sub(SHOWN)..];
        let shown = json!({"messages": end}).to_string();
        let answer = &self.0.reply;
        Exchange::new(
            Shown::new(format!("POST {}", self.0.path), shown.as_bytes()),
            Shown::new(answer.status.to_string(), &answer.body),
        )
    }
}

impl Prompt {
    pub(crate) fn of(body: &Value) -> Prompt {
        let list = |name: &str| body[name].as_array().cloned().unwrap_or_default();
        Prompt { messages: list("messages"), tools: list("tools") }
    }

    /// The parameters of a tool that the model was offered.
    pub(crate) fn offered(&self, name: &str) -> Option<&Value> {
        let found = self.tools.iter().find(|tool| tool["function"]["name"] == name)?;
        Some(&found["function"]["parameters"])
    }

    /// Whether any tool is offered: runtimes ask for titles and summaries without.
    pub(crate) fn is_turn(&self) -> bool {
        !self.tools.is_empty()
    }

    /// How many messages that are not the model's own hold these words.
    pub(crate) fn count(&self, words: &str) -> usize {
        self.heard().filter(|message| text(message).contains(words)).count()
    }

    pub(crate) fn has(&self, words: &str) -> bool {
        self.count(words) > 0
    }

    /// What was said, returned or happened.
    fn heard(&self) -> impl Iterator<Item = &Value> {
        self.messages.iter().filter(|message| message["role"] == "user" || message["role"] == "tool")
    }

    /// Every mark, whoever brought it.
    pub(crate) fn marks(&self, stage: &Stage) -> Vec<Mark> {
        self.heard().flat_map(|message| stage.marks(&text(message))).collect()
    }

    /// The marks that were brought and not yet done, in order.
    pub(crate) fn undone(&self, stage: &Stage) -> Vec<Mark> {
        let own = self.messages.iter().filter(|message| message["role"] == "assistant");
        let done: Vec<Mark> = own
            .flat_map(|message| stage.marks(&format!("{} {}", text(message), message["tool_calls"])))
            .collect();
        let mut undone = Vec::new();
        for mark in self.marks(stage) {
            if !done.contains(&mark) && !undone.contains(&mark) {
                undone.push(mark);
            }
        }
        undone
    }

    /// The calls in the history, each with the results that directly follow.
    pub(crate) fn calls(&self) -> Vec<Told> {
        let mut calls = Vec::new();
        for (at, message) in self.messages.iter().enumerate() {
            let results: Vec<&Value> =
                self.messages[at + 1..].iter().take_while(|message| message["role"] == "tool").collect();
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let of = |result: &&&Value| result["tool_call_id"] == call["id"];
                let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
                calls.push(Told {
                    id: call["id"].as_str().unwrap_or_default().into(),
                    name: call["function"]["name"].as_str().unwrap_or_default().into(),
                    arguments: serde_json::from_str(arguments).unwrap_or(Value::Null),
                    results: results.iter().filter(of).map(|result| text(result)).collect(),
                });
            }
        }
        calls
    }

    /// The call with this mark as the model made it. Synthetic calls that echo its arguments come after it.
    pub(crate) fn call_of(&self, mark: &str) -> Option<Told> {
        self.calls().into_iter().find(|call| call.mark() == mark)
    }

    /// The results of the call with this mark.
    pub(crate) fn results_of(&self, mark: &str) -> Vec<String> {
        self.call_of(mark).map(|call| call.results).unwrap_or_default()
    }

    /// The result of cancelling a subscription. Such a call has no argument for a mark.
    pub(crate) fn result_of_cancelling(&self, subscription: &str) -> Option<String> {
        let cancels =
            |call: &Told| call.name == CANCEL_SUBSCRIPTION && call.arguments["tool_call_id"] == *subscription;
        self.calls().into_iter().find(cancels)?.results.pop()
    }

    /// The call whose result holds these words.
    pub(crate) fn call_with_result(&self, words: &str) -> Option<Told> {
        self.calls().into_iter().find(|call| call.results.iter().any(|result| result.contains(words)))
    }

    /// What a model's server would refuse: calls without exactly their results behind them, results of nothing.
    pub(crate) fn fault(&self) -> Option<String> {
        let mut open: Vec<&str> = Vec::new();
        for message in &self.messages {
            if message["role"] == "tool" {
                let id = message["tool_call_id"].as_str().unwrap_or_default();
                let Some(at) = open.iter().position(|open| *open == id) else {
                    return Some(format!("a result of `{id}` stands where no such call waits for one"));
                };
                open.remove(at);
                continue;
            }
            if let Some(id) = open.first() {
                return Some(format!("`{id}` has no result directly behind it"));
            }
            let calls = message["tool_calls"].as_array().into_iter().flatten();
            open = calls.map(|call| call["id"].as_str().unwrap_or_default()).collect();
        }
        open.first().map(|id| format!("`{id}` has no result"))
    }
}

/// The text of a message, whether it stands there as one or in parts.
fn text(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

/// A refused question.
pub(crate) fn refusal(status: u16) -> Reply {
    let body = json!({"error": {"message": "the model is not available", "type": "server_error"}});
    Reply { status, ..Reply::json(&body) }
}

/// The answer that these steps make together, streamed if that was asked for.
pub(crate) fn answer(steps: &[&Step], request: &Value) -> Reply {
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

fn told(call: &ModelCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": call.id, "type": "function", "function": function})
}

fn whole(text: &str, calls: &[&ModelCall]) -> Reply {
    let mut message = json!({"role": "assistant", "content": text});
    if !calls.is_empty() {
        message["tool_calls"] = calls.iter().map(|call| told(call)).collect();
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
        let mut told = told(call);
        told["index"] = json!(index);
        deltas.push(json!({"tool_calls": [told]}));
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
