//! Listings page by page: while rows do not change, no row is missing and none is listed twice.

use std::collections::BTreeSet;

use rap_agent::{BuiltIn, Choice, Input, Limits, Status, TurnAnswer, TurnRetry, Usage};
use rap_protocol::{AuthUrl, CallId, ResponseUrl, Timestamp};

use super::Database;
use super::fixture::{
    Fixture, SERVER, answer, built_in, calls, event, id, result, seconds, spawns, subscribed,
};
use crate::store::{
    CallRow, Cursor, InboxItem, Page, PageRequest, StoredQuestion, ThreadFilter, ThreadRow, TimerRow,
    Visibility, WorkKey,
};

/// Reads a listing in pages of every size and compares the results. Returns its rows as text.
pub(super) async fn list_in_pages<T, F>(
    read: impl Fn(PageRequest) -> F,
    show: impl Fn(&T) -> String,
) -> Vec<String>
where
    F: Future<Output = Result<Page<T>, crate::store::Error>>,
{
    let whole = read(PageRequest::first(1000)).await.unwrap();
    assert!(whole.next.is_none());
    let whole: Vec<String> = whole.rows.iter().map(&show).collect();
    for limit in 1..=whole.len() + 1 {
        let (mut rows, mut page_request) = (Vec::new(), PageRequest::first(limit));
        loop {
            let page = read(page_request).await.unwrap();
            assert!(page.rows.len() <= limit);
            rows.extend(page.rows.iter().map(&show));
            let Some(next) = page.next else { break };
            assert_eq!(page.rows.len(), limit, "a page before the last one is not full");
            // Clients get the cursor as text.
            let after: Cursor = next.to_string().parse().unwrap();
            assert_eq!(after, next);
            page_request = PageRequest { after, limit };
        }
        assert_eq!(rows, whole, "page size {limit}");
    }
    let unique: BTreeSet<&String> = whole.iter().collect();
    assert_eq!(unique.len(), whole.len(), "a row is listed twice");
    whole
}

pub(crate) async fn threads_are_listed_in_order_page_by_page(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["idle", "failed", "closed", "running", "retrying", "waiting", "needs_you"] {
        fixture.create(name, Some("hello")).await;
    }
    fixture.send_input("idle", answer(1, "fine")).await.unwrap();
    let failed = Input::TurnFailed { turn: 1, why: "no".into(), retry: TurnRetry::Never };
    fixture.send_input("failed", failed).await.unwrap();
    fixture.send_input("closed", Input::Close).await.unwrap();
    let retry = WorkKey::Ask { thread: fixture.key("retrying").await, turn: 1 };
    fixture.store.postpone(&retry, fixture.now().plus(seconds(60)), 1, "503".into()).await.unwrap();
    fixture.send_input("waiting", calls(1, &[SERVER])).await.unwrap();
    let call = fixture.call("needs_you", &[SERVER]).await.remove(0);
    let url = AuthUrl::new("https://example.com/sign-in").unwrap();
    fixture.send_input("needs_you", Input::SignInRequested { call, url }).await.unwrap();
    fixture.create("parent", Some("hello")).await;
    fixture.send_input("parent", spawns(1, 3)).await.unwrap();
    let children: Vec<String> =
        fixture.head("parent").await.children().map(|child| child.as_str().to_owned()).collect();

    let list = async |status, parent: Option<&str>| {
        let read = |page_request| {
            let filter =
                ThreadFilter { status, parent: parent.map(id), page_request, ..ThreadFilter::default() };
            let store = &fixture.store;
            async move { store.threads(filter).await }
        };
        list_in_pages(read, |row: &ThreadRow| row.thread.id.as_str().to_owned()).await
    };
    let all = list(None, None).await;
    assert_eq!(all[..3], ["idle", "failed", "closed"]);
    assert_eq!(all.len(), 11);
    let table = [
        (Status::Idle, vec!["idle"]),
        (Status::Failed, vec!["failed"]),
        (Status::Closed, vec!["closed"]),
        (Status::Waiting, vec!["waiting"]),
        (Status::NeedsYou, vec!["needs_you"]),
    ];
    for (status, threads) in table {
        assert_eq!(list(Some(status), None).await, threads, "{status:?}");
    }
    let running = list(Some(Status::Running), None).await;
    assert_eq!(running[..3], ["running", "retrying", "parent"]);
    assert_eq!(running[3..], children);
    assert_eq!(list(None, Some("parent")).await, children);
    assert_eq!(list(Some(Status::Idle), Some("parent")).await, [""; 0]);
    assert_eq!(list(None, Some("nobody")).await, [""; 0]);
}

