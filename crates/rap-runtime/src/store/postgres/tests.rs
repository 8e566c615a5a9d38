//! Tests of what is specific to Postgres. The suite tests what every database does.

use std::sync::Arc;

use rap_agent::{Limits, Status};
use rap_protocol::Secret;
use rap_testkit::postgres::{Database as TestDatabase, Server};
use rap_testkit::proxy::{Fault, Proxy};

use super::*;
use crate::store::IdempotencyKey;
use crate::store::suite::Database;
use crate::store::suite::fixture::{
    Commits, Fixture, MODEL, SERVER, START, all, answer, calls, enqueued, entry_text, event, id,
    inline_event, new, result, rules, to,
};
use crate::world::Clock;

crate::store::suite::suite!(super::Shared::new);

const PUBLIC_URL: &str = "http://127.0.0.1:7420";

fn key() -> Key {
    Key::parse(&"7".repeat(64)).unwrap()
}

/// A database on the server that all tests share.
struct Shared {
    database: TestDatabase<'static>,
}

impl Shared {
    fn new() -> Shared {
        Shared { database: Server::shared().database() }
    }

    fn address(&self) -> Address {
        Address::parse(&Secret::new(self.database.url())).unwrap()
    }
}

impl Database for Shared {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        let address = self.address();
        prepare_blocking(&address, &key(), PUBLIC_URL, None, &rules).unwrap();
        Arc::new(PostgresStore::new(&address, None, key(), rules, Time::Given(clock), on_commit))
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        let sql = format!(
            "UPDATE threads SET head = '{{\"phase\": \"confused\"}}' WHERE id = '{thread}' RETURNING 1"
        );
        assert_eq!(self.database.sql(&sql), "1");
    }
}

impl Database for Arc<Shared> {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        Shared::open(self, rules, clock, on_commit)
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        Shared::corrupt_head(self, thread);
    }
}

/// A node on a database: a store with its own connections and its own clock.
struct Node {
    store: PostgresStore,
    commits: Commits,
}

impl Node {
    fn on(url: &str) -> Node {
        let address = Address::parse(&Secret::new(url)).unwrap();
        let rules = rules(Limits::default());
        let now = prepare_blocking(&address, &key(), PUBLIC_URL, None, &rules).unwrap();
        let commits = Commits::default();
        let reported = commits.clone();
        let on_commit = Box::new(move |committed| reported.push(committed));
        let time = Time::Database(Arc::new(DatabaseClock::at(now)));
        Node { store: PostgresStore::new(&address, None, key(), rules, time, on_commit), commits }
    }

    async fn apply(&self, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        self.store.apply(MessageClass::External, messages).await
    }

    async fn send(&self, message: Message) -> Result<Receipt, Error> {
        self.apply(vec![message]).await.remove(0)
    }

    async fn texts(&self, thread: &str) -> Vec<String> {
        let row = self.store.thread(&id(thread), &Visibility::All).await.unwrap();
        let history = self.store.history(&row.thread, all(row.head.seq())).await.unwrap();
        history.into_iter().map(|(_, entry)| entry_text(entry.item)).collect()
    }
}

#[tokio::test]
async fn a_batch_takes_two_round_trips_and_its_writes_are_bulk_statements() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    let names: Vec<String> = (0..64).map(|number| format!("thread_{number}")).collect();
    for result in node.apply(names.iter().map(|name| new(name, Some("hello"))).collect()).await {
        result.unwrap();
    }
    let count = || (node.store.inner.batches.get(), node.store.inner.steps.round_trips.get());
    assert_eq!(count().1, 2 * count().0);
    // One question and two answers with calls for each thread, in two rounds.
    let (batches, round_trips) = count();
    let mut messages: Vec<Message> = names.iter().map(|name| to(name, calls(1, &[SERVER, SERVER]))).collect();
    messages.extend(names.iter().map(|name| to(name, enqueued("more"))));
    assert!(node.apply(messages).await.iter().all(Result::is_ok));
    let (batches, round_trips) = (count().0 - batches, count().1 - round_trips);
    assert!(batches <= 4 && round_trips <= 3 * batches, "{batches} batches, {round_trips} round trips");
}

