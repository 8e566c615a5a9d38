//! Damaged rows in a real database: the thread is quarantined, all others continue, and `rap doctor` explains the
//! damage.

use std::path::Path;

use rap_testkit::{Setup, programs};
use rusqlite::Connection;
use serde_json::{Value, json};

use crate::support::start;

/// Runs `rap doctor` in a directory. Returns its exit code and its output.
fn doctor(directory: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = programs::rap(&[&["doctor"], arguments].concat()).current_dir(directory).output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), out, err)
}

fn execute(file: &Path, sql: &str) {
    assert_eq!(Connection::open(file).unwrap().execute(sql, []).unwrap(), 1, "{sql}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_threads_are_set_aside_and_explained_and_others_go_on() {
    let (mut rap, api) = start(Setup::new().store("url = \"sqlite:data/rap.db\""));
    for name in ["good", "head", "entry"] {
        api.create(name, "say hello").await;
        api.until_status(name, "idle").await;
    }
    let file = rap.directory().join("data/rap.db");
    let (code, out, err) = doctor(rap.directory(), &[]);
    assert_eq!((code, err.as_str()), (Some(0), ""), "a runtime uses the database: {out}");
    rap.stop();
    execute(&file, "UPDATE threads SET head = '{}' WHERE id = 'head'");
    execute(&file, "DELETE FROM entries WHERE key = (SELECT (no << 32) + 1 FROM threads WHERE id = 'entry')");
    let (code, out, err) = doctor(rap.directory(), &["data/rap.db"]);
    assert_eq!((code, err.as_str()), (Some(1), "rap: the database has 2 problems\n"), "{out}");
    assert!(out.contains("thread head: its stored state cannot be read: missing field"), "{out}");
    assert!(out.contains("thread entry: entry 1 of its history is missing"), "{out}");
    rap.start_again();
    api.create("new", "say hello").await;
    api.until_status("new", "idle").await;
    api.say("good", "say more").await;
    api.until_said("good", "more").await;
    let head = api.get("/v1/threads/head").await.body;
    assert_eq!(head["status"], "failed");
    assert!(head["why"].as_str().unwrap().contains("its stored state cannot be read"), "{head}");
    let refused = api.post("/v1/threads/head/messages", &json!({"text": "hello"})).await;
    assert_eq!((refused.status, refused.body["error"]["code"].as_str()), (500, Some("illegible")));
    let history = api.get("/v1/threads/entry/history").await.body["entries"].clone();
    assert_eq!((&history[0]["seq"], &history[0]["kind"]), (&json!(1), &json!("notice")), "{history}");
    assert!(history[0]["text"].as_str().unwrap().contains("entry 1 of its history is missing"), "{history}");
    let failed = api.get("/v1/threads?status=failed").await.body;
    let failed: Vec<&str> =
        failed["threads"].as_array().unwrap().iter().filter_map(|row| row["id"].as_str()).collect();
    assert_eq!(failed, ["head"]);
    let (code, out, _) = doctor(rap.directory(), &["--json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &report["healthy"]), (Some(1), &Value::Bool(false)), "{out}");
    assert!(report["findings"].as_array().unwrap().iter().all(|finding| finding["advice"].is_string()));
}

#[test]
fn a_doctor_explains_files_that_are_no_database() {
    let directory = tempfile::tempdir().unwrap();
    let (code, _, err) = doctor(directory.path(), &["missing.db"]);
    assert_eq!((code, err.as_str()), (Some(1), "rap: there is no database missing.db\n"));
    std::fs::write(directory.path().join("text.db"), "this is no database, but a text".repeat(100)).unwrap();
    let (code, _, err) = doctor(directory.path(), &["text.db"]);
    assert!(code == Some(1) && err.contains("cannot read the database text.db"), "{err}");
    Connection::open(directory.path().join("other.db")).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
    let (code, _, err) = doctor(directory.path(), &["other.db"]);
    assert!(code == Some(1) && err.contains("other.db is not a database of rap"), "{err}");
}
