//! Disk failures: full, removed, read-only, locked, or not a database.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Process, Rap, Setup, Tools, until};
use serde_json::json;

use crate::crashes::check_prompt;
use crate::support::{data, is_unavailable, prepared, setup, start};

/// A limit on file sizes simulates a full disk. Its signal is ignored, so that writes fail.
#[cfg(target_os = "linux")]
const WITH_FULL_DISKS: [&str; 3] = ["/bin/sh", "-c", "trap '' XFSZ; exec \"$0\" \"$@\""];

#[cfg(target_os = "linux")]
fn limit_files(rap: &Rap, bytes: &str) {
    let soft = format!("--fsize={bytes}:unlimited");
    assert!(
        Command::new("prlimit")
            .args(["--pid", &rap.process().id().to_string(), &soft])
            .status()
            .unwrap()
            .success()
    );
}

/// Proves: LC-23, LC-37, TR-13
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn with_a_full_disk_nothing_is_accepted_or_lost_and_the_runtime_recovers() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).launched_by(&WITH_FULL_DISKS));
    api.create("idle", "say hello").await;
    api.until_status("idle", "idle").await;
    api.create("waits", "call work {}").await;
    let call = tools.invocation().await;
    api.until_acknowledged(&call).await;
    tools.answer_always(INVOKE, Reply::Hang);
    api.create("sends", "call work {}").await;
    let sending = tools.invocation().await;
    api.create("asks", "say hello").await;
    api.until_status("asks", "idle").await;
    assert_eq!(api.say_on_busy("asks", "sleep 0.3\nsay at last", "join").await.status, 202);
    // The first model request of a session writes to the database before it is sent.
    api.create("fresh", "say fresh").await;
    limit_files(&rap, "0");
    tools.release();
    for number in 0..5 {
        for (to, body) in [
            ("/v1/threads", json!({"id": format!("new{number}"), "message": "say hello"})),
            ("/v1/threads/idle/messages", json!({"text": format!("say refused {number}")})),
            (
                "/v1/threads/waits/messages",
                json!({"text": format!("say refused {number}"), "on_busy": "enqueue"}),
            ),
            ("/v1/threads/waits/close", json!({})),
            (call.url(), call.result("refused")),
        ] {
            let reply = api.try_post(to, &body).await.unwrap();
            assert!(is_unavailable(&reply), "{to}: {reply:?}");
        }
        // Reading still works.
        assert_eq!(api.get("/readyz").await.status, 200);
        assert_eq!(api.texts("idle").await, ["say hello", "hello"]);
        assert_eq!(api.thread("waits").await["waiting_on"][0]["call_id"], call.name());
    }
    rap.until_logged("accepted invocations could not be recorded").await;
    rap.until_logged("the store is unavailable; retrying an input of the runtime").await;
    assert_eq!(api.thread("asks").await["status"], "running");
    limit_files(&rap, "unlimited");
    until("there is room", || async { api.say_on_busy("idle", "say again", "join").await.status == 202 })
        .await;
    assert_eq!(call.post(&call.result("done")).await.status, 200);
    api.until_acknowledged(&sending).await;
    api.until_said("asks", "at last").await;
    api.until_said("fresh", "fresh").await;
    api.until_said("idle", "again").await;
    api.until_said("waits", "work: done").await;
    // The acknowledgement was kept in memory, so the invocation is not sent again.
    assert_eq!(tools.pending(INVOKE), 0);
    let check = || async {
        assert_eq!(api.texts("idle").await, ["say hello", "hello", "say again", "again"]);
        assert_eq!(api.texts("waits").await, ["call work {}", "done", "work: done"]);
        assert_eq!(api.texts("asks").await, ["say hello", "hello", "sleep 0.3\nsay at last", "at last"]);
        assert_eq!(api.texts("fresh").await, ["say fresh", "fresh"]);
        let threads = api.get("/v1/threads").await.body["threads"].as_array().unwrap().len();
        assert_eq!(threads, 5);
    };
    check().await;
    rap.restart();
    check().await;
}

