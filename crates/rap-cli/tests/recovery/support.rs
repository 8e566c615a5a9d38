//! A `rap serve` process that can be killed and restarted, and a fake tool server.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path as UrlPath, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

#[path = "../support/process.rs"]
mod process;

use self::process::{Process, free_port};

/// Maximum time to wait for an expected event.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(15);

/// Waits until something holds.
pub async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// A fake tool server.
pub struct Tools {
    pub url: String,
    pub invoked: mpsc::UnboundedReceiver<Value>,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    url: String,
    mode: watch::Sender<Mode>,
    invoked: mpsc::UnboundedSender<Value>,
    /// Status codes for the next answers of people; 200 when it is empty.
    answer_with: Mutex<VecDeque<u16>>,
    answers: Mutex<Vec<Value>>,
}

/// Behaviour of the server for invocations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    With(u16),
    /// Not before the mode changes.
    Later,
}

impl Tools {
    pub async fn start() -> Tools {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, invoked) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            url: url.clone(),
            mode: watch::Sender::new(Mode::With(200)),
            invoked: sender,
            answer_with: Mutex::default(),
            answers: Mutex::default(),
        });
        let router = Router::new()
            .route("/.well-known/rap-toolset", get(toolset))
            .route("/invoke", post(invoke))
            .route("/answers/{name}", post(answer))
            .fallback(async || StatusCode::OK)
            .with_state(Arc::clone(&shared));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Tools { url, invoked, shared, task }
    }

    pub fn acknowledge(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
    }

    /// Waits for the next invocation, acknowledged or not.
    pub async fn next(&mut self) -> Call {
        let next = tokio::time::timeout(PATIENCE, self.invoked.recv()).await;
        Call(next.expect("no invocation came").expect("the tools are gone"))
    }

    /// Invocations that were received and not taken yet.
    pub fn pending(&mut self) -> Vec<Call> {
        std::iter::from_fn(|| self.invoked.try_recv().ok()).map(Call).collect()
    }

    /// Refuses the next answers of people with these status codes.
    pub fn refuse_answers(&self, statuses: &[u16]) {
        self.shared.answer_with.lock().unwrap().extend(statuses);
    }

    /// Answers of people so far, including refused ones.
    pub fn answers(&self) -> Vec<Value> {
        self.shared.answers.lock().unwrap().clone()
    }
}

impl Drop for Tools {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn toolset(State(shared): State<Arc<Shared>>) -> axum::Json<Value> {
    let tool =
        |name: &str| json!({"name": name, "description": "It works.", "inputSchema": {"type": "object"}});
    axum::Json(json!({
        "name": "works",
        "endpoint": format!("{}/invoke", shared.url),
        "tools": [tool("work"), tool("watch")],
    }))
}

async fn invoke(State(shared): State<Arc<Shared>>, body: Bytes) -> StatusCode {
    let mut mode = shared.mode.subscribe();
    // The receiver is gone when the test is over.
    shared.invoked.send(serde_json::from_slice(&body).unwrap()).ok();
    let mode = *mode.wait_for(|mode| *mode != Mode::Later).await.unwrap();
    let Mode::With(status) = mode else { unreachable!() };
    StatusCode::from_u16(status).unwrap()
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    UrlPath(name): UrlPath<String>,
    body: Bytes,
) -> StatusCode {
    let mut body: Value = serde_json::from_slice(&body).unwrap();
    body["name"] = json!(name);
    shared.answers.lock().unwrap().push(body);
    let status = shared.answer_with.lock().unwrap().pop_front().unwrap_or(200);
    StatusCode::from_u16(status).unwrap()
}

/// A received invocation.
#[derive(Debug, Clone, PartialEq)]
pub struct Call(pub Value);

impl Call {
    pub fn id(&self) -> &str {
        self.0["id"].as_str().unwrap()
    }

    pub fn thread(&self) -> &str {
        self.0["group_id"].as_str().unwrap()
    }

