//! Tests of the Python tool server in `examples/python-tool`, run by `python3`.

use std::ops::Deref;
use std::process::Command;

use axum::Router;
use axum::response::Redirect;
use axum::routing::post;
use rap_protocol::{limits, parse_toolset};
use rap_testkit::programs::{python_tool_path, tool_server};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Runtime, ToolProcess};

/// Longer than any test.
const A_DAY: u32 = 86_400;
/// Maximum number of concurrent calls of the server.
const MAX_RUNNING: usize = 64;

/// A process that runs the example.
struct Python {
    process: ToolProcess,
    /// Directory of a changed source.
    _source: TempDir,
}

impl Deref for Python {
    type Target = ToolProcess;

    fn deref(&self) -> &ToolProcess {
        &self.process
    }
}

impl Python {
    /// Starts the example on a free port, and waits until it listens.
    fn start() -> Python {
        Python::run(&source(), &[])
    }

    /// Starts the example with a change in its source.
    fn start_changed(from: &str, to: &str) -> Python {
        let source = source();
        assert_eq!(source.matches(from).count(), 1, "{from}");
        Python::run(&source.replace(from, to), &[])
    }

    fn run(source: &str, environment: &[(&str, &str)]) -> Python {
        let directory = TempDir::new().unwrap();
        let program = directory.path().join("tool.py");
        std::fs::write(&program, source).unwrap();
        let mut command = Command::new("python3");
        command.arg(program);
        let process = ToolProcess::spawn(tool_server(command, directory.path(), environment));
        Python { process, _source: directory }
    }

    /// Sends a raw request head and a body, and returns head and body of the answer.
    async fn raw(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.url.trim_start_matches("http://")).await.unwrap();
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn toolset(&self) -> Value {
        let answer = self.raw("GET /.well-known/rap-toolset HTTP/1.1\r\nHost: 127.0.0.1", "").await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert_eq!(status(head), 200);
        serde_json::from_str(body).unwrap()
    }
}

fn source() -> String {
    std::fs::read_to_string(python_tool_path()).unwrap()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

fn countdown(runtime: &Runtime, thread: &str, id: &str, from: u32, every_seconds: u32) -> Value {
    runtime.invocation("countdown", thread, id, json!({"from": from, "every_seconds": every_seconds}))
}

/// A call that runs until it is cancelled.
fn long(runtime: &Runtime, thread: &str, id: &str) -> Value {
    runtime.invocation("pause", thread, id, json!({"seconds": A_DAY}))
}

/// A call that returns at once.
fn instant(runtime: &Runtime, thread: &str, id: &str) -> Value {
    runtime.invocation("pause", thread, id, json!({"seconds": 0}))
}

#[test]
fn the_source_is_short() {
    let source = source();
    assert!(source.lines().count() <= 150, "{} lines", source.lines().count());
    for line in source.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[tokio::test]
async fn the_toolset_is_valid_and_its_version_depends_on_its_content() {
    let (one, two) = (Python::start(), Python::start());
    let three = Python::start_changed("Waits for some seconds.", "Waits.");
    let toolset = parse_toolset(one.toolset().await.to_string().as_bytes()).unwrap();
    let names: Vec<&str> = toolset.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["pause", "countdown"]);
    assert_eq!(toolset.endpoint.expose(), format!("{}/invoke", one.url));
    assert!(toolset.version.is_some());
    assert_eq!(two.toolset().await["version"].as_str(), toolset.version.as_deref());
    assert_ne!(three.toolset().await["version"].as_str(), toolset.version.as_deref());
}

#[tokio::test]
async fn a_call_is_acknowledged_and_its_result_delivered() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let mut call = runtime.invocation("pause", "thread_1", "call_1", json!({"seconds": 0.05, "more": []}));
    call["call_id"] = json!("fc_1");
    call["toolset_version"] = server.toolset().await["version"].clone();
    server.caller().accepted(&call).await;
    let result = runtime.next().await;
    let expected = json!({"type": "tool_result", "group_id": "thread_1", "id": "call_1", "call_id": "fc_1",
                          "text": "waited 0.05", "subscription": false});
    assert_eq!((result.name.as_str(), result.body), ("call_1", expected));
    server.caller().until_settled("thread_1", "call_1").await;
    // An invalid id is not echoed, because the runtime would refuse the result.
    let mut call = instant(&runtime, "thread_1", "call_2");
    call["call_id"] = json!(["fc_2"]);
    server.caller().accepted(&call).await;
    assert_eq!(runtime.next().await.body["call_id"], Value::Null);
}

