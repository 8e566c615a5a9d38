//! A client that also works while the runtime is down, and callbacks with event ids.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rap_testkit::http::{self, Response};
use rap_testkit::tools::{Call, with};
use rap_testkit::{Client, Rap, Setup, Tools, until};
use serde_json::{Value, json};

/// Prepares a runtime with one tool server and its database in a directory of its own.
pub fn setup(tools: &Tools) -> Setup {
    Setup::new().tools(tools).store("url = \"sqlite:data/rap.db\"")
}

/// Prepares the runtime, but does not start it.
pub fn prepared(setup: Setup) -> Rap {
    let rap = setup.prepare(tempfile::tempdir().unwrap());
    fs::create_dir(data(&rap)).unwrap();
    rap
}

/// Starts a runtime with one tool server.
pub fn start(setup: Setup) -> (Rap, Api) {
    let mut rap = prepared(setup);
    rap.start_again();
    let api = Api(rap.client());
    (rap, api)
}

/// The directory of the database.
pub fn data(rap: &Rap) -> PathBuf {
    rap.directory().join("data")
}

/// An event that is handled in a child thread; its text is also its id.
pub fn event_for_child(call: &Call, text: &str) -> Value {
    with(call.event(text), json!({"event_id": text}))
}

/// An event that is handled in the thread itself; its text is also its id.
pub fn event(call: &Call, text: &str) -> Value {
    with(call.inline(text), json!({"event_id": text}))
}

/// True for a 503 because nothing can be written.
pub fn is_unavailable(answer: &Response) -> bool {
    let code = &answer.body["error"]["code"];
    answer.status == 503
        && answer.retry_after() == Some(Duration::from_secs(1))
        && code == "store_unavailable"
}

/// Client of a runtime that restarts.
#[derive(Clone)]
pub struct Api(Client);

impl Deref for Api {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl Api {
    /// Client of a runtime that was started before.
    pub fn of(rap: &Rap) -> Api {
        Api(rap.client())
    }

    /// Client of a runtime at a URL.
    pub fn at(url: &str) -> Api {
        Api(Client::new(url, None))
    }

    /// GETs a path. False if there is no answer, or another one than 200.
    pub async fn try_get(&self, path: &str) -> bool {
        let url = format!("{}{path}", self.url);
        http::attempt("GET", &url, &[], b"").await.is_ok_and(|reply| reply.status == 200)
    }

    /// GETs a path. `None` if there is no answer, or another one than 200.
    pub async fn try_read(&self, path: &str) -> Option<Value> {
        let reply = http::attempt("GET", &format!("{}{path}", self.url), &[], b"").await.ok()?;
        (reply.status == 200).then_some(reply.body)
    }

    /// POSTs to a path or a full URL. `None` if there is no answer.
    pub async fn try_post(&self, to: &str, body: &Value) -> Option<Response> {
        let url = if to.starts_with('/') { format!("{}{to}", self.url) } else { to.to_owned() };
        let headers = [("content-type", "application/json")];
        http::attempt("POST", &url, &headers, body.to_string().as_bytes()).await.ok()
    }

    /// POSTs until the request is accepted.
    pub async fn post_until_accepted(&self, to: &str, body: &Value) {
        until("it is accepted", || async {
            let Some(reply) = self.try_post(to, body).await else { return false };
            assert!(reply.status < 300 || reply.status >= 500, "{reply:?} to {body}");
            reply.status < 300
        })
        .await;
    }

    pub async fn create(&self, thread: &str, message: &str) {
        self.post("/v1/threads", &json!({"id": thread, "message": message})).await.expect(201);
    }

    /// Reads the whole history page by page.
    pub async fn whole_history(&self, thread: &str) -> Vec<Value> {
        let mut entries: Vec<Value> = Vec::new();
        loop {
            let after = entries.last().map_or(0, |entry| entry["seq"].as_u64().unwrap());
            let page = self.get(&format!("/v1/threads/{thread}/history?limit=1000&after={after}")).await;
            let page = page.expect(200)["entries"].as_array().unwrap().clone();
            if page.is_empty() {
                return entries;
            }
            entries.extend(page);
        }
    }

    /// Texts of the history in order, without notices.
    pub async fn texts(&self, thread: &str) -> Vec<String> {
        let text = |entry: &Value| match entry["kind"].as_str().unwrap() {
            "notice" => None,
            "result" => Some(entry["content"].as_str().unwrap().to_owned()),
            "assistant" if !entry["calls"].as_array().unwrap().is_empty() => None,
            _ => Some(entry["text"].as_str().unwrap().to_owned()),
        };
        self.whole_history(thread).await.iter().filter_map(text).collect()
    }

    pub async fn until_said(&self, thread: &str, text: &str) {
        let said = || async { self.texts(thread).await.iter().any(|said| said == text) };
        until(&format!("{text:?} in the history of {thread}"), said).await;
    }

    /// Waits until the acknowledgement of the call is on disk.
    pub async fn until_acknowledged(&self, call: &Call) {
        until("the acknowledgement", || async {
            let calls = self.raw_listing("calls?limit=1000").await;
            let ours = |open: &&Value| open["thread_id"] == call.thread() && open["call_id"] == call.id();
            calls.iter().find(ours).is_some_and(|open| !open["acknowledged_at"].is_null())
        })
        .await;
    }
}

pub fn names_in(dir: &Path) -> Vec<String> {
    let Ok(files) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
