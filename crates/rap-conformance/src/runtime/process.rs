//! The runtime under test as a process of ours: started with the URLs that it needs, killed without warning, started
//! again at the same address with the same data.

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::placeholders::{Words, fill, mentions};
use super::{Error, Host, Restarted};

/// The configuration of `rap serve`, where `{config}` is wanted and no template was given.
const TEMPLATE: &str = include_str!("rap.toml");
/// What it is called.
const TEMPLATE_NAME: &str = "rap.toml";
/// How much of a log is shown, in lines.
const LOG_LINES: usize = 20;
/// How often a starting runtime is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// How a runtime is started. Placeholders in all of it are filled.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The command.
    pub command: Words,
    /// Variables besides those that it inherits.
    pub environment: Vec<(String, String)>,
    /// What the file `{config}` holds.
    pub template: Option<PathBuf>,
    /// Where it listens, if that is not to be `{listen}`.
    pub address: Option<String>,
    /// How long it may take to start.
    pub patience: Duration,
}

/// A process that was started, or is about to be.
pub struct Process {
    words: Vec<String>,
    environment: Vec<(String, String)>,
    directory: TempDir,
    /// Where it listens, if it was told or said so.
    address: Option<String>,
    patience: Duration,
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Writes what it needs. `values` are the placeholders that the checker itself fills.
    pub fn prepare(launch: &Launch, values: &[(&'static str, String)]) -> Result<Process, Error> {
        let directory = tempfile::tempdir().map_err(Error::Directory)?;
        let data = directory.path().join("data");
        fs::create_dir(&data).map_err(Error::Directory)?;
        let (template, name) = template(launch)?;
        let config = data.join(name);
        let listen = free_address().map_err(Error::Listen)?;
        let (port, url) = (listen.port().to_string(), format!("http://{listen}"));
        let (listen, data) = (listen.to_string(), shown(&data));
        let config_path = shown(&config);
        let mut all: Vec<(&str, &str)> = values.iter().map(|(name, value)| (*name, value.as_str())).collect();
        all.extend([("listen", listen.as_str()), ("port", &port), ("url", &url)]);
        all.extend([("data", data.as_str()), ("config", &config_path)]);
        let everything = |name: &str| {
            let variables = launch.environment.iter().any(|(_, value)| mentions(value, name));
            let filed = launch.command.mentions("config") && mentions(&template, name);
            launch.command.mentions(name) || variables || filed
        };
        let told = ["listen", "port", "url"].into_iter().any(everything);
        if launch.command.mentions("config")
            || launch.environment.iter().any(|(_, value)| mentions(value, "config"))
        {
            fs::write(&config, fill(&template, &all)).map_err(Error::Directory)?;
        }
        Ok(Process {
            words: launch.command.filled(&all),
            environment: launch
                .environment
                .iter()
                .map(|(name, value)| (name.clone(), fill(value, &all)))
                .collect(),
            address: launch.address.clone().or_else(|| told.then(|| listen.clone())),
            directory,
            patience: launch.patience,
            child: Mutex::default(),
        })
    }

    /// Where it listens, as host and port, if that is known.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Starts it, and waits until it listens.
    pub async fn start(&self) -> Result<(), Error> {
        let mut place = self.child.lock().await;
        let mut child = self.spawn()?;
        let began = Instant::now();
        while let Some(address) = &self.address {
            if TcpStream::connect(address).await.is_ok() {
                break;
            }
            if let Some(status) = child.try_wait().map_err(Error::Start)? {
                return Err(Error::Ended { status: status.to_string(), log: self.log() });
            }
            if began.elapsed() > self.patience {
                end(&mut child).await;
                return Err(Error::Silent { address: address.clone(), log: self.log() });
            }
            tokio::time::sleep(LOOK).await;
        }
        *place = Some(child);
        Ok(())
    }

    fn spawn(&self) -> Result<Child, Error> {
        let log =
            File::options().create(true).append(true).open(self.log_path()).map_err(Error::Directory)?;
        let (program, arguments) = self.words.split_first().expect("bug: a command has a first word");
        let mut command = Command::new(program);
        command.args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(self.directory.path().join("data")).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(Error::Directory)?).stderr(log);
        // In a group of its own, so that a wrapper does not survive with what it started.
        command.process_group(0).kill_on_drop(true);
        command.spawn().map_err(Error::Start)
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("runtime.log")
    }

    /// The last lines of what it has written.
    pub fn log(&self) -> String {
        let text = fs::read(self.log_path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Ends it without warning.
    pub async fn kill(&self) {
        if let Some(mut child) = self.child.lock().await.take() {
            end(&mut child).await;
        }
    }
}

impl Host for Process {
    fn restart(&self) -> Restarted<'_> {
        Box::pin(async {
            self.kill().await;
            self.start().await
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = self.child.get_mut() {
            kill(child);
        }
    }
}

fn kill(child: &Child) {
    let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    if let Some(group) = group
        && let Err(error) = kill_process_group(group, Signal::KILL)
    {
        tracing::debug!(%error, "the runtime was gone already");
    }
}

async fn end(child: &mut Child) {
    kill(child);
    if let Err(error) = child.wait().await {
        tracing::debug!(%error, "nobody can say how the runtime ended");
    }
}

fn template(launch: &Launch) -> Result<(String, String), Error> {
    let Some(path) = &launch.template else { return Ok((TEMPLATE.into(), TEMPLATE_NAME.into())) };
    let text = fs::read_to_string(path).map_err(|error| Error::Template { path: shown(path), error })?;
    let name =
        path.file_name().map_or_else(|| TEMPLATE_NAME.into(), |name| name.to_string_lossy().into_owned());
    Ok((text, name))
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A port that is free now.
fn free_address() -> io::Result<SocketAddr> {
    StdListener::bind(("127.0.0.1", 0))?.local_addr()
}
