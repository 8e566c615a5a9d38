//! Tests of the engine with due work that cannot be done.

use std::collections::HashSet;

use rap_agent::{OnBusy, Plan, Server, Status};
use rap_io::sqlite::open_sqlite;
use rap_protocol::ThreadId;
use rusqlite::Connection;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::model::scripted::Scripted;
use crate::model::{self, HistoryScope, Model, ModelAnswer, ModelRequest, OnDelta};
use crate::settings::{Limits, ToolServer};
use crate::store::suite::fixture::plans;
use crate::store::{DuePage, NewThread, PANIC, Visibility};

const TIMEOUT: Duration = Duration::from_secs(20);
const SERVER: &str = "http://127.0.0.1:9";

fn start(dir: &TempDir) -> Arc<Engine> {
    start_with(dir, Arc::new(Scripted::command_driven()), Limits::default())
}

fn start_with(dir: &TempDir, model: Arc<dyn Model>, limits: Limits) -> Arc<Engine> {
    Engine::start(settings(dir, model, limits)).unwrap()
}

fn settings(dir: &TempDir, model: Arc<dyn Model>, limits: Limits) -> Settings {
    Settings {
        public_url: "http://127.0.0.1:9".into(),
        limits,
        ..Settings::new(dir.path().join("rap.db"), model)
    }
}

fn id(text: &str) -> ThreadId {
    ThreadId::new(text).unwrap()
}

async fn create(engine: &Engine, thread: &str) {
    let new =
        NewThread { id: id(thread), incarnation: 7, agent: "default".into(), user_id: None, title: None };
    let begin = Input::Begin { message: Some("say hello".into()) };
    engine.apply_external(Target::New(new), begin).await.unwrap();
    until(engine, thread, Status::Idle).await;
}

async fn until(engine: &Engine, thread: &str, status: Status) {
    let reached = async {
        while engine.store.thread(&id(thread), &Visibility::All).await.unwrap().head.status() != status {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, reached).await.unwrap_or_else(|_| panic!("{thread} is never {status:?}"));
}

fn execute(conn: &Connection, sql: &str) {
    assert_eq!(conn.execute(sql, []).unwrap(), 1, "{sql}");
}

/// Proves: LC-17
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_cannot_be_read_does_not_block_the_timers_and_messages_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    for thread in ["bad", "retries", "closes"] {
        create(&engine, thread).await;
    }
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    // Work of all threads is due, that of the unreadable one first.
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
    assert_eq!(engine.store.thread(&id("retries"), &Visibility::All).await.unwrap().head.turn(), 2);
    // The undelivered message is still stored, and so is the timer.
    let later = engine.now().plus(Duration::from_secs(3600));
    assert_eq!(engine.store.due_messages(later, &[], 10).await.unwrap().len(), 1);
    assert_eq!(engine.store.due_timers(later, later, &[], 10).await.unwrap().len(), 1);
    engine.shut_down().await;
}

/// Otherwise each page of the session would hold the same work again.
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
    tokio::time::timeout(TIMEOUT, postponed).await.expect("some work was never postponed");
    let in_progress = engine.dispatcher.in_progress();
    assert!(in_progress.iter().all(|(_, count)| *count == 0), "{in_progress:?}");
    engine.shut_down().await;
}

/// A model that panics at its first request and answers the others when `answers` is notified.
#[derive(Debug, Default)]
struct PanicsFirst {
    asked: AtomicI64,
    answers: Notify,
}

#[async_trait::async_trait]
impl Model for PanicsFirst {
    async fn ask(
        &self,
        _request: ModelRequest,
        _on_delta: &mut OnDelta<'_>,
    ) -> Result<ModelAnswer, model::Error> {
        assert!(self.asked.fetch_add(1, Ordering::SeqCst) > 0, "panic of this test");
        self.answers.notified().await;
        Ok(ModelAnswer { text: "done".into(), ..ModelAnswer::default() })
    }

    fn history_scope(&self) -> HistoryScope {
        HistoryScope::Full
    }

    fn destination(&self) -> &str {
        "panics-first"
    }
}

