//! Tests of what is specific to Postgres. The suite tests what every database does.

mod batches;
mod compare;
mod fleet;
mod signals;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

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
use crate::world::{Clock, SystemClock};

crate::store::suite::suite!(super::Shared::new);

/// Number of transactions that wait for a lock.
const WAITING: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
/// A tool server that the nodes of these tests start.
const STARTED: &str = "command:own";
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
}

impl Database for Shared {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        let parts = parts(&self.database.url(), "test", rules);
        let time = Time::Given(clock);
        Arc::new(PostgresStore::new(Parts { time, on_commit, ..parts }))
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        let sql = format!(
            "UPDATE threads SET head = '{{\"phase\": \"confused\"}}' WHERE id = '{thread}' RETURNING 1"
        );
        assert_eq!(self.database.sql(&sql), "1");
    }

    fn execute(&self, _: &str, postgres: &str) {
        self.database.sql(postgres);
    }

    fn setting(&self) -> crate::settings::Database {
        use crate::settings::PostgresDatabase;
        crate::settings::Database::Postgres(PostgresDatabase {
            url: Secret::new(self.database.url()),
            key: Secret::new("7".repeat(64)),
            listen_url: None,
            lease: PostgresDatabase::LEASE,
        })
    }

    fn row_counts(&self) -> std::collections::BTreeMap<String, i64> {
        let tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'";
        let tables = self.database.sql(tables);
        let counts = tables.lines().map(|table| format!("SELECT '{table}', count(*) FROM {table}"));
        let counts = self.database.sql(&counts.collect::<Vec<_>>().join(" UNION ALL "));
        let count = |line: &str| {
            let (table, count) = line.split_once('|').unwrap();
            (table.to_owned(), count.parse().unwrap())
        };
        counts.lines().map(count).collect()
    }
}

impl Database for Arc<Shared> {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        Shared::open(self, rules, clock, on_commit)
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        Shared::corrupt_head(self, thread);
    }

    fn execute(&self, sqlite: &str, postgres: &str) {
        Shared::execute(self, sqlite, postgres);
    }

    fn setting(&self) -> crate::settings::Database {
        Shared::setting(self)
    }

    fn row_counts(&self) -> std::collections::BTreeMap<String, i64> {
        Shared::row_counts(self)
    }
}

/// Adds a node to a database, and returns the parts of its store. It reserves no slots.
fn parts(url: &str, name: &str, rules: StepSettings) -> Parts {
    let address = Address::parse(&Secret::new(url)).unwrap();
    let lease = std::time::Duration::from_secs(60);
    let node = NodeSettings {
        name: name.to_owned(),
        url: format!("http://{name}"),
        lease,
        started: vec![STARTED.into()],
    };
    let prepared = prepare_blocking(&address, &key(), PUBLIC_URL, &node, &rules).unwrap();
    let time = Time::Database(Arc::new(DatabaseClock::new(Arc::new(SystemClock), prepared.now)));
    let (on_commit, reserve): (OnCommit, Reserve) = (Box::new(|_| ()), Box::new(|_, _, _| None));
    Parts { address, listen: None, node, prepared, key: key(), rules, time, on_commit, reserve }
}

/// A node on a database: a store with its own connections and its own clock.
struct Node {
    store: PostgresStore,
    commits: Commits,
}

