//! Finding, loading, postponing and settling work.

use std::collections::{BTreeSet, HashSet};

use futures_util::future::join_all;
use rap_agent::{Budgets, Choice, Input, Limits, Plan, Server, StatusCheck, texts};
use rap_protocol::{ResponseUrl, Timestamp};
use serde_json::json;

use super::Database;
use super::fixture::{
    CALLBACK_BASE, Fixture, LOST_AFTER, MODEL, SERVER, answer, calls, enqueued, new, plans, result, seconds,
    spawns, subscribed, to, user,
};
use crate::store::{DuePage, SessionKey, Visibility, Work, WorkKey, WorkKind};

const OTHER: &str = "http://127.0.0.1:7";
/// The kinds whose new work is found by session.
const KINDS: [WorkKind; 3] = [WorkKind::Ask, WorkKind::Invoke, WorkKind::Answer];

/// Makes a fixture with limits that these tests do not reach.
fn without_limits(database: Box<dyn Database>) -> Fixture {
    let limits = Limits {
        children: 10_000,
        open_calls: 10_000,
        questions: 10_000,
        turns_per_wake: 10_000,
        budgets: Budgets::default(),
        ..Limits::default()
    };
    Fixture::with(database, limits)
}

fn destination(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Ask => MODEL,
        _ => SERVER,
    }
}

/// Creates a session with `count` items of work of a kind. Returns them in the order in which they became due.
async fn create_work(fixture: &Fixture, kind: WorkKind, thread: &str, count: usize) -> Vec<WorkKey> {
    fixture.create(thread, Some("hello")).await;
    let key = fixture.key(thread).await;
    match kind {
        WorkKind::Ask => {
            if count == 1 {
                return vec![WorkKey::Ask { thread: key, turn: 1 }];
            }
            // A child has a result for each call of the answer that spawned it.
            let (mut work, mut turn) = (Vec::new(), 1);
            while work.len() < count - 1 {
                fixture.commits.take();
                fixture.send_input(thread, spawns(turn, (count - 1 - work.len()).min(20))).await.unwrap();
                let children = fixture.commits.take().remove(0).children;
                work.extend(children.iter().map(|child| WorkKey::Ask { thread: child.key, turn: 1 }));
                turn += 1;
            }
            work.push(WorkKey::Ask { thread: key, turn });
            work
        }
        WorkKind::Invoke => {
            let calls = fixture.call(thread, &vec![SERVER; count]).await;
            calls.into_iter().map(|call| WorkKey::Invoke { thread: key, call }).collect()
        }
        WorkKind::Answer => {
            let call = fixture.call(thread, &[SERVER]).await.remove(0);
            for digest in 0..count as u64 {
                let requested = choice(&call, digest);
                let chosen = Input::Choose { call: call.clone(), selected: Some(1) };
                fixture.send_inputs(vec![(thread, requested), (thread, chosen)]).await;
            }
            let questions = fixture.head(thread).await;
            questions.questions().iter().map(|q| WorkKey::Answer { thread: key, number: q.number }).collect()
        }
        WorkKind::Check => unreachable!("checks are not created here"),
    }
}

fn choice(call: &rap_protocol::CallId, digest: u64) -> Input {
    let choice = Choice {
        prompt: "Red or green?".into(),
        choices: vec!["red".into(), "green".into()],
        default: 0,
        response_url: ResponseUrl::new(format!("{SERVER}/answers/{digest}")).unwrap(),
        digest,
    };
    Input::ChoiceRequested { call: call.clone(), choice }
}

async fn postpone_all(fixture: &Fixture, keys: &[WorkKey], at: Timestamp) {
    let postponed = keys.iter().map(|key| fixture.store.postpone(key, at, 1, "503".into()));
    for done in join_all(postponed).await {
        done.unwrap();
    }
}

fn keys(work: &[(SessionKey, WorkKey)]) -> Vec<WorkKey> {
    work.iter().map(|(_, key)| key.clone()).collect()
}

