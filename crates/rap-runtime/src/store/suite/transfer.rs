//! Sessions that move: exports, parcels, and imports into this and another database.

use std::sync::Arc;

use rap_agent::{Bounds, Budgets, BuiltIn, Choice, Input, Limits, Usage};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ResponseUrl, ThreadId};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use super::Database;
use super::damage::damage_entry;
use super::fixture::{
    Fixture, ManualClock, SERVER, START, answer, built_in, enqueued, event, id, inline_event, new, result,
    rules, seconds, spawns, subscribed, user,
};
use crate::store::transfer::{Origin, ParcelState, Record, ThreadRecord, TokenThread};
use crate::store::{
    DeliveryKind, DeliveryOutcome, DeliveryRecord, Error, IdempotencyKey, Message, SessionToolset, Source,
    SqliteStore, Store, StoredToolset, Target, Transfer as _, Visibility, WorkKey, WorkKind,
};

pub(super) fn origin() -> Origin {
    Origin { key_id: "7777".into(), key_ids: Vec::new(), public_url: "http://127.0.0.1:7420".into() }
}

pub(super) fn limits() -> Limits {
    let bounds = Bounds { turns: Some(1000), ..Bounds::default() };
    let budgets = Budgets { in_total: bounds, ..Budgets::default() };
    Limits { budgets, event_children: 1, ..Limits::default() }
}

/// Creates a session with rows of every kind.
pub(super) async fn full_session(fixture: &Fixture, root: &str) -> CallId {
    let key = IdempotencyKey { key: [root.len() as u8; 32], former_key: None, request: [1; 32] };
    let begin = Message { idempotency_key: Some(key), ..new(root, Some("hello")) };
    fixture.send(begin).await.unwrap();
    let subscription = fixture.subscribe(root).await;
    fixture.send_input(root, inline_event(&subscription, "first", Some("e1"))).await.unwrap();
    fixture.send_input(root, event(&subscription, "second", Some("e2"))).await.unwrap();
    fixture.send_input(root, event(&subscription, "third", Some("e3"))).await.unwrap();
    let turn = fixture.head(root).await.turn();
    fixture.send_input(root, spawns(turn, 1)).await.unwrap();
    let head = fixture.head(root).await;
    let hurry = |child: &ThreadId| {
        let (thread_id, message) = (child.as_str().to_owned(), "hurry".to_owned());
        BuiltIn::SendMessageToChild { thread_id, message }
    };
    let messages = head.children().map(hurry).collect();
    fixture.send_input(root, built_in(head.turn(), messages)).await.unwrap();
    let turn = fixture.head(root).await.turn();
    let ended = fixture.call(root, &[SERVER]).await.remove(0);
    fixture.send_input(root, subscribed(&ended)).await.unwrap();
    fixture.send_input(root, inline_event(&ended, "only", Some("e9"))).await.unwrap();
    fixture.send_input(root, Input::SubscriptionLost { call: ended }).await.unwrap();
    assert!(fixture.head(root).await.turn() > turn);
    let turn = fixture.head(root).await.turn();
    let usage = Usage::default();
    fixture.send_input(root, Input::Summarised { turn, text: "so far".into(), usage }).await.unwrap();
    let open = fixture.call(root, &[SERVER, SERVER]).await;
    let choice = Choice {
        prompt: "Which?".into(),
        choices: vec!["red".into(), "green".into()],
        default: 0,
        response_url: ResponseUrl::new(format!("{SERVER}/answers/1")).unwrap(),
        digest: 1,
    };
    fixture.send_input(root, Input::ChoiceRequested { call: open[0].clone(), choice }).await.unwrap();
    let view =
        Input::View { call: open[0].clone(), view_type: "progress".into(), content: json!({"done": 0.5}) };
    fixture.send_input(root, view).await.unwrap();
    fixture.send_input(root, enqueued("later")).await.unwrap();
    let row = fixture.row(root).await;
    let work = WorkKey::Invoke { thread: row.thread.key, call: open[1].clone() };
    fixture.store.postpone(&work, START.plus(seconds(90)), 2, "503".into()).await.unwrap();
    let delivery = DeliveryRecord {
        kind: DeliveryKind::Invocation,
        thread: Some(row.thread.key),
        thread_id: Some(id(root)),
        call: Some(open[1].clone()),
        server: Some(SERVER.into()),
        topic: String::new(),
        outcome: DeliveryOutcome::Retrying,
        attempts: 2,
        detail: "503".into(),
        at: START,
    };
    fixture.store.record_deliveries(vec![delivery]).await.unwrap();
    let body = b"the toolset".to_vec();
    let hash: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    let toolset = SessionToolset {
        session: row.thread.session,
        server: SERVER.into(),
        toolset: Some(StoredToolset { hash, body: Some(Arc::new(body)) }),
        error: None,
        fetched_at: START,
        source: Source::Fetched,
    };
    fixture.store.save_toolsets(vec![toolset]).await.unwrap();
    open[0].clone()
}

