//! Process trees, and directories of threads.

use std::path::Path;
use std::time::Duration;

use rap_testkit::marked::{mark, until_marked, with_mark};
use rap_testkit::{Process, programs};
use rap_tool::process::{self, Confinement, Ended, ProcessTree, Program, ResourceLimits};
use rap_tool::{Callback, TestRuntime, ToolServer, prelude::*};
use serde_json::json;
use tokio::io::AsyncReadExt;

use crate::support::{Caller, Runtime};

fn shell(script: &str) -> Program {
    process::supervise_with(programs::example_path("commands"));
    Program::new("/bin/sh")
        .args(["-c", script])
        .envs([("PATH", "/usr/bin:/bin")])
        .grace(Duration::from_millis(300))
}

async fn output(tree: &mut ProcessTree) -> String {
    let mut text = String::new();
    tree.take_stdout().unwrap().read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn a_program_has_output_an_exit_code_an_empty_stdin_and_only_its_own_environment() {
    let mut tree = shell("cat; echo out; echo err >&2; env; exit 3").merge_stderr().spawn().await.unwrap();
    let text = output(&mut tree).await;
    assert!(text.starts_with("out\nerr\n") && text.contains("PATH=/usr/bin:/bin"), "{text}");
    assert!(!text.contains("CARGO"), "{text}");
    assert_eq!(tree.wait().await.unwrap(), Ended::Exited(3));
    assert_eq!(tree.wait().await.unwrap(), Ended::Exited(3));
    tree.wait_for_all().await.unwrap();
    let mut killed = shell("kill -9 $$").spawn().await.unwrap();
    assert_eq!(killed.wait().await.unwrap(), Ended::Killed(9));
    let missing = Program::new("/no/such/program").spawn().await.unwrap_err().to_string();
    assert!(missing.contains("No such file"), "{missing}");
}

/// Proves: CN-12
#[tokio::test]
async fn dropping_a_tree_ends_every_descendant_however_it_was_started() {
    let mark = mark();
    // In the background, in a session of its own, as an orphan, without its environment, and as a child of an orphan.
    let script = format!(
        "sleep {mark} & setsid sleep {mark} & (setsid sleep {mark} &) ; env -i setsid sleep {mark} & \
         (setsid sh -c 'trap \"\" TERM; sleep {mark} & wait' &) ; exec sleep {mark}"
    );
    let tree = shell(&script).spawn().await.unwrap();
    until_marked(&mark, 6).await;
    drop(tree);
    until_marked(&mark, 0).await;
}

/// Proves: CN-12
#[tokio::test]
async fn a_process_that_ignores_sigterm_is_killed_when_the_tree_is_stopped() {
    let mark = mark();
    let tree = shell(&format!("trap '' TERM INT HUP; sleep {mark}; sleep {mark}")).spawn().await.unwrap();
    until_marked(&mark, 1).await;
    tree.stop().await;
    assert_eq!(with_mark(&mark), Vec::<u32>::new());
}

#[tokio::test]
async fn a_program_gets_time_to_end_by_itself() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ended");
    let script =
        format!("trap 'echo done > {}; exit' TERM; echo ready; while :; do sleep 0.05; done", file.display());
    let mut tree = shell(&script).grace(Duration::from_secs(60)).spawn().await.unwrap();
    let mut ready = [0; 6];
    tree.take_stdout().unwrap().read_exact(&mut ready).await.unwrap();
    tree.stop().await;
    assert_eq!(std::fs::read_to_string(file).unwrap(), "done\n");
}

#[tokio::test]
async fn the_end_of_a_program_is_known_while_a_background_process_holds_its_output() {
    let mark = mark();
    let mut tree = shell(&format!("echo started; sleep {mark} &")).spawn().await.unwrap();
    assert_eq!(tree.wait().await.unwrap(), Ended::Exited(0));
    assert_eq!(until_marked(&mark, 1).await.len(), 1);
    tree.stop().await;
    assert_eq!(with_mark(&mark), Vec::<u32>::new());
}

