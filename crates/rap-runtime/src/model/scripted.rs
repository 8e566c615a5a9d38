//! The scripted model, for tests, demos and users without an API key.
//!
//! It is deterministic and needs no network. It either follows the commands in the last user message, or replays a
//! scenario from a file, turn by turn.

mod scenario;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::prompt::SUMMARY_INSTRUCTIONS;
use rap_agent::{CallEntry, Entry, Item, Speaker, Usage, texts};
use rap_io::client::Client;
use rap_protocol::{Body, CallId, Content};
use serde_json::Map;

pub use self::scenario::Error;
use self::scenario::{Scenario, Seconds};
use super::{
    ArgumentMemory, HistoryScope, Kind, Model, ModelAnswer, ModelCall, ModelRequest, OnDelta, Options,
    Provider,
};

/// Length to which a result is truncated in an answer, in characters.
const RESULT_LINE_CHARS: usize = 4_000;
/// Maximum number of user messages in a summary, which contains the first line of each.
const SUMMARY_MESSAGES: usize = 10;
/// Answer after the end of a scenario.
const SCRIPT_ENDED: &str = "the script has ended";
/// Answer if there is no message.
const NOTHING_TO_ANSWER: &str = "there is nothing to answer";

/// The provider of the scripted model.
pub static PROVIDER: Provider = Provider { name: "scripted", kind: Kind::Local, build };

fn build(options: Options, _client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, super::Error> {
    let model = match options.script {
        Some(path) => Scripted::from_file(&path).map_err(|error| super::Error::refused(error.to_string()))?,
        None => Scripted::command_driven(),
    };
    Ok(Arc::new(model))
}

/// A model that follows commands or replays a scenario.
#[derive(Debug, Clone, Default)]
pub struct Scripted {
    scenario: Option<Scenario>,
}

/// Answer of the model in a turn.
#[derive(Debug, Default, PartialEq)]
struct TurnPlan {
    lines: Vec<String>,
    calls: Vec<ModelCall>,
    sleep: Duration,
}

impl Scripted {
    /// Returns a model that follows the commands in the last user message.
    ///
    /// A line `call NAME {json}` makes a call, `say TEXT` answers with the text, `sleep SECONDS` delays the answer. Any
    /// other line is echoed. Each result is answered with one line.
    pub fn command_driven() -> Self {
        Scripted::default()
    }

    /// Returns a model that replays the scenario in a file.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        Ok(Scripted { scenario: Some(Scenario::read(path)?) })
    }
}

