//! Test support: a runtime that invokes tools over real HTTP and receives their callbacks, and tool servers.

#![allow(dead_code, reason = "each test program uses a different part of this")]
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::routing::post;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Callback, UrlPolicy, parse_callback};
use rap_tool::{Limits, ToolServer};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Time after which a test fails if something does not happen.
pub const TIMEOUT: Duration = Duration::from_secs(30);

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
        let task = tokio::spawn(serve(listener, router));
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
        let next = tokio::time::timeout(TIMEOUT, self.received.recv()).await;
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

/// Unlike `axum::serve`, closes its connections when it is aborted.
async fn serve(listener: TcpListener, router: Router) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let service = TowerToHyperService::new(router.clone());
        let connection =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move { connection.await.ok() });
        while connections.try_join_next().is_some() {}
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
    script.received.send(Received { name, query, body, raw, at: Instant::now(), message, status }).ok();
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
        let limits = ClientLimits { connect: TIMEOUT, total: TIMEOUT, ..ClientLimits::default() };
        Caller { base: base.to_owned(), token: None, client: Client::new(UrlPolicy::Local, limits) }
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
        let settled = async {
            while self.is_alive(thread, call).await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, settled).await.expect("the call was never settled");
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
    pub data: PathBuf,
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
        Server { caller: Caller::new(&url), url, data: data.to_owned(), stop: Some(stop), task }
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
        let reached = tokio::time::timeout(TIMEOUT, self.reached.acquire()).await;
        reached.expect("no handler reached the gate").unwrap().forget();
    }

    /// Number of handlers at the gate that the test has not waited for.
    pub fn arrivals(&self) -> usize {
        self.reached.available_permits()
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
        let seen = async {
            while self.number(sql) != expected {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, seen).await.unwrap_or_else(|_| panic!("never {expected}: {sql}"));
    }

    /// Blocks all writers until the transaction is dropped.
    pub fn block(&self) -> rusqlite::Transaction<'_> {
        rusqlite::Transaction::new_unchecked(&self.0, rusqlite::TransactionBehavior::Immediate).unwrap()
    }
}

/// A raw HTTP answer.
#[derive(Debug)]
pub struct RawAnswer {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: String,
}

/// Sends raw bytes, and reads until the server closes the connection.
pub async fn exchange(url: &str, request: impl AsRef<[u8]>) -> RawAnswer {
    let mut stream = connect(url).await;
    // A server that answers early may not read all of the request.
    drop(stream.write_all(request.as_ref()).await);
    read_answer(stream).await
}

pub async fn connect(url: &str) -> TcpStream {
    TcpStream::connect(url.trim_start_matches("http://")).await.unwrap()
}

/// Reads an answer until the server closes the connection.
pub async fn read_answer(mut stream: TcpStream) -> RawAnswer {
    let mut answer = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await;
    // The server may also reset the connection after the answer.
    drop(read.expect("the connection was not closed"));
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    RawAnswer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

/// Formats a request with a JSON body and `connection: close`.
pub fn request(path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
}

pub fn data_dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A tool server in a separate process.
pub struct Process {
    pub url: String,
    caller: Caller,
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Process {
    /// Starts an example on a free port, and waits until it listens.
    pub fn start(example: &str, data: &Path, environment: &[(&str, &str)]) -> Process {
        Process::spawn(command(&example_path(example), data, environment))
    }

    /// Starts this test program again to run `test`, which serves if [`is_server_process`].
    pub fn start_test(test: &str, data: &Path, environment: &[(&str, &str)]) -> Process {
        let mut command = command(&std::env::current_exe().unwrap(), data, environment);
        command.env(CHILD, "1");
        command.args(["--exact", test, "--nocapture"]).stdout(Stdio::null());
        Process::spawn(command)
    }

    /// Starts a server and waits until it listens.
    pub fn spawn(mut command: Command) -> Process {
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(String::new()));
        let mut url = None;
        for line in lines.by_ref() {
            let line = line.unwrap();
            log.lock().unwrap().push_str(&format!("{line}\n"));
            if let Some((_, found)) = line.split_once("listening url=") {
                url = Some(found.trim().to_owned());
                break;
            }
        }
        let url = url.unwrap_or_else(|| panic!("{command:?} did not start:\n{}", log.lock().unwrap()));
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                sink.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        Process { caller: Caller::new(&url), url, child, log }
    }

    /// Runs an example that must fail to start, and returns its stderr.
    pub fn refused(example: &str, data: &Path, environment: &[(&str, &str)]) -> String {
        let output = command(&example_path(example), data, environment).output().unwrap();
        assert!(!output.status.success(), "{example} exited with success");
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn pid(&self) -> String {
        self.child.id().to_string()
    }

    pub fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Returns the log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until the log contains `text`.
    pub async fn until_logged(&self, text: &str) {
        let logged = async {
            while !self.log().contains(text) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, logged)
            .await
            .unwrap_or_else(|_| panic!("no {text:?} in {}", self.log()));
    }

    /// Sends SIGKILL and waits for the exit.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM and waits for the exit. Returns true if it exited with success.
    pub fn terminate(self) -> bool {
        self.signal("TERM");
        self.wait().success()
    }

    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([&format!("-{name}"), &self.pid()]).status().unwrap().success());
    }

    /// Waits for the exit.
    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

/// Environment variable that marks a server process; see [`Process::start_test`].
const CHILD: &str = "RAP_TOOL_TEST_SERVER";

/// Returns true in a process that was started by [`Process::start_test`].
pub fn is_server_process() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Builds the command of a server on a free port, with its log on stderr.
pub fn command(program: &Path, data: &Path, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    command.env_remove("RAP_TOOL_BEARER").env_remove("RAP_TOOL_KEY").env_remove("RAP_TOOL_URL");
    command.env_remove("RUST_LOG").env("PORT", "0").env("RAP_TOOL_DATA", data);
    command.envs(environment.iter().copied()).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Builds the command of an example on a free port.
pub fn example_command(example: &str, data: &Path) -> Command {
    command(&example_path(example), data, &[])
}

/// Returns the path of the compiled example.
pub fn example_path(example: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    if path.ends_with("deps") {
        path.pop();
    }
    path.join("examples").join(example)
}
