//! Formats history entries as lines for people.

use std::collections::HashMap;
use std::time::Duration;

use anstyle::Style;
use rap_agent::texts;
use rap_api::{Call, ChildEvent, Entry, Item, Sender, Time, display_text};
use serde_json::Value;

use crate::table::{CYAN, DIM, GREEN, YELLOW, cut, one_line, plain, styled};
use crate::time_format::precise_duration;

/// Maximum width of arguments and of a line of a result.
const SHORT: usize = 200;

/// Maximum number of lines of a display text.
const LINES: usize = 20;

/// The duration of a call is shown from this value on.
const LONG: Duration = Duration::from_secs(1);

/// Formats entries. It remembers the tool name and the time of each call, to show them with the result.
#[derive(Debug, Default)]
pub struct Transcript {
    calls: HashMap<String, (String, Time)>,
}

/// A line of the transcript.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// `you`, `agent`, `parent`, `call`, `result`, `woken`, `event`, `child`, `view` or `note`.
    pub who: &'static str,
    pub what: String,
}

impl Line {
    /// Returns the line as it is printed: `who` in a column of its own, further lines indented.
    pub fn render(&self) -> String {
        let indented = self.what.replace('\n', "\n        ");
        format!("{}{:pad$}{indented}", styled(colour(self.who), self.who), "", pad = 8 - self.who.len())
    }
}

fn colour(who: &str) -> Style {
    match who {
        "you" | "parent" => CYAN,
        "agent" => GREEN,
        "woken" | "event" => YELLOW,
        _ => DIM,
    }
}

impl Transcript {
    pub fn lines(&mut self, entry: &Entry) -> Vec<Line> {
        match &entry.item {
            Item::User { text, content, from: None } => {
                vec![Line { who: "you", what: with_content(plain(text), content) }]
            }
            Item::User { text, from: Some(Sender::Parent), .. } => {
                vec![Line { who: "parent", what: plain(text) }]
            }
            Item::User { text, from: Some(_), .. } | Item::Notice { text } => {
                vec![Line { who: "note", what: plain(text) }]
            }
            Item::Assistant { text, calls, .. } => {
                let said = (!text.is_empty()).then(|| Line { who: "agent", what: plain(text) });
                let called: Vec<Line> = calls.iter().map(|call| self.call(call, entry.at)).collect();
                said.into_iter().chain(called).collect()
            }
            Item::Result { call_id, content, display, .. } => {
                let text = content.to_text();
                // The first result in a child thread carries the instructions of its parent.
                if let Some(instructions) = text.strip_prefix(texts::CHILD_INSTRUCTIONS_PREFIX) {
                    return vec![Line { who: "parent", what: plain(instructions) }];
                }
                let shown = display_text(display).map_or_else(|| short(&text), |text| block(&text));
                vec![self.result(call_id, &shown, entry.at)]
            }
            Item::Summary { text, covers } => {
                let what = format!("a summary replaces entries 1 to {covers}: {}", short(text));
                vec![Line { who: "note", what }]
            }
            Item::Unknown => Vec::new(),
        }
    }

    fn call(&mut self, call: &Call, at: Time) -> Line {
        let Call { id, name, .. } = call;
        self.calls.insert(id.clone(), (name.clone(), at));
        if call.synthetic {
            return Line { who: "woken", what: format!("by {}", wake_reason(call)) };
        }
        let shown = match call.display.as_str() {
            "" => format!("{name}({})", call.arguments),
            shown => shown.to_owned(),
        };
        Line { who: "call", what: format!("{} ({})", short(&shown), one_line(id)) }
    }

    fn result(&self, call: &str, text: &str, at: Time) -> Line {
        let made = self.calls.get(call);
        let tool = made.map_or(call, |(tool, _)| tool.as_str());
        let took = made.map(|(_, since)| at.since(*since)).filter(|took| *took >= LONG);
        let took = took.map_or(String::new(), |took| format!(" after {}", precise_duration(took)));
        Line { who: "result", what: format!("{}{took}: {text}", one_line(tool)) }
    }
}

