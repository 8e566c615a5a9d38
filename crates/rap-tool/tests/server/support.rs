//! Test support: a runtime that invokes tools over real HTTP and receives their callbacks, and tool servers.

use std::collections::VecDeque;
use std::ops::Deref;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::routing::post;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Callback, UrlPolicy, parse_callback};
use rap_testkit::peer::serve_router;
use rap_testkit::programs::{example, tool_server};
use rap_testkit::{PATIENCE, Process, until};
use rap_tool::{Limits, ToolServer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// The receiving half of a runtime: an endpoint for callbacks with configurable answers.
pub struct Runtime {
    pub url: String,
    received: mpsc::UnboundedReceiver<Received>,
    script: Arc<Script>,
    task: JoinHandle<()>,
}

/// A received callback.
#[derive(Debug, Clone)]
pub struct Received {
    /// The part of the path after `/callback/`.
    pub name: String,
    /// The query string.
    pub query: String,
    pub body: Value,
    pub headers: HeaderMap,
    /// The bytes of the body.
    pub raw: Bytes,
    pub at: Instant,
    /// The body, parsed and validated as by a runtime.
    pub message: Callback,
    /// Status of the answer.
    pub status: u16,
}

impl Received {
    pub fn text(&self) -> &str {
        self.body["text"].as_str().unwrap_or_else(|| panic!("no text in {}", self.body))
    }

    pub fn event_id(&self) -> &str {
        self.body["event_id"].as_str().unwrap_or_else(|| panic!("no event_id in {}", self.body))
    }

    pub fn is_event(&self) -> bool {
        self.body["type"] == "subscription_event"
    }
}

struct Script {
    next: Mutex<VecDeque<(u16, HeaderMap)>>,
    always: Mutex<u16>,
    /// False while callbacks are not answered.
    answers: watch::Sender<bool>,
    received: mpsc::UnboundedSender<Received>,
}

impl Runtime {
    pub async fn start() -> Runtime {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Runtime::listen(listener)
    }

    /// Starts on a given address, such as that of a runtime that was stopped.
    pub async fn start_on(address: &str) -> Runtime {
        Runtime::listen(TcpListener::bind(address).await.unwrap())
    }

    fn listen(listener: TcpListener) -> Runtime {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, received) = mpsc::unbounded_channel();
        let script = Script {
            next: Mutex::default(),
            always: Mutex::new(200),
            answers: watch::Sender::new(true),
            received: sender,
        };
        let script = Arc::new(script);
        let router = Router::new().route("/callback/{name}", post(callback)).with_state(Arc::clone(&script));
        let task = tokio::spawn(serve_router(listener, router));
        Runtime { url, received, script, task }
    }

    /// Returns a callback URL; `name` appears in [`Received::name`].
    pub fn callback_url(&self, name: &str) -> String {
        format!("{}/callback/{name}", self.url)
    }

    /// Answers the next callbacks with these statuses, in order.
    pub fn answer_next(&self, statuses: &[u16]) {
        let plain = statuses.iter().map(|status| (*status, HeaderMap::new()));
        self.script.next.lock().unwrap().extend(plain);
    }

    /// Answers the callback after those with this status and header.
    pub fn answer_next_with(&self, status: u16, name: HeaderName, value: &str) {
        let headers = HeaderMap::from_iter([(name, value.parse().unwrap())]);
        self.script.next.lock().unwrap().push_back((status, headers));
    }

    /// Receives callbacks without answering them, until [`Runtime::resume_answering`].
    pub fn stop_answering(&self) {
        self.script.answers.send_replace(false);
    }

    pub fn resume_answering(&self) {
        self.script.answers.send_replace(true);
    }

    /// Answers all further callbacks with this status.
    pub fn answer_always(&self, status: u16) {
        *self.script.always.lock().unwrap() = status;
    }

    /// Waits for the next callback, whatever its answer was.
    pub async fn next(&mut self) -> Received {
        let next = tokio::time::timeout(PATIENCE, self.received.recv()).await;
        next.expect("no callback arrived").expect("the runtime is gone")
    }

    /// Waits for the next callback that was answered with 200.
    pub async fn accepted(&mut self) -> Received {
        loop {
            let next = self.next().await;
            if next.status == 200 {
                return next;
            }
        }
    }

    /// Returns the received callbacks that the test has not read yet.
    pub fn pending(&mut self) -> Vec<Received> {
        std::iter::from_fn(|| self.received.try_recv().ok()).collect()
    }

    /// Waits for the next accepted callback and checks its text.
    pub async fn expect_text(&mut self, text: &str) -> Received {
        let next = self.accepted().await;
        assert_eq!(next.text(), text);
        next
    }

    /// Stops listening, closes all connections, and returns the address.
    pub async fn stop(self) -> String {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
        self.url.trim_start_matches("http://").to_owned()
    }

    /// Creates an invocation whose callback URL ends in the id of the call.
    pub fn invocation(&self, operation: &str, thread: &str, id: &str, arguments: Value) -> Value {
        json!({
            "operation": operation,
            "arguments": arguments,
            "id": id,
            "group_id": thread,
            "callback_url": self.callback_url(id),
        })
    }
}

