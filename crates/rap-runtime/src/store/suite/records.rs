//! Toolsets, delivery records and counts; and unreadable threads.

use std::sync::Arc;

use rap_agent::{Input, Status};
use rap_protocol::Timestamp;

use super::Database;
use super::fixture::{
    Fixture, LOST_AFTER, MODEL, SERVER, START, answer, built_in, calls, id, result, seconds, spawns, user,
};
use crate::store::{
    Cursor, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Error, PageRequest, Redelivery,
    SessionKey, SessionToolset, Source, StoredToolset, Target, ThreadFilter, ThreadKey, Visibility, WorkKey,
    WorkKind,
};

const OTHER: &str = "http://127.0.0.1:7";

fn toolset(session: SessionKey, server: &str, hash: Option<&str>, at: u64) -> SessionToolset {
    let stored = |hash: &str| StoredToolset {
        hash: hash.into(),
        body: Some(Arc::new(format!("body of {hash}").into_bytes())),
    };
    SessionToolset {
        session,
        server: server.into(),
        toolset: hash.map(stored),
        error: hash.is_none().then(|| "no answer".into()),
        fetched_at: START.plus(seconds(at)),
        source: Source::Fetched,
    }
}

pub(crate) async fn a_session_keeps_its_toolset_when_a_discovery_fails(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", None).await;
    let session = fixture.session("thread").await;
    let save = async |toolsets| fixture.store.save_toolsets(toolsets).await.unwrap();
    save(vec![toolset(session, SERVER, Some("one"), 1), toolset(session, OTHER, None, 1)]).await;
    let held = async || {
        let held = fixture.store.session_toolsets(session).await.unwrap();
        let shown = held
            .into_iter()
            .map(|held| (held.server, held.toolset.map(|toolset| toolset.hash), held.error, held.fetched_at));
        shown.collect::<Vec<_>>()
    };
    let at = |second| START.plus(seconds(second));
    let error = Some("no answer".to_owned());
    let (other, server) = (OTHER.to_owned(), SERVER.to_owned());
    assert_eq!(
        held().await,
        [(other.clone(), None, error.clone(), at(1)), (server.clone(), Some("one".into()), None, at(1))]
    );
    save(vec![toolset(session, SERVER, None, 2), toolset(session, OTHER, Some("two"), 2)]).await;
    assert_eq!(
        held().await,
        [(other, Some("two".into()), None, at(2)), (server, Some("one".into()), error, at(2))]
    );
    // A toolset that is already stored is saved without its body.
    let known = StoredToolset { hash: "two".into(), body: None };
    save(vec![SessionToolset { toolset: Some(known), ..toolset(session, SERVER, None, 3) }]).await;
    assert_eq!(fixture.store.toolset("two").await.unwrap().unwrap(), b"body of two");
    assert_eq!(fixture.store.toolset("three").await.unwrap(), None);
    assert!(fixture.store.session_toolsets(SessionKey::NONE).await.unwrap().is_empty());
}

/// A stand-in may be saved after the toolset that it stands in for.
pub(crate) async fn a_stand_in_never_replaces_the_toolset_of_a_session(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", None).await;
    let session = fixture.session("thread").await;
    let stand_in =
        |hash| SessionToolset { source: Source::StandIn, ..toolset(session, SERVER, Some(hash), 9) };
    let hash_after = async |saved| {
        fixture.store.save_toolsets(vec![saved]).await.unwrap();
        fixture.store.session_toolsets(session).await.unwrap().remove(0).toolset.map(|toolset| toolset.hash)
    };
    assert_eq!(hash_after(toolset(session, SERVER, None, 1)).await, None);
    assert_eq!(hash_after(stand_in("old")).await.as_deref(), Some("old"));
    assert_eq!(hash_after(toolset(session, SERVER, Some("fetched"), 2)).await.as_deref(), Some("fetched"));
    assert_eq!(hash_after(stand_in("old")).await.as_deref(), Some("fetched"));
}

