//! System calls that fail: the n-th write to the disk or sync of it returns an error, again and again. Afterwards
//! everything that was acknowledged is there, and everything else is there as a whole or not at all.

use std::process::Command;
use std::time::Duration;

use rap_testkit::{Process, Rap, Setup, until};
use serde_json::json;

use crate::support::{Api, data, prepared};

/// The program that makes system calls fail. Without it, nothing is checked.
const TRACER: &str = "/usr/bin/strace";
/// File in which the tracer lists the calls, with `INJECTED` behind those that it made fail.
const TRACE: &str = "trace";
/// Number of threads that are created.
const THREADS: usize = 30;

/// Returns the command that serves a runtime whose system calls fail. With `-D` the process is the runtime itself.
fn failing(rap: &Rap, call: &str, error: &str) -> Command {
    let serve = rap.serve_command();
    let mut command = Command::new(TRACER);
    command.args(["-D", "-f", "-qq", "--seccomp-bpf", "-o", TRACE]);
    command.args(["-e", &format!("trace={call}"), "-e", &format!("inject={call}:error={error}:when=20+11")]);
    command.arg(serve.get_program()).args(serve.get_args()).current_dir(rap.directory()).env_clear();
    command.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

async fn survive(call: &str, error: &str) {
    if !std::path::Path::new(TRACER).exists() {
        eprintln!("not checked: there is no {TRACER}");
        return;
    }
    let mut rap = prepared(Setup::new().store("url = \"sqlite:data/rap.db\""));
    // The tables are made without errors.
    rap.start_again();
    rap.stop();
    let mut process = Process::start(failing(&rap, call, error));
    let api = Api::of(&rap);
    let (mut acknowledged, mut failed) = (Vec::new(), 0);
    for number in 0..THREADS {
        let body = json!({"id": format!("t{number}"), "message": "say hello"});
        match api.try_post("/v1/threads", &body).await {
            Some(answer) if answer.status == 201 => acknowledged.push(format!("t{number}")),
            answer => {
                let status = answer.map(|answer| answer.status);
                assert!(matches!(status, None | Some(500..)), "{call} {error}: {status:?}");
                failed += 1;
                // The store is opened again after a while.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    assert!(!acknowledged.is_empty(), "{call} {error}: nothing was accepted, {failed} failed");
    process.kill();
    drop(process);
    let trace = rap.directory().join(TRACE);
    until("the list of failed calls", async || {
        std::fs::read_to_string(&trace).is_ok_and(|calls| calls.contains("INJECTED"))
    })
    .await;
    rap.start_again();
    for number in 0..THREADS {
        let thread = format!("t{number}");
        let row = api.get(&format!("/v1/threads/{thread}")).await;
        if row.status == 404 {
            assert!(!acknowledged.contains(&thread), "{call} {error}: {thread} was acknowledged and is lost");
            continue;
        }
        until("it is idle", async || {
            let row = api.try_read(&format!("/v1/threads/{thread}")).await;
            row.is_some_and(|row| row["status"] == "idle")
        })
        .await;
        let history = api.whole_history(&thread).await;
        let kinds: Vec<_> = history.iter().filter_map(|entry| entry["kind"].as_str()).collect();
        assert_eq!(kinds, ["user", "assistant"], "{call} {error}: {thread}");
    }
    let file = data(&rap).join("rap.db");
    let (code, report) = rap.command(&["doctor", file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{call} {error}: {report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_fail_lose_nothing_that_was_acknowledged() {
    survive("pwrite64", "EIO").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_to_a_full_disk_lose_nothing_that_was_acknowledged() {
    survive("pwrite64", "ENOSPC").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn syncs_that_fail_lose_nothing_that_was_acknowledged() {
    survive("fsync,fdatasync", "EIO").await;
}
