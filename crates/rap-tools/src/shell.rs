//! `run_command`: runs shell commands in a workspace of the thread.
//!
//! - A command and all of its descendants are one process tree (`rap_tool::process`). A time-out, a cancellation or the
//!   end of the thread ends them all. Background processes of a command end with its thread.
//! - Commands write only to the workspaces of the thread and its ancestors, the configured roots and `/tmp`, where the
//!   kernel has Landlock.
//! - The environment is made here, so it contains no secret of this program.

mod allow;
mod output;
mod workspace;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_tool::prelude::*;
use rap_tool::process::{self, Confinement, Ended, ProcessTree, Program, ResourceLimits};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::cut::Cut;
use crate::{Error as StartError, Options};
use allow::Approvals;
use output::{Sink, Streamed, result};

/// Longest time of a command, and the time if none is given.
const LONGEST_SECONDS: u64 = 24 * 3600;
const DEFAULT_SECONDS: u64 = 3600;
/// Maximum length of a command, in bytes.
const COMMAND_BYTES: usize = 100_000;
/// Time without output after which the result is sent, if a background process still holds the output, and the longest
/// time to wait for that.
const QUIET: Duration = Duration::from_millis(100);
const LONGEST_DRAIN: Duration = Duration::from_secs(2);
/// Maximum number of process trees that are left in the background, of a thread and in total.
const BACKGROUND_OF_THREAD: usize = 16;
const BACKGROUND: usize = 256;
/// Largest file that a command may write, in bytes.
const FILE_BYTES: u64 = 16 * 1024 * 1024 * 1024;
const OPEN_FILES: u64 = 4096;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a command with `sh -c` in the workspace of this conversation, a directory that is deleted when the conversation
/// is closed. Returns a JSON object with the exit code and the output (stdout and stderr together). stdin is empty. Long
/// output is cut in the middle. Processes that are started in the background keep running until the conversation is closed.
#[derive(Deserialize, JsonSchema)]
struct RunCommand {
    /// The command line.
    #[schemars(length(min = 1, max = 100_000))]
    command: String,
    /// Working directory, relative to the workspace.
    cwd: Option<String>,
    /// Time after which the command is ended; 3600 by default.
    #[schemars(range(min = 1, max = 86_400))]
    timeout_seconds: Option<u64>,
    /// True to get the output while the command runs, as events. The last event has the exit code.
    stream: Option<bool>,
}

/// State that all calls share.
struct Shell {
    roots: Vec<PathBuf>,
    path: String,
    approvals: Approvals,
    background: Background,
}

pub(crate) fn server(options: Options) -> Result<ToolServer, StartError> {
    match process::confinement() {
        Confinement::Full => {}
        Confinement::Partial => {
            tracing::warn!(
                "this kernel has an old Landlock: some ways to write outside the workspace are open"
            );
        }
        Confinement::None => {
            tracing::warn!("this kernel has no Landlock: commands can write wherever this user can");
        }
    }
    let canonical = |path: PathBuf| match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(source) => Err(StartError::Directory { path, source }),
    };
    let asks = !options.allow.is_empty();
    let shell = Arc::new(Shell {
        roots: options.roots.into_iter().map(canonical).collect::<Result<_, _>>()?,
        path: options.path.unwrap_or_else(|| PATH.to_owned()),
        approvals: Approvals::new(options.allow, options.data.join("approvals")),
        background: Background::default(),
    });
    let closing = Arc::clone(&shell);
    let run = move |args: RunCommand, subscribe: Subscribe| run_command(Arc::clone(&shell), args, subscribe);
    let tool = Tool::subscription("run_command", run).not_restartable().long_running().without_scrubbing();
    // With an allow list, the tool itself asks about every other command, so the runtime need not ask as well.
    let tool = if asks { tool } else { tool.destructive() };
    let tool = tool.display_script("args.command");
    let server = ToolServer::new("shell").description("Runs commands on this machine.").offer(tool);
    Ok(server.on_close_thread(move |thread| {
        let shell = Arc::clone(&closing);
        async move {
            shell.background.end(thread.key()).await;
            shell.approvals.forget(thread.key()).await;
            Ok(())
        }
    }))
}

async fn run_command(shell: Arc<Shell>, args: RunCommand, subscribe: Subscribe) -> Result<()> {
    if subscribe.is_confirmed() {
        let subscription = subscribe.confirm("").await?;
        let text =
            "Error: the server restarted during the command, so its outcome is unknown; check what was done";
        return subscription.finish(Event::new(text).associative()).await;
    }
    if args.command.len() > COMMAND_BYTES {
        return Err(Error::new("the command is longer than 100000 bytes; write it to a file first"));
    }
    shell.approvals.approve(&subscribe, &args.command).await?;
    let workspace = workspace::prepare(&subscribe, &shell.roots).await?;
    let directory = workspace.directory(args.cwd.as_deref(), &shell.roots)?;
    let program = shell.program(&args.command, &workspace, directory);
    let tree = program.spawn().await.map_err(|error| Error::new(format!("cannot run sh: {error}")))?;
    let seconds = args.timeout_seconds.unwrap_or(DEFAULT_SECONDS).clamp(1, LONGEST_SECONDS);
    let run = Running { shell, call: subscribe.clone(), tree, seconds };
    if args.stream == Some(true) {
        let subscription = subscribe.confirm("The command runs; its output follows.").await?;
        let mut sink = Sink::Streamed(Streamed::new(&subscription));
        let finish = run.finish(&mut sink).await?;
        let text = result(sink.into_output(), &finish);
        return subscription.finish(Event::new(text).associative()).await;
    }
    let mut sink = Sink::Collected(Cut::default());
    let finish = run.finish(&mut sink).await?;
    subscribe.answer(result(sink.into_output(), &finish)).await
}

