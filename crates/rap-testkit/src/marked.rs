//! Processes that a test recognises by a mark in their arguments.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::until;

/// A number of seconds for `sleep` that no other process uses.
pub fn mark() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("9{:07}{:03}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Process ids of the running processes with this mark in their arguments.
pub fn with_mark(mark: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| has_mark(*pid, mark)).collect()
}

fn has_mark(pid: u32, mark: &str) -> bool {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // The arguments of a shell contain the mark as a part of its script.
    arguments.split(|byte| *byte == 0).any(|argument| argument == mark.as_bytes())
}

/// Waits until this many processes have the mark.
pub async fn until_marked(mark: &str, count: usize) -> Vec<u32> {
    until("processes with the mark", async || Some(with_mark(mark)).filter(|pids| pids.len() == count)).await
}