/// Proves: LC-16
#[tokio::test]
async fn two_nodes_apply_messages_to_the_same_threads_once_and_in_order() {
    let shared = Shared::new();
    let nodes = [Node::on(&shared.database.url()), Node::on(&shared.database.url())];
    let names: Vec<String> = (0..8).map(|number| format!("thread_{number}")).collect();
    for result in nodes[0].apply(names.iter().map(|name| new(name, Some("hello"))).collect()).await {
        result.unwrap();
    }
    let flood = async |node: usize| {
        for round in 0..10 {
            // Each node takes the threads in another order.
            let mut order: Vec<&String> = names.iter().collect();
            order.rotate_left(round % names.len());
            if node == 1 {
                order.reverse();
            }
            let text = format!("{node} {round}");
            let messages = order.iter().map(|name| to(name, enqueued(&text))).collect();
            for result in nodes[node].apply(messages).await {
                result.unwrap();
            }
        }
    };
    tokio::join!(flood(0), flood(1));
    for name in &names {
        nodes[1].send(to(name, answer(1, "an answer"))).await.unwrap();
        let texts = nodes[0].texts(name).await;
        for node in 0..2 {
            let of_node = texts.iter().filter(|text| text.starts_with(&format!("{node} ")));
            let expected: Vec<String> = (0..10).map(|round| format!("{node} {round}")).collect();
            assert_eq!(of_node.cloned().collect::<Vec<_>>(), expected, "{name}");
        }
    }
    let reported: usize = nodes.iter().map(|node| node.commits.take().len()).sum();
    assert_eq!(reported, 8 + 2 * 80 + 8);
}

#[tokio::test]
async fn the_same_request_to_two_nodes_at_once_is_applied_once() {
    let shared = Shared::new();
    let nodes = [Node::on(&shared.database.url()), Node::on(&shared.database.url())];
    for number in 0..10 {
        let key = IdempotencyKey { key: [number; 32], former_key: None, request: [1; 32] };
        let request = |node: usize| {
            let name = format!("thread_{number}_{node}");
            Message { idempotency_key: Some(key), ..new(&name, Some("hello")) }
        };
        let (one, other) = tokio::join!(nodes[0].send(request(0)), nodes[1].send(request(1)));
        assert_eq!(one.unwrap(), other.unwrap());
        // The same id at two nodes.
        let name = format!("same_{number}");
        let (one, other) = tokio::join!(nodes[0].send(new(&name, None)), nodes[1].send(new(&name, None)));
        let refused =
            [&one, &other].into_iter().filter(|result| matches!(result, Err(Error::Exists))).count();
        assert!(refused == 1 && (one.is_ok() || other.is_ok()), "{one:?} {other:?}");
    }
    assert_eq!(shared.database.sql("SELECT count(*) FROM threads"), "20");
}

#[tokio::test]
async fn a_head_that_another_transaction_holds_delays_only_its_own_messages() {
    let shared = Arc::new(Shared::new());
    let node = Node::on(&shared.database.url());
    node.apply(vec![new("held", Some("hello")), new("free", Some("hello"))]).await;
    let other = Arc::clone(&shared);
    let holder = std::thread::spawn(move || {
        let sql = "BEGIN; SELECT no FROM threads WHERE id = 'held' FOR UPDATE; SELECT pg_sleep(1); COMMIT";
        other.database.sql(sql)
    });
    let locks =
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(1)%' AND wait_event = 'PgSleep'";
    rap_testkit::until("the head is held", async || shared.database.sql(locks) == "1").await;
    let both = node.apply(vec![to("held", enqueued("one")), to("free", enqueued("two"))]);
    let free = node.send(to("free", enqueued("three")));
    let (both, free) = tokio::join!(both, async {
        let done = free.await;
        assert!(!holder.is_finished());
        done
    });
    assert!(free.is_ok() && both.iter().all(Result::is_ok), "{free:?} {both:?}");
    holder.join().unwrap();
}