/// Returns the records of a session, in an order that does not depend on the database.
pub(super) async fn export(store: &dyn Store, session: &str) -> Result<Vec<String>, Error> {
    let (sender, mut receiver) = mpsc::channel(4);
    let session = id(session);
    let origin = origin();
    let receive = async {
        let mut records = Vec::new();
        while let Some(record) = receiver.recv().await {
            records.push(record);
        }
        records
    };
    let (sent, records) = tokio::join!(store.export(&session, &origin, sender), receive);
    sent.map(|()| records)
}

/// Leaves out what differs between databases: keys, and the time of the export. Rows are in any order.
fn comparable(records: &[String]) -> Vec<Value> {
    let mut records: Vec<Value> = records.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    for record in &mut records {
        for (kind, field) in [("session", "exported_at"), ("thread", "key")] {
            if let Some(fields) = record.get_mut(kind).and_then(Value::as_object_mut) {
                fields.remove(field);
            }
        }
    }
    records.sort_by_key(Value::to_string);
    records
}

fn kinds(records: &[String]) -> Vec<String> {
    let kind = |text: &String| {
        let value: Value = serde_json::from_str(text).unwrap();
        value.as_object().unwrap().keys().next().unwrap().clone()
    };
    let mut kinds: Vec<String> = records.iter().map(kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

pub(super) async fn import(store: &dyn Store, records: &[String]) -> Result<(), Error> {
    let Ok(Record::Session(header)) = Record::read(&records[0]) else { panic!("no header") };
    store.begin_parcel(&header.session).await?;
    for (at, records) in records.chunks(7).enumerate() {
        store.add_records(&header.session, at as u64 * 7, records.to_vec()).await?;
    }
    store.unpack(&header.session).await
}

/// Deletes a session, as the end of a move does.
async fn remove(store: &dyn Store, session: &str) {
    store.pack(&id(session), &origin(), vec![1]).await.unwrap();
    store.mark_left(&id(session), &[1]).await.unwrap();
    store.drop_parcel(&id(session)).await.unwrap();
}

/// A SQLite database beside the one under test.
pub(super) fn another() -> (tempfile::TempDir, SqliteStore) {
    let dir = tempfile::tempdir().unwrap();
    let key = Key::parse(&"7".repeat(64)).unwrap();
    let clock = Arc::new(ManualClock::new());
    let path = dir.path().join("other.db");
    let store = SqliteStore::open(&path, key, rules(limits()), clock, Box::new(|_| ())).unwrap();
    (dir, store)
}

pub(crate) async fn a_session_moves_to_another_database_and_back(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, limits());
    fixture.create_idle("before").await;
    let call = full_session(&fixture, "root").await;
    let child = fixture.head("root").await;
    assert!(child.open_calls().count() > 0);
    let (_dir, other) = another();
    let records = export(&*fixture.store, "root").await.unwrap();
    let all: Vec<&str> = crate::store::transfer::TABLES.iter().map(|table| table.name).collect();
    for kind in all {
        assert!(kinds(&records).iter().any(|found| found == kind), "the session has no {kind}");
    }
    import(&other, &records).await.unwrap();
    let there = export(&other, "root").await.unwrap();
    assert_eq!(comparable(&records), comparable(&there));
    // It comes back, with other keys.
    let token_key = fixture.key("root").await;
    let named = TokenThread { key: token_key, incarnation: fixture.row("root").await.thread.incarnation };
    fixture.store.pack(&id("root"), &origin(), vec![1]).await.unwrap();
    fixture.store.mark_left(&id("root"), &[1]).await.unwrap();
    assert_eq!(fixture.store.moved_to(named).await.unwrap(), None);
    // The outcome of a first attempt may be unknown.
    for _ in 0..2 {
        fixture.store.depart(&id("root"), vec![named], "http://there").await.unwrap();
    }
    assert_eq!(fixture.store.moved_to(named).await.unwrap().as_deref(), Some("http://there"));
    let other_incarnation = TokenThread { incarnation: named.incarnation ^ 1, ..named };
    assert_eq!(fixture.store.moved_to(other_incarnation).await.unwrap(), None);
    assert!(fixture.store.parcels().await.unwrap().is_empty());
    assert!(matches!(fixture.store.thread(&id("root"), &Visibility::All).await, Err(Error::NoThread)));
    assert!(matches!(export(&*fixture.store, "root").await, Err(Error::NoThread)));
    fixture.create_idle("between").await;
    import(&*fixture.store, &there).await.unwrap();
    assert_eq!(fixture.store.moved_to(named).await.unwrap(), None, "it is here again");
    let back = export(&*fixture.store, "root").await.unwrap();
    assert_eq!(comparable(&records), comparable(&back));
    // It continues: a callback to the old URL arrives, and work is due.
    let row = fixture.row("root").await;
    assert_ne!(row.thread.key, token_key);
    assert_eq!(row.thread.token_key, token_key);
    let incarnation = row.thread.incarnation;
    assert_eq!(fixture.store.moved_thread(token_key, incarnation).await.unwrap(), Some(row.thread.key));
    assert_eq!(fixture.store.moved_thread(token_key, incarnation ^ 1).await.unwrap(), None);
    let target = Target::Token { key: row.thread.key, incarnation, id: id("root") };
    fixture.send(Message::new(target, result(&call, "green"))).await.unwrap();
    assert!(fixture.texts("root").await.contains(&"green".to_owned()));
    let due = fixture.due(WorkKind::Invoke, SERVER).await;
    assert_eq!(due.len(), 0, "the retry is not due yet");
    fixture.clock.pass(seconds(91));
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await.len(), 1);
    let messages = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    assert!(messages.iter().all(|message| message.session == row.thread.session));
}

