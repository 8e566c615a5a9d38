//! A server process. It listens when `start` returns, and is killed on drop.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, iter};

use crate::until;

/// Beginnings of the address in the line of the log that says that a server listens.
const LISTENING: [&str; 2] = ["listening on ", "listening url="];

pub struct Process {
    pub url: String,
    child: Child,
    /// Closed when the test is gone, however it ends. The servers of the benchmarks end then.
    _stdin: ChildStdin,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts the process and waits until it writes to stderr that it listens.
    pub fn start(mut command: Command) -> Process {
        let mut child = spawn(&mut command);
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let log = Arc::new(Mutex::new(String::new()));
        let url = lines.by_ref().find_map(|line| {
            log.lock().unwrap().push_str(&format!("{line}\n"));
            url_in(&line)
        });
        let url = url.unwrap_or_else(|| {
            child.kill().ok();
            child.wait().ok();
            panic!("{command:?} did not start:\n{}", log.lock().unwrap())
        });
        Process::new(url, child, log, lines)
    }

    /// Starts a process that need not listen. Its URL is empty.
    pub fn starting(mut command: Command) -> Process {
        let mut child = spawn(&mut command);
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        Process::new(String::new(), child, Arc::default(), lines)
    }

    fn new(
        url: String,
        mut child: Child,
        log: Arc<Mutex<String>>,
        lines: impl Iterator<Item = String> + Send + 'static,
    ) -> Process {
        let sink = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            lines.for_each(|line| sink.lock().unwrap().push_str(&format!("{line}\n")));
        });
        Process { url, _stdin: child.stdin.take().unwrap(), child, log, reader: Some(reader) }
    }

    /// Runs a process that has to fail at its start, with exit code 1. Returns its log.
    pub fn refused(mut command: Command) -> String {
        let mut child = spawn(&mut command);
        let mut log = String::new();
        for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
            log.push_str(&format!("{line}\n"));
            if url_in(&line).is_some() {
                child.kill().unwrap();
            }
        }
        assert_eq!(child.wait().unwrap().code(), Some(1), "{command:?}: {log}");
        log
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until the log contains `text`.
    pub async fn until_logged(&self, text: &str) {
        until(&format!("{text:?} in the log"), async || self.log().contains(text)).await;
    }

    /// Kills it and returns its whole log.
    pub fn into_log(mut self) -> String {
        self.kill();
        self.reader.take().unwrap().join().unwrap();
        self.log()
    }

    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// CPU time that it has used.
    pub fn cpu_time(&self) -> Duration {
        let ticks: u64 =
            self.stat()[11..13].iter().map(|field| field.parse::<u64>().unwrap_or_default()).sum();
        Duration::from_millis(ticks * 10)
    }

    /// Returns false after it has ended, even if nobody has waited for its end.
    pub fn is_running(&self) -> bool {
        !matches!(self.stat()[0].as_str(), "" | "X" | "Z")
    }

    /// Its state and the following fields of `/proc/PID/stat`. All are empty if it is gone.
    fn stat(&self) -> Vec<String> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap_or_default();
        // The process name may contain anything, so fields are counted after it. 14 and 15 of the file are CPU time in
        // hundredths of a second.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
        let fields = fields.map(str::to_owned).chain(iter::repeat(String::new()));
        fields.take(50).collect()
    }

    /// Exit status; `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Stops it with SIGTERM and waits for its end.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.wait()
    }

    /// Kills it with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            self.child.kill().unwrap();
            self.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("log of {}:\n{}", self.url, self.log());
        }
    }
}

fn spawn(command: &mut Command) -> Child {
    let spawned = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    spawned.unwrap_or_else(|error| panic!("{command:?} could not be started: {error}"))
}

/// Returns the URL in a line that says that a server listens.
fn url_in(line: &str) -> Option<String> {
    let rest = LISTENING.iter().find_map(|before| Some(line.split_once(before)?.1))?;
    let address = rest.split_whitespace().next()?;
    Some(if address.contains("://") { address.to_owned() } else { format!("http://{address}") })
}
