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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rap_tool::prelude::*;
use rap_tool::process::{self, Confinement, Ended, ProcessTree, Program, ResourceLimits};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::process::ChildStdout;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

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
    trees: Trees,
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
        trees: Trees::default(),
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
            shell.trees.end(thread.key()).await;
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
    // The end of the thread finds every command that has begun. One that begins after it has been cancelled before.
    let entry = shell.trees.add(subscribe.thread().key());
    if subscribe.is_cancelled() {
        return Err(Error::new("cancelled"));
    }
    let tree = program.spawn().await.map_err(|error| Error::new(format!("cannot run sh: {error}")))?;
    let seconds = args.timeout_seconds.unwrap_or(DEFAULT_SECONDS).clamp(1, LONGEST_SECONDS);
    let run = Running { shell, call: subscribe.clone(), tree, seconds, entry };
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
    entry: Entry,
}

impl Running {
    /// Resolves when the processes have to end: the call is cancelled or its thread closed.
    async fn stopped(call: &Call, entry: &Entry) {
        tokio::select! {
            () = call.cancelled() => {}
            () = entry.end.cancelled() => {}
        }
    }

    /// Runs the command to its end and passes its output on.
    async fn finish(mut self, sink: &mut Sink<'_>) -> Result<Finish> {
        let Some(mut stdout) = self.tree.take_stdout() else {
            return Err(Error::new("the output of the command cannot be read"));
        };
        let deadline = Instant::now() + Duration::from_secs(self.seconds);
        let (mut buffer, mut open) = (vec![0; 32 * 1024], true);
        let ended = loop {
            tokio::select! {
                () = Running::stopped(&self.call, &self.entry) => {
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
            tokio::select! {
                drained = drain(&mut stdout, &mut buffer, sink) => drained?,
                () = Running::stopped(&self.call, &self.entry) => {}
            }
        }
        if self.call.is_cancelled() {
            self.tree.stop().await;
            return Err(Error::new("cancelled"));
        }
        self.shell.trees.keep(self.call.thread().key(), self.entry, self.tree, stdout).await;
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

/// Process trees of the commands that run or have left processes in the background, by key of the thread.
#[derive(Default)]
struct Trees(Arc<Mutex<HashMap<String, Vec<Listed>>>>);

struct Listed {
    end: CancellationToken,
    ended: CancellationToken,
    /// The command itself has ended.
    in_background: Arc<AtomicBool>,
}

/// The processes of one command. They have ended when this is dropped.
struct Entry {
    /// Cancelled when they have to end.
    end: CancellationToken,
    in_background: Arc<AtomicBool>,
    _ended: DropGuard,
}

impl Trees {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Listed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the processes of a command that is about to start.
    fn add(&self, thread: &str) -> Entry {
        let (end, ended, in_background) =
            (CancellationToken::new(), CancellationToken::new(), Arc::<AtomicBool>::default());
        let listed =
            Listed { end: end.clone(), ended: ended.clone(), in_background: Arc::clone(&in_background) };
        let mut all = self.lock();
        for listed in all.values_mut() {
            listed.retain(|listed| !listed.ended.is_cancelled());
        }
        all.retain(|_, listed| !listed.is_empty());
        all.entry(thread.to_owned()).or_default().push(listed);
        Entry { end, in_background, _ended: ended.drop_guard() }
    }

    /// Keeps the background processes of a command until they end or the thread is closed. Ends them if there are too
    /// many.
    async fn keep(&self, thread: &str, entry: Entry, mut tree: ProcessTree, mut stdout: ChildStdout) {
        let has_room = {
            let all = self.lock();
            let in_background = |listed: &&Listed| {
                listed.in_background.load(Ordering::Relaxed) && !listed.ended.is_cancelled()
            };
            let count = |listed: &Vec<Listed>| listed.iter().filter(in_background).count();
            let has_room = all.values().map(count).sum::<usize>() < BACKGROUND
                && all.get(thread).map_or(0, count) < BACKGROUND_OF_THREAD;
            entry.in_background.store(has_room, Ordering::Relaxed);
            has_room
        };
        if !has_room {
            tracing::warn!("there are too many background processes; those of this command were ended");
            return tree.stop().await;
        }
        tokio::spawn(async move {
            // A process whose output nobody reads would stop when the pipe is full.
            let mut sink = tokio::io::sink();
            tokio::select! {
                () = entry.end.cancelled() => {}
                _ = async { tokio::join!(tokio::io::copy(&mut stdout, &mut sink), tree.wait_for_all()) } => {}
            }
            tree.stop().await;
            drop(entry);
        });
    }

    /// Ends the processes of a thread, and waits until none is left.
    async fn end(&self, thread: &str) {
        let all = self.lock().remove(thread).unwrap_or_default();
        all.iter().for_each(|listed| listed.end.cancel());
        for listed in all {
            listed.ended.cancelled().await;
        }
    }
}