/// Returns a batch for a stored thread, with a refusal, and one that creates a thread, with a repeat.
fn batches(number: u8) -> [Vec<Message>; 2] {
    let idempotency_key = Some(IdempotencyKey { key: [number; 32], former_key: None, request: [1; 32] });
    let created = || Message { idempotency_key, ..new(&format!("new_{number}"), Some("hello")) };
    [vec![to("old", enqueued("more")), to("old", answer(9, "stale"))], vec![created(), created()]]
}

#[tokio::test]
async fn a_commit_of_unknown_outcome_is_resolved_by_the_versions_of_heads() {
    let shared = Shared::new();
    let proxy = Proxy::start(shared.database.port()).await;
    drop(Node::on(&shared.database.url()));
    // All commits of this node go through the proxy.
    let address = Address::parse(&Secret::new(shared.database.url_at(proxy.port))).unwrap();
    let (commits, time) = (Commits::default(), Time::Database(Arc::default()));
    let reported = commits.clone();
    let on_commit = Box::new(move |committed| reported.push(committed));
    let store = PostgresStore::new(&address, None, key(), rules(Limits::default()), time, on_commit);
    let node = Node { store, commits };
    node.send(new("old", Some("hello"))).await.unwrap();
    let mut queued = 0_u32;
    for (number, fault) in [(1, Fault::LoseAnswer), (2, Fault::LoseCommit), (3, Fault::LoseAnswer)] {
        let stands = fault == Fault::LoseAnswer;
        for messages in batches(number) {
            // Keys for new threads are taken in a transaction of their own.
            drop(node.store.inner.directory.prepare(&node.store.inner.others, &messages).await.unwrap());
            node.commits.take();
            proxy.set(fault);
            let results = node.apply(messages).await;
            let reported = node.commits.take();
            assert_eq!(reported.len(), usize::from(stands), "{fault:?}");
            assert!(reported.iter().all(|committed| committed.late));
            match stands {
                true => assert!(!results.iter().any(|result| matches!(result, Err(Error::Unavailable(_))))),
                false => assert!(results.iter().all(|result| matches!(result, Err(Error::Unavailable(_))))),
            }
        }
        queued += u32::from(stands);
        let row = node.store.thread(&id("old"), &Visibility::All).await.unwrap();
        assert_eq!(row.head.queued().inputs, queued);
        assert_eq!(node.store.thread(&id(&format!("new_{number}")), &Visibility::All).await.is_ok(), stands);
    }
    assert_eq!(proxy.cut(), 6);
}

/// Returns whether a connection with these parameters is encrypted, or `None` if it fails.
async fn encrypted(url: String) -> Option<bool> {
    let address = Address::parse(&Secret::new(url)).unwrap();
    let client = address.connect().await.ok()?;
    let row = client.query_typed_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await;
    Some(row.unwrap().get(0))
}

#[tokio::test]
async fn connections_are_encrypted_and_checked_as_sslmode_says() {
    let server = Server::own();
    let database = server.database();
    assert_eq!(encrypted(database.url_with("sslmode=prefer")).await, Some(false));
    assert_eq!(encrypted(database.url_with("sslmode=require")).await, None);
    let authority = server.enable_tls();
    let with = |mode: &str| database.url_with(&format!("sslmode={mode}&sslrootcert={}", authority.display()));
    assert_eq!(encrypted(database.url_with("sslmode=disable")).await, Some(false));
    assert_eq!(encrypted(database.url_with("sslmode=prefer")).await, Some(true));
    assert_eq!(encrypted(database.url_with("sslmode=require")).await, Some(true));
    assert_eq!(encrypted(with("verify-full")).await, Some(true));
    // The certificate is not signed by an authority of the system, and not valid for this name.
    let other = server.dir().join("other.crt");
    std::fs::copy(server.dir().join("data/server.crt"), &other).unwrap();
    let untrusted = format!("sslmode=verify-full&sslrootcert={}", other.display());
    assert_eq!(encrypted(database.url_with(&untrusted)).await, None);
    assert_eq!(encrypted(with("verify-full").replace("127.0.0.1", "localhost")).await, None);
}

