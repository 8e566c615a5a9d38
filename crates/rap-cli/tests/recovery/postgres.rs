//! `rap serve` on Postgres: kills, a database that is unavailable, and nodes that do not belong to it.

use rap_testkit::peer::Reply;
use rap_testkit::postgres::{Database, Server};
use rap_testkit::tools::INVOKE;
use rap_testkit::{Process, Setup, Tools, until};
use serde_json::json;

use crate::support::{event, is_unavailable, start};

fn setup(tools: &Tools, database: &Database<'_>) -> Setup {
    let (url, key) = (database.url(), "7e".repeat(32));
    Setup::new().tools(tools).store(&format!("url = {url:?}\nkey = {key:?}"))
}

/// Proves: TR-13, LC-30, LC-38
#[tokio::test(flavor = "multi_thread")]
async fn everything_acknowledged_on_postgres_survives_kills_and_is_taken_once() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let (mut rap, api) = start(setup(&tools, &database));
    tools.answer_always(INVOKE, Reply::Hang);
    api.create("t", "call watch {}\ncall work {}").await;
    let (first, second) = (tools.invocation().await, tools.invocation().await);
    rap.kill();
    tools.answer_always(INVOKE, Reply::Status(200));
    rap.start_again();
    // Both are sent again, unchanged.
    let again = [tools.invocation().await.request.body, tools.invocation().await.request.body];
    assert!(again.contains(&first.request.body) && again.contains(&second.request.body));
    let (watch, work) =
        if first.request.body["operation"] == "watch" { (first, second) } else { (second, first) };
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    rap.restart();
    assert_eq!(api.thread("t").await["waiting_on"][0]["call_id"], work.name());
    assert_eq!(work.post(&work.result("done")).await.status, 200);
    rap.restart();
    api.until_status("t", "idle").await;
    for _ in 0..2 {
        assert_eq!(work.post(&work.result("done")).await.status, 200);
        assert_eq!(watch.post(&event(&watch, "event 1")).await.status, 200);
    }
    api.until_said("t", "watch: event 1").await;
    rap.restart();
    let texts = api.texts("t").await;
    for text in ["watching", "done", "event 1"] {
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{text}: {texts:?}");
    }
}

/// Proves: LC-23, LC-37
#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_away_nothing_is_accepted_or_lost_and_work_goes_on_by_itself_afterwards() {
    let (server, tools) = (Server::own(), Tools::start().await);
    let database = server.database();
    let (_rap, api) = start(setup(&tools, &database));
    api.create("waits", "call work {}").await;
    let call = tools.invocation().await;
    api.until_acknowledged(&call).await;
    api.create("asks", "sleep 0.3\nsay at last").await;
    server.stop();
    for number in 0..3 {
        let refused =
            api.post("/v1/threads", &json!({"id": format!("n{number}"), "message": "say hello"})).await;
        assert!(is_unavailable(&refused), "{refused:?}");
        let refused = api.post("/v1/threads/waits/messages", &json!({"text": "say refused"})).await;
        assert!(is_unavailable(&refused), "{refused:?}");
        assert_eq!(call.post(&call.result("done")).await.status, 503);
    }
    assert_eq!(api.get("/readyz").await.status, 503);
    server.start();
    until("it is ready again", async || api.get("/readyz").await.status == 200).await;
    // The answer of the model was not lost.
    api.until_said("asks", "at last").await;
    until("the result is accepted", async || call.post(&call.result("done")).await.status == 200).await;
    api.until_said("waits", "work: done").await;
    assert!(!api.texts("waits").await.contains(&"say refused".to_owned()));
    assert_eq!(api.get("/v1/threads/n0").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_key_or_public_url_is_refused_at_its_start() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let (mut rap, _) = start(setup(&tools, &database));
    let elsewhere = rap.serve_command_on("127.0.0.1:0");
    rap.stop();
    let log = Process::refused(elsewhere);
    assert!(log.contains("but the nodes of this Postgres database use http://127.0.0.1:"), "{log}");
    let url = database.url().replace("postgres@", "postgres:s3cr3t@");
    let store = format!("url = {url:?}\nkey = \"{}\"", "8e".repeat(32));
    let other = Setup::new().tools(&tools).store(&store).prepare(tempfile::tempdir().unwrap());
    let log = Process::refused(other.serve_command());
    assert!(log.contains("store.key is not the key that this Postgres database was created with"), "{log}");
    assert!(!log.contains("s3cr3t") && !log.contains("8e8e"), "{log}");
    rap.start_again();
}
