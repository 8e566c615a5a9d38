//! Backups of a running runtime, and what continues after they are restored.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use rap_testkit::{Rap, Tools, programs};

use crate::support::{data, event, prepared, setup, start};

fn backup(rap: &Rap, to: &str) -> (bool, String) {
    let mut command = programs::rap(&["backup", to, "--config", "rap.toml"]);
    let output = command.current_dir(rap.directory()).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.success(), text.concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn open_calls_and_subscriptions_continue_after_a_backup_is_restored() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "call watch {}\ncall work {}").await;
    let (first, second) = (tools.invocation().await, tools.invocation().await);
    let (watch, work) =
        if first.request.body["operation"] == "watch" { (first, second) } else { (second, first) };
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    api.until_acknowledged(&work).await;
    let (written, text) = backup(&rap, "monday.db");
    assert!(written, "{text}");
    assert!(text.contains("monday.db.key"), "{text}");
    for file in ["monday.db", "monday.db.key"] {
        let mode = fs::metadata(rap.directory().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    assert!(!rap.directory().join("monday.db.partial").exists());
    // An existing file is not replaced.
    let (written, text) = backup(&rap, "monday.db");
    assert!(!written && text.contains("monday.db exists; name another file"), "{text}");
    // A thread that is created after the backup is lost with the disk.
    api.create("later", "say lost").await;
    rap.kill();
    fs::remove_dir_all(data(&rap)).unwrap();
    fs::create_dir(data(&rap)).unwrap();
    for (from, to) in [("monday.db", "rap.db"), ("monday.db.key", "rap.db.key")] {
        fs::copy(rap.directory().join(from), data(&rap).join(to)).unwrap();
    }
    rap.start_again();
    assert_eq!(api.get("/v1/threads/later").await.status, 404);
    assert_eq!(work.post(&work.result("done")).await.status, 200);
    api.until_said("t", "done").await;
    api.until_status("t", "idle").await;
    assert_eq!(watch.post(&event(&watch, "event 1")).await.status, 200);
    api.until_said("t", "watch: event 1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_needs_a_database_and_its_key() {
    let tools = Tools::start().await;
    let rap = prepared(setup(&tools));
    let (written, text) = backup(&rap, "copy.db");
    assert!(!written && text.contains("there is no database at"), "{text}");
    fs::write(data(&rap).join("rap.db"), "").unwrap();
    let (written, text) = backup(&rap, "copy.db");
    assert!(!written && text.contains("no backup is complete without it"), "{text}");
    assert!(!rap.directory().join("copy.db").exists());
    let postgres = format!("[store]\nurl = \"postgres://u@127.0.0.1/db\"\nkey = \"{}\"\n", "7e".repeat(32));
    fs::write(rap.directory().join("rap.toml"), postgres).unwrap();
    let (written, text) = backup(&rap, "copy.db");
    assert!(!written && text.contains("pg_dump"), "{text}");
}
