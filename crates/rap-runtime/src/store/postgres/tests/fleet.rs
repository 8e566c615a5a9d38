//! Several nodes on one database: claims, leases, signals, upgrades, sessions that come back.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::signals::received;
use super::*;
use crate::store::transfer::{CALL, Origin, Record};
use crate::store::{Reservation, Transfer as _};

/// Two nodes that know each other.
pub(super) async fn two(database: &TestDatabase<'_>) -> [Node; 2] {
    let nodes = [Node::on(&database.url()), Node::on(&database.url())];
    for node in &nodes {
        node.renew().await;
    }
    // The first node was alone, so it sent no signals before.
    assert_eq!(received(&nodes[1], 1).await, [Signal::Lost]);
    nodes
}

impl Node {
    pub(super) async fn renew(&self) -> Renewal {
        self.store.renew(Activity::default()).await.unwrap()
    }

    async fn due(&self, kind: WorkKind, destination: &str) -> Vec<WorkKey> {
        let queue = WorkQueue { kind, destination: destination.to_owned() };
        let skip = HashSet::new();
        let page = DuePage { now: self.now(), after: None, sessions: 100, per_session: 100, skip };
        let found = self.store.due_work(&queue, page).await.unwrap();
        found.work.into_iter().map(|(_, key)| key).collect()
    }

    fn now(&self) -> Timestamp {
        self.store.inner.time.now()
    }

    async fn load(&self, key: &WorkKey) -> Option<Work> {
        self.store.load_work(key, self.now()).await.unwrap()
    }
}

fn plain_node() -> NodeSettings {
    let (name, url, lease) = ("n".into(), "u".into(), Duration::from_secs(15));
    NodeSettings { name, url, lease, started: Vec::new() }
}

pub(super) fn expire(database: &TestDatabase<'_>, node: &Node) {
    let sql = "UPDATE nodes SET lease_until = now() - interval '1 s' WHERE no = ";
    database.sql(&format!("{sql}{}", node.number()));
}

#[tokio::test]
async fn a_claim_holds_as_long_as_the_lease_of_its_node() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    // No slot was reserved, so no node has claimed the model request.
    let due = one.due(WorkKind::Ask, MODEL).await;
    assert_eq!((due.len(), other.due(WorkKind::Ask, MODEL).await), (1, due.clone()));
    // One that has just begun has no claim yet.
    assert_eq!(one.store.lost_model_requests(due.clone()).await.unwrap(), []);
    let question = &due[0];
    assert!(matches!(one.load(question).await, Some(Work::Ask(ask)) if ask.attempts == 0));
    assert!(other.load(question).await.is_none());
    assert_eq!(other.due(WorkKind::Ask, MODEL).await, []);
    // The node itself finds it again.
    assert!(one.load(question).await.is_some());
    let lost = async || one.store.lost_model_requests(due.clone()).await.unwrap();
    assert_eq!(lost().await, []);
    expire(&shared.database, &one);
    assert_eq!(other.due(WorkKind::Ask, MODEL).await, due);
    // Taking a model request over is another attempt.
    assert!(matches!(other.load(question).await, Some(Work::Ask(ask)) if ask.attempts == 1));
    // The first node is back. It does no harm.
    assert!(one.renew().await.lapsed);
    assert_eq!(lost().await, due);
    let later = one.now().plus(Duration::from_secs(3600));
    one.store.postpone(question, later, 9, "too late".into()).await.unwrap();
    assert!(other.load(question).await.is_some());
    assert!(one.load(question).await.is_none());
    // A failed attempt frees it for every node. The clocks of the nodes differ by milliseconds, so it is due for both.
    other.store.postpone(question, START, 2, "failed".into()).await.unwrap();
    assert!(matches!(one.load(question).await, Some(Work::Ask(ask)) if ask.attempts == 2));
}

/// Otherwise the work of a node that died would wait as long as the clock was set back by.
#[tokio::test]
async fn a_lease_of_a_later_time_ends_when_the_clock_of_the_database_is_set_back() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    let question = one.due(WorkKind::Ask, MODEL).await.remove(0);
    assert!(one.load(&question).await.is_some());
    assert!(other.load(&question).await.is_none());
    let later = "UPDATE nodes SET seen_at = seen_at + interval '1 h', lease_until = lease_until + interval '1 h' WHERE no = ";
    shared.database.sql(&format!("{later}{}", one.number()));
    assert!(other.load(&question).await.is_some());
    // A node that lives renews its lease, and learns that others did not count on it.
    assert!(one.renew().await.lapsed);
    assert!(!one.renew().await.lapsed);
}