async fn callback(
    State(script): State<Arc<Script>>,
    uri: Uri,
    headers: HeaderMap,
    raw: Bytes,
) -> (StatusCode, HeaderMap) {
    let name = uri.path().trim_start_matches("/callback/").to_owned();
    let next = script.next.lock().unwrap().pop_front();
    let (status, answer) = next.unwrap_or_else(|| (*script.always.lock().unwrap(), HeaderMap::new()));
    assert_eq!(headers[header::CONTENT_TYPE], "application/json");
    let message = parse_callback(&raw).expect("a tool sent an invalid callback");
    let body = serde_json::from_slice(&raw).unwrap();
    // The test may have ended.
    let query = uri.query().unwrap_or_default().to_owned();
    script
        .received
        .send(Received { name, query, body, headers, raw, at: Instant::now(), message, status })
        .ok();
    script.answers.subscribe().wait_for(|answers| *answers).await.unwrap();
    (StatusCode::from_u16(status).unwrap(), answer)
}

/// The sending half of a runtime, for one tool server.
#[derive(Clone)]
pub struct Caller {
    base: String,
    token: Option<String>,
    client: Client,
}

/// Status and body of an answer.
pub type Answer = (u16, String);

impl Caller {
    pub fn new(base: &str) -> Caller {
        let limits = ClientLimits { connect: PATIENCE, total: PATIENCE, ..ClientLimits::default() };
        Caller { base: base.to_owned(), token: None, client: Client::new(UrlPolicy::Loopback, limits) }
    }

    #[must_use]
    pub fn with_token(mut self, token: &str) -> Caller {
        self.token = Some(token.to_owned());
        self
    }

    /// Returns the same caller for a server that was restarted on another address.
    #[must_use]
    pub fn moved_to(mut self, base: &str) -> Caller {
        base.clone_into(&mut self.base);
        self
    }

    /// POSTs a body. Returns `None` if the server is not reachable.
    pub async fn try_post(&self, path: &str, body: impl Into<Bytes>) -> Option<rap_io::client::Reply> {
        let url = format!("{}{path}", self.base).parse().unwrap();
        self.client.post_json(&url, &[], body.into()).await.ok()
    }

    /// POSTs a body.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        let url = format!("{}{path}", self.base).parse().unwrap();
        let mut headers = Vec::new();
        if let Some(token) = &self.token {
            let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
            headers.push((HeaderName::from_static("authorization"), value));
        }
        let reply = self.client.post_json(&url, &headers, body.into()).await.unwrap();
        (reply.status, String::from_utf8_lossy(&reply.body).into_owned())
    }

    pub async fn invoke(&self, invocation: &Value) -> Answer {
        self.post("/invoke", invocation.to_string()).await
    }

    /// Invokes a tool and expects a 200.
    pub async fn accepted(&self, invocation: &Value) {
        assert_eq!(self.invoke(invocation).await, (200, String::new()));
    }

    pub async fn close(&self, thread: &str) -> Answer {
        self.post("/close_thread", json!({"thread_id": thread}).to_string()).await
    }

    pub async fn cancel(&self, thread: &str, call: &str) -> Answer {
        let body = json!({"thread_id": thread, "tool_call_id": call});
        self.post("/cancel_tool_call", body.to_string()).await
    }

    pub async fn is_alive(&self, thread: &str, call: &str) -> bool {
        let body = json!({"thread_id": thread, "tool_call_id": call});
        let (status, answer) = self.post("/tool_call_status", body.to_string()).await;
        assert_eq!(status, 200);
        serde_json::from_str::<Value>(&answer).unwrap()["alive"].as_bool().unwrap()
    }

    /// Polls until the call is settled.
    pub async fn until_settled(&self, thread: &str, call: &str) {
        until(&format!("{call} is settled"), async || !self.is_alive(thread, call).await).await;
    }
}

/// Waits longer than the longest retry pause of these tests, so that every pending retry would have happened. It does
/// so with a call whose result is answered with 503 several times. Returns the other callbacks that arrived
/// meanwhile.
pub async fn wait_past_retries(caller: &Caller, runtime: &mut Runtime) -> Vec<Received> {
    runtime.answer_next(&[503; 6]);
    caller.accepted(&runtime.invocation("say", "thread_0", "barrier", json!({"text": "barrier"}))).await;
    let mut others = Vec::new();
    loop {
        let next = runtime.next().await;
        if next.name != "barrier" {
            others.push(next);
        } else if next.status == 200 {
            return others;
        }
    }
}

