//! Child processes that end with their owner, whatever they do.
//!
//! A [`Program`] is not started directly. This program is started again as a supervisor, which starts it, collects its
//! orphans, and ends all of its descendants when the [`ProcessTree`] is dropped, even if the owner was killed. A
//! descendant cannot escape by leaving its process group or session, nor by ending its parent. Only one that kills the
//! supervisor itself can, since it has the same user: this does not protect from a program that wants to escape.
//!
//! On systems other than Linux orphans cannot be collected. There, only the process group ends with its owner.
//!
//! ```no_run
//! use rap_tool::process::{self, Program};
//!
//! fn main() -> rap_tool::Result<()> {
//!     process::init();
//!     tokio::runtime::Runtime::new()?.block_on(async {
//!         let mut tree = Program::new("/bin/sh").args(["-c", "make test"]).directory("/srv/project").spawn().await?;
//!         let ended = tree.wait().await?;
//!         println!("{ended:?}");
//!         tree.stop().await;
//!         Ok(())
//!     })
//! }
//! ```

mod confinement;
mod supervisor;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};

pub use confinement::{Confinement, confinement};

/// First argument of a supervisor.
const SUPERVISE: &str = "--rap-supervise";
/// Maximum size of the description of a program that a supervisor reads, in bytes.
const SPEC_BYTES: u64 = 8 * 1024 * 1024;
/// Time that [`ProcessTree::stop`] waits beyond the grace time. A process in an uninterruptible system call ends later.
const STOP_EXTRA: Duration = Duration::from_secs(10);

/// The program to start as a supervisor.
static SUPERVISOR: OnceLock<PathBuf> = OnceLock::new();

/// Makes this program able to supervise: call it first in `main`, before any thread is started.
///
/// In a process that was started as a supervisor it does not return.
pub fn init() {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == SUPERVISE) {
        std::process::exit(supervisor::run());
    }
    let own = if cfg!(target_os = "linux") {
        // Leads to the running program even if its file was replaced.
        Ok(PathBuf::from("/proc/self/exe"))
    } else {
        std::env::current_exe()
    };
    if let Ok(own) = own {
        SUPERVISOR.get_or_init(|| own);
    }
}

/// Sets the program to start as a supervisor, one whose `main` calls [`init`]. For tests, whose `main` function is not
/// their own. The first call counts.
pub fn supervise_with(program: impl Into<PathBuf>) {
    SUPERVISOR.get_or_init(|| program.into());
}

/// A program to run, with an empty environment and an empty stdin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Program {
    program: OsString,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    directory: Option<OsString>,
    grace: Duration,
    merged: bool,
    /// `None` permits writing everywhere.
    writable: Option<Vec<OsString>>,
    limits: ResourceLimits,
}

/// Limits of each process of a tree. `None` leaves a limit as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimits {
    /// Address space, in bytes.
    pub memory: Option<u64>,
    /// Size of a file that it writes, in bytes.
    pub file_size: Option<u64>,
    /// Number of open files.
    pub open_files: Option<u64>,
    /// CPU time.
    pub cpu: Option<Duration>,
}

/// End of the program of a tree. Its descendants may still run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// It exited with this code.
    Exited(i32),
    /// A signal with this number ended it.
    Killed(i32),
}

/// Message of a supervisor.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    Started { pid: u32 },
    Failed { why: String },
    Ended(Ended),
}