#[tokio::test]
async fn every_kind_of_work_is_claimed_by_one_node() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    one.send(to("t", calls(1, &[SERVER]))).await.unwrap();
    let invocation = one.due(WorkKind::Invoke, SERVER).await.remove(0);
    assert!(one.load(&invocation).await.is_some());
    assert!(other.load(&invocation).await.is_none());
    assert_eq!(other.due(WorkKind::Invoke, SERVER).await, []);
    // When it is acknowledged, no node holds the call: any may check its status.
    let WorkKey::Invoke { call, .. } = invocation.clone() else { panic!("{invocation:?}") };
    one.store.acknowledge(vec![(invocation.thread(), call.clone())], one.now()).await.unwrap();
    shared.database.sql("UPDATE calls SET acknowledged_at = 0");
    let check = other.due(WorkKind::Check, SERVER).await.remove(0);
    assert!(other.load(&check).await.is_some());
    assert!(one.load(&check).await.is_none());
    assert_eq!(one.due(WorkKind::Check, SERVER).await, []);
    let checked = StatusCheck { checked_at: one.now(), gone_since: None };
    other.store.record_check(check.thread(), &call, checked).await.unwrap();
    // It is not due any more.
    assert!(one.load(&check).await.is_none());
    shared.database.sql("UPDATE wakes SET due_at = 1; UPDATE calls SET until = 1 WHERE state = 0");
    let (now, none) = (one.now(), Timestamp(i64::MIN));
    let timers = one.store.due_timers(now, none, &[], 10).await.unwrap();
    assert!(!timers.is_empty());
    assert_eq!(other.store.due_timers(now, none, &[], 10).await.unwrap(), []);
    assert_eq!(one.store.due_timers(now, none, &[], 10).await.unwrap(), timers);
    expire(&shared.database, &one);
    assert_eq!(other.store.due_timers(now, none, &[], 10).await.unwrap(), timers);
}

/// Returns a node that reserves a slot for everything, and the number of slots that are reserved.
async fn reserving(url: &str, proxied: String) -> (Node, Arc<AtomicUsize>) {
    let reserved = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&reserved);
    let reserve: Reserve = Box::new(move |_, _, _| {
        count.fetch_add(1, Ordering::SeqCst);
        let count = Arc::clone(&count);
        Some(Reservation::new(move || {
            count.fetch_sub(1, Ordering::SeqCst);
        }))
    });
    let parts = Parts { reserve, ..parts(url, "reserving", rules(Limits::default())) };
    (Node::through(proxied, parts).await, reserved)
}

#[tokio::test]
async fn work_with_a_reserved_slot_is_stored_with_a_claim_and_a_failed_commit_releases_the_slot() {
    let shared = Shared::new();
    let proxy = Proxy::start(shared.database.port()).await;
    let (node, reserved) = reserving(&shared.database.url(), shared.database.url_at(proxy.port)).await;
    let other = Node::on(&shared.database.url());
    node.send(new("t", Some("hello"))).await.unwrap();
    let claim = || shared.database.sql("SELECT claim FROM asks");
    assert_eq!(claim(), node.number().to_string());
    assert_eq!(other.due(WorkKind::Ask, MODEL).await, []);
    // The slot is held until the commit is carried out.
    assert_eq!(reserved.load(Ordering::SeqCst), 1);
    drop(node.commits.take());
    assert_eq!(reserved.load(Ordering::SeqCst), 0);
    node.send(to("t", calls(1, &[SERVER, SERVER]))).await.unwrap();
    assert_eq!(shared.database.sql("SELECT count(*) FROM calls WHERE claim IS NOT NULL"), "2");
    drop(node.commits.take());
    proxy.set(Fault::LoseCommit);
    node.send(to("t", enqueued("more"))).await.unwrap_err();
    node.send(new("u", Some("hello"))).await.unwrap();
    drop(node.commits.take());
    assert_eq!(reserved.load(Ordering::SeqCst), 0);
    // A node that leaves frees everything.
    node.store.close().await;
    assert_eq!(other.due(WorkKind::Ask, MODEL).await.len(), 1);
    assert_eq!(other.due(WorkKind::Invoke, SERVER).await.len(), 2);
}

