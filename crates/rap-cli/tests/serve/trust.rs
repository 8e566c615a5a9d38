//! Credentials between the runtime and tool servers: rotated tokens, OAuth, signatures, TLS, and rotated keys of callback
//! URLs.

use std::fs;
use std::time::{Duration, SystemTime};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_io::sigv4::AccessKey;
use rap_io::tls::ClientTls;
use rap_io::webhook::SigningKeys;
use rap_protocol::{Secret, Timestamp, UrlPolicy};
use rap_testkit::certificates::Authority;
use rap_testkit::peer::{Peer, Reply, Request};
use rap_testkit::tools::{CANCEL, CLOSE, Call, INVOKE};
use rap_testkit::{Process, Rap, Setup, Tools, programs, until};
use serde_json::{Value, json};

const TOKEN: &str = "token-of-the-client";
const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

fn now() -> Timestamp {
    SystemTime::now().into()
}

fn keys(keys: &[&str]) -> SigningKeys {
    SigningKeys::parse(&keys.iter().map(|key| Secret::new(*key)).collect::<Vec<_>>()).unwrap()
}

/// Posts a callback that is signed at a time. Returns the status and the body of the answer.
async fn post_signed(call: &Call, key: &str, id: &str, at: Timestamp, body: &Value) -> (u16, Value) {
    let headers = keys(&[key]).sign(id, at, body.to_string().as_bytes());
    let headers: Vec<_> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    let answer = call.post_with(&headers, body).await;
    (answer.status, answer.body)
}

fn verified<'a>(request: &'a Request, key: &str) -> &'a str {
    keys(&[key]).verify(&request.headers, &request.raw, now()).unwrap()
}

/// Proves: TR-19
#[tokio::test]
async fn every_message_to_a_tool_server_is_signed() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).tool_server_line(&format!("hmac = [{NEW:?}, {OLD:?}]")).start();
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("call work").await;
    let (first, second) = (tools.next(INVOKE).await, tools.next(INVOKE).await);
    for key in [OLD, NEW] {
        assert!(verified(&first, key).starts_with("rap_invoke_"));
    }
    assert_eq!(verified(&first, OLD), verified(&second, OLD), "a retry has the same id");
    rap.act(&thread, "interrupt").await.expect(202);
    assert!(verified(&tools.next(CANCEL).await, OLD).starts_with("rap_cancel_"));
    rap.close(&thread).await;
    assert!(verified(&tools.next(CLOSE).await, OLD).starts_with("rap_close_"));
    assert!(!rap.log().contains("whsec_"), "{}", rap.log());
}

/// Proves: TR-20
#[tokio::test]
async fn callbacks_can_be_required_to_be_signed() {
    let (tools, other) = (Tools::start().await, Tools::offering("other", &["free"]).await);
    let setup =
        Setup::new().tools(&tools).tool_server_line(&format!("hmac = {OLD:?}\ncallback_auth = \"hmac\""));
    let rap = setup.tools(&other).start();
    let thread = rap.open("call work\ncall free").await;
    let (call, free) = (tools.invocation().await, other.invocation().await);
    let body = call.result("done");
    let unsigned = call.post(&body).await;
    assert_eq!((unsigned.status, &unsigned.body["error"]["code"]), (401, &json!("bad_signature")));
    for (key, at, expected) in [
        (NEW, now(), "no signature of the request is valid"),
        (OLD, now().minus(Duration::from_secs(400)), "check both clocks"),
        (OLD, now().plus(Duration::from_secs(400)), "check both clocks"),
    ] {
        let (status, answer) = post_signed(&call, key, "m", at, &body).await;
        assert!(status == 401 && answer.to_string().contains(expected), "{answer}");
    }
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    assert_eq!(post_signed(&call, OLD, "m", now(), &body).await.0, 200);
    // The other server has no such rule.
    free.returns("free").await;
    rap.until_line(&thread, "result call_1_1: done").await;
    let refused = until("the refusals are recorded", async || {
        let all = rap.raw_listing("deliveries").await;
        all.into_iter().find(|line| line["kind"] == "callback" && line["outcome"] == "refused")
    });
    assert!(refused.await.to_string().contains("401"));
}

