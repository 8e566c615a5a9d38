//! Deletion of closed sessions.

use std::collections::BTreeMap;

use rap_agent::{Input, Usage};
use rap_protocol::UserId;

use super::Database;
use super::apply::delivery;
use super::damage::damage_entry;
use super::fixture::{
    Fixture, answer, enqueued, id, inline_event, new, new_thread, seconds, spawns, to, user,
};
use super::transfer::{another, export, full_session, import, limits, origin};
use crate::doctor::examine;
use crate::store::{
    Error, Expiry, Message, NewThread, PageRequest, Remaining, Store as _, Target, ThreadFilter, Visibility,
};

/// Tables with rows that belong to no session.
const SHARED: [&str; 15] = [
    "thread_counts",
    "used_keys",
    "toolsets",
    "figures",
    "nodes",
    "rap_store",
    "signals",
    "tool_hosts",
    "tokens",
    "search",
    "search_config",
    "search_data",
    "search_idx",
    "sqlite_sequence",
    "sqlite_stat1",
];

/// Returns the number of rows of each table that has rows of sessions.
fn rows(fixture: &Fixture) -> BTreeMap<String, i64> {
    let mut rows = fixture.database.row_counts();
    rows.retain(|table, count| *count > 0 && !SHARED.contains(&table.as_str()));
    rows
}

/// Closes a session, and delivers the messages between its threads.
async fn close(fixture: &Fixture, root: &str) {
    fixture.send_input(root, Input::Close).await.unwrap();
    deliver(fixture).await;
    assert!(fixture.head(root).await.is_closed());
}

async fn deliver(fixture: &Fixture) {
    loop {
        let messages = fixture.store.due_messages(fixture.now(), &[], 100).await.unwrap();
        if messages.is_empty() {
            return;
        }
        for message in &messages {
            // A closed receiver refuses it.
            fixture.send(delivery(message)).await.ok();
        }
    }
}

async fn delete(fixture: &Fixture, root: &str) -> Result<(), Error> {
    fixture.store.delete_session(&id(root), &Visibility::All).await
}

/// Runs batches until nothing is left. Returns their number.
async fn finish(fixture: &Fixture) -> usize {
    for batches in 0..1000 {
        match fixture.store.delete_batch().await.unwrap() {
            Remaining::Some => {}
            Remaining::None => return batches,
            Remaining::Waiting => panic!("a session is not quiet"),
        }
    }
    panic!("the deletion does not end");
}

fn fork(source: &str, fork: &str) -> Message {
    let target = Target::Fork { source: id(source), at: None, id: id(fork), incarnation: 5 };
    Message::new(target, Input::Begin { message: Some("what if".into()) })
}

async fn listed(fixture: &Fixture) -> Vec<String> {
    let page = fixture
        .store
        .threads(ThreadFilter { page_request: PageRequest::first(100), ..ThreadFilter::default() })
        .await
        .unwrap();
    page.rows.iter().map(|row| row.thread.id.to_string()).collect()
}

/// Otherwise it would be there again after an import.
pub(crate) async fn a_deleted_session_is_not_exported(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, limits());
    fixture.create_idle("other").await;
    fixture.create_idle("root").await;
    close(&fixture, "root").await;
    delete(&fixture, "root").await.unwrap();
    let roots = fixture.store.roots(None).await.unwrap();
    assert_eq!(roots.into_iter().map(|(_, id)| id).collect::<Vec<_>>(), [id("other")]);
    assert!(matches!(export(&*fixture.store, "root").await, Err(Error::NoThread)));
    assert!(export(&*fixture.store, "other").await.is_ok());
}

pub(crate) async fn a_deleted_session_is_hidden_at_once_and_leaves_no_row(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, limits());
    fixture.create_idle("other").await;
    let before = rows(&fixture);
    full_session(&fixture, "root").await;
    close(&fixture, "root").await;
    let counted = fixture.store.counts().await.unwrap();
    assert!(rows(&fixture)["threads"] > 3, "it has children");
    delete(&fixture, "root").await.unwrap();
    assert!(matches!(fixture.store.thread(&id("root"), &Visibility::All).await, Err(Error::NoThread)));
    assert_eq!(listed(&fixture).await, ["other"]);
    assert!(matches!(delete(&fixture, "root").await, Err(Error::NoThread)));
    assert!(matches!(fixture.send(fork("root", "fork")).await, Err(Error::NoThread)));
    let packed = fixture.store.pack(&id("root"), &origin(), vec![1]).await;
    assert!(matches!(packed, Err(Error::NoThread)), "{packed:?}");
    // It continues after a restart.
    let fixture = fixture.reopen().await;
    finish(&fixture).await;
    assert_eq!(rows(&fixture), before);
    let left = fixture.store.counts().await.unwrap();
    let total =
        |counts: &crate::store::StoreCounts| counts.threads.iter().map(|(_, count)| count).sum::<i64>();
    assert_eq!((total(&left), total(&counted) > 3), (1, true));
    // Its id is free.
    fixture.create_idle("root").await;
    assert_eq!(fixture.texts("root").await, ["hello", "hello to you"]);
}

