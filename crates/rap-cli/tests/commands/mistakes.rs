//! What is said about mistakes, and with which exit code.

use crate::support::{Runtime, rap, told};

#[test]
fn nothing_that_listens_is_told_with_what_to_do() {
    for arguments in [&["threads", "ls"][..], &["chat"], &["inbox", "ls"], &["threads", "tail", "t"]] {
        let told = told(rap(arguments).args(["--url", "http://127.0.0.1:1"]));
        assert_eq!((told.code, told.out.as_str()), (Some(1), ""), "{arguments:?}");
        let expected = "rap: nothing answers at http://127.0.0.1:1: start it with: rap serve\n";
        assert!(told.err.starts_with(expected), "{}", told.err);
    }
}

#[test]
fn a_token_is_asked_for_and_never_shown() {
    let runtime = Runtime::start_with("tokens = [\"right\"]");
    let url = runtime.url();
    let without = runtime.fails(&["threads", "ls"]);
    let set = "set RAP_TOKEN (or --token) to one of its server.tokens\n";
    assert_eq!(without, format!("rap: {url} wants a token: {set}"));
    let wrong = runtime.fails(&["threads", "ls", "--token", "s3cr3t"]);
    assert_eq!(wrong, format!("rap: {url} wants a token other than the one it was shown: {set}"));
    let right = told(runtime.command(&["threads", "ls"]).env("RAP_TOKEN", "right"));
    assert_eq!(right.code, Some(0), "{right:?}");
    let help = told(rap(&["threads", "ls", "--help"]).env("RAP_TOKEN", "s3cr3t"));
    assert!(help.out.contains("RAP_TOKEN") && !help.out.contains("s3cr3t"), "{}", help.out);
}

#[test]
fn a_thread_that_is_not_there_suggests_the_nearest() {
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
        let expected = "rap: there is no thread `bred`; did you mean bread?\n";
        assert_eq!(runtime.fails(arguments), expected, "{arguments:?}");
    }
    let far = runtime.fails(&["threads", "show", "soup"]);
    assert_eq!(far, "rap: there is no thread `soup`; rap threads ls lists them\n");
}

#[test]
fn what_can_not_be_done_is_said() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "call choose", "--id", "t"]);
    runtime.until_status("t", "needs_you");
    let call = runtime.call("t", 1);
    let table = [
        (&["threads", "resume", "t"][..], "there is nothing to resume"),
        (&["calls", "cancel", "t", "call_9"], "thread t made no call `call_9`; open are: call_1"),
        (
            &["inbox", "answer", "t", "call_9", "1"],
            "call `call_9` of thread t asks nothing; what asks: call_1",
        ),
        (
            &["inbox", "answer", "t", &call, "purple"],
            "`purple` is none of the choices: 1) red, 2) green, 3) blue",
        ),
        (&["threads", "new", "--id", "t"], "a thread of that id exists"),
        (&["threads", "new", "--agent", "nobody"], "agent: there is no such agent; there are: default"),
        (&["threads", "ls", "--limit", "0"], "limit: a number from 1 to 1000"),
    ];
    for (arguments, expected) in table {
        assert_eq!(runtime.fails(arguments), format!("rap: {expected}\n"), "{arguments:?}");
    }
    runtime.ok(&["threads", "close", "t"]);
    let closed = runtime.fails(&["chat", "t"]);
    assert_eq!(closed, "rap: thread t is closed; rap chat makes a new one\n");
}

#[test]
fn wrong_usage_exits_with_2_and_suggests() {
    let table = [
        (&["treads"][..], "threads"),
        (&["threads", "sow"], "show"),
        (&["threads", "ls", "--jsn"], "--json"),
        (&["threads", "ls", "--status", "waitin"], "waiting"),
        (&["inbox", "answer", "t", "c"], "<CHOICE>"),
        (&["completions", "bsh"], "bash"),
    ];
    for (arguments, expected) in table {
        let told = told(&mut rap(arguments));
        assert_eq!((told.code, told.out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(told.err.starts_with("rap: ") && told.err.contains(expected), "{}", told.err);
    }
}

#[test]
fn what_is_no_runtime_is_told_apart() {
    for url in ["nonsense", "ftp://127.0.0.1"] {
        let told = told(&mut rap(&["threads", "ls", "--url", url]));
        assert_eq!(told.code, Some(1));
        assert!(told.err.starts_with(&format!("rap: {url} is no URL of a runtime: ")), "{}", told.err);
    }
}

#[test]
fn shells_are_helped_to_complete() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let told = told(&mut rap(&["completions", shell]));
        assert_eq!((told.code, told.err.as_str()), (Some(0), ""));
        assert!(told.out.contains("inbox"), "{shell}");
    }
}
