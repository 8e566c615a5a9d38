//! Requests that are ambiguous, malformed, too large, too slow, or without permission.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, BYSTANDER, Stage, TOOL, Target};
use crate::wire::{self, JSON};

const TOPIC: &str = "requests";
const BODY_BYTES: usize = 8 * 1024 * 1024;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "request without permission", "an API answers without its token", unauthorised),
        attempt!(TOPIC, "smuggled request", "bytes of one request are served as another", smuggling),
        attempt!(TOPIC, "malformed request", "an invalid HTTP request is served", malformed),
        attempt!(TOPIC, "invalid path", "a file or another endpoint is reached", paths),
        attempt!(TOPIC, "hostile id", "an invalid id is accepted or reaches the file system", ids),
        attempt!(TOPIC, "oversized or nested body", "it is accepted, or its answer is long", bodies),
        attempt!(TOPIC, "small values in large bodies", "they use many times their size", amplified),
        attempt!(TOPIC, "unfinished bodies", "they use more memory than the servers set aside", unfinished),
        attempt!(
            TOPIC,
            "unfinished bodies of one token",
            "large bodies of others are refused for lack of memory",
            memory_of_one
        ),
        attempt!(TOPIC, "slow headers and bodies", "a slow connection is served or kept forever", slow),
    ]
}

const POSTS: [&str; 4] = ["/invoke", "/close_thread", "/cancel_tool_call", "/tool_call_status"];

async fn unauthorised(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let victim = stage.open("say hello").await;
    let wrong = |token: &str| {
        vec![
            ("authorization", format!("Bearer {}", &token[..token.len() - 1])),
            ("authorization", format!("Bearer {token}x")),
            ("authorization", format!("Bearer {}", token.to_uppercase())),
            ("authorization", format!("Bearer {token},{token}")),
            ("authorization", format!("Basic {token}")),
            ("authorization", token.to_owned()),
            ("authorization", "Bearer ".to_owned()),
            ("authorization", "Bearer null".to_owned()),
            ("cookie", format!("token={token}; Authorization=Bearer {token}")),
            ("x-authorization", format!("Bearer {token}")),
            ("proxy-authorization", format!("Bearer {token}")),
            ("x-forwarded-for", "127.0.0.1".to_owned()),
            ("x-original-url", "/healthz".to_owned()),
        ]
    };
    let (threads, query) =
        ("/v1/threads".to_owned(), format!("/v1/threads?token={BYSTANDER}&access_token={BYSTANDER}"));
    let mut requests = vec![("POST", "/v1/threads".to_owned())];
    requests.extend(["", "/history", "/views"].map(|path| ("GET", format!("{threads}/{victim}{path}"))));
    requests.extend(
        ["/messages", "/close", "/interrupt", "/fork", "/resume"]
            .map(|path| ("POST", format!("{threads}/{victim}{path}"))),
    );
    let listings = ["calls", "subscriptions", "timers", "inbox", "deliveries", "tools", "tokens"];
    requests.extend(listings.map(|listing| ("GET", format!("/v1/{listing}"))));
    requests.extend([("GET", query), ("GET", "/v1/threads/".to_owned()), ("GET", "//v1/threads".to_owned())]);
    for (method, path) in requests {
        for (name, value) in wrong(BYSTANDER) {
            let status =
                wire::status(method, &stage.rap.at(&path), &[(name, value.as_str()), JSON], b"{}").await;
            tries.add(format!("{method} {path} with {name}: {value}"), wire::is_success(status));
        }
    }
    for path in POSTS {
        let body = json!({"thread_id": "t", "tool_call_id": "c"}).to_string();
        for (name, value) in wrong(TOOL) {
            let status = wire::status(
                "POST",
                &stage.kitchen.at(path),
                &[(name, value.as_str()), JSON],
                body.as_bytes(),
            )
            .await;
            tries.add(format!("{path} with {name}: {value}"), wire::is_success(status));
        }
    }
    for token in ["x", "AAAA", "..%2f..", &"A".repeat(7_000)] {
        for path in ["choice", "consent"] {
            let status = wire::status(
                "POST",
                &stage.kitchen.at(&format!("/{path}/{token}")),
                &[JSON],
                b"{\"id\":\"c\",\"selected\":0}",
            )
            .await;
            tries.add(format!("/{path}/{token}"), wire::is_success(status));
        }
    }
    tries
}

