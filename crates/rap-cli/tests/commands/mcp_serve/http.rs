//! `rap mcp serve --listen`: sessions, and requests that must be refused.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rap_testkit::http::{Response, send};
use rap_testkit::tools::CLOSE;
use rap_testkit::{Tools, programs};
use serde_json::{Value, json};

use super::client::text;
use crate::support::output;

/// `rap mcp serve` on a free port of this machine.
pub struct Server {
    child: Child,
    /// URL of the endpoint.
    pub url: String,
}

impl Server {
    /// Starts it for a tool server, with more flags.
    pub fn start(toolset: &str, flags: &[&str]) -> Server {
        Server::run(programs::rap(&[&["mcp", "serve", "--toolset", toolset], flags].concat()))
    }

    pub fn run(mut command: Command) -> Server {
        let mut child = command.args(["--listen", "127.0.0.1:0"]).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.by_ref().find(|line| line.starts_with("MCP at ")).expect("it did not start");
        // The log must be read, or the server stops when the pipe is full.
        std::thread::spawn(move || lines.for_each(drop));
        Server { child, url: line.trim_start_matches("MCP at ").to_owned() }
    }

    /// Sends SIGTERM and returns the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        let id = rustix::process::Pid::from_raw(self.child.id().cast_signed()).unwrap();
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }

    pub async fn post(&self, headers: &[(&str, &str)], body: &Value) -> Response {
        let accept =
            [("accept", "application/json, text/event-stream"), ("content-type", "application/json")];
        send("POST", &self.url, &[&accept, headers].concat(), body.to_string().as_bytes()).await
    }

    /// Opens a session. Returns its id.
    pub async fn session(&self) -> String {
        let opened = self.post(&[], &initialize()).await;
        assert_eq!(opened.status, 200, "{}", opened.text);
        let session = opened.header("mcp-session-id").unwrap().to_owned();
        let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert_eq!(self.post(&[("mcp-session-id", &session)], &initialized).await.status, 202);
        session
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn initialize() -> Value {
    let client = json!({"name": "test", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
}

fn work() -> Value {
    json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "work", "arguments": {}}})
}

/// Returns the result in the last event of a stream.
pub fn result(response: &Response) -> Value {
    let data = response.text.lines().filter_map(|line| line.strip_prefix("data:")).next_back();
    let mut message: Value = serde_json::from_str(data.unwrap_or(&response.text)).unwrap();
    message["result"].take()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_session_is_a_thread_that_closes_with_it() {
    let tools = Tools::start().await;
    let mut server = Server::start(&tools.url, &[]);
    let mut threads = Vec::new();
    for _ in 0..2 {
        let session = server.session().await;
        let headers = [("mcp-session-id", session.as_str()), ("mcp-protocol-version", "2025-11-25")];
        let returning = async {
            let call = tools.invocation().await;
            call.returns("over HTTP").await;
            call.thread().to_owned()
        };
        let (answer, work) = (work(), returning);
        let (response, thread) = tokio::join!(server.post(&headers, &answer), work);
        assert_eq!(text(&result(&response)), "over HTTP");
        threads.push((session, thread));
    }
    assert_ne!(threads[0].1, threads[1].1);
    let ended = send("DELETE", &server.url, &[("mcp-session-id", &threads[0].0)], b"").await;
    assert!((200..300).contains(&ended.status), "{}", ended.text);
    assert_eq!(tools.notified(CLOSE, 1).await, [json!({"thread_id": threads[0].1})]);
    let gone = server.post(&[("mcp-session-id", &threads[0].0)], &work()).await;
    assert_eq!(gone.status, 404);
    assert_eq!(server.stop(), Some(0));
    assert_eq!(tools.notified(CLOSE, 1).await, [json!({"thread_id": threads[1].1})]);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_foreign_pages_and_bad_requests_are_refused() {
    let tools = Tools::start().await;
    let server = Server::start(&tools.url, &["--allow-origin", "https://app.example:443"]);
    let host = server.url.trim_start_matches("http://").trim_end_matches("/mcp").to_owned();
    for origin in ["http://evil.example", "null", "http://127.0.0.1:1", "https://app.example:8443", "garbage"]
    {
        let refused = server.post(&[("origin", origin)], &initialize()).await;
        assert_eq!(refused.status, 403, "{origin}");
    }
    for origin in [format!("http://{host}"), "https://app.example".into()] {
        assert_eq!(server.post(&[("origin", &origin)], &initialize()).await.status, 200, "{origin}");
    }
    let rebound = server.post(&[("host", "evil.example")], &initialize()).await;
    assert_eq!(rebound.status, 403);
    assert_eq!(server.post(&[("mcp-session-id", "made-up")], &work()).await.status, 404);
    assert_eq!(server.post(&[], &work()).await.status, 400);
    let head = [("accept", "application/json, text/event-stream"), ("content-type", "text/plain")];
    assert_eq!(send("POST", &server.url, &head, b"{}").await.status, 415);
    let head = [("accept", "application/json, text/event-stream"), ("content-type", "application/json")];
    let status = send("POST", &server.url, &head, b"{").await.status;
    assert!((400..500).contains(&status), "{status}");
    let huge = format!("{}\"{}\"", " ", "x".repeat(17 * 1024 * 1024));
    assert_eq!(send("POST", &server.url, &head, huge.as_bytes()).await.status, 413);
    assert_eq!(send("GET", &server.url.replace("/mcp", "/"), &[], b"").await.status, 404);
    assert_eq!(send("PUT", &server.url, &[], b"").await.status, 405);
    let session = server.session().await;
    let unknown = json!({"jsonrpc": "2.0", "id": 3, "method": "made/up", "params": {}});
    let answer = server.post(&[("mcp-session-id", &session)], &unknown).await;
    assert!(answer.text.contains("-32601"), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_required_where_it_is_set_and_beyond_this_machine() {
    let tools = Tools::start().await;
    let server = Server::start(&tools.url, &["--require-token", "s3cr3t"]);
    for shown in [None, Some("Bearer wrong"), Some("Basic s3cr3t"), Some("s3cr3t")] {
        let headers: Vec<(&str, &str)> = shown.map(|shown| ("authorization", shown)).into_iter().collect();
        let refused = server.post(&headers, &initialize()).await;
        assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("bearer")), "{shown:?}");
    }
    assert_eq!(server.post(&[("authorization", "Bearer s3cr3t")], &initialize()).await.status, 200);
    for token in ["", "s3cr3t"] {
        let url = tools.url.clone();
        let refused = tokio::task::spawn_blocking(move || {
            let arguments =
                ["mcp", "serve", "--toolset", &url, "--listen", "0.0.0.0:0", "--require-token", token];
            output(&mut programs::rap(&arguments))
        });
        let refused = refused.await.unwrap();
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.err.contains("RAP_MCP_TOKEN"), "{}", refused.err);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_session_share_a_thread() {
    let tools = Tools::start().await;
    let server = Server::start(&tools.url, &[]);
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let mut request = work();
    request["params"]["_meta"] = meta;
    let headers =
        [("mcp-protocol-version", "2026-07-28"), ("mcp-method", "tools/call"), ("mcp-name", "work")];
    let mut threads = Vec::new();
    for _ in 0..2 {
        let returning = async {
            let call = tools.invocation().await;
            call.returns("stateless").await;
            call.thread().to_owned()
        };
        let (response, thread) = tokio::join!(server.post(&headers, &request), returning);
        assert_eq!(text(&result(&response)), "stateless");
        threads.push(thread);
    }
    assert_eq!(threads[0], threads[1]);
    assert_eq!(tools.count(CLOSE), 0);
}
