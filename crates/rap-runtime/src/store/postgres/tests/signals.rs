//! Signals between nodes, and the ways in which they get lost.

use std::time::Duration;

use super::fleet::{expire, two};
use super::*;

/// Receives signals until there are `count`.
pub(super) async fn received(node: &Node, count: usize) -> Vec<Signal> {
    let mut signals = Vec::new();
    while signals.len() < count {
        let more = tokio::time::timeout(rap_testkit::PATIENCE, node.store.receive()).await;
        signals.extend(more.expect("no signal in time").unwrap());
    }
    signals
}

#[tokio::test]
async fn signals_reach_the_other_nodes_in_order_and_a_gap_is_noticed() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    let thread = ThreadKey::new(1);
    let delta = |turn: u64| Signal::Delta { thread, turn, attempt: 1, text: "x".into() };
    for turn in 1..=20 {
        one.store.publish(delta(turn));
        if turn % 7 == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    assert_eq!(received(&other, 20).await, (1..=20).map(delta).collect::<Vec<_>>());
    // A node that leaves sends a signal.
    one.store.leave().await.unwrap();
    assert!(received(&other, 1).await.contains(&Signal::Left));
    // Rows before this one are gone, as after a crash of the database.
    let last = "SELECT max(no) FROM signals WHERE node = ";
    let last: i64 = shared.database.sql(&format!("{last}{}", one.number())).parse().unwrap();
    let number = one.number();
    shared.database.sql(&format!("UPDATE signals SET no = no + 5 WHERE node = {number} AND no = {last}"));
    assert_eq!(received(&other, 2).await, [Signal::Lost, Signal::Left]);
}

#[tokio::test]
async fn a_new_node_is_noticed_without_a_renewal() {
    let shared = Shared::new();
    let one = Node::on(&shared.database.url());
    one.renew().await;
    assert!(!one.store.has_peers());
    let listens =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    rap_testkit::until("it listens", async || shared.database.sql(listens) == "1").await;
    let _other = Node::on(&shared.database.url());
    rap_testkit::until("the new node is noticed", async || one.store.has_peers()).await;
}

/// The next signal may come much later, so the gap alone does not tell.
#[tokio::test]
async fn signals_that_cannot_be_stored_are_reported_as_lost_when_that_is_possible_again() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    shared.database.sql(
        "CREATE SEQUENCE refused; CREATE FUNCTION refuse() RETURNS trigger AS \
         'BEGIN PERFORM nextval(''refused''); RAISE EXCEPTION ''refused''; END' LANGUAGE plpgsql; \
         CREATE TRIGGER refuse BEFORE INSERT ON signals EXECUTE FUNCTION refuse()",
    );
    one.store.publish(Signal::Revoked);
    let refused = async || shared.database.sql("SELECT is_called FROM refused") == "t";
    rap_testkit::until("the signal is refused", refused).await;
    shared.database.sql("DROP TRIGGER refuse ON signals");
    assert_eq!(received(&other, 1).await, [Signal::Lost]);
}

#[tokio::test]
async fn signals_of_a_node_that_is_back_are_not_repeated() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    let delta = |turn: u64| Signal::Delta { thread: ThreadKey::new(1), turn, attempt: 1, text: "x".into() };
    one.store.publish(delta(1));
    assert_eq!(received(&other, 1).await, [delta(1)]);
    expire(&shared.database, &one);
    assert!(other.renew().await.peer_gone && !other.store.has_peers());
    assert!(one.renew().await.lapsed);
    other.renew().await;
    one.store.publish(delta(2));
    assert_eq!(received(&other, 1).await, [delta(2)]);
}

/// Rows are kept for a short time only.
#[tokio::test]
async fn a_node_that_was_frozen_for_long_takes_it_that_signals_are_lost() {
    let shared = Shared::new();
    let [_one, other] = two(&shared.database).await;
    other.store.inner.signals.pretend_away();
    assert_eq!(received(&other, 1).await, [Signal::Lost]);
    // Only once.
    assert!(tokio::time::timeout(Duration::from_millis(500), other.store.receive()).await.is_err());
}

/// After a crash the table of the signals is empty.
#[tokio::test]
async fn a_lost_connection_to_the_database_may_mean_lost_signals() {
    let shared = Shared::new();
    let [_one, other] = two(&shared.database).await;
    rap_testkit::until("it listens", async || other.store.inner.signals.is_listening()).await;
    shared.database.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'",
    );
    assert_eq!(received(&other, 1).await, [Signal::Lost]);
}

#[tokio::test]
async fn a_node_that_could_not_read_takes_it_that_signals_are_lost() {
    let shared = Shared::new();
    let proxy = Proxy::start(shared.database.port()).await;
    let one = Node::on(&shared.database.url());
    let parts = parts(&shared.database.url(), "proxied", rules(Limits::default()));
    let node = Node::through(shared.database.url_at(proxy.port), parts).await;
    node.renew().await;
    // The first node was alone before.
    one.renew().await;
    assert_eq!(received(&node, 1).await, [Signal::Lost]);
    proxy.set(Fault::Away);
    rap_testkit::until("it cannot read", async || {
        tokio::time::timeout(Duration::from_secs(1), node.store.receive())
            .await
            .is_ok_and(|read| read.is_err())
    })
    .await;
    proxy.set(Fault::None);
    rap_testkit::until("it reads again", async || {
        let read = tokio::time::timeout(Duration::from_secs(1), node.store.receive()).await;
        read.is_ok_and(|read| read.is_ok_and(|signals| signals == [Signal::Lost]))
    })
    .await;
}

/// Cached values are valid as long as no other node can have changed them.
#[tokio::test]
async fn a_node_is_alone_only_while_it_would_notice_another_one() {
    let shared = Shared::new();
    let one = Node::on(&shared.database.url());
    assert_eq!(one.store.alone_since(), None);
    rap_testkit::until("it listens", async || one.store.inner.signals.is_listening()).await;
    let before = one.store.alone_since();
    assert!(before.is_some());
    let other = Node::on(&shared.database.url());
    rap_testkit::until("the new node is noticed", async || one.store.alone_since().is_none()).await;
    other.store.close().await;
    one.renew().await;
    let after = one.store.alone_since();
    assert!(after.is_some() && after != before, "{after:?}");
}