#[test]
fn an_address_is_checked_and_never_shown() {
    // Several hosts, of which the one that accepts writes is used.
    let hosts = "postgres://u:p@h1:5432,h2:5432/db?sslmode=require&target_session_attrs=read-write";
    assert!(Address::parse(&Secret::new(hosts)).is_ok());
    for (url, expected) in [
        ("mysql://u:s3cr3t@h/db", "expected postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        (
            "postgres://u:s3cr3t@h/db?sslmode=s3cr3t",
            "sslmode must be disable, prefer, require or verify-full",
        ),
        ("postgres://u:s3cr3t@h/db?nonsense=s3cr3t", "unknown option `nonsense`"),
        ("postgres://u:s3cr3t@h/db?sslmode=verify-full&sslrootcert=/missing", "cannot be read"),
    ] {
        let error = Address::parse(&Secret::new(url)).err().expect("it is not valid").to_string();
        assert!(error.contains(expected) && !error.contains("s3cr3t"), "{url}: {error}");
    }
}

#[tokio::test]
async fn one_named_node_at_a_time_uses_a_database() {
    let shared = Shared::new();
    let rules = || rules(Limits::default());
    let open = |node: &str| {
        let address = shared.address();
        prepare_blocking(&address, &key(), PUBLIC_URL, Some(node), &rules())?;
        let time = Time::Database(Arc::default());
        let store =
            PostgresStore::new(&address, Some(node.to_owned()), key(), rules(), time, Box::new(|_| ()));
        Ok::<_, PostgresError>(store)
    };
    let first = open("first").unwrap();
    // A node with the same name was restarted.
    let again = open("first").unwrap();
    let held =
        shared.database.sql("UPDATE rap_store SET lease_until = now() + interval '1 h' RETURNING node");
    assert_eq!(held, "first");
    let refused = open("second").err().expect("the first node uses it").to_string();
    assert!(refused.starts_with("the node first uses this Postgres database"), "{refused}");
    again.close().await;
    let second = open("second").unwrap();
    // The lease of a node that is gone runs out.
    shared.database.sql("UPDATE rap_store SET lease_until = now() + interval '1 s'");
    drop((first, second));
    open("third").unwrap().close().await;
}

/// Every statement that runs often uses an index, and updates of heads change no index.
#[tokio::test]
async fn large_tables_are_not_scanned_and_head_updates_stay_hot() {
    let shared = Arc::new(Shared::new());
    drop(Node::on(&shared.database.url()));
    shared.database.sql(&fill(20_000));
    let database = Arc::clone(&shared);
    let fixture = Fixture::new(Box::new(database));
    let scans = "SELECT relname, seq_scan FROM pg_stat_user_tables \
                 WHERE relname IN ('threads', 'entries', 'calls', 'event_ids', 'questions', 'asks', 'wakes', 'requests') \
                 ORDER BY 1";
    let before = shared.database.sql(scans);
    use_everything(&fixture).await;
    fixture.store.close().await;
    // The database counts when a connection ends.
    let gone = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'rap' AND datname = current_database()";
    rap_testkit::until("the connections end", async || shared.database.sql(gone) == "0").await;
    assert_eq!(shared.database.sql(scans), before);
    // With an index on a column that changes, none of them would be. A version that does not fit on its page is not.
    let updates = "SELECT n_tup_upd > 10, 2 * n_tup_hot_upd > n_tup_upd FROM pg_stat_user_tables WHERE relname = 'threads'";
    assert_eq!(shared.database.sql(updates), "t|t");
}