#[tokio::test]
async fn messages_to_a_thread_keep_their_order_whichever_node_delivers_them() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    let sent = |claim: i64, receiver: &str| {
        let sql = "INSERT INTO outbox (session, sender, receiver, body, claim) VALUES (1, 's', ";
        shared.database.sql(&format!("{sql}'{receiver}', '{{\"kind\": \"close\"}}', {claim}) RETURNING no"))
    };
    let due = async |node: &Node| -> Vec<String> {
        let due = node.store.inner.others.read_one(super::super::work::due_messages_statement(
            node.store.inner.node.0,
            node.now(),
            &[],
            10,
        ));
        due.await.unwrap().iter().map(|row| row.get::<_, i64>(0).to_string()).collect()
    };
    let first = sent(one.number(), "a");
    let elsewhere = sent(one.number(), "b");
    assert_eq!(due(&one).await, [first.clone(), elsewhere.clone()]);
    assert!(due(&other).await.is_empty());
    // The other node delivers the message before its own too, which is then a duplicate for the first one.
    let second = sent(other.number(), "a");
    assert_eq!(due(&other).await, [first.clone(), second.clone()]);
    expire(&shared.database, &one);
    assert_eq!(due(&other).await, [first, elsewhere, second]);
}

#[tokio::test]
async fn one_node_removes_expired_rows_for_all() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    let insert = "INSERT INTO requests VALUES (sha256(random()::text::bytea), 1, '', 't', 1, 0)";
    let prune = async |node: &Node| {
        shared.database.sql(insert);
        node.store.prune(node.now(), node.now()).await.unwrap();
        shared.database.sql("SELECT count(*) FROM requests")
    };
    assert_eq!(prune(&one).await, "0");
    assert_eq!(prune(&other).await, "1");
    assert_eq!(prune(&one).await, "0");
    one.store.close().await;
    assert_eq!(prune(&other).await, "0");
}

#[tokio::test]
async fn nodes_are_listed_and_notice_those_that_are_gone() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.store.renew(Activity { asking: 2, invoking: 3 }).await.unwrap();
    let nodes = other.store.nodes().await.unwrap();
    assert_eq!(nodes.iter().map(|node| node.activity.asking).collect::<Vec<_>>(), [2, 0]);
    assert!(nodes[0].url.starts_with("http://node") && nodes[0].seen_at >= nodes[0].started_at);
    assert!(one.store.has_peers() && other.store.has_peers());
    let Renewal { lapsed, peer_gone, next } = other.renew().await;
    assert!(!lapsed && !peer_gone && next <= Duration::from_secs(5), "{next:?}");
    // The lease of a node that does not renew it is noticed when it runs out.
    let soon = "UPDATE nodes SET lease_until = now() + interval '2 s' WHERE no = ";
    shared.database.sql(&format!("{soon}{}", one.number()));
    assert!(other.renew().await.next <= Duration::from_millis(2001));
    expire(&shared.database, &one);
    assert!(other.renew().await.peer_gone && !other.store.has_peers());
    assert_eq!(other.store.nodes().await.unwrap().len(), 1);
    assert!(one.renew().await.lapsed && !one.renew().await.lapsed);
    assert_eq!(other.store.nodes().await.unwrap().len(), 2);
}

/// Nodes start their own processes of a tool server, and one of them has all its calls.
#[tokio::test]
async fn one_node_at_a_time_is_the_host_of_a_tool_server_that_nodes_start() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    let hosts = || (one.store.hosts(STARTED), other.store.hosts(STARTED));
    assert_eq!(hosts(), (true, false));
    // Every node sends requests to servers that have an address of their own.
    assert!(one.store.hosts(SERVER) && other.store.hosts(SERVER));
    one.send(new("t", Some("hello"))).await.unwrap();
    one.send(to("t", calls(1, &[STARTED, STARTED]))).await.unwrap();
    let [first, second] = one.due(WorkKind::Invoke, STARTED).await.try_into().unwrap();
    assert!(one.load(&first).await.is_some() && one.load(&second).await.is_some());
    assert!(!other.renew().await.peer_gone && !other.store.hosts(STARTED));
    expire(&shared.database, &one);
    assert!(other.renew().await.peer_gone);
    assert!(other.load(&first).await.is_some());
    // The first node is back. It is no longer the host, and its claims on work of the server end.
    assert!(one.renew().await.lapsed);
    assert_eq!(hosts(), (false, true));
    assert_eq!(shared.database.sql("SELECT count(*) FROM calls WHERE claim IS NULL"), "1");
    assert!(other.load(&second).await.is_some());
    // A node that is stopped has no servers any more, and a new process of a node takes over those of the one before.
    other.store.leave().await.unwrap();
    assert!(one.renew().await.peer_gone);
    assert!(one.store.hosts(STARTED));
    let again =
        Node::with(parts(&shared.database.url(), &one.store.inner.node.1.name, rules(Limits::default())));
    assert!(again.store.hosts(STARTED));
    assert!(!other.renew().await.peer_gone && !other.store.hosts(STARTED));
}