/// Proves: TR-25
#[tokio::test]
async fn a_replayed_callback_has_no_effect() {
    let tools = Tools::start().await;
    let setup =
        Setup::new().tools(&tools).tool_server_line(&format!("hmac = {OLD:?}\ncallback_auth = \"hmac\""));
    let rap = setup.start();
    let thread = rap.open("call watch").await;
    let call = tools.invocation().await;
    let sent = now();
    let views = async || {
        rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200)["views"][0]["content"].clone()
    };
    for (id, content) in [("v1", 1), ("v2", 2)] {
        assert_eq!(post_signed(&call, OLD, id, sent, &call.view("bar", json!(content))).await.0, 200);
    }
    assert_eq!(post_signed(&call, OLD, "v1", sent, &call.view("bar", json!(1))).await.0, 200);
    assert_eq!(views().await, json!(2), "the view of a replayed request is old");
    // The id of a signed message is the id of an event that has none of its own, as long as the subscription lives.
    assert_eq!(post_signed(&call, OLD, "c", sent, &call.confirmation("watching")).await.0, 200);
    for at in [sent, now().plus(Duration::from_secs(60))] {
        assert_eq!(post_signed(&call, OLD, "e1", at, &call.event("rang")).await.0, 200);
    }
    rap.child(&thread).await;
    let rap = rap.restarted();
    assert_eq!(post_signed(&call, OLD, "e1", now(), &call.event("rang")).await.0, 200);
    assert_eq!(post_signed(&call, OLD, "e2", now(), &call.event("rang")).await.0, 200);
    until("a second child", async || (rap.children(&thread).await.len() == 2).then_some(())).await;
}

#[tokio::test]
async fn a_bearer_token_in_a_file_can_be_replaced_while_the_runtime_runs() {
    let tools = Tools::start().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, "s3cret-first\n").unwrap();
    let rap =
        Setup::new().tools(&tools).bearer("file:token").variable("RUST_LOG", "trace").start_in(directory);
    let shown = async || {
        rap.open("call work").await;
        tools.invocation().await.request.header("authorization").unwrap().to_owned()
    };
    assert_eq!(shown().await, "Bearer s3cret-first");
    fs::write(&file, "s3cret-second\n").unwrap();
    until("the new token is sent", async || shown().await == "Bearer s3cret-second").await;
    // An unusable file changes nothing.
    fs::write(&file, "").unwrap();
    until("the file was looked at", async || {
        assert_eq!(shown().await, "Bearer s3cret-second");
        rap.log().contains("cannot be used; its last content stays in use")
    })
    .await;
    assert!(!rap.log().contains("s3cret"), "a log contains a token");
}

/// Answers token requests with `token-1`, `token-2` and so on.
fn grant(login: &Peer, number: usize, expires_in: u64) {
    let token =
        json!({"access_token": format!("s3cret-{number}"), "token_type": "Bearer", "expires_in": expires_in});
    login.answer_next("/token", Reply::json(&token));
}

#[tokio::test]
async fn access_tokens_are_requested_cached_and_renewed_after_a_401() {
    let (tools, login) = (Tools::start().await, Peer::start().await);
    let client = format!(
        "oauth = {{ token_url = \"{}/token\", client_id = \"rap\", client_secret = \"env:CLIENT\", scope = \"tools\" }}",
        login.url
    );
    let setup = Setup::new().tools(&tools).tool_server_line(&client).variable("CLIENT", "s3cret-client");
    let rap = setup.variable("RUST_LOG", "trace").start();
    // The authorization server fails first. Discovery is tried again with the next session.
    login.answer_next("/token", Reply::Full(500, None, "s3cret".into()));
    grant(&login, 1, 3600);
    grant(&login, 2, 3600);
    until("the tool server is called", async || {
        let thread = rap.open("call work").await;
        rap.until(&thread, "an end", |thread| thread["status"] == "idle" || thread["status"] == "waiting")
            .await;
        tools.pending(INVOKE) > 0
    })
    .await;
    assert_eq!(tools.invocation().await.request.header("authorization"), Some("Bearer s3cret-1"));
    assert_eq!(login.next("/token").await.raw, "grant_type=client_credentials&scope=tools");
    let requests = login.count("/token");
    rap.open("call work").await;
    assert_eq!(tools.invocation().await.request.header("authorization"), Some("Bearer s3cret-1"));
    assert_eq!(login.count("/token"), requests, "the token is cached");
    tools.answer_next(INVOKE, Reply::Status(401));
    let thread = rap.open("call work").await;
    assert_eq!(tools.invocation().await.request.header("authorization"), Some("Bearer s3cret-1"));
    let again = tools.invocation().await;
    assert_eq!(again.request.header("authorization"), Some("Bearer s3cret-2"));
    again.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    // A second 401 is final.
    grant(&login, 3, 3600);
    for _ in 0..2 {
        tools.answer_next(INVOKE, Reply::Status(401));
    }
    let thread = rap.open("call work").await;
    rap.until_line(&thread, "result call_1_1: Error: the tool server refused the call: answered 401").await;
    assert!(!rap.log().contains("s3cret"), "a log contains a secret");
}