pub(crate) async fn only_a_closed_session_is_deleted(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let [ann, bob] = ["ann", "bob"].map(|user| UserId::new(user).unwrap());
    let of_ann = NewThread { user_id: Some(ann.clone()), ..new_thread("root") };
    fixture
        .send(Message::new(Target::New(of_ann), Input::Begin { message: Some("go".into()) }))
        .await
        .unwrap();
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    let child = fixture.head("root").await.children().next().unwrap().to_string();
    assert!(matches!(delete(&fixture, "nobody").await, Err(Error::NoThread)));
    assert!(matches!(delete(&fixture, "root").await, Err(Error::NotClosed)));
    assert!(matches!(delete(&fixture, &child).await, Err(Error::NotARoot)));
    fixture.send_input("root", Input::Close).await.unwrap();
    let of_bob = fixture.store.delete_session(&id("root"), &Visibility::User(bob)).await;
    assert!(matches!(of_bob, Err(Error::NoThread)), "{of_bob:?}");
    // The child is not closed yet.
    fixture.store.delete_session(&id("root"), &Visibility::User(ann)).await.unwrap();
    assert_eq!(fixture.store.delete_batch().await.unwrap(), Remaining::Some);
    assert_eq!(fixture.store.delete_batch().await.unwrap(), Remaining::Waiting);
    deliver(&fixture).await;
    fixture.clock.pass(seconds(2));
    finish(&fixture).await;
    assert_eq!(rows(&fixture), BTreeMap::new());
}

pub(crate) async fn forks_keep_their_history_when_their_source_is_deleted(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("source", Some("hello")).await;
    let call = fixture.subscribe("source").await;
    fixture.send_input("source", inline_event(&call, "an event", None)).await.unwrap();
    let turn = fixture.head("source").await.turn();
    let usage = Usage::default();
    fixture.send_input("source", Input::Summarised { turn, text: "so far".into(), usage }).await.unwrap();
    let turn = fixture.head("source").await.turn();
    fixture.send_input("source", answer(turn, "I see")).await.unwrap();
    // Longer than a page of copies.
    for number in 0..40 {
        fixture.send_input("source", user(&format!("message {number}"))).await.unwrap();
        let turn = fixture.head("source").await.turn();
        fixture.send_input("source", answer(turn, "yes")).await.unwrap();
    }
    fixture.send(fork("source", "fork")).await.unwrap();
    let turn = fixture.head("fork").await.turn();
    fixture.send_input("fork", answer(turn, "then")).await.unwrap();
    fixture.send(fork("fork", "fork_of_fork")).await.unwrap();
    let shown = async |thread: &str| {
        let row = fixture.row(thread).await;
        let prompt = fixture.store.prompt_entries(&row.thread, row.head.seq()).await.unwrap();
        (fixture.history(thread).await, prompt)
    };
    let before = [shown("fork").await, shown("fork_of_fork").await];
    // As a reader that has loaded the thread before.
    let (stale, up_to) = (fixture.row("fork").await.thread, fixture.head("fork").await.seq());
    close(&fixture, "source").await;
    delete(&fixture, "source").await.unwrap();
    while fixture.store.delete_batch().await.unwrap() == Remaining::Some {
        assert_eq!(shown("fork").await, before[0]);
        assert_eq!(shown("fork_of_fork").await, before[1]);
    }
    assert_eq!(fixture.store.prompt_entries(&stale, up_to).await.unwrap(), before[0].1);
    assert_eq!(fixture.row("fork").await.forked_from, None);
    assert_eq!(listed(&fixture).await, ["fork", "fork_of_fork"]);
    fixture.send_input("fork", user("more")).await.unwrap();
    // Forks of the fork, too.
    close(&fixture, "fork").await;
    delete(&fixture, "fork").await.unwrap();
    finish(&fixture).await;
    assert_eq!(shown("fork_of_fork").await, before[1]);
    close(&fixture, "fork_of_fork").await;
    delete(&fixture, "fork_of_fork").await.unwrap();
    finish(&fixture).await;
    assert_eq!(rows(&fixture), BTreeMap::new());
}

