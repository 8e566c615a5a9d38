//! Steps are written unchanged.

use std::sync::Arc;

use rap_agent::{Input, Item, Limits, Plan, Seq, Server, Spawn, Status, Write};
use rap_protocol::{CallId, Timestamp};
use serde_json::json;

use super::Database;
use super::fixture::{
    Fixture, SERVER, all, answer, calls, enqueued, entry_text, event, id, inline_event, plans, result,
    seconds, spawns, subscribed, to, user,
};
use crate::store::{
    Committed, Error, Message, SessionToolset, Source, StoredToolset, Target, Thread, ViewKey, Visibility,
    WorkKind,
};

/// Compares the stored data with the last steps: the head of each thread, every entry and every child.
async fn check_written(fixture: &Fixture) {
    let committed = fixture.commits.take();
    assert!(!committed.is_empty());
    for (at, Committed { thread, step, children, .. }) in committed.iter().enumerate() {
        let last = committed[at + 1..].iter().all(|later| later.thread.key != thread.key);
        if last {
            assert_eq!(fixture.head(thread.id.as_str()).await, step.head, "{}", thread.id);
        }
        let mut spawned = children.iter();
        for write in &step.writes {
            match write {
                Write::Append { seq, entry } => {
                    assert_eq!(entry_of(fixture, thread, *seq).await, *entry, "{} {seq}", thread.id);
                }
                Write::Spawn(spawn) => check_child(fixture, thread, spawn, spawned.next().unwrap()).await,
                _ => {}
            }
        }
        assert!(spawned.next().is_none(), "there is a child that the step did not add");
    }
}

async fn entry_of(fixture: &Fixture, thread: &Thread, seq: Seq) -> rap_agent::Entry {
    let page = crate::store::HistoryPage { after: seq - 1, ..all(seq) };
    let mut entries = fixture.store.history(thread, page).await.unwrap();
    assert_eq!(entries.len(), 1);
    entries.remove(0).1
}

async fn check_child(fixture: &Fixture, parent: &Thread, spawn: &Spawn, child: &Arc<Thread>) {
    let row = fixture.store.thread(&spawn.id, &Visibility::All).await.unwrap();
    assert_eq!(*row.thread, **child);
    assert_eq!(row.head, spawn.head);
    assert_eq!((child.incarnation, child.inherits), (spawn.incarnation, spawn.at));
    assert_eq!((child.parent, child.source), (Some(parent.key), Some(parent.key)));
    assert_eq!((child.session, &child.agent), (parent.session, &parent.agent));
    let ancestors: Vec<_> = parent.ancestors.iter().chain([&parent.id]).cloned().collect();
    assert_eq!(child.ancestors, ancestors);
    let history = fixture.store.history(child, all(spawn.head.seq())).await.unwrap();
    let own: Vec<_> =
        history.into_iter().filter(|(seq, _)| *seq > spawn.at).map(|(_, entry)| entry).collect();
    let waited = spawn.backlog.as_ref().map_or(0, |range| range.count as usize);
    assert_eq!(own.len(), waited + spawn.entries.len());
    assert_eq!(own[waited..], spawn.entries);
}

pub(crate) async fn a_step_is_written_unchanged(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    check_written(&fixture).await;
    let open = fixture.call("thread", &[SERVER, SERVER, "http://127.0.0.1:7"]).await;
    check_written(&fixture).await;
    let steps = vec![
        result(&open[0], "done"),
        Input::CallFailed { call: open[1].clone(), text: "Error: refused".into() },
        enqueued("queued"),
        user("joins"),
        answer(2, "an answer"),
        result(&open[2], "late"),
        Input::Notice { text: "for people".into() },
        Input::UnusedAnswer(rap_agent::Usage { input: 1, output: 2, ..rap_agent::Usage::default() }),
        Input::Interrupt,
        user("more"),
        Input::TurnFailed { turn: 4, why: "out of order".into(), retry: rap_agent::TurnRetry::Later },
        Input::Resume,
        Input::Close,
    ];
    for step in steps {
        fixture.clock.pass(seconds(1));
        let name = format!("{step:?}");
        fixture.send_input("thread", step).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        check_written(&fixture).await;
        let row = fixture.row("thread").await;
        assert_eq!(row.updated_at, fixture.now());
        // No entry is missing.
        let seqs: Vec<Seq> = fixture.history("thread").await.into_iter().map(|(seq, _)| seq).collect();
        assert_eq!(seqs, (1..=row.head.seq()).collect::<Vec<_>>(), "{name}");
    }
    assert_eq!(fixture.row("thread").await.thread.created_at, super::fixture::START);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.head("thread").await.status(), Status::Closed);
}

