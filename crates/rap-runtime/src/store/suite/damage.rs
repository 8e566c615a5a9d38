//! Damaged rows: a damaged thread is quarantined, all others continue, and the doctor finds the damage.

use rap_agent::{Input, Item, Phase, Seq};

use super::Database;
use super::fixture::{Fixture, SERVER, answer, id, seconds, spawns, user};
use crate::doctor::{Finding, examine};
use crate::store::damage::reason;
use crate::store::{
    Error, HistoryPage, PageRequest, Target, Thread, ThreadFilter, ThreadRow, Visibility, WorkKind,
};

/// Returns why a thread is shown as failed.
fn failure(row: &ThreadRow) -> &str {
    match row.head.phase() {
        Phase::Failed { why, retry_at: None, .. } => why,
        phase => panic!("not failed for good: {phase:?}"),
    }
}

pub(crate) async fn a_thread_that_was_set_aside_is_failed_until_its_next_step(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("bad", Some("hello")).await;
    fixture.create("good", Some("hello")).await;
    let target = Target::Key(fixture.key("bad").await);
    for why in ["the first reason", "the second reason"] {
        fixture.store.set_aside(&target, why.into(), fixture.now()).await.unwrap();
    }
    let fixture = fixture.reopen().await;
    assert_eq!(failure(&fixture.row("bad").await), "the first reason");
    assert!(matches!(fixture.row("good").await.head.phase(), Phase::Asking(_)));
    assert_eq!(fixture.store.counts().await.unwrap().damaged, 1);
    fixture.send_input("bad", answer(1, "an answer")).await.unwrap();
    assert!(matches!(fixture.row("bad").await.head.phase(), Phase::Idle));
    assert_eq!(fixture.store.counts().await.unwrap().damaged, 0);
    let missing = Target::Id(id("missing"));
    fixture.store.set_aside(&missing, "there is no such thread".into(), fixture.now()).await.unwrap();
    assert_eq!(fixture.store.counts().await.unwrap().damaged, 0);
}

/// Deletes an entry, or replaces its body.
pub(super) fn damage_entry(fixture: &Fixture, thread: &Thread, seq: Seq, body: Option<&str>) {
    let number = thread.key.number();
    let (sqlite, postgres) =
        (format!("key = ({number} << 32) + {seq}"), format!("thread = {number} AND seq = {seq}"));
    let change = match body {
        None => "DELETE FROM entries".to_owned(),
        Some(body) => format!("UPDATE entries SET body = '{body}'"),
    };
    fixture.database.execute(&format!("{change} WHERE {sqlite}"), &format!("{change} WHERE {postgres}"));
}