/// Returns SQL that fills the tables with threads that are idle, and with work that is not due.
fn fill(threads: usize) -> String {
    let far = START.0 + 1_000_000_000_000;
    format!(
        "INSERT INTO threads SELECT n, 'old_' || n, NULL, NULL, n, 0, '[]', n, 'default', NULL, NULL, 0, 0, 1, 'idle', '{{}}' \
         FROM generate_series(1, {threads}) n; \
         SELECT setval('thread_keys', {threads}); \
         INSERT INTO entries SELECT n, n, s, '{{}}' FROM generate_series(1, {threads}) n, generate_series(1, 3) s; \
         INSERT INTO calls SELECT n, n, 'call', 1, NULL, 'tool', '{SERVER}', 1, 0 FROM generate_series(1, {threads}) n; \
         INSERT INTO calls SELECT n, n, 'retried', 0, NULL, 'tool', '{SERVER}', 1, 0, {far}, {far}, 3 \
         FROM generate_series(1, {threads}) n; \
         INSERT INTO event_ids SELECT n, n, 'call', 'event', 1 FROM generate_series(1, {threads}) n; \
         INSERT INTO questions SELECT n, n, 1, 'call', '{SERVER}', '', 0, 1, 0, {far}, 2 \
         FROM generate_series(1, {threads}) n; \
         INSERT INTO asks SELECT n, n, 1, 'default', '{MODEL}', {far}, 1 FROM generate_series(1, {threads}) n; \
         INSERT INTO wakes SELECT n, n, {far}, true FROM generate_series(1, {threads}) n; \
         INSERT INTO requests SELECT sha256(n::text::bytea), n, '', 'old_' || n, 1, {far} \
         FROM generate_series(1, {threads}) n; \
         ANALYZE"
    )
}

/// Uses the verbs of the store that run often.
async fn use_everything(fixture: &Fixture) {
    let key = IdempotencyKey { key: [9; 32], former_key: None, request: [9; 32] };
    fixture.send(Message { idempotency_key: Some(key), ..new("root", Some("hello")) }).await.unwrap();
    for round in 1..=10 {
        fixture.call("root", &[SERVER, SERVER]).await;
        let due = fixture.due(WorkKind::Invoke, SERVER).await;
        fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap().expect("it is due");
        let thread = fixture.row("root").await;
        let open: Vec<_> =
            thread.head.batch().iter().map(|call| (thread.thread.key, call.id.clone())).collect();
        fixture.store.acknowledge(open.clone(), fixture.now()).await.unwrap();
        for (_, call) in &open {
            fixture.send_input("root", result(call, "done")).await.unwrap();
        }
        assert_eq!(fixture.head("root").await.turn(), round + 1);
    }
    let call = fixture.subscribe("root").await;
    fixture.send_input("root", event(&call, "an event", Some("e1"))).await.unwrap();
    fixture.send_input("root", inline_event(&call, "an event", Some("e2"))).await.unwrap();
    let store = &fixture.store;
    for kind in WorkKind::ALL {
        store.destinations(kind).await.unwrap();
        fixture.due(kind, SERVER).await;
        fixture.due(kind, MODEL).await;
    }
    store.due_timers(fixture.now(), START, &[], 64).await.unwrap();
    store.due_messages(fixture.now(), &[], 64).await.unwrap();
    store.next_due(fixture.now()).await.unwrap();
    store.prune(START, START).await.unwrap();
    let thread = fixture.row("root").await.thread;
    store.prompt_entries(&thread, 5).await.unwrap();
    store.entries_since_user(&thread, 5).await.unwrap();
    let page = || PageRequest::first(10);
    store.calls(&Visibility::All, page()).await.unwrap();
    store.subscriptions(&Visibility::All, page()).await.unwrap();
    store.timers(&Visibility::All, page()).await.unwrap();
    store.inbox(None, &Visibility::All, page()).await.unwrap();
    for status in [None, Some(Status::NeedsYou), Some(Status::Failed)] {
        store
            .threads(ThreadFilter { status, page_request: page(), ..ThreadFilter::default() })
            .await
            .unwrap();
    }
}