pub(crate) async fn the_newest_toolset_of_a_server_is_found(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let mut sessions = Vec::new();
    for name in ["a", "b", "c"] {
        fixture.create(name, None).await;
        sessions.push(fixture.session(name).await);
    }
    assert_eq!(fixture.store.newest_toolset(SERVER).await.unwrap(), None);
    let toolsets = vec![
        toolset(sessions[0], SERVER, Some("old"), 1),
        toolset(sessions[1], SERVER, Some("new"), 3),
        toolset(sessions[2], SERVER, Some("middle"), 2),
        toolset(sessions[2], OTHER, Some("other"), 9),
        toolset(sessions[0], OTHER, None, 10),
    ];
    fixture.store.save_toolsets(toolsets).await.unwrap();
    assert_eq!(fixture.store.newest_toolset(SERVER).await.unwrap().as_deref(), Some("new"));
    assert_eq!(fixture.store.newest_toolset(OTHER).await.unwrap().as_deref(), Some("other"));
}

async fn record(
    fixture: &Fixture,
    thread: &str,
    kind: DeliveryKind,
    outcome: DeliveryOutcome,
) -> DeliveryRecord {
    let row = fixture.row(thread).await;
    let call = row.head.open_calls().next().map(|call| call.id.clone());
    DeliveryRecord {
        kind,
        thread: Some(row.thread.key),
        thread_id: Some(row.thread.id.clone()),
        call,
        server: Some(SERVER.into()),
        topic: String::new(),
        outcome,
        attempts: 1,
        detail: "503 of its server".into(),
        at: fixture.now(),
    }
}

pub(crate) async fn deliveries_are_listed_newest_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("a", Some("hello")).await;
    fixture.create("b", Some("hello")).await;
    fixture.call("a", &[SERVER]).await;
    fixture.call("b", &[SERVER]).await;
    let mut records = Vec::new();
    for (thread, outcome) in [("a", DeliveryOutcome::Refused), ("b", DeliveryOutcome::Retrying)] {
        for kind in [DeliveryKind::Invocation, DeliveryKind::Callback] {
            records.push(record(&fixture, thread, kind, outcome).await);
        }
    }
    let nobody = DeliveryRecord { thread: None, call: None, topic: "401".into(), ..records[1].clone() };
    records.push(nobody.clone());
    let ids = fixture.store.record_deliveries(records).await.unwrap();
    assert_eq!(ids.len(), 5);
    // Recorded again, callbacks are counted in the same record.
    let again = DeliveryRecord { detail: "another reason".into(), ..nobody };
    assert_eq!(fixture.store.record_deliveries(vec![again]).await.unwrap(), ids[4..]);
    let list = async |thread: Option<&str>, outcome, before: Option<Cursor>, limit| {
        let filter =
            DeliveryFilter { thread: thread.map(id), outcome, visible: Visibility::All, before, limit };
        fixture.store.deliveries(filter).await.unwrap()
    };
    let all = list(None, None, None, 10).await;
    assert!(all.next.is_none());
    let ids: Vec<String> = ids.into_iter().rev().collect();
    assert_eq!(all.rows.iter().map(|row| row.id.clone()).collect::<Vec<_>>(), ids);
    let newest = &all.rows[0];
    assert_eq!((newest.attempts, newest.detail.as_str(), &newest.thread), (2, "another reason", &None));
    let details: Vec<&str> = newest.last_attempts.iter().map(|attempt| attempt.detail.as_str()).collect();
    assert_eq!(details, ["503 of its server", "another reason"]);
    let (mut pages, mut before) = (Vec::new(), None);
    loop {
        let page = list(None, None, before, 2).await;
        pages.extend(page.rows.into_iter().map(|row| row.id));
        let Some(next) = page.next else { break };
        before = Some(next);
    }
    assert_eq!(pages, ids);
    assert_eq!(list(Some("a"), None, None, 10).await.rows.len(), 2);
    assert_eq!(list(Some("b"), Some(DeliveryOutcome::Retrying), None, 10).await.rows.len(), 2);
    assert_eq!(list(Some("a"), Some(DeliveryOutcome::Retrying), None, 10).await.rows.len(), 0);
    let one = fixture.store.delivery(&ids[4], &Visibility::All).await.unwrap().unwrap();
    assert_eq!((one.kind, one.thread), (DeliveryKind::Invocation, Some(id("a"))));
    assert!(fixture.store.delivery("0", &Visibility::All).await.unwrap().is_none());
    assert!(fixture.store.delivery("x", &Visibility::All).await.unwrap().is_none());
    // Records are kept for some time.
    fixture.clock.pass(seconds(1));
    fixture.store.prune(START, START).await.unwrap();
    assert_eq!(list(None, None, None, 10).await.rows.len(), 5);
    fixture.store.prune(START, fixture.now()).await.unwrap();
    assert_eq!(list(None, None, None, 10).await.rows.len(), 0);
}

