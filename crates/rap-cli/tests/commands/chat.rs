//! `rap chat` on pipes.

use crate::support::{Running, Runtime, numbered, plain};

#[test]
fn lines_of_a_pipe_are_sent_one_after_the_other() {
    let runtime = Runtime::start();
    let mut chat = Running::on_pipes(runtime.command(&["chat"]));
    chat.type_in("say hello\ncall slow {\"seconds\": 1.2}\ncall choose\nblue\nsay bye\n");
    chat.end_input();
    assert_eq!(chat.exit(), Some(0));
    let seen = without_note(&chat.seen);
    // The duration depends on the machine.
    let (before, after) = seen.split_once(" after 1.").unwrap();
    let seen = numbered(&format!("{before}{}", after.trim_start_matches(|c| c != ':')));
    let expected = "you     say hello\n\
                    agent   hello\n\
                    you     call slow {\"seconds\": 1.2}\n\
                    call    slow({\"seconds\":1.2}) (call_1)\n\
                    result  slow: slept 1.2\n\
                    agent   slow: slept 1.2\n\
                    you     call choose\n\
                    call    choose({}) (call_2)\n\
                    choose asks: Which colour?\n  1) red\n  2) green (default)\n  3) blue\n        \
                    answer with the number or the text of a choice; anything else is sent to the agent, and the question stays open\n\
                    result  choose: chose blue\n\
                    agent   choose: chose blue\n\
                    you     say bye\n\
                    agent   bye\n";
    assert_eq!(seen, expected);
}

/// Removes the note about the scripted model, which has to come once.
fn without_note(seen: &str) -> String {
    let (notes, lines): (Vec<&str>, Vec<&str>) =
        seen.split_inclusive('\n').partition(|line| line.starts_with("a scripted model answers"));
    assert!(matches!(notes[..], [note] if note.contains("in the [model] section of rap.toml")), "{seen}");
    lines.concat()
}

#[test]
fn an_event_wakes_the_agent() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "--id", "t"]);
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("call tick {\"after_ms\": 300}\n");
    chat.expect("result  tick: Ticking. Subscription ID: call_1\n");
    chat.expect("woken   by an event of tick\nresult  tick: tick tock\n");
    chat.expect("agent   tick: tick tock\n");
    chat.end_input();
    assert_eq!(chat.exit(), Some(0));
}

#[test]
fn a_chat_fails_if_its_input_ends_with_a_question_open() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "--id", "t"]);
    let mut chat = Running::on_pipes(runtime.command(&["chat", "t"]));
    chat.type_in("call choose\n");
    chat.end_input();
    assert_eq!(chat.exit(), Some(1));
    let seen = numbered(&chat.seen);
    assert!(seen.contains("rap: answer with: rap inbox answer t call_1 CHOICE\n"), "{seen}");
}

#[test]
fn a_chat_continues_after_a_restart_of_the_runtime() {
    let mut runtime = Runtime::start();
    let mut chat = Running::on_pipes(runtime.command(&["chat"]));
    chat.type_in("say one\n");
    chat.expect("agent   one\n");
    chat.type_in("call slow {\"seconds\": 2}\n");
    chat.expect("call    slow");
    runtime.kill();
    chat.expect("connection lost; reconnecting\n");
    runtime.start_again();
    chat.expect("reconnected\n");
    chat.expect("agent   slow: slept 2\n");
    runtime.kill();
    chat.expect("connection lost; reconnecting\n");
    chat.type_in("say two\n");
    chat.end_input();
    runtime.start_again();
    assert_eq!(chat.exit(), Some(0));
    let seen = plain(&chat.seen);
    assert!(seen.ends_with("you     say two\nagent   two\n"), "{seen}");
    for once in ["you     say one", "agent   one", "you     say two", "result  slow", "agent   slow"] {
        assert_eq!(seen.matches(once).count(), 1, "{once}: {seen}");
    }
}

#[test]
fn the_duration_of_an_open_call_is_shown() {
    let runtime = Runtime::start();
    let mut chat = Running::on_pipes(runtime.command(&["chat"]));
    chat.type_in("call slow {\"seconds\": 6.5}\n");
    chat.expect("… slow (call_1) has been running for 5 s\n");
    chat.expect(": slept 6.5\n");
}
