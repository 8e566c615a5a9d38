//! Shows that `attack` can fail: a server that accepts everything is noticed by each of these attempts.

use std::collections::BTreeSet;
use std::process::Command;

/// Attempts that succeed against a proxy that hides where requests come from, turns refusals into 200, keeps everything
/// in memory, logs it, and does not stop. All others depend on what the real server behind it does.
const NOTICED: [&str; 14] = [
    "forged callback token",
    "token of another call",
    "event after the end",
    "bulk requests with one URL",
    "hostile callback",
    "request without permission",
    "invalid path",
    "hostile id",
    "web page of another site",
    "foreign Host",
    "request of a server",
    "own listener through a forwarded port",
    "stop while the attacks go on",
    "secrets in logs",
];

#[test]
fn a_server_that_accepts_everything_is_noticed() {
    let filters = NOTICED.iter().take(NOTICED.len() - 2);
    let output = Command::new(env!("CARGO_BIN_EXE_attack")).arg("--weakened").args(filters).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let noticed: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("SUCCESS of ")?.split_once(": "))
        .map(|(name, _)| name)
        .collect();
    let missed: Vec<_> = NOTICED.iter().filter(|name| !noticed.contains(*name)).collect();
    assert!(missed.is_empty(), "{missed:?} did not notice it:\n{text}");
}
