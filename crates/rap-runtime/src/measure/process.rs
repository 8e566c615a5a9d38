//! The runtime and the echo tool as separate processes.

use std::ops::Deref;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rap_io::bench::{BenchResult, Server, parent_is_gone, resident_bytes};
use rap_protocol::Secret;
use tokio::net::TcpListener;

use crate::model::scripted::Scripted;
use crate::{Database, Limits, PostgresDatabase, Runtime, Settings, ToolServer};

/// Key of Postgres databases.
const KEY: &str = "7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e7e";
/// Public URL of all nodes of a Postgres database. The echo tool sends its results to the nodes in turn, like a load
/// balancer.
pub const PUBLIC_URL: &str = "http://127.0.0.1:9";

/// Every turn calls the tool. The model needs only the number of the turn.
const CALLS: &str = "repeat = true\n[[turn]]\ncalls = [{name = \"echo\", arguments = {text = \"hello\"}}]\n";
const SCRIPT: &str = "script.toml";
/// Variable with the URL of a Postgres database for the runtime.
const DATABASE: &str = "RAP_BENCH_DATABASE";

/// Returns the settings of a Postgres database.
pub fn database(url: &str) -> PostgresDatabase {
    PostgresDatabase {
        url: Secret::new(url),
        key: Secret::new(KEY),
        listen_url: None,
        lease: PostgresDatabase::LEASE,
    }
}

/// Runs a runtime. Its model replays the script, if there is one, and follows commands otherwise.
pub async fn runtime(data: &Path, tool: &str) -> BenchResult<()> {
    let listener =
        TcpListener::bind(std::env::var("RAP_BENCH_LISTEN").as_deref().unwrap_or("127.0.0.1:0")).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let script = data.join(SCRIPT);
    let model = if script.exists() { Scripted::from_file(&script)? } else { Scripted::command_driven() };
    let settings = Settings {
        public_url: url.clone(),
        tool_servers: vec![ToolServer::new(tool)],
        listen: Some(listener.local_addr()?),
        limits: unlimited(),
        ..Settings::new(data.join("rap.db"), Arc::new(model))
    };
    let settings = match std::env::var(DATABASE) {
        Ok(url) => Settings {
            public_url: PUBLIC_URL.into(),
            database: Database::Postgres(database(&url)),
            ..settings
        },
        Err(_) => settings,
    };
    let runtime = Runtime::start(settings)?;
    eprintln!("listening on {url}");
    runtime.serve(listener, parent_is_gone()).await;
    Ok(())
}

/// Returns limits that no benchmark reaches.
pub fn unlimited() -> Limits {
    let mut limits = Limits::default();
    limits.thread.turns_per_wake = u32::MAX;
    limits.events_per_second = None;
    // The benchmark wakes sessions more often than the default budgets allow.
    limits.thread.budgets = Default::default();
    limits
}

/// A process of a runtime or the echo tool. It is killed on drop.
pub struct BenchProcess(Server);

impl Deref for BenchProcess {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl BenchProcess {
    fn start(role: &str, data: &Path, tool: &str, listen: &str) -> BenchResult<BenchProcess> {
        Ok(BenchProcess(Server::start(BenchProcess::command(role, data, tool, listen)?)?))
    }

    fn command(role: &str, data: &Path, tool: &str, listen: &str) -> BenchResult<Command> {
        let data = data.to_str().ok_or("the directory has no valid name")?;
        let mut command = Server::command(role, &[data, tool])?;
        command.env("RAP_BENCH_LISTEN", listen);
        Ok(command)
    }

    pub fn echo() -> BenchResult<BenchProcess> {
        BenchProcess::start("echo", Path::new("-"), "-", "")
    }

    /// Starts a runtime whose model calls the tool in every turn.
    pub fn busy_runtime(data: &Path, tool: &BenchProcess) -> BenchResult<BenchProcess> {
        BenchProcess::scripted_runtime(data, tool, CALLS)
    }

    /// Starts a node on a Postgres database. Its model calls the tool in every turn.
    pub fn node(url: &str, tool: &BenchProcess, data: &Path) -> BenchResult<BenchProcess> {
        std::fs::write(data.join(SCRIPT), CALLS)?;
        let mut command = BenchProcess::command("runtime", data, &tool.url, "127.0.0.1:0")?;
        command.env(DATABASE, url);
        // The script is read before the node listens.
        Ok(BenchProcess(Server::start(command)?))
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
