//! Tool servers that `rap serve` starts: one process each, started again when it ends, and ended with this program.
//!
//! A server gets `RAP_EMBEDDED=1` and `PORT=0`, and names its port in the first line on stdout. It also gets a directory
//! for its data and a token that its callers have to send, both the same after every start: a server of `rap-tool`
//! knows its callers by their tokens.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rap_protocol::{Secret, visible};
use rap_runtime::{Credentials, ServerState, Started, ToolServer};
use rap_tool::process::{Ended, ProcessTree, Program};
use serde::Deserialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// Time in which a server has to name its port, unless its configuration says otherwise.
pub const START_WITHIN: Duration = Duration::from_secs(30);
/// Time in which a server that has closed its stdout usually ends.
const END_WITHIN: Duration = Duration::from_secs(1);
/// Time between SIGTERM and SIGKILL.
const STOP_WITHIN: Duration = Duration::from_secs(10);
/// First and longest pause before a server is started again. The pause doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time after which a server that ran counts as healthy, so that the next pause is the first one again.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
/// Maximum length of a line of output. A longer one is divided.
const LINE_BYTES: u64 = 8 * 1024;

/// A tool server to start.
pub struct Launch {
    /// Name in the log and in listings.
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Environment without the variables that every server gets.
    pub environment: Vec<(String, String)>,
    /// Token that callers send; `None` for one that is created at the first start.
    pub bearer: Option<Secret>,
    /// Parent of the servers' data directories.
    pub data: PathBuf,
    /// Time in which it has to name its port.
    pub start_within: Duration,
}

/// A server that is kept running once it is started.
struct Server {
    name: String,
    program: Program,
    start_within: Duration,
    state: watch::Sender<ServerState>,
}

/// The tool servers that this program starts.
#[derive(Default)]
pub struct ToolProcesses {
    stop: watch::Sender<bool>,
    waiting: Vec<Server>,
    tasks: Vec<JoinHandle<()>>,
}

impl ToolProcesses {
    /// Adds a server, which [`ToolProcesses::start`] starts. Returns its settings for the runtime.
    pub fn add(&mut self, launch: Launch) -> ToolServer {
        let (state, started) = Started::channel();
        let url = format!("command:{}", launch.name);
        let (bearer, environment) = match prepare(&launch) {
            Ok((token, data)) => (Some(token.clone()), Ok(environment(&launch, &token, &data))),
            Err(error) => (launch.bearer.clone(), Err(format!("its data directory cannot be used: {error}"))),
        };
        match environment {
            Ok(environment) => {
                let program = Program::new(&launch.command[0]).args(&launch.command[1..]);
                let program = program.envs(environment).grace(STOP_WITHIN);
                let (name, start_within) = (launch.name, launch.start_within);
                self.waiting.push(Server { name, program, start_within, state });
            }
            Err(why) => {
                let why = format!("{} cannot be started: {why}", launch.name);
                tracing::error!(server = launch.name, "{why}");
                state.send_replace(ServerState::Failed(why));
            }
        }
        let credentials = bearer.map(Credentials::bearer).unwrap_or_default();
        ToolServer { credentials, started: Some(started), ..ToolServer::new(url) }
    }

    /// Starts all servers in the background.
    pub fn start(&mut self) {
        for server in self.waiting.drain(..) {
            let stop = self.stop.subscribe();
            self.tasks.push(tokio::spawn(keep_running(server, stop)));
        }
    }

    /// Ends all servers, and waits until none of their processes is left.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for task in self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "the task of a tool server failed; this is a bug");
            }
        }
    }
}

/// Creates the data directory and the token of a server.
fn prepare(launch: &Launch) -> io::Result<(Secret, PathBuf)> {
    let data = std::path::absolute(launch.data.join(&launch.name))?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&data)?;
    let token = match &launch.bearer {
        Some(token) => token.clone(),
        None => stored_token(&data.join("token"))?,
    };
    Ok((token, data))
}

/// Reads a token, or creates one that only the owner can read.
fn stored_token(path: &Path) -> io::Result<Secret> {
    match fs::read_to_string(path) {
        Ok(token) if !token.trim().is_empty() => return Ok(Secret::new(token.trim())),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut bytes = [0; 24];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, token.as_bytes())?;
    file.sync_all()?;
    Ok(Secret::new(token))
}

fn environment(launch: &Launch, token: &Secret, data: &Path) -> Vec<(String, String)> {
    let own = [
        ("RAP_EMBEDDED", "1".to_owned()),
        ("PORT", "0".to_owned()),
        ("RAP_TOOL_DATA", data.to_string_lossy().into_owned()),
        ("RAP_TOOL_BEARER", token.expose().to_owned()),
    ];
    let own = own.map(|(name, value)| (name.to_owned(), value));
    launch.environment.iter().cloned().chain(own).collect()
}

/// Starts a server again and again, until this program stops.
async fn keep_running(server: Server, mut stop: watch::Receiver<bool>) {
    let Server { name, program, state, .. } = &server;
    let mut pause = FIRST_PAUSE;
    loop {
        let began = Instant::now();
        let spawned = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return,
            spawned = program.spawn() => spawned,
        };
        let why = match spawned {
            Err(error) => format!("{name} cannot be started: {error}"),
            Ok(tree) => match run(&server, tree, &mut stop).await {
                Some(why) => format!("{name} {why}"),
                None => return,
            },
        };
        if began.elapsed() >= HEALTHY_AFTER {
            pause = FIRST_PAUSE;
        }
        tracing::warn!(server = name, again_in = ?pause, "{why}");
        state.send_replace(ServerState::Failed(why));
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
        }
    }
}