/// Adds the further content of a message: its texts, and a word for each image.
fn with_content(text: String, content: &[Value]) -> String {
    let item = |item: &Value| match item["text"].as_str() {
        Some(text) => plain(text),
        None => format!("[image: {}]", one_line(item["mediaType"].as_str().unwrap_or("unknown type"))),
    };
    let parts = std::iter::once(text).chain(content.iter().map(item));
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Describes a child that was spawned: for events, or by the model.
pub fn child_line(child: &ChildEvent) -> Line {
    let id = one_line(&child.thread_id);
    let title = short(child.title.as_deref().unwrap_or_default());
    if child.tool == texts::SPAWN_THREAD {
        return Line { who: "child", what: format!("{id}: {title}") };
    }
    let title = title.strip_prefix("event ").unwrap_or(&title);
    Line { who: "event", what: format!("{title} (child {id})") }
}

/// Returns the beginning of a text on one line. The rest, which may be large, is not read.
fn short(text: &str) -> String {
    let beginning: String = text.trim_start().chars().take(4 * SHORT).collect();
    cut(&one_line(&beginning), SHORT)
}

/// Returns the first lines of a display text.
fn block(text: &str) -> String {
    let text = plain(text);
    let all = text.trim_end().lines().count();
    let mut lines: Vec<String> = text.lines().take(LINES).map(|line| cut(line, SHORT)).collect();
    if all > LINES {
        lines.push(format!("… and {} more lines", all - LINES));
    }
    lines.join("\n").trim_end().to_owned()
}

/// Describes what a synthetic call reports.
fn wake_reason(call: &Call) -> String {
    let (kind, name) = (call.arguments["kind"].as_str().unwrap_or(""), one_line(&call.name));
    if let Some((_, child)) = kind.split_once(" (report of thread ") {
        format!("a report of thread {}", one_line(child.trim_end_matches(')')))
    } else if name == texts::SCHEDULE && kind.contains(" (subscription ") {
        "its schedule".into()
    } else if kind.ends_with("(subscription has ended)") {
        format!("the last event of {name}")
    } else if kind.ends_with("(subscription remains active)") {
        format!("an event of {name}")
    } else {
        format!("the late result of {name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(entries: &[Value], expected: &[&str]) {
        let mut transcript = Transcript::default();
        let mut lines = Vec::new();
        for (seq, entry) in entries.iter().enumerate() {
            let mut entry = entry.clone();
            entry["seq"] = json!(seq);
            entry["at"] = json!("1970-01-01T00:00:00.000Z");
            lines.extend(transcript.lines(&serde_json::from_value(entry).unwrap()));
        }
        let lines: Vec<String> =
            lines.iter().map(|line| anstream::adapter::strip_str(&line.render()).to_string()).collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn display_texts_are_shown() {
        let result = |display: Value| json!({"kind": "result", "call_id": "c1", "content": "for the model", "display": display});
        let call =
            json!({"id": "c1", "name": "edit", "arguments": {"path": "a"}, "display": "Edit\na\u{1b}[2J"});
        let text = json!({"type": "text", "content": "two\nlines\u{1b}[2J"});
        let diff = json!({"type": "diff", "content": {"path": "a", "patch": "-1\n+2\n"}});
        let image = json!({"type": "image", "content": {"data": "aGk=", "mediaType": "image/png"}});
        let long: String = (1..=30).map(|line| format!("{line}\n")).collect();
        let shown: String = (2..=20).map(|line| format!("\n        {line}")).collect();
        check(
            &[
                json!({"kind": "assistant", "text": "", "calls": [call]}),
                result(json!([text, diff])),
                result(json!([image, diff])),
                result(json!([image, {"type": "of a later version"}])),
                result(json!([{"type": "text", "content": long}])),
            ],
            &[
                "call    Edit a\\u{1b}[2J (c1)",
                "result  edit: two\n        lines\\u{1b}[2J",
                "result  edit: a\n        -1\n        +2",
                "result  edit: for the model",
                &format!("result  edit: 1{shown}\n        … and 10 more lines"),
            ],
        );
    }

    #[test]
    fn entries_become_lines() {
        let call = json!({"id": "c1", "name": "slow", "arguments": {"seconds": 2}, "synthetic": false});
        let event = |kind: &str| {
            json!({"kind": "assistant", "text": "", "calls": [{"id": "e", "name": "tick",
            "arguments": {"kind": kind}, "synthetic": true}]})
        };
        check(
            &[
                json!({"kind": "user", "text": "hi\nthere"}),
                json!({"kind": "user", "text": "look", "content": [
                    {"type": "image", "data": "aGk=", "mediaType": "image/png"}, {"type": "text", "text": "here"}]}),
                json!({"kind": "user", "text": "an event", "from": "runtime"}),
                json!({"kind": "assistant", "text": "I call.", "calls": [call]}),
                json!({"kind": "result", "call_id": "c1", "content": [{"type": "text", "text": "a\x1b[2J"}]}),
                json!({"kind": "result", "call_id": "c2", "content": "b"}),
                event("interrupt:c1 (subscription remains active)"),
                event("interrupt:c1 (subscription has ended)"),
                event("interrupt:c1 (result of a call that was still running)"),
                json!({"kind": "summary", "text": "much\nwas said", "covers": 7}),
                json!({"kind": "notice", "text": "n"}),
                json!({"kind": "of a later version"}),
            ],
            &[
                "you     hi\n        there",
                "you     look [image: image/png] here",
                "note    an event",
                "agent   I call.",
                "call    slow({\"seconds\":2}) (c1)",
                "result  slow: a\\u{1b}[2J",
                "result  c2: b",
                "woken   by an event of tick",
                "woken   by the last event of tick",
                "woken   by the late result of tick",
                "note    a summary replaces entries 1 to 7: much was said",
                "note    n",
            ],
        );
    }

    #[test]
    fn reports_schedules_and_parent_messages_become_lines() {
        let report = json!({"id": "r", "name": "spawn_thread", "synthetic": true,
            "arguments": {"kind": "interrupt:c1 (report of thread t2)", "instructions": "look"}});
        let tick = json!({"id": "s", "name": "schedule", "synthetic": true,
            "arguments": {"kind": "interrupt:c1 (subscription remains active)", "cron": "* * * * *"}});
        let opening = format!("{}Look\nit up.", texts::CHILD_INSTRUCTIONS_PREFIX);
        check(
            &[
                json!({"kind": "assistant", "text": "", "calls": [report]}),
                json!({"kind": "result", "call_id": "r", "content": "found it"}),
                json!({"kind": "assistant", "text": "", "calls": [tick]}),
                json!({"kind": "user", "text": "hurry", "from": "parent"}),
                json!({"kind": "result", "call_id": "c", "content": opening}),
            ],
            &[
                "woken   by a report of thread t2",
                "result  spawn_thread: found it",
                "woken   by its schedule",
                "parent  hurry",
                "parent  Look\n        it up.",
            ],
        );
    }
}