#[tokio::test]
async fn a_repeat_does_not_run_even_with_a_stale_version() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    let mut call = long(&runtime, "thread_1", "call_1");
    caller.accepted(&call).await;
    caller.accepted(&call).await;
    caller.cancel("thread_1", "call_1").await;
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    caller.until_settled("thread_1", "call_1").await;
    call["toolset_version"] = json!("of yesterday");
    caller.accepted(&call).await;
    assert!(!caller.is_alive("thread_1", "call_1").await);
    // The same id in another thread is another call.
    let other = instant(&runtime, "thread_2", "call_1");
    caller.accepted(&other).await;
    let result = runtime.next().await;
    assert_eq!((result.body["group_id"].as_str(), result.text()), (Some("thread_2"), "waited 0"));
    caller.until_settled("thread_2", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_bounded_number_of_settled_calls_is_kept() {
    let (server, mut runtime) =
        (Python::start_changed("64, 10_000, 60", "64, 2, 60"), Runtime::start().await);
    let caller = server.caller();
    let run = ["call_1", "call_2", "call_2", "call_1", "call_3", "call_1"];
    for (number, id) in run.iter().enumerate() {
        caller.accepted(&instant(&runtime, "thread_1", id)).await;
        caller.until_settled("thread_1", id).await;
        let is_new = [0, 1, 4, 5].contains(&number);
        assert_eq!(runtime.pending().len(), usize::from(is_new), "{number}");
    }
}

#[tokio::test]
async fn a_stale_toolset_version_is_a_conflict() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let mut call = instant(&runtime, "thread_1", "call_1");
    call["toolset_version"] = json!("of yesterday");
    assert_eq!(server.caller().invoke(&call).await.0, 409);
    call["toolset_version"] = server.toolset().await["version"].clone();
    server.caller().accepted(&call).await;
    assert_eq!(runtime.next().await.text(), "waited 0");
}

#[tokio::test]
async fn an_invalid_call_gets_an_error_result() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let cases = [
        (json!("no_such_tool"), json!({}), "there are pause, countdown"),
        (json!(""), json!({}), "no such operation"),
        (json!(["pause"]), json!({}), "no such operation"),
        (Value::Null, json!({}), "no such operation"),
        (json!("pause"), json!([]), "`seconds`"),
        (json!("pause"), Value::Null, "`seconds`"),
        (json!("pause"), json!({}), "`seconds` of pause has to be of type number, 0 to 86400"),
        (json!("pause"), json!({"seconds": "1"}), "`seconds`"),
        (json!("pause"), json!({"seconds": true}), "`seconds`"),
        (json!("pause"), json!({"seconds": -1}), "`seconds`"),
        (json!("countdown"), json!({"from": 1.5, "every_seconds": 1}), "of type integer, 0 to 1000"),
        (json!("countdown"), json!({"from": 1, "every_seconds": 1e9}), "`every_seconds`"),
    ];
    for (number, (operation, arguments, expected)) in cases.iter().enumerate() {
        let mut call = runtime.invocation("", "thread_1", &format!("call_{number}"), arguments.clone());
        call["operation"] = operation.clone();
        server.caller().accepted(&call).await;
        let result = runtime.next().await;
        assert_eq!(result.body["id"], call["id"]);
        assert!(result.text().starts_with("Error: "), "{}", result.text());
        assert!(result.text().contains(expected), "{operation} {arguments}: {}", result.text());
        assert_eq!(result.body["subscription"], false);
    }
}

