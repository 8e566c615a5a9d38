//! Hostile input at every endpoint: it costs bounded work, changes nothing, and the server keeps working.

use std::collections::HashSet;
use std::time::Duration;

use crate::support::{Gate, Journal, Runtime, Server, data_dir, short_pauses};
use rap_testkit::http::{connect, exchange, read_response, request};
use rap_testkit::{PATIENCE, until};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate, UrlPolicy};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const POSTS: [&str; 4] = ["/invoke", "/close_thread", "/cancel_tool_call", "/tool_call_status"];
const DISCOVERY: &str = "/.well-known/rap-toolset";
const MAX_BYTES: usize = 8 * 1024 * 1024;

#[derive(Deserialize, JsonSchema)]
struct Text {
    text: String,
}

/// A server under attack, and a runtime that uses it meanwhile.
struct Target {
    server: Server,
    runtime: Runtime,
    journal: Journal,
    gate: Gate,
    rows: [i64; 3],
    calls: usize,
    _data: TempDir,
}

impl Target {
    /// Starts a server with the tools `length` (of a text) and `wait` (at the gate).
    async fn start(limits: Limits) -> Target {
        Target::start_with(limits, |server| server).await
    }

    async fn start_with(limits: Limits, more: impl Fn(ToolServer) -> ToolServer) -> Target {
        let (data, gate) = (data_dir(), Gate::closed());
        let gate_of_tool = gate.clone();
        let tools = ToolServer::new("test")
            .limits(limits)
            .tool("length", |args: Text, _: Call| async move { Ok(args.text.len().to_string()) })
            .tool("wait", move |_: Text, _: Call| {
                let gate = gate_of_tool.clone();
                async move {
                    gate.pass().await;
                    Ok("waited")
                }
            });
        let server = Server::start(more(tools), data.path()).await;
        let journal = Journal::open(data.path());
        let runtime = Runtime::start().await;
        Target { server, runtime, journal, gate, rows: [0; 3], calls: 0, _data: data }
    }

    async fn send(&self, request: impl AsRef<[u8]>) -> u16 {
        exchange(&self.server.url, request).await.status
    }

    /// Returns a valid body for an endpoint. The calls that it names do not exist.
    fn body(&self, path: &str) -> String {
        match path {
            "/invoke" => self.call("hostile", "x").to_string(),
            _ => json!({"thread_id": "hostile", "tool_call_id": "hostile"}).to_string(),
        }
    }

    fn call(&self, id: &str, text: &str) -> Value {
        self.runtime.invocation("length", "t", id, json!({"text": text}))
    }

    /// Checks that nothing has changed and that the server answers a normal call.
    async fn check_unharmed(&mut self) {
        assert_eq!(self.journal.rows(), self.rows);
        self.calls += 1;
        let id = format!("normal{}", self.calls);
        self.server.caller().accepted(&self.call(&id, "four")).await;
        let result = self.runtime.next().await;
        assert_eq!((result.name.as_str(), result.text()), (id.as_str(), "4"));
        self.server.caller().until_settled("t", &id).await;
        self.rows = self.journal.rows();
    }
}

fn post(path: &str, content_type: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{content_type}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

const JSON: &str = "content-type: application/json\r\n";

#[tokio::test]
async fn a_body_of_more_than_8_mib_is_413_with_and_without_a_content_length() {
    let mut target = Target::start(short_pauses()).await;
    for path in POSTS {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {}\r\n\r\n",
            MAX_BYTES + 1
        );
        assert_eq!(target.send(head).await, 413, "{path}, before the body is sent");
        let huge = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: {}\r\n\r\n",
            1_u64 << 50
        );
        assert_eq!(target.send(huge).await, 413, "{path}, with a huge content length");
        let mut chunked =
            format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\n")
                .into_bytes();
        for _ in 0..=MAX_BYTES / 0x10000 {
            chunked.extend(b"10000\r\n");
            chunked.extend([b' '; 0x10000]);
            chunked.extend(b"\r\n");
        }
        assert_eq!(target.send(chunked).await, 413, "{path}, in chunks");
        target.check_unharmed().await;
    }
}

