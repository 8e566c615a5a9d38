//! The runtime and the echo tool as separate processes.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use rap_protocol::UrlPolicy;
use rap_runtime::model::scripted::Scripted;
use rap_runtime::{Agent, Limits, Runtime, Settings, ToolServer, Window};
use tokio::net::TcpListener;

use crate::bench::{BenchResult, resident_bytes};

/// Every turn calls the tool. The model needs only the number of the turn.
const CALLS: &str = "repeat = true\n[[turn]]\ncalls = [{name = \"echo\", arguments = {text = \"hello\"}}]\n";
const SCRIPT: &str = "script.toml";

/// Runs a runtime. Its model replays the script, if there is one, and follows commands otherwise.
pub async fn runtime(data: &Path, tool: &str) -> BenchResult<()> {
    let listener =
        TcpListener::bind(std::env::var("RAP_BENCH_LISTEN").as_deref().unwrap_or("127.0.0.1:0")).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let script = data.join(SCRIPT);
    let model = if script.exists() { Scripted::from_file(&script)? } else { Scripted::command_driven() };
    let mut limits = Limits::default();
    limits.thread.turns_per_wake = u32::MAX;
    // The benchmark wakes sessions more often than the default budgets allow.
    limits.thread.budgets = Default::default();
    let runtime = Runtime::start(Settings {
        public_url: url.clone(),
        database: data.join("rap.db"),
        tokens: Vec::new(),
        agents: vec![Agent::default()],
        model: Arc::new(model),
        images: false,
        window: Window::default(),
        tool_servers: vec![ToolServer { url: tool.into(), bearer: None }],
        url_policy: UrlPolicy::Local,
        limits,
    })?;
    println!("{url}");
    runtime.serve(listener, parent_is_gone()).await;
    Ok(())
}

pub async fn parent_is_gone() {
    let read = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    drop(read.await);
}

/// A process of a runtime or the echo tool. It is killed on drop.
pub struct Process {
    child: Child,
    _stdin: Option<ChildStdin>,
    pub url: String,
}

impl Process {
    pub fn start(role: &str, data: &Path, tool: &str, listen: &str) -> BenchResult<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").arg(role).arg(data).arg(tool).env("RAP_BENCH_LISTEN", listen);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
        Ok(Process { _stdin: child.stdin.take(), child, url: line.trim().to_owned() })
    }

    pub fn echo() -> BenchResult<Process> {
        Process::start("echo", Path::new("-"), "-", "")
    }

    /// Starts a runtime whose model calls the tool in every turn.
    pub fn busy_runtime(data: &Path, tool: &Process) -> BenchResult<Process> {
        Process::scripted_runtime(data, tool, CALLS)
    }

    /// Starts a runtime whose model replays a script.
    pub fn scripted_runtime(data: &Path, tool: &Process, script: &str) -> BenchResult<Process> {
        std::fs::create_dir_all(data)?;
        std::fs::write(data.join(SCRIPT), script)?;
        Process::start("runtime", data, &tool.url, "127.0.0.1:0")
    }

    /// Starts a runtime whose model follows the commands in user messages.
    pub fn command_runtime(data: &Path, tool: &Process) -> BenchResult<Process> {
        std::fs::create_dir_all(data)?;
        Process::start("runtime", data, &tool.url, "127.0.0.1:0")
    }

    /// Kills the process with SIGKILL, runs `meanwhile` and starts it again at the same address.
    pub fn restart(
        self,
        data: &Path,
        tool: &Process,
        meanwhile: impl FnOnce() -> BenchResult<()>,
    ) -> BenchResult<Process> {
        let listen = self.url.trim_start_matches("http://").to_owned();
        drop(self);
        meanwhile()?;
        Process::start("runtime", data, &tool.url, &listen)
    }

    pub fn resident_bytes(&self) -> BenchResult<u64> {
        resident_bytes(self.child.id())
    }

    /// Returns the peak resident memory, in bytes.
    pub fn peak_bytes(&self) -> BenchResult<u64> {
        let kib: u64 = self.proc("status", "VmHWM:")?.trim_end_matches("kB").trim().parse()?;
        Ok(kib * 1024)
    }

    /// Returns the number of bytes that were passed to `write()`.
    pub fn written_bytes(&self) -> BenchResult<u64> {
        Ok(self.proc("io", "wchar:")?.parse()?)
    }

    /// Reads a field from a file of the process in `/proc`.
    fn proc(&self, file: &str, name: &str) -> BenchResult<String> {
        let text = std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        Ok(line.ok_or_else(|| format!("no {name}"))?.trim().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
