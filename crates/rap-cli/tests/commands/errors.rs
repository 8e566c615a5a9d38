//! Error messages and exit codes.

use rap_testkit::Setup;
use rap_testkit::programs::rap;

use crate::support::{Runtime, output};

#[test]
fn an_unreachable_runtime_is_reported_with_advice() {
    for arguments in [&["threads", "ls"][..], &["chat"], &["inbox", "ls"], &["threads", "tail", "t"]] {
        let output = output(rap(arguments).args(["--url", "http://127.0.0.1:1"]));
        assert_eq!((output.code, output.out.as_str()), (Some(1), ""), "{arguments:?}");
        assert!(output.err.starts_with("rap: no runtime answers at http://127.0.0.1:1 ("), "{}", output.err);
        assert!(
            output.err.contains(")\nrap: start one with: rap serve, or set another URL"),
            "{}",
            output.err
        );
    }
}

#[test]
fn a_missing_or_wrong_token_is_reported_and_never_shown() {
    let runtime = Runtime::with(Setup::new().server("tokens = [\"right\"]"));
    let url = runtime.url();
    let without = runtime.fails(&["threads", "ls"]);
    let set =
        "set RAP_TOKEN (or --token) to one of its server.tokens, or to one made with: rap token create\n";
    assert_eq!(without, format!("rap: {url} requires a token: {set}"));
    let wrong = runtime.fails(&["threads", "ls", "--token", "s3cr3t"]);
    assert_eq!(wrong, format!("rap: {url} does not accept the token: {set}"));
    let right = output(runtime.command(&["threads", "ls"]).env("RAP_TOKEN", "right"));
    assert_eq!(right.code, Some(0), "{right:?}");
    let help = output(rap(&["threads", "ls", "--help"]).env("RAP_TOKEN", "s3cr3t"));
    assert!(help.out.contains("RAP_TOKEN") && !help.out.contains("s3cr3t"), "{}", help.out);
}

#[test]
fn an_unknown_thread_id_gets_a_suggestion() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "--id", "bread"]);
    for arguments in [
        &["threads", "show", "bred"][..],
        &["threads", "tail", "bred"],
        &["threads", "send", "bred", "hi"],
        &["threads", "send", "bred", "hi", "--wait"],
        &["threads", "close", "bred"],
        &["threads", "interrupt", "bred"],
        &["threads", "resume", "bred"],
        &["calls", "cancel", "bred", "c"],
        &["inbox", "answer", "bred", "c", "1"],
        &["chat", "bred"],
    ] {
        let expected = "rap: no thread `bred`; did you mean bread?\n";
        assert_eq!(runtime.fails(arguments), expected, "{arguments:?}");
    }
    let far = runtime.fails(&["threads", "show", "soup"]);
    assert_eq!(far, "rap: no thread `soup`; list threads with: rap threads ls\n");
}

#[test]
fn refused_requests_are_reported() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call choose", "--id", "t"]);
    runtime.until_status("t", "needs_you");
    let call = runtime.call("t", 1);
    let table = [
        (&["threads", "resume", "t"][..], "the thread is neither failed nor paused"),
        (&["calls", "cancel", "t", "call_9"], "thread t has no call `call_9`; open calls: call_1"),
        (
            &["inbox", "answer", "t", "call_9", "1"],
            "call `call_9` of thread t has no open question; calls with questions: call_1",
        ),
        (
            &["inbox", "answer", "t", &call, "purple"],
            "`purple` is not one of the choices: 1) red, 2) green, 3) blue",
        ),
        (
            &["threads", "new", "--id", "t"],
            "a thread with this id already exists; choose another id, or send a message to that thread",
        ),
        (&["threads", "new", "--agent", "nobody"], "agent: no such agent; configured agents: default"),
        (&["threads", "ls", "--limit", "0"], "limit: expected a number from 1 to 1000"),
    ];
    for (arguments, expected) in table {
        assert_eq!(runtime.fails(arguments), format!("rap: {expected}\n"), "{arguments:?}");
    }
    runtime.ok(&["threads", "close", "t"]);
    let closed = runtime.fails(&["chat", "t"]);
    assert_eq!(closed, "rap: thread t is closed; start a new one with: rap chat\n");
}

#[test]
fn wrong_usage_exits_with_2_and_a_suggestion() {
    let table = [
        (&["treads"][..], "threads"),
        (&["threads", "sow"], "show"),
        (&["threads", "ls", "--jsn"], "--json"),
        (&["threads", "ls", "--status", "waitin"], "waiting"),
        (&["inbox", "answer", "t", "c"], "<CHOICE>"),
        (&["completions", "bsh"], "bash"),
    ];
    for (arguments, expected) in table {
        let output = output(&mut rap(arguments));
        assert_eq!((output.code, output.out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(output.err.starts_with("rap: ") && output.err.contains(expected), "{}", output.err);
    }
}

#[test]
fn an_invalid_url_is_reported() {
    for url in ["nonsense", "ftp://127.0.0.1"] {
        let output = output(&mut rap(&["threads", "ls", "--url", url]));
        assert_eq!(output.code, Some(1));
        assert!(
            output.err.starts_with(&format!("rap: {url} is not the URL of a runtime: ")),
            "{}",
            output.err
        );
    }
}

#[test]
fn completion_scripts_are_printed_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = output(&mut rap(&["completions", shell]));
        assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
        assert!(output.out.contains("inbox"), "{shell}");
    }
}