pub(crate) async fn a_packed_session_is_not_in_use_and_comes_back_unchanged(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, limits());
    let call = full_session(&fixture, "root").await;
    let key = fixture.key("root").await;
    let counts = fixture.store.counts().await.unwrap().threads;
    let records = export(&*fixture.store, "root").await.unwrap();
    fixture.store.pack(&id("root"), &origin(), vec![9]).await.unwrap();
    assert!(fixture.store.counts().await.unwrap().threads.iter().all(|(_, count)| *count == 0));
    let sent = fixture.send_input("root", result(&call, "lost?")).await;
    assert!(matches!(sent, Err(Error::NoThread)), "{sent:?}");
    assert!(fixture.due(WorkKind::Invoke, SERVER).await.is_empty());
    assert_eq!(fixture.store.next_due(START).await.unwrap(), None);
    assert_eq!(fixture.store.parcel_of(&id("root")).await.unwrap(), Some(ParcelState::Leaving));
    assert_eq!(fixture.store.parcel_of(&id("other")).await.unwrap(), None);
    let root = fixture.store.parcel_root(&id("root")).await.unwrap().unwrap();
    assert!(matches!(Record::read(&root), Ok(Record::Thread(thread)) if thread.id == id("root")), "{root}");
    assert_eq!(fixture.store.parcel_root(&id("other")).await.unwrap(), None);
    let parcels = fixture.store.parcels().await.unwrap();
    assert_eq!((parcels.len(), parcels[0].peer.as_slice()), (1, [9].as_slice()));
    let again = fixture.store.pack(&id("root"), &origin(), vec![9]).await;
    assert!(matches!(again, Err(Error::Moving)), "{again:?}");
    assert!(matches!(fixture.store.begin_parcel(&id("root")).await, Err(Error::Exists)));
    // Also after a restart.
    let fixture = fixture.reopen().await;
    let (mut packed, mut from) = (Vec::new(), 0);
    loop {
        let page = fixture.store.records(&id("root"), from).await.unwrap();
        if page.is_empty() {
            break;
        }
        from += page.len() as u64;
        packed.extend(page);
    }
    assert_eq!(comparable(&packed), comparable(&records));
    // A new thread does not get the key of a packed one, for which work may still be in progress.
    fixture.create_idle("new").await;
    assert_ne!(fixture.key("new").await, key);
    remove(&*fixture.store, "new").await;
    fixture.store.unpack(&id("root")).await.unwrap();
    assert_eq!(fixture.key("root").await, key);
    assert_eq!(fixture.store.counts().await.unwrap().threads, counts);
    assert_eq!(comparable(&export(&*fixture.store, "root").await.unwrap()), comparable(&records));
    assert!(fixture.store.parcels().await.unwrap().is_empty());
    assert_eq!(fixture.store.parcel_of(&id("root")).await.unwrap(), None);
    fixture.send_input("root", result(&call, "not lost")).await.unwrap();
}