/// Each request has two readings. In one of them, its last bytes are a second request.
fn ambiguous(host: &str) -> Vec<String> {
    let second = format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\nx-second: ");
    let length = second.len() + 5;
    let head = format!("POST /callback/x HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n");
    let both = [
        format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n"),
        format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n"),
        format!("content-length: {length}\r\ntransfer-encoding: xchunked\r\n"),
        format!("content-length: {length}\r\ntransfer-encoding : chunked\r\n"),
        format!("content-length: {length}\r\ntransfer-encoding:\tchunked\r\n"),
        format!("content-length: {length}\r\ntransfer-encoding: chunked, identity\r\n"),
        format!("content-length: {length}\r\ntransfer-encoding: identity, chunked\r\n"),
        format!("content-length: {length}\r\nx: y\n transfer-encoding: chunked\r\n"),
        format!("content-length: {length}\r\n transfer-encoding: chunked\r\n"),
        "content-length: 5\r\ncontent-length: 0\r\n".to_owned(),
        "content-length: 5, 0\r\n".to_owned(),
        "content-length: 0x5\r\n".to_owned(),
        "content-length: 5 \r\ncontent-length : 0\r\n".to_owned(),
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n".to_owned(),
    ];
    let requests = both.map(|framing| format!("{head}{framing}\r\n0\r\n\r\n{second}\r\n\r\n"));
    let mut all: Vec<String> = requests.into();
    for chunk in ["0;x\n\r\n", "-0\r\n\r\n", "0x0\r\n\r\n", "1\nA0\r\n\r\n"] {
        all.push(format!("{head}transfer-encoding: chunked\r\n\r\n{chunk}{second}\r\n\r\n"));
    }
    all
}

async fn smuggling(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for target in [&stage.rap, &stage.kitchen] {
        let requests = ambiguous(wire::authority(&target.url));
        let answers = requests
            .iter()
            .map(|request| wire::exchange(&target.url, request.as_bytes(), Duration::from_millis(500)));
        for (request, received) in requests.iter().zip(futures_util::future::join_all(answers).await) {
            let served = received.contains("HTTP/1.1 200");
            tries.add(format!("{request:?} was answered {received:?}"), served);
        }
    }
    tries
}

async fn malformed(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for target in [&stage.rap, &stage.kitchen] {
        let host = wire::authority(&target.url);
        let get = format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n");
        let requests = [
            "\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n".to_owned(),
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
            "GET\r\n\r\n".to_owned(),
            format!("GET /healthz HTTP/9.9\r\nhost: {host}\r\n\r\n"),
            format!("GET /healthz\r\nhost: {host}\r\n\r\n"),
            format!("GET http://evil.example/healthz\0 HTTP/1.1\r\nhost: {host}\r\n\r\n"),
            format!("CONNECT evil.example:443 HTTP/1.1\r\nhost: {host}\r\n\r\n"),
            format!("{get}x-long: {}\r\n\r\n", "x".repeat(1_000_000)),
            format!("{get}{}\r\n", "x: y\r\n".repeat(10_000)),
            format!("{get}bad header: x\r\n\r\n"),
            format!("{get}x: a\0b\r\n\r\n"),
            format!("GET /{} HTTP/1.1\r\nhost: {host}\r\n\r\n", "x".repeat(100_000)),
        ];
        let answers = requests
            .iter()
            .map(|request| wire::exchange(&target.url, request.as_bytes(), Duration::from_secs(1)));
        for (request, received) in requests.iter().zip(futures_util::future::join_all(answers).await) {
            let shown: String = request.chars().take(100).collect();
            tries.add(format!("{shown:?} was answered {received:?}"), received.starts_with("HTTP/1.1 2"));
        }
    }
    tries
}

