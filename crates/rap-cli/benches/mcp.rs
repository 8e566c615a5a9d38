//! Cost of the bridge to MCP servers: `cargo bench -p rap-cli`.
//!
//! The same calls of the same server, a script in Python over pipes, are made directly and through the bridge, in
//! turns. Through the bridge, a call is an invocation, a commit, a request of MCP, a commit and a callback.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use axum::routing::post;
use rap_testkit::bench::{self, BenchResult, Figure, Scale};
use rap_testkit::{Client, Setup, programs, until};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The server of the tests.
const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/mcp/server.py");
/// Maximum memory of the bridge for one more server, in bytes.
const SERVER_BYTES: u64 = 2_000_000;
/// Maximum time that 100 servers may add to the start.
const START_ADDS: Duration = Duration::from_millis(100);
/// Number of calls that are made directly before as many are made through the bridge, and vice versa.
const TURN: usize = 50;

#[tokio::main]
async fn main() -> BenchResult<()> {
    bench::run(measure).await
}

async fn measure(scale: Scale) -> BenchResult<()> {
    let (turns, servers) = (scale.of(40, 1), scale.of(100, 2));
    let (direct, bridged) = calls(turns).await?;
    Figure::print_heading();
    direct.print("calls of an MCP server, directly");
    bridged.print("through the bridge, durable");
    println!("added by the bridge: p50 {:.1?}", bridged.p50.saturating_sub(direct.p50));
    let one = start(1).await?;
    let many = start(1 + servers).await?;
    let each = many.memory.saturating_sub(one.memory) / servers;
    let (kilobytes, goal) = (each / 1000, SERVER_BYTES / 1000);
    println!("memory of the bridge for each of {servers} more servers: {kilobytes} KB (goal {goal} KB)");
    println!(
        "ready after a start with 1 server: {:.0?}, with {}: {:.0?}",
        one.ready,
        1 + servers,
        many.ready
    );
    scale.check(&[each < SERVER_BYTES, many.ready < one.ready + START_ADDS])
}