pub(crate) async fn a_parcel_that_has_left_goes_back_into_use_only_if_it_is_reclaimed(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create_idle("root").await;
    let left = async |peer: &[u8]| fixture.store.mark_left(&id("root"), peer).await;
    assert!(matches!(left(&[9]).await, Err(Error::NoThread)));
    fixture.store.pack(&id("root"), &origin(), vec![8]).await.unwrap();
    fixture.store.unpack(&id("root")).await.unwrap();
    // The move was undone, so it must not end. Another one has begun.
    assert!(matches!(left(&[8]).await, Err(Error::NoThread)));
    fixture.store.pack(&id("root"), &origin(), vec![9]).await.unwrap();
    assert!(matches!(left(&[8]).await, Err(Error::NoThread)));
    // It can be repeated, because the outcome of the first attempt may be unknown.
    left(&[9]).await.unwrap();
    left(&[9]).await.unwrap();
    assert!(matches!(fixture.store.unpack(&id("root")).await, Err(Error::Moving)));
    fixture.store.reclaim(&id("root")).await.unwrap();
    fixture.store.unpack(&id("root")).await.unwrap();
    assert_eq!(fixture.history("root").await.len(), 2);
    fixture.store.pack(&id("root"), &origin(), vec![9]).await.unwrap();
    left(&[9]).await.unwrap();
    fixture.store.drop_parcel(&id("root")).await.unwrap();
    fixture.store.reclaim(&id("root")).await.unwrap();
    assert!(matches!(fixture.store.unpack(&id("root")).await, Err(Error::NoThread)));
}

pub(crate) async fn a_damaged_session_is_not_packed(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["entry", "head", "source"] {
        fixture.create_idle(name).await;
    }
    let target = Target::Fork { source: id("source"), at: None, id: id("fork"), incarnation: 5 };
    fixture.send(Message::new(target, Input::Begin { message: None })).await.unwrap();
    damage_entry(&fixture, &fixture.row("entry").await.thread, 1, Some("nonsense"));
    damage_entry(&fixture, &fixture.row("source").await.thread, 1, Some("nonsense"));
    fixture.database.corrupt_head(&id("head"));
    for name in ["entry", "head", "source", "fork"] {
        let packed = fixture.store.pack(&id(name), &origin(), vec![9]).await;
        assert!(matches!(packed, Err(Error::Unreadable(_))), "{name}: {packed:?}");
        assert_eq!(fixture.store.parcel_of(&id(name)).await.unwrap(), None, "{name}");
        assert!(fixture.store.thread(&id(name), &Visibility::All).await.is_ok(), "{name} is in use here");
    }
}

pub(crate) async fn what_forks_inherit_moves_with_them_and_stays_with_them(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("source", Some("hello")).await;
    let call = fixture.subscribe("source").await;
    fixture.send_input("source", inline_event(&call, "an event", None)).await.unwrap();
    let turn = fixture.head("source").await.turn();
    fixture.send_input("source", answer(turn, "I see")).await.unwrap();
    let fork = |source: &str, fork: &str| {
        let target = Target::Fork { source: id(source), at: None, id: id(fork), incarnation: 5 };
        Message::new(target, Input::Begin { message: Some("what if".into()) })
    };
    fixture.send(fork("source", "fork")).await.unwrap();
    let turn = fixture.head("fork").await.turn();
    fixture.send_input("fork", answer(turn, "then")).await.unwrap();
    fixture.send(fork("fork", "fork_of_fork")).await.unwrap();
    let before = [fixture.history("fork").await, fixture.history("fork_of_fork").await];
    // The fork moves: its history comes along.
    let (_dir, other) = another();
    import(&other, &export(&*fixture.store, "fork").await.unwrap()).await.unwrap();
    let row = other.thread(&id("fork"), &Visibility::All).await.unwrap();
    let there = other.history(&row.thread, super::fixture::all(row.head.seq())).await.unwrap();
    assert_eq!(there, before[0]);
    assert_eq!(row.forked_from, None);
    // The source moves away: the fork keeps its history.
    remove(&*fixture.store, "source").await;
    assert_eq!(fixture.history("fork").await, before[0]);
    assert_eq!(fixture.history("fork_of_fork").await, before[1]);
    remove(&*fixture.store, "fork").await;
    assert_eq!(fixture.history("fork_of_fork").await, before[1]);
    fixture.send_input("fork_of_fork", user("more")).await.unwrap();
}

