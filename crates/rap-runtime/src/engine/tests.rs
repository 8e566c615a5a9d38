//! Upkeep, where something that is due can not be done.

use rap_agent::{Head, Phase, Status};
use rap_io::sqlite::open_sqlite;
use rap_protocol::{ThreadId, UrlPolicy};
use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::model::Model;
use crate::model::scripted::Scripted;
use crate::settings::{Agent, Limits};
use crate::store::NewThread;

const PATIENCE: Duration = Duration::from_secs(20);

fn start(dir: &TempDir) -> Arc<Engine> {
    let settings = Settings {
        public_url: "http://127.0.0.1:9".into(),
        database: dir.path().join("rap.db"),
        tokens: Vec::new(),
        agents: vec![Agent::default()],
        model: Model::Scripted(Scripted::obedient()),
        images: false,
        tool_servers: Vec::new(),
        url_policy: UrlPolicy::Local,
        limits: Limits::default(),
    };
    Engine::start(settings).unwrap()
}

fn id(text: &str) -> ThreadId {
    ThreadId::new(text).unwrap()
}

async fn create(engine: &Engine, thread: &str) {
    let message = Some("say hello".into());
    let new = NewThread { id: id(thread), agent: "default".into(), user_id: None, title: None, message };
    engine.store.create(new, None).await.unwrap();
    until(engine, thread, Status::Idle).await;
}

async fn until(engine: &Engine, thread: &str, status: Status) {
    let is = async {
        while engine.store.thread(id(thread)).await.unwrap().head.status() != status {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, is).await.unwrap_or_else(|_| panic!("{thread} is never {status:?}"));
}

fn execute(conn: &Connection, sql: &str) {
    assert_eq!(conn.execute(sql, []).unwrap(), 1, "{sql}");
}

/// Proves: LC-17
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_can_not_be_read_keeps_no_other_from_its_timers_and_letters() {
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    for thread in ["bad", "retries", "closes"] {
        create(&engine, thread).await;
    }
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    // All of it is due, that of the bad one first.
    let failed = Phase::Failed { why: "a test".into(), retry_at: Some(rap_protocol::Timestamp(1)) };
    let head: String =
        conn.query_row("SELECT head FROM threads WHERE id = 'retries'", [], |row| row.get(0)).unwrap();
    let head = Head { phase: failed, ..serde_json::from_str(&head).unwrap() };
    let head = serde_json::to_string(&head).unwrap();
    execute(&conn, &format!("UPDATE threads SET due = 1, head = '{head}' WHERE id = 'retries'"));
    execute(&conn, "UPDATE threads SET due = 0, ask = 1, head = '{}' WHERE id = 'bad'");
    for receiver in ["bad", "closes"] {
        let values = format!("('nobody', '{receiver}', '\"close\"')");
        execute(&conn, &format!("INSERT INTO letters (sender, receiver, letter) VALUES {values}"));
    }
    drop(conn);
    let engine = start(&dir);
    until(&engine, "closes", Status::Closed).await;
    until(&engine, "retries", Status::Idle).await;
    assert_eq!(engine.store.thread(id("retries")).await.unwrap().head.turn, 2);
    // The letter that could not be delivered is still there.
    assert_eq!(engine.store.letters(10).await.unwrap().len(), 1);
    engine.shut_down().await;
}
