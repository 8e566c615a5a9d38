//! The scripted model: it does what it is told, for tests, demos and people without a key.
//!
//! Deterministic, and without any network. Either it obeys the last user message, or it replays a scenario
//! from a file, turn by turn.

mod scenario;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::prompt::SUMMARISE;
use rap_agent::{CallEntry, Entry, Item, Speaker, Usage, words};
use rap_io::client::Client;
use rap_protocol::{Body, CallId, Content};
use serde_json::Map;

pub use self::scenario::Error;
use self::scenario::{Scenario, Seconds};
use super::{Answer, Kind, Model, ModelCall, OnDelta, Options, Provider, Question, Wants, arguments};

/// How much of a result its line repeats, in characters.
const LINE_CHARS: usize = 4_000;
/// How many messages of the user a summary repeats, the first line of each.
const SUMMARISED: usize = 10;
/// What is answered behind the end of a scenario.
const ENDED: &str = "the script has ended";
/// What is answered where nobody said anything.
const NOTHING: &str = "there is nothing to answer";

/// What a configuration calls this model.
pub static PROVIDER: Provider = Provider { name: "scripted", kind: Kind::Local, build };

fn build(options: Options, _client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, super::Error> {
    let model = match options.script {
        Some(path) => Scripted::from_file(&path).map_err(|error| super::Error::refused(error.to_string()))?,
        None => Scripted::obedient(),
    };
    Ok(Arc::new(model))
}

/// The scripted model.
#[derive(Debug, Clone, Default)]
pub struct Scripted {
    scenario: Option<Scenario>,
}

/// What the model does in a turn.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    lines: Vec<String>,
    calls: Vec<ModelCall>,
    sleep: Duration,
}

impl Scripted {
    /// A model that obeys the last user message.
    ///
    /// A line `call NAME {json}` is a call, `say TEXT` is answered as text, `sleep SECONDS` delays the answer,
    /// anything else is echoed. Results are answered with a line each.
    pub fn obedient() -> Self {
        Scripted::default()
    }

    /// A model that replays the scenario in a file.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        Ok(Scripted { scenario: Some(Scenario::read(path)?) })
    }
}

#[async_trait]
impl Model for Scripted {
    async fn ask(&self, question: Question, on_delta: &mut OnDelta<'_>) -> Result<Answer, super::Error> {
        let plan = match &self.scenario {
            _ if is_to_summarise(&question.entries) => summarised(&question.entries),
            Some(scenario) => replay(scenario, question.turn),
            None => obey(&question.entries, question.turn),
        };
        if !plan.sleep.is_zero() {
            tokio::time::sleep(plan.sleep).await;
        }
        let text = plan.lines.join("\n").trim_matches('\n').to_owned();
        text.split_inclusive('\n').for_each(on_delta);
        let output = text.split_whitespace().count() + plan.calls.len();
        let usage = Usage { input: 0, output: output as u64, cached: 0 };
        Ok(Answer { text, calls: plan.calls, thoughts: None, usage })
    }

    fn wants(&self) -> Wants {
        if self.scenario.is_some() { Wants::Nothing } else { Wants::SinceLastUser }
    }

    fn destination(&self) -> &str {
        PROVIDER.name
    }
}

fn call_id(turn: u64, already: &[ModelCall]) -> String {
    format!("call_{turn}_{}", already.len() + 1)
}

fn replay(scenario: &Scenario, turn: u64) -> Plan {
    let Some(item) = scenario.turn(turn) else {
        return Plan { lines: vec![ENDED.into()], ..Plan::default() };
    };
    let mut calls = Vec::new();
    for call in &item.calls {
        let id = call_id(turn, &calls);
        calls.push(ModelCall { id, name: call.name.clone(), arguments: Ok(call.arguments.clone()) });
    }
    Plan { lines: item.say.iter().cloned().collect(), calls, sleep: item.sleep.0 }
}

fn is_to_summarise(entries: &[Entry]) -> bool {
    entries.last().and_then(|entry| said_by(&entry.item, Speaker::Runtime)) == Some(SUMMARISE)
}

