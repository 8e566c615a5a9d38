//! Tests of opening a database of the first release.

use rap_agent::{Ignored, Input, Limits};
use rap_protocol::{CallId, Timestamp};
use rusqlite::params;

use super::*;
use crate::store::suite::fixture::{
    CALLBACK_BASE, MODEL, SERVER, START, answer, id, inline_event, result, seconds,
};
use crate::store::{Work, WorkKey, WorkKind};

/// Returns a head in the format of the first release.
fn head(phase: &str, more: &str) -> String {
    format!(
        r#"{{"phase":{phase},"turn":1,"turns_awake":1,"seq":2,"settled":0,"minted":3{more},"usage":{{"input":0,"output":0}}}}"#
    )
}

fn thread(conn: &Connection, number: i64, name: &str, root: i64, ask: Option<i64>, head: &str) {
    let sql = "INSERT INTO threads (no, id, parent, source, root, born_at, ancestors, incarnation, agent, created_at, \
               updated_at, version, status, ask, head) \
               VALUES (?1, ?2, ?3, ?3, ?4, 0, ?5, ?6, 'default', ?7, ?7, 4, 'running', ?8, ?9)";
    let parent = (root != number).then_some(root);
    let ancestors = if root == number { "[]" } else { "[\"root\"]" };
    let row = params![number, name, parent, root, ancestors, 100 + number, START.0 - 1000, ask, head];
    conn.execute(sql, row).unwrap();
    for (seq, body) in [
        (1, r#"{"at":5,"kind":"user","text":"hello"}"#),
        (
            2,
            r#"{"at":6,"kind":"assistant","text":"","calls":[{"id":"c1","name":"tool","arguments":{"given":{"of":1}}}]}"#,
        ),
    ] {
        let sql = "INSERT INTO entries (key, body) VALUES (?1, ?2)";
        conn.execute(sql, params![(number << 32) + seq, body]).unwrap();
    }
}

fn call(conn: &Connection, number: i64, call: &str, state: i64, invoke_at: Option<i64>, attempts: i64) {
    let sql = "INSERT INTO calls (thread, id, state, name, server, seq, since, invoke_at, attempts) \
               VALUES (?1, ?2, ?3, 'tool', ?4, 2, 7, ?5, ?6)";
    conn.execute(sql, params![number, call, state, SERVER, invoke_at, attempts]).unwrap();
}

fn mark(conn: &Connection, call: &str, event: &str, at: i64) {
    let sql = "INSERT INTO seen (thread, call, event, at) VALUES (4, ?1, ?2, ?3)";
    conn.execute(sql, params![call, event, at]).unwrap();
}

const CALL: &str = r#"{"id":"c1","name":"tool","server":"http://127.0.0.1:9","seq":2,"since":7}"#;

/// Writes a root that is asking, a child with an open call, a root whose call is being retried, and one with a
/// subscription.
fn first_release(file: &File, marks: i64) {
    let conn = file.connection();
    conn.execute_batch(MIGRATIONS[0]).unwrap();
    conn.pragma_update(None, "user_version", 1).unwrap();
    conn.execute_batch("BEGIN").unwrap();
    thread(&conn, 1, "root", 1, Some(1), &head(r#"{"asking":{"up_to":2}}"#, ""));
    let waiting = head("\"waiting\"", &format!(r#","batch":[{CALL}]"#));
    thread(&conn, 2, "child", 1, None, &waiting);
    call(&conn, 2, "c1", 0, Some(7), 0);
    thread(&conn, 3, "retried", 3, None, &waiting);
    call(&conn, 3, "c1", 0, Some(START.0 + 5000), 2);
    let subscribed = head("\"idle\"", &format!(r#","subscriptions":[{CALL}]"#));
    thread(&conn, 4, "subscribed", 4, None, &subscribed);
    call(&conn, 4, "c1", 5, None, 0);
    call(&conn, 4, "ended", 6, None, 0);
    for number in 0..marks {
        mark(&conn, "c1", &format!("e{number}"), number);
        mark(&conn, "ended", &format!("e{number}"), number);
    }
    let plain =
        r#"{"prompt":"Red?","choices":["a","b"],"default":0,"response_url":"http://127.0.0.1:9/answers"}"#;
    let context = [b"question".as_slice(), &102_u64.to_le_bytes(), &1_u64.to_le_bytes()].concat();
    let sql = "INSERT INTO questions (thread, no, call, body, asked_at, answer, answered_at, answer_at) \
               VALUES (2, 1, 'c1', ?1, 8, 1, 9, 9)";
    conn.execute(sql, [key().seal(plain.as_bytes(), &context)]).unwrap();
    let sql = "INSERT INTO letters (sender, receiver, letter) VALUES ('child', 'root', '\"child_rests\"')";
    conn.execute(sql, []).unwrap();
    conn.execute_batch("COMMIT").unwrap();
}

fn open(marks: i64, event_ids: u64) -> (Arc<File>, Fixture) {
    let file = File::without_batch_timeout();
    first_release(&file, marks);
    let fixture = Fixture::with(Box::new(Arc::clone(&file)), Limits { event_ids, ..Limits::default() });
    (file, fixture)
}

#[tokio::test]
async fn the_work_of_a_first_release_database_continues() {
    let (_, fixture) = open(0, 100);
    let (root, child) = (fixture.row("root").await.thread, fixture.row("child").await.thread);
    assert_eq!(child.session, root.session);
    // The request is sent to the model server that is configured now.
    let due = fixture.due(WorkKind::Ask, MODEL).await;
    assert_eq!(due, [(root.session, WorkKey::Ask { thread: root.key, turn: 1 })]);
    let Some(Work::Ask(ask)) = fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap() else {
        panic!("the work is not due")
    };
    assert_eq!((ask.up_to, ask.attempts), (2, 0));
    // The call and the answer belong to the session of the root.
    let c1 = CallId::new("c1").unwrap();
    let key = WorkKey::Invoke { thread: child.key, call: c1.clone() };
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await, [(root.session, key.clone())]);
    let Some(Work::Invoke(invoke)) = fixture.store.load_work(&key, fixture.now()).await.unwrap() else {
        panic!("the work is not due")
    };
    assert_eq!((invoke.call.since, invoke.arguments.len()), (Timestamp(7), 1));
    // From now on the callback URL is stored with the call.
    assert_eq!(invoke.callback_base.as_deref(), Some(CALLBACK_BASE));
    let due = fixture.due(WorkKind::Answer, SERVER).await;
    assert_eq!(due, [(root.session, WorkKey::Answer { thread: child.key, number: 1 })]);
    let Some(Work::Answer(answer_work)) = fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap()
    else {
        panic!("the work is not due")
    };
    assert_eq!((answer_work.response_url.expose(), answer_work.selected), ("http://127.0.0.1:9/answers", 1));
    // The retry keeps its due time.
    assert_eq!(fixture.store.next_due(fixture.now()).await.unwrap(), Some(START.plus(seconds(5))));
    let messages = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    assert_eq!((messages.len(), messages[0].session, &messages[0].sender), (1, root.session, &id("child")));
    // Subscriptions are checked like calls.
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await.len(), 1);
    // The threads continue, even after another restart.
    fixture.send_input("root", answer(1, "fine")).await.unwrap();
    fixture.send_input("child", result(&c1, "done")).await.unwrap();
    let fixture = fixture.reopen().await;
    let due = fixture.due(WorkKind::Ask, MODEL).await;
    assert_eq!(due, [(root.session, WorkKey::Ask { thread: child.key, turn: 2 })]);
    assert_eq!(fixture.texts("child").await, ["hello", "1 calls", "done"]);
}

#[tokio::test]
async fn calls_questions_and_deliveries_of_the_first_release_get_the_user_of_their_thread() {
    let file = File::without_batch_timeout();
    first_release(&file, 0);
    let sql = "UPDATE threads SET user_id = 'ann' WHERE no = 2; UPDATE questions SET answer = NULL; \
               INSERT INTO deliveries (kind, thread, call, server, topic, outcome, attempts, detail, first_at, last_at) \
               VALUES ('invocation', 2, 'c1', '', '', 'retrying', 1, '', 1, 1), \
                      ('invocation', 3, 'c1', '', '', 'retrying', 1, '', 1, 1)";
    file.connection().execute_batch(sql).unwrap();
    let fixture = Fixture::new(Box::new(Arc::clone(&file)));
    let (store, first) = (&fixture.store, || PageRequest::first(10));
    let ann = Visibility::User(rap_protocol::UserId::new("ann").unwrap());
    let calls = store.calls(&ann, first()).await.unwrap().rows;
    assert_eq!(calls.iter().map(|row| row.thread.as_str()).collect::<Vec<_>>(), ["child"]);
    assert_eq!(store.calls(&Visibility::All, first()).await.unwrap().rows.len(), 2);
    assert_eq!(store.inbox(None, &ann, first()).await.unwrap().rows.len(), 1);
    let filter = DeliveryFilter { visible: ann, limit: 10, ..DeliveryFilter::default() };
    let deliveries = store.deliveries(filter).await.unwrap().rows;
    assert_eq!(deliveries.iter().map(|row| row.thread.clone().unwrap()).collect::<Vec<_>>(), [id("child")]);
}

#[tokio::test]
async fn model_requests_of_an_agent_that_is_no_longer_configured_have_no_destination() {
    let file = File::without_batch_timeout();
    first_release(&file, 0);
    file.alter("UPDATE threads SET agent = 'gone' WHERE no = 1");
    let fixture = Fixture::new(Box::new(Arc::clone(&file)));
    assert_eq!(fixture.store.destinations(WorkKind::Ask).await.unwrap(), [""]);
    // Now the agent is configured again.
    fixture.store.close().await;
    drop(fixture);
    file.opened.lock().unwrap().take();
    file.alter("UPDATE threads SET agent = 'default' WHERE no = 1");
    let fixture = Fixture::new(Box::new(Arc::clone(&file)));
    assert_eq!(fixture.store.destinations(WorkKind::Ask).await.unwrap(), [MODEL]);
}

fn marks(file: &File, call: &str) -> Vec<(String, i64)> {
    let conn = file.connection();
    let mut select = conn.prepare("SELECT event, no FROM seen WHERE call = ?1 ORDER BY no").unwrap();
    let rows = select.query_map([call], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

#[tokio::test]
async fn event_ids_of_the_first_release_are_recognised_and_dropped_first() {
    let (file, fixture) = open(3, 2);
    let numbered = marks(&file, "c1");
    assert_eq!(numbered, [("e0".into(), -2), ("e1".into(), -1), ("e2".into(), 0)]);
    let c1 = CallId::new("c1").unwrap();
    let duplicate = fixture.send_input("subscribed", inline_event(&c1, "again", Some("e0"))).await;
    assert!(matches!(duplicate, Err(Error::Ignored(Ignored::Duplicate))), "{duplicate:?}");
    for event in ["new 1", "new 2"] {
        fixture.send_input("subscribed", inline_event(&c1, event, Some(event))).await.unwrap();
    }
    assert_eq!(marks(&file, "c1").len(), 5);
    fixture.send_input("subscribed", inline_event(&c1, "new 3", Some("new 3"))).await.unwrap();
    assert_eq!(marks(&file, "c1"), [("new 2".into(), 2), ("new 3".into(), 3)]);
}

/// The time of a step does not depend on the number of stored event ids.
#[tokio::test]
async fn a_step_drops_a_bounded_number_of_event_ids() {
    let (file, fixture) = open(1000, 1);
    let c1 = CallId::new("c1").unwrap();
    let mut before = 1000;
    for number in 0..40 {
        let event = format!("new {number}");
        fixture.send_input("subscribed", inline_event(&c1, &event, Some(&event))).await.unwrap();
        let after = marks(&file, "c1").len();
        assert!(before + 1 - after <= 64, "{} were dropped at once", before + 1 - after);
        before = after;
    }
    assert_eq!(before, 1);
}

#[tokio::test]
async fn event_ids_of_ended_subscriptions_of_the_first_release_are_removed() {
    let (file, fixture) = open(10, 100);
    while fixture.store.prune(START, START).await.unwrap() {}
    assert_eq!(marks(&file, "ended").len(), 0);
    assert_eq!(marks(&file, "c1").len(), 10);
    let c1 = CallId::new("c1").unwrap();
    fixture.send_input("subscribed", Input::Cancel { call: c1 }).await.unwrap();
    while fixture.store.prune(START, START).await.unwrap() {}
    assert_eq!(marks(&file, "c1").len(), 0);
}