#[tokio::test]
async fn claims_that_a_former_host_cannot_free_at_first_are_freed_later_and_keep_their_attempts() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    one.send(to("t", calls(1, &[STARTED]))).await.unwrap();
    let call = one.due(WorkKind::Invoke, STARTED).await.remove(0);
    assert!(one.load(&call).await.is_some());
    shared.database.sql(
        "UPDATE calls SET attempts = 2; \
         CREATE FUNCTION refuse() RETURNS trigger AS 'BEGIN RAISE EXCEPTION ''refused''; END' LANGUAGE plpgsql; \
         CREATE TRIGGER refuse BEFORE UPDATE ON calls EXECUTE FUNCTION refuse()",
    );
    expire(&shared.database, &one);
    other.renew().await;
    // The renewal succeeds nevertheless.
    assert!(one.renew().await.lapsed && !one.store.hosts(STARTED));
    let call_row = || shared.database.sql("SELECT claim, attempts FROM calls");
    assert_eq!(call_row(), format!("{}|2", one.number()));
    shared.database.sql("DROP TRIGGER refuse ON calls");
    assert!(!one.renew().await.lapsed);
    assert_eq!(call_row(), "|2");
    // A node gives up only its own claims.
    assert!(other.load(&call).await.is_some());
    one.store.release(&call).await.unwrap();
    assert_eq!(call_row(), format!("{}|2", other.number()));
    other.store.release(&call).await.unwrap();
    assert_eq!(call_row(), "|2");
}

/// A clock that is wrong.
struct Shifted(i64);

impl Clock for Shifted {
    fn now(&self) -> Timestamp {
        Timestamp(SystemClock.now().0 + self.0)
    }
}

#[tokio::test]
async fn the_clock_of_the_database_decides_where_those_of_the_nodes_differ_by_a_minute() {
    let shared = Shared::new();
    let url = shared.database.url();
    let [ahead, behind] = [60_000, -60_000].map(|shift| {
        let parts = parts(&url, &format!("shifted {shift}"), rules(Limits::default()));
        let clock = DatabaseClock::new(Arc::new(Shifted(shift)), parts.prepared.now);
        Node::with(Parts { time: Time::Database(Arc::new(clock)), ..parts })
    });
    for node in [&ahead, &behind] {
        assert!(!node.renew().await.lapsed);
        let difference = node.now().0 - SystemClock.now().0;
        assert!(difference.abs() < 5_000, "{difference}");
    }
    assert_eq!(ahead.store.nodes().await.unwrap().len(), 2);
    ahead.send(new("t", Some("hello"))).await.unwrap();
    let question = ahead.due(WorkKind::Ask, MODEL).await.remove(0);
    assert!(ahead.load(&question).await.is_some());
    // A retry of the node whose clock is ahead is due at the same time for both.
    let later = ahead.now().plus(Duration::from_millis(300));
    ahead.store.postpone(&question, later, 1, "failed".into()).await.unwrap();
    assert!(behind.load(&question).await.is_none());
    rap_testkit::until("it is due", async || behind.now() >= later).await;
    assert!(ahead.now().0 - later.0 < 5_000);
    assert!(behind.load(&question).await.is_some());
    let created: i64 = shared.database.sql("SELECT created_at FROM threads").parse().unwrap();
    assert!((created - SystemClock.now().0).abs() < 10_000);
}

/// Creates the tables as they were in an earlier version.
fn create_schema(database: &TestDatabase<'_>, version: usize) {
    let check: String = key().mac(&[b"rap store"]).iter().map(|byte| format!("{byte:02x}")).collect();
    let row = format!(
        "INSERT INTO rap_store (version, key_check, public_url) VALUES ({version}, '\\x{check}', '{PUBLIC_URL}')"
    );
    let migrations = migrate::MIGRATIONS[..version].join("; ");
    database.sql(&[migrate::STORE, &row, &migrations].join("; "));
}