/// Proves: SE-09
pub(crate) async fn a_child_is_written_with_its_entries(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 3)).await.unwrap();
    check_written(&fixture).await;
    fixture.send_input("root", answer(2, "they work")).await.unwrap();
    fixture.send_input("root", user("listen")).await.unwrap();
    let call = fixture.subscribe("root").await;
    fixture.commits.take();
    fixture.send_input("root", event(&call, "an event", Some("e1"))).await.unwrap();
    check_written(&fixture).await;
    let row = fixture.row("root").await;
    assert_eq!(row.head.children().count(), 4);
    let child = row.head.children().last().unwrap().as_str().to_owned();
    // A child of a child.
    fixture.send_input(&child, spawns(1, 1)).await.unwrap();
    check_written(&fixture).await;
    assert_eq!(fixture.texts(&child).await.len(), fixture.head(&child).await.seq() as usize);
}

/// Proves: LC-16
pub(crate) async fn held_input_is_written_to_the_history_in_order_of_arrival(database: Box<dyn Database>) {
    let mut fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let open = fixture.call("thread", &[SERVER, SERVER]).await;
    fixture.send_input("thread", subscribed(&open[0])).await.unwrap();
    for number in 0..30 {
        if number % 10 == 9 {
            fixture = fixture.reopen().await;
        }
        let held = inline_event(&open[0], &format!("event {number}"), None);
        fixture.send_inputs(vec![("thread", held), ("thread", enqueued(&format!("queued {number}")))]).await;
    }
    assert_eq!(fixture.head("thread").await.held().inputs, 30);
    fixture.send_input("thread", result(&open[1], "done")).await.unwrap();
    fixture.send_input("thread", answer(2, "so much happened")).await.unwrap();
    let texts = fixture.texts("thread").await;
    let events: Vec<String> = (0..30).map(|number| format!("event {number}")).collect();
    let queued: Vec<String> = (0..30).map(|number| format!("queued {number}")).collect();
    assert_eq!(texts[..4], ["hello", "2 calls", "subscribed", "done"]);
    let results: Vec<&String> = texts[4..64].iter().skip(1).step_by(2).collect();
    assert_eq!(results, events.iter().collect::<Vec<_>>());
    assert_eq!(texts[64], "so much happened");
    assert_eq!(texts[65..], queued);
    // The numbers of held input are reused.
    fixture.send_inputs(vec![("thread", enqueued("again")), ("thread", answer(3, "fine"))]).await;
    assert_eq!(fixture.texts("thread").await.last().unwrap(), "again");
}

pub(crate) async fn waiting_events_become_the_first_entries_of_a_child(database: Box<dyn Database>) {
    let limits = Limits { event_children: 1, events_per_child: 2, ..Limits::default() };
    let fixture = Fixture::with(database, limits);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let mut child = fixture.spawn("root", &call, "event 0").await;
    for number in 1..=5 {
        fixture.send_input("root", event(&call, &format!("event {number}"), None)).await.unwrap();
    }
    assert_eq!(fixture.head("root").await.backlogs()[0].held.inputs, 5);
    let fixture = fixture.reopen().await;
    for expected in [vec!["event 1", "event 2"], vec!["event 3", "event 4"], vec!["event 5"]] {
        fixture.send_input(&child, answer(1, "handled")).await.unwrap();
        let closed = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
        fixture.commits.take();
        for message in closed {
            fixture.send(super::apply::delivery(&message)).await.unwrap();
        }
        check_written(&fixture).await;
        let next = fixture.head("root").await.children().next().unwrap().as_str().to_owned();
        assert_ne!(next, child);
        child = next;
        let texts = fixture.texts(&child).await;
        let events: Vec<&str> =
            texts.iter().map(String::as_str).filter(|entry_text| entry_text.starts_with("event")).collect();
        assert_eq!(events, expected);
        assert_eq!(texts.last().unwrap(), "spawned");
    }
    assert!(fixture.head("root").await.backlogs()[0].held.is_empty());
}

