//! What agents are told.

use std::io::Write;
use std::process::Stdio;

use crate::support::Runtime;

#[test]
fn a_message_is_answered() {
    let runtime = Runtime::start();
    let id = runtime.ok(&["threads", "new"]);
    let id = id.trim();
    assert_eq!(runtime.ok(&["threads", "send", id, "say hello", "--wait"]), "hello\n");
    assert_eq!(
        runtime.ok(&["threads", "send", id, "call echo {\"text\": \"x\"}", "--wait"]),
        "echo: echo x\n"
    );
    let said = runtime.ok(&["threads", "send", id, "say later"]);
    assert_eq!(said, format!("said in turn 4; follow it with: rap threads tail {id}\n"));
}

#[test]
fn a_message_can_come_from_stdin() {
    let runtime = Runtime::start();
    let mut command = runtime.command(&["threads", "new", "-", "--wait"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"say one\nsay two\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"one\ntwo\n");
}

#[test]
fn waiting_goes_on_until_calls_have_returned() {
    let runtime = Runtime::start();
    let out = runtime.ok(&["threads", "new", "call slow {\"seconds\": 0.5}", "--wait"]);
    assert_eq!(out, "slow: slept 0.5\n");
}

#[test]
fn what_is_said_to_a_busy_agent_is_up_to_the_sender() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    let refused = runtime.fails(&["threads", "send", "t", "say no", "--on-busy", "reject"]);
    assert_eq!(refused, "rap: the thread is busy\n");
    let out = runtime.ok(&["threads", "send", "t", "say stopped", "--on-busy", "interrupt", "--wait"]);
    assert_eq!(out, "stopped\n");
    runtime.ok(&["threads", "send", "t", "call slow {\"seconds\": 1000}"]);
    runtime.until_status("t", "waiting");
    runtime.ok(&["threads", "send", "t", "say queued", "--on-busy", "enqueue"]);
    assert!(runtime.ok(&["threads", "show", "t"]).contains("1 input waits to be taken up later"));
    runtime.ok(&["threads", "send", "t", "say joined"]);
    runtime.until_status("t", "idle");
    assert!(runtime.ok(&["threads", "show", "t"]).contains("while 1 call goes on"));
}

#[test]
fn a_call_is_cancelled() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    let call = runtime.call("t", 1);
    assert_eq!(runtime.ok(&["calls", "cancel", "t", &call]), "call_1 of t is cancelled\n");
    runtime.until_status("t", "idle");
    assert_eq!(runtime.ok(&["calls", "ls"]), "no call is open\n");
}

#[test]
fn a_subscription_is_cancelled() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call tick {\"after_ms\": 1000000}", "--id", "t", "--wait"]);
    let call = runtime.call("t", 1);
    assert_eq!(runtime.ok(&["subs", "cancel", "t", &call]), "call_1 of t is cancelled\n");
    assert_eq!(runtime.ok(&["subs", "ls"]), "nothing is subscribed to\n");
}

#[test]
fn a_thread_is_interrupted_and_closed() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    assert_eq!(runtime.ok(&["threads", "interrupt", "t"]), "t is interrupted\n");
    runtime.until_status("t", "idle");
    assert_eq!(runtime.ok(&["threads", "close", "t"]), "t is closed\n");
    assert_eq!(runtime.fails(&["threads", "send", "t", "say no"]), "rap: the thread is closed\n");
}

#[test]
fn a_question_is_answered_by_number_by_words_or_not_at_all() {
    let runtime = Runtime::start();
    let table = [("3", "blue"), ("RED", "red"), ("--dismiss", "green")];
    for (number, (answer, chosen)) in table.into_iter().enumerate() {
        let id = format!("t{number}");
        runtime.ok(&["threads", "new", "call choose", "--id", &id]);
        runtime.until_status(&id, "needs_you");
        let out = runtime.ok(&["inbox", "answer", &id, &runtime.call(&id, 1), answer]);
        assert_eq!(out, format!("answered: {chosen}\n"));
        runtime.until_status(&id, "idle");
        let told = runtime.ok(&["threads", "tail", &id, "--once"]);
        assert!(told.contains(&format!("chose {chosen}")), "{told}");
    }
}

#[test]
fn a_thread_that_has_failed_says_why_and_is_resumed() {
    let model = "[model]\nprovider = \"openai\"\nname = \"m\"\nbase_url = \"http://127.0.0.1:1\"\n\
                 [limits]\nmodel_attempts = 1\n";
    let runtime = Runtime::start_with(model);
    let told = runtime.run(&["threads", "new", "hello", "--id", "t", "--wait"]);
    assert_eq!((told.code, told.out.as_str()), (Some(1), ""));
    assert!(told.err.contains("rap: the agent failed: "), "{}", told.err);
    let shown = runtime.ok(&["threads", "show", "t"]);
    assert!(shown.contains("\nfailed: ") && shown.contains("with: rap threads resume t\n"), "{shown}");
    assert_eq!(runtime.ok(&["threads", "resume", "t"]), "t goes on\n");
    runtime.until_status("t", "failed");
}
