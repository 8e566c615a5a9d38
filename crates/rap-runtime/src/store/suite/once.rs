//! Idempotency keys of clients.

use super::Database;
use super::fixture::{Fixture, answer, enqueued, id, new, rejecting, seconds, to};
use crate::store::{Error, Message, Once};

fn once(message: Message, key: u8, request: u8) -> Message {
    Message { once: Some(Once { key: [key; 32], request: [request; 32] }), ..message }
}

/// Proves: LC-30, LC-38
pub(crate) async fn a_repeated_request_has_the_receipt_of_the_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let first = fixture.send(once(new("thread", Some("hello")), 1, 0)).await.unwrap();
    assert_eq!(fixture.send(once(new("thread", Some("hello")), 1, 0)).await.unwrap(), first);
    // The id of a repeat may be new: a client that names none is given one.
    assert_eq!(fixture.send(once(new("another", Some("hello")), 1, 0)).await.unwrap(), first);
    assert!(matches!(fixture.store.thread(&id("another")).await, Err(Error::NoThread)));
    let later = || once(to("thread", enqueued("later")), 2, 0);
    let said = fixture.send(later()).await.unwrap();
    fixture.tell("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.send(later()).await.unwrap(), said);
    assert_eq!(fixture.words("thread").await, ["hello", "an answer", "later"]);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.send(once(new("thread", Some("hello")), 1, 0)).await.unwrap(), first);
    assert_eq!(fixture.send(later()).await.unwrap(), said);
    assert_eq!(fixture.words("thread").await.len(), 3);
    assert!(fixture.commits.take().is_empty());
}

pub(crate) async fn a_request_that_is_repeated_within_a_batch_counts_once(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let results = fixture
        .apply(vec![
            once(new("one", Some("hello")), 1, 0),
            once(new("one", Some("hello")), 1, 0),
            once(new("two", Some("hello")), 1, 0),
            once(new("two", Some("other")), 1, 9),
            once(new("three", Some("hello")), 2, 0),
        ])
        .await;
    let threads: Vec<_> =
        results.iter().map(|result| result.as_ref().ok().map(|r| r.thread.as_str().to_owned())).collect();
    let one = Some("one".to_owned());
    assert_eq!(threads, [one.clone(), one.clone(), one, None, Some("three".into())]);
    assert!(matches!(results[3], Err(Error::KeyReused)));
    assert!(matches!(fixture.store.thread(&id("two")).await, Err(Error::NoThread)));
    let later = once(to("one", enqueued("later")), 3, 0);
    let results = fixture.apply(vec![later.clone(), later.clone(), to("one", enqueued("more")), later]).await;
    assert!(results.iter().all(Result::is_ok));
    assert_eq!(fixture.head("one").await.queued().inputs, 2);
}

pub(crate) async fn a_key_that_was_used_for_another_request_is_refused(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.send(once(new("thread", Some("hello")), 1, 0)).await.unwrap();
    let changed = fixture.send(once(new("another", Some("hello")), 1, 1)).await;
    assert!(matches!(changed, Err(Error::KeyReused)));
    let other_key = fixture.send(once(new("thread", Some("hello")), 2, 0)).await;
    assert!(matches!(other_key, Err(Error::Exists)));
}

pub(crate) async fn a_refused_request_does_not_use_up_its_key(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let now = || once(to("thread", rejecting("now")), 1, 0);
    assert!(matches!(fixture.send(now()).await, Err(Error::Ignored(_))));
    fixture.tell("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.send(now()).await.unwrap().turn, 2);
    assert_eq!(fixture.send(now()).await.unwrap().turn, 2);
}

pub(crate) async fn keys_are_forgotten_page_by_page(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let key = |number: u32| {
        let mut key = [0; 32];
        key[..4].copy_from_slice(&number.to_le_bytes());
        Once { key, request: [0; 32] }
    };
    let said = |number| Message { once: Some(key(number)), ..to("thread", enqueued("x")) };
    // More than are removed at a time; the thread holds fewer than that.
    for first in [0, 900, 1800] {
        let results = fixture.apply((first..first + 900).map(said).collect()).await;
        assert!(results.iter().all(Result::is_ok));
        let turn = fixture.head("thread").await.turn();
        fixture.tell("thread", answer(turn, "so much")).await.unwrap();
    }
    fixture.clock.pass(seconds(10));
    fixture.send(said(5000)).await.unwrap();
    let before = fixture.now();
    let mut calls = 0;
    while fixture.store.prune(before, before).await.unwrap() {
        calls += 1;
        assert!(calls < 100, "there is no end");
    }
    assert!(calls >= 2, "all of them in one transaction");
    // Those that are not old yet still count.
    let held = fixture.head("thread").await.queued().inputs;
    fixture.send(said(5000)).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued().inputs, held);
    fixture.send(said(0)).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued().inputs, held + 1);
}