pub(crate) async fn a_dropped_backlog_is_deleted(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { event_children: 1, ..Limits::default() });
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let waiting = || async {
        let page = fixture
            .store
            .subscriptions(&Visibility::All, crate::store::PageRequest::first(10))
            .await
            .unwrap();
        page.rows.iter().map(|row| row.waiting).collect::<Vec<_>>()
    };
    for number in 0..4 {
        fixture.send_input("root", event(&call, &format!("event {number}"), None)).await.unwrap();
    }
    assert_eq!(waiting().await, [3]);
    fixture.send_input("root", Input::Cancel { call: call.clone() }).await.unwrap();
    assert_eq!(waiting().await, [0; 0]);
    assert!(fixture.texts("root").await.contains(&format!("dropped waiting events of {call}: 3")));
}

fn session_toolset(session: crate::store::SessionKey, hash: &str) -> SessionToolset {
    SessionToolset {
        session,
        server: SERVER.into(),
        toolset: Some(StoredToolset { hash: hash.into(), body: Some(Arc::new(b"{}".to_vec())) }),
        error: None,
        fetched_at: super::fixture::START,
        source: Source::Fetched,
    }
}

pub(crate) async fn a_toolset_is_stored_with_its_step_or_not_at_all(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let session = fixture.session("thread").await;
    let with = |input, hash| Message { toolset: Some(session_toolset(session, hash)), ..to("thread", input) };
    let refused = fixture.send(with(answer(7, "stale"), "refused")).await;
    assert!(matches!(refused, Err(Error::Ignored(rap_agent::Ignored::StaleTurn))));
    assert!(fixture.store.session_toolsets(session).await.unwrap().is_empty());
    assert_eq!(fixture.store.toolset("refused").await.unwrap(), None);
    fixture.send(with(answer(1, "an answer"), "taken")).await.unwrap();
    let held = fixture.store.session_toolsets(session).await.unwrap();
    assert_eq!(held[0].toolset.as_ref().unwrap().hash, "taken");
    assert_eq!(fixture.store.toolset("taken").await.unwrap().unwrap(), b"{}");
}

pub(crate) async fn a_view_replaces_the_previous_one_and_views_are_bounded(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { views: 2, ..Limits::default() });
    fixture.create("thread", Some("hello")).await;
    let open = fixture.call("thread", &[SERVER, "http://127.0.0.1:7"]).await;
    let show = |call: &CallId, view_type: &str, content: i64| Input::View {
        call: call.clone(),
        view_type: view_type.into(),
        content: json!(content),
    };
    let shows =
        [show(&open[0], "a", 1), show(&open[1], "a", 2), show(&open[0], "a", 3), show(&open[0], "b", 4)];
    for show in shows {
        fixture.clock.pass(seconds(1));
        fixture.send_input("thread", show).await.unwrap();
    }
    let key = fixture.key("thread").await;
    let views = fixture.store.views(key, None).await.unwrap();
    let shown: Vec<_> = views
        .rows
        .iter()
        .map(|view| (view.key.server.as_str(), view.key.view_type.as_str(), view.content.clone(), view.at))
        .collect();
    let at = |second: i64| Timestamp(super::fixture::START.0 + 1000 * second);
    assert_eq!(shown, [(SERVER, "a", json!(3), at(3)), (SERVER, "b", json!(4), at(4))]);
    let view = fixture.store.view(key, &views.rows[1].key).await.unwrap().unwrap();
    assert_eq!(view.content, json!(4));
    let gone = ViewKey { server: "http://127.0.0.1:7".into(), view_type: "a".into() };
    assert!(fixture.store.view(key, &gone).await.unwrap().is_none());
    // Of views of the same time, the last one counts as the newest.
    for show in [show(&open[1], "a", 5), show(&open[0], "c", 6), show(&open[0], "0", 7)] {
        fixture.send_input("thread", show).await.unwrap();
        let views = fixture.store.views(key, None).await.unwrap();
        assert_eq!(views.rows.len(), 2);
        let last = fixture.commits.take().pop().unwrap();
        let shown = last.step.writes.iter().find_map(|write| match write {
            Write::View { view_type, .. } => Some(view_type.clone()),
            _ => None,
        });
        assert!(views.rows.iter().any(|view| Some(&view.key.view_type) == shown.as_ref()), "{shown:?}");
    }
}