/// The disk fills up under load, at an arbitrary write.
///
/// Proves: LC-23, LC-38
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_up_repeatedly_leaves_no_partial_state() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).launched_by(&WITH_FULL_DISKS));
    api.create("t", "say hello").await;
    api.until_status("t", "idle").await;
    let log = data(&rap).join("rap.db-wal");
    let (mut accepted, mut refused) = (Vec::new(), 0);
    for number in 0..60 {
        if number % 6 == 0 {
            // Some of the next writes still fit, and one of them partially.
            let size = fs::metadata(&log).map_or(0, |file| file.len());
            limit_files(&rap, &(size + 1000 * (number + 5)).to_string());
        }
        let text = format!("say {number} {}", "x".repeat(2000));
        let reply = api.say_on_busy("t", &text, "enqueue").await;
        match reply.status {
            202 => accepted.push(text),
            _ => {
                assert!(is_unavailable(&reply), "{reply:?}");
                refused += 1;
                limit_files(&rap, "unlimited");
            }
        }
    }
    limit_files(&rap, "unlimited");
    assert!(refused >= 3 && accepted.len() >= 20, "{refused} refused, {} accepted", accepted.len());
    for crash in [false, true] {
        if crash {
            rap.restart();
        }
        until("all of it is done", || async {
            let now = api.thread("t").await;
            now["status"] == "idle" && now["held"] == 0
        })
        .await;
        let history = api.whole_history("t").await;
        check_prompt("t", &history);
        let said = history.iter().filter(|entry| entry["kind"] == "user").map(|entry| &entry["text"]);
        assert_eq!(said.skip(1).collect::<Vec<_>>(), accepted.iter().collect::<Vec<_>>());
    }
    assert!(rap.process_mut().ended().is_none());
}

/// Proves: LC-20, LC-23
#[tokio::test(flavor = "multi_thread")]
async fn after_the_database_is_removed_nothing_is_acknowledged() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "say hello").await;
    api.until_status("t", "idle").await;
    fs::remove_dir_all(data(&rap)).unwrap();
    for _ in 0..5 {
        assert!(is_unavailable(&api.say_on_busy("t", "say more", "join").await));
        assert!(is_unavailable(&api.post("/v1/threads", &json!({"message": "say hello"})).await));
    }
    rap.until_logged("the database file was removed or replaced while it was open").await;
    assert!(!data(&rap).exists());
    assert!(rap.process_mut().ended().is_none());
    rap.process().signal("TERM");
    assert_eq!(rap.process_mut().wait().code(), Some(0), "{}", rap.log());
    // It does not start with an empty database where there was one.
    let refused = Process::refused(rap.serve_command());
    assert!(refused.contains("data/rap.db"), "{refused}");
}

/// Drops the capability to write to read-only directories, which root has.
fn without_privileges(setup: Setup) -> Setup {
    let is_root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
    if is_root { setup.launched_by(&["setpriv", "--bounding-set=-all"]) } else { setup }
}

/// Proves: LC-20
#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_database_is_refused_at_the_start() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(without_privileges(setup(&tools)));
    api.create("t", "say hello").await;
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let file = data(&rap).join("rap.db");
    mode(&data(&rap), 0o555);
    mode(&file, 0o444);
    // Files that are open stay writable.
    assert_eq!(api.say_on_busy("t", "say more", "enqueue").await.status, 202);
    api.until_said("t", "more").await;
    rap.process().signal("TERM");
    assert_eq!(rap.process_mut().wait().code(), Some(0), "{}", rap.log());
    for _ in 0..2 {
        let refused = Process::refused(rap.serve_command());
        assert!(refused.contains("data/rap.db") && refused.contains("the file is read-only"), "{refused}");
    }
    // All files exist, so a read-only directory does not matter.
    mode(&file, 0o644);
    rap.start_again();
    assert_eq!(api.say_on_busy("t", "say once more", "enqueue").await.status, 202);
    api.until_said("t", "once more").await;
    rap.kill();
    mode(&data(&rap), 0o755);
    rap.start_again();
    assert_eq!(
        api.texts("t").await,
        ["say hello", "hello", "say more", "more", "say once more", "once more"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_process_on_the_same_database_is_refused() {
    let tools = Tools::start().await;
    let (rap, api) = start(setup(&tools));
    api.create("t", "say hello").await;
    let refused = Process::refused(rap.serve_command_on("127.0.0.1:0"));
    assert!(refused.contains("rap.db.lock is locked: another process"), "{refused}");
    assert_eq!(api.say_on_busy("t", "say more", "enqueue").await.status, 202);
    api.until_said("t", "more").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_database_is_refused_with_its_name_and_the_reason() {
    let tools = Tools::start().await;
    let rap = prepared(setup(&tools));
    let file = data(&rap).join("rap.db");
    let key = data(&rap).join("rap.db.key");
    fs::write(&key, "0".repeat(64)).unwrap();
    fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    fs::write(&file, "no database").unwrap();
    let refused = Process::refused(rap.serve_command());
    assert!(refused.contains("rap.db") && refused.contains("not a database"), "{refused}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "no database");
    fs::remove_file(&file).unwrap();
    rusqlite::Connection::open(&file).unwrap().pragma_update(None, "user_version", 999).unwrap();
    let refused = Process::refused(rap.serve_command());
    assert!(refused.contains("rap.db") && refused.contains("version 999"), "{refused}");
}