/// Creates a thread that asks its model.
async fn ask(engine: &Engine, thread: &str) {
    let new =
        NewThread { id: id(thread), incarnation: 7, agent: "default".into(), user_id: None, title: None };
    engine.apply_external(Target::New(new), Input::Begin { message: Some("hello".into()) }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_panics_frees_its_slot() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(PanicsFirst::default());
    let limits = Limits { model_concurrency: 1, ..Limits::default() };
    let engine = start_with(&dir, Arc::<PanicsFirst>::clone(&model), limits);
    ask(&engine, "panics").await;
    ask(&engine, "waits").await;
    model.answers.notify_one();
    until(&engine, "waits", Status::Idle).await;
    // The request is retried later.
    assert_eq!(
        engine.store.thread(&id("panics"), &Visibility::All).await.unwrap().head.status(),
        Status::Running
    );
    assert!(engine.dispatcher.in_progress().iter().all(|(_, count)| *count == 0));
    engine.shut_down().await;
}

/// Otherwise its model would be asked, and cost tokens, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_that_cannot_store_its_answer_does_not_ask_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(PanicsFirst { asked: AtomicI64::new(1), answers: Notify::new() });
    let engine = start_with(&dir, Arc::<PanicsFirst>::clone(&model), Limits::default());
    ask(&engine, "bad").await;
    let panics = Input::UserMessage { message: PANIC.into(), on_busy: OnBusy::Enqueue };
    assert!(matches!(
        engine.apply_external(Target::Id(id("bad")), panics).await,
        Err(store::Error::Disabled)
    ));
    model.answers.notify_one();
    let settled = async {
        while engine.dispatcher.in_progress().iter().any(|(_, count)| *count > 0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, settled).await.expect("the answer was never settled");
    let queue = WorkQueue { kind: WorkKind::Ask, destination: "panics-first".into() };
    let page = DuePage { now: engine.now(), after: None, sessions: 9, per_session: 9, skip: HashSet::new() };
    assert_eq!(engine.store.due_work(&queue, page).await.unwrap().work, []);
    // After the pause the work cannot even be loaded.
    let row = engine.store.thread(&id("bad"), &Visibility::All).await.unwrap();
    let key = WorkKey::Ask { thread: row.thread.key, turn: 1 };
    let later = engine.now().plus(Duration::from_secs(3600));
    assert!(matches!(engine.store.load_work(&key, later).await, Err(store::Error::Disabled)));
    engine.shut_down().await;
}

/// Waits until no work is in progress.
async fn until_nothing_is_in_progress(engine: &Engine) {
    let ended = async {
        while engine.dispatcher.in_progress().iter().any(|(_, count)| *count > 0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, ended).await.expect("work stays in progress");
}

/// Waits until the model was asked this often.
async fn until_asked(model: &PanicsFirst, count: i64) {
    let asked = async {
        while model.asked.load(Ordering::SeqCst) < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, asked).await.expect("the model was never asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_question_frees_its_slot_although_the_model_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(PanicsFirst { asked: AtomicI64::new(1), answers: Notify::new() });
    let engine = start_with(&dir, Arc::<PanicsFirst>::clone(&model), Limits::default());
    ask(&engine, "hangs").await;
    until_asked(&model, 2).await;
    engine.apply_external(Target::Id(id("hangs")), Input::Interrupt).await.unwrap();
    until_nothing_is_in_progress(&engine).await;
    engine.shut_down().await;
}

/// An answer that the database did not take is paid for. It must not be lost.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_applied_when_the_database_is_available_again() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(PanicsFirst { asked: AtomicI64::new(1), answers: Notify::new() });
    let engine = start_with(&dir, Arc::<PanicsFirst>::clone(&model), Limits::default());
    ask(&engine, "thread").await;
    until_asked(&model, 2).await;
    let other = open_sqlite(&dir.path().join("rap.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    model.answers.notify_one();
    // The attempt fails after the time that a statement waits for a lock, and must then stay in progress.
    let gave_up = tokio::time::timeout(Duration::from_secs(1), until_nothing_is_in_progress(&engine)).await;
    assert!(gave_up.is_err());
    other.execute_batch("ROLLBACK").unwrap();
    until(&engine, "thread", Status::Idle).await;
    assert_eq!(model.asked.load(Ordering::SeqCst), 2);
    engine.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settled_call_cancels_its_invocation() {
    let dir = tempfile::tempdir().unwrap();
    let model = Arc::new(PanicsFirst { asked: AtomicI64::new(1), answers: Notify::new() });
    let engine = start_with(&dir, Arc::<PanicsFirst>::clone(&model), Limits::default());
    ask(&engine, "thread").await;
    until_asked(&model, 2).await;
    // A call that needs an approval is not sent, so the test can pretend to send it.
    let approve = Plan::Approve { server: Server(SERVER.into()), prompt: "allow?".into() };
    let answer = plans(1, "tool", vec![approve]);
    engine.apply_external(Target::Id(id("thread")), answer).await.unwrap();
    let row = engine.store.thread(&id("thread"), &Visibility::All).await.unwrap();
    let call = row.head.batch()[0].id.clone();
    let queue = WorkQueue { kind: WorkKind::Invoke, destination: SERVER.into() };
    let key = WorkKey::Invoke { thread: row.thread.key, call: call.clone() };
    let cancelled = engine.dispatcher.offer(&queue, row.thread.session, key).expect("a slot is free");
    assert!(!cancelled.is_cancelled());
    engine.apply_external(Target::Id(id("thread")), Input::Cancel { call }).await.unwrap();
    assert!(cancelled.is_cancelled());
    engine.shut_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_between_threads_of_more_than_one_batch_are_delivered_after_a_start() {
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    create(&engine, "thread").await;
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    for _ in 0..200 {
        execute(
            &conn,
            "INSERT INTO letters (sender, receiver, letter) VALUES ('nobody', 'thread', '\"close\"')",
        );
    }
    let engine = start(&dir);
    let left = || -> i64 { conn.query_row("SELECT count(*) FROM letters", [], |row| row.get(0)).unwrap() };
    let delivered = async {
        while left() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, delivered).await.unwrap_or_else(|_| panic!("{} are left", left()));
    engine.shut_down().await;
}

/// Proves: TC-13
#[tokio::test(flavor = "multi_thread")]
async fn notifications_that_a_stop_prevents_are_recorded() {
    let dir = tempfile::tempdir().unwrap();
    // Connections are established but never answered.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let mut settings = settings(&dir, Arc::new(Scripted::command_driven()), Limits::default());
    settings.limits.stop_within = Duration::from_millis(100);
    settings.limits.discovery_timeout = Duration::from_millis(100);
    settings.tool_servers = vec![ToolServer::new(url)];
    let engine = Engine::start(settings).unwrap();
    create(&engine, "thread").await;
    let thread = engine.store.thread(&id("thread"), &Visibility::All).await.unwrap().thread;
    for _ in 0..66 {
        engine.notify_close(&thread, Vec::new());
    }
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    let sql = "SELECT detail FROM deliveries WHERE topic = 'close_thread' AND outcome = 'dropped'";
    let detail: String = conn.query_row(sql, [], |row| row.get(0)).unwrap();
    assert!(detail.ends_with("\tthe runtime stopped before it was sent"), "{detail}");
}

/// The clock was set back by a day while no process was running: all stored times are in the future.
#[tokio::test(flavor = "multi_thread")]
async fn timers_start_again_if_the_clock_was_set_back_while_the_runtime_was_down() {
    const DAY: i64 = 24 * 3600 * 1000;
    let dir = tempfile::tempdir().unwrap();
    let engine = start(&dir);
    create(&engine, "sleeps").await;
    let sleep = "call sleep {\"seconds\": 600}\ncall schedule {\"cron\": \"0 * * * *\", \"text\": \"tea\"}";
    let input = Input::UserMessage { message: sleep.into(), on_busy: OnBusy::Join };
    engine.apply_external(Target::Id(id("sleeps")), input).await.unwrap();
    until(&engine, "sleeps", Status::Waiting).await;
    engine.shut_down().await;
    drop(engine);
    let conn = open_sqlite(&dir.path().join("rap.db")).unwrap();
    let head: String = conn.query_row("SELECT head FROM threads", [], |row| row.get(0)).unwrap();
    let mut head: Value = serde_json::from_str(&head).unwrap();
    let mut times = Vec::new();
    for call in ["batch", "subscriptions"] {
        times.extend(["since", "until", "next"].map(|name| format!("/{call}/0/{name}")));
    }
    for time in times {
        if let Some(time) = head.pointer_mut(&time) {
            *time = json!(time.as_i64().unwrap() + DAY);
        }
    }
    let text = head.to_string();
    conn.execute("UPDATE threads SET updated_at = updated_at + ?1, head = ?2", (DAY, text)).unwrap();
    let sql = "UPDATE calls SET since = since + ?1, until = until + ?1 WHERE until IS NOT NULL";
    assert_eq!(conn.execute(sql, [DAY]).unwrap(), 2);
    drop(conn);
    let engine = start(&dir);
    let soon = engine.now().plus(Duration::from_secs(3700));
    let moved = async {
        while engine.store.due_timers(soon, soon, &[], 10).await.unwrap().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let moved = tokio::time::timeout(TIMEOUT, moved).await;
    assert!(moved.is_ok(), "{head}: {:?}", engine.store.due_timers(soon.plus(TIMEOUT), soon, &[], 10).await);
    engine.shut_down().await;
}

/// Machines that were made from one image have the same host name.
#[test]
fn nodes_with_the_same_host_name_have_different_names_unless_they_are_the_same_node() {
    let machine = |boot: &str| {
        let root = tempfile::tempdir().unwrap();
        let kernel = root.path().join("proc/sys/kernel");
        std::fs::create_dir_all(kernel.join("random")).unwrap();
        std::fs::write(kernel.join("hostname"), "localhost\n").unwrap();
        std::fs::write(kernel.join("random/boot_id"), format!("{boot}\n")).unwrap();
        root
    };
    let (one, other) = (machine("1c3a"), machine("9f2e"));
    let listen = Some("0.0.0.0:7420".parse().unwrap());
    let name = super::node_name_on(one.path(), listen, 1);
    assert_eq!(name, super::node_name_on(one.path(), listen, 2));
    assert_ne!(name, super::node_name_on(other.path(), listen, 1));
    assert_ne!(name, super::node_name_on(one.path(), Some("0.0.0.0:7421".parse().unwrap()), 1));
    assert_ne!(super::node_name_on(one.path(), None, 1), super::node_name_on(one.path(), None, 2));
}