async fn paths(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let paths = [
        "/rap.db",
        "/rap.db.key",
        "/rap.toml",
        "/journal.db",
        "/journal.key",
        "/.env",
        "/etc/passwd",
        "/../rap.db.key",
        "/%2e%2e/rap.db.key",
        "/..%2frap.db.key",
        "/.well-known/../journal.key",
        "/.well-known/..%2f..%2fetc/passwd",
        "/callback/../healthz",
        "/callback/..%2f..%2fv1%2fthreads",
        "/v1/threads/..%2f..%2fhealthz",
        "/v1/threads/%2e%2e/history",
        "/v1/threads/%00",
        "/V1/threads",
        "/metrics%00",
        "/debug/pprof",
        "/admin",
        "/consent/",
        "/choice/",
    ];
    for target in [&stage.rap, &stage.kitchen] {
        for path in paths {
            for method in ["GET", "POST", "PUT", "DELETE", "TRACE"] {
                let bearer = format!("Bearer {ATTACKER}");
                let headers = [("authorization", bearer.as_str()), JSON];
                let status = wire::status(method, &target.at(path), &headers, b"{}").await;
                tries.add(format!("{method} {path} was answered {status}"), wire::is_success(status));
            }
        }
    }
    tries
}

fn hostile_ids() -> Vec<String> {
    let names = [
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\\b",
        ".hidden",
        "a b",
        "a\u{0}b",
        "a\r\nb",
        "\u{1b}[2J",
        "\u{202e}abc",
        "\u{200b}",
        "a\u{7f}",
        "%2e%2e",
        "a;b",
        "a'b",
        "\"; DROP TABLE threads; --",
        "ａ",
        "ñ",
        "😀",
        "a\u{2028}b",
        "a?b",
        "a#b",
        "$(id)",
        "`id`",
    ];
    let mut ids: Vec<String> = names.map(str::to_owned).into();
    ids.extend(["x".repeat(129), "x".repeat(100_000)]);
    ids
}

async fn ids(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let before = files(&stage.kitchen);
    for id in hostile_ids() {
        let shown: String = id.escape_debug().take(60).collect();
        let made = wire::post(&stage.rap.at("/v1/threads"), Some(ATTACKER), &json!({"id": id})).await;
        tries.add(
            format!("a thread with the id {shown}"),
            made.is_some_and(|made| wire::is_success(made.status)),
        );
        // Ids of a tool server may be anything, but they name no file.
        let body = json!({
            "operation": "echo", "arguments": {"text": "x"}, "id": id, "group_id": id,
            "callback_url": format!("{}/ids", stage.elsewhere.url),
        });
        let status = |answer: Option<rap_testkit::http::Response>| answer.map_or(0, |answer| answer.status);
        let invoked = status(wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &body).await);
        let is_invalid = id.is_empty() || id.len() > 256 || id.chars().any(char::is_control);
        tries.add(format!("an invocation with the id {shown}"), is_invalid && wire::is_success(invoked));
        let body = json!({"thread_id": id, "tool_call_id": id});
        let closed = status(wire::post(&stage.kitchen.at("/close_thread"), Some(TOOL), &body).await);
        tries.add(format!("closing {shown} was answered {closed}"), closed >= 500);
    }
    tries.add("there are new files", files(&stage.kitchen) != before);
    tries
}

/// Names of the files of a server.
fn files(target: &Target) -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> =
        std::fs::read_dir(target.directory()).unwrap().map(|file| file.unwrap().file_name()).collect();
    names.sort();
    names
}