/// Starts all work on a page and reads the next page, until no more work can be due.
async fn drain(fixture: &Fixture, kind: WorkKind, sessions: usize, per_session: usize) -> Vec<WorkKey> {
    let mut begun: Vec<WorkKey> = Vec::new();
    let mut after = None;
    for _ in 0..1000 {
        let skip: HashSet<WorkKey> = begun.iter().cloned().collect();
        let page = DuePage { after, sessions, per_session, skip, now: fixture.now() };
        let wrapped = after.is_some();
        let found = fixture.page(kind, destination(kind), page).await;
        let full = found.work.len() >= per_session;
        begun.extend(keys(&found.work));
        after = found.after;
        if after.is_none() && !wrapped && !found.more && !full {
            return begun;
        }
    }
    panic!("there is always another page");
}

pub(crate) async fn new_work_is_found_by_session_in_key_order(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in KINDS {
        let mut expected = Vec::new();
        for number in 0..3 {
            let name = format!("{}_{number}", kind.as_str());
            let work = create_work(&fixture, kind, &name, 3).await;
            let session = fixture.session(&name).await;
            expected.extend(work.into_iter().map(|key| (session, key)));
            fixture.clock.pass(seconds(1));
        }
        let of_kind = |found: Vec<(SessionKey, WorkKey)>| -> Vec<(SessionKey, WorkKey)> {
            found.into_iter().filter(|found| expected.contains(found)).collect()
        };
        let found = of_kind(fixture.due(kind, destination(kind)).await);
        // Items with the same due time have no defined order.
        let sorted = |work: &[(SessionKey, WorkKey)]| work.iter().cloned().collect::<BTreeSet<_>>();
        assert_eq!(sorted(&found), sorted(&expected));
        assert!(found.is_sorted_by_key(|(session, _)| *session), "{found:?}");
        // Pages of one session each give the same result.
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let page = DuePage { after, sessions: 1, ..fixture.due_page() };
            let page = fixture.page(kind, destination(kind), page).await;
            let sessions: BTreeSet<SessionKey> = page.work.iter().map(|(session, _)| *session).collect();
            assert!(sessions.len() <= 1);
            pages.extend(page.work);
            after = page.after;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(of_kind(pages), found);
    }
}

/// The oldest work of each session comes first.
pub(crate) async fn a_page_is_bounded_per_session(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for name in ["a", "b"] {
        fixture.create(name, Some("hello")).await;
        for round in 0..3 {
            fixture.clock.pass(seconds(1));
            fixture.call(name, &[SERVER]).await;
            // The call stays open behind a placeholder result.
            fixture.send_input(name, user(&format!("more {round}"))).await.unwrap();
        }
    }
    let page = DuePage { per_session: 2, ..fixture.due_page() };
    let found = fixture.page(WorkKind::Invoke, SERVER, page).await;
    let mut expected = Vec::new();
    for name in ["a", "b"] {
        let row = fixture.row(name).await;
        let oldest = row.head.background()[..2].iter();
        expected.extend(oldest.map(|call| WorkKey::Invoke { thread: row.thread.key, call: call.id.clone() }));
    }
    assert_eq!(keys(&found.work), expected);
}

pub(crate) async fn work_in_progress_is_left_out(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in KINDS {
        let work = create_work(&fixture, kind, kind.as_str(), 4).await;
        let session = fixture.session(kind.as_str()).await;
        let skip: HashSet<WorkKey> = work[..2].iter().cloned().collect();
        let page = DuePage { per_session: 2, skip, ..fixture.due_page() };
        let found = fixture.page(kind, destination(kind), page).await;
        let found: BTreeSet<WorkKey> =
            found.work.into_iter().filter(|(of, _)| *of == session).map(|(_, key)| key).collect();
        assert_eq!(found, work[2..].iter().cloned().collect());
    }
}

