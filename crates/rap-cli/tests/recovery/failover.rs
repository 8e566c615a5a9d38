//! A failover of the database: three Postgres servers with synchronous replication, whose primary is killed under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rap_testkit::postgres::replication::Cluster;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Setup, Tools, until};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::fleet::{PUBLIC_URL, post, until_nodes};
use crate::support::{Api, start};

/// Number of clients. Each has a thread of its own and one that all of them share.
const CLIENTS: usize = 6;
/// Number of messages that are acknowledged before the primary is killed, and again afterwards.
const MESSAGES: usize = 120;

/// The messages of a client.
#[derive(Default)]
struct Sent {
    /// Messages that were acknowledged, with their threads.
    acknowledged: Vec<(String, String)>,
    /// Messages whose client was told to repeat them, which it does not do here.
    refused: Vec<(String, String)>,
}

/// Sends messages until it is told to stop.
fn client(
    number: usize,
    apis: [Api; 2],
    stop: Arc<AtomicBool>,
    count: Arc<std::sync::Mutex<usize>>,
) -> JoinHandle<Sent> {
    tokio::spawn(async move {
        let mut sent = Sent::default();
        for message in 0.. {
            if stop.load(Ordering::SeqCst) {
                break;
            }
            let (api, other) = (&apis[message % 2], message / 2 % 2 == 0);
            let thread = if other { "shared".to_owned() } else { format!("own{number}") };
            let text = format!("say client {number} message {message}.");
            let reply = api.post(&format!("/v1/threads/{thread}/messages"), &json!({"text": text})).await;
            match reply.status {
                202 => {
                    sent.acknowledged.push((thread, text));
                    *count.lock().unwrap() += 1;
                }
                429 => tokio::time::sleep(Duration::from_millis(50)).await,
                503 => {
                    sent.refused.push((thread, text));
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                status => panic!("{status}: {reply:?}"),
            }
        }
        sent
    })
}

/// Checks that messages that were acknowledged are there once, and others at most once.
async fn check(api: &Api, kept: &[(String, String)], refused: &[(String, String)]) {
    let mut said = Vec::new();
    for thread in (0..CLIENTS).map(|number| format!("own{number}")).chain(["shared".to_owned()]) {
        api.until_idle(&thread).await;
        let texts = api.texts(&thread).await;
        said.extend(texts.into_iter().map(|text| (thread.clone(), text)));
    }
    let times = |message: &(String, String)| said.iter().filter(|said| *said == message).count();
    for message in kept {
        assert_eq!(times(message), 1, "acknowledged: {message:?}");
    }
    for message in refused {
        assert!(times(message) <= 1, "refused: {message:?}");
    }
}

/// Proves: LC-23, LC-37
#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_when_the_primary_is_killed_under_load() {
    let (cluster, tools) = (Cluster::start(), Tools::start().await);
    let database = cluster.primary().database();
    let url = cluster.url(database.name());
    let key = "7e".repeat(32);
    let setup = || {
        let setup = Setup::new().tools(&tools).server(&format!("public_url = {PUBLIC_URL:?}"));
        setup
            .store(&format!("url = {url:?}\nkey = {key:?}\nlease = \"5s\""))
            .limit("turns_per_wake = 1000000")
    };
    let [(_one, first), (_other, second)] = [start(setup()), start(setup())];
    until_nodes(&first, 2).await;
    // A call that is open during the failover, one whose invocation is retried, and a thread that sleeps.
    first.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    first.until_acknowledged(&call).await;
    tools.answer_next(INVOKE, rap_testkit::peer::Reply::Status(503));
    second.create("retries", "call work {}").await;
    tools.invocation().await;
    second.create("sleeps", "call sleep {\"seconds\": 3}").await;
    first.create("shared", "say hello").await;
    for number in 0..CLIENTS {
        second.create(&format!("own{number}"), "say hello").await;
    }
    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let apis = [first.clone(), second.clone()];
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| client(number, apis.clone(), Arc::clone(&stop), Arc::clone(&count)))
        .collect();
    let acknowledged = async |more: usize| {
        let before: usize = *count.lock().unwrap();
        until("messages are acknowledged", async || *count.lock().unwrap() >= before + more).await;
    };
    acknowledged(MESSAGES).await;
    cluster.kill_primary();
    let killed = Instant::now();
    let new = cluster.promote();
    for api in [&first, &second] {
        until("it is ready again", async || api.get("/readyz").await.status == 200).await;
    }
    eprintln!("ready {:?} after the primary was killed", killed.elapsed());
    acknowledged(MESSAGES).await;
    stop.store(true, Ordering::SeqCst);
    let (mut kept, mut refused) = (Vec::new(), Vec::new());
    for client in clients {
        let sent = client.await.unwrap();
        kept.extend(sent.acknowledged);
        refused.extend(sent.refused);
    }
    eprintln!("{} messages were acknowledged, {} refused", kept.len(), refused.len());
    // Everything continues automatically.
    let retried = tools.invocation().await;
    for (thread, call) in [("calls", &call), ("retries", &retried)] {
        until("the result is accepted", async || {
            post(&second, call, &call.result("done")).await.status == 200
        })
        .await;
        first.until_said(thread, "work: done").await;
    }
    second.until_said("sleeps", "sleep: the sleep is over").await;
    check(&first, &kept, &refused).await;
    assert_eq!(new.sql(database.name(), "SELECT pg_is_in_recovery()"), "f");
}
