//! The demo's runtime: this very program as a child, so that it can be killed.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::kitchen::Kitchen;
use crate::client::Client;

const SCENARIO: &str = include_str!("scenario.toml");
const EVENING: &str = include_str!("evening.toml");
const START_WITHIN: Duration = Duration::from_secs(15);

pub(super) struct Runtime {
    directory: PathBuf,
    pub url: String,
    child: Option<Child>,
}

/// Which model answers.
pub(super) enum Model {
    /// The one that plays the demo's part.
    Scenario,
    /// The one that plays it after the kill.
    Evening,
    /// The one that does what it is told.
    Obedient,
}

/// What a process has used so far.
#[derive(Clone, Copy)]
pub(super) struct Used {
    /// Time on a processor, where the system tells.
    pub processor: Option<Duration>,
    /// What its database has grown to, in bytes.
    pub database: u64,
}

impl Runtime {
    /// Starts it on an empty database, with the kitchen's tools.
    pub(super) async fn start(directory: &Path, kitchen: &Kitchen) -> anyhow::Result<Runtime> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port();
        let url = format!("http://127.0.0.1:{port}");
        let mut runtime = Runtime { directory: directory.to_owned(), url, child: None };
        fs::write(directory.join("scenario.toml"), SCENARIO)?;
        fs::write(directory.join("evening.toml"), EVENING)?;
        runtime.configure(&Model::Scenario, kitchen)?;
        runtime.start_again().await?;
        Ok(runtime)
    }

    /// Takes effect at the next start.
    pub(super) fn configure(&self, model: &Model, kitchen: &Kitchen) -> anyhow::Result<()> {
        let listen = self.url.trim_start_matches("http://");
        let script = match model {
            Model::Scenario => "script = \"scenario.toml\"",
            Model::Evening => "script = \"evening.toml\"",
            Model::Obedient => "",
        };
        let text = format!(
            "[server]\nlisten = \"{listen}\"\n[store]\nurl = \"sqlite:rap.db\"\n\
             [model]\nprovider = \"scripted\"\n{script}\n\
             [[tool_server]]\nurl = \"{}\"\n[[tool_server]]\nurl = \"{}\"\n",
            kitchen.oven_url, kitchen.doorbell_url
        );
        Ok(fs::write(self.directory.join("rap.toml"), text)?)
    }

    pub(super) async fn start_again(&mut self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let program = std::env::current_exe().context("can not find this program")?;
        let mut command = Command::new(program);
        command.args(["serve", "--config", "rap.toml", "--while-stdin-is-open"]);
        // What is set for other runtimes is not meant for this one.
        command.env_clear().current_dir(&self.directory).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().context("can not start the runtime")?);
        self.ready().await
    }

    async fn ready(&mut self) -> anyhow::Result<()> {
        let client = Client::new(&self.url, None)?;
        let deadline = Instant::now() + START_WITHIN;
        while client.threads(&[]).await.is_err() {
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

    /// The number of its process.
    pub(super) fn process(&self) -> u32 {
        self.child.as_ref().and_then(Child::id).unwrap_or(0)
    }

    /// Kills it without a warning (SIGKILL), and waits for its end.
    pub(super) async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().await.context("can not kill the runtime")?;
        }
        Ok(())
    }

    pub(super) fn used(&self) -> Used {
        let size = |name| fs::metadata(self.directory.join(name)).map_or(0, |file| file.len());
        Used { processor: processor_time(self.process()), database: size("rap.db") + size("rap.db-wal") }
    }
}

/// Linux tells it for each thread, in nanoseconds.
fn processor_time(process: u32) -> Option<Duration> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{process}/task")).ok()? {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        total += text.split_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(total))
}