/// Returns the number of locks of this database that meet a condition.
fn locks(database: &TestDatabase<'_>, condition: &str) -> String {
    database.sql(&format!(
        "SELECT count(*) FROM pg_locks WHERE {condition} \
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ))
}

#[tokio::test]
async fn a_migration_changes_no_table_before_the_steps_in_progress_have_ended() {
    let shared = Shared::new();
    create_schema(&shared.database, 7);
    let address = Address::parse(&Secret::new(shared.database.url())).unwrap();
    let step = address.connect().await.unwrap();
    step.batch_execute("BEGIN; SELECT no FROM threads FOR UPDATE").await.unwrap();
    let start = tokio::task::spawn_blocking(move || {
        prepare_blocking(&address, &key(), PUBLIC_URL, &plain_node(), &rules(Limits::default())).map(drop)
    });
    let waits = "relation = 'threads'::regclass AND mode = 'ExclusiveLock' AND NOT granted";
    rap_testkit::until("it waits", async || locks(&shared.database, waits) == "1").await;
    let changed = "relation = 'calls'::regclass AND mode = 'AccessExclusiveLock'";
    assert_eq!(locks(&shared.database, changed), "0");
    step.batch_execute("SELECT count(*) FROM calls; COMMIT").await.unwrap();
    start.await.unwrap().unwrap();
    let version = migrate::KNOWN.to_string();
    assert_eq!(shared.database.sql("SELECT version FROM rap_store"), version);
}

#[tokio::test]
async fn a_database_of_the_first_schema_is_migrated_once_while_an_old_node_goes_on() {
    let shared = Shared::new();
    let url = shared.database.url();
    create_schema(&shared.database, 1);
    let starts = (0..4).map(|_| {
        let url = url.clone();
        tokio::task::spawn_blocking(move || {
            prepare_blocking(
                &Address::parse(&Secret::new(url)).unwrap(),
                &key(),
                PUBLIC_URL,
                &plain_node(),
                &rules(Limits::default()),
            )
            .map(drop)
        })
    });
    for started in starts.collect::<Vec<_>>() {
        started.await.unwrap().unwrap();
    }
    let version = migrate::KNOWN;
    assert_eq!(shared.database.sql("SELECT version, oldest FROM rap_store"), format!("{version}|2"));
    // The statements of a node of the first schema, which knows no claims.
    let node = Node::on(&url);
    node.send(new("t", Some("hello"))).await.unwrap();
    shared.database.sql(
        "INSERT INTO asks (thread, session, turn, agent, destination, due_at) \
         SELECT * FROM unnest(ARRAY[1::bigint], ARRAY[1::bigint], ARRAY[2::bigint], ARRAY['default'], ARRAY['m'], \
         ARRAY[1::bigint]) ON CONFLICT (thread) DO UPDATE SET turn = excluded.turn, attempts = 0; \
         UPDATE asks SET turn = 1",
    );
    assert_eq!(node.due(WorkKind::Ask, MODEL).await.len(), 1);
}

#[tokio::test]
async fn a_node_works_on_a_newer_schema_as_long_as_that_permits_it() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    let newer = migrate::KNOWN + 1;
    shared.database.sql(&format!("UPDATE rap_store SET version = {newer}"));
    let other = Node::on(&shared.database.url());
    other.send(new("t", Some("hello"))).await.unwrap();
    assert_eq!(shared.database.sql("SELECT version FROM rap_store"), newer.to_string());
    shared.database.sql(&format!("UPDATE rap_store SET oldest = {newer}"));
    let url = Secret::new(shared.database.url());
    let settings = plain_node();
    let address = Address::parse(&url).unwrap();
    let refused = prepare_blocking(&address, &key(), PUBLIC_URL, &settings, &rules(Limits::default()));
    let refused = refused.err().expect("it is too old").to_string();
    let expected = format!("needs nodes that know its schema version {newer}");
    assert!(refused.contains(&expected), "{refused}");
    // A node that runs notices it and stops.
    assert!(matches!(node.store.renew(Activity::default()).await, Err(Error::Closed)));
    assert!(matches!(node.send(to("t", enqueued("more"))).await, Err(Error::Closed)));
    assert!(node.store.is_readable().await.is_err());
}

fn origin() -> Origin {
    Origin { key_id: "7777".into(), key_ids: Vec::new(), public_url: PUBLIC_URL.into() }
}

#[tokio::test]
async fn a_call_that_another_node_may_be_sending_moves_as_one_that_was_sent() {
    let shared = Shared::new();
    let [one, other] = two(&shared.database).await;
    one.send(new("t", Some("hello"))).await.unwrap();
    one.send(to("t", calls(1, &[SERVER, SERVER]))).await.unwrap();
    let first = other.due(WorkKind::Invoke, SERVER).await.remove(0);
    assert!(other.load(&first).await.is_some());
    one.store.pack(&id("t"), &origin(), vec![1]).await.unwrap();
    let records = one.store.records(&id("t"), 0).await.unwrap();
    let is_sent = |text: &&String| match Record::read(text).unwrap() {
        Record::Row(row) => row.table == CALL && row.awaits_callback(),
        _ => false,
    };
    assert_eq!(records.iter().filter(is_sent).count(), 1);
}

#[tokio::test]
async fn a_fork_that_is_made_while_its_source_moves_away_keeps_its_history() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    node.send(new("source", Some("hello"))).await.unwrap();
    node.send(to("source", answer(1, "I see"))).await.unwrap();
    let target = Target::Fork { source: id("source"), at: None, id: id("fork"), incarnation: 5 };
    let begin = rap_agent::Input::Begin { message: Some("what if".into()) };
    node.send(Message::new(target, begin)).await.unwrap();
    let before = node.texts("fork").await;
    assert!(before.contains(&"I see".to_owned()), "{before:?}");
    // The transaction that makes the fork is still open when the move begins.
    let source = shared.database.sql("SELECT no FROM threads WHERE id = 'source'");
    let inherits = shared.database.sql(
        "WITH old AS (SELECT inherits FROM threads WHERE id = 'fork'), \
         hidden AS (UPDATE threads SET source = NULL, inherits = 0 WHERE id = 'fork') SELECT inherits FROM old",
    );
    let fork = Address::parse(&Secret::new(shared.database.url())).unwrap().connect().await.unwrap();
    let sql = format!(
        "BEGIN; SELECT 1 FROM threads WHERE no = {source} FOR KEY SHARE; \
         UPDATE threads SET source = {source}, inherits = {inherits} WHERE id = 'fork'"
    );
    fork.batch_execute(&sql).await.unwrap();
    // Steps of the source do not wait for the fork.
    node.send(to("source", enqueued("meanwhile"))).await.unwrap();
    let (source, origin) = (id("source"), origin());
    let (packed, ()) = tokio::join!(node.store.pack(&source, &origin, vec![1]), async {
        rap_testkit::until("the move waits", async || shared.database.sql(WAITING) == "1").await;
        fork.batch_execute("COMMIT").await.unwrap();
    });
    packed.unwrap();
    assert_eq!(node.texts("fork").await, before);
}