/// Acknowledged calls, new calls and retries, to two servers and in several sessions.
pub(crate) async fn every_open_call_is_listed_once(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let other = "http://127.0.0.1:7";
    let mut expected = BTreeSet::new();
    for number in 0..6 {
        // Two threads each have the same time.
        if number % 2 == 0 {
            fixture.clock.pass(seconds(1));
        }
        let name = format!("thread_{number}");
        fixture.create(&name, Some("hello")).await;
        let open = fixture.call(&name, &[SERVER, other, SERVER, other, SERVER, SERVER]).await;
        let key = fixture.key(&name).await;
        fixture.store.acknowledge(vec![(key, open[0].clone())], fixture.now()).await.unwrap();
        for (at, call) in open[1..3].iter().enumerate() {
            let key = WorkKey::Invoke { thread: key, call: call.clone() };
            let due = fixture.now().plus(seconds(60 * (at as u64 + number / 3)));
            fixture.store.postpone(&key, due, 2, "503 of its server".into()).await.unwrap();
        }
        fixture.send_input(&name, result(&open[5], "done")).await.unwrap();
        expected.extend(open[..5].iter().map(|call| call.as_str().to_owned()));
    }
    fixture.create("sleeps", Some("hello")).await;
    fixture.send_input("sleeps", built_in(1, vec![BuiltIn::Wait])).await.unwrap();
    expected.insert(fixture.head("sleeps").await.batch()[0].id.as_str().to_owned());

    let store = &fixture.store;
    let listed = list_in_pages(
        |page_request| store.calls(&Visibility::All, page_request),
        |row: &CallRow| row.call.as_str().to_owned(),
    )
    .await;
    assert_eq!(listed.len(), 31);
    assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), expected);
    let rows = store.calls(&Visibility::All, PageRequest::first(100)).await.unwrap().rows;
    let part = |row: &CallRow| match (row.acknowledged_at, row.attempts) {
        (Some(_), _) => 0,
        _ if row.tool == "built_in" => 0,
        (None, 0) => 1,
        (None, _) => 2,
    };
    let parts: Vec<i32> = rows.iter().map(part).collect();
    assert!(parts.is_sorted(), "{parts:?}");
    assert_eq!([7, 12, 12], [0, 1, 2].map(|expected| parts.iter().filter(|part| **part == expected).count()));
    let retried = rows.last().unwrap();
    assert_eq!((retried.attempts, retried.outcome.as_deref()), (2, Some("503 of its server")));
    assert_eq!(retried.next_attempt_at, Some(fixture.now().plus(seconds(120))));
}

fn choice(call: &CallId, digest: u64) -> Input {
    let choice = Choice {
        prompt: format!("Question {digest}?"),
        choices: vec!["red".into(), "green".into()],
        default: 0,
        response_url: ResponseUrl::new(format!("{SERVER}/answers/{digest}")).unwrap(),
        digest,
    };
    Input::ChoiceRequested { call: call.clone(), choice }
}

pub(crate) async fn questions_are_listed_oldest_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let mut all = Vec::new();
    for number in 0..4 {
        let name = format!("thread_{number}");
        fixture.create(&name, Some("hello")).await;
        let open = fixture.call(&name, &[SERVER, SERVER]).await;
        all.extend(open.into_iter().map(|call| (name.clone(), call)));
    }
    // In several threads, several with the same time, and more than nine in one thread.
    for digest in 0..11 {
        fixture.send_input("thread_0", choice(&all[0].1, digest)).await.unwrap();
    }
    for digest in 0..3 {
        for (name, call) in &all[1..] {
            fixture.send_input(name, choice(call, digest)).await.unwrap();
        }
        fixture.clock.pass(seconds(1));
    }
    let url = AuthUrl::new("https://example.com/sign-in/secret").unwrap();
    let (name, call) = &all[7];
    fixture.send_input(name, Input::SignInRequested { call: call.clone(), url }).await.unwrap();
    // The oldest question of a call is answered and no longer listed.
    fixture
        .send_input("thread_0", Input::Choose { call: all[0].1.clone(), selected: Some(1) })
        .await
        .unwrap();

    let store = &fixture.store;
    let show = |item: &InboxItem| {
        let asked = match &item.question {
            StoredQuestion::Choice { prompt, .. } => prompt.clone(),
            StoredQuestion::SignIn { auth_url } => auth_url.clone(),
        };
        format!("{} {} {} {asked}", item.asked_at.0, item.thread, item.call)
    };
    let listed = list_in_pages(|page_request| store.inbox(None, &Visibility::All, page_request), show).await;
    assert_eq!(listed.len(), 10 + 3 * 7 + 1);
    assert!(listed.last().unwrap().ends_with("https://example.com/sign-in/secret"));
    let times: Vec<&str> = listed.iter().map(|row| row.split(' ').next().unwrap()).collect();
    assert!(times.is_sorted());
    let key = fixture.key("thread_0").await;
    let of_one =
        list_in_pages(|page_request| store.inbox(Some(key), &Visibility::All, page_request), show).await;
    assert_eq!(of_one.len(), 13);
    assert!(of_one[0].ends_with("Question 1?"), "{}", of_one[0]);
    // When a call settles, its questions and their answers are removed.
    fixture.send_input("thread_0", result(&all[0].1, "done")).await.unwrap();
    assert_eq!(
        list_in_pages(|page_request| store.inbox(Some(key), &Visibility::All, page_request), show)
            .await
            .len(),
        3
    );
}

