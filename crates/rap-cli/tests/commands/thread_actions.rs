//! Commands that change threads: messages, cancellation, answers, closing.

use std::io::Write;
use std::process::Stdio;

use rap_testkit::Setup;

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
    let sent = runtime.ok(&["threads", "send", id, "say later"]);
    assert_eq!(sent, format!("sent in turn 4; follow it with: rap threads tail {id}\n"));
}

#[test]
fn a_message_is_read_from_stdin() {
    let runtime = Runtime::start();
    let mut command = runtime.command(&["threads", "new", "-", "--wait"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"say one\nsay two\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"one\ntwo\n");
}

#[test]
fn wait_lasts_until_calls_have_returned() {
    let runtime = Runtime::start();
    let out = runtime.ok(&["threads", "new", "call slow {\"seconds\": 0.5}", "--wait"]);
    assert_eq!(out, "slow: slept 0.5\n");
}

#[test]
fn on_busy_decides_what_happens_to_a_message() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    let refused = runtime.fails(&["threads", "send", "t", "say no", "--on-busy", "reject"]);
    assert_eq!(
        refused,
        "rap: the thread is busy; send the message again later, or with on_busy join, interrupt or enqueue\n"
    );
    let out = runtime.ok(&["threads", "send", "t", "say stopped", "--on-busy", "interrupt", "--wait"]);
    assert_eq!(out, "stopped\n");
    runtime.ok(&["threads", "send", "t", "call slow {\"seconds\": 1000}"]);
    runtime.until_status("t", "waiting");
    runtime.ok(&["threads", "send", "t", "say queued", "--on-busy", "enqueue"]);
    assert!(runtime.ok(&["threads", "show", "t"]).contains("1 held input"));
    runtime.ok(&["threads", "send", "t", "say joined"]);
    runtime.until_status("t", "idle");
    assert!(runtime.ok(&["threads", "show", "t"]).contains("; 1 call in the background"));
}

#[test]
fn a_call_is_cancelled() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    let call = runtime.call("t", 1);
    assert_eq!(runtime.ok(&["calls", "cancel", "t", &call]), "cancelled call_1 of thread t\n");
    runtime.until_status("t", "idle");
    assert_eq!(runtime.ok(&["calls", "ls"]), "no open calls\n");
}

#[test]
fn a_subscription_is_cancelled() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call tick {\"after_ms\": 1000000}", "--id", "t", "--wait"]);
    let call = runtime.call("t", 1);
    assert_eq!(runtime.ok(&["subs", "cancel", "t", &call]), "cancelled call_1 of thread t\n");
    assert_eq!(runtime.ok(&["subs", "ls"]), "no subscriptions\n");
}

#[test]
fn a_thread_is_interrupted_and_closed() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 1000}", "--id", "t"]);
    runtime.until_status("t", "waiting");
    assert_eq!(runtime.ok(&["threads", "interrupt", "t"]), "interrupted thread t\n");
    runtime.until_status("t", "idle");
    assert_eq!(runtime.ok(&["threads", "close", "t"]), "closed thread t\n");
    assert_eq!(runtime.fails(&["threads", "send", "t", "say no"]), "rap: the thread is closed\n");
}

#[test]
fn a_question_is_answered_by_number_or_text_or_dismissed() {
    let runtime = Runtime::start();
    let table = [("3", "blue"), ("RED", "red"), ("--dismiss", "green")];
    for (number, (answer, chosen)) in table.into_iter().enumerate() {
        let id = format!("t{number}");
        runtime.ok(&["threads", "new", "call choose", "--id", &id]);
        runtime.until_status(&id, "needs_you");
        let out = runtime.ok(&["inbox", "answer", &id, &runtime.call(&id, 1), answer]);
        assert_eq!(out, format!("answered: {chosen}\n"));
        runtime.until_status(&id, "idle");
        let output = runtime.ok(&["threads", "tail", &id, "--once"]);
        assert!(output.contains(&format!("chose {chosen}")), "{output}");
    }
}

#[test]
fn a_failed_thread_gives_its_reason_and_is_resumed() {
    let model = "provider = \"openai\"\nname = \"m\"\nbase_url = \"http://127.0.0.1:1\"";
    let runtime = Runtime::with(Setup::new().model(model).limit("model_attempts = 1"));
    let output = runtime.run(&["threads", "new", "hello", "--id", "t", "--wait"]);
    assert_eq!((output.code, output.out.as_str()), (Some(1), ""));
    assert!(output.err.contains("rap: the agent failed: "), "{}", output.err);
    assert!(output.err.ends_with("; retry with: rap threads resume t\n"), "{}", output.err);
    let shown = runtime.ok(&["threads", "show", "t"]);
    assert!(shown.contains("\nfailed: ") && shown.contains("with: rap threads resume t\n"), "{shown}");
    assert_eq!(runtime.ok(&["threads", "resume", "t"]), "resumed thread t\n");
    runtime.until_status("t", "failed");
}
