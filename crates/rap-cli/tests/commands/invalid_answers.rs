//! Answers that no runtime gives, but a proxy or another server might. They are reported, and nothing panics.

use crate::fake::{Answer, FakeRuntime};
use crate::support::{Output, output};

/// One command for each kind of answer that is read.
const COMMANDS: [&[&str]; 14] = [
    &["threads", "ls"],
    &["threads", "ls", "--all"],
    &["threads", "show", "t"],
    &["threads", "tail", "t", "--once"],
    &["threads", "tail", "t", "--once", "--json"],
    &["threads", "send", "t", "hi", "--wait"],
    &["threads", "new", "hi", "--wait"],
    &["threads", "fork", "t"],
    &["chat", "t"],
    &["inbox", "answer", "t", "c", "1"],
    &["tools", "ls"],
    &["deliveries", "ls", "--all"],
    &["deliveries", "show", "1"],
    &["calls", "cancel", "t", "c"],
];

fn run(arguments: &[&str], status: u16, body: &'static str) -> Output {
    let runtime = FakeRuntime::start(move |_| Answer::new(status, body));
    output(&mut runtime.command(arguments))
}

#[test]
fn an_answer_of_another_server_is_reported() {
    let answers = [
        (200, ""),
        (200, "[]"),
        (200, "[[]]"),
        (200, "\"text\""),
        (200, "{}"),
        (404, "<html>"),
        (404, "[]"),
        (404, "\"text\""),
        (500, r#"{"error": "no"}"#),
        (500, r#"{"error": []}"#),
        (500, r#"{"error": {"code": 1}}"#),
    ];
    for arguments in COMMANDS {
        for (status, body) in answers {
            let Output { code, err, .. } = run(arguments, status, body);
            // A command that reads nothing of the answer may succeed.
            let fine = code == Some(1) || (code == Some(0) && status == 200);
            assert!(fine && !err.contains("panicked"), "{arguments:?}, {status} {body}: {code:?} {err}");
        }
    }
}

#[test]
fn a_listing_with_invalid_pages_ends() {
    let page = r#"{"threads": [], "next_cursor": "1"}"#;
    for second in [page, "[]", "1", "\"text\"", "null"] {
        let runtime = FakeRuntime::start(move |request| {
            assert!(request.before < 5, "it requests the same page forever");
            Answer::new(200, if request.before == 0 { page } else { second })
        });
        let Output { code, err, .. } = output(&mut runtime.command(&["threads", "ls", "--all"]));
        assert_eq!(code, Some(1), "{second}: {err}");
        assert!(err.contains("did not answer like a runtime"), "{second}: {err}");
        assert!(err.contains("; check --url or RAP_URL"), "{second}: {err}");
    }
}

/// A proxy answers for a runtime that is being started again.
#[test]
fn a_runtime_behind_a_proxy_is_waited_for() {
    use crate::fake::{said, status};
    use crate::support::Running;
    let runtime = FakeRuntime::with_stream(|request| match request.before {
        0 => Answer::stream(status("idle")),
        1 => Answer::new(502, "<html>Bad Gateway</html>"),
        _ => Answer::open_stream(format!("{}{}", said(1, "back"), status("closed"))),
    });
    let mut tail = Running::on_pipes(runtime.command(&["threads", "tail", "t"]));
    tail.expect("agent   back\n");
    assert_eq!(tail.exit(), Some(0));
}

#[test]
fn open_calls_are_listed_by_age() {
    let call = |id: &str, since: &str| {
        serde_json::json!({"thread_id": "t", "call_id": id, "tool": "slow", "server": "s", "since": since,
            "until": null, "acknowledged_at": null, "attempts": 0, "last_attempt": null})
    };
    let calls = [call("later", "2026-01-02T00:00:00.000Z"), call("earlier", "2026-01-01T00:00:00.000Z")];
    let page = serde_json::json!({ "calls": calls }).to_string();
    let runtime = FakeRuntime::start(move |_| Answer::new(200, page.clone()));
    let Output { out, .. } = output(&mut runtime.command(&["calls", "ls"]));
    let at = |id: &str| out.find(id).unwrap_or_else(|| panic!("{out}"));
    assert!(at("earlier") < at("later"), "{out}");
}