/// The last attempts of a delivery are kept, each with its time.
pub(crate) async fn attempts_of_a_delivery_are_kept(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("a", Some("hello")).await;
    fixture.call("a", &[SERVER]).await;
    let first = record(&fixture, "a", DeliveryKind::Invocation, DeliveryOutcome::Retrying).await;
    let mut ids = Vec::new();
    for attempts in 1..=40 {
        fixture.clock.pass(seconds(1));
        let detail = format!("attempt\n{attempts}");
        let again = DeliveryRecord { attempts, detail, at: fixture.now(), ..first.clone() };
        ids = fixture.store.record_deliveries(vec![again]).await.unwrap();
    }
    let delivery = fixture.store.delivery(&ids[0], &Visibility::All).await.unwrap().unwrap();
    assert_eq!((delivery.attempts, delivery.detail.as_str()), (40, "attempt 40"));
    let details: Vec<String> = delivery.last_attempts.iter().map(|attempt| attempt.detail.clone()).collect();
    assert_eq!(details, (9..=40).map(|number| format!("attempt {number}")).collect::<Vec<_>>());
    let at = |index: usize| delivery.last_attempts[index].at;
    assert_eq!((at(0).plus(seconds(31)), at(31)), (delivery.last_at, delivery.last_at));
}

pub(crate) async fn a_retried_delivery_ends_with_its_call(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let mut ids = Vec::new();
    for name in ["open", "returned", "failed", "cancelled"] {
        fixture.create(name, Some("hello")).await;
        let call = fixture.call(name, &[SERVER]).await.remove(0);
        let key = WorkKey::Invoke { thread: fixture.key(name).await, call: call.clone() };
        fixture.store.postpone(&key, fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
        let retrying = record(&fixture, name, DeliveryKind::Invocation, DeliveryOutcome::Retrying).await;
        ids.extend(fixture.store.record_deliveries(vec![retrying]).await.unwrap());
        let input = match name {
            "returned" => result(&call, "done"),
            "failed" => Input::CallFailed { call, text: "Error: given up".into() },
            "cancelled" => Input::Cancel { call },
            _ => continue,
        };
        fixture.send_input(name, input).await.unwrap();
    }
    let mut outcomes = Vec::new();
    for id in ids {
        let row = fixture.store.delivery(&id, &Visibility::All).await.unwrap().unwrap();
        outcomes.push((row.outcome, row.next_at));
    }
    let next = Some(fixture.now().plus(seconds(60)));
    assert_eq!(
        outcomes,
        [
            (DeliveryOutcome::Retrying, next),
            (DeliveryOutcome::Delivered, None),
            (DeliveryOutcome::GivenUp, None),
            (DeliveryOutcome::Dropped, None)
        ]
    );
}

pub(crate) async fn an_invocation_is_redelivered_on_request(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let call = fixture.call("thread", &[SERVER]).await.remove(0);
    let thread = fixture.key("thread").await;
    let key = WorkKey::Invoke { thread, call: call.clone() };
    fixture.store.postpone(&key, fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
    let retrying = record(&fixture, "thread", DeliveryKind::Invocation, DeliveryOutcome::Retrying).await;
    let refused = record(&fixture, "thread", DeliveryKind::Callback, DeliveryOutcome::Refused).await;
    let ids = fixture.store.record_deliveries(vec![retrying, refused]).await.unwrap();
    let redeliver =
        async |id: String| fixture.store.redeliver(&id, &Visibility::All, fixture.now()).await.unwrap();
    let invocation = ids[0].clone();
    assert_eq!(redeliver(ids[1].clone()).await, Redelivery::NotAnInvocation);
    assert_eq!(redeliver("0".into()).await, Redelivery::NoSuchDelivery);
    assert_eq!(redeliver("x".into()).await, Redelivery::NoSuchDelivery);
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await.len(), 0);
    assert_eq!(redeliver(invocation.clone()).await, Redelivery::Due);
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await.len(), 1);
    fixture.store.acknowledge(vec![(thread, call.clone())], fixture.now()).await.unwrap();
    assert_eq!(redeliver(invocation.clone()).await, Redelivery::AlreadyDelivered);
    fixture.send_input("thread", result(&call, "done")).await.unwrap();
    assert_eq!(redeliver(invocation).await, Redelivery::CallSettled);
}

