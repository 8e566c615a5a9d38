//! A fake runtime: it answers each request as the test says and records when it arrived.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rap_testkit::PATIENCE;
use rap_testkit::programs::rap;
use serde_json::{Value, json};

/// A received request.
#[derive(Debug)]
pub struct Request {
    pub path: String,
    /// Number of earlier requests for this path.
    pub before: usize,
    pub last_event_id: Option<u64>,
    pub at: Instant,
}

/// Answer to a request.
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
    /// Delay before the answer.
    pub delay: Duration,
    pub end: End,
}

/// Handling of the connection after the response.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Close,
    /// It stays open until the client closes it.
    KeepOpen,
}

impl Answer {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status, body: body.into(), delay: Duration::ZERO, end: End::Close }
    }

    /// A stream that ends after these bytes.
    pub fn stream(body: impl Into<Vec<u8>>) -> Answer {
        Answer::new(200, body)
    }

    /// A stream that stays open after these bytes.
    pub fn open_stream(body: impl Into<Vec<u8>>) -> Answer {
        Answer { end: End::KeepOpen, ..Answer::new(200, body) }
    }
}

pub struct FakeRuntime {
    url: String,
    requests: mpsc::Receiver<Request>,
}

impl FakeRuntime {
    pub fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> FakeRuntime {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = mpsc::channel();
        let answer = std::sync::Arc::new(answer);
        std::thread::spawn(move || {
            let mut paths: Vec<String> = Vec::new();
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let (path, last_event_id) = read(&stream);
                let before = paths.iter().filter(|earlier| **earlier == path).count();
                paths.push(path.clone());
                let request = Request { path, before, last_event_id, at: Instant::now() };
                let given = answer(&request);
                if sender.send(request).is_err() {
                    return;
                }
                std::thread::spawn(move || send(stream, &given));
            }
        });
        FakeRuntime { url, requests }
    }

    /// A runtime with one thread, `t`, and its event stream. Every other path is answered 404.
    pub fn with_stream(stream: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> FakeRuntime {
        FakeRuntime::start(move |request| match request.path.as_str() {
            "/v1/threads/t" => Answer::new(200, thread().to_string()),
            EVENTS => stream(request),
            _ => Answer::new(404, r#"{"error": {"code": "not_found", "message": "no such path"}}"#),
        })
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = rap(arguments);
        command.env("RAP_URL", &self.url);
        command
    }

    /// Waits for the next request for a path.
    pub fn next(&self, path: &str) -> Request {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let request =
                self.requests.recv_timeout(left).unwrap_or_else(|_| panic!("no request for {path}"));
            if request.path == path {
                return request;
            }
        }
    }
}

/// Path of the thread's event stream.
pub const EVENTS: &str = "/v1/threads/t/events";

/// The thread `t` as the API gives it.
pub fn thread() -> Value {
    json!({
        "id": "t", "parent": null, "agent": "default", "title": null, "status": "idle", "why": null,
        "waiting_on": [], "subscriptions": [], "children": 0, "held": 0, "turn": 2,
        "created_at": "2026-01-01T00:00:00.000Z", "updated_at": "2026-01-01T00:00:00.000Z",
    })
}

/// An event with an entry: a text of the agent.
pub fn said(seq: u64, text: &str) -> String {
    let entry =
        json!({"seq": seq, "at": "2026-01-01T00:00:00.000Z", "kind": "assistant", "text": text, "calls": []});
    format!("id: {seq}\nevent: entry\ndata: {entry}\n\n")
}

/// An event with the status of the thread.
pub fn status(status: &str) -> String {
    format!("event: status\ndata: {}\n\n", json!({"status": status, "turn": 2}))
}

/// Reads a request. Returns its path and its `Last-Event-ID`.
fn read(stream: &TcpStream) -> (String, Option<u64>) {
    let mut reader = BufReader::new(stream);
    let head: Vec<String> =
        reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let first = head.first().map_or("", String::as_str);
    let path = first.split([' ', '?']).nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        let lines = head.iter().filter_map(|line| line.split_once(':'));
        let value = lines.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?.1;
        value.trim().parse::<u64>().ok()
    };
    reader.take(header("content-length").unwrap_or(0)).read_to_end(&mut Vec::new()).ok();
    (path, header("last-event-id"))
}

fn send(mut stream: TcpStream, answer: &Answer) {
    std::thread::sleep(answer.delay);
    let head = format!("HTTP/1.1 {} Answer\r\nconnection: close\r\n\r\n", answer.status);
    // The client may close the connection early.
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&answer.body));
    if written.is_ok() && answer.end == End::KeepOpen {
        stream.read_to_end(&mut Vec::new()).ok();
    }
}
