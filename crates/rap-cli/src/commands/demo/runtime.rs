//! The runtime of the demo: this program as a child process, so that it can be killed.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use rap_api::Threads;
use rap_api::client::Client;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::tools::DemoTools;

const SCENARIO: &str = include_str!("scenario.toml");
const AFTER_KILL: &str = include_str!("after_kill.toml");
const START_WITHIN: Duration = Duration::from_secs(15);

pub(super) struct Runtime {
    directory: PathBuf,
    pub url: String,
    child: Option<Child>,
}

/// Behaviour of the scripted model.
pub(super) enum Model {
    /// Replays the scenario of the demo up to the kill.
    Scenario,
    /// Replays the scenario after the kill.
    AfterKill,
    /// Follows the instructions in the user's messages.
    Interactive,
}

/// Resources that the runtime has used so far.
#[derive(Clone, Copy)]
pub(super) struct ResourceUse {
    /// CPU time; `None` if the system does not provide it.
    pub processor: Option<Duration>,
    /// Size of the database, in bytes.
    pub database: u64,
}

impl Runtime {
    /// Starts the runtime on an empty database, with the tools of the demo.
    pub(super) async fn start(directory: &Path, tools: &DemoTools) -> anyhow::Result<Runtime> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port();
        let url = format!("http://127.0.0.1:{port}");
        let mut runtime = Runtime { directory: directory.to_owned(), url, child: None };
        fs::write(directory.join("scenario.toml"), SCENARIO)?;
        fs::write(directory.join("after_kill.toml"), AFTER_KILL)?;
        runtime.configure(&Model::Scenario, tools)?;
        runtime.restart().await?;
        Ok(runtime)
    }

    /// Writes the configuration. It takes effect at the next start.
    pub(super) fn configure(&self, model: &Model, tools: &DemoTools) -> anyhow::Result<()> {
        let listen = self.url.trim_start_matches("http://");
        let script = match model {
            Model::Scenario => "script = \"scenario.toml\"",
            Model::AfterKill => "script = \"after_kill.toml\"",
            Model::Interactive => "",
        };
        let text = format!(
            "[server]\nlisten = \"{listen}\"\n[store]\nurl = \"sqlite:rap.db\"\n\
             [model]\nprovider = \"scripted\"\n{script}\n\
             [[tool_server]]\nurl = \"{}\"\n[[tool_server]]\nurl = \"{}\"\n",
            tools.oven_url, tools.doorbell_url
        );
        Ok(fs::write(self.directory.join("rap.toml"), text)?)
    }

    pub(super) async fn restart(&mut self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["serve", "--config", "rap.toml", "--while-stdin-is-open"]);
        // The user's RAP_ variables must not affect the demo.
        command.env_clear().current_dir(&self.directory).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().context("cannot start the runtime")?);
        self.ready().await
    }

    async fn ready(&mut self) -> anyhow::Result<()> {
        let client = Client::new(&self.url)?;
        let deadline = Instant::now() + START_WITHIN;
        while client.list::<Threads>(&[], Some(1)).await.is_err() {
            let gone = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if gone.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.log()).unwrap_or_default();
                bail!("the demo's runtime did not start:\n{log}");
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.directory.join("runtime.log")
    }

    /// Process id.
    pub(super) fn process(&self) -> u32 {
        self.child.as_ref().and_then(Child::id).unwrap_or(0)
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub(super) async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().await.context("cannot kill the runtime")?;
        }
        Ok(())
    }

    pub(super) fn resource_use(&self) -> ResourceUse {
        let size = |name| fs::metadata(self.directory.join(name)).map_or(0, |file| file.len());
        ResourceUse {
            processor: processor_time(self.process()),
            database: size("rap.db") + size("rap.db-wal"),
        }
    }
}

/// Sums the CPU time of all threads of the process, which Linux reports in nanoseconds.
fn processor_time(process: u32) -> Option<Duration> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{process}/task")).ok()? {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        total += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(total))
}
