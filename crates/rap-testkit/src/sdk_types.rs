//! Checks requests to models against the types of the official SDKs, which are installed from PyPI the first time.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::python;

const PACKAGES: [&str; 2] = ["openai==2.54.0", "anthropic==2.8.0"];
const SCRIPT: &str = include_str!("sdk_types.py");

/// Fails unless every request is valid. Each has the name of an API, which is the name of its provider, and a body. The SDKs
/// are kept in the directory `cache`.
pub async fn check(cache: &'static str, requests: Vec<(&'static str, Value)>) {
    let checked = tokio::task::spawn_blocking(move || check_blocking(cache, &requests));
    checked.await.unwrap();
}

fn check_blocking(cache: &str, requests: &[(&str, Value)]) {
    let line = |(api, body): &(&str, Value)| format!("{}\n", json!({"api": api, "body": body}));
    let lines: String = requests.iter().map(line).collect();
    let home = python::environment(cache, "model-sdks-1", &PACKAGES);
    let mut python = Command::new(home.join("bin/python"));
    let python = python.args(["-c", SCRIPT]);
    let python = python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = python.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()).ok());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.trim(), requests.len().to_string());
}