async fn bodies(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let deep =
        |open: &str, close: &str, levels: usize| format!("{}{}", open.repeat(levels), close.repeat(levels));
    let bodies = [
        vec![b'['; 1_000_000],
        deep("[", "]", 2_000).into_bytes(),
        deep("{\"a\":", "}", 200_000).into_bytes(),
        format!("{{\"text\": \"x\", \"more\": {}}}", deep("[", "]", 500)).into_bytes(),
        format!("\"{}", "\\u0000".repeat(100_000)).into_bytes(),
        vec![b' '; BODY_BYTES + 1],
        b"\xff\xfe{}".to_vec(),
        b"{\"text\": 1e999}".to_vec(),
    ];
    let victim = stage.open("say hello").await;
    let call = stage.call("work").await;
    let mut urls = vec![(call.url().to_owned(), "")];
    urls.extend(["", "/x/messages"].map(|path| {
        (stage.rap.at(&format!("/v1/threads{path}").replace("/x/", &format!("/{victim}/"))), ATTACKER)
    }));
    urls.extend(POSTS.map(|path| (stage.kitchen.at(path), TOOL)));
    for (url, token) in urls {
        let bearer = format!("Bearer {token}");
        for body in &bodies {
            let answer = wire::answer("POST", &url, &[("authorization", &bearer), JSON], body).await;
            let shown = String::from_utf8_lossy(&body[..40.min(body.len())]).into_owned();
            let (status, length) = answer.map_or((0, 0), |answer| (answer.status, answer.text.len()));
            tries.add(
                format!("{shown:?}… of {} bytes was answered {status}", body.len()),
                wire::is_success(status),
            );
            tries.add(format!("{shown:?}… has an answer of {length} bytes"), length > 2_000);
        }
    }
    call.post(&call.result("done")).await;
    tries
}

/// Sends JSON whose parsed form is many times as large.
async fn amplified(stage: Arc<Stage>) -> Tries {
    const AT_ONCE: usize = 3;
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    for value in ["{\"a\":1}", "0"] {
        let count = (BODY_BYTES - 1_000) / (value.len() + 1);
        let bulk = format!("[{}{value}]", format!("{value},").repeat(count - 1));
        let invocation = json!({
            "operation": "echo", "id": value, "group_id": "amplified",
            "callback_url": format!("{}/amplified", stage.elsewhere.url),
            "arguments": {"text": "x", "more": "BULK"},
        });
        for (url, token, body) in [
            (call.url().to_owned(), "", call.view("bulk", json!("BULK"))),
            (stage.kitchen.at("/invoke"), TOOL, invocation),
            (stage.rap.at("/v1/threads"), ATTACKER, json!({"message": "x", "title": "BULK"})),
            (stage.rap.at("/v1/threads"), ATTACKER, json!({"message": "x", "content": "BULK"})),
        ] {
            let (body, bearer) = (body.to_string().replace("\"BULK\"", &bulk), format!("Bearer {token}"));
            let headers = [("authorization", bearer.as_str()), JSON];
            let sending = (0..AT_ONCE).map(|_| wire::answer("POST", &url, &headers, body.as_bytes()));
            for answer in futures_util::future::join_all(sending).await {
                let status = answer.map_or(0, |answer| answer.status);
                tries.add(format!("{value} was answered {status}"), status == 500);
            }
        }
    }
    call.post(&call.result("done")).await;
    tries
}

/// Opens requests with large bodies that lack their last byte.
async fn unfinished(stage: Arc<Stage>) -> Tries {
    const REQUESTS: usize = 50;
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let path = call.url().trim_start_matches("http://").split_once('/').unwrap().1;
    let targets = [
        (&stage.rap, format!("/{path}"), String::new()),
        (&stage.rap, "/v1/threads".to_owned(), format!("authorization: Bearer {ATTACKER}\r\n")),
        (&stage.kitchen, "/invoke".to_owned(), format!("authorization: Bearer {TOOL}\r\n")),
    ];
    let body: Arc<[u8]> = vec![b' '; 7_900_000].into();
    for (target, path, authorization) in targets {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n{authorization}content-length: {}\r\n\r\n",
            wire::authority(&target.url),
            body.len() + 1
        );
        let opened = (0..REQUESTS).map(|_| begin(&target.url, &head, &body));
        let opened = futures_util::future::join_all(opened).await;
        for stream in opened.into_iter().flatten() {
            let mut stream = stream;
            let status = wire::first_status(&mut stream, Duration::from_millis(1)).await;
            tries.add(format!("status {status}"), wire::is_success(status));
        }
    }
    call.post(&call.result("done")).await;
    tries
}

