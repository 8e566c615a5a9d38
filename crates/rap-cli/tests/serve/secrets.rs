//! Runs with known secrets at the most verbose log level, then searches all output for them.

use rap_testkit::http;
use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::stream::Stream;
use rap_testkit::tools::{INVOKE, with};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::json;

const CLIENT: &str = "s3cret-client-token";
const TOOLS: &str = "s3cret-tools-token";
const MODEL: &str = "sk-s3cret-model-key";
const SIGN_IN: &str = "https://sign.example/in?state=s3cret-sign-in";
const ANSWERS: &str = "/s3cret-answers";

/// Collected output with its source.
struct Said(Vec<(String, String)>);

impl Said {
    fn add(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.0.push((place.into(), text.into()));
    }

    #[track_caller]
    fn never(&self, secret: &str) {
        assert!(secret.len() >= 6, "{secret} could be anywhere");
        for (place, text) in &self.0 {
            if let Some(at) = text.find(secret) {
                let begin = (0..=at.saturating_sub(200)).rev().find(|at| text.is_char_boundary(*at)).unwrap();
                panic!("{place} says {secret}: {}", &text[begin..at + secret.len()]);
            }
        }
    }
}

const PATHS: [&str; 11] = [
    "/v1/threads",
    "/v1/calls",
    "/v1/timers",
    "/v1/subscriptions",
    "/v1/deliveries",
    "/v1/tools",
    "/v1/tokens",
    "/metrics",
    "/openapi.json",
    "/healthz",
    "/readyz",
];

const COMMANDS: [&[&str]; 16] = [
    &["timers", "ls"],
    &["timers", "ls", "--json"],
    &["threads", "ls"],
    &["threads", "ls", "--json"],
    &["calls", "ls"],
    &["calls", "ls", "--json"],
    &["subs", "ls"],
    &["subs", "ls", "--json"],
    &["deliveries", "ls"],
    &["deliveries", "ls", "--json"],
    &["deliveries", "show", "1"],
    &["deliveries", "redeliver", "1"],
    &["tools", "ls"],
    &["tools", "ls", "--json"],
    &["token", "ls"],
    &["token", "ls", "--json"],
];

/// Collects everything in the client API except the inbox, which contains sign-in URLs.
async fn listen(rap: &Rap, thread: &str, said: &mut Said) {
    let of_thread = ["", "/history", "/views", "/nothing"].map(|path| format!("/v1/threads/{thread}{path}"));
    for path in PATHS.into_iter().map(str::to_owned).chain(of_thread) {
        said.add(&path, rap.get(&path).await.body.to_string());
    }
    for arguments in COMMANDS.into_iter().chain([&["threads", "tail", thread, "--once", "--json"][..]]) {
        let (_, text) = rap.command(arguments);
        assert!(!text.is_empty(), "rap {}", arguments.join(" "));
        said.add(format!("rap {}", arguments.join(" ")), text);
    }
}

/// Makes a call ask, show views, subscribe and fail in every way. Returns the secret parts of its callback URL.
async fn misuse(rap: &Rap, tools: &Tools, model: &ModelServer, said: &mut Said) -> (String, Vec<String>) {
    model.calls(&[("c1", "watch", json!({}))]);
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("watch it").await;
    let call = tools.invocations(2).await.remove(1);
    let token = call.url().rsplit('/').next().unwrap().to_owned();
    let mut answer = async |url: &str, body| {
        let answer = http::post(url, &body).await;
        said.add(
            format!("a callback answered {}", answer.status),
            format!("{}\n{}", answer.head, answer.body),
        );
    };
    answer(&format!("{}/callback/{}x", rap.url, token), call.result("x")).await;
    answer(call.url(), json!({"type": "x", "callback_url": call.url()})).await;
    answer(call.url(), with(call.result("x"), json!({"id": "other"}))).await;
    answer(call.url(), with(call.oauth(SIGN_IN), json!({"auth_url": format!("ftp{SIGN_IN}")}))).await;
    answer(call.url(), call.oauth(SIGN_IN)).await;
    answer(call.url(), call.question(&format!("{}{ANSWERS}", tools.url))).await;
    answer(call.url(), call.view("bar", json!(1))).await;
    tools.answer_next(ANSWERS, Reply::Status(503));
    let choice = format!("/v1/threads/{thread}/calls/{}/choice", call.id());
    rap.post(&choice, &json!({"selected": 0})).await.expect(202);
    tools.next(ANSWERS).await;
    (thread, vec![token[8..40].to_owned(), token])
}

/// Collects what a person who has to sign in sees: the inbox and the streams.
async fn shown(rap: &Rap, thread: &str) -> Said {
    let mut shown = Said(Vec::new());
    shown.add("/v1/inbox", rap.get("/v1/inbox").await.body.to_string());
    for arguments in [&["inbox", "ls"][..], &["inbox", "ls", "--json"], &["threads", "show", thread]] {
        shown.add(format!("rap {}", arguments.join(" ")), rap.command(arguments).1);
    }
    for path in [format!("/v1/threads/{thread}/events"), "/v1/events".to_owned()] {
        let bearer = format!("Bearer {CLIENT}");
        let mut stream = Stream::open_with(rap, &path, &[("authorization", &bearer)]).await.unwrap();
        let mut text = String::new();
        while !text.contains(SIGN_IN) {
            text.push_str(&stream.next().await.unwrap().data);
        }
        shown.add(path, text);
    }
    for (place, text) in &shown.0 {
        assert!(text.contains(SIGN_IN), "{place} does not say where to sign in: {text}");
    }
    shown
}