#[async_trait]
impl Model for Scripted {
    async fn ask(
        &self,
        request: ModelRequest,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<ModelAnswer, super::Error> {
        let plan = match &self.scenario {
            _ if is_summary_request(&request.entries) => summarise(&request.entries),
            Some(scenario) => replay(scenario, request.turn),
            None => follow_messages(&request.entries, request.turn),
        };
        if !plan.sleep.is_zero() {
            tokio::time::sleep(plan.sleep).await;
        }
        let text = plan.lines.join("\n").trim_matches('\n').to_owned();
        text.split_inclusive('\n').for_each(on_delta);
        let output = text.split_whitespace().count() + plan.calls.len();
        let usage = Usage { output: output as u64, ..Usage::default() };
        Ok(ModelAnswer { text, calls: plan.calls, thoughts: None, usage })
    }

    fn history_scope(&self) -> HistoryScope {
        if self.scenario.is_some() { HistoryScope::None } else { HistoryScope::SinceLastUser }
    }

    fn name(&self) -> &str {
        PROVIDER.name
    }

    fn provider(&self) -> &str {
        PROVIDER.name
    }

    fn destination(&self) -> &str {
        PROVIDER.name
    }
}

fn call_id(turn: u64, already: &[ModelCall]) -> String {
    format!("call_{turn}_{}", already.len() + 1)
}

fn replay(scenario: &Scenario, turn: u64) -> TurnPlan {
    let Some(item) = scenario.turn(turn) else {
        return TurnPlan { lines: vec![SCRIPT_ENDED.into()], ..TurnPlan::default() };
    };
    let mut calls = Vec::new();
    for call in &item.calls {
        let id = call_id(turn, &calls);
        calls.push(ModelCall { id, name: call.name.clone(), arguments: Ok(call.arguments.clone()) });
    }
    TurnPlan { lines: item.say.iter().cloned().collect(), calls, sleep: item.sleep.0 }
}

fn is_summary_request(entries: &[Entry]) -> bool {
    entries.last().and_then(|entry| text_by(&entry.item, Speaker::Runtime)) == Some(SUMMARY_INSTRUCTIONS)
}

/// Lists the first lines of the last user messages.
fn summarise(entries: &[Entry]) -> TurnPlan {
    let messages: Vec<&str> =
        entries.iter().filter_map(|entry| text_by(&entry.item, Speaker::User)).collect();
    let line = |text: &&str| format!("- {}", text.lines().next().unwrap_or_default());
    let heading = format!("{} entries; the user said:", entries.len() - 1);
    let last = messages[messages.len().saturating_sub(SUMMARY_MESSAGES)..].iter().map(line);
    TurnPlan { lines: std::iter::once(heading).chain(last).collect(), ..TurnPlan::default() }
}

/// Answers the last user message, unless it was answered before, and the results after it.
fn follow_messages(entries: &[Entry], turn: u64) -> TurnPlan {
    let last_answer = entries.iter().rposition(|entry| is_model_answer(&entry.item));
    let last_message = entries.iter().rposition(|entry| message_text(&entry.item).is_some());
    let unanswered = last_message.filter(|message| last_answer < Some(*message));
    let message = unanswered.and_then(|index| message_text(&entries[index].item));
    let mut plan = message.map(|text| parse_commands(text, turn)).unwrap_or_default();
    let since = &entries[last_answer.max(last_message).unwrap_or(0)..];
    plan.lines.extend(since.iter().filter_map(|entry| result_line(&entry.item, entries)));
    if message.is_none() && plan.lines.is_empty() {
        let notice = since.iter().rev().find_map(|entry| text_by(&entry.item, Speaker::Runtime));
        plan.lines.push(notice.unwrap_or(NOTHING_TO_ANSWER).into());
    }
    plan
}

/// Returns true for an answer of the model, and false for synthetic calls of the runtime.
fn is_model_answer(item: &Item) -> bool {
    let synthetic = |call: &CallEntry| call.arguments.is_synthetic();
    matches!(item, Item::Assistant { calls, .. } if !calls.iter().any(synthetic))
}

fn text_by(item: &Item, speaker: Speaker) -> Option<&str> {
    match item {
        Item::User { text, from, .. } if *from == speaker => Some(text),
        _ => None,
    }
}

/// Returns the text of a message from a user or the parent thread, or the instructions of a spawned thread.
fn message_text(item: &Item) -> Option<&str> {
    match item {
        Item::Result { content: Body::Text(text), .. } => text.strip_prefix(texts::CHILD_INSTRUCTIONS_PREFIX),
        item => text_by(item, Speaker::User).or_else(|| text_by(item, Speaker::Parent)),
    }
}

fn parse_commands(text: &str, turn: u64) -> TurnPlan {
    let mut plan = TurnPlan::default();
    for line in text.lines() {
        let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        match (word, rest.trim()) {
            ("call", call) if !call.is_empty() => {
                let id = call_id(turn, &plan.calls);
                plan.calls.push(parse_call(id, call));
            }
            ("say", text) => plan.lines.push(text.into()),
            ("sleep", seconds) => match seconds.parse::<f64>().map(Seconds::try_from) {
                Ok(Ok(seconds)) => plan.sleep = plan.sleep.saturating_add(seconds.0),
                _ => plan.lines.push(line.into()),
            },
            _ => plan.lines.push(line.into()),
        }
    }
    plan
}

/// Parses `NAME {json}`. The JSON may be absent.
fn parse_call(id: String, text: &str) -> ModelCall {
    let (name, json) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let arguments =
        if json.trim().is_empty() { Ok(Map::new()) } else { ArgumentMemory::default().parse(json.trim()) };
    ModelCall { id, name: name.into(), arguments }
}

fn result_line(item: &Item, entries: &[Entry]) -> Option<String> {
    let Item::Result { call_id, content, .. } = item else { return None };
    if message_text(item).is_some() || *content == Body::Text(texts::HANDLED_BY_PARENT.into()) {
        return None;
    }
    let name = tool_of(call_id, entries).unwrap_or(call_id.as_str());
    let text = match content {
        Body::Text(text) => text.clone(),
        Body::Content(items) => items.iter().map(content_text).collect::<Vec<_>>().join(" "),
    };
    let words: Vec<_> = text.split_whitespace().collect();
    let mut line: String = words.join(" ");
    if let Some((end, _)) = line.char_indices().nth(RESULT_LINE_CHARS) {
        line.truncate(end);
        line.push('…');
    }
    Some(format!("{name}: {line}"))
}

fn content_text(content: &Content) -> &str {
    match content {
        Content::Text { text } => text,
        Content::Image(_) => "[image]",
    }
}

fn tool_of<'a>(id: &CallId, entries: &'a [Entry]) -> Option<&'a str> {
    let calls = entries.iter().rev().flat_map(|entry| match &entry.item {
        Item::Assistant { calls, .. } => calls.as_slice(),
        _ => &[],
    });
    calls.into_iter().find(|call| call.id == *id).map(|call| call.name.as_str())
}

#[cfg(test)]
mod tests;
