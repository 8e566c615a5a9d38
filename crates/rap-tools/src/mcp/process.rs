//! An MCP server that is a process: its start, its end, and the transport over its stdin and stdout.
//!
//! Each server has a process group of its own, which ends with it. The supervisor of the bridge's own process collects what
//! leaves the group, so nothing outlives the bridge; see `rap_tool::process`.

use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleClient;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;

use super::listing::TaskHints;
use super::notices::{excerpt, log_lines};
use super::outline::Outline;

/// Maximum length of a message, in bytes. A longer one is dropped, and the request that it answers fails.
const MESSAGE_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum number of messages that were read and not handled yet.
const WAITING_MESSAGES: usize = 64;
/// Time that a server has to end after its stdin was closed, and after SIGTERM.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A running server process.
pub(super) struct ServerProcess {
    child: Child,
    group: Option<Pid>,
}

impl ServerProcess {
    /// Starts a server. Its error output goes to the log.
    pub(super) fn start(
        name: &str,
        command: &[String],
        environment: impl Iterator<Item = (String, String)>,
        hints: Arc<TaskHints>,
    ) -> io::Result<(ServerProcess, Pipes)> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut child = Command::new(program)
            .args(arguments)
            .env_clear()
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let missing = || io::Error::other("the process has no pipes");
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (stdin, stdout) = (stdin.ok_or_else(missing)?, stdout.ok_or_else(missing)?);
        if let Some(stderr) = child.stderr.take() {
            tokio::spawn(log_lines(name.to_owned(), BufReader::new(stderr)));
        }
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let (sender, received) = mpsc::channel(WAITING_MESSAGES);
        tokio::spawn(read_messages(name.to_owned(), BufReader::new(stdout), sender, hints));
        let stdin = Arc::new(Mutex::new(Some(stdin)));
        Ok((ServerProcess { child, group }, Pipes { stdin, received }))
    }

    /// Waits until the process has ended, and returns how. Cancel safe.
    pub(super) async fn ended(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// Ends the process and its group: its stdin is closed, then SIGTERM, then SIGKILL.
    pub(super) async fn stop(mut self) {
        if timeout(END_WITHIN, self.child.wait()).await.is_err() {
            self.signal(Signal::TERM);
            // The group is killed below in any case.
            timeout(END_WITHIN, self.child.wait()).await.ok();
        }
        self.signal(Signal::KILL);
        if let Err(error) = self.child.wait().await {
            tracing::warn!(%error, "the end of an MCP server could not be observed");
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // Fails if no process of the group is left.
            kill_process_group(group, signal).ok();
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.signal(Signal::KILL);
        }
    }
}

/// Transport over stdin and stdout: one message in each line.
pub(super) struct Pipes {
    stdin: Arc<Mutex<Option<ChildStdin>>>,
    received: mpsc::Receiver<RxJsonRpcMessage<RoleClient>>,
}

impl Transport<RoleClient> for Pipes {
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let stdin = Arc::clone(&self.stdin);
        async move {
            let mut line = serde_json::to_vec(&message)?;
            line.push(b'\n');
            let mut stdin = stdin.lock().await;
            let stdin = stdin.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
            stdin.write_all(&line).await?;
            stdin.flush().await
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        self.received.recv().await
    }

    async fn close(&mut self) -> io::Result<()> {
        self.received.close();
        // A send that a full pipe blocks keeps the lock. The process is ended anyway.
        if let Ok(mut stdin) = timeout(END_WITHIN, self.stdin.lock()).await {
            stdin.take();
        }
        Ok(())
    }
}

/// Reads messages until the end. Whatever is not a message goes to the log.
async fn read_messages(
    server: String,
    mut stdout: BufReader<ChildStdout>,
    messages: mpsc::Sender<RxJsonRpcMessage<RoleClient>>,
    hints: Arc<TaskHints>,
) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut stdout).take(MESSAGE_BYTES).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') && line.len() as u64 == MESSAGE_BYTES {
            tracing::warn!(server, "dropped a message of more than {MESSAGE_BYTES} bytes");
            let mut outline = Outline::default();
            outline.read(&line);
            if skip_line(&mut stdout, &mut outline).await.is_err() {
                return;
            }
            let Some(answer) = outline.as_error() else { continue };
            if messages.send(answer).await.is_err() {
                return;
            }
            line = Vec::new();
            continue;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        hints.observe(&line);
        match serde_json::from_slice(&line) {
            Ok(message) => {
                if messages.send(message).await.is_err() {
                    return;
                }
            }
            Err(_) => {
                let text = excerpt(&String::from_utf8_lossy(&line));
                tracing::warn!(server, "wrote something to stdout that is not a message of MCP: {text}");
            }
        }
        // A large message must not keep its memory.
        line.shrink_to(64 * 1024);
    }
}

async fn skip_line(stdout: &mut BufReader<ChildStdout>, outline: &mut Outline) -> io::Result<()> {
    loop {
        let read = stdout.fill_buf().await?;
        let end = read.iter().position(|byte| *byte == b'\n');
        outline.read(&read[..end.unwrap_or(read.len())]);
        match end {
            Some(end) => {
                stdout.consume(end + 1);
                return Ok(());
            }
            None if read.is_empty() => return Err(io::ErrorKind::UnexpectedEof.into()),
            None => {
                let length = read.len();
                stdout.consume(length);
            }
        }
    }
}