/// A tool server in the test process, with its journal in its own directory.
pub struct Server {
    pub url: String,
    caller: Caller,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Server {
    /// Starts a server with its journal in `data`.
    pub async fn start(server: ToolServer, data: &Path) -> Server {
        let bound = server.data(data).bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", bound.local_addr());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(bound.run_until(async move {
            // Dropping the sender also stops the server.
            drop(stopped.await);
        }));
        Server { caller: Caller::new(&url), url, stop: Some(stop), task }
    }

    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Shuts down gracefully, and returns when that is done.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        self.task.await.unwrap();
    }
}

/// Limits with short retry pauses: from 20 ms to 100 ms.
pub fn short_pauses() -> Limits {
    let mut limits = Limits::default();
    limits.delivery.first_pause = Duration::from_millis(20);
    limits.delivery.longest_pause = Duration::from_millis(100);
    limits
}

/// Blocks handlers until the test lets them continue.
#[derive(Clone)]
pub struct Gate {
    reached: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    pub fn closed() -> Gate {
        Gate { reached: Arc::new(Semaphore::new(0)), open: Arc::new(Semaphore::new(0)) }
    }

    /// Called by a handler: waits until it may continue.
    pub async fn pass(&self) {
        self.reached.add_permits(1);
        self.open.acquire().await.unwrap().forget();
    }

    /// Called by the test: waits until one more handler has reached the gate.
    pub async fn reached(&self) {
        let reached = tokio::time::timeout(PATIENCE, self.reached.acquire()).await;
        reached.expect("no handler reached the gate").unwrap().forget();
    }

    /// Lets this many handlers pass.
    pub fn open(&self, handlers: usize) {
        self.open.add_permits(handlers);
    }
}

/// A separate connection to the journal of a server, which sees only committed data.
pub struct Journal(rusqlite::Connection);

impl Journal {
    pub fn open(data: &Path) -> Journal {
        Journal(rusqlite::Connection::open(data.join("journal.db")).unwrap())
    }

    /// Runs a query that returns one number.
    pub fn number(&self, sql: &str) -> i64 {
        self.0.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Returns the number of calls, closings and outbox messages.
    pub fn rows(&self) -> [i64; 3] {
        ["calls", "closings", "outbox"].map(|table| self.number(&format!("SELECT count(*) FROM {table}")))
    }

    /// Polls until the query returns this number.
    pub async fn until(&self, sql: &str, expected: i64) {
        until(&format!("{expected}: {sql}"), async || self.number(sql) == expected).await;
    }

    /// Blocks all writers until the transaction is dropped.
    pub fn block(&self) -> rusqlite::Transaction<'_> {
        rusqlite::Transaction::new_unchecked(&self.0, rusqlite::TransactionBehavior::Immediate).unwrap()
    }
}

pub fn data_dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A tool server in a separate process.
pub struct ToolProcess {
    process: Process,
    caller: Caller,
}

impl Deref for ToolProcess {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl ToolProcess {
    /// Starts an example on a free port, and waits until it listens.
    pub fn start(name: &str, data: &Path, environment: &[(&str, &str)]) -> ToolProcess {
        ToolProcess::spawn(example(name, data, environment))
    }

    /// Starts this test program again to run `test`, which serves if [`is_server_process`].
    pub fn start_test(test: &str, data: &Path, environment: &[(&str, &str)]) -> ToolProcess {
        let program = Command::new(std::env::current_exe().unwrap());
        let mut command = tool_server(program, data, environment);
        command.env(CHILD, "1").args(["--exact", test, "--nocapture"]);
        ToolProcess::spawn(command)
    }

    /// Starts a server and waits until it listens.
    pub fn spawn(command: Command) -> ToolProcess {
        let process = Process::start(command);
        ToolProcess { caller: Caller::new(&process.url), process }
    }

    /// Runs an example that must fail to start, and returns its stderr.
    pub fn refused(name: &str, data: &Path, environment: &[(&str, &str)]) -> String {
        Process::refused(example(name, data, environment))
    }

    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Sends SIGKILL and waits for the exit.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Sends SIGTERM and waits for the exit. Returns true if it exited with success.
    pub fn terminate(mut self) -> bool {
        self.process.terminate().success()
    }

    /// Waits for the exit.
    pub fn wait(mut self) -> ExitStatus {
        self.process.wait()
    }

    /// Kills it and returns its whole log.
    pub fn into_log(self) -> String {
        self.process.into_log()
    }
}

/// Environment variable that marks a server process; see [`ToolProcess::start_test`].
const CHILD: &str = "RAP_TOOL_TEST_SERVER";

/// Returns true in a process that was started by [`ToolProcess::start_test`].
pub fn is_server_process() -> bool {
    std::env::var_os(CHILD).is_some()
}
