//! A server process that is killed and frozen, and started again whenever it has ended.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::clock::{self, Clock};

/// Time in which a server has to end after SIGTERM.
const STOP_WITHIN: Duration = Duration::from_secs(20);

pub(crate) struct Server {
    pub(crate) name: String,
    command: Box<dyn Fn() -> Command + Send + Sync>,
    log: PathBuf,
    /// `None` if it uses the machine's.
    pub(crate) clock: Option<Clock>,
    child: Mutex<Option<Child>>,
}

impl Server {
    pub(crate) fn start(
        name: &str,
        directory: &Path,
        command: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Server {
        let log = directory.join(format!("{name}.log"));
        let clock =
            clock::library().map(|library| Clock::new(&library, directory.join(format!("{name}.clock"))));
        let (name, command, child) = (name.to_owned(), Box::new(command), Mutex::default());
        let server = Server { name, command, log, clock, child };
        server.start_if_ended();
        server
    }

    fn log_file(&self) -> File {
        OpenOptions::new().create(true).append(true).open(&self.log).unwrap()
    }

    /// Starts the process if it has ended, or was never started.
    pub(crate) fn start_if_ended(&self) {
        let mut child = self.child.lock().unwrap();
        if child.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some()) {
            let mut command = (self.command)();
            if let Some(clock) = &self.clock {
                clock.load_into(&mut command);
            }
            if let Some(ended) = child.as_ref() {
                Clock::clean_up(ended.id());
            }
            command.stdin(Stdio::null()).stdout(self.log_file()).stderr(self.log_file());
            *child = Some(command.spawn().unwrap());
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = self.child.lock().unwrap().as_ref() {
            let id = Pid::from_child(child);
            // It may have ended by itself.
            kill_process(id, signal).ok();
        }
    }

    pub(crate) fn kill(&self) {
        if let Some(child) = self.child.lock().unwrap().as_mut() {
            child.kill().ok();
            child.wait().unwrap();
        }
    }

    /// Freezes the process for a time.
    pub(crate) async fn freeze(&self, time: Duration) {
        self.signal(Signal::STOP);
        tokio::time::sleep(time).await;
        self.signal(Signal::CONT);
    }

    /// Ends the process with SIGTERM. Returns a violation if it does not end in time.
    pub(crate) async fn stop(&self) -> Option<String> {
        let id = self.child.lock().unwrap().as_ref().map(Child::id)?;
        self.signal(Signal::TERM);
        if rap_testkit::poll(STOP_WITHIN, async || !self.is_running(id)).await.is_some() {
            return None;
        }
        self.kill();
        Some(format!("{} did not stop within {STOP_WITHIN:?}", self.name))
    }

    /// Returns whether the process with this id runs. Once it has ended, [`Server::start_if_ended`] may start another one at
    /// any time.
    fn is_running(&self, id: u32) -> bool {
        let mut child = self.child.lock().unwrap();
        child.as_mut().is_some_and(|child| child.id() == id && child.try_wait().unwrap().is_none())
    }

    /// Returns the panics in the log.
    pub(crate) fn panics(&self) -> Vec<String> {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines = log.lines().filter(|line| line.contains("panicked at"));
        lines.map(|line| format!("{} panicked: {line}", self.name)).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        if let Some(child) = self.child.lock().unwrap().as_ref() {
            Clock::clean_up(child.id());
        }
    }
}