#[tokio::test]
async fn a_body_of_exactly_8_mib_is_accepted() {
    let mut target = Target::start(short_pauses()).await;
    let empty = target.call("c", "").to_string().len();
    let body = target.call("c", &"x".repeat(MAX_BYTES - empty)).to_string();
    assert_eq!(body.len(), MAX_BYTES);
    assert_eq!(target.send(request("/invoke", "", &body)).await, 200);
    assert_eq!(target.runtime.next().await.text(), (MAX_BYTES - empty).to_string());
}

/// Proves: TR-01
#[tokio::test]
async fn a_body_without_a_json_content_type_is_415() {
    let mut target = Target::start(short_pauses()).await;
    let types = [
        "",
        "content-type: \r\n",
        "content-type: text/plain\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: multipart/form-data; boundary=application/json\r\n",
        "content-type: application/jsonp\r\n",
        "content-type: text/json\r\n",
        "content-type: application/json, text/plain\r\n",
    ];
    for path in POSTS {
        for content_type in types {
            let status = target.send(post(path, content_type, target.body(path).as_bytes())).await;
            assert_eq!(status, 415, "{path} {content_type:?}");
        }
    }
    target.check_unharmed().await;
    for content_type in ["Application/JSON", "application/json; charset=utf-8", "application/json;charset=x"]
    {
        let content_type = format!("content-type: {content_type}\r\n");
        let body = target.body("/close_thread");
        assert_eq!(target.send(post("/close_thread", &content_type, body.as_bytes())).await, 200);
    }
    target.check_unharmed().await;
}

#[tokio::test]
async fn other_methods_are_405_and_other_paths_404() {
    let mut target = Target::start(short_pauses()).await;
    let ask = |method: &str, path: &str| {
        let body = target.body(path);
        let length = body.len();
        format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{JSON}content-length: {length}\r\n\r\n{body}"
        )
    };
    let mut requests = Vec::new();
    for path in POSTS {
        for method in ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
            requests.push((405, ask(method, path)));
        }
    }
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        requests.push((405, ask(method, DISCOVERY)));
    }
    for path in [
        "/",
        "/invoke/",
        "/invoke/x",
        "//invoke",
        "/./invoke",
        "/../invoke",
        "/INVOKE",
        "/migrate",
        "/.well-known/",
        "/.well-known/rap-toolset/",
        "/.well-known/../../etc/passwd",
        "/journal.db",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/close_thread%00",
        "/close_thread%2f",
    ] {
        requests.push((404, ask("POST", path)));
        requests.push((404, ask("GET", path)));
    }
    for (expected, request) in requests {
        assert_eq!(target.send(&request).await, expected, "{request}");
    }
    target.check_unharmed().await;
}

/// Proves: TR-23
#[tokio::test]
async fn malformed_or_deeply_nested_json_is_400() {
    let mut target = Target::start(short_pauses()).await;
    let deep = |open: &str, close: &str, levels: usize| {
        format!("{}{}", open.repeat(levels), close.repeat(levels)).into_bytes()
    };
    let mut bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"\0".to_vec(),
        b"\xff\xfe{}".to_vec(),
        b"nul".to_vec(),
        b"{\"a\": 01}".to_vec(),
        b"{'a': 1}".to_vec(),
        b"NaN".to_vec(),
        vec![b'['; 100_000],
        vec![b' '; 100_000],
        deep("[", "]", 65),
        deep("{\"a\":", "}", 4_000_000 / 7),
        format!("\"{}", "\\u0000".repeat(10_000)).into_bytes(),
    ];
    // Malformed values in otherwise valid messages.
    let values: [&[u8]; 8] = [
        b"\"\xc3\x28\"",
        b"\"a\0b\"",
        b"\"\\ud800\"",
        b"\"\\x41\"",
        b"1e999",
        b"-1e400",
        b"[1,]",
        b"{\"a\" 1}",
    ];
    for value in values {
        bodies.push([b"{\"thread_id\": \"t\", \"tool_call_id\": \"c\", \"more\": ", value, b"}"].concat());
        let mut call = target.call("c", "x").to_string().into_bytes();
        call.pop();
        bodies.push([call.as_slice(), b", \"more\": ", value, b"}"].concat());
    }
    bodies
        .push(format!("{{\"thread_id\": \"t\", \"n\": {}}}", "[".repeat(64) + &"]".repeat(64)).into_bytes());
    for path in POSTS {
        for body in &bodies {
            let answer = exchange(&target.server.url, post(path, JSON, body)).await;
            let shown = String::from_utf8_lossy(&body[..body.len().min(80)]);
            assert_eq!(answer.status, 400, "{path} {shown:?}");
            assert!(answer.text.len() < 1_000, "{path} {shown:?}: {}", answer.text);
        }
        target.check_unharmed().await;
    }
}