/// End of a command.
pub(crate) enum Finish {
    Ended(Ended),
    TimedOut { seconds: u64 },
}

impl Finish {
    /// Returns the fields of the result besides the output.
    fn fields(&self) -> serde_json::Value {
        match self {
            Finish::Ended(Ended::Exited(code)) => json!({"exit_code": code}),
            Finish::Ended(Ended::Killed(signal)) => json!({"exit_code": 128 + signal, "signal": signal}),
            Finish::TimedOut { seconds } => {
                json!({"exit_code": null, "error": format!("timed out after {seconds} seconds")})
            }
        }
    }
}

impl Shell {
    fn program(&self, command: &str, workspace: &workspace::Workspace, directory: PathBuf) -> Program {
        let temporary = PathBuf::from("/tmp");
        let device = PathBuf::from("/dev");
        let own = workspace.all();
        let writable = own.iter().chain(&self.roots).chain([&temporary, &device]);
        let home = workspace.own.to_string_lossy();
        let environment = [
            ("PATH", self.path.as_str()),
            ("HOME", &home),
            ("RAP_WORKSPACE", &home),
            ("LANG", "C.UTF-8"),
            ("TERM", "dumb"),
        ];
        let limits = ResourceLimits {
            file_size: Some(FILE_BYTES),
            open_files: Some(OPEN_FILES),
            ..ResourceLimits::default()
        };
        Program::new("/bin/sh")
            .args(["-c", command])
            .envs(environment)
            .directory(directory)
            .merge_stderr()
            .writable(writable)
            .limits(limits)
    }
}

/// A command that runs.
struct Running {
    shell: Arc<Shell>,
    call: Call,
    tree: ProcessTree,
    seconds: u64,
}

impl Running {
    /// Runs the command to its end and passes its output on.
    async fn finish(mut self, sink: &mut Sink<'_>) -> Result<Finish> {
        let Some(mut stdout) = self.tree.take_stdout() else {
            return Err(Error::new("the output of the command cannot be read"));
        };
        let deadline = Instant::now() + Duration::from_secs(self.seconds);
        let (mut buffer, mut open) = (vec![0; 32 * 1024], true);
        let ended = loop {
            tokio::select! {
                () = self.call.cancelled() => {
                    self.tree.stop().await;
                    return Err(Error::new("cancelled"));
                }
                ended = self.tree.wait() => break ended?,
                () = sleep_until(deadline) => {
                    self.tree.stop().await;
                    drain(&mut stdout, &mut buffer, sink).await?;
                    return Ok(Finish::TimedOut { seconds: self.seconds });
                }
                read = stdout.read(&mut buffer), if open => match read {
                    Ok(0) | Err(_) => open = false,
                    Ok(read) => sink.take(&buffer[..read]).await?,
                },
                () = sink.pause() => sink.flush().await?,
            }
        };
        if open {
            drain(&mut stdout, &mut buffer, sink).await?;
        }
        self.shell.background.keep(self.call.thread().key(), self.tree, stdout).await;
        Ok(Finish::Ended(ended))
    }
}

/// Reads the output that is left when a command has ended. A background process may hold the output open, and write
/// more.
async fn drain(stdout: &mut ChildStdout, buffer: &mut [u8], sink: &mut Sink<'_>) -> Result<()> {
    let end = Instant::now() + LONGEST_DRAIN;
    loop {
        let quiet = (Instant::now() + QUIET).min(end);
        match tokio::time::timeout_at(quiet, stdout.read(buffer)).await {
            Ok(Ok(read)) if read > 0 => sink.take(&buffer[..read]).await?,
            _ => return Ok(()),
        }
    }
}

/// Process trees that commands have left in the background, by key of the thread.
#[derive(Default)]
struct Background(Arc<Mutex<HashMap<String, Vec<Left>>>>);

struct Left {
    end: CancellationToken,
    ended: tokio::task::JoinHandle<()>,
}

impl Background {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Left>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the background processes of a command until they end or the thread is closed. Ends them if there are too
    /// many.
    async fn keep(&self, thread: &str, mut tree: ProcessTree, mut stdout: ChildStdout) {
        let has_room = {
            let mut all = self.lock();
            for left in all.values_mut() {
                left.retain(|left| !left.ended.is_finished());
            }
            all.retain(|_, left| !left.is_empty());
            let total: usize = all.values().map(Vec::len).sum();
            total < BACKGROUND && all.get(thread).is_none_or(|left| left.len() < BACKGROUND_OF_THREAD)
        };
        if !has_room {
            tracing::warn!("there are too many background processes; those of this command were ended");
            return tree.stop().await;
        }
        let end = CancellationToken::new();
        let asked = end.clone();
        let ended = tokio::spawn(async move {
            // A process whose output nobody reads would stop when the pipe is full.
            let mut sink = tokio::io::sink();
            tokio::select! {
                () = asked.cancelled() => {}
                _ = async { tokio::join!(tokio::io::copy(&mut stdout, &mut sink), tree.wait_for_all()) } => {}
            }
            tree.stop().await;
        });
        self.lock().entry(thread.to_owned()).or_default().push(Left { end, ended });
    }

    /// Ends the processes of a thread, and waits until none is left.
    async fn end(&self, thread: &str) {
        let left = self.lock().remove(thread).unwrap_or_default();
        left.iter().for_each(|left| left.end.cancel());
        for Left { ended, .. } in left {
            if let Err(error) = ended.await {
                tracing::error!(%error, "the task of a background process failed; this is a bug");
            }
        }
    }
}