/// Creates tokens, uses one in ways that are refused, and revokes it. Returns the tokens and their stored digests.
async fn created_tokens(rap: &Rap, said: &mut Said) -> Vec<String> {
    let mut tokens = Vec::new();
    for (name, scope) in [("phone", "read"), ("script", "write")] {
        let created = rap.post("/v1/tokens", &json!({"name": name, "scope": scope})).await.expect(201);
        tokens.push(created["token"].as_str().unwrap().to_owned());
    }
    let bearer = format!("Bearer {}", tokens[0]);
    let mut refused = async |method: &str, path: &str| {
        let answer = rap.send(method, path, &[("authorization", &bearer)], b"").await;
        assert!(answer.status >= 400, "{method} {path}");
        said.add(format!("{method} {path}"), format!("{}\n{}", answer.head, answer.body));
    };
    for (method, path) in [("POST", "/v1/threads"), ("GET", "/v1/tokens"), ("GET", "/v1/threads/unknown")] {
        refused(method, path).await;
    }
    let database = rusqlite::Connection::open(rap.directory().join("rap.db")).unwrap();
    let mut digests = database.prepare("SELECT lower(hex(digest)) FROM tokens").unwrap();
    let digests: Vec<String> = digests.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    assert_eq!(digests.len(), tokens.len());
    let own = format!("Bearer {CLIENT}");
    rap.send("DELETE", "/v1/tokens/1", &[("authorization", &own)], b"").await.expect(200);
    refused("GET", "/v1/threads").await;
    listen(rap, "fails", said).await;
    tokens.extend(digests);
    // Without its prefix, too.
    tokens.extend(tokens.clone().iter().filter_map(|token| token.strip_prefix("rap_").map(str::to_owned)));
    tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn no_output_contains_a_secret() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let setup = Setup::new().tools(&tools).bearer(TOOLS).token(CLIENT).variable("RUST_LOG", "trace");
    let rap = setup.model(&model.lines_with_key(MODEL)).start();
    let mut said = Said(Vec::new());
    let (thread, tokens) = misuse(&rap, &tools, &model, &mut said).await;
    until("the delivery log is written", async || (rap.listing("deliveries").await.len() >= 5).then_some(()))
        .await;
    listen(&rap, &thread, &mut said).await;
    let shown = shown(&rap, &thread).await;
    // An error of the model may contain the key.
    let head = Some(("content-type", "application/json".to_owned()));
    let body = json!({"error": {"message": format!("Incorrect API key provided: {MODEL}.")}});
    model.answer(Reply::Full(401, head, body.to_string().into()));
    rap.post("/v1/threads", &json!({"id": "fails", "message": "hello"})).await.expect(201);
    rap.until_status("fails", "failed").await;
    listen(&rap, "fails", &mut said).await;
    for bearer in ["Bearer wrong-token", "Bearer"] {
        let refused = rap.send("GET", "/v1/threads", &[("authorization", bearer)], b"").await;
        said.add("a refusal", format!("{}\n{}", refused.head, refused.body));
    }
    let created = created_tokens(&rap, &mut said).await;
    rap.close(&thread).await;
    tools.notified(rap_testkit::tools::CLOSE, 1).await;
    said.add("the log", rap.log());
    said.add("stdout", rap.stdout());

    let key = std::fs::read_to_string(rap.directory().join("rap.db.key")).unwrap();
    let secrets = [CLIENT, TOOLS, MODEL, ANSWERS, key.trim()];
    for secret in secrets.into_iter().chain(tokens.iter().chain(&created).map(String::as_str)) {
        said.never(secret);
        shown.never(secret);
    }
    said.never("s3cret");
    assert!(rap.log().contains("TRACE"), "it was as loud as it gets");
}

/// Thread and call are separate fields of a log line, for programs that read logs.
#[tokio::test]
async fn log_lines_have_fields_for_thread_and_call() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).variable("RUST_LOG", "debug").start();
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("call work").await;
    let call = tools.invocations(2).await.remove(1);
    call.returns("done").await;
    rap.until_idle(&thread).await;
    for status in ["running", "waiting", "idle"] {
        rap.until_logged(&format!("step thread={thread} status=\"{status}\"")).await;
    }
    let fields = [format!("thread={thread}"), format!("call={}", call.id())];
    let lines = |what: &str| -> Vec<String> {
        let log = rap.log();
        let lines = log.lines().filter(|line| line.contains(what)).map(str::to_owned);
        lines.filter(|line| fields.iter().all(|field| line.contains(field))).collect()
    };
    rap.until_logged("outcome=\"delivered\"").await;
    let deliveries = lines(" delivery ");
    assert_eq!(deliveries.len(), 2, "one that is retried, one that arrived: {}", rap.log());
    assert!(
        deliveries[0].contains("outcome=\"retrying\"") && deliveries[0].contains("detail=\"answered 500\"")
    );
    assert_eq!(lines("rap::audit").len(), 1, "{}", rap.log());
}
