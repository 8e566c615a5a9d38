//! The engine, where something that is due cannot be done.

use std::collections::HashSet;

use rap_agent::{OnBusy, Status};
use rap_io::sqlite::open_sqlite;
use rap_protocol::{ThreadId, UrlPolicy};
use rusqlite::Connection;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::model::scripted::Scripted;
use crate::model::{self, Answer, Model, OnDelta, Question, Wants};
use crate::settings::{Limits, Window};
use crate::store::{DuePage, NewThread, PANIC};

const PATIENCE: Duration = Duration::from_secs(20);
const SERVER: &str = "http://127.0.0.1:9";

fn start(dir: &TempDir) -> Arc<Engine> {
    start_with(dir, Arc::new(Scripted::obedient()), Limits::default())
}

fn start_with(dir: &TempDir, model: Arc<dyn Model>, limits: Limits) -> Arc<Engine> {
    let settings = Settings {
        public_url: "http://127.0.0.1:9".into(),
        database: dir.path().join("rap.db"),
        tokens: Vec::new(),
        agents: vec![Agent::default()],
        model,
        images: false,
        window: Window::default(),
        tool_servers: Vec::new(),
        url_policy: UrlPolicy::Local,
        limits,
    };
    Engine::start(settings).unwrap()
}

fn id(text: &str) -> ThreadId {
    ThreadId::new(text).unwrap()
}

async fn create(engine: &Engine, thread: &str) {
    let new =
        NewThread { id: id(thread), incarnation: 7, agent: "default".into(), user_id: None, title: None };
    let begin = Input::Begin { text: Some("say hello".into()) };
    engine.tell(Target::New(new), begin).await.unwrap();
    until(engine, thread, Status::Idle).await;
}