#[tokio::test]
async fn requests_are_signed_for_aws() {
    let tools = Tools::start().await;
    let setup = Setup::new()
        .tools(&tools)
        .tool_server_line("sigv4 = { region = \"eu-west-1\", service = \"lambda\" }");
    let setup =
        setup.variable("AWS_ACCESS_KEY_ID", "AKID").variable("AWS_SECRET_ACCESS_KEY", "s3cret-access-key");
    let rap = setup.variable("AWS_SESSION_TOKEN", "s3cret-session").variable("RUST_LOG", "trace").start();
    let thread = rap.open("call work").await;
    let key = AccessKey {
        id: "AKID".into(),
        secret: Secret::new("s3cret-access-key"),
        session: None,
        region: "eu-west-1".into(),
        service: "lambda".into(),
    };
    let check = |request: &Request| {
        assert_eq!(request.header("x-amz-security-token"), Some("s3cret-session"));
        let headers: &HeaderMap = &request.headers;
        key.verify(request.method.as_str(), &request.path, headers, &request.raw, now()).unwrap();
    };
    check(&tools.next(rap_testkit::tools::DISCOVERY).await);
    check(&tools.next(INVOKE).await);
    rap.close(&thread).await;
    check(&tools.next(CLOSE).await);
    assert!(!rap.log().contains("s3cret"), "a log contains a secret");
}

/// Starts the example tool server with TLS, client certificates and certificates of its own in callbacks.
fn tls_tool_server(authority: &Authority, files: &std::path::Path, callback_name: &str) -> Process {
    let (cert, key) = authority.certify(files, "tools", &["127.0.0.1", "localhost"]);
    let (callback_cert, callback_key) = authority.certify(files, "callbacks", &[callback_name]);
    let data = files.join("data");
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let environment = [
        ("RAP_TOOL_TLS_CERT", path(&cert)),
        ("RAP_TOOL_TLS_KEY", path(&key)),
        ("RAP_TOOL_TLS_CLIENT_CA", path(&authority.file)),
        ("RAP_TOOL_CALLBACK_CERT", path(&callback_cert)),
        ("RAP_TOOL_CALLBACK_KEY", path(&callback_key)),
        ("RAP_TOOL_CALLBACK_CA", path(&authority.file)),
    ];
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    Process::start(programs::example("kitchen_sink", &data, &environment))
}

/// Starts a runtime with TLS that requires client certificates, and a client with one.
fn tls_runtime(authority: &Authority, files: &std::path::Path, tool_server: &str) -> (Rap, Client) {
    let (cert, key) = authority.certify(files, "runtime", &["127.0.0.1"]);
    let (client_cert, client_key) = authority.certify(files, "client", &["client.example"]);
    let ca = &authority.file;
    let setup = Setup::new()
        .token(TOKEN)
        .server(&format!("tls = {{ cert = {cert:?}, key = {key:?}, client_ca = {ca:?} }}"))
        .tool_server(tool_server)
        .tool_server_line(&format!("tls = {{ cert = {client_cert:?}, key = {client_key:?}, ca = {ca:?} }}"))
        .tool_server_line("callback_auth = \"tls\"");
    let tls = ClientTls { identity: Some((client_cert, client_key)), ca: Some(ca.clone()) };
    let client = tls.outgoing(UrlPolicy::Loopback.into(), ClientLimits::default()).unwrap();
    (setup.start(), client.get().as_ref().clone())
}

/// Calls `echo` in a new thread. Returns the listing of deliveries and the history, once one of them has `text`.
async fn echo(rap: &Rap, client: &Client, text: &str) -> String {
    let url = rap.url.replace("http:", "https:");
    let bearer = [(AUTHORIZATION, HeaderValue::try_from(format!("Bearer {TOKEN}")).unwrap())];
    let message = json!({"id": "t", "message": "call echo {\"text\": \"hi\"}"}).to_string();
    let opened = client
        .post_json(&format!("{url}/v1/threads").parse().unwrap(), &bearer, message.into())
        .await
        .unwrap();
    assert_eq!(opened.status, 201);
    until(text, async || {
        let mut seen = String::new();
        for path in ["/v1/threads/t/history", "/v1/deliveries"] {
            let fetched =
                client.get(&format!("{url}{path}").parse().unwrap(), &bearer, 1 << 20).await.unwrap();
            seen.push_str(&String::from_utf8_lossy(&fetched.body));
        }
        seen.contains(text).then_some(seen)
    })
    .await
}