pub(crate) async fn threads_and_work_are_counted(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["asks", "retries", "closed", "idle", "calls"] {
        fixture.create(name, Some("hello")).await;
    }
    let retry = WorkKey::Ask { thread: fixture.key("retries").await, turn: 1 };
    fixture.store.postpone(&retry, fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
    fixture.send_input("closed", spawns(1, 1)).await.unwrap();
    fixture.send_input("closed", Input::Close).await.unwrap();
    fixture.send_input("idle", answer(1, "an answer")).await.unwrap();
    let open = fixture.call("calls", &[SERVER, SERVER, SERVER]).await;
    let thread = fixture.key("calls").await;
    fixture.store.acknowledge(vec![(thread, open[0].clone())], fixture.now()).await.unwrap();
    let retry = WorkKey::Invoke { thread, call: open[1].clone() };
    fixture.store.postpone(&retry, fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
    let fixture = fixture.reopen().await;
    let counts = fixture.store.counts().await.unwrap();
    let expected =
        [("closed", 1), ("failed", 0), ("running", 3), ("needs_you", 0), ("waiting", 1), ("idle", 1)];
    assert_eq!(counts.threads, expected);
    assert_eq!(counts.waiting, [("ask", 3), ("invoke", 2), ("answer", 0), ("letter", 1)]);
    assert_eq!(counts.disabled, 0);
    let mut text = rap_io::metrics::Exposition::default();
    fixture.store.expose(&mut text);
}

/// Proves: LC-20, LC-37
pub(crate) async fn an_unreadable_thread_does_not_block_others(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let names = ["first", "bad", "good"];
    for name in names {
        fixture.create(name, Some("hello")).await;
        let open = fixture.call(name, &[SERVER, SERVER, SERVER]).await;
        let url = rap_protocol::AuthUrl::new("https://example.com/sign-in").unwrap();
        fixture.send_input(name, Input::SignInRequested { call: open[0].clone(), url }).await.unwrap();
        fixture.store.acknowledge(vec![(fixture.key(name).await, open[1].clone())], START).await.unwrap();
        let new = format!("{name}_asks");
        fixture.create(&new, Some("hello")).await;
    }
    fixture.create("sleeps", Some("hello")).await;
    let sleep = rap_agent::BuiltIn::SleepUntil { until: START.plus(seconds(1)) };
    fixture.send_input("sleeps", built_in(1, vec![sleep])).await.unwrap();
    let fixture = fixture.reopen().await;
    let thread = fixture.row("bad").await.thread;
    for corrupted in ["bad", "bad_asks", "sleeps"] {
        fixture.database.corrupt_head(&id(corrupted));
    }
    // It refuses messages; other messages of the batch are applied.
    let results = fixture
        .apply(vec![
            super::fixture::to("good", user("one")),
            super::fixture::to("bad", user("one")),
            super::fixture::to("first", user("one")),
            crate::store::Message::new(Target::Key(thread.key), Input::Close),
        ])
        .await;
    assert!(results[0].is_ok() && results[2].is_ok());
    for at in [1, 3] {
        assert!(matches!(results[at], Err(Error::Unreadable(_))));
    }
    let bad = fixture.store.thread(&id("bad"), &Visibility::All).await.unwrap();
    let rap_agent::Phase::Failed { why, retry_at: None, .. } = bad.head.phase() else { panic!("not failed") };
    assert!(why.contains("its stored state cannot be read"), "{why}");
    unreadable_threads_are_listed_as_failed(&fixture).await;
    fixture.clock.pass(LOST_AFTER);
    unreadable_work_does_not_block_others(&fixture, thread.key).await;
    an_unreadable_timer_is_refused_and_postponed(&fixture).await;
    fixture.send_input("good", calls(2, &[SERVER])).await.unwrap();
}

async fn unreadable_threads_are_listed_as_failed(fixture: &Fixture) {
    let filter = ThreadFilter { page_request: PageRequest::first(100), ..ThreadFilter::default() };
    let listed = fixture.store.threads(filter).await.unwrap();
    let listed: Vec<_> = listed.rows.iter().map(|row| row.thread.id.as_str()).collect();
    assert_eq!(listed, ["first", "first_asks", "bad", "bad_asks", "good", "good_asks", "sleeps"]);
    for name in ["bad", "sleeps"] {
        fixture.store.set_aside(&Target::Id(id(name)), "a test".into(), fixture.now()).await.unwrap();
    }
    let failed = ThreadFilter {
        status: Some(Status::Failed),
        page_request: PageRequest::first(100),
        ..ThreadFilter::default()
    };
    let failed = fixture.store.threads(failed).await.unwrap();
    let failed: Vec<_> = failed.rows.iter().map(|row| row.thread.id.as_str()).collect();
    assert_eq!(failed, ["bad", "sleeps"]);
    assert_eq!(fixture.store.counts().await.unwrap().damaged, 2);
    let filter = ThreadFilter {
        status: Some(Status::Running),
        page_request: PageRequest::first(2),
        ..ThreadFilter::default()
    };
    let page = fixture.store.threads(filter.clone()).await.unwrap();
    let next = page.next.expect("there is another page");
    let filter = ThreadFilter { page_request: PageRequest { after: next, limit: 100 }, ..filter };
    let rest = fixture.store.threads(filter).await.unwrap();
    let running: Vec<_> = page.rows.iter().chain(&rest.rows).map(|row| row.thread.id.as_str()).collect();
    assert_eq!(running, ["first", "first_asks", "good", "good_asks"]);
    let inbox = fixture.store.inbox(None, &Visibility::All, PageRequest::first(100)).await.unwrap();
    let asking: Vec<_> = inbox.rows.iter().map(|item| item.thread.as_str()).collect();
    assert_eq!(asking, ["first", "good"]);
}

async fn unreadable_work_does_not_block_others(fixture: &Fixture, bad: ThreadKey) {
    for (kind, destination) in [(WorkKind::Ask, MODEL), (WorkKind::Invoke, SERVER), (WorkKind::Check, SERVER)]
    {
        let (mut loaded, mut unreadable) = (Vec::new(), Vec::new());
        for (_, key) in fixture.due(kind, destination).await {
            match fixture.store.load_work(&key, fixture.now()).await {
                Ok(work) => loaded.extend(work.map(|_| key)),
                Err(error) => {
                    assert!(matches!(error, Error::Unreadable(_)));
                    let later = fixture.now().plus(seconds(600));
                    fixture.store.postpone(&key, later, 1, "unreadable".into()).await.unwrap();
                    unreadable.push(key);
                }
            }
        }
        assert!(!loaded.is_empty() && !unreadable.is_empty());
        let due = fixture.due(kind, destination).await;
        assert!(!due.iter().any(|(_, key)| unreadable.contains(key)));
        let of_bad = |key: &WorkKey| {
            let (WorkKey::Ask { thread: of, .. }
            | WorkKey::Invoke { thread: of, .. }
            | WorkKey::Answer { thread: of, .. }
            | WorkKey::Check { thread: of, .. }) = key;
            *of == bad
        };
        assert!(!loaded.iter().any(of_bad), "{kind:?}");
    }
}

async fn an_unreadable_timer_is_refused_and_postponed(fixture: &Fixture) {
    let now = fixture.now();
    let timers = fixture.store.due_timers(now, Timestamp(i64::MIN), &[], 10).await.unwrap();
    assert_eq!(timers.len(), 1);
    let fire = crate::store::Message::new(
        Target::Key(timers[0].thread),
        Input::TimerFired { call: timers[0].call.clone().unwrap() },
    );
    assert!(matches!(fixture.send(fire).await, Err(Error::Unreadable(_))));
    fixture.store.postpone_due(timers, Vec::new(), now, now.plus(seconds(60))).await.unwrap();
    assert!(fixture.store.due_timers(now, Timestamp(i64::MIN), &[], 10).await.unwrap().is_empty());
}

pub(crate) async fn a_store_is_readable_until_it_is_closed(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.store.is_readable().await.unwrap();
    fixture.store.close().await;
    assert!(matches!(fixture.store.is_readable().await, Err(Error::Closed)));
}
