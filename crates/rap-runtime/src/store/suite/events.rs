//! Deduplication of events and results.

use std::time::Duration;

use rap_agent::{Ignored, Input, Limits, Write};
use rap_protocol::CallId;

use super::Database;
use super::fixture::{Fixture, SERVER, event, inline_event, result, seconds};
use crate::store::Error;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn is_duplicate(result: &Result<crate::store::Receipt, Error>) -> bool {
    matches!(result, Err(Error::Ignored(Ignored::Duplicate)))
}

/// Proves: LC-30, TR-25
pub(crate) async fn a_repeated_event_is_applied_once_even_after_a_restart(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let results = fixture
        .apply(vec![
            super::fixture::to("root", event(&call, "event", Some("e1"))),
            super::fixture::to("root", event(&call, "event", Some("e1"))),
        ])
        .await;
    assert!(results[0].is_ok() && is_duplicate(&results[1]));
    let fixture = fixture.reopen().await;
    assert!(is_duplicate(&fixture.send_input("root", event(&call, "event", Some("e1"))).await));
    fixture.send_input("root", event(&call, "another", Some("e2"))).await.unwrap();
    assert_eq!(fixture.head("root").await.children().count(), 2);
    // Event ids are unique only within a subscription.
    fixture.send_input("root", super::fixture::user("again")).await.unwrap();
    let other = fixture.subscribe("root").await;
    fixture.send_input("root", event(&other, "event", Some("e1"))).await.unwrap();
}

/// Proves: LC-30, TR-25
pub(crate) async fn a_repeated_result_is_applied_once_even_after_a_restart(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let call = fixture.call("thread", &[SERVER]).await.remove(0);
    fixture.send_input("thread", result(&call, "done")).await.unwrap();
    assert!(is_duplicate(&fixture.send_input("thread", result(&call, "done")).await));
    let fixture = fixture.reopen().await;
    assert!(is_duplicate(&fixture.send_input("thread", result(&call, "done")).await));
    assert_eq!(fixture.texts("thread").await, ["hello", "1 calls", "done"]);
    let row = fixture.row("thread").await;
    assert!(fixture.store.has_call(&row.thread.id, &call).await.unwrap());
    let unknown = CallId::new("unknown").unwrap();
    assert!(!fixture.store.has_call(&row.thread.id, &unknown).await.unwrap());
    let server = fixture.store.server_of_call(row.thread.key, &call).await.unwrap();
    assert_eq!(server.as_deref(), Some(super::fixture::SERVER));
    assert_eq!(fixture.store.server_of_call(row.thread.key, &unknown).await.unwrap(), None);
}

/// Creates an asking thread with a subscription, so that events are held.
async fn busy(fixture: &Fixture) -> CallId {
    fixture.create("thread", Some("hello")).await;
    let call = fixture.subscribe("thread").await;
    fixture.send_input("thread", super::fixture::user("more")).await.unwrap();
    call
}

pub(crate) async fn event_ids_are_bounded_and_the_oldest_are_dropped(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { event_ids: 3, ..Limits::default() });
    let call = busy(&fixture).await;
    let send = |number: usize| {
        let id = format!("e{number}");
        inline_event(&call, &id, Some(&id))
    };
    for number in 1..=5 {
        fixture.send_input("thread", send(number)).await.unwrap();
    }
    let numbers: Vec<(u64, u64)> = fixture
        .commits
        .take()
        .into_iter()
        .flat_map(|committed| committed.step.writes)
        .filter_map(|write| match write {
            Write::RecordEventId { number, forget, .. } => Some((number, forget)),
            _ => None,
        })
        .collect();
    assert_eq!(numbers, [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]);
    for number in 3..=5 {
        assert!(is_duplicate(&fixture.send_input("thread", send(number)).await), "{number}");
    }
    let fixture = fixture.reopen().await;
    assert!(is_duplicate(&fixture.send_input("thread", send(3)).await));
    // This id was dropped. Storing it again drops the next one.
    fixture.send_input("thread", send(1)).await.unwrap();
    fixture.send_input("thread", send(3)).await.unwrap();
    assert!(is_duplicate(&fixture.send_input("thread", send(5)).await));
}

/// Proves: TR-25
pub(crate) async fn an_event_id_is_kept_as_long_as_its_subscription(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let call = busy(&fixture).await;
    fixture.send_input("thread", inline_event(&call, "one", Some("e1"))).await.unwrap();
    fixture.clock.pass(30 * DAY);
    let week_ago = fixture.now().minus(7 * DAY);
    assert!(!fixture.store.prune(week_ago, week_ago).await.unwrap());
    assert!(is_duplicate(&fixture.send_input("thread", inline_event(&call, "one", Some("e1"))).await));
}

pub(crate) async fn event_ids_of_an_ended_subscription_are_removed_page_by_page(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { held: 10_000, ..Limits::default() });
    let call = busy(&fixture).await;
    let ids: Vec<String> = (0..2_100).map(|number| format!("e{number}")).collect();
    let events = ids.iter().map(|id| ("thread", inline_event(&call, "x", Some(id))));
    fixture.send_inputs(events.collect()).await;
    let now = fixture.now();
    assert!(!fixture.store.prune(now, now).await.unwrap(), "the subscription is active");
    fixture.send_input("thread", Input::Cancel { call: call.clone() }).await.unwrap();
    fixture.clock.pass(seconds(1));
    let mut calls = 0;
    while fixture.store.prune(now, now).await.unwrap() {
        calls += 1;
        assert!(calls < 100, "pruning does not end");
    }
    assert!(calls >= 3, "too many rows were removed in one transaction");
}