/// A node knows the keys of threads. A session that comes back has other keys, and another node has put it into use.
#[tokio::test]
async fn a_session_that_was_away_is_found_by_every_node() {
    let shared = Shared::new();
    let [node, other] = [(); 2].map(|()| Node::on(&shared.database.url()));
    for node in [&node, &other] {
        node.send(new("t", Some("hello"))).await.ok();
        node.send(to("t", enqueued("more"))).await.unwrap();
    }
    let origin = origin();
    let key = node.store.thread(&id("t"), &Visibility::All).await.unwrap().thread.key;
    node.store.pack(&id("t"), &origin, vec![1]).await.unwrap();
    let records = node.store.records(&id("t"), 0).await.unwrap();
    assert!(matches!(other.send(to("t", enqueued("away"))).await, Err(Error::NoThread)));
    node.store.mark_left(&id("t"), &[1]).await.unwrap();
    node.store.drop_parcel(&id("t")).await.unwrap();
    node.store.begin_parcel(&id("t")).await.unwrap();
    node.store.add_records(&id("t"), 0, records).await.unwrap();
    node.store.unpack(&id("t")).await.unwrap();
    // The state of a node that received no message in the meantime.
    other.store.inner.directory.add(id("t"), key, SessionKey(key));
    for node in [&other, &node] {
        node.send(to("t", enqueued("back"))).await.unwrap();
    }
    let row = other.store.thread(&id("t"), &Visibility::All).await.unwrap();
    assert_ne!(row.thread.key, key);
    assert_eq!(row.head.queued().inputs, 4);
}