#[tokio::test]
async fn a_failure_is_reported_without_details() {
    let mut runtime = Runtime::start().await;
    let server =
        Python::start_changed("    call.stop.wait(arguments[\"seconds\"])\n", "    open('/secret')\n");
    server.caller().accepted(&instant(&runtime, "thread_1", "call_1")).await;
    let result = runtime.next().await;
    assert!(result.text().starts_with("Error: the tool failed; "), "{}", result.text());
    server.caller().until_settled("thread_1", "call_1").await;
    let log = server.process.into_log();
    assert!(log.contains("pause failed: FileNotFoundError"), "{log}");
    assert!(!log.contains("secret"), "{log}");

    let server =
        Python::start_changed("        call.send(str(number))", "        raise ValueError('secret')");
    server.caller().accepted(&countdown(&runtime, "thread_1", "call_2", 5, 0)).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    let event = runtime.next().await;
    assert_eq!(event.body["final"], true);
    assert!(event.text().starts_with("Error: the tool failed; "), "{}", event.text());
    server.caller().until_settled("thread_1", "call_2").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_call_without_a_valid_address_is_refused() {
    let (server, runtime) = (Python::start(), Runtime::start().await);
    let good = instant(&runtime, "thread_1", "call_1");
    let mut bodies: Vec<Vec<u8>> =
        [&b""[..], b"[]", b"{", b"{\"id\": NaN}", b"\xff\xfe", b"{\"group_id\": \"a\"}", &[b'['; 100_000]]
            .map(<[u8]>::to_vec)
            .to_vec();
    for (field, wrong) in [
        ("id", json!("")),
        ("id", json!("a\nb")),
        ("id", json!("x".repeat(257))),
        ("id", json!("é".repeat(129))),
        ("id", json!(7)),
        ("group_id", Value::Null),
        ("callback_url", json!("ftp://files.example/x")),
        ("callback_url", json!("/callback")),
        ("callback_url", json!("http://")),
        ("callback_url", json!("http://host.example:port/")),
        ("callback_url", json!("http://[::1/")),
        ("callback_url", json!("http://host.example/a b")),
        ("callback_url", json!("http://user@host.example/")),
        ("callback_url", json!(7)),
    ] {
        let mut bad = good.clone();
        bad[field] = wrong;
        bodies.push(bad.to_string().into());
    }
    bodies.push(good.to_string().replace("call_1", "\\ud800").into());
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        assert_eq!(server.caller().post("/invoke", body).await.0, 400, "{shown}");
    }
}

#[tokio::test]
async fn a_request_that_is_not_json_or_too_large_or_to_an_unknown_path_is_refused() {
    let server = Python::start();
    for length in [limits::BODY_BYTES + 1, 3 * limits::BODY_BYTES] {
        assert_eq!(server.caller().post("/invoke", vec![b' '; length]).await.0, 413);
    }
    assert_eq!(server.caller().post("/elsewhere", "{}").await.0, 404);
    let to = "Host: 127.0.0.1";
    let json = "Content-Type: application/json";
    let cases = [
        (format!("POST /invoke HTTP/1.1\r\n{to}\r\nContent-Type: text/plain\r\nContent-Length: 2"), 415),
        (format!("POST /invoke HTTP/1.1\r\n{to}\r\nContent-Length: 2"), 415),
        (format!("POST /invoke HTTP/1.1\r\n{to}\r\n{json}\r\nContent-Length: -2"), 400),
        (format!("POST /invoke HTTP/1.1\r\n{to}\r\n{json}; charset=utf-8\r\nContent-Length: 2"), 400),
        (format!("GET /elsewhere HTTP/1.1\r\n{to}"), 404),
    ];
    for (head, expected) in cases {
        let answer = server.raw(&head, if head.starts_with("GET") { "" } else { "{}" }).await;
        assert_eq!(status(&answer), expected, "{head}");
    }
}