pub(crate) async fn a_history_with_damaged_entries_is_shown_but_not_sent_to_a_model(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    fixture.send_input("thread", answer(1, "an answer")).await.unwrap();
    fixture.send_input("thread", user("one more")).await.unwrap();
    let thread = fixture.row("thread").await.thread;
    assert_eq!(fixture.store.prompt_entries(&thread, 3).await.unwrap().len(), 3);
    let shown = async || {
        let page = HistoryPage { after: 0, up_to: 3, rows: 100, bytes: 100_000 };
        let entries = fixture.store.history(&thread, page).await.unwrap();
        let text = |(seq, entry): (Seq, rap_agent::Entry)| match entry.item {
            Item::User { text, .. } | Item::Assistant { text, .. } | Item::Notice { text } => (seq, text),
            item => panic!("{item:?}"),
        };
        entries.into_iter().map(text).collect::<Vec<_>>()
    };
    let refused = async || {
        let Err(error @ Error::Unreadable(_)) = fixture.store.prompt_entries(&thread, 3).await else {
            panic!("the prompt of a damaged history was built")
        };
        reason(&error)
    };
    damage_entry(&fixture, &thread, 2, None);
    assert!(refused().await.contains("entry 2 of its history is missing"), "{}", refused().await);
    let seen = shown().await;
    assert_eq!(seen.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(seen[1].1.contains("entry 2 of its history is missing"), "{seen:?}");
    damage_entry(&fixture, &thread, 1, Some("{\"kind\": \"unknown\"}"));
    assert!(refused().await.contains("entry 1 of its history cannot be read"), "{}", refused().await);
    assert!(shown().await[0].1.contains("entry 1 of its history cannot be read"));
    damage_entry(&fixture, &thread, 3, None);
    assert!(fixture.store.prompt_entries(&thread, 3).await.is_err());
}

async fn children(fixture: &Fixture, parent: &str) -> Vec<ThreadRow> {
    let parent = Some(id(parent));
    let filter = ThreadFilter { parent, page_request: PageRequest::first(10), ..ThreadFilter::default() };
    fixture.store.threads(filter).await.unwrap().rows
}

pub(crate) async fn a_child_of_a_damaged_or_missing_parent_can_be_read(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    let child = children(&fixture, "root").await.remove(0).thread;
    fixture.database.corrupt_head(&id("root"));
    let fixture = fixture.reopen().await;
    let row = fixture.store.thread(&child.id, &Visibility::All).await.unwrap();
    let whole = fixture.store.prompt_entries(&row.thread, row.head.seq()).await.unwrap();
    assert!(!whole.is_empty());
    let gone = "DELETE FROM threads WHERE id = 'root'";
    fixture.database.execute(&format!("PRAGMA foreign_keys = OFF; {gone}"), gone);
    let row = fixture.store.thread(&child.id, &Visibility::All).await.unwrap();
    assert_eq!(row.root_id, id("root"));
    if row.thread.inherits > 0 {
        let refused = fixture.store.prompt_entries(&row.thread, row.head.seq()).await;
        assert!(matches!(refused, Err(Error::Unreadable(_))), "a part of the history is missing");
    }
}

pub(crate) async fn work_of_a_missing_thread_is_refused(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("gone", Some("hello")).await;
    fixture.call("gone", &[SERVER]).await;
    let (_, key) = fixture.due(WorkKind::Invoke, SERVER).await.remove(0);
    let fixture = fixture.reopen().await;
    let gone = "DELETE FROM threads WHERE id = 'gone'";
    fixture.database.execute(&format!("PRAGMA foreign_keys = OFF; {gone}"), gone);
    let refused = fixture.store.load_work(&key, fixture.now()).await;
    assert!(matches!(refused, Err(Error::Unreadable(_))));
    fixture.store.postpone(&key, fixture.now().plus(seconds(60)), 1, "unreadable".into()).await.unwrap();
    assert!(fixture.due(WorkKind::Invoke, SERVER).await.is_empty());
}

/// Makes threads in many states.
async fn fill(fixture: &Fixture) {
    for name in ["asks", "idle", "calls", "head", "entry", "gap", "end", "row", "spawns"] {
        fixture.create(name, Some("hello")).await;
    }
    for name in ["idle", "entry", "gap", "end"] {
        fixture.send_input(name, answer(1, "an answer")).await.unwrap();
        fixture.send_input(name, user("one more")).await.unwrap();
    }
    fixture.call("calls", &[SERVER, SERVER]).await;
    fixture.send_input("calls", user("held")).await.unwrap();
    fixture.call("row", &[SERVER]).await;
    fixture.subscribe("asks").await;
    fixture.send_input("spawns", spawns(1, 2)).await.unwrap();
    fixture.create("closed", Some("hello")).await;
    fixture.send_input("closed", Input::Close).await.unwrap();
}

pub(crate) async fn a_doctor_finds_nothing_in_a_healthy_store(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fill(&fixture).await;
    let report = examine(&fixture.database.setting()).await.unwrap();
    assert!(report.is_healthy(), "{:?}", report.findings);
    assert!(report.threads >= 10 && report.entries >= 10 && report.calls >= 3, "{report:?}");
}

pub(crate) async fn a_doctor_finds_and_explains_each_kind_of_damage(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fill(&fixture).await;
    let aside = Target::Id(id("idle"));
    fixture.store.set_aside(&aside, "a test".into(), fixture.now()).await.unwrap();
    let thread = async |name| fixture.row(name).await.thread;
    damage_entry(&fixture, &*thread("entry").await, 1, Some("nonsense"));
    damage_entry(&fixture, &*thread("gap").await, 2, None);
    damage_entry(&fixture, &*thread("end").await, 3, None);
    fixture.database.corrupt_head(&id("head"));
    let all = |sql: &str| fixture.database.execute(&format!("PRAGMA foreign_keys = OFF; {sql}"), sql);
    let row = fixture.key("row").await.number();
    all(&format!("DELETE FROM calls WHERE thread = {row}"));
    all("DELETE FROM threads WHERE id = 'spawns'");
    fixture.database.execute("UPDATE letters SET letter = '{'", "UPDATE outbox SET body = '{'");
    let report = examine(&fixture.database.setting()).await.unwrap();
    let found = |kind: &str, thread: Option<&str>, what: &str| {
        let fits = |finding: &&Finding| {
            finding.kind == kind && finding.thread.as_deref() == thread && finding.what.contains(what)
        };
        assert_eq!(report.findings.iter().filter(fits).count(), 1, "{kind} {what}: {:?}", report.findings);
    };
    found("thread", Some("head"), "its stored state cannot be read");
    found("history", Some("entry"), "entry 1 cannot be read: it is not JSON");
    found("history", Some("gap"), "entry 2 of its history is missing");
    found("history", Some("end"), "entry 3 of its history is missing");
    found("call", Some("row"), "the row of its open call");
    found("set_aside", Some("idle"), "a test");
    found("leftover", None, "entries of thread number");
    assert!(report.findings.iter().any(|finding| finding.what.contains("its parent thread is missing")));
    assert!(report.findings.iter().all(|finding| !finding.advice.is_empty()));
    // It only reads.
    let again = examine(&fixture.database.setting()).await.unwrap();
    assert_eq!(again.findings, report.findings);
}
