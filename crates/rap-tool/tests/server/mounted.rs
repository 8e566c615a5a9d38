//! Tool servers in an axum application, health and metrics endpoints, and examples over real HTTP.

use crate::support::{Caller, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};
use rap_protocol::{Callback, parse_toolset};
use rap_testkit::http::exchange;
use rap_tool::ServeError;
use rap_tool::prelude::*;
use serde_json::{Value, json};

/// Sends a GET request and returns status and body.
async fn get(base: &str, path: &str) -> (u16, String) {
    let host = base.trim_start_matches("http://");
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    let answer = exchange(base, request.as_bytes()).await;
    (answer.status, answer.text)
}

#[tokio::test]
async fn two_servers_in_one_process_have_separate_tokens_state_and_layers() {
    let data = data_dir();
    let process = ToolProcess::start("mounted", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    let numbers = Caller::new(&format!("{}/numbers", process.url));
    let texts = Caller::new(&format!("{}/texts", process.url)).with_token("texts-token");

    let count = |id: &str| runtime.invocation("count", "t", id, json!({"by": 2}));
    let (first, second) = (count("a"), count("b"));
    assert_eq!(numbers.clone().with_token("texts-token").invoke(&first).await.0, 401);
    numbers.clone().with_token("numbers-token").accepted(&first).await;
    assert_eq!(runtime.next().await.text(), "2");
    numbers.with_token("numbers-token").accepted(&second).await;
    assert_eq!(runtime.next().await.text(), "4", "the calls of a server share its state");

    texts.accepted(&runtime.invocation("reverse", "t", "c", json!({"text": "abc"}))).await;
    assert_eq!(runtime.next().await.text(), "cba");

    let (status, answer) = get(&process.url, "/texts/.well-known/rap-toolset").await;
    assert_eq!(status, 200);
    let toolset = parse_toolset(answer.as_bytes()).unwrap();
    assert_eq!(toolset.endpoint.expose(), format!("{}/texts/invoke", process.url));
    assert_eq!(get(&process.url, "/").await.1, "two tool servers: /numbers and /texts\n");
}

#[tokio::test]
async fn a_router_requires_a_token_and_a_public_url() {
    #[derive(Deserialize, JsonSchema)]
    struct Nothing {}
    let data = data_dir();
    let server = || {
        let tool = |_: Nothing, _: Call| async { Ok("") };
        ToolServer::new("router").tool("nothing", tool).data(data.path())
    };
    let url = "https://example.com/tools";
    assert!(matches!(server().public_url(url).router().await, Err(ServeError::UnauthenticatedRouter)));
    assert!(matches!(server().bearer("t").router().await, Err(ServeError::NoPublicUrl(_))));
    assert!(matches!(server().bearer("t").public_url("x").router().await, Err(ServeError::BadPublicUrl)));
    let mounted = server().auth(Auth::OpenToAnyone).public_url(url).mount().await.unwrap();
    mounted.shut_down().await;
}

#[tokio::test]
async fn health_and_metrics_are_served() {
    #[derive(Deserialize, JsonSchema)]
    struct Nothing {}
    let server = ToolServer::new("metrics")
        .tool("echo", |_: Nothing, _: Call| async { Ok("echo") })
        .tool("hold", |_: Nothing, _: Call| std::future::pending::<Result<&str>>())
        .subscription("watch", |_: Nothing, subscribe: Subscribe| async move {
            let _subscription = subscribe.confirm("").await?;
            std::future::pending().await
        });
    let data = data_dir();
    let server = Server::start(server.limits(short_pauses()), data.path()).await;
    let (mut runtime, caller) = (Runtime::start().await, server.caller());
    assert_eq!(get(&server.url, "/healthz").await, (200, "ok\n".into()));

    let echo = runtime.invocation("echo", "t", "1", json!({}));
    caller.accepted(&echo).await;
    caller.accepted(&echo).await;
    caller.accepted(&runtime.invocation("hold", "t", "2", json!({}))).await;
    caller.accepted(&runtime.invocation("watch", "t", "3", json!({}))).await;
    runtime.next().await;
    runtime.next().await;
    runtime.answer_next(&[404]);
    caller.accepted(&runtime.invocation("echo", "t", "4", json!({}))).await;
    let settled = "SELECT count(*) FROM calls WHERE call_id = '4' AND state = 3";
    Journal::open(data.path()).until(settled, 1).await;
    caller.until_settled("t", "1").await;
    runtime.answer_always(503);
    caller.accepted(&runtime.invocation("echo", "t", "5", json!({}))).await;
    runtime.next().await;
    runtime.next().await;

    let (status, text) = get(&server.url, "/metrics").await;
    assert_eq!(status, 200);
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("rap_tool_{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!((value("accepted_total"), value("repeated_total")), (5.0, 1.0));
    assert_eq!((value("running"), value("subscriptions")), (1.0, 1.0));
    assert_eq!((value("delivered_total"), value("refused_total")), (2.0, 1.0));
    assert!(value("retried_total") >= 1.0);
    assert!(value("oldest_undelivered_seconds") > 0.0);
}

#[tokio::test]
async fn the_kitchen_sink_asks_questions_shows_views_and_waits_for_consent() {
    let data = data_dir();
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let (mut runtime, caller) = (Runtime::start().await, process.caller());

    caller.accepted(&runtime.invocation("choose", "t", "1", json!({}))).await;
    let Callback::UserChoice(question) = runtime.next().await.message else { panic!("a question") };
    let path = question.response_url.to_url().path().to_owned();
    let answer = json!({"id": "1", "selected": 2}).to_string();
    assert_eq!(
        caller.post(&path, answer.clone()).await.0,
        200,
        "no token is needed, because the URL contains one"
    );
    assert_eq!(runtime.next().await.text(), "chose blue");
    caller.until_settled("t", "1").await;
    assert_eq!(caller.post(&path, answer).await.0, 404, "the question has ended with its call");

    caller.accepted(&runtime.invocation("authorize", "t", "2", json!({}))).await;
    let Callback::Oauth(oauth) = runtime.next().await.message else { panic!("an authorisation") };
    let (status, page) = get(&process.url, oauth.auth_url.to_url().path()).await;
    assert_eq!(status, 200);
    assert!(page.contains("You can close this page"), "{page}");
    assert_eq!(runtime.next().await.text(), "authorized");

    caller.accepted(&runtime.invocation("show", "t", "3", json!({}))).await;
    let view = runtime.next().await;
    assert_eq!(view.body["view_type"], "diff");
    assert_eq!(view.body["content"]["path"], "greeting.txt");
    assert_eq!(runtime.next().await.text(), "shown");

    let log = process.log();
    for secret in [question.response_url.expose(), oauth.auth_url.expose()] {
        assert!(!log.contains(secret.rsplit('/').next().unwrap()), "a secret is in the log:\n{log}");
    }
}

/// Proves: LC-41
#[tokio::test]
async fn the_manifest_contains_annotations_and_schema_of_a_tool() {
    /// Ship a parcel.
    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Ship {
        /// How fast.
        #[serde(default)]
        speed: Speed,
        /// In kilograms.
        #[schemars(range(min = 0.1, max = 30.0))]
        weight: f64,
        /// What to write on it.
        note: Option<String>,
    }

    #[derive(Deserialize, Serialize, JsonSchema, Default)]
    #[serde(rename_all = "snake_case")]
    enum Speed {
        #[default]
        Slow,
        Express,
    }

    let hour = std::time::Duration::from_secs(3600);
    let tool = Tool::new("ship", |_: Ship, _: Call| async { Ok("") })
        .destructive()
        .idempotent()
        .long_running()
        .requires_auth("the carrier's account")
        .expected_duration(hour..=24 * hour)
        .display_script("`ship ${args.weight} kg`");
    let data = data_dir();
    let server = Server::start(ToolServer::new("shipping").offer(tool), data.path()).await;
    let toolset: Value = serde_json::from_str(&get(&server.url, "/.well-known/rap-toolset").await.1).unwrap();
    let tool = &toolset["tools"][0];
    assert_eq!(tool["description"], "Ship a parcel.");
    assert_eq!(tool["displayScript"], "`ship ${args.weight} kg`");
    let annotations = json!({
        "destructive": true, "idempotent": true, "longRunning": true,
        "requiresAuth": "the carrier's account",
        "x-expectedDuration": {"min": 3600.0, "max": 86400.0},
    });
    assert_eq!(tool["annotations"], annotations);
    let schema = &tool["inputSchema"];
    assert_eq!(schema["required"], json!(["weight"]));
    let weight = json!({
        "description": "In kilograms.", "type": "number", "format": "double", "minimum": 0.1, "maximum": 30.0,
    });
    assert_eq!(schema["properties"]["weight"], weight);
    assert_eq!(schema["properties"]["speed"]["default"], "slow");
    assert_eq!(schema["properties"]["note"]["type"], json!(["string", "null"]));
    assert_eq!(schema["$defs"]["Speed"]["enum"], json!(["slow", "express"]));
}
