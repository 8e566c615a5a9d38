//! `/openapi.json` matches the running server: schemathesis sends valid and invalid requests and checks every answer. It
//! is installed from PyPI the first time.

use std::path::PathBuf;
use std::process::Command;

use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, Tools, python, until};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SCHEMATHESIS: &str = "schemathesis==4.32.5";
/// Number of generated requests for each operation, besides those that cover its schema.
const EXAMPLES: &str = "10";
/// Fixed seed for reproducible requests.
const SEED: &str = "1";

/// Path of the program in its own virtual environment.
fn schemathesis() -> PathBuf {
    let name = SCHEMATHESIS.replace("==", "-");
    python::environment(env!("CARGO_TARGET_TMPDIR"), &name, &[SCHEMATHESIS]).join("bin/schemathesis")
}

/// A runtime with at least one item of each kind, so that answers are not empty.
async fn busy(setup: Setup, tools: &Tools) -> Rap {
    let rap = setup.tools(tools).start();
    rap.post("/v1/threads", &json!({"id": "calm", "title": "Calm", "message": "say hello"}))
        .await
        .expect(201);
    rap.post("/v1/threads", &json!({"id": "asks", "user_id": "u", "message": "call work {}"}))
        .await
        .expect(201);
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}/answer", tools.url))).await;
    call.says(&call.view("bar", json!({"done": 1}))).await;
    rap.post("/v1/threads", &json!({"id": "watches", "message": "call watch {}"})).await.expect(201);
    let call = tools.invocation().await;
    call.confirms("watching").await;
    call.says(&call.event("tick")).await;
    tools.answer_next(INVOKE, Reply::Status(400));
    rap.post("/v1/threads", &json!({"id": "refused", "message": "call work {}"})).await.expect(201);
    until("a delivery is noted", async || (!rap.listing("deliveries").await.is_empty()).then_some(())).await;
    rap
}

/// Sends requests generated from the description, except for streams, which do not end, and for moves, which would make the
/// runtime connect to generated addresses.
async fn conforms(rap: Rap, more: &'static [&'static str]) {
    let checked = move || {
        let mut command = Command::new(schemathesis());
        command
            .args(["--no-color", "run", &format!("{}/openapi.json", rap.url)])
            .current_dir(rap.directory());
        command.args([
            "--exclude-path-regex",
            "(events|migrate)$",
            "--continue-on-failure",
            "--warnings",
            "off",
        ]);
        command.args(["--max-examples", EXAMPLES, "--seed", SEED, "--suppress-health-check", "all"]);
        python::run(command.args(more));
        assert!(!rap.log().contains("ERROR"), "{}", rap.log());
    };
    tokio::task::spawn_blocking(checked).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_matches_the_description_without_tokens() {
    let tools = Tools::start().await;
    let rap = busy(Setup::new(), &tools).await;
    conforms(rap, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_matches_the_description_with_tokens() {
    let tools = Tools::start().await;
    let rap = busy(Setup::new().token("client-token"), &tools).await;
    conforms(rap, &["--header", "Authorization: Bearer client-token"]).await;
}

#[tokio::test]
async fn the_description_needs_no_token_and_lists_every_path() {
    let rap = Setup::new().token("client-token").agent("name = \"one\"").agent("name = \"two\"").start();
    let document = rap.send("GET", "/openapi.json", &[], b"").await.expect(200);
    assert_eq!(document["openapi"], "3.1.0");
    let agents = &document["components"]["schemas"]["CreateThread"]["properties"]["agent"]["enum"];
    assert_eq!(*agents, json!(["one", "two", null]));
    assert_eq!(document["info"]["x-scripted-agents"], json!(["one", "two"]));
    let paths = document["paths"].as_object().unwrap();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object().unwrap() {
            let open = operation["security"].is_null();
            assert_eq!(open, !path.starts_with("/v1/"), "{method} {path}");
            let answer = rap.send(&method.to_uppercase(), path, &[], b"").await;
            assert_eq!(answer.status, if open { 200 } else { 401 }, "{method} {path}");
        }
    }
    for name in ["threads", "calls", "subscriptions", "timers", "inbox", "deliveries", "tools", "events"] {
        assert!(paths.contains_key(&format!("/v1/{name}")), "{name}");
    }
}

#[tokio::test]
async fn streams_match_the_description() {
    let rap = Setup::new().start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let document = rap.get("/openapi.json").await.expect(200);
    for (template, path) in
        [("/v1/threads/{id}/events", "/v1/threads/t/events"), ("/v1/events", "/v1/events")]
    {
        let described =
            document["paths"][template]["get"]["responses"]["200"]["content"].as_object().unwrap();
        let described = described.keys().next().unwrap();
        let head = head(&rap, path).await;
        assert!(head.contains(&format!("content-type: {described}\r\n")), "{head}");
    }
}

/// Reads the head of an answer with an endless body.
async fn head(rap: &Rap, path: &str) -> String {
    let host = rap.url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes()).await.unwrap();
    let mut head = String::new();
    while !head.contains("\r\n\r\n") {
        head.push(char::from(stream.read_u8().await.unwrap()));
    }
    head
}