    pub fn callback_url(&self) -> &str {
        self.0["callback_url"].as_str().unwrap()
    }

    pub fn result(&self, text: &str) -> Value {
        json!({"type": "tool_result", "group_id": self.thread(), "id": self.id(), "text": text})
    }

    pub fn confirmation(&self) -> Value {
        let mut result = self.result("watching");
        result["subscription"] = json!(true);
        result
    }

    /// An event that is handled in the thread itself.
    pub fn event(&self, text: &str) -> Value {
        let mut event = self.event_for_child(text);
        event["associative"] = json!(true);
        event
    }

    pub fn event_for_child(&self, text: &str) -> Value {
        let (thread, id) = (self.thread(), self.id());
        json!({"type": "subscription_event", "group_id": thread, "tool_call_id": id, "text": text, "event_id": text})
    }

    pub fn choice(&self, response_url: &str) -> Value {
        json!({
            "type": "user_choice", "group_id": self.thread(), "id": self.id(), "prompt": "Red or green?",
            "choices": ["red", "green"], "default": 0, "response_url": response_url,
        })
    }
}

/// Directory, port and settings of a runtime. They outlive its processes.
pub struct Home {
    dir: TempDir,
    port: u16,
}

impl Home {
    pub fn new(tools: &Tools, limits: &str) -> Home {
        let home = Home { dir: tempfile::tempdir().unwrap(), port: free_port() };
        fs::create_dir(home.data()).unwrap();
        let text = format!(
            "[store]\nurl = \"sqlite:data/rap.db\"\n[model]\nprovider = \"scripted\"\n[[tool_server]]\nurl = \"{}\"\n\
             [limits]\n{limits}\n",
            tools.url
        );
        fs::write(home.dir.path().join("rap.toml"), text).unwrap();
        home
    }

    /// The directory of the database.
    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub fn command(&self) -> Command {
        self.command_on(&self.address())
    }

    pub fn command_on(&self, address: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rap"));
        self.with_arguments(&mut command, address);
        command
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Runs it through another program, such as a shell with `exec "$0" "$@"`.
    pub fn command_by(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).arg(env!("CARGO_BIN_EXE_rap"));
        self.with_arguments(&mut command, &self.address());
        command
    }

    fn with_arguments(&self, command: &mut Command, address: &str) {
        command.arg("serve").arg("--config").arg(self.dir.path().join("rap.toml"));
        command.args(["--listen", address]);
        let ours = std::env::vars_os().map(|(name, _)| name);
        for name in ours.filter(|name| name.to_string_lossy().starts_with("RAP_")) {
            command.env_remove(name);
        }
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
    }

    pub fn start(&self) -> Rap {
        Rap::spawn(self.command())
    }

    /// Runs a process that has to fail at its start. Returns its log.
    pub fn refused(command: Command) -> String {
        Process::refused(command)
    }

    pub fn client(&self) -> Api {
        Api::new(&format!("http://{}", self.address()))
    }
}

/// A process. It is killed on drop.
pub struct Rap(Process);

impl Rap {
    /// Starts and waits until it listens.
    pub fn spawn(command: Command) -> Rap {
        Rap(Process::start(command))
    }

    pub fn pid(&self) -> String {
        self.0.id().to_string()
    }

    pub fn log(&self) -> String {
        self.0.log()
    }

