//! A running `rap serve` and a client for it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::http::{self, Answer};
use super::ids::Ids;
use super::peer::Peer;
use super::process::Process;
use super::until;

/// Configuration of a runtime.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    server: String,
    model: String,
    agents: String,
    tool_servers: String,
    limits: String,
    environment: Vec<(String, String)>,
    token: Option<String>,
}

impl Setup {
    pub fn new() -> Setup {
        Setup::default()
    }

    #[must_use]
    pub fn tools(self, tools: &Peer) -> Setup {
        let url = tools.url.clone();
        self.tool_server(&url)
    }

    #[must_use]
    pub fn tool_server(mut self, url: &str) -> Setup {
        self.tool_servers.push_str(&format!("[[tool_server]]\nurl = {url:?}\n"));
        self
    }

    /// Sets the token for the tool server that was added last.
    #[must_use]
    pub fn bearer(mut self, token: &str) -> Setup {
        self.tool_servers.push_str(&format!("bearer = {token:?}\n"));
        self
    }

    /// Requires a client token. The client of this test sends it.
    #[must_use]
    pub fn token(mut self, token: &str) -> Setup {
        self.server.push_str(&format!("tokens = [{token:?}]\n"));
        self.token = Some(token.to_owned());
        self
    }

    /// Adds a line to `[server]`.
    #[must_use]
    pub fn server(mut self, line: &str) -> Setup {
        self.server.push_str(&format!("{line}\n"));
        self
    }

    /// Adds a line to `[limits]`.
    #[must_use]
    pub fn limit(mut self, line: &str) -> Setup {
        self.limits.push_str(&format!("{line}\n"));
        self
    }

    /// Sets the lines of `[model]`.
    #[must_use]
    pub fn model(mut self, lines: &str) -> Setup {
        lines.clone_into(&mut self.model);
        self
    }

    #[must_use]
    pub fn agent(mut self, lines: &str) -> Setup {
        self.agents.push_str(&format!("[[agent]]\n{lines}\n"));
        self
    }

    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Setup {
        self.environment.push((name.into(), value.into()));
        self
    }

    fn text(&self) -> String {
        let Setup { server, model, agents, tool_servers, limits, .. } = self;
        format!("[server]\n{server}[model]\n{model}\n{agents}{tool_servers}[limits]\n{limits}")
    }

    /// Starts the runtime on a free port, with a new database.
    pub fn start(self) -> Rap {
        self.start_in(tempfile::tempdir().unwrap())
    }

    /// Starts the runtime in a directory that may contain a database.
    pub fn start_in(self, directory: TempDir) -> Rap {
        fs::write(directory.path().join("rap.toml"), self.text()).unwrap();
        Rap::spawn(self, directory, "127.0.0.1:0")
    }

    /// Starts the runtime with a scenario for the scripted model.
    pub fn start_with_script(self, script: &str) -> Rap {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("script.toml"), script).unwrap();
        let setup = self.model("provider = \"scripted\"\nscript = \"script.toml\"");
        fs::write(directory.path().join("rap.toml"), setup.text()).unwrap();
        Rap::spawn(setup, directory, "127.0.0.1:0")
    }
}

/// A running runtime. It is killed on drop.
pub struct Rap {
    pub url: String,
    setup: Setup,
    directory: Option<TempDir>,
    process: Process,
}

impl Rap {
    /// Starts a runtime with one tool server and default limits.
    pub fn start(tools: &Peer) -> Rap {
        Setup::new().tools(tools).start()
    }

    fn spawn(setup: Setup, directory: TempDir, listen: &str) -> Rap {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rap"));
        command.args(["serve", "--listen", listen]).current_dir(directory.path()).env_clear();
        command.envs(setup.environment.iter().map(|(name, value)| (name, value)));
        let stdout =
            fs::OpenOptions::new().create(true).append(true).open(directory.path().join("stdout")).unwrap();
        command.stdout(stdout);
        let process = Process::start(command);
        Rap { url: format!("http://{}", process.address()), setup, directory: Some(directory), process }
    }