pub(crate) async fn retries_are_found_when_they_are_due(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in KINDS {
        let work = create_work(&fixture, kind, kind.as_str(), 3).await;
        let session = fixture.session(kind.as_str()).await;
        let due = async || {
            let found = fixture.due(kind, destination(kind)).await;
            let mine = found.into_iter().filter(|(of, _)| *of == session);
            mine.map(|(_, key)| key).collect::<Vec<_>>()
        };
        let now = fixture.now();
        fixture.store.postpone(&work[0], now.plus(seconds(20)), 1, "503".into()).await.unwrap();
        fixture.store.postpone(&work[1], now.plus(seconds(10)), 1, "503".into()).await.unwrap();
        assert_eq!(due().await, work[2..]);
        fixture.clock.pass(seconds(10));
        assert_eq!(due().await, [work[1].clone(), work[2].clone()]);
        fixture.clock.pass(seconds(10));
        // The one with the earliest due time comes first.
        assert_eq!(due().await, [work[1].clone(), work[0].clone(), work[2].clone()]);
        // Retries are on every page.
        let page = DuePage { after: Some(session), ..fixture.due_page() };
        let next_page = keys(&fixture.page(kind, destination(kind), page).await.work);
        assert!(
            next_page.contains(&work[0]) && next_page.contains(&work[1]) && !next_page.contains(&work[2])
        );
        assert!(fixture.store.destinations(kind).await.unwrap().contains(&destination(kind).to_owned()));
    }
}

pub(crate) async fn a_session_with_much_new_work_does_not_hide_others(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in KINDS {
        let many = if kind == WorkKind::Answer { 100 } else { 1000 };
        let flood = create_work(&fixture, kind, &format!("{}_flood", kind.as_str()), many).await;
        let other = create_work(&fixture, kind, &format!("{}_other", kind.as_str()), 1).await.remove(0);
        let page = DuePage { sessions: 64, per_session: 4, ..fixture.due_page() };
        let found = keys(&fixture.page(kind, destination(kind), page).await.work);
        assert!(found.contains(&other), "{kind:?}");
        assert_eq!(found.iter().filter(|key| flood.contains(key)).count(), 4);
    }
}

pub(crate) async fn a_session_with_many_retries_does_not_hide_others(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in KINDS {
        let flood = create_work(&fixture, kind, &format!("{}_flood", kind.as_str()), 300).await;
        let other = create_work(&fixture, kind, &format!("{}_other", kind.as_str()), 1).await;
        postpone_all(&fixture, &flood, fixture.now().plus(seconds(1))).await;
        postpone_all(&fixture, &other, fixture.now().plus(seconds(2))).await;
        fixture.clock.pass(seconds(2));
        let page = DuePage { sessions: 64, per_session: 4, ..fixture.due_page() };
        let found = fixture.page(kind, destination(kind), page).await;
        assert!(keys(&found.work).contains(&other[0]), "{kind:?}");
        assert_eq!(found.work.iter().filter(|(_, key)| flood.contains(key)).count(), 4);
        // Postponed, so that they do not interfere with the next kind.
        postpone_all(&fixture, &flood, fixture.now().plus(seconds(3600))).await;
    }
    // Several sessions with many retries do not hide others either.
    let (mut floods, kind) = (Vec::new(), WorkKind::Invoke);
    for number in 0..6 {
        floods.extend(create_work(&fixture, kind, &format!("flood_{number}"), 260).await);
    }
    let other = create_work(&fixture, kind, "other", 1).await;
    postpone_all(&fixture, &floods, fixture.now().plus(seconds(1))).await;
    postpone_all(&fixture, &other, fixture.now().plus(seconds(2))).await;
    fixture.clock.pass(seconds(2));
    let page = DuePage { sessions: 64, per_session: 4, ..fixture.due_page() };
    let found = keys(&fixture.page(kind, SERVER, page).await.work);
    assert!(found.contains(&other[0]));
}

/// Creates sessions with one due retry each.
async fn many_retries(fixture: &Fixture, count: usize) -> Vec<WorkKey> {
    let names: Vec<String> = (0..count).map(|number| format!("thread_{number}")).collect();
    let created = fixture.apply(names.iter().map(|name| new(name, Some("hello"))).collect()).await;
    assert!(created.iter().all(Result::is_ok));
    let work: Vec<WorkKey> = keys(&fixture.due(WorkKind::Ask, MODEL).await);
    assert_eq!(work.len(), count);
    postpone_all(fixture, &work, fixture.now().plus(seconds(1))).await;
    fixture.clock.pass(seconds(1));
    work
}

