//! A `rap serve` process. It listens when `start` returns, and is killed on drop.

#![allow(dead_code, reason = "each test program uses another part of this")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

/// Range of ports below the ephemeral ports, so that the system does not assign one while its server restarts.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

/// Returns a port that no other process of the tests uses, also while its server restarts.
pub fn free_port() -> u16 {
    let first = (std::process::id() % 400) as u16 * 25;
    loop {
        let port = 12_000 + (first + NEXT_PORT.fetch_add(1, Ordering::Relaxed)) % 18_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub struct Process {
    child: Child,
    address: String,
    log: Arc<Mutex<String>>,
}

impl Process {
    /// Starts the process and waits until it listens.
    pub fn start(mut command: Command) -> Process {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let log = Arc::new(Mutex::new(String::new()));
        let address = lines.by_ref().find_map(|line| {
            log.lock().unwrap().push_str(&format!("{line}\n"));
            let (_, rest) = line.split_once("listening on ")?;
            Some(rest.split_whitespace().next()?.to_owned())
        });
        let address = address.unwrap_or_else(|| {
            child.kill().ok();
            child.wait().ok();
            panic!("{command:?} did not start:\n{}", log.lock().unwrap())
        });
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            lines.for_each(|line| sink.lock().unwrap().push_str(&format!("{line}\n")));
        });
        Process { child, address, log }
    }

    /// Runs a process that has to fail at its start. Returns its log.
    pub fn refused(mut command: Command) -> String {
        let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
            said.push_str(&format!("{line}\n"));
            if line.contains("listening on") {
                child.kill().unwrap();
            }
        }
        assert_eq!(child.wait().unwrap().code(), Some(1), "{command:?}: {said}");
        said
    }

    /// Address that it listens on.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Log so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// Exit status; `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
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
    }
}