#[tokio::test]
async fn a_confined_tree_writes_only_where_it_may() {
    if process::confinement() == Confinement::None {
        eprintln!("this kernel has no Landlock: nothing is confined here");
        return;
    }
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(other.path().join("file"), "text").unwrap();
    let script = format!(
        "cat {0}/file; echo x > {1}/mine && echo wrote; echo x > {0}/new || echo refused; \
         setsid rm {0}/file || echo kept",
        other.path().display(),
        own.path().display(),
    );
    let confined = shell(&script).writable([own.path(), Path::new("/dev")]).merge_stderr();
    let mut tree = confined.spawn().await.unwrap();
    let text = output(&mut tree).await;
    for expected in ["text", "wrote\n", "refused\n", "kept\n"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(own.path().join("mine").exists() && !other.path().join("new").exists());
}

#[tokio::test]
async fn resource_limits_hold_for_every_process_of_a_tree() {
    let directory = tempfile::tempdir().unwrap();
    let limits = ResourceLimits { file_size: Some(4096), open_files: Some(32), ..ResourceLimits::default() };
    let script = "ulimit -n; setsid sh -c 'head -c 10000 /dev/zero > big'; wc -c < big";
    let mut tree = shell(script).directory(directory.path()).limits(limits).spawn().await.unwrap();
    assert_eq!(output(&mut tree).await, "32\n4096\n");
}

/// Proves: TC-11, CN-12
#[tokio::test]
async fn closing_a_thread_ends_its_processes_and_removes_its_directory_also_after_a_crash() {
    let data = tempfile::tempdir().unwrap();
    let mut server = Process::start(programs::example("commands", data.path(), &[]));
    let mut runtime = Runtime::start().await;
    let caller = Caller::new(&server.url);
    let mark = mark();
    let script = format!("touch file; setsid sleep {mark} & chmod 500 . ; wait");
    caller.accepted(&runtime.invocation("run", "t", "c1", json!({"script": script}))).await;
    until_marked(&mark, 1).await;
    let threads = data.path().join("threads");
    // The directory, and the file that names its thread.
    assert_eq!(std::fs::read_dir(&threads).unwrap().count(), 2);
    caller.close("t").await;
    until_marked(&mark, 0).await;
    rap_testkit::until("the directory to be removed", async || {
        std::fs::read_dir(&threads).unwrap().count() == 0
    })
    .await;

    // The owner of a tree is killed.
    let script = format!("setsid sleep {mark} & sleep {mark}");
    caller.accepted(&runtime.invocation("run", "u", "c2", json!({"script": script}))).await;
    until_marked(&mark, 2).await;
    server.kill();
    until_marked(&mark, 0).await;
    assert!(runtime.pending().is_empty());
}

/// Writes into the directory of its thread.
#[derive(Deserialize, JsonSchema)]
struct Note {}

/// Proves: TC-11
#[tokio::test]
async fn each_thread_has_a_directory_of_its_own_until_it_is_closed() {
    let note = |_: Note, call: Call| async move {
        let directory = call.directory().await?;
        let notes = std::fs::read_dir(&directory)?.count();
        std::fs::write(directory.join(call.id().as_str()), "x")?;
        Ok(format!("{notes} {}", directory.display()))
    };
    // The result contains a path of this machine, which scrubbing would remove.
    let server = ToolServer::new("notes").offer(Tool::new("note", note).without_scrubbing());
    let mut runtime = TestRuntime::start(server).await.unwrap();
    let first = runtime.call("note", json!({})).await.text().to_owned();
    let directory = first.strip_prefix("0 ").unwrap().to_owned();
    assert_eq!(runtime.call("note", json!({})).await.text(), format!("1 {directory}"));
    let other = runtime.invoke_in("../other", "note", json!({})).await;
    let other = runtime.result_of(&other).await.text().strip_prefix("0 ").unwrap().to_owned();
    assert_ne!(other, directory);
    assert_eq!(Path::new(&other).parent(), Path::new(&directory).parent());
    runtime.restart().await.unwrap();
    assert_eq!(runtime.call("note", json!({})).await.text(), format!("2 {directory}"));
    runtime.close().await;
    rap_testkit::until("the directory to be removed", async || !Path::new(&directory).exists()).await;
    assert!(Path::new(&other).exists());
}

/// Subscribes, or answers at once.
#[derive(Deserialize, JsonSchema)]
struct Either {
    /// True to subscribe.
    subscribe: bool,
}

#[tokio::test]
async fn a_tool_can_answer_instead_of_subscribing() {
    let either = |args: Either, subscribe: Subscribe| async move {
        match args.subscribe {
            true => subscribe.confirm("Subscribed.").await?.finish("done").await,
            false => subscribe.answer("answered").await,
        }
    };
    let tool = Tool::subscription("either", either).not_restartable();
    let mut runtime = TestRuntime::start(ToolServer::new("either").offer(tool)).await.unwrap();
    let answer = runtime.call("either", json!({"subscribe": false})).await;
    assert_eq!((answer.text(), answer.result.subscription), ("answered", false));
    let confirmed = runtime.call("either", json!({"subscribe": true})).await;
    assert!(confirmed.result.subscription);
    let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("expected an event") };
    assert!(event.is_final);
}