pub(crate) async fn a_page_reports_that_more_retries_are_due(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let retries = many_retries(&fixture, 300).await;
    let new = create_work(&fixture, WorkKind::Ask, "new", 5).await;
    let found: BTreeSet<WorkKey> = drain(&fixture, WorkKind::Ask, 64, 16).await.into_iter().collect();
    assert_eq!(found, retries.into_iter().chain(new).collect());
}

pub(crate) async fn retries_in_progress_do_not_hide_others(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let retries = many_retries(&fixture, 300).await;
    let other = create_work(&fixture, WorkKind::Ask, "other", 1).await;
    postpone_all(&fixture, &other, fixture.now().plus(seconds(1))).await;
    fixture.clock.pass(seconds(1));
    let page = DuePage { skip: retries.into_iter().collect(), sessions: 64, ..fixture.due_page() };
    let found = fixture.page(WorkKind::Ask, MODEL, page).await;
    assert_eq!(keys(&found.work), other);
}

pub(crate) async fn each_destination_has_its_own_work(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    for kind in WorkKind::ALL {
        assert!(fixture.store.destinations(kind).await.unwrap().is_empty());
    }
    fixture.create("thread", Some("hello")).await;
    fixture.send_input("thread", calls(1, &[SERVER, OTHER, SERVER])).await.unwrap();
    fixture.create("asks", Some("hello")).await;
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await.len(), 2);
    let other = fixture.due(WorkKind::Invoke, OTHER).await;
    assert_eq!(other.len(), 1);
    assert_eq!(fixture.due(WorkKind::Invoke, MODEL).await.len(), 0);
    assert_eq!(fixture.due(WorkKind::Ask, MODEL).await.len(), 1);
    assert_eq!(fixture.store.destinations(WorkKind::Invoke).await.unwrap(), [OTHER, SERVER]);
    assert_eq!(fixture.store.destinations(WorkKind::Ask).await.unwrap(), [MODEL]);
    // A destination that has only retries is listed too.
    postpone_all(&fixture, &keys(&other), fixture.now().plus(seconds(60))).await;
    assert_eq!(fixture.store.destinations(WorkKind::Invoke).await.unwrap(), [OTHER, SERVER]);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await.len(), 2);
    assert_eq!(fixture.due(WorkKind::Ask, MODEL).await.len(), 1);
}

/// A step that does not end the request keeps its destination.
pub(crate) async fn a_model_request_is_moved_to_another_destination(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let work = create_work(&fixture, WorkKind::Ask, "thread", 1).await;
    fixture.store.redirect(&work[0], OTHER).await.unwrap();
    let usage = rap_agent::Usage { input: 1, ..rap_agent::Usage::default() };
    fixture.send_input("thread", Input::UnusedAnswer(usage)).await.unwrap();
    assert!(fixture.due(WorkKind::Ask, MODEL).await.is_empty());
    assert_eq!(keys(&fixture.due(WorkKind::Ask, OTHER).await), work);
    let Some(Work::Ask(_)) = fixture.store.load_work(&work[0], fixture.now()).await.unwrap() else {
        panic!("the work is not due")
    };
    // A request that this node has claimed is moved, too, and a request that is gone is not.
    fixture.store.redirect(&work[0], SERVER).await.unwrap();
    assert_eq!(keys(&fixture.due(WorkKind::Ask, SERVER).await), work);
    let WorkKey::Ask { thread, turn } = work[0] else { panic!("not a model request") };
    fixture.store.redirect(&WorkKey::Ask { thread, turn: turn + 1 }, OTHER).await.unwrap();
    assert_eq!(fixture.store.destinations(WorkKind::Ask).await.unwrap(), [SERVER]);
    // The next request goes to the first model's server, and so does every request after a restart.
    fixture.send_input("thread", user("and?")).await.unwrap();
    assert_eq!(fixture.store.destinations(WorkKind::Ask).await.unwrap(), [MODEL]);
    let moved = fixture.due(WorkKind::Ask, MODEL).await.remove(0).1;
    fixture.store.redirect(&moved, OTHER).await.unwrap();
    let fixture = fixture.reopen().await;
    assert_eq!(keys(&fixture.due(WorkKind::Ask, MODEL).await), [moved]);
}