#[tokio::test]
async fn every_post_requires_the_token() {
    let server = Python::run(&source(), &[("RAP_TOOL_BEARER", "sesame")]);
    let mut runtime = Runtime::start().await;
    for path in ["/invoke", "/cancel_tool_call", "/close_thread", "/tool_call_status"] {
        for caller in [server.caller(), server.caller().with_token("sesam"), server.caller().with_token("é")]
        {
            assert_eq!(caller.post(path, "{}").await.0, 401, "{path}");
        }
        assert_eq!(server.caller().with_token("sesame").post(path, "{}").await.0, 400, "{path}");
    }
    server.toolset().await;
    let call = instant(&runtime, "thread_1", "call_1");
    server.caller().with_token("sesame").accepted(&call).await;
    assert_eq!(runtime.next().await.text(), "waited 0");
}

#[tokio::test]
async fn a_result_is_retried_until_it_is_delivered() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    runtime.answer_next(&[503, 500]);
    let call = instant(&runtime, "thread_1", "call_1");
    server.caller().accepted(&call).await;
    let (first, second, third) = (runtime.next().await, runtime.next().await, runtime.next().await);
    assert_eq!([first.status, second.status, third.status], [503, 500, 200]);
    assert_eq!((&first.body, &second.body), (&third.body, &third.body));
    server.caller().until_settled("thread_1", "call_1").await;

    let call = instant(&runtime, "thread_1", "call_2");
    let address = runtime.stop().await;
    server.caller().accepted(&call).await;
    assert!(server.caller().is_alive("thread_1", "call_2").await);
    let mut runtime = Runtime::start_on(&address).await;
    assert_eq!(runtime.next().await.name, "call_2");
}

#[tokio::test]
async fn delivery_is_given_up_after_the_time_limit() {
    let (server, mut runtime) = (Python::start_changed("10_000, 60", "10_000, 2"), Runtime::start().await);
    runtime.answer_always(503);
    server.caller().accepted(&instant(&runtime, "thread_1", "call_1")).await;
    server.caller().until_settled("thread_1", "call_1").await;
    assert_eq!(runtime.pending().len(), 2);
    runtime.answer_next(&[200]);
    server.caller().accepted(&countdown(&runtime, "thread_1", "call_2", 5, 0)).await;
    server.caller().until_settled("thread_1", "call_2").await;
    let answers: Vec<u16> = runtime.pending().iter().map(|sent| sent.status).collect();
    assert_eq!(answers, [200, 503, 503]);
}

#[tokio::test]
async fn a_refused_result_is_not_sent_again() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    for status in [304, 401, 404, 410, 429] {
        runtime.answer_next(&[status]);
        let id = format!("call_{status}");
        let call = instant(&runtime, "thread_1", &id);
        server.caller().accepted(&call).await;
        server.caller().until_settled("thread_1", &id).await;
        assert_eq!(runtime.pending().len(), 1, "{status}");
    }
    for status in [400, 413] {
        runtime.answer_next(&[status, status]);
        let id = format!("call_{status}");
        let call = instant(&runtime, "thread_1", &id);
        server.caller().accepted(&call).await;
        server.caller().until_settled("thread_1", &id).await;
        let texts: Vec<String> = runtime.pending().iter().map(|sent| sent.text().to_owned()).collect();
        assert_eq!(texts, ["waited 0".to_owned(), format!("Error: the result was refused ({status})")]);
    }
}