    pub async fn until_logged(&self, text: &str) {
        until(&format!("{text:?} is logged"), || async { self.log().contains(text) }).await;
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(mut self) {
        self.0.kill();
    }

    pub fn signal(&self, name: &str) {
        self.0.signal(name);
    }

    pub fn is_running(&mut self) -> bool {
        self.0.ended().is_none()
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.0.ended() {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "it did not end in time:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// HTTP client for the client API and the callback endpoint.
#[derive(Clone)]
pub struct Api {
    url: String,
    client: Client,
}

/// An answer of the runtime.
#[derive(Debug, PartialEq)]
pub struct Reply {
    pub status: u16,
    pub retry_after: Option<Duration>,
    pub body: Value,
}

impl Reply {
    /// True for a 503 because nothing can be written.
    pub fn is_unavailable(&self) -> bool {
        let code = &self.body["error"]["code"];
        self.status == 503 && self.retry_after == Some(Duration::from_secs(1)) && code == "store_unavailable"
    }
}

impl Api {
    fn new(url: &str) -> Api {
        // A pooled connection could belong to a killed process.
        let limits = ClientLimits {
            idle_per_host: 0,
            drain_bytes: 1 << 20,
            total: Duration::from_secs(10),
            ..ClientLimits::default()
        };
        Api { url: url.to_owned(), client: Client::new(UrlPolicy::Local, limits) }
    }

    /// POSTs to a path or a full URL. `None` if there is no answer.
    pub async fn try_post(&self, to: &str, body: &Value) -> Option<Reply> {
        let url = if to.starts_with('/') { format!("{}{to}", self.url) } else { to.to_owned() };
        let sent = self.client.post_json(&url.parse().unwrap(), &[], body.to_string().into()).await.ok()?;
        let body = serde_json::from_slice(&sent.body).unwrap_or(Value::Null);
        Some(Reply { status: sent.status, retry_after: sent.retry_after, body })
    }

    pub async fn post(&self, to: &str, body: &Value) -> Reply {
        self.try_post(to, body).await.unwrap_or_else(|| panic!("no answer to a POST to {to}"))
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

    pub async fn call_back(&self, call: &Call, body: &Value) -> u16 {
        self.post(call.callback_url(), body).await.status
    }

    pub async fn get(&self, path: &str) -> Reply {
        let url = format!("{}{path}", self.url).parse().unwrap();
        let got = self.client.get(&url, &[], 64 << 20).await.unwrap();
        let body = serde_json::from_slice(&got.body).unwrap_or(Value::Null);
        Reply { status: got.status, retry_after: got.retry_after, body }
    }

    pub async fn create(&self, thread: &str, message: &str) {
        let reply = self.post("/v1/threads", &json!({"id": thread, "message": message})).await;
        assert_eq!(reply.status, 201, "{reply:?}");
    }

    pub async fn say(&self, thread: &str, text: &str, on_busy: &str) -> Reply {
        let body = json!({"text": text, "on_busy": on_busy});
        self.post(&format!("/v1/threads/{thread}/messages"), &body).await
    }

    pub async fn thread(&self, thread: &str) -> Value {
        let reply = self.get(&format!("/v1/threads/{thread}")).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.body
    }

    pub async fn until_status(&self, thread: &str, status: &str) {
        let is = || async { self.thread(thread).await["status"] == status };
        until(&format!("{thread} is {status}"), is).await;
    }

    /// Reads the whole history page by page.
    pub async fn history(&self, thread: &str) -> Vec<Value> {
        let mut entries: Vec<Value> = Vec::new();
        loop {
            let after = entries.last().map_or(0, |entry| entry["seq"].as_u64().unwrap());
            let reply = self.get(&format!("/v1/threads/{thread}/history?limit=1000&after={after}")).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let page = reply.body["entries"].as_array().unwrap().clone();
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
        self.history(thread).await.iter().filter_map(text).collect()
    }

    pub async fn until_said(&self, thread: &str, text: &str) {
        let said = || async { self.texts(thread).await.iter().any(|said| said == text) };
        until(&format!("{text:?} is in the history of {thread}"), said).await;
    }

    /// Waits until the acknowledgement of the call is on disk.
    pub async fn until_acknowledged(&self, call: &Call) {
        until("the acknowledgement is noted", || async {
            let calls = self.get("/v1/calls?limit=1000").await.body;
            let calls = calls["calls"].as_array().unwrap().clone();
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