#[tokio::test]
async fn the_last_of_duplicate_keys_counts() {
    let mut target = Target::start(short_pauses()).await;
    let mut call = target.call("first", "x").to_string();
    call.pop();
    call.push_str(r#", "id": "second", "arguments": {"text": "ab", "text": "abc"}}"#);
    target.server.caller().post("/invoke", call).await;
    let result = target.runtime.next().await;
    assert_eq!((result.body["id"].as_str(), result.text()), (Some("second"), "3"));
    assert_eq!(target.journal.rows()[0], 1);
}

#[tokio::test]
async fn numbers_of_any_size_are_handled() {
    let mut target = Target::start(short_pauses()).await;
    for (round, number) in
        ["18446744073709551616", "-9223372036854775809", "1e308", "0.1e-999", &"9".repeat(300)]
            .iter()
            .enumerate()
    {
        let call = target.call(&format!("c{round}"), "x").to_string().replace("\"x\"", number);
        assert_eq!(target.send(request("/invoke", "", &call)).await, 200, "{number}");
        let result = target.runtime.next().await;
        assert!(result.text().starts_with("Error: the arguments do not match"), "{}", result.text());
        assert!(result.text().len() < 1_000, "{}", result.text());
    }
}

#[tokio::test]
async fn malformed_or_ambiguous_http_requests_are_refused() {
    let mut target = Target::start(short_pauses()).await;
    let body = target.body("/close_thread");
    let length = body.len();
    let head = format!("POST /close_thread HTTP/1.1\r\nhost: localhost\r\n{JSON}connection: close\r\n");
    let refused = [
        "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".to_owned(),
        "GET\r\n\r\n".into(),
        "POST /invoke HTTP/9.9\r\nhost: localhost\r\n\r\n".into(),
        format!("{head}content-length: {length}\r\ncontent-length: {}\r\n\r\n{body}", length - 1),
        format!("{head}content-length: -1\r\n\r\n{body}"),
        format!("{head}content-length: +{length}\r\n\r\n{body}"),
        format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{body}\r\n0\r\n\r\n"),
        format!("{head}x-long: {}\r\ncontent-length: {length}\r\n\r\n{body}", "x".repeat(1_000_000)),
        format!("{head}{}content-length: {length}\r\n\r\n{body}", "x: y\r\n".repeat(10_000)),
        format!("{head}bad header: x\r\ncontent-length: {length}\r\n\r\n{body}"),
    ];
    for request in refused {
        let answer = exchange(&target.server.url, &request).await;
        let shown: String = request.chars().take(300).collect();
        assert!((400..500).contains(&answer.status), "{shown:?}: {answer:?}");
    }
    target.check_unharmed().await;
}

#[tokio::test]
async fn a_body_that_does_not_arrive_in_time_is_408_and_its_connection_is_closed() {
    let mut limits = short_pauses();
    limits.request_within = Duration::from_millis(300);
    let mut target = Target::start(limits).await;
    for path in POSTS {
        let whole = request(path, "", &target.body(path));
        for part in [whole.len() - target.body(path).len(), whole.len() - 1] {
            assert_eq!(target.send(&whole[..part]).await, 408, "{path}");
        }
    }
    // Sending one byte at a time does not help.
    let whole = request("/invoke", "", &target.body("/invoke")).replace("connection: close\r\n", "");
    let (head, body) = whole.split_at(whole.len() - target.body("/invoke").len());
    let (mut reading, mut writing) = connect(&target.server.url).await.into_split();
    writing.write_all(head.as_bytes()).await.unwrap();
    let drops = tokio::spawn({
        let body = body.as_bytes().to_vec();
        async move {
            for byte in body {
                if writing.write_all(&[byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, reading.read_to_end(&mut answer)).await;
    drop(read.expect("the connection was not closed"));
    assert!(String::from_utf8_lossy(&answer).starts_with("HTTP/1.1 408 "));
    drops.abort();
    target.check_unharmed().await;
}

#[tokio::test]
async fn a_head_that_does_not_arrive_in_time_and_an_idle_connection_are_closed() {
    let mut limits = short_pauses();
    limits.request_within = Duration::from_millis(300);
    let mut target = Target::start(limits).await;
    for part in ["", "P", "POST /invoke HTTP/1.1\r\n", "POST /invoke HTTP/1.1\r\nhost: localhost\r\nx"] {
        let mut stream = connect(&target.server.url).await;
        stream.write_all(part.as_bytes()).await.unwrap();
        wait_until_closed(&mut stream).await;
    }
    let mut kept = connect(&target.server.url).await;
    let get = format!("GET {DISCOVERY} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    kept.write_all(get.as_bytes()).await.unwrap();
    wait_until_closed(&mut kept).await;
    target.check_unharmed().await;
}

async fn wait_until_closed(stream: &mut TcpStream) {
    let end = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
    drop(end.expect("the connection was not closed"));
}

#[tokio::test]
async fn more_idle_connections_than_allowed_do_not_block_the_server_for_long() {
    let mut limits = short_pauses();
    limits.request_within = Duration::from_millis(200);
    limits.connections = 40;
    let mut target = Target::start(limits).await;
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(connect(&target.server.url).await);
    }
    // While the server is full, it refuses connections at once.
    let close = request("/close_thread", "", &target.body("/close_thread"));
    until("idle connections are closed", async || target.send(&close).await == 200).await;
    target.check_unharmed().await;
    drop(idle);
    target.check_unharmed().await;
}

#[tokio::test]
async fn the_memory_for_request_bodies_is_bounded() {
    let mut limits = short_pauses();
    limits.arriving_bytes = 100_000;
    let mut target = Target::start(limits).await;
    let whole = request("/invoke", "", &target.call("large", &"x".repeat(60_000)).to_string());
    let mut arriving = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let mut stream = connect(&target.server.url).await;
        stream.write_all(&whole.as_bytes()[..whole.len() - 1]).await.unwrap();
        arriving.spawn(read_response(stream));
    }
    let answer = tokio::time::timeout(PATIENCE, arriving.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(answer.status, 503, "there is memory for one of them");
    assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    // There is still memory for a smaller body.
    target.check_unharmed().await;
    arriving.shutdown().await;
    until("there is memory again", async || target.send(&whole).await != 503).await;
    assert_eq!(target.runtime.next().await.text(), "60000");
}

#[tokio::test]
async fn a_client_that_disconnects_within_a_body_changes_nothing() {
    let mut target = Target::start(short_pauses()).await;
    for path in POSTS {
        let whole = request(path, "", &target.body(path));
        for part in [1, 20, whole.len() / 2, whole.len() - 1] {
            let mut stream = connect(&target.server.url).await;
            stream.write_all(&whole.as_bytes()[..part]).await.unwrap();
            stream.shutdown().await.unwrap();
            // The server closes the connection after it has seen the end.
            wait_until_closed(&mut stream).await;
        }
        target.check_unharmed().await;
    }
}

/// Proves: LC-08, LC-09
#[tokio::test]
async fn a_client_that_disconnects_before_the_answer_gets_each_result_once() {
    let mut target = Target::start(short_pauses()).await;
    // An accepted call continues after its client has disconnected.
    let call = target.runtime.invocation("wait", "t", "accepted", json!({"text": ""})).to_string();
    let mut stream = connect(&target.server.url).await;
    stream.write_all(request("/invoke", "", &call).as_bytes()).await.unwrap();
    target.gate.reached().await;
    drop(stream);
    target.gate.open(1);
    assert_eq!(target.runtime.next().await.text(), "waited");

    // A runtime that has no answer tries again, whether or not these were accepted.
    let calls: Vec<Value> = (0..50).map(|number| target.call(&format!("c{number}"), "x")).collect();
    for call in &calls {
        let mut stream = connect(&target.server.url).await;
        stream.write_all(request("/invoke", "", &call.to_string()).as_bytes()).await.unwrap();
    }
    for call in &calls {
        target.server.caller().accepted(call).await;
    }
    let mut results = HashSet::new();
    for _ in 0..50 {
        assert!(results.insert(target.runtime.next().await.name));
    }
    target.rows = target.journal.rows();
    target.check_unharmed().await;
}

#[tokio::test]
async fn a_forbidden_callback_url_is_refused() {
    let mut target = Target::start(short_pauses()).await;
    let urls = [
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "data:text/plain,x",
        "gopher://127.0.0.1:70/x",
        "unix:/var/run/docker.sock",
        "//127.0.0.1/x",
        "/callback",
        "http://",
        "http://169.254.169.254/latest/meta-data/",
        "http://169.254.169.254:80@169.254.169.254/",
        "http://127.0.0.1@169.254.169.254/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://2852039166/",
        "http://0xa9fea9fe/",
        "http://0251.0376.0251.0376/",
        "http://169.254.169.254./",
        "http://[fd00:ec2::254]/",
        "http://[fe80::1]/",
        "http://100.100.100.200/",
        "http://168.63.129.16/",
        "http://0.0.0.0:7420/",
        "http://0/",
        "http://[::]/",
        "http://255.255.255.255/",
        "http://224.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\r\nx: y",
    ];
    for url in urls {
        let mut call = target.call("c", "x");
        call["callback_url"] = json!(url);
        let (status, answer) = target.server.caller().invoke(&call).await;
        assert_eq!(status, 400, "{url}");
        assert!(answer.contains("$.callback_url: expected "), "{url}: {answer}");
    }
    target.check_unharmed().await;
    // Even if the rest of the invocation is invalid.
    let mut call = target.call("c", "x");
    call["callback_url"] = json!("http://169.254.169.254/");
    call["arguments"] = json!(7);
    assert_eq!(target.server.caller().invoke(&call).await.0, 400);
    target.check_unharmed().await;
}

#[tokio::test]
async fn a_host_name_with_a_forbidden_address_is_never_connected_to() {
    let mut target =
        Target::start_with(short_pauses(), |server| server.callbacks_to(UrlPolicy::Public)).await;
    assert_eq!(target.server.caller().invoke(&target.call("c", "x")).await.0, 400, "loopback is not public");
    assert_eq!(target.journal.rows(), [0, 0, 0]);
    let mut call = target.call("c", "x");
    call["callback_url"] = json!(target.runtime.callback_url("c").replace("127.0.0.1", "localhost"));
    target.server.caller().accepted(&call).await;
    target.journal.until("SELECT count(*) FROM calls WHERE state = 3", 1).await;
    assert!(target.runtime.pending().is_empty());
}

#[tokio::test]
async fn a_callback_url_may_contain_credentials() {
    let mut target = Target::start(short_pauses()).await;
    let mut call = target.call("c", "x");
    call["callback_url"] = json!(target.runtime.callback_url("c").replace("http://", "http://user:secret@"));
    target.server.caller().accepted(&call).await;
    assert_eq!(target.runtime.next().await.text(), "1");
}

#[tokio::test]
async fn calls_above_the_limit_are_503_until_one_has_ended() {
    let mut limits = short_pauses();
    limits.calls = 3;
    let mut target = Target::start(limits).await;
    let waiting: Vec<String> = (0..4)
        .map(|number| target.runtime.invocation("wait", "t", &format!("w{number}"), json!({"text": ""})))
        .map(|call| request("/invoke", "", &call.to_string()))
        .collect();
    for call in &waiting[..3] {
        assert_eq!(target.send(call).await, 200);
    }
    for _ in 0..10 {
        let answer = exchange(&target.server.url, &waiting[3]).await;
        assert_eq!(answer.status, 503);
        assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    }
    assert_eq!(target.journal.rows()[0], 3);
    assert_eq!(target.server.caller().close("other").await.0, 200, "other requests are still accepted");
    target.gate.open(1);
    assert_eq!(target.runtime.next().await.text(), "waited");
    until("a call is accepted again", async || target.send(&waiting[3]).await != 503).await;
    target.gate.open(3);
    for _ in 0..3 {
        assert_eq!(target.runtime.next().await.text(), "waited");
    }
    for number in 0..4 {
        target.server.caller().until_settled("t", &format!("w{number}")).await;
    }
    target.rows = target.journal.rows();
    target.check_unharmed().await;
}

#[tokio::test]
async fn without_authentication_a_foreign_host_header_is_421() {
    let mut target = Target::start(short_pauses()).await;
    let port = target.server.url.rsplit(':').next().unwrap().to_owned();
    let with_host = |target: &Target, path: &str, host: &str| {
        let lines = if host.is_empty() { String::new() } else { format!("host: {host}\r\n") };
        match path {
            DISCOVERY => format!("GET {path} HTTP/1.1\r\nconnection: close\r\n{lines}\r\n"),
            _ => request(path, "", &target.body(path)).replace("host: localhost\r\n", &lines),
        }
    };
    for path in [POSTS[0], POSTS[1], POSTS[2], POSTS[3], DISCOVERY] {
        for host in
            ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", ""]
        {
            let request = with_host(&target, path, host);
            assert_eq!(target.send(&request).await, 421, "{path} {host}");
        }
    }
    target.check_unharmed().await;
    for host in ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"] {
        for host in [host.to_owned(), format!("{host}:{port}")] {
            assert_eq!(target.send(with_host(&target, DISCOVERY, &host)).await, 200, "{host}");
        }
    }

    let open = Target::start_with(short_pauses(), |server| server.auth(Auth::OpenToAnyone)).await;
    let guarded = Target::start_with(short_pauses(), |server| server.bearer("t")).await;
    let public =
        Target::start_with(short_pauses(), |server| server.public_url("https://tools.example/hello/")).await;
    assert_eq!(open.send(with_host(&open, DISCOVERY, "any.example")).await, 200);
    assert_eq!(guarded.send(with_host(&guarded, DISCOVERY, "any.example")).await, 200);
    assert_eq!(public.send(with_host(&public, DISCOVERY, "any.example")).await, 421);
    assert_eq!(public.send(with_host(&public, DISCOVERY, "Tools.Example")).await, 200);
}

#[tokio::test]
async fn random_bytes_in_a_message_never_make_the_server_fail() {
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(10_000, 10_000);
    let mut target = Target::start(limits).await;
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random >> 33).unwrap() % below
    };
    for round in 0..600 {
        let path = POSTS[round % POSTS.len()];
        // The callback URL is not changed, so that no callback leaves this machine.
        let mut body = target.body(path).replace("\"hostile\"", &format!("\"h{round}\"")).into_bytes();
        let url = body.windows(4).position(|bytes| bytes == b"http").unwrap_or(0);
        for _ in 0..=next(4) {
            let at = next(body.len());
            if path != "/invoke" || at < url || at > url + 60 {
                body[at] = u8::try_from(next(256)).unwrap();
            }
        }
        let (status, _) = target.server.caller().post(path, body.clone()).await;
        assert!([200, 400].contains(&status), "{status} for {path} {}", String::from_utf8_lossy(&body));
    }
    let all_settled = "SELECT count(*) FROM calls WHERE state < 3";
    target.journal.until(all_settled, 0).await;
    target.runtime.pending();
    target.rows = target.journal.rows();
    target.check_unharmed().await;
}
