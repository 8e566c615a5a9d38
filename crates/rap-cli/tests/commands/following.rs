//! Following a thread: whatever the stream holds and however often it ends.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{Answer, Asked, EVENTS, FakeRuntime, said, status, thread};
use crate::support::{Running, Runtime, plain};

const MIB: usize = 1024 * 1024;
const MESSAGES: &str = "/v1/threads/t/messages";
const ACCEPTED: (u16, &str) = (202, r#"{"turn": 1}"#);
const LOST: &str = "the connection is lost; connecting again\n";
/// The first pauses between attempts.
const PAUSES: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_millis(1000)];

#[test]
fn a_result_of_eight_mebibytes_is_read_and_so_is_what_comes_after_it() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "--id", "t"]);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("call large\nsay after it\n");
    for follower in [&mut chat, &mut tail] {
        follower.expect(": \" \\x\" \\x");
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

/// The time between two requests is never shorter than the pause, and the pauses grow.
fn pauses_grow(runtime: &FakeRuntime, path: &str) {
    let mut before = runtime.next(path);
    for pause in PAUSES {
        let next = runtime.next(path);
        let waited = next.at - before.at;
        assert!(waited >= pause, "it tried again after {waited:?} instead of {pause:?}");
        before = next;
    }
}

#[test]
fn streams_that_end_at_once_are_asked_for_with_growing_pauses_and_that_is_told_once() {
    for arguments in [
        &["threads", "tail", "t"][..],
        &["threads", "tail", "t", "--json"],
        &["threads", "send", "t", "hi", "--wait"],
        &["chat", "t"],
    ] {
        let runtime = taking_messages(ACCEPTED, |_| Answer::stream(""));
        let mut command = Running::on_pipes(runtime.command(arguments));
        pauses_grow(&runtime, EVENTS);
        command.expect(LOST);
        command.kill();
        let seen = plain(&command.seen);
        assert_eq!((seen.matches(LOST).count(), seen.lines().count()), (1, 1), "{arguments:?}: {seen}");
    }
}

/// A runtime whose store has failed tells the state of the thread and then ends the stream.
#[test]
fn streams_that_end_behind_the_state_of_the_thread_are_asked_for_with_growing_pauses() {
    let end = "event: end\ndata: {\"reason\": \"the store is not available; connect again\"}\n\n";
    let runtime = FakeRuntime::with_stream(move |_| Answer::stream(format!("{}{end}", status("idle"))));
    let _tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    pauses_grow(&runtime, EVENTS);
}

#[test]
fn a_new_entry_makes_the_next_pause_short_again() {
    let runtime = FakeRuntime::with_stream(|asked| match asked.before {
        4 => Answer::stream(said(1, "progress")),
        _ => Answer::stream(""),
    });
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    let asked: Vec<Asked> = (0..5).map(|_| runtime.next(EVENTS)).collect();
    tail.expect("agent   progress\n");
    let next = runtime.next(EVENTS);
    assert_eq!(next.last_event_id, Some(1));
    let waited = next.at - asked[4].at;
    // After five streams that brought nothing it would be four seconds.
    assert!(waited < Duration::from_secs(4), "it waited for {waited:?}, as if nothing had come");
}

/// The view of a chat is drawn anew more often than that.
#[test]
fn a_chat_waits_for_a_runtime_that_takes_its_time_to_answer() {
    let runtime = FakeRuntime::with_stream(|asked| match asked.before {
        0 => Answer::stream(status("idle")),
        _ => Answer {
            delay: Duration::from_millis(1200),
            ..Answer::open_stream(format!("{}{}", said(1, "here I am"), status("idle")))
        },
    });
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.expect(LOST);
    chat.expect("connected again\n");
    chat.expect("agent   here I am\n");
}

/// An event that is larger than what any configuration of a runtime allows.
fn huge(seq: u64) -> Vec<u8> {
    let mut event = format!("id: {seq}\nevent: entry\ndata: {{\"text\": \"").into_bytes();
    event.resize(event.len() + 65 * MIB, b'x');
    event.extend_from_slice(b"\"}\n\n");
    event
}

#[test]
fn an_event_beyond_every_bound_is_told_once_and_left_out() {
    fn stream(asked: &Asked) -> Answer {
        match asked.last_event_id {
            // It breaks off in the middle of the second one.
            Some(0) => {
                let (mut body, second) = (huge(1), huge(3));
                body.extend_from_slice(said(2, "between").as_bytes());
                body.extend_from_slice(&second[..second.len() - MIB / 2]);
                Answer::stream(body)
            }
            Some(3) => Answer::open_stream(format!("{}{}", said(4, "behind"), status("closed"))),
            other => panic!("the stream is to begin behind {other:?}"),
        }
    }
    let runtime = FakeRuntime::with_stream(stream);
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    assert_eq!(tail.exit(), Some(0));
    let seen = plain(&tail.seen);
    for entry in [1, 3] {
        let told = format!("entry {entry} is left out: it has more than 64 MiB\n");
        assert_eq!(seen.matches(&told).count(), 1, "{seen}");
    }
    assert!(seen.contains("agent   between\n") && seen.contains("agent   behind\n"), "{seen}");
}

/// A runtime that takes messages with this answer.
fn taking_messages(answer: (u16, &'static str), stream: fn(&Asked) -> Answer) -> FakeRuntime {
    FakeRuntime::start(move |asked| match asked.path.as_str() {
        MESSAGES => Answer::new(answer.0, answer.1),
        "/v1/threads/t/history" => Answer::new(200, r#"{"entries": []}"#),
        EVENTS => stream(asked),
        _ => Answer::new(200, thread().to_string()),
    })
}

#[test]
fn a_call_that_settles_while_the_connection_is_lost_is_not_waited_for() {
    let runtime = taking_messages(ACCEPTED, |asked| match asked.before {
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
fn what_a_runtime_does_not_take_is_said_again_with_growing_pauses() {
    let busy = (503, r#"{"error": {"code": "busy", "message": "try again"}}"#);
    let runtime = taking_messages(busy, |_| Answer::open_stream(status("idle")));
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("hi\n");
    pauses_grow(&runtime, MESSAGES);
}