#[tokio::test]
async fn no_redirect_is_followed() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let elsewhere = runtime.callback_url("elsewhere");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut call = instant(&runtime, "thread_1", "call_1");
    call["callback_url"] = json!(format!("http://{}/", listener.local_addr().unwrap()));
    let router = Router::new().route("/", post(move || async move { Redirect::temporary(&elsewhere) }));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    server.caller().accepted(&call).await;
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_cancelled_call_stops_and_reports_it_once() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    caller.accepted(&long(&runtime, "thread_1", "call_1")).await;
    caller.accepted(&long(&runtime, "thread_1", "call_2")).await;
    assert!(caller.is_alive("thread_1", "call_1").await);
    assert_eq!(caller.cancel("thread_1", "call_1").await, (200, String::new()));
    assert_eq!(caller.cancel("thread_1", "call_1").await, (200, String::new()));
    let result = runtime.next().await;
    assert_eq!((result.name.as_str(), result.text()), ("call_1", "Error: cancelled"));
    caller.until_settled("thread_1", "call_1").await;
    assert_eq!(caller.cancel("thread_1", "call_1").await, (200, String::new()));
    assert!(caller.is_alive("thread_1", "call_2").await);
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn an_undelivered_result_is_not_replaced_by_a_cancellation() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    runtime.answer_next(&[503]);
    let call = instant(&runtime, "thread_1", "call_1");
    server.caller().accepted(&call).await;
    assert_eq!(runtime.next().await.status, 503);
    server.caller().cancel("thread_1", "call_1").await;
    assert_eq!(runtime.accepted().await.text(), "waited 0");
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_closed_thread_receives_nothing_more() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    caller.accepted(&long(&runtime, "thread_1", "working")).await;
    caller.accepted(&countdown(&runtime, "thread_1", "subscribed", 3, A_DAY)).await;
    assert_eq!(runtime.next().await.name, "subscribed");
    runtime.answer_always(503);
    let call = instant(&runtime, "thread_1", "delivering");
    caller.accepted(&call).await;
    assert_eq!(runtime.next().await.name, "delivering");
    assert_eq!(caller.close("thread_1").await, (200, String::new()));
    for id in ["working", "subscribed", "delivering"] {
        caller.until_settled("thread_1", id).await;
    }
    // A retry may have been in progress when the thread was closed.
    assert!(runtime.pending().iter().all(|sent| sent.name == "delivering"));
    runtime.answer_always(200);
    let call = instant(&runtime, "thread_1", "later");
    caller.accepted(&call).await;
    assert_eq!(runtime.next().await.name, "later");
}

#[tokio::test]
async fn a_notification_with_any_id_is_acknowledged() {
    let server = Python::start();
    let caller = server.caller();
    for id in ["unknown", "", "../../etc/passwd", "a\nb", &"x".repeat(10_000)] {
        assert_eq!(caller.close(id).await, (200, String::new()));
        assert_eq!(caller.cancel(id, "unknown").await, (200, String::new()));
        assert_eq!(caller.cancel("unknown", id).await, (200, String::new()));
        assert!(!caller.is_alive(id, "unknown").await);
    }
    for path in ["/close_thread", "/cancel_tool_call", "/tool_call_status"] {
        for body in ["", "[]", "{}", "{\"thread_id\": 1, \"tool_call_id\": \"a\"}"] {
            assert_eq!(caller.post(path, body).await.0, 400, "{path} {body}");
        }
    }
    assert_eq!(caller.post("/cancel_tool_call", "{\"thread_id\": \"a\"}").await.0, 400);
}

#[tokio::test]
async fn a_subscription_is_confirmed_and_sends_its_events_in_order() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    // The confirmation is accepted, and the first event has to be sent again.
    runtime.answer_next(&[200, 503]);
    server.caller().accepted(&countdown(&runtime, "thread_1", "call_1", 2, 0)).await;
    let confirmation = runtime.next().await;
    assert_eq!(confirmation.body["type"], "tool_result");
    assert_eq!(confirmation.body["subscription"], true);
    assert!(confirmation.text().contains("Subscription ID: call_1"), "{}", confirmation.text());
    assert_eq!(runtime.next().await.status, 503);
    for (event_id, text) in [("1", "2"), ("2", "1"), ("3", "0")] {
        let event = runtime.next().await;
        let expected = json!({"type": "subscription_event", "group_id": "thread_1", "tool_call_id": "call_1",
                              "text": text, "event_id": event_id, "final": text == "0"});
        assert_eq!((event.name.as_str(), event.body), ("call_1", expected));
    }
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn the_readme_shows_the_actual_messages() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let readme = std::fs::read_to_string(python_tool_path().with_file_name("README.md")).unwrap();
    let shown: Vec<Value> = readme
        .lines()
        .skip_while(|line| *line != "```json")
        .skip(1)
        .take_while(|line| *line != "```")
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(shown.len(), 3);
    server.caller().accepted(&countdown(&runtime, "thread_1", "call_1", 1, 0)).await;
    for message in shown {
        assert_eq!(runtime.next().await.body, message);
    }
}