/// What was said last, a line each.
fn summarised(entries: &[Entry]) -> Plan {
    let said: Vec<&str> = entries.iter().filter_map(|entry| said_by(&entry.item, Speaker::User)).collect();
    let line = |text: &&str| format!("- {}", text.lines().next().unwrap_or_default());
    let heading = format!("{} entries; the user said:", entries.len() - 1);
    let last = said[said.len().saturating_sub(SUMMARISED)..].iter().map(line);
    Plan { lines: std::iter::once(heading).chain(last).collect(), ..Plan::default() }
}

/// Answers the last user message, if it has not been answered yet, and the results that came after that.
fn obey(entries: &[Entry], turn: u64) -> Plan {
    let last_own = entries.iter().rposition(|entry| is_own(&entry.item));
    let last_said = entries.iter().rposition(|entry| said(&entry.item).is_some());
    let unanswered = last_said.filter(|said| last_own < Some(*said));
    let said = unanswered.and_then(|place| said(&entries[place].item));
    let mut plan = said.map(|text| instructed(text, turn)).unwrap_or_default();
    let since = &entries[last_own.max(last_said).unwrap_or(0)..];
    plan.lines.extend(since.iter().filter_map(|entry| result_line(&entry.item, entries)));
    if said.is_none() && plan.lines.is_empty() {
        let told = since.iter().rev().find_map(|entry| said_by(&entry.item, Speaker::Runtime));
        plan.lines.push(told.unwrap_or(NOTHING).into());
    }
    plan
}

/// Whether the model itself said it, and not the runtime in its name.
fn is_own(item: &Item) -> bool {
    let synthetic = |call: &CallEntry| call.arguments.is_synthetic();
    matches!(item, Item::Assistant { calls, .. } if !calls.iter().any(synthetic))
}

fn said_by(item: &Item, speaker: Speaker) -> Option<&str> {
    match item {
        Item::User { text, from } if *from == speaker => Some(text),
        _ => None,
    }
}

/// What a user or the parent thread said, and what a thread that was spawned is to do.
fn said(item: &Item) -> Option<&str> {
    match item {
        Item::Result { content: Body::Text(text), .. } => text.strip_prefix(words::CHILD_OPENING),
        item => said_by(item, Speaker::User).or_else(|| said_by(item, Speaker::Parent)),
    }
}

fn instructed(text: &str, turn: u64) -> Plan {
    let mut plan = Plan::default();
    for line in text.lines() {
        let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        match (word, rest.trim()) {
            ("call", call) if !call.is_empty() => {
                let id = call_id(turn, &plan.calls);
                plan.calls.push(call_of(id, call));
            }
            ("say", said) => plan.lines.push(said.into()),
            ("sleep", seconds) => match seconds.parse::<f64>().map(Seconds::try_from) {
                Ok(Ok(seconds)) => plan.sleep = plan.sleep.saturating_add(seconds.0),
                _ => plan.lines.push(line.into()),
            },
            _ => plan.lines.push(line.into()),
        }
    }
    plan
}

/// From `NAME {json}`; without any JSON there are no arguments.
fn call_of(id: String, text: &str) -> ModelCall {
    let (name, json) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let arguments = if json.trim().is_empty() { Ok(Map::new()) } else { arguments(json.trim()) };
    ModelCall { id, name: name.into(), arguments }
}

fn result_line(item: &Item, entries: &[Entry]) -> Option<String> {
    let Item::Result { call_id, content, .. } = item else { return None };
    if said(item).is_some() || *content == Body::Text(words::NOT_YOURS.into()) {
        return None;
    }
    let name = tool_of(call_id, entries).unwrap_or(call_id.as_str());
    let text = match content {
        Body::Text(text) => text.clone(),
        Body::Content(items) => items.iter().map(content_text).collect::<Vec<_>>().join(" "),
    };
    let words: Vec<_> = text.split_whitespace().collect();
    let mut line: String = words.join(" ");
    if let Some((end, _)) = line.char_indices().nth(LINE_CHARS) {
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