pub(crate) async fn work_is_loaded_with_everything_an_attempt_needs(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let load = async |key: &WorkKey| fixture.store.load_work(key, fixture.now()).await.unwrap();
    let ask = create_work(&fixture, WorkKind::Ask, "asks", 1).await.remove(0);
    fixture.store.postpone(&ask, fixture.now(), 3, "503".into()).await.unwrap();
    let Some(Work::Ask(work)) = load(&ask).await else { panic!("the work is not due") };
    assert_eq!((work.thread.id.as_str(), work.turn, work.up_to, work.attempts), ("asks", 1, 1, 3));

    let invoke = create_work(&fixture, WorkKind::Invoke, "invokes", 2).await;
    let Some(Work::Invoke(work)) = load(&invoke[1]).await else { panic!("the work is not due") };
    let head = fixture.head("invokes").await;
    assert_eq!(work.call, head.batch()[1]);
    assert_eq!((json!(work.arguments), work.attempts, work.outcome), (json!({"at": 1}), 0, None));
    fixture.store.postpone(&invoke[1], fixture.now(), 2, "503 of it".into()).await.unwrap();
    let Some(Work::Invoke(work)) = load(&invoke[1]).await else { panic!("the work is not due") };
    assert_eq!((work.attempts, work.outcome.as_deref()), (2, Some("503 of it")));

    let answers = create_work(&fixture, WorkKind::Answer, "answers", 2).await;
    let asked_at = fixture.now();
    fixture.clock.pass(seconds(5));
    let Some(Work::Answer(work)) = load(&answers[1]).await else { panic!("the work is not due") };
    assert_eq!(work.response_url.expose(), format!("{SERVER}/answers/1"));
    let WorkKey::Answer { number, .. } = answers[1] else { panic!("not an answer") };
    assert_eq!((work.number, work.selected, work.attempts, work.since), (number, 1, 0, asked_at));
    assert_eq!(work.call, fixture.head("answers").await.batch()[0].id);
    assert_eq!(work.thread.id.as_str(), "answers");
}

pub(crate) async fn a_call_keeps_the_callback_base_that_it_was_sent_with(database: Box<dyn Database>) {
    const OTHER_BASE: &str = "http://127.0.0.1:7421";
    let fixture = without_limits(database);
    let sent = create_work(&fixture, WorkKind::Invoke, "sent", 1).await.remove(0);
    fixture.create("approved", Some("hello")).await;
    let approve = Plan::Approve { server: Server(SERVER.into()), prompt: "Allow tool?".into() };
    fixture.send_input("approved", plans(1, "tool", vec![approve])).await.unwrap();
    let call = fixture.head("approved").await.batch()[0].id.clone();

    let fixture = fixture.reopen_at(OTHER_BASE).await;
    let allowed = Input::Choose { call: call.clone(), selected: Some(texts::ALLOW) };
    fixture.send_input("approved", allowed).await.unwrap();
    let approved = WorkKey::Invoke { thread: fixture.key("approved").await, call };
    let later = create_work(&fixture, WorkKind::Invoke, "later", 1).await.remove(0);

    let fixture = fixture.reopen().await;
    for (key, base) in [(sent, CALLBACK_BASE), (approved, OTHER_BASE), (later, OTHER_BASE)] {
        let Some(Work::Invoke(work)) = fixture.store.load_work(&key, fixture.now()).await.unwrap() else {
            panic!("the work is not due")
        };
        assert_eq!(work.callback_base.as_deref(), Some(base), "{key:?}");
    }
}