    /// Kills the process with SIGKILL and starts a new one with the same database and address.
    #[must_use]
    pub fn restarted(mut self) -> Rap {
        self.process.kill();
        let directory = self.directory.take().unwrap();
        Rap::spawn(self.setup.clone(), directory, self.url.trim_start_matches("http://"))
    }

    /// Like [`Rap::restarted`], with a pause between the two processes.
    #[must_use]
    pub fn restarted_after(mut self, pause: Duration) -> Rap {
        self.process.kill();
        std::thread::sleep(pause);
        self.restarted()
    }

    /// Stops the process with SIGTERM and starts a new one.
    #[must_use]
    pub fn stopped_and_started(mut self) -> Rap {
        self.stop();
        self.restarted()
    }

    /// Stops the process with SIGTERM. Returns how long that took.
    pub fn stop(&mut self) -> Duration {
        self.process.signal("TERM");
        let began = Instant::now();
        assert!(self.process.wait().success(), "{}", self.log());
        began.elapsed()
    }

    /// CPU time that the process has used.
    pub fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        // The process name may contain anything, so fields are counted after it: 14 and 15, in hundredths of a second.
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Directory of its files.
    pub fn directory(&self) -> &Path {
        self.directory.as_ref().unwrap().path()
    }

    /// Runs an SQL query that returns one number.
    pub fn number(&self, sql: &str) -> i64 {
        let (file, flags) = (self.directory().join("rap.db"), OpenFlags::SQLITE_OPEN_READ_ONLY);
        let database = Connection::open_with_flags(file, flags).unwrap();
        database.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// Number of rows in a table of its database.
    pub fn rows(&self, table: &str) -> i64 {
        self.number(&format!("SELECT count(*) FROM {table}"))
    }

    /// Output on stdout so far, which is not the log.
    pub fn stdout(&self) -> String {
        fs::read_to_string(self.directory().join("stdout")).unwrap()
    }

    /// Runs a client command. Returns its exit code and its stdout followed by its stderr.
    pub fn command(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rap"));
        command.args(arguments).env_clear().env("RAP_URL", &self.url).stdin(Stdio::null());
        command.envs(self.setup.token.as_ref().map(|token| ("RAP_TOKEN", token)));
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), text.concat())
    }

    /// Log so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    pub async fn until_logged(&self, text: &str) {
        until(text, async || self.log().contains(text).then_some(())).await;
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        http::send(method, &format!("{}{path}", self.url), headers, body).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        let bearer = self.setup.token.as_ref().map(|token| format!("Bearer {token}"));
        let headers: Vec<_> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
        self.send("GET", path, &headers, b"").await
    }

    /// POSTs JSON. The path may contain the name of a call instead of its id.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        let parts: Vec<&str> = path.split('/').collect();
        let named = match parts.as_slice() {
            ["", "v1", "threads", thread, "calls", name, order] if name.starts_with("call_") => {
                let id = self.call(thread, name).await;
                Some(format!("/v1/threads/{thread}/calls/{id}/{order}"))
            }
            _ => None,
        };
        let path = named.as_deref().unwrap_or(path);
        let bearer = self.setup.token.as_ref().map(|token| format!("Bearer {token}"));
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
    pub async fn say_on_busy(&self, thread: &str, text: &str, on_busy: &str) -> Answer {
        let body = json!({"text": text, "on_busy": on_busy});
        self.post(&format!("/v1/threads/{thread}/messages"), &body).await
    }

    /// POSTs to a path below the thread without a body, such as `close`.
    pub async fn act(&self, thread: &str, action: &str) -> Answer {
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
        match tokio::time::timeout(super::PATIENCE / 2, seen).await {
            Ok(thread) => thread,
            Err(_) => {
                let (thread, transcript) = (self.thread(name).await, self.transcript(name).await.join("\n"));
                panic!("timed out waiting for {what}: {thread}\n{transcript}\n{}", self.log());
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
        if tokio::time::timeout(super::PATIENCE / 2, seen).await.is_err() {
            panic!("no line {line:?} in:\n{}\n{}", self.transcript(thread).await.join("\n"), self.log());
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