pub(crate) async fn a_large_session_is_deleted_in_several_batches(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let many = (0..600).map(|number| to("root", enqueued(&number.to_string()))).collect();
    fixture.apply(many).await.into_iter().for_each(|sent| drop(sent.unwrap()));
    close(&fixture, "root").await;
    let entries = rows(&fixture)["entries"];
    assert!(entries > 600, "{entries}");
    delete(&fixture, "root").await.unwrap();
    let mut left = entries;
    while fixture.store.delete_batch().await.unwrap() == Remaining::Some {
        let now = rows(&fixture).get("entries").copied().unwrap_or(0);
        assert!(left - now <= 500, "{left} to {now}");
        left = now;
        // Others are served in between.
        if now == entries {
            fixture.create_idle("other").await;
            close(&fixture, "other").await;
            delete(&fixture, "other").await.unwrap();
        }
        if now < 600 {
            break;
        }
    }
    assert!(left > 0, "one batch deleted everything");
    let fixture = fixture.reopen().await;
    finish(&fixture).await;
    assert_eq!(rows(&fixture), BTreeMap::new());
}

pub(crate) async fn sessions_expire_when_they_have_been_closed_for_a_time(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["old", "open", "new"] {
        fixture.send(new(name, Some("hello"))).await.unwrap();
    }
    close(&fixture, "old").await;
    fixture.clock.pass(seconds(100));
    close(&fixture, "new").await;
    let before = fixture.now();
    let expire = async |expiry| fixture.store.expire_sessions(before, None, expiry).await.unwrap();
    assert_eq!((expire(Expiry::Count).await.sessions, listed(&fixture).await.len()), (1, 3));
    let expired = expire(Expiry::Delete).await;
    assert_eq!((expired.sessions, expired.next), (1, None));
    assert_eq!(listed(&fixture).await, ["open", "new"]);
    assert_eq!(expire(Expiry::Delete).await.sessions, 0, "it is marked already");
    finish(&fixture).await;
    assert_eq!(rows(&fixture)["threads"], 2);
}

/// Creates a thread with a history that several batches copy, and a fork of it.
async fn long_source(fixture: &Fixture) {
    fixture.create("source", Some("hello")).await;
    for _ in 0..5 {
        let turn = fixture.head("source").await.turn();
        fixture.send_input("source", answer(turn, "yes")).await.unwrap();
        fixture.send_input("source", user(&"x".repeat(500_000))).await.unwrap();
    }
    let turn = fixture.head("source").await.turn();
    fixture.send_input("source", answer(turn, "yes")).await.unwrap();
    fixture.send(fork("source", "fork")).await.unwrap();
}

pub(crate) async fn a_fork_moves_while_its_source_is_being_deleted(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    long_source(&fixture).await;
    let before = fixture.history("fork").await;
    close(&fixture, "source").await;
    delete(&fixture, "source").await.unwrap();
    let (mut batches, entries) = (0, rows(&fixture)["entries"]);
    loop {
        let remaining = fixture.store.delete_batch().await.unwrap();
        let report = examine(&fixture.database.setting()).await.unwrap();
        assert!(report.is_healthy(), "{:?}", report.findings);
        let (_dir, other) = another();
        import(&other, &export(&*fixture.store, "fork").await.unwrap()).await.unwrap();
        let row = other.thread(&id("fork"), &Visibility::All).await.unwrap();
        let there = other.history(&row.thread, super::fixture::all(row.head.seq())).await.unwrap();
        assert_eq!(there.len(), before.len());
        assert!(there == before, "after batch {batches}");
        if remaining == Remaining::None {
            break;
        }
        batches += 1;
        if batches == 2 {
            assert!(rows(&fixture)["entries"] > entries, "a part is copied");
            assert_eq!(fixture.row("fork").await.forked_from, None, "its source is hidden");
            fixture.store.pack(&id("fork"), &origin(), vec![1]).await.unwrap();
            fixture.store.unpack(&id("fork")).await.unwrap();
        }
    }
    assert!(fixture.history("fork").await == before);
}