async fn until(engine: &Engine, thread: &str, status: Status) {
    let is = async {
        while engine.store.thread(&id(thread)).await.unwrap().head.status() != status {
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
async fn a_thread_that_cannot_be_read_keeps_no_other_from_its_timers_and_messages() {
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    for thread in ["bad", "retries", "closes"] {
        create(&engine, thread).await;
    }
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    // All of it is due, that of the bad one first.
    let head: String =
        conn.query_row("SELECT head FROM threads WHERE id = 'retries'", [], |row| row.get(0)).unwrap();
    let mut head: Value = serde_json::from_str(&head).unwrap();
    head["phase"] = json!({"failed": {"why": "a test", "retry_at": 1}});
    execute(
        &conn,
        &format!("UPDATE threads SET due = 1, status = 'failed', head = '{head}' WHERE id = 'retries'"),
    );
    execute(
        &conn,
        "UPDATE threads SET due = 0, ask = 1, ask_to = '', ask_at = 0, head = '{}' WHERE id = 'bad'",
    );
    for receiver in ["bad", "closes"] {
        let values = format!("('nobody', '{receiver}', '\"close\"')");
        execute(&conn, &format!("INSERT INTO letters (sender, receiver, letter) VALUES {values}"));
    }
    drop(conn);
    let engine = start(&dir);
    until(&engine, "closes", Status::Closed).await;
    until(&engine, "retries", Status::Idle).await;
    assert_eq!(engine.store.thread(&id("retries")).await.unwrap().head.turn(), 2);
    // The message that could not be delivered is still there, and so is the timer.
    let later = engine.now().plus(Duration::from_secs(3600));
    assert_eq!(engine.store.due_messages(later, &[], 10).await.unwrap().len(), 1);
    assert_eq!(engine.store.due_timers(later, later, &[], 10).await.unwrap().len(), 1);
    engine.shut_down().await;
}

/// More of it than a page has for one session would be found again and again.
#[tokio::test(flavor = "multi_thread")]
async fn work_that_cannot_be_read_is_postponed() {
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    create(&engine, "bad").await;
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    execute(&conn, "UPDATE threads SET head = '{}' WHERE id = 'bad'");
    for number in 0..40 {
        execute(
            &conn,
            &format!(
                "INSERT INTO calls (thread, id, state, name, server, seq, since, invoke_at, root) \
                 VALUES (1, 'c{number}', 0, 'tool', '{SERVER}', 1, 0, 0, 1)"
            ),
        );
    }
    let engine = start(&dir);
    let due = || -> i64 {
        let now = engine.now().0;
        let sql = "SELECT count(*) FROM calls WHERE attempts = 0 OR invoke_at <= ?1";
        conn.query_row(sql, [now], |row| row.get(0)).unwrap()
    };
    let postponed = async {
        while due() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, postponed).await.expect("all of it is postponed");
    let running = engine.dispatcher.running();
    assert!(running.iter().all(|(_, count)| *count == 0), "{running:?}");
    engine.shut_down().await;
}

/// A model that panics at its first question and waits to be told at all others.
#[derive(Debug, Default)]
struct Fragile {
    asked: AtomicI64,
    answers: Notify,
}

#[async_trait::async_trait]
impl Model for Fragile {
    async fn ask(&self, _question: Question, _on_delta: &mut OnDelta<'_>) -> Result<Answer, model::Error> {
        assert!(self.asked.fetch_add(1, Ordering::SeqCst) > 0, "as the test wanted");
        self.answers.notified().await;
        Ok(Answer { text: "done".into(), ..Answer::default() })
    }

    fn wants(&self) -> Wants {
        Wants::Everything
    }

    fn destination(&self) -> &str {
        "fragile"
    }
}

/// Begins a thread that asks its model.
async fn ask(engine: &Engine, thread: &str) {
    let new =
        NewThread { id: id(thread), incarnation: 7, agent: "default".into(), user_id: None, title: None };
    engine.tell(Target::New(new), Input::Begin { text: Some("hello".into()) }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_panics_frees_its_slot() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(Fragile::default());
    let limits = Limits { model_concurrency: 1, ..Limits::default() };
    let engine = start_with(&dir, Arc::<Fragile>::clone(&model), limits);
    ask(&engine, "panics").await;
    ask(&engine, "waits").await;
    model.answers.notify_one();
    until(&engine, "waits", Status::Idle).await;
    // It is asked again, later.
    assert_eq!(engine.store.thread(&id("panics")).await.unwrap().head.status(), Status::Running);
    assert!(engine.dispatcher.running().iter().all(|(_, count)| *count == 0));
    engine.shut_down().await;
}

/// Otherwise its model would be asked, and paid, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_cannot_take_its_answer_is_not_asked_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(Fragile { asked: AtomicI64::new(1), answers: Notify::new() });
    let engine = start_with(&dir, Arc::<Fragile>::clone(&model), Limits::default());
    ask(&engine, "bad").await;
    let panics = Input::UserMessage { text: PANIC.into(), on_busy: OnBusy::Enqueue };
    assert!(matches!(engine.tell(Target::Id(id("bad")), panics).await, Err(store::Error::SetAside)));
    model.answers.notify_one();
    let settled = async {
        while engine.dispatcher.running().iter().any(|(_, count)| *count > 0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, settled).await.expect("the answer is settled");
    let queue = WorkQueue { kind: WorkKind::Ask, destination: "fragile".into() };
    let page = DuePage { now: engine.now(), after: None, sessions: 9, per_session: 9, skip: HashSet::new() };
    assert_eq!(engine.store.due_work(&queue, page).await.unwrap().work, []);
    // After the pause it is not even begun.
    let row = engine.store.thread(&id("bad")).await.unwrap();
    let key = WorkKey::Ask { thread: row.thread.key, turn: 1 };
    let later = engine.now().plus(Duration::from_secs(3600));
    assert!(matches!(engine.store.load_work(&key, later).await, Err(store::Error::SetAside)));
    engine.shut_down().await;
}