pub(crate) async fn settled_or_postponed_work_is_not_loaded(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let is_due = async |key: &WorkKey| fixture.store.load_work(key, fixture.now()).await.unwrap().is_some();
    for kind in KINDS {
        let work = create_work(&fixture, kind, kind.as_str(), 1).await.remove(0);
        assert!(is_due(&work).await);
        fixture.store.postpone(&work, fixture.now().plus(seconds(10)), 1, "503".into()).await.unwrap();
        assert!(!is_due(&work).await, "{kind:?}");
        fixture.clock.pass(seconds(10));
        assert!(is_due(&work).await, "{kind:?}");
    }
    // The model has answered.
    fixture.send_input("ask", answer(1, "done")).await.unwrap();
    assert!(!is_due(&WorkKey::Ask { thread: fixture.key("ask").await, turn: 1 }).await);
    // When the call gets its result, its question is removed.
    for kind in [WorkKind::Invoke, WorkKind::Answer] {
        let thread = kind.as_str();
        let key = fixture.key(thread).await;
        let head = fixture.head(thread).await;
        let call = head.batch()[0].id.clone();
        let number = head.questions().first().map_or(0, |question| question.number);
        fixture.send_input(thread, result(&call, "done")).await.unwrap();
        assert!(!is_due(&WorkKey::Invoke { thread: key, call }).await);
        assert!(!is_due(&WorkKey::Answer { thread: key, number }).await);
        // Postponing an attempt that was in progress meanwhile does not make the work due again.
        let work = WorkKey::Answer { thread: key, number };
        fixture.store.postpone(&work, fixture.now(), 2, "503".into()).await.unwrap();
        assert!(!is_due(&work).await);
    }
    assert_eq!(fixture.due(WorkKind::Invoke, SERVER).await, []);
    assert_eq!(fixture.due(WorkKind::Answer, SERVER).await, []);
    assert!(!is_due(&WorkKey::Ask { thread: crate::store::ThreadKey::from_bytes([9; 8]), turn: 1 }).await);
}