pub(crate) async fn a_fork_comes_back_while_the_threads_of_its_source_are_deleted(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create_idle("source").await;
    fixture.send(fork("source", "fork")).await.unwrap();
    let before = fixture.history("fork").await;
    fixture.store.pack(&id("fork"), &origin(), vec![1]).await.unwrap();
    close(&fixture, "source").await;
    delete(&fixture, "source").await.unwrap();
    // No fork inherits from it any more.
    assert_eq!(fixture.store.delete_batch().await.unwrap(), Remaining::Some);
    fixture.store.unpack(&id("fork")).await.unwrap();
    finish(&fixture).await;
    assert_eq!(fixture.history("fork").await, before);
    let report = examine(&fixture.database.setting()).await.unwrap();
    assert!(report.is_healthy(), "{:?}", report.findings);
}

pub(crate) async fn a_session_that_cannot_be_deleted_does_not_block_others(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["source", "head", "other"] {
        fixture.create_idle(name).await;
    }
    fixture.send(fork("source", "fork")).await.unwrap();
    fixture.send(fork("head", "fork_head")).await.unwrap();
    for name in ["source", "head", "other"] {
        close(&fixture, name).await;
        delete(&fixture, name).await.unwrap();
    }
    let run = |sql: &str| fixture.database.execute(sql, sql);
    // The head of a fork is not needed.
    fixture.database.corrupt_head(&id("fork_head"));
    run("UPDATE threads SET user_id = '' WHERE id = 'fork'");
    let failed = fixture.store.delete_batch().await;
    assert!(matches!(failed, Err(Error::Unreadable(_))), "{failed:?}");
    while fixture.store.delete_batch().await.unwrap() == Remaining::Some {}
    assert_eq!(rows(&fixture)["threads"], 3, "the source and two forks");
    run("UPDATE threads SET user_id = NULL WHERE id = 'fork'");
    fixture.clock.pass(seconds(61));
    finish(&fixture).await;
    assert_eq!(rows(&fixture)["threads"], 2);
    assert_eq!(fixture.history("fork").await.len(), 3);
}

pub(crate) async fn a_session_with_a_damaged_thread_is_deleted_on_request_only(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    let child = fixture.head("root").await.children().next().unwrap().clone();
    fixture.send_input("root", Input::Close).await.unwrap();
    fixture.database.corrupt_head(&child);
    for thread in [child, id("root")] {
        fixture.store.set_aside(&Target::Id(thread), "a test".into(), fixture.now()).await.unwrap();
    }
    fixture.clock.pass(seconds(10));
    let expired = fixture.store.expire_sessions(fixture.now(), None, Expiry::Delete).await.unwrap();
    assert_eq!(expired.sessions, 0);
    delete(&fixture, "root").await.unwrap();
    // Other threads get time to close.
    assert_eq!(fixture.store.delete_batch().await.unwrap(), Remaining::Some);
    assert_eq!(fixture.store.delete_batch().await.unwrap(), Remaining::Waiting);
    fixture.clock.pass(seconds(61));
    finish(&fixture).await;
    assert_eq!(rows(&fixture), BTreeMap::new());
}

pub(crate) async fn damaged_entries_stay_as_they_are_in_forks_of_a_deleted_session(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create("source", Some("hello")).await;
    fixture.send_input("source", answer(1, "an answer")).await.unwrap();
    fixture.send_input("source", user("one more")).await.unwrap();
    fixture.send_input("source", answer(2, "another answer")).await.unwrap();
    fixture.send(fork("source", "fork")).await.unwrap();
    let (source, forked) = (fixture.row("source").await.thread, fixture.row("fork").await.thread);
    damage_entry(&fixture, &source, 2, Some("{\"kind\": \"unknown\"}"));
    damage_entry(&fixture, &source, 3, None);
    let before = fixture.history("fork").await;
    close(&fixture, "source").await;
    delete(&fixture, "source").await.unwrap();
    finish(&fixture).await;
    assert_eq!(fixture.history("fork").await, before, "people see the same notices");
    let prompt = fixture.store.prompt_entries(&forked, 4).await;
    assert!(matches!(prompt, Err(Error::Unreadable(_))), "{prompt:?}");
    let report = examine(&fixture.database.setting()).await.unwrap();
    let findings = format!("{:?}", report.findings);
    for damage in ["entry 2 cannot be read", "entry 3 of its history is missing"] {
        assert!(findings.contains(damage), "{findings}");
    }
    // What was there can still be repaired.
    damage_entry(&fixture, &forked, 2, Some("{\"at\": 1, \"kind\": \"notice\", \"text\": \"repaired\"}"));
    let findings = examine(&fixture.database.setting()).await.unwrap().findings;
    assert!(!format!("{findings:?}").contains("entry 2"), "{findings:?}");
}