impl Program {
    /// Creates a program with this path or name.
    pub fn new(program: impl Into<OsString>) -> Self {
        Program {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: None,
            grace: Duration::from_secs(2),
            merged: false,
            writable: None,
            limits: ResourceLimits::default(),
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets variables of the environment. The last value of a name counts.
    #[must_use]
    pub fn envs<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let owned = |(name, value): (N, V)| (name.as_ref().to_owned(), value.as_ref().to_owned());
        self.environment.extend(variables.into_iter().map(owned));
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn directory(mut self, path: impl AsRef<Path>) -> Self {
        self.directory = Some(path.as_ref().into());
        self
    }

    /// Sets the time between SIGTERM and SIGKILL when the tree is ended; 2 seconds by default.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sends stderr to stdout, so that both arrive in the order in which they were written.
    #[must_use]
    pub fn merge_stderr(mut self) -> Self {
        self.merged = true;
        self
    }

    /// Lets the tree write only below these paths, where the kernel supports that ([`confinement`]). It may read
    /// everything that its user may read. Paths that do not exist are ignored.
    #[must_use]
    pub fn writable<P: AsRef<Path>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.writable = Some(paths.into_iter().map(|path| path.as_ref().into()).collect());
        self
    }

    /// Sets limits of each process.
    #[must_use]
    pub fn limits(mut self, limits: ResourceLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Starts the program. Returns when it runs, or an error if it cannot be started.
    pub async fn spawn(&self) -> io::Result<ProcessTree> {
        let supervisor = SUPERVISOR.get().ok_or_else(|| {
            io::Error::other("rap_tool::process::init must be called first in the main function")
        })?;
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let stderr = if self.merged { Stdio::null() } else { Stdio::piped() };
        let mut command = Command::new(supervisor);
        command.arg(SUPERVISE).env_clear().stdin(Stdio::from(OwnedFd::from(theirs)));
        // A signal of the terminal to the owner's process group must not reach the tree: the owner ends it.
        let mut child = command.stdout(Stdio::piped()).stderr(stderr).process_group(0).spawn()?;
        // The other end must be closed in this process, or its end would never be noticed.
        drop(command);
        let (reports, mut control) = UnixStream::from_std(ours)?.into_split();
        let mut spec = serde_json::to_vec(self)?;
        spec.push(b'\n');
        control.write_all(&spec).await?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let reports = BufReader::new(reports).lines();
        let (pid, grace) = (0, self.grace);
        let mut tree =
            ProcessTree { supervisor: child, reports, control, stdout, stderr, pid, grace, ended: None };
        match tree.report().await? {
            Report::Started { pid } => tree.pid = pid,
            Report::Failed { why } => return Err(io::Error::other(why)),
            Report::Ended(_) => return Err(io::Error::other("the supervisor sent its reports out of order")),
        }
        Ok(tree)
    }
}

/// A running program with all of its descendants. Dropping it ends them all: SIGTERM, then SIGKILL after the grace time.
#[derive(Debug)]
pub struct ProcessTree {
    supervisor: Child,
    reports: Lines<BufReader<OwnedReadHalf>>,
    /// The supervisor ends the tree when this is closed.
    control: OwnedWriteHalf,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    pid: u32,
    grace: Duration,
    ended: Option<Ended>,
}

impl ProcessTree {
    /// Returns the process id of the program.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Takes the output. It ends when every process that has inherited it has ended.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.stdout.take()
    }

    /// Takes the error output. There is none after [`Program::merge_stderr`].
    pub fn take_stderr(&mut self) -> Option<ChildStderr> {
        self.stderr.take()
    }

    /// Waits until the program has ended. Its descendants may still run. Cancel safe.
    pub async fn wait(&mut self) -> io::Result<Ended> {
        if let Some(ended) = self.ended {
            return Ok(ended);
        }
        match self.report().await? {
            Report::Ended(ended) => {
                self.ended = Some(ended);
                Ok(ended)
            }
            other => Err(io::Error::other(format!("unexpected report of the supervisor: {other:?}"))),
        }
    }

    /// Waits until the program and all of its descendants have ended by themselves. Cancel safe.
    pub async fn wait_for_all(&mut self) -> io::Result<()> {
        self.supervisor.wait().await.map(drop)
    }

    /// Ends all processes. Returns when none is left.
    pub async fn stop(self) {
        let ProcessTree { mut supervisor, control, reports, grace, .. } = self;
        drop((control, reports));
        match tokio::time::timeout(grace + STOP_EXTRA, supervisor.wait()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the end of a process tree could not be observed"),
            Err(_) => tracing::warn!(pid = self.pid, "some processes have not ended yet after SIGKILL"),
        }
    }

    async fn report(&mut self) -> io::Result<Report> {
        match self.reports.next_line().await? {
            Some(line) => Ok(serde_json::from_str(&line)?),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the supervisor ended unexpectedly")),
        }
    }
}