pub(crate) async fn an_unchanged_question_keeps_its_retry_time(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let work = create_work(&fixture, WorkKind::Ask, "thread", 1).await;
    fixture.store.postpone(&work[0], fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
    fixture.send_input("thread", enqueued("later")).await.unwrap();
    fixture.send_input("thread", Input::Notice { text: "for people".into() }).await.unwrap();
    assert_eq!(fixture.due(WorkKind::Ask, MODEL).await, []);
    // A new model request is due immediately.
    fixture.send_input("thread", user("now")).await.unwrap();
    let due = keys(&fixture.due(WorkKind::Ask, MODEL).await);
    assert_eq!(due, [WorkKey::Ask { thread: fixture.key("thread").await, turn: 2 }]);
    let Some(Work::Ask(work)) = fixture.store.load_work(&due[0], fixture.now()).await.unwrap() else {
        panic!("the work is not due")
    };
    assert_eq!(work.attempts, 0);
}

pub(crate) async fn an_acknowledged_call_is_no_longer_due(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let work = create_work(&fixture, WorkKind::Invoke, "thread", 3).await;
    postpone_all(&fixture, &work[1..2], fixture.now()).await;
    let head = fixture.head("thread").await;
    let key = fixture.key("thread").await;
    let calls: Vec<_> = head.batch()[..2].iter().map(|call| (key, call.id.clone())).collect();
    fixture.store.acknowledge(calls, fixture.now()).await.unwrap();
    assert_eq!(keys(&fixture.due(WorkKind::Invoke, SERVER).await), work[2..]);
    for work in &work[..2] {
        assert!(fixture.store.load_work(work, fixture.now()).await.unwrap().is_none());
        // A failed attempt that ends after the acknowledgement changes nothing.
        fixture.store.postpone(work, fixture.now(), 5, "503".into()).await.unwrap();
    }
    assert_eq!(keys(&fixture.due(WorkKind::Invoke, SERVER).await), work[2..]);
}

pub(crate) async fn a_delivered_answer_is_no_longer_due(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let work = create_work(&fixture, WorkKind::Answer, "thread", 3).await;
    postpone_all(&fixture, &work[1..2], fixture.now()).await;
    fixture.store.answer_delivered(&work[0], 1).await.unwrap();
    fixture.store.answer_delivered(&work[1], 2).await.unwrap();
    assert_eq!(keys(&fixture.due(WorkKind::Answer, SERVER).await), work[2..]);
    assert!(fixture.store.load_work(&work[0], fixture.now()).await.unwrap().is_none());
    // An answered question is not in the inbox.
    let inbox =
        fixture.store.inbox(None, &Visibility::All, crate::store::PageRequest::first(10)).await.unwrap();
    assert!(inbox.rows.is_empty());
}

pub(crate) async fn calls_and_subscriptions_are_checked_at_their_server(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    fixture.create("thread", Some("hello")).await;
    let open = fixture.call("thread", &[SERVER, OTHER, SERVER]).await;
    let (key, session) = (fixture.key("thread").await, fixture.session("thread").await);
    let of = |call: &rap_protocol::CallId| WorkKey::Check { thread: key, call: call.clone() };
    fixture.send_input("thread", subscribed(&open[2])).await.unwrap();
    let acknowledged_at = fixture.now().plus(seconds(1));
    let calls = open[..2].iter().map(|call| (key, call.clone())).collect();
    fixture.store.acknowledge(calls, acknowledged_at).await.unwrap();
    fixture.clock.pass(LOST_AFTER);
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, [(session, of(&open[2]))]);
    fixture.clock.pass(seconds(1));
    let both = [(session, of(&open[2])), (session, of(&open[0]))];
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, both);
    assert_eq!(fixture.due(WorkKind::Check, OTHER).await, [(session, of(&open[1]))]);
    let load = async |call| fixture.store.load_work(&of(call), fixture.now()).await.unwrap();
    let Some(Work::Check(work)) = load(&open[0]).await else { panic!("the check is not due") };
    assert_eq!((work.server.as_str(), work.subscription), (SERVER, false));
    assert_eq!(work.check, StatusCheck::new(acknowledged_at));
    let Some(Work::Check(work)) = load(&open[2]).await else { panic!("the check is not due") };
    assert!(work.subscription);
    // A call that its server does not know is checked again soon, the other one after the usual time.
    let now = fixture.now();
    let gone = StatusCheck { checked_at: now, gone_since: Some(now) };
    fixture.store.record_check(key, &open[0], gone).await.unwrap();
    fixture.store.record_check(key, &open[2], StatusCheck::new(now)).await.unwrap();
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, []);
    fixture.clock.pass(seconds(60));
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, [(session, of(&open[0]))]);
    let Some(Work::Check(work)) = load(&open[0]).await else { panic!("the check is not due") };
    assert_eq!(work.check, gone);
    // A failed check is postponed.
    fixture.store.postpone(&of(&open[0]), fixture.now(), 1, "no answer".into()).await.unwrap();
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, []);
    fixture.clock.pass(LOST_AFTER);
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await.len(), 2);
    // Settled calls and ended subscriptions are not checked.
    fixture.send_input("thread", result(&open[0], "done")).await.unwrap();
    fixture.send_input("thread", Input::Cancel { call: open[2].clone() }).await.unwrap();
    assert_eq!(fixture.due(WorkKind::Check, SERVER).await, []);
    assert!(load(&open[0]).await.is_none() && load(&open[2]).await.is_none());
}

pub(crate) async fn a_page_reports_that_more_checks_are_due(database: Box<dyn Database>) {
    let fixture = without_limits(database);
    let mut expected = BTreeSet::new();
    for number in 0..5 {
        let name = format!("thread_{number}");
        fixture.send(new(&name, Some("hello"))).await.unwrap();
        fixture.send(to(&name, calls(1, &[SERVER]))).await.unwrap();
        let row = fixture.row(&name).await;
        let (thread, call) = (row.thread.key, row.head.batch()[0].id.clone());
        fixture.store.acknowledge(vec![(thread, call.clone())], fixture.now()).await.unwrap();
        expected.insert(WorkKey::Check { thread, call });
    }
    fixture.clock.pass(LOST_AFTER);
    let page = DuePage { sessions: 2, ..fixture.due_page() };
    let found = fixture.page(WorkKind::Check, SERVER, page).await;
    assert_eq!((found.work.len(), found.more), (2, true));
    let found: BTreeSet<WorkKey> = drain(&fixture, WorkKind::Check, 2, 16).await.into_iter().collect();
    assert_eq!(found, expected);
}