impl Node {
    /// Starts a node with a name of its own.
    fn on(url: &str) -> Node {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("node{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Node::with(parts(url, &name, rules(Limits::default())))
    }

    fn with(parts: Parts) -> Node {
        let commits = Commits::default();
        let reported = commits.clone();
        let on_commit = Box::new(move |committed| reported.push(committed));
        Node { store: PostgresStore::new(Parts { on_commit, ..parts }), commits }
    }

    /// Starts a node whose statements go through a proxy. The next commit is one of the test.
    async fn through(proxied: String, parts: Parts) -> Node {
        let address = Address::parse(&Secret::new(proxied)).unwrap();
        let node = Node::with(Parts { address, listen: Some(parts.address), ..parts });
        rap_testkit::until("it listens", async || node.store.inner.signals.is_listening()).await;
        node
    }

    fn number(&self) -> i64 {
        self.store.inner.node.0.0
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
async fn a_commit_of_unknown_outcome_is_resolved_by_asking_the_database() {
    let shared = Shared::new();
    let proxy = Proxy::start(shared.database.port()).await;
    // All commits of this node go through the proxy.
    let parts = parts(&shared.database.url(), "node", rules(Limits::default()));
    let node = Node::through(shared.database.url_at(proxy.port), parts).await;
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

/// A message that was lost must not count as stored because another node has stepped the thread since.
#[tokio::test]
async fn a_lost_commit_is_noticed_when_another_node_has_stepped_the_thread_meanwhile() {
    let shared = Shared::new();
    let proxy = Proxy::start(shared.database.port()).await;
    let parts = parts(&shared.database.url(), "node", rules(Limits::default()));
    let node = Node::through(shared.database.url_at(proxy.port), parts).await;
    let other = Node::on(&shared.database.url());
    node.send(new("t", Some("hello"))).await.unwrap();
    for (fault, stands) in [(Fault::LoseCommitAndLeave, false), (Fault::LoseAnswerAndLeave, true)] {
        let text = format!("{fault:?}");
        proxy.set(fault);
        let (sent, ()) = tokio::join!(node.send(to("t", enqueued(&text))), async {
            // The head is free as soon as the database has noticed that the connection is gone.
            other.send(to("t", enqueued("of the other node"))).await.unwrap();
            proxy.set(Fault::None);
        });
        assert_eq!(sent.is_ok(), stands, "{fault:?}: {sent:?}");
        let waiting = shared.database.sql(&format!("SELECT count(*) FROM held WHERE body LIKE '%{text}%'"));
        assert_eq!(waiting, if stands { "1" } else { "0" }, "{fault:?}");
    }
}

/// After a restart the number of a lost transaction may be used again, so nobody knows.
#[tokio::test]
async fn a_commit_of_unknown_outcome_is_not_acknowledged_after_a_restart_of_the_database() {
    let server = Server::own();
    let database = server.database();
    let proxy = Proxy::start(database.port()).await;
    let parts = parts(&database.url(), "node", rules(Limits::default()));
    let node = Node::through(database.url_at(proxy.port), parts).await;
    node.send(new("t", Some("hello"))).await.unwrap();
    node.commits.take();
    proxy.set(Fault::LoseAnswerAndLeave);
    let (sent, ()) = tokio::join!(node.send(to("t", answer(1, "an answer"))), async {
        rap_testkit::until("the connection is cut", async || proxy.cut() == 1).await;
        server.stop();
        server.start();
        proxy.set(Fault::None);
    });
    assert!(matches!(sent, Err(Error::Unavailable(_))), "{sent:?}");
    assert!(node.commits.take().is_empty());
    // It was stored, which a sender that repeats it finds out. The node looks for its work in the store.
    assert_eq!(node.store.receive().await.unwrap(), [Signal::Lost]);
    assert!(matches!(node.send(to("t", answer(1, "an answer"))).await, Err(Error::Ignored(_))));
}

/// Settings of a transaction end with it, so a pooler hands on a connection as it was.
#[tokio::test]
async fn every_transaction_has_time_limits_of_its_own() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    let limits = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout'), \
                  current_setting('idle_in_transaction_session_timeout')";
    let inside = async |begin: &'static str| -> Vec<String> {
        let tx = node.store.inner.others.begin(begin).await.unwrap();
        let rows = tx.finish(&[Statement::new(limits)]).await.unwrap().remove(0);
        (0..3).map(|at| rows[0].get(at)).collect()
    };
    assert_eq!(inside(statement::BEGIN).await, ["2s", "5s", "5s"]);
    assert_eq!(inside(statement::BEGIN_SOON).await, ["2s", "5s", "5s"]);
    assert_eq!(inside(BEGIN_READ).await, ["0", "5s", "5s"]);
    // A migration and a move may take longer, but they hold no locks while their node is frozen.
    assert_eq!(inside(migrate::BEGIN).await[2], "5s");
    assert_eq!(inside(super::transfer::BEGIN_MOVE).await, ["10s", "15s", "5s"]);
    // A connection of the same pool, outside of any transaction.
    let outside = node.store.inner.others.begin("SELECT 1").await.unwrap();
    let rows = outside.finish(&[Statement::new(limits)]).await.unwrap().remove(0);
    assert_eq!((0..3).map(|at| rows[0].get(at)).collect::<Vec<String>>(), ["0", "0", "0"]);
    // A node that freezes in the middle of a transaction does not hold its locks for longer.
    node.send(new("t", Some("hello"))).await.unwrap();
    let mut frozen = node.store.inner.others.begin(statement::BEGIN).await.unwrap();
    frozen.query(Statement::new("SELECT 1 FROM threads FOR UPDATE")).await.unwrap();
    let began = Instant::now();
    let other = Node::on(&shared.database.url());
    other.send(to("t", enqueued("more"))).await.unwrap();
    assert!(began.elapsed() > std::time::Duration::from_secs(3), "{:?}", began.elapsed());
    drop(frozen);
}

/// Two transactions that lock rows in opposite order, one of them by hand. A batch that loses is tried again.
#[tokio::test]
async fn a_deadlock_is_resolved_by_trying_again() {
    let shared = Arc::new(Shared::new());
    let node = Node::on(&shared.database.url());
    node.send(new("t", Some("hello"))).await.unwrap();
    // The check for deadlocks comes before the time limit for locks.
    let conflicts =
        || shared.database.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()");
    let before = conflicts();
    let mut one = node.store.inner.others.begin(statement::BEGIN).await.unwrap();
    one.query(Statement::new("SELECT 1 FROM threads WHERE id = 't' FOR UPDATE")).await.unwrap();
    let writes = || {
        vec![
            Statement::new("UPDATE rap_store SET pruned_at = pruned_at"),
            Statement::new("UPDATE threads SET updated_at = updated_at WHERE id = 't'"),
        ]
    };
    let second = {
        let others = node.store.inner.others.clone();
        tokio::spawn(async move { others.write(writes()).await.map(drop) })
    };
    rap_testkit::until("the second waits", async || shared.database.sql(WAITING) == "1").await;
    let first = one.query(Statement::new("UPDATE rap_store SET pruned_at = pruned_at")).await;
    // Either of them is the victim. The one with a rule is tried again until it succeeds.
    drop(first);
    drop(one);
    second.await.unwrap().unwrap();
    rap_testkit::until("a deadlock was counted", async || conflicts() > before).await;
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
async fn the_key_of_a_database_can_be_replaced() {
    let shared = Shared::new();
    let [old, new] = ["7", "8"].map(|digit| Key::parse(&digit.repeat(64)).unwrap());
    let address = Address::parse(&Secret::new(shared.database.url())).unwrap();
    let prepare = |key: &Key| {
        let lease = std::time::Duration::from_secs(15);
        let node = NodeSettings { name: "n".into(), url: "u".into(), lease, started: Vec::new() };
        prepare_blocking(&address, key, PUBLIC_URL, &node, &rules(Limits::default())).map(drop)
    };
    prepare(&old).unwrap();
    assert!(matches!(prepare(&new), Err(PostgresError::OtherKey)));
    // A key that is used in future changes nothing yet.
    prepare(&old.with_others([&new].into_iter())).unwrap();
    prepare(&old).unwrap();
    prepare(&new.with_others([&old].into_iter())).unwrap();
    prepare(&new).unwrap();
    assert!(matches!(prepare(&old), Err(PostgresError::OtherKey)));
}

/// Every statement that runs often uses an index, and updates of heads change no index.
#[tokio::test]
async fn large_tables_are_not_scanned_and_head_updates_stay_hot() {
    let shared = Arc::new(Shared::new());
    Node::on(&shared.database.url()).store.close().await;
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