/// Proves: TR-19, TR-24
#[tokio::test]
async fn both_sides_can_use_tls_and_show_certificates() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ours");
    let sink = tls_tool_server(&authority, files.path(), "localhost");
    let (rap, client) = tls_runtime(&authority, files.path(), &sink.url.replace("127.0.0.1", "localhost"));
    echo(&rap, &client, "echo hi").await;
    // Nobody can connect without a certificate of the authority.
    let url = rap.url.replace("http:", "https:");
    let other = Authority::new(files.path(), "other");
    let stranger = other.certify(files.path(), "stranger", &["client.example"]);
    for identity in [None, Some(stranger)] {
        let tls = ClientTls { identity, ca: Some(authority.file.clone()) };
        let client = tls.outgoing(UrlPolicy::Loopback.into(), ClientLimits::default()).unwrap();
        let refused = client.get().get(&format!("{url}/healthz").parse().unwrap(), &[], 1024).await;
        assert!(refused.is_err(), "{refused:?}");
    }
}

#[tokio::test]
async fn a_callback_with_the_certificate_of_another_server_is_refused() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ours");
    let sink = tls_tool_server(&authority, files.path(), "other.example");
    let (rap, client) = tls_runtime(&authority, files.path(), &sink.url.replace("127.0.0.1", "localhost"));
    let seen = echo(&rap, &client, "has to show a client certificate for localhost").await;
    assert!(!seen.contains("echo hi"), "{seen}");
}

#[tokio::test]
async fn a_trusted_proxy_can_name_the_tool_server_of_a_callback() {
    let tools = Tools::start().await;
    for (proxy, expected) in [("127.0.0.1", 200), ("10.0.0.7", 401)] {
        let setup = Setup::new().tools(&tools).tool_server_line("callback_auth = \"tls\"");
        let setup =
            setup.server(&format!("trusted_proxies = [{proxy:?}]\nidentity_header = \"X-Client-Name\""));
        let rap = setup.start();
        rap.open("call work").await;
        let call = tools.invocation().await;
        assert_eq!(call.post(&call.result("x")).await.status, 401);
        assert_eq!(
            call.post_with(&[("x-client-name", "other.example")], &call.result("x")).await.status,
            401
        );
        let answer = call.post_with(&[("x-client-name", "127.0.0.1")], &call.result("x")).await;
        assert_eq!(answer.status, expected, "{}", answer.body);
    }
}

/// The token of a callback URL begins with the id of its key.
fn key_id(call: &Call) -> String {
    call.url().rsplit('/').next().unwrap()[..5].to_owned()
}

#[tokio::test]
async fn the_key_of_callback_urls_can_be_replaced_while_calls_are_open() {
    let tools = Tools::start().await;
    let mut rap = Setup::new().tools(&tools).start();
    tools.answer_always(INVOKE, Reply::Status(503));
    let thread = rap.open("call work").await;
    let first = tools.invocation().await;
    rap.stop();
    while tools.pending(INVOKE) > 0 {
        tools.invocation().await;
    }
    let file = rap.directory().join("rap.db.key");
    let (old, from) = (fs::read_to_string(&file).unwrap(), now());
    fs::write(&file, format!("{}\n{}@{}\n", old.trim(), "5c".repeat(32), next_second(from))).unwrap();
    until("the time of the new key", async || now().0 / 1000 > from.0 / 1000).await;
    rap.start_again();
    // The invocation that was not acknowledged is sent again with the same URL.
    let again = tools.invocation().await;
    assert_eq!(again.url(), first.url());
    tools.answer_always(INVOKE, Reply::Status(200));
    again.returns("with the old key").await;
    rap.until_line(&thread, "assistant: work: with the old key").await;
    let thread = rap.open("call work").await;
    let second = until("the new call", async || {
        let call = tools.invocation().await;
        (call.id() != first.id()).then_some(call)
    })
    .await;
    assert_ne!(key_id(&second), key_id(&first));
    second.returns("with the new key").await;
    rap.until_line(&thread, "assistant: work: with the new key").await;
    // Without the old key, its URLs are refused.
    rap.stop();
    fs::write(&file, "5c".repeat(32)).unwrap();
    rap.start_again();
    assert_eq!(first.post(&first.result("late")).await.status, 401);
    assert_eq!(second.post(&second.result("late")).await.status, 200);
}

/// Formats the beginning of the next second as RFC 3339.
fn next_second(at: Timestamp) -> String {
    let second = format!("@{}", at.0 / 1000 + 1);
    let date = std::process::Command::new("date").args(["-u", "-d", &second, "+%FT%TZ"]).output().unwrap();
    String::from_utf8(date.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn a_callback_url_expires_if_it_has_a_lifetime() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("callback_token_lifetime = \"2s\"").start();
    rap.open("call work").await;
    let call = tools.invocation().await;
    until("the URL expires", async || {
        let answer = call.post(&call.view("bar", json!(1))).await;
        (answer.status == 401).then(|| assert_eq!(answer.body["error"]["code"], "bad_token"))
    })
    .await;
    assert_eq!(call.post(&call.result("late")).await.status, 401);
}