pub(crate) async fn subscriptions_are_listed_with_their_waiting_events(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { event_children: 1, ..Limits::default() });
    let mut expected = Vec::new();
    for number in 0..4 {
        let name = format!("thread_{number}");
        fixture.create(&name, Some("hello")).await;
        let open = fixture.call(&name, &[SERVER, SERVER]).await;
        fixture.send_inputs(vec![(&name, subscribed(&open[0])), (&name, subscribed(&open[1]))]).await;
        for _ in 0..number {
            fixture.send_input(&name, event(&open[0], "event", None)).await.unwrap();
        }
        let waits = [number as u64, 0].map(|events| events.saturating_sub(1));
        expected.extend(open.iter().zip(waits).map(|(call, waits)| format!("{name} {call} {waits}")));
        fixture.clock.pass(seconds(u64::from(number == 1)));
    }
    let store = &fixture.store;
    let show = |row: &crate::store::SubscriptionRow| format!("{} {} {}", row.thread, row.call, row.waiting);
    let mut listed =
        list_in_pages(|page_request| store.subscriptions(&Visibility::All, page_request), show).await;
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected);
    let row = store.subscriptions(&Visibility::All, PageRequest::first(1)).await.unwrap().rows.remove(0);
    assert_eq!((row.tool.as_str(), row.server.as_str(), row.since), ("tool", SERVER, super::fixture::START));
}

pub(crate) async fn timers_are_listed_by_time(database: Box<dyn Database>) {
    let limits = Limits { call_timeout: Some(seconds(100)), ..Limits::default() };
    let fixture = Fixture::with(database, limits);
    let now = fixture.now();
    for name in ["calls", "sleeps", "scheduled", "failed"] {
        fixture.create(name, Some("hello")).await;
    }
    fixture.send_input("calls", calls(1, &[SERVER, SERVER])).await.unwrap();
    let sleep = BuiltIn::SleepUntil { until: now.plus(seconds(50)) };
    fixture.send_input("sleeps", built_in(1, vec![sleep, BuiltIn::Wait])).await.unwrap();
    let schedule = BuiltIn::Schedule { next: now.plus(seconds(10)), confirmation: "scheduled".into() };
    fixture.send_input("scheduled", built_in(1, vec![schedule])).await.unwrap();
    let failed = Input::TurnFailed { turn: 1, why: "no".into(), retry: TurnRetry::Later };
    fixture.send_input("failed", failed).await.unwrap();
    let store = &fixture.store;
    let show = |row: &TimerRow| {
        let call = row.call.as_ref().map_or("-", CallId::as_str);
        assert_eq!(row.set_by, now);
        format!("{} {} {} {call}", (row.at.0 - now.0) / 1000, row.kind, row.thread)
    };
    let listed = list_in_pages(|page_request| store.timers(&Visibility::All, page_request), show).await;
    let shown: Vec<String> = listed.iter().map(|row| row.rsplit_once(' ').unwrap().0.to_owned()).collect();
    let expected = [
        "10 schedule scheduled",
        "30 retry failed",
        "50 sleep sleeps",
        "100 timeout calls",
        "100 timeout calls",
    ];
    assert_eq!(shown, expected);
    assert!(listed[1].ends_with(" -"));
    let far = Timestamp(i64::MAX);
    assert_eq!(store.due_timers(far, Timestamp(i64::MIN), &[], 10).await.unwrap().len(), 5);
}

/// Closed threads and those of another session are told apart, and large numbers are added exactly.
pub(crate) async fn the_usage_of_a_session_is_that_of_all_its_threads(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits::default());
    let used = |turn, input, cost| {
        let usage = Usage { input, output: 2, cached: 1, written: 3, cost };
        Input::TurnEnded { turn, answer: TurnAnswer { text: "done".into(), usage, ..TurnAnswer::default() } }
    };
    for name in ["root", "other"] {
        fixture.create(name, Some("hello")).await;
        fixture.send_input(name, spawns(1, 2)).await.unwrap();
        fixture.send_input(name, used(2, 10, 1_000_000_000_000)).await.unwrap();
        let children: Vec<String> =
            fixture.head(name).await.children().map(|child| child.as_str().to_owned()).collect();
        for child in &children {
            fixture.send_input(child, used(1, 100, 7)).await.unwrap();
        }
        fixture.send_input(&children[0], Input::Close).await.unwrap();
    }
    let session = fixture.store.thread(&id("root"), &Visibility::All).await.unwrap().thread.session;
    let usage = Usage { input: 210, output: 6, cached: 3, written: 9, cost: 1_000_000_000_014 };
    assert_eq!(fixture.store.session_usage(session).await.unwrap(), (usage, 3));
}