pub(crate) async fn a_page_of_views_ends_at_a_size(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let call = fixture.call("thread", &[SERVER]).await.remove(0);
    for view_type in ["a", "b", "c", "d", "e"] {
        let content = json!("x".repeat(400 * 1024));
        let show = Input::View { call: call.clone(), view_type: view_type.into(), content };
        fixture.send_input("thread", show).await.unwrap();
    }
    let (mut pages, mut after) = (Vec::new(), None);
    loop {
        let page = fixture.store.views(fixture.key("thread").await, after).await.unwrap();
        pages.push(page.rows.into_iter().map(|view| view.key.view_type).collect::<Vec<_>>().concat());
        after = page.next.map(|key| key.to_string().parse().unwrap());
        if after.is_none() {
            break;
        }
    }
    assert_eq!(pages, ["abc", "de"]);
}

pub(crate) async fn an_approved_call_is_due_from_its_approval(database: Box<dyn Database>) {
    let limits = Limits { call_timeout: Some(seconds(60)), ..Limits::default() };
    let fixture = Fixture::with(database, limits);
    fixture.create("thread", Some("hello")).await;
    let approve = Plan::Approve { server: Server(SERVER.into()), prompt: "Allow tool?".into() };
    fixture.send_input("thread", plans(1, "tool", vec![approve])).await.unwrap();
    let call = fixture.head("thread").await.batch()[0].id.clone();
    assert!(fixture.due(WorkKind::Invoke, SERVER).await.is_empty());
    fixture.clock.pass(seconds(30));
    fixture.send_input("thread", Input::Choose { call: call.clone(), selected: Some(0) }).await.unwrap();
    let due = fixture.due(WorkKind::Invoke, SERVER).await;
    assert_eq!(due.len(), 1);
    let loaded = fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap();
    let Some(crate::store::Work::Invoke(work)) = loaded else { panic!("the call is not due") };
    assert_eq!((work.call.since, work.call.until), (fixture.now(), Some(fixture.now().plus(seconds(60)))));
}

pub(crate) async fn a_timer_is_written_with_its_step(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    fixture.send_input("thread", calls(1, &[SERVER])).await.unwrap();
    let call = fixture.head("thread").await.batch()[0].id.clone();
    let far = Timestamp(i64::MAX);
    let timers =
        || async { fixture.store.due_timers(far, Timestamp(i64::MIN), &[], 10).await.unwrap().len() };
    assert_eq!(timers().await, 0);
    let refused = Input::CallbackRefused { call: call.clone(), why: "413: too large".into() };
    fixture.send_input("thread", refused).await.unwrap();
    assert_eq!(timers().await, 1);
    fixture.send(Message::new(Target::Id(id("thread")), result(&call, "done"))).await.unwrap();
    assert_eq!(timers().await, 0);
    let last = fixture.history("thread").await.pop().unwrap().1.item;
    assert!(matches!(&last, Item::Result { call_id, .. } if *call_id == call), "{}", entry_text(last));
}
