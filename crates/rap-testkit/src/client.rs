//! A client of a runtime: the client API, and what tests wait for in it.

use serde_json::{Value, json};

use crate::http::{self, Response};
use crate::ids::Ids;
use crate::{PATIENCE, until};

/// Sends requests to a runtime, which may be restarted meanwhile.
#[derive(Debug, Clone)]
pub struct Client {
    pub url: String,
    token: Option<String>,
}

impl Client {
    pub fn new(url: &str, token: Option<&str>) -> Client {
        Client { url: url.to_owned(), token: token.map(str::to_owned) }
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        http::send(method, &format!("{}{path}", self.url), headers, body).await
    }

    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    pub async fn get(&self, path: &str) -> Response {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        self.send("GET", path, &headers, b"").await
    }

    /// POSTs JSON. The path may contain the name of a call instead of its id.
    pub async fn post(&self, path: &str, body: &Value) -> Response {
        let parts: Vec<&str> = path.split('/').collect();
        let named = match parts.as_slice() {
            ["", "v1", "threads", thread, "calls", name, order] if name.starts_with("call_") => {
                let id = self.call(thread, name).await;
                Some(format!("/v1/threads/{thread}/calls/{id}/{order}"))
            }
            _ => None,
        };
        let path = named.as_deref().unwrap_or(path);
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers: Vec<_> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        headers.push(("content-type", "application/json"));
        self.send("POST", path, &headers, body.to_string().as_bytes()).await
    }

    /// Creates a thread with a first message.
    pub async fn open(&self, message: &str) -> String {
        let thread = self.post("/v1/threads", &json!({"message": message})).await.expect(201);
        thread["id"].as_str().unwrap().to_owned()
    }

    pub async fn say(&self, thread: &str, text: &str) {
        self.post(&format!("/v1/threads/{thread}/messages"), &json!({"text": text})).await.expect(202);
    }

    /// Sends a message with this `on_busy`.
    pub async fn say_on_busy(&self, thread: &str, text: &str, on_busy: &str) -> Response {
        let body = json!({"text": text, "on_busy": on_busy});
        self.post(&format!("/v1/threads/{thread}/messages"), &body).await
    }

    /// POSTs to a path below the thread without a body, such as `close`.
    pub async fn act(&self, thread: &str, action: &str) -> Response {
        self.post(&format!("/v1/threads/{thread}/{action}"), &Value::Null).await
    }

    /// Ids and names of a thread's calls. Empty if the thread cannot be read.
    pub async fn ids(&self, thread: &str) -> Ids {
        let history = self.get(&format!("/v1/threads/{thread}/history?limit=1000")).await;
        if history.status != 200 {
            return Ids::default();
        }
        Ids::of(history.expect(200)["entries"].as_array().unwrap())
    }

    /// Id of the call with this name.
    pub async fn call(&self, thread: &str, name: &str) -> String {
        self.ids(thread).await.id(name).to_owned()
    }

    pub async fn close(&self, thread: &str) {
        self.act(thread, "close").await.expect(202);
    }

    /// Returns the thread, with call names instead of ids.
    pub async fn thread(&self, thread: &str) -> Value {
        let found = self.get(&format!("/v1/threads/{thread}")).await.expect(200);
        self.ids(thread).await.named_in(&found)
    }

    /// Polls the thread until the condition holds.
    pub async fn until(&self, thread: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let seen = until(what, async || Some(self.thread(thread).await).filter(|thread| is(thread)));
        let name = thread;
        match tokio::time::timeout(PATIENCE / 2, seen).await {
            Ok(thread) => thread,
            Err(_) => {
                let (thread, transcript) = (self.thread(name).await, self.transcript(name).await.join("\n"));
                panic!("timed out waiting for {what}: {thread}\n{transcript}");
            }
        }
    }

    pub async fn until_status(&self, thread: &str, status: &str) -> Value {
        self.until(thread, status, |thread| thread["status"] == status).await
    }

    pub async fn until_idle(&self, thread: &str) -> Value {
        self.until_status(thread, "idle").await
    }

    /// Polls the transcript until it contains this line.
    pub async fn until_line(&self, thread: &str, line: &str) {
        let seen =
            until(line, async || self.transcript(thread).await.iter().any(|told| told == line).then_some(()));
        if tokio::time::timeout(PATIENCE / 2, seen).await.is_err() {
            panic!("no line {line:?} in:\n{}", self.transcript(thread).await.join("\n"));
        }
    }

    /// Returns the history as the API gives it.
    pub async fn raw_history(&self, thread: &str) -> Vec<Value> {
        let history = self.get(&format!("/v1/threads/{thread}/history?limit=1000")).await.expect(200);
        history["entries"].as_array().unwrap().clone()
    }

    /// The history, with names of calls instead of ids.
    pub async fn history(&self, thread: &str) -> Vec<Value> {
        let history = self.raw_history(thread).await;
        let ids = Ids::of(&history);
        history.iter().map(|entry| ids.named_in(entry)).collect()
    }

    /// Returns the history as lines of text, one for each message, call and result.
    pub async fn transcript(&self, thread: &str) -> Vec<String> {
        self.history(thread).await.iter().flat_map(lines).collect()
    }

    /// Returns the rows of a listing such as `calls`, as the API gives them.
    pub async fn raw_listing(&self, name: &str) -> Vec<Value> {
        let rows = self.get(&format!("/v1/{name}")).await.expect(200);
        rows.as_object().unwrap().values().find_map(Value::as_array).unwrap().clone()
    }

    /// Returns the rows of a listing, with call names instead of ids.
    pub async fn listing(&self, name: &str) -> Vec<Value> {
        let rows = self.raw_listing(name).await;
        let mut ids = Ids::default();
        for row in &rows {
            if let Some(thread) = row["thread_id"].as_str() {
                ids.add(&self.raw_history(thread).await);
            }
        }
        rows.iter().map(|row| ids.named_in(row)).collect()
    }

    /// Returns the children of a thread, including closed ones.
    pub async fn children(&self, thread: &str) -> Vec<Value> {
        let threads = self.get(&format!("/v1/threads?parent={thread}")).await.expect(200);
        threads["threads"].as_array().unwrap().clone()
    }

    /// Waits for the first child of a thread and returns its id.
    pub async fn child(&self, thread: &str) -> String {
        let child = until("a child", async || self.children(thread).await.into_iter().next()).await;
        child["id"].as_str().unwrap().to_owned()
    }
}

fn lines(entry: &Value) -> Vec<String> {
    let text = |name: &str| match &entry[name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match entry["kind"].as_str().unwrap() {
        "user" if entry["from"] == "runtime" => vec![format!("runtime: {}", text("text"))],
        "user" => vec![format!("user: {}", text("text"))],
        "summary" => vec![format!("summary to {}: {}", entry["covers"], text("text"))],
        "notice" => vec![format!("notice: {}", text("text"))],
        "result" => vec![format!("result {}: {}", text("call_id"), text("content"))],
        "assistant" => {
            let calls = entry["calls"].as_array().unwrap();
            let said = Some(text("text")).filter(|said| !said.is_empty() || calls.is_empty());
            let said = said.map(|said| format!("assistant: {said}"));
            said.into_iter().chain(calls.iter().map(call_line)).collect()
        }
        other => panic!("an entry of kind {other}"),
    }
}

fn call_line(call: &Value) -> String {
    let made = if call["synthetic"] == true { "synthetic call" } else { "call" };
    let [id, name] = ["id", "name"].map(|key| call[key].as_str().unwrap());
    format!("{made} {id} {name} {}", call["arguments"])
}
