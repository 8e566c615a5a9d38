//! Text of tools, models and servers must not hide or forge what a person reads.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::fake::{Answer, EVENTS, FakeRuntime, Request, said, status, thread};
use crate::support::output;

/// Begins with a letter, since white space around a text is removed.
const HIDDEN: &str = "x\u{1b}[2J\u{9b}2J\u{8}\u{7f}\u{202e}\u{2066}\u{200f}\u{61c}\u{200b}\u{200d}\u{feff}\u{ad}\u{3164}\u{e0041}\u{e0100}\u{2028}\u{fff9}y";
const NOW: &str = "2026-01-01T00:00:00.000Z";

/// A thread whose texts all have hidden characters.
fn hostile_thread() -> Value {
    let mut thread = thread();
    for key in ["parent", "agent", "title", "why"] {
        thread[key] = json!(HIDDEN);
    }
    thread["status"] = json!("needs_you");
    let call = json!({"call_id": HIDDEN, "tool": HIDDEN, "since": NOW, "until": NOW, "problem": HIDDEN, "display": HIDDEN});
    thread["waiting_on"] = json!([call]);
    thread["subscriptions"] = json!([{"call_id": HIDDEN, "tool": HIDDEN, "since": NOW}]);
    thread["children"] = json!(1);
    thread
}

fn question() -> Value {
    json!({"thread_id": "t", "call_id": HIDDEN, "tool": HIDDEN, "asked_at": NOW, "kind": "choice", "prompt": HIDDEN,
        "choices": [HIDDEN, "b"], "default": 0, "arguments": {HIDDEN: HIDDEN}})
}

fn stream() -> String {
    let entry = |seq: u64, rest: Value| {
        let mut entry = json!({"seq": seq, "at": NOW});
        entry.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        format!("id: {seq}\nevent: entry\ndata: {entry}\n\n")
    };
    let call = json!({"id": HIDDEN, "name": HIDDEN, "arguments": {HIDDEN: HIDDEN}, "display": HIDDEN, "synthetic": false});
    let woken = json!({"id": "e", "name": HIDDEN, "arguments": {"kind": HIDDEN}, "synthetic": true});
    let sign_in = json!({"thread_id": "t", "call_id": HIDDEN, "tool": HIDDEN, "asked_at": NOW, "kind": "oauth",
        "auth_url": HIDDEN});
    [
        entry(1, json!({"kind": "user", "text": HIDDEN})),
        entry(2, json!({"kind": "assistant", "text": HIDDEN, "calls": [call, woken]})),
        entry(3, json!({"kind": "result", "call_id": HIDDEN, "content": HIDDEN, "display": [{"type": "text", "content": HIDDEN}]})),
        entry(4, json!({"kind": "result", "call_id": "e", "content": [{"type": "text", "text": HIDDEN}]})),
        entry(5, json!({"kind": "notice", "text": HIDDEN})),
        entry(6, json!({"kind": "summary", "text": HIDDEN, "covers": 1})),
        said(7, HIDDEN),
        format!("event: choice\ndata: {}\n\n", question()),
        format!("event: oauth\ndata: {sign_in}\n\n"),
        format!("event: notice\ndata: {}\n\n", json!({"text": HIDDEN})),
        format!("event: status\ndata: {}\n\n", json!({"status": "failed", "turn": 2, "why": HIDDEN})),
        status("closed"),
    ]
    .concat()
}

fn answer(request: &Request) -> Answer {
    let delivery = json!({"id": "1", "kind": "notification", "topic": HIDDEN, "thread_id": HIDDEN, "call_id": HIDDEN,
        "server": HIDDEN, "outcome": "refused", "attempts": 1, "first_at": NOW, "last_at": NOW, "next_at": null,
        "detail": HIDDEN});
    let call = json!({"thread_id": HIDDEN, "call_id": HIDDEN, "tool": HIDDEN, "server": HIDDEN, "since": NOW, "until": NOW,
        "acknowledged_at": null, "next_attempt_at": NOW, "attempts": 1, "last_attempt": HIDDEN});
    let timer = json!({"thread_id": HIDDEN, "call_id": HIDDEN, "tool": HIDDEN, "kind": "sleep", "at": NOW});
    let tool = json!({"name": HIDDEN, "description": HIDDEN, "inputSchema": {}, "annotations": {}});
    let body = match request.path.as_str() {
        "/v1/threads" => json!({"threads": [hostile_thread()]}),
        "/v1/threads/t" => hostile_thread(),
        "/v1/calls" => json!({"calls": [call]}),
        "/v1/subscriptions" => json!({"subscriptions": [call]}),
        "/v1/timers" => json!({"timers": [timer]}),
        "/v1/nodes" => {
            json!({"nodes": [{"id": HIDDEN, "url": HIDDEN, "started_at": NOW, "seen_at": NOW, "asking": 1, "invoking": 1}]})
        }
        "/v1/inbox" => json!({"items": [question()]}),
        "/v1/deliveries" => json!({"deliveries": [delivery]}),
        "/v1/deliveries/1" => delivery,
        "/v1/tools" => {
            json!({"servers": [{"url": HIDDEN, "name": HIDDEN, "version": HIDDEN, "tools": [tool], "errors": [HIDDEN]}]})
        }
        EVENTS => return Answer::stream(stream()),
        _ => {
            let error = json!({"error": {"code": "bad", "message": HIDDEN}});
            return Answer::new(400, error.to_string());
        }
    };
    Answer::new(200, body.to_string())
}

/// Returns the characters that must not be printed.
fn hidden_in(text: &str) -> Vec<char> {
    text.chars().filter(|c| HIDDEN[1..].contains(*c) && !c.is_ascii_graphic()).collect()
}

#[test]
fn no_command_prints_the_hidden_characters_of_others() {
    let runtime = FakeRuntime::start(answer);
    let commands = [
        "threads ls",
        "threads show t",
        "threads tail t --once",
        "threads send t hello",
        "threads fork t",
        "threads close t",
        "calls ls",
        "calls cancel t c",
        "subs ls",
        "timers ls",
        "nodes ls",
        "inbox ls",
        "inbox answer t c 1",
        "deliveries ls",
        "deliveries show 1",
        "deliveries redeliver 1",
        "tools ls",
        "chat t",
    ];
    let json = [
        "threads ls",
        "threads show t",
        "threads tail t --once",
        "inbox ls",
        "deliveries show 1",
        "tools ls",
    ];
    let json = json.map(|command| (format!("{command} --json"), "\\u202e"));
    for (command, shown) in commands.map(|command| (command.to_owned(), "\\u{202e}")).into_iter().chain(json)
    {
        let words: Vec<&str> = command.split(' ').collect();
        let output = output(runtime.command(&words).stdin(Stdio::null()));
        let text = format!("{}{}", output.out, output.err);
        assert!(hidden_in(&text).is_empty(), "rap {command}: {text:?}");
        // On a pipe, a chat shows only what is new.
        assert!(text.contains(shown) || command == "chat t", "rap {command}: {text}");
    }
}