/// A child process that ends with its owner.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// An MCP client that writes and reads lines.
struct Direct {
    _server: Ending,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Direct {
    fn start(notes: &Path) -> BenchResult<Direct> {
        let mut command = Command::new("python3");
        command.arg(SERVER).env("MCP_NOTES", notes).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = Ending(command.spawn()?);
        let stdin = server.0.stdin.take().ok_or("no stdin")?;
        let stdout = BufReader::new(server.0.stdout.take().ok_or("no stdout")?).lines();
        let mut direct = Direct { _server: server, stdin, stdout };
        let client = json!({"name": "bench", "version": "1"});
        let parameters = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
        direct.exchange(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": parameters}))?;
        Ok(direct)
    }

    fn exchange(&mut self, message: &Value) -> BenchResult<String> {
        writeln!(self.stdin, "{message}")?;
        Ok(self.stdout.next().ok_or("the server has ended")??)
    }

    fn call(&mut self, id: usize) -> BenchResult<Duration> {
        let call = json!({"name": "echo", "arguments": {"text": "hi"}});
        let began = Instant::now();
        self.exchange(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": call}))?;
        Ok(began.elapsed())
    }
}

/// The bridge, with a receiver of its callbacks.
struct Bridge {
    _process: Ending,
    client: Client,
    callbacks: String,
    received: mpsc::UnboundedReceiver<()>,
}

impl Bridge {
    async fn start(data: &Path) -> BenchResult<Bridge> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let callbacks = format!("http://{}/callback", listener.local_addr()?);
        let (sender, received) = mpsc::unbounded_channel();
        let receive = move |_: String| {
            sender.send(()).ok();
            async {}
        };
        let router = axum::Router::new().route("/callback/{id}", post(receive));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let servers = json!([{
            "name": "echo", "source": {"Command": ["python3", SERVER]}, "prefix": "", "trust": "Normal",
            "environment": {"MCP_NOTES": data}, "bearer": null, "oauth": {},
        }]);
        let mut command = programs::rap(&["tool", "mcp"]);
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("RAP_MCP_SERVERS", servers.to_string()).env("RAP_TOOL_DATA", data);
        command.env("RAP_TOOL_BEARER", "token").env("RAP_EMBEDDED", "1").env("PORT", "0");
        let mut process = Ending(command.stdout(Stdio::piped()).spawn()?);
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
        let port = serde_json::from_str::<Value>(&line)?["port"].clone();
        let client = Client::new(&format!("http://127.0.0.1:{port}"), Some("token"));
        until("the toolset", async || client.get("/echo/.well-known/rap-toolset").await.status == 200).await;
        Ok(Bridge { _process: process, client, callbacks, received })
    }

    async fn call(&mut self, id: usize) -> BenchResult<Duration> {
        let call = json!({
            "operation": "echo", "arguments": {"text": "hi"}, "group_id": "t", "id": id.to_string(),
            "callback_url": format!("{}/{id}", self.callbacks),
        });
        let began = Instant::now();
        self.client.post("/echo/invoke", &call).await.expect(200);
        self.received.recv().await.ok_or("no callback")?;
        Ok(began.elapsed())
    }
}

/// Makes the same calls both ways.
async fn calls(turns: usize) -> BenchResult<(Figure, Figure)> {
    let data = tempfile::tempdir()?;
    let (mut direct, mut bridge) = (Direct::start(data.path())?, Bridge::start(data.path()).await?);
    let (mut directly, mut bridged) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        for number in 0..TURN {
            directly.push(direct.call(1 + turn * TURN + number)?);
        }
        for number in 0..TURN {
            bridged.push(bridge.call(turn * TURN + number).await?);
        }
    }
    let figure = |times: Vec<Duration>| {
        let elapsed = times.iter().sum();
        Figure::of(times, elapsed)
    };
    Ok((figure(directly), figure(bridged)))
}

/// A runtime that has started.
struct Start {
    ready: Duration,
    /// Resident memory of the bridge, in bytes.
    memory: u64,
}

/// Starts a runtime with so many MCP servers, and waits until all of them run.
async fn start(servers: u64) -> BenchResult<Start> {
    let notes = tempfile::tempdir()?;
    let notes = notes.path().to_str().ok_or("no path")?;
    let mut setup = Setup::new();
    for number in 0..servers {
        let command = json!(["python3", "-S", SERVER]);
        setup = setup.mcp_lines(&format!(
            "name = \"s{number}\"\ncommand = {command}\nprefix = \"s{number}_\"\nenv = {{ MCP_NOTES = {notes:?} }}"
        ));
    }
    let began = Instant::now();
    let rap = setup.start();
    let ready = began.elapsed();
    let deadline = Instant::now() + Duration::from_secs(300);
    while (rap.log().matches("the MCP server is running").count() as u64) < servers {
        if Instant::now() > deadline {
            return Err(format!("the servers did not start: {}", rap.log()).into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let directory = rap.directory().to_string_lossy().into_owned();
    Ok(Start { ready, memory: bridge_memory(&directory)? })
}

/// Returns the memory of the bridge whose data is in a directory. Its supervisor has the same command line, and less memory.
fn bridge_memory(directory: &str) -> BenchResult<u64> {
    let mut most = 0;
    for entry in fs::read_dir("/proc")? {
        let Ok(id) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
        let read = |name: &str| {
            let text = fs::read(format!("/proc/{id}/{name}")).unwrap_or_default();
            String::from_utf8_lossy(&text).replace('\0', " ")
        };
        if read("cmdline").contains("tool mcp") && read("environ").contains(directory) {
            most = most.max(bench::resident_bytes(id)?);
        }
    }
    if most == 0 { Err("the bridge was not found".into()) } else { Ok(most) }
}
