//! The supervisor of a process tree: starts the program, collects orphans, and ends all descendants when its owner
//! closes the control connection, which is its stdin. It runs in a process of its own.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus};

use super::{Ended, Program, Report, ResourceLimits, SPEC_BYTES, confinement};

/// First and longest pause between two rounds of signals.
const ROUND: Duration = Duration::from_millis(10);
const LONGEST_ROUND: Duration = Duration::from_secs(1);

/// Runs the supervisor. Returns its exit code when no descendant is left.
pub(super) fn run() -> i32 {
    let control = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
    let Ok(mut control) = control else { return 1 };
    let started = read_program(&control).and_then(|program| {
        let root = start(&program)?;
        Ok((root, program.grace))
    });
    let (root, grace) = match started {
        Ok(started) => started,
        Err(error) => {
            report(&mut control, &Report::Failed { why: error.to_string() });
            return 1;
        }
    };
    report(&mut control, &Report::Started { pid: root.as_raw_nonzero().get().unsigned_abs() });
    if let Ok(mut owner) = control.try_clone() {
        thread::spawn(move || {
            // The owner sends nothing more, so this ends when the owner closes the connection. An error counts as
            // closed.
            io::copy(&mut owner, &mut io::sink()).ok();
            end_all(root, grace);
        });
    }
    collect(root, &mut control)
}

fn read_program(control: &UnixStream) -> io::Result<Program> {
    let mut line = String::new();
    BufReader::new(control.take(SPEC_BYTES)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Sends a report. If the owner is gone, nobody needs it.
fn report(control: &mut UnixStream, report: &Report) {
    if let Ok(mut line) = serde_json::to_vec(report) {
        line.push(b'\n');
        control.write_all(&line).ok();
    }
}

fn start(program: &Program) -> io::Result<Pid> {
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    apply_limits(&program.limits)?;
    let mut command = Command::new(&program.program);
    command
        .args(&program.arguments)
        .env_clear()
        .envs(program.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).process_group(0);
    if let Some(directory) = &program.directory {
        command.current_dir(directory);
    }
    if program.merged {
        command.stderr(Stdio::from(io::stdout().as_fd().try_clone_to_owned()?));
    }
    let writable = program.writable.clone();
    // A thread of its own, because the confinement applies to the calling thread and what it starts.
    let spawned = thread::spawn(move || {
        if let Some(paths) = writable {
            confinement::confine(&paths)?;
        }
        command.spawn()
    });
    let child = spawned.join().map_err(|_| io::Error::other("the program could not be confined"))??;
    // Only the descendants hold the output open.
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| io::Error::other("the program has no process id"))
}

fn apply_limits(limits: &ResourceLimits) -> io::Result<()> {
    let cpu = limits.cpu.map(|cpu| cpu.as_secs().max(1));
    let all = [
        (Resource::As, limits.memory),
        (Resource::Fsize, limits.file_size),
        (Resource::Nofile, limits.open_files),
        (Resource::Cpu, cpu),
        (Resource::Core, Some(0)),
    ];
    for (resource, limit) in all {
        let Some(limit) = limit else { continue };
        let allowed = rustix::process::getrlimit(resource).maximum;
        let limit = allowed.map_or(limit, |allowed| limit.min(allowed));
        rustix::process::setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    }
    Ok(())
}

/// Collects descendants until none is left, and reports the end of the program.
fn collect(root: Pid, control: &mut UnixStream) -> i32 {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == root => report(control, &Report::Ended(ended(status))),
            Ok(_) | Err(Errno::INTR) => {}
            // No child is left.
            Err(_) => return 0,
        }
    }
}

fn ended(status: WaitStatus) -> Ended {
    match status.terminating_signal() {
        Some(signal) => Ended::Killed(signal),
        None => Ended::Exited(status.exit_status().unwrap_or(-1)),
    }
}

/// Ends all descendants. It never returns: the process ends when none is left. Processes that appear between two rounds
/// are found by the next one.
fn end_all(root: Pid, grace: Duration) {
    signal_all(root, Signal::TERM);
    // A stopped process handles SIGTERM when it continues.
    signal_all(root, Signal::CONT);
    let deadline = Instant::now() + grace;
    while Instant::now() < deadline {
        thread::sleep(ROUND.min(grace));
    }
    let mut pause = ROUND;
    loop {
        signal_all(root, Signal::KILL);
        thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_ROUND);
    }
}

fn signal_all(root: Pid, signal: Signal) {
    // A process that has ended meanwhile is not a failure. Where descendants are found, the group is not used: its number
    // may belong to others once the program has ended.
    if !cfg!(target_os = "linux") {
        rustix::process::kill_process_group(root, signal).ok();
    }
    for pid in descendants() {
        rustix::process::kill_process(pid, signal).ok();
    }
}

/// Returns all descendants of this process. There are none on a system without `/proc`.
fn descendants() -> Vec<Pid> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let parents: Vec<(i32, i32)> = pids.filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let (mut family, mut found) = (vec![own], Vec::new());
    while let Some(parent) = family.pop() {
        let children = parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid);
        let before = found.len();
        found.extend(children);
        family.extend(&found[before..]);
    }
    found.into_iter().filter_map(Pid::from_raw).collect()
}

/// Returns the parent of a process: the second field after its name, which is in parentheses and may contain anything.
fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}