#[tokio::test]
async fn a_cancelled_subscription_sends_nothing_more() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    caller.accepted(&countdown(&runtime, "thread_1", "call_1", 3, A_DAY)).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    assert!(caller.is_alive("thread_1", "call_1").await);
    caller.cancel("thread_1", "call_1").await;
    caller.until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_subscription_that_is_cancelled_before_its_confirmation_was_delivered_is_a_cancelled_call() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    runtime.answer_always(503);
    server.caller().accepted(&countdown(&runtime, "thread_1", "call_1", 3, 0)).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    server.caller().cancel("thread_1", "call_1").await;
    // The confirmation may have been retried before that.
    while runtime.next().await.text() != "Error: cancelled" {}
    runtime.answer_always(200);
    let result = runtime.accepted().await;
    assert_eq!((result.text(), &result.body["subscription"]), ("Error: cancelled", &json!(false)));
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn an_event_refused_with_404_or_410_ends_its_subscription() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    runtime.answer_next(&[403]);
    server.caller().accepted(&countdown(&runtime, "thread_1", "unconfirmed", 5, 0)).await;
    server.caller().until_settled("thread_1", "unconfirmed").await;
    assert_eq!(runtime.pending().len(), 1);
    for status in [404, 410] {
        runtime.answer_next(&[200, 422, status]);
        let id = format!("call_{status}");
        server.caller().accepted(&countdown(&runtime, "thread_1", &id, 5, 0)).await;
        server.caller().until_settled("thread_1", &id).await;
        let answers: Vec<u16> = runtime.pending().iter().map(|sent| sent.status).collect();
        assert_eq!(answers, [200, 422, status]);
    }
}

#[tokio::test]
async fn a_server_at_its_limit_answers_503_with_retry_after() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    let calls: Vec<Value> =
        (0..MAX_RUNNING).map(|number| long(&runtime, "thread_1", &format!("call_{number}"))).collect();
    for call in &calls {
        caller.accepted(call).await;
    }
    let one_more = instant(&runtime, "thread_2", "one_more").to_string();
    let head = format!(
        "POST /invoke HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}",
        one_more.len()
    );
    let answer = server.raw(&head, &one_more).await;
    assert_eq!(status(&answer), 503);
    assert!(answer.contains("\r\nRetry-After: 1\r\n"), "{answer}");
    caller.accepted(&calls[0]).await;
    caller.close("thread_1").await;
    caller.until_settled("thread_1", "call_0").await;
    assert_eq!(caller.post("/invoke", one_more).await, (200, String::new()));
    assert_eq!(runtime.next().await.name, "one_more");
}

#[tokio::test]
async fn a_callback_url_is_never_logged() {
    let (server, mut runtime) = (Python::start(), Runtime::start().await);
    let caller = server.caller();
    for (id, status) in [("taken", 200), ("refused", 404), ("failing", 500)] {
        runtime.answer_always(status);
        let mut call = instant(&runtime, "thread_1", id);
        call["callback_url"] = json!(runtime.callback_url("of-a-secret-path?and=query"));
        caller.accepted(&call).await;
        runtime.next().await;
    }
    let mut call = instant(&runtime, "thread_1", "unreadable");
    call["callback_url"] = json!("ftp://host.example/of-a-secret-path");
    let (status, answer) = caller.invoke(&call).await;
    assert_eq!((status, answer.contains("secret")), (400, false));
    caller.close("thread_1").await;
    caller.until_settled("thread_1", "failing").await;
    let log = server.process.into_log();
    assert!(log.contains("\"POST /close_thread HTTP/1.1\" 200"), "{log}");
    assert!(!log.contains("secret"), "{log}");
}
