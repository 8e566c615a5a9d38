//! The runtime and the echo tool as separate processes.

use std::ops::Deref;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rap_runtime::model::scripted::Scripted;
use rap_runtime::{Limits, Runtime, Settings, ToolServer};
use rap_testkit::Process;
use rap_testkit::bench::{BenchResult, parent_is_gone, resident_bytes};
use tokio::net::TcpListener;

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
    limits.events_per_second = None;
    // The benchmark wakes sessions more often than the default budgets allow.
    limits.thread.budgets = Default::default();
    let runtime = Runtime::start(Settings {
        public_url: url.clone(),
        tool_servers: vec![ToolServer { url: tool.into(), bearer: None }],
        limits,
        ..Settings::new(data.join("rap.db"), Arc::new(model))
    })?;
    eprintln!("listening on {url}");
    runtime.serve(listener, parent_is_gone()).await;
    Ok(())
}

/// A process of a runtime or the echo tool. It is killed on drop.
pub struct BenchProcess(Process);

impl Deref for BenchProcess {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.0
    }
}

impl BenchProcess {
    fn start(role: &str, data: &Path, tool: &str, listen: &str) -> BenchResult<BenchProcess> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").arg(role).arg(data).arg(tool).env("RAP_BENCH_LISTEN", listen);
        Ok(BenchProcess(Process::start(command)))
    }

    pub fn echo() -> BenchResult<BenchProcess> {
        BenchProcess::start("echo", Path::new("-"), "-", "")
    }

    /// Starts a runtime whose model calls the tool in every turn.
    pub fn busy_runtime(data: &Path, tool: &BenchProcess) -> BenchResult<BenchProcess> {
        BenchProcess::scripted_runtime(data, tool, CALLS)
    }

    /// Starts a runtime whose model replays a script.
    pub fn scripted_runtime(data: &Path, tool: &BenchProcess, script: &str) -> BenchResult<BenchProcess> {
        std::fs::create_dir_all(data)?;
        std::fs::write(data.join(SCRIPT), script)?;
        BenchProcess::start("runtime", data, &tool.url, "127.0.0.1:0")
    }

    /// Starts a runtime whose model follows the commands in user messages.
    pub fn command_runtime(data: &Path, tool: &BenchProcess) -> BenchResult<BenchProcess> {
        std::fs::create_dir_all(data)?;
        BenchProcess::start("runtime", data, &tool.url, "127.0.0.1:0")
    }

    /// Kills the process with SIGKILL, runs `meanwhile` and starts it again at the same address.
    pub fn restart(
        self,
        data: &Path,
        tool: &BenchProcess,
        meanwhile: impl FnOnce() -> BenchResult<()>,
    ) -> BenchResult<BenchProcess> {
        let listen = self.url.trim_start_matches("http://").to_owned();
        drop(self);
        meanwhile()?;
        BenchProcess::start("runtime", data, &tool.url, &listen)
    }

    pub fn resident_bytes(&self) -> BenchResult<u64> {
        resident_bytes(self.id())
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
        let text = std::fs::read_to_string(format!("/proc/{}/{file}", self.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        Ok(line.ok_or_else(|| format!("no {name}"))?.trim().to_owned())
    }
}
