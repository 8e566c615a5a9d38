//! Following a thread whose event stream is large, slow or often interrupted.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{Answer, EVENTS, FakeRuntime, Request, said, status, thread};
use crate::support::{Running, Runtime, plain};

const MIB: usize = 1024 * 1024;
const MESSAGES: &str = "/v1/threads/t/messages";
const ACCEPTED: (u16, &str) = (202, r#"{"turn": 1}"#);
const LOST: &str = "connection lost; reconnecting\n";
/// The first delays between attempts.
const DELAYS: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_millis(1000)];

#[test]
fn a_result_of_eight_mebibytes_and_the_entries_after_it_are_read() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "--id", "t"]);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("call large\nsay after it\n");
    for follower in [&mut chat, &mut tail] {
        follower.expect(": \"\\u{1}\\x\"\\u{1}\\x");
        follower.expect("agent   after it\n");
    }
    chat.end_input();
    assert_eq!(chat.exit(), Some(0));
    assert!(!plain(&chat.seen).contains("connect"), "{}", chat.seen.len());
    let entries = runtime.ok(&["threads", "tail", "t", "--once", "--json"]);
    let entries: Vec<Value> = entries.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(entries[2].to_string().len() > 7 * MIB);
    assert_eq!(entries[5]["text"], "after it");
    let answer = runtime.ok(&["threads", "send", "t", "say once more", "--wait"]);
    assert_eq!(answer, "once more\n");
}

/// Checks that the time between requests is at least the growing delay.
fn check_delays(runtime: &FakeRuntime, path: &str) {
    let mut before = runtime.next(path);
    for delay in DELAYS {
        let next = runtime.next(path);
        let waited = next.at - before.at;
        assert!(waited >= delay, "it retried after {waited:?} instead of {delay:?}");
        before = next;
    }
}

#[test]
fn the_delays_grow_while_streams_end_at_once() {
    for arguments in [
        &["threads", "tail", "t"][..],
        &["threads", "tail", "t", "--json"],
        &["threads", "send", "t", "hi", "--wait"],
        &["chat", "t"],
    ] {
        let runtime = answering_messages(ACCEPTED, |_| Answer::stream(""));
        let mut command = Running::on_pipes(runtime.command(arguments));
        check_delays(&runtime, EVENTS);
        command.expect(LOST);
        command.kill();
        let seen = plain(&command.seen);
        assert_eq!((seen.matches(LOST).count(), seen.lines().count()), (1, 1), "{arguments:?}: {seen}");
    }
}

/// A runtime whose store has failed sends the state of the thread and then ends the stream.
#[test]
fn the_delays_grow_while_streams_contain_only_the_state_of_the_thread() {
    let end = "event: end\ndata: {\"reason\": \"the store is not available; reconnect\"}\n\n";
    let runtime = FakeRuntime::with_stream(move |_| Answer::stream(format!("{}{end}", status("idle"))));
    let _tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    check_delays(&runtime, EVENTS);
}

#[test]
fn a_new_entry_resets_the_delay() {
    let runtime = FakeRuntime::with_stream(|request| match request.before {
        4 => Answer::stream(said(1, "progress")),
        _ => Answer::stream(""),
    });
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    let requests: Vec<Request> = (0..5).map(|_| runtime.next(EVENTS)).collect();
    tail.expect("agent   progress\n");
    let next = runtime.next(EVENTS);
    assert_eq!(next.last_event_id, Some(1));
    let waited = next.at - requests[4].at;
    // After five streams without an entry the delay would be four seconds.
    assert!(waited < Duration::from_secs(4), "the delay was not reset: {waited:?}");
}

/// The chat redraws its view while it connects, and must not abandon the connection.
#[test]
fn a_chat_waits_for_a_slow_runtime() {
    let runtime = FakeRuntime::with_stream(|request| match request.before {
        0 => Answer::stream(status("idle")),
        _ => Answer {
            delay: Duration::from_millis(1200),
            ..Answer::open_stream(format!("{}{}", said(1, "here I am"), status("idle")))
        },
    });
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.expect(LOST);
    chat.expect("reconnected\n");
    chat.expect("agent   here I am\n");
}

/// An event larger than any configuration of a runtime allows.
fn huge(seq: u64) -> Vec<u8> {
    let mut event = format!("id: {seq}\nevent: entry\ndata: {{\"text\": \"").into_bytes();
    event.resize(event.len() + 65 * MIB, b'x');
    event.extend_from_slice(b"\"}\n\n");
    event
}

#[test]
fn an_event_that_is_too_large_is_skipped_and_reported_once() {
    fn stream(request: &Request) -> Answer {
        match request.last_event_id {
            // The stream breaks off within the second large event.
            Some(0) => {
                let (mut body, second) = (huge(1), huge(3));
                body.extend_from_slice(said(2, "between").as_bytes());
                body.extend_from_slice(&second[..second.len() - MIB / 2]);
                Answer::stream(body)
            }
            Some(3) => Answer::open_stream(format!("{}{}", said(4, "last"), status("closed"))),
            other => panic!("unexpected Last-Event-ID: {other:?}"),
        }
    }
    let runtime = FakeRuntime::with_stream(stream);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    assert_eq!(tail.exit(), Some(0));
    let seen = plain(&tail.seen);
    for entry in [1, 3] {
        let message = format!("entry {entry} was skipped: it is larger than 64 MiB\n");
        assert_eq!(seen.matches(&message).count(), 1, "{seen}");
    }
    assert!(seen.contains("agent   between\n") && seen.contains("agent   last\n"), "{seen}");
}

/// A fake runtime that gives this answer to messages.
fn answering_messages(answer: (u16, &'static str), stream: fn(&Request) -> Answer) -> FakeRuntime {
    FakeRuntime::start(move |request| match request.path.as_str() {
        MESSAGES => Answer::new(answer.0, answer.1),
        "/v1/threads/t/history" => Answer::new(200, r#"{"entries": []}"#),
        EVENTS => stream(request),
        _ => Answer::new(200, thread().to_string()),
    })
}

#[test]
fn a_call_that_settles_during_a_disconnection_is_not_waited_for() {
    let runtime = answering_messages(ACCEPTED, |request| match request.before {
        0 => {
            let at = "2026-01-01T00:00:00.000Z";
            let entry = json!({"seq": 1, "at": at, "kind": "user", "text": "hi"});
            let call = json!({"call_id": "c", "tool": "slow", "since": at, "state": "open"});
            let events = [("id: 1\nevent: entry", entry), ("event: call", call)];
            let events = events.map(|(head, data)| format!("{head}\ndata: {data}\n\n"));
            Answer::stream(events.concat())
        }
        _ => Answer::open_stream(format!("{}{}", said(2, "done"), status("idle"))),
    });
    let mut send = Running::on_pipes(runtime.command(&["threads", "send", "t", "hi", "--wait"]));
    assert_eq!(send.exit(), Some(0));
    assert!(send.seen.contains("done\n"), "{}", send.seen);
}

#[test]
fn a_message_is_retried_with_growing_delays() {
    let busy = (503, r#"{"error": {"code": "busy", "message": "try again"}}"#);
    let runtime = answering_messages(busy, |_| Answer::open_stream(status("idle")));
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("hi\n");
    check_delays(&runtime, MESSAGES);
}
