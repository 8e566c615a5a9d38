//! The runtime under test as a child process. It can be killed without warning and restarted with the same address and
//! data.

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

use super::placeholders::{CommandTemplate, fill, mentions};
use super::{Error, RestartFuture, RuntimeHost};

/// Default template of `{config}`: a configuration of `rap serve`.
const TEMPLATE: &str = include_str!("rap.toml");
/// File name of the default template.
const TEMPLATE_NAME: &str = "rap.toml";
/// Number of lines at the end of the log that are shown.
const LOG_LINES: usize = 20;
/// Interval at which the checker tries to connect to a starting runtime.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Command and environment that start a runtime. Placeholders are replaced in the command, in the environment variables and
/// in the content of the template.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Command with its arguments.
    pub command: CommandTemplate,
    /// Environment variables in addition to the inherited ones.
    pub environment: Vec<(String, String)>,
    /// Template of the file `{config}`; if `None`, a configuration of `rap serve`.
    pub template: Option<PathBuf>,
    /// Host and port on which the runtime listens; if `None`, `{listen}` if that placeholder is used.
    pub address: Option<String>,
    /// Maximum time until the runtime accepts connections.
    pub start_timeout: Duration,
}

/// Process of the runtime. It is killed when this is dropped.
pub struct Process {
    words: Vec<String>,
    environment: Vec<(String, String)>,
    directory: TempDir,
    /// Placeholders of the process, with their values.
    values: Vec<(&'static str, String)>,
    /// Host and port on which the runtime listens, if known.
    address: Option<String>,
    start_timeout: Duration,
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Creates the directory and the configuration file of the runtime. `values` are the placeholders of the checker.
    pub fn prepare(launch: &Launch, values: &[(&'static str, String)]) -> Result<Process, Error> {
        let directory = tempfile::tempdir().map_err(Error::Directory)?;
        let data = directory.path().join("data");
        fs::create_dir(&data).map_err(Error::Directory)?;
        let (template, name) = template(launch)?;
        let config = data.join(name);
        let listen = free_address().map_err(Error::Listen)?;
        let (port, url) = (listen.port().to_string(), format!("http://{listen}"));
        let (listen, data) = (listen.to_string(), path_text(&data));
        let config_path = path_text(&config);
        let own = vec![
            ("listen", listen.clone()),
            ("port", port),
            ("url", url),
            ("data", data),
            ("config", config_path),
        ];
        let all: Vec<(&str, &str)> =
            values.iter().chain(&own).map(|(name, value)| (*name, value.as_str())).collect();
        let is_used = |name: &str| {
            let variables = launch.environment.iter().any(|(_, value)| mentions(value, name));
            let in_template = launch.command.mentions("config") && mentions(&template, name);
            launch.command.mentions(name) || variables || in_template
        };
        let knows_address = ["listen", "port", "url"].into_iter().any(is_used);
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
            address: launch.address.clone().or_else(|| knows_address.then(|| listen.clone())),
            directory,
            values: own,
            start_timeout: launch.start_timeout,
            child: Mutex::default(),
        })
    }

    /// Returns the placeholders of the process with their values: `{listen}`, `{port}`, `{url}`, `{data}` and `{config}`.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        self.values.clone()
    }

    /// Returns host and port on which the runtime listens, if known.
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Starts the runtime and waits until it accepts connections.
    pub async fn start(&self) -> Result<(), Error> {
        let mut slot = self.child.lock().await;
        let mut child = self.spawn()?;
        let began = Instant::now();
        while let Some(address) = &self.address {
            if TcpStream::connect(address).await.is_ok() {
                break;
            }
            if let Some(status) = child.try_wait().map_err(Error::Start)? {
                return Err(Error::Ended { status: status.to_string(), log: self.log() });
            }
            if began.elapsed() > self.start_timeout {
                kill_and_wait(&mut child).await;
                return Err(Error::Silent { address: address.clone(), log: self.log() });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        *slot = Some(child);
        Ok(())
    }

    fn spawn(&self) -> Result<Child, Error> {
        let log =
            File::options().create(true).append(true).open(self.log_path()).map_err(Error::Directory)?;
        let (program, arguments) = self.words.split_first().expect("bug: the command is empty");
        let mut command = Command::new(program);
        command.args(arguments).envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(self.directory.path().join("data")).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(Error::Directory)?).stderr(log);
        // A separate process group, so that the children of a wrapper script are killed too.
        command.process_group(0).kill_on_drop(true);
        command.spawn().map_err(Error::Start)
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("runtime.log")
    }

    /// Returns the last lines of the runtime's output.
    pub fn log(&self) -> String {
        let text = fs::read(self.log_path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Kills the runtime without warning.
    pub async fn kill(&self) {
        if let Some(mut child) = self.child.lock().await.take() {
            kill_and_wait(&mut child).await;
        }
    }
}

impl RuntimeHost for Process {
    fn restart(&self) -> RestartFuture<'_> {
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
        tracing::debug!(%error, "the runtime had already exited");
    }
}

async fn kill_and_wait(child: &mut Child) {
    kill(child);
    if let Err(error) = child.wait().await {
        tracing::debug!(%error, "the exit status of the runtime is unknown");
    }
}

fn template(launch: &Launch) -> Result<(String, String), Error> {
    let Some(path) = &launch.template else { return Ok((TEMPLATE.into(), TEMPLATE_NAME.into())) };
    let text = fs::read_to_string(path).map_err(|error| Error::Template { path: path_text(path), error })?;
    let name =
        path.file_name().map_or_else(|| TEMPLATE_NAME.into(), |name| name.to_string_lossy().into_owned());
    Ok((text, name))
}

fn path_text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Address with a port that is free at the moment.
fn free_address() -> io::Result<SocketAddr> {
    StdListener::bind(("127.0.0.1", 0))?.local_addr()
}