pub(crate) async fn an_import_is_repeated_without_harm_and_replaces_nothing(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create_idle("root").await;
    let records = export(&*fixture.store, "root").await.unwrap();
    assert!(matches!(import(&*fixture.store, &records).await, Err(Error::Exists)));
    let (_dir, other) = another();
    // An import that was cut off is begun again.
    other.begin_parcel(&id("root")).await.unwrap();
    other.add_records(&id("root"), 0, records[..2].to_vec()).await.unwrap();
    assert!(matches!(other.unpack(&id("root")).await, Err(Error::Unreadable(_))));
    assert!(matches!(other.thread(&id("root"), &Visibility::All).await, Err(Error::NoThread)));
    import(&other, &records).await.unwrap();
    assert!(matches!(import(&other, &records).await, Err(Error::Exists)));
    assert_eq!(comparable(&export(&other, "root").await.unwrap()), comparable(&records));
    assert!(other.parcels().await.unwrap().is_empty());
    // A child cannot replace the thread of another session.
    let child = |thread: &mut ThreadRecord| thread.id = ThreadId::new("renamed").unwrap();
    let renamed: Vec<String> = records
        .iter()
        .map(|text| match Record::read(text).unwrap() {
            Record::Session(mut header) => {
                header.session = id("renamed");
                Record::Session(header).write()
            }
            Record::Thread(mut thread) => {
                child(&mut thread);
                Record::Thread(thread).write()
            }
            Record::Row(mut row) => {
                row.thread = row.thread.map(|_| id("renamed"));
                Record::Row(row).write()
            }
            end => end.write(),
        })
        .collect();
    let mut both = renamed[..2].to_vec();
    let Record::Thread(mut second) = Record::read(&records[1]).unwrap() else { panic!("no thread") };
    (second.parent, second.source) = (Some(id("renamed")), Some(id("renamed")));
    both.push(Record::Thread(second).write());
    both.push(Record::End(3).write());
    assert!(matches!(import(&other, &both).await, Err(Error::Exists)));
    assert!(matches!(other.thread(&id("renamed"), &Visibility::All).await, Err(Error::NoThread)));
}

pub(crate) async fn root_threads_are_listed_in_order(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["one", "two", "three"] {
        fixture.create(name, None).await;
    }
    let roots = fixture.store.roots(None).await.unwrap();
    let ids: Vec<&str> = roots.iter().map(|(_, id)| id.as_str()).collect();
    assert_eq!(ids, ["one", "two", "three"]);
    let rest = fixture.store.roots(Some(roots[0].0)).await.unwrap();
    assert_eq!(rest, roots[1..]);
}

pub(crate) async fn the_place_of_a_moved_thread_is_kept_while_callbacks_arrive(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create_idle("root").await;
    let thread = fixture.row("root").await.thread;
    let named = TokenThread { key: thread.token_key, incarnation: thread.incarnation };
    fixture.store.pack(&id("root"), &origin(), vec![1]).await.unwrap();
    fixture.store.depart(&id("root"), vec![named], "http://there").await.unwrap();
    let day = seconds(24 * 3600);
    let place = async || {
        fixture.store.prune(START, START).await.unwrap();
        fixture.store.moved_to(named).await.unwrap()
    };
    for _ in 0..3 {
        fixture.clock.pass(day * 364);
        assert_eq!(place().await.as_deref(), Some("http://there"));
    }
    fixture.clock.pass(day * 366);
    assert_eq!(place().await, None);
}
