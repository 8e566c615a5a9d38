//! `rap serve` as a process: it listens when it is here, and is killed when this is dropped.

#![allow(dead_code, reason = "each test program uses another part of this")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

/// Ports below those that the system gives away, so that one that was given up for a moment is free again.
static NEXT_PORT: AtomicU16 = AtomicU16::new(0);

/// A port that nobody else has, now or while its server is started again.
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
    /// Starts it and waits until it listens.
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

    /// What one says that does not start.
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

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has logged so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// kill -9, and waits until it is gone.
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