/// Runs a server until it ends. Returns why, or `None` if this program stops.
async fn run(server: &Server, mut tree: ProcessTree, stop: &mut watch::Receiver<bool>) -> Option<String> {
    let Server { name, state, .. } = server;
    if let Some(stderr) = tree.take_stderr() {
        tokio::spawn(log_lines(name.clone(), BufReader::new(stderr)));
    }
    let stdout = tree.take_stdout().map(BufReader::new);
    let why = tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop) => None,
        why = serve(server, &mut tree, stdout) => Some(why),
    };
    // Its port is free now. Whoever takes it must not get the requests of this server, with its token.
    if let Some(why) = &why {
        state.send_replace(ServerState::Failed(format!("{name} {why}")));
    }
    tree.stop().await;
    why
}

/// Waits for the port and then for the end of a server. Returns why it ended.
async fn serve(
    server: &Server,
    tree: &mut ProcessTree,
    stdout: Option<BufReader<impl AsyncRead + Unpin + Send + 'static>>,
) -> String {
    let Server { name, start_within, state, .. } = server;
    let Some(mut stdout) = stdout else { return "has no output".into() };
    let port = tokio::select! {
        port = timeout(*start_within, read_port(&mut stdout)) => port,
        ended = tree.wait() => return format!("ended before it named its port: {}", described(ended)),
    };
    let port = match port {
        Ok(Ok(port)) => port,
        Ok(Err(why)) => return ended_or(tree, why).await,
        Err(_) => return format!("did not name its port within {start_within:?}"),
    };
    tracing::info!(server = name, port, pid = tree.id(), "the tool server is running");
    state.send_replace(ServerState::Running { port });
    tokio::spawn(log_lines(name.clone(), stdout));
    format!("ended: {}", described(tree.wait().await))
}

/// Returns the end of a server that has just ended, else `why`.
async fn ended_or(tree: &mut ProcessTree, why: String) -> String {
    match timeout(END_WITHIN, tree.wait()).await {
        Ok(ended) => format!("ended before it named its port: {}", described(ended)),
        Err(_) => why,
    }
}

fn described(ended: io::Result<Ended>) -> String {
    match ended {
        Ok(Ended::Exited(code)) => format!("exit code {code}"),
        Ok(Ended::Killed(signal)) => format!("signal {signal}"),
        Err(error) => error.to_string(),
    }
}

#[derive(Deserialize)]
struct Announcement {
    port: u16,
}

/// Reads the first line, which names the port.
async fn read_port(stdout: &mut (impl AsyncBufRead + Unpin)) -> Result<u16, String> {
    let line = next_line(stdout).await.map_err(|error| error.to_string())?;
    let line = line.ok_or("closed its stdout before it named its port")?;
    match serde_json::from_str(&line) {
        Ok(Announcement { port }) if port != 0 => Ok(port),
        _ => {
            let begin: String = visible::text(&line).chars().take(200).collect();
            Err(format!("must name its port in the first line on stdout, as {{\"port\": N}}, not {begin:?}"))
        }
    }
}

/// Reads a line of at most [`LINE_BYTES`]. `None` is the end.
async fn next_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    if reader.take(LINE_BYTES).read_until(b'\n', &mut line).await? == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()))
}

/// Writes the output of a server to the log, with its name.
async fn log_lines(server: String, mut output: impl AsyncBufRead + Unpin) {
    while let Ok(Some(line)) = next_line(&mut output).await {
        let (level, text) = parse_log_line(&line);
        let text = visible::text(text);
        match level {
            _ if text.is_empty() => {}
            "ERROR" => tracing::error!(server, "{text}"),
            "WARN" => tracing::warn!(server, "{text}"),
            _ => tracing::info!(server, "{text}"),
        }
    }
}

/// Returns the level and the text of a line that a server built with `rap-tool` logged, without its time, which the log
/// of this process has too. Any other line has no level.
fn parse_log_line(line: &str) -> (&str, &str) {
    // Such as 2026-11-18T10:54:04.783480Z.
    let is_time = |word: &str| word.ends_with('Z') && word.as_bytes().get(10) == Some(&b'T');
    let after_time =
        line.split_once(' ').filter(|(time, _)| is_time(time)).map(|(_, rest)| rest.trim_start());
    match after_time.and_then(|rest| rest.split_once(' ')) {
        Some((level @ ("ERROR" | "WARN" | "INFO" | "DEBUG" | "TRACE"), text)) => (level, text.trim_start()),
        _ => ("", line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_logged_line_is_not_repeated() {
        for (line, expected) in [
            (
                "2026-11-18T10:54:04.783480Z  INFO rap_tool::serve: listening",
                ("INFO", "rap_tool::serve: listening"),
            ),
            ("2026-11-18T10:54:04Z  WARN rap_tool: slow", ("WARN", "rap_tool: slow")),
            ("2026-11-18T10:54:04Z something else", ("", "2026-11-18T10:54:04Z something else")),
            ("ERROR of a server without times", ("", "ERROR of a server without times")),
            ("", ("", "")),
        ] {
            assert_eq!(parse_log_line(line), expected);
        }
    }
}
