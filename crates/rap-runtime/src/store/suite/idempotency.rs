//! Idempotency keys of clients.

use super::Database;
use super::fixture::{Fixture, answer, enqueued, id, new, rejecting, seconds, to};
use crate::store::{Error, IdempotencyKey, Message, Visibility};

fn with_key(message: Message, key: u8, request: u8) -> Message {
    Message {
        idempotency_key: Some(IdempotencyKey { key: [key; 32], former_key: None, request: [request; 32] }),
        ..message
    }
}

/// Proves: LC-30, LC-38
pub(crate) async fn a_repeated_request_gets_the_receipt_of_the_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let first = fixture.send(with_key(new("thread", Some("hello")), 1, 0)).await.unwrap();
    assert_eq!(fixture.send(with_key(new("thread", Some("hello")), 1, 0)).await.unwrap(), first);
    // The thread id of a repeat may differ, because the runtime chooses a new id if the client gives none.
    assert_eq!(fixture.send(with_key(new("another", Some("hello")), 1, 0)).await.unwrap(), first);
    assert!(matches!(fixture.store.thread(&id("another"), &Visibility::All).await, Err(Error::NoThread)));
    let later = || with_key(to("thread", enqueued("later")), 2, 0);
    let said = fixture.send(later()).await.unwrap();
    fixture.send_input("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.send(later()).await.unwrap(), said);
    assert_eq!(fixture.texts("thread").await, ["hello", "an answer", "later"]);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.send(with_key(new("thread", Some("hello")), 1, 0)).await.unwrap(), first);
    assert_eq!(fixture.send(later()).await.unwrap(), said);
    assert_eq!(fixture.texts("thread").await.len(), 3);
    assert!(fixture.commits.take().is_empty());
}

pub(crate) async fn a_request_that_is_repeated_within_a_batch_is_applied_once(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let results = fixture
        .apply(vec![
            with_key(new("one", Some("hello")), 1, 0),
            with_key(new("one", Some("hello")), 1, 0),
            with_key(new("two", Some("hello")), 1, 0),
            with_key(new("two", Some("other")), 1, 9),
            with_key(new("three", Some("hello")), 2, 0),
        ])
        .await;
    let threads: Vec<_> =
        results.iter().map(|result| result.as_ref().ok().map(|r| r.thread.as_str().to_owned())).collect();
    let one = Some("one".to_owned());
    assert_eq!(threads, [one.clone(), one.clone(), one, None, Some("three".into())]);
    assert!(matches!(results[3], Err(Error::KeyReused)));
    assert!(matches!(fixture.store.thread(&id("two"), &Visibility::All).await, Err(Error::NoThread)));
    let later = with_key(to("one", enqueued("later")), 3, 0);
    let results = fixture.apply(vec![later.clone(), later.clone(), to("one", enqueued("more")), later]).await;
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(fixture.head("one").await.queued().inputs, 2);
}

pub(crate) async fn a_key_that_was_used_for_another_request_is_refused(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.send(with_key(new("thread", Some("hello")), 1, 0)).await.unwrap();
    let changed = fixture.send(with_key(new("another", Some("hello")), 1, 1)).await;
    assert!(matches!(changed, Err(Error::KeyReused)));
    let other_key = fixture.send(with_key(new("thread", Some("hello")), 2, 0)).await;
    assert!(matches!(other_key, Err(Error::Exists)));
}

pub(crate) async fn a_refused_request_does_not_use_up_its_key(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let now = || with_key(to("thread", rejecting("now")), 1, 0);
    assert!(matches!(fixture.send(now()).await, Err(Error::Ignored(_))));
    fixture.send_input("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.send(now()).await.unwrap().turn, 2);
    assert_eq!(fixture.send(now()).await.unwrap().turn, 2);
}

pub(crate) async fn old_idempotency_keys_are_pruned_page_by_page(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let key = |number: u32| {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        IdempotencyKey { key, former_key: None, request: [0; 32] }
    };
    let said = |number| Message { idempotency_key: Some(key(number)), ..to("thread", enqueued("x")) };
    // More keys than one call removes. They are sent in parts, because a thread holds fewer inputs than that.
    for first in [0, 900, 1800] {
        let results = fixture.apply((first..first + 900).map(said).collect()).await;
        assert!(results.iter().all(Result::is_ok));
        let turn = fixture.head("thread").await.turn();
        fixture.send_input("thread", answer(turn, "so much")).await.unwrap();
    }
    fixture.clock.pass(seconds(10));
    fixture.send(said(5000)).await.unwrap();
    let before = fixture.now();
    let mut calls = 0;
    while fixture.store.prune(before, before).await.unwrap() {
        calls += 1;
        assert!(calls < 100, "pruning does not end");
    }
    assert!(calls >= 2, "too many rows were removed in one transaction");
    // Keys that are not old yet are still recognised.
    let held = fixture.head("thread").await.queued().inputs;
    fixture.send(said(5000)).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued().inputs, held);
    fixture.send(said(0)).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued().inputs, held + 1);
}
