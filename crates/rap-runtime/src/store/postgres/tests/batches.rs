//! Batches of messages: round trips, conflicts with other transactions, and locks.

use rap_agent::Input;

use super::*;
use crate::store::suite::fixture::subscribed;

/// Applies one message to each of these threads, and asserts that each batch takes two round trips.
async fn two_flights(node: &Node, names: &[String], kind: &str, input: impl Fn(&str) -> Input) {
    let count = || (node.store.inner.batches.get(), node.store.inner.steps.round_trips.get());
    let (batches, round_trips) = count();
    let messages = names.iter().map(|name| to(name, input(name))).collect();
    for result in node.apply(messages).await {
        result.unwrap();
    }
    let (batches, round_trips) = (count().0 - batches, count().1 - round_trips);
    assert_eq!(round_trips, 2 * batches, "{kind}: {batches} batches");
    assert!(batches <= 4, "{kind}: {batches} batches");
}

#[tokio::test]
async fn every_kind_of_input_takes_two_round_trips() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    let names: Vec<String> = (0..16).map(|number| format!("thread_{number}")).collect();
    for result in node.apply(names.iter().map(|name| new(name, Some("hello"))).collect()).await {
        result.unwrap();
    }
    two_flights(&node, &names, "answer with calls", |_| calls(1, &[SERVER, SERVER, SERVER])).await;
    let mut open = std::collections::HashMap::new();
    for name in &names {
        let head = node.store.thread(&id(name), &Visibility::All).await.unwrap().head;
        open.insert(name.clone(), head.open_calls().map(|call| call.id.clone()).collect::<Vec<_>>());
    }
    two_flights(&node, &names, "result", |name| result(&open[name][0], "done")).await;
    two_flights(&node, &names, "confirmation", |name| subscribed(&open[name][1])).await;
    two_flights(&node, &names, "last result", |name| result(&open[name][2], "done")).await;
    two_flights(&node, &names, "answer", |_| answer(2, "I see")).await;
    two_flights(&node, &names, "event", |name| inline_event(&open[name][1], "news", Some("e1"))).await;
    two_flights(&node, &names, "message", |_| enqueued("more")).await;
    two_flights(&node, &names, "interrupt", |_| Input::Interrupt).await;
    two_flights(&node, &names, "close", |_| Input::Close).await;
}

/// The transaction of a batch waits for one that waits for a head of the batch.
#[tokio::test]
async fn a_batch_that_is_the_victim_of_a_deadlock_is_applied_again() {
    let shared = Shared::new();
    let node = Node::on(&shared.database.url());
    node.send(new("t", Some("hello"))).await.unwrap();
    // The other transaction checks for deadlocks only much later, so the batch is the victim.
    let other = Address::parse(&Secret::new(shared.database.url())).unwrap().connect().await.unwrap();
    let holds = "BEGIN; SET LOCAL deadlock_timeout = '60s'; LOCK TABLE entries IN SHARE MODE";
    other.batch_execute(holds).await.unwrap();
    let conflicts =
        || shared.database.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()");
    let before = conflicts();
    let send = node.send(to("t", answer(1, "I see")));
    let (sent, ()) = tokio::join!(send, async {
        rap_testkit::until("the batch waits", async || shared.database.sql(WAITING) == "1").await;
        other.batch_execute("SELECT 1 FROM threads WHERE id = 't' FOR UPDATE; COMMIT").await.unwrap();
    });
    sent.unwrap();
    assert_eq!(node.texts("t").await, ["hello", "I see"]);
    rap_testkit::until("a deadlock was counted", async || conflicts() > before).await;
}

/// Otherwise the outcome of a commit would be unknown, and its message be answered 503.
#[tokio::test]
async fn the_run_of_a_server_is_the_same_in_every_time_zone() {
    let shared = Shared::new();
    let address = Address::parse(&Secret::new(shared.database.url())).unwrap();
    let mut runs = std::collections::BTreeSet::new();
    for zone in ["UTC", "Asia/Tokyo"] {
        let client = address.connect().await.unwrap();
        client.batch_execute(&format!("SET TIME ZONE '{zone}'")).await.unwrap();
        runs.insert(client.query_typed_one(outcome::NOW, &[]).await.unwrap().get::<_, String>(2));
    }
    assert_eq!(runs.len(), 1, "{runs:?}");
}

/// Connections behind a transaction pooler have no state that outlives a transaction, and a lock that is no row is
/// invisible.
#[test]
fn no_statement_takes_an_advisory_lock() {
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/postgres");
    let mut directories = vec![sources];
    let function = ["pg", "advisory"].join("_");
    while let Some(directory) = directories.pop() {
        for file in directory.read_dir().unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!text.contains(&function), "{}", path.display());
            }
        }
    }
}