/// Opens requests of one token with bodies that lack their last byte, large and small ones, more than there is memory for.
/// Others send large bodies meanwhile.
async fn memory_of_one(stage: Arc<Stage>) -> Tries {
    const LARGE: usize = 40;
    const SMALL: usize = 1_100;
    const OF_OTHERS: usize = 2_000_000;
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let host = wire::authority(&stage.rap.url);
    let head = |bytes: usize| {
        format!(
            "POST /v1/threads HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n\
             authorization: Bearer {ATTACKER}\r\ncontent-length: {}\r\n\r\n",
            bytes + 1
        )
    };
    let (large, small) = (vec![b' '; 7_900_000], " ".repeat(63_000));
    let large_head = head(large.len());
    let opening = (0..LARGE).map(|_| begin(&stage.rap.url, &large_head, &large));
    let opened = futures_util::future::join_all(opening).await;
    let request = format!("{}{small}", head(small.len()));
    let more = wire::never_reading(&stage.rap.url, SMALL, &request).await;
    tries.count = opened.len() + more.len();
    let message = json!({"message": format!("say {}", "x".repeat(OF_OTHERS))});
    let made = wire::post(&stage.rap.at("/v1/threads"), Some(BYSTANDER), &message).await;
    let status = made.map_or(0, |answer| answer.status);
    tries.add(format!("a request of another token was answered {status}"), status != 201);
    let status = call.post(&call.result(&"x".repeat(OF_OTHERS))).await.status;
    tries.add(format!("a callback was answered {status}"), status != 200);
    drop((opened, more));
    tries
}

/// Sends a head and a body. A server that has no memory for it does not read all.
async fn begin(url: &str, head: &str, body: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(wire::authority(url)).await.ok()?;
    stream.set_zero_linger().ok();
    let sending = async {
        stream.write_all(head.as_bytes()).await.ok()?;
        stream.write_all(body).await.ok()
    };
    tokio::time::timeout(Duration::from_secs(3), sending).await.ok();
    Some(stream)
}

/// Sends heads and bodies a byte at a time. The runtime without tokens gives a request two seconds.
async fn slow(stage: Arc<Stage>) -> Tries {
    const CONNECTIONS: usize = 100;
    const GIVEN_UP: Duration = Duration::from_secs(6);
    let mut tries = Tries::new();
    let host = wire::authority(&stage.local.url).to_owned();
    let body = format!(
        "POST /v1/threads HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    );
    let head = format!("GET /healthz HTTP/1.1\r\nhost: {host}\r\nx-slow: ");
    let mut dripping = tokio::task::JoinSet::new();
    for number in 0..2 * CONNECTIONS {
        let (begin, host) = (if number % 2 == 0 { body.clone() } else { head.clone() }, host.clone());
        dripping.spawn(async move {
            let mut stream = TcpStream::connect(host).await.ok()?;
            stream.write_all(begin.as_bytes()).await.ok()?;
            let drip = async {
                while stream.write_all(b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            tokio::time::timeout(GIVEN_UP, drip).await.ok()
        });
    }
    while let Some(closed) = dripping.join_next().await {
        tries.add("a connection was kept", closed.ok().flatten().is_none());
    }
    let threads: Option<Value> =
        wire::get(&stage.local.at("/v1/threads"), None).await.map(|answer| answer.body);
    tries.add("the server does not answer any more", threads.is_none());
    tries
}
