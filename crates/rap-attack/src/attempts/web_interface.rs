//! The web interface: signing in, and its cookie.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, BYSTANDER, Stage};
use crate::wire::{self, JSON};

const TOPIC: &str = "web";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "sign-in by a page of another site", "somebody is signed in or out", sign_ins),
        attempt!(TOPIC, "cookie in requests of another site", "it is accepted", requests),
        attempt!(TOPIC, "forged cookie", "it is accepted, or outlives its token", forged),
        attempt!(
            TOPIC,
            "sign-ins that never end",
            "callbacks or large requests of others are refused",
            unfinished
        ),
    ]
}

/// Headers of requests that a page of another site makes a browser send.
fn foreign(stage: &Stage) -> Vec<Vec<(&'static str, String)>> {
    let port = wire::port(&stage.rap.url);
    let origins = [
        "https://evil.example".to_owned(),
        format!("http://evil.example:{port}"),
        "null".to_owned(),
        "http://127.0.0.1:1".to_owned(),
        format!("http://127.0.0.1:{port}.evil.example"),
        format!("http://127.0.0.1:{port}@evil.example"),
        String::new(),
    ];
    let mut all: Vec<_> = origins.into_iter().map(|origin| vec![("origin", origin)]).collect();
    let own = || ("origin", stage.rap.url.clone());
    all.extend(["cross-site", "same-site"].map(|site| vec![own(), ("sec-fetch-site", site.to_owned())]));
    all.push(vec![own(), ("origin", "https://evil.example".to_owned())]);
    // A browser names the origin of every request that may change something.
    all.push(Vec::new());
    all
}

async fn send(stage: &Stage, method: &str, path: &str, headers: &[(&str, String)], body: &str) -> u16 {
    let headers: Vec<(&str, &str)> =
        headers.iter().map(|(name, value)| (*name, value.as_str())).chain([JSON]).collect();
    wire::status(method, &stage.rap.at(path), &headers, body.as_bytes()).await
}

/// Signs in with a token. Returns the cookie as a browser sends it.
async fn cookie(stage: &Stage, token: &str) -> String {
    let headers = [("origin", stage.rap.url.as_str()), JSON];
    let body = json!({"token": token}).to_string();
    let answer = wire::answer("POST", &stage.rap.at("/session"), &headers, body.as_bytes()).await;
    let answer = answer.expect("a sign-in was not answered");
    let set = answer.exact_header("set-cookie").expect("a sign-in failed");
    let cookie = set.split(';').next().unwrap_or_default().to_owned();
    stage.keep_secret(cookie.split_once('=').map_or("", |(_, value)| value));
    cookie
}

async fn sign_ins(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let body = json!({"token": ATTACKER}).to_string();
    for headers in foreign(&stage) {
        for method in ["POST", "DELETE"] {
            let status = send(&stage, method, "/session", &headers, &body).await;
            tries.add(
                format!("{method} /session with {headers:?} was answered {status}"),
                wire::is_success(status),
            );
        }
    }
    tries
}

async fn requests(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (cookie, thread) = (cookie(&stage, ATTACKER).await, stage.open("say hello").await);
    for headers in foreign(&stage) {
        let headers: Vec<_> = headers.into_iter().chain([("cookie", cookie.clone())]).collect();
        for path in ["/v1/threads", "/v1/threads/T/messages", "/v1/threads/T/close", "/v1/tokens"] {
            for body in ["{\"text\": \"x\"}", ""] {
                let status = send(&stage, "POST", &path.replace('T', &thread), &headers, body).await;
                tries.add(
                    format!("POST {path} with {headers:?} was answered {status}"),
                    wire::is_success(status),
                );
            }
        }
        // A browser does not name the origin of the interface's own reads.
        if headers.len() > 1 {
            let status = send(&stage, "GET", "/v1/threads", &headers, "").await;
            tries.add(format!("GET with {headers:?} was answered {status}"), wire::is_success(status));
        }
    }
    let history = stage.history(&thread).await;
    tries.add("the thread has changed", history.matches("\"kind\":\"user\"").count() != 1);
    tries
}

async fn forged(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let cookie = cookie(&stage, ATTACKER).await;
    let (name, value) = cookie.split_once('=').unwrap_or_default();
    let mut forgeries: Vec<String> = (0..value.len())
        .step_by(3)
        .map(|at| {
            let new = if value[at..].starts_with('A') { 'B' } else { 'A' };
            format!("{name}={}{new}{}", &value[..at], &value[at + 1..])
        })
        .collect();
    forgeries.extend((0..value.len()).step_by(16).map(|length| format!("{name}={}", &value[..length])));
    forgeries.extend([
        format!("rap_session={value}"),
        format!("{name}={ATTACKER}"),
        format!("{name}={value}A"),
    ]);
    forgeries.push(format!("{name}={}", "A".repeat(7_000)));
    for forgery in forgeries {
        let status = send(&stage, "GET", "/v1/threads", &[("cookie", forgery.clone())], "").await;
        tries.add(format!("the cookie {forgery} was answered {status}"), wire::is_success(status));
    }
    let body = json!({"name": "page", "scope": "read"});
    let made = wire::post(&stage.rap.at("/v1/tokens"), Some(BYSTANDER), &body).await.expect("no answer");
    let of = |field: &str| made.body[field].as_str().unwrap_or_default().to_owned();
    stage.keep_secret(&of("token"));
    let revoked = self::cookie(&stage, &of("token")).await;
    let bearer = format!("Bearer {BYSTANDER}");
    let url = stage.rap.at(&format!("/v1/tokens/{}", of("id")));
    wire::status("DELETE", &url, &[("authorization", &bearer)], b"").await;
    let status = send(&stage, "GET", "/v1/threads", &[("cookie", revoked)], "").await;
    tries.add(format!("the cookie of a revoked token was answered {status}"), status != 401);
    tries
}

/// Strangers begin sign-ins and do not end them. Others send large bodies meanwhile.
async fn unfinished(stage: Arc<Stage>) -> Tries {
    const REQUESTS: usize = 1_000;
    const LARGE: usize = 1_000_000;
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let (host, origin) = (wire::authority(&stage.rap.url), &stage.rap.url);
    let head = format!(
        "POST /session HTTP/1.1\r\nhost: {host}\r\norigin: {origin}\r\ncontent-type: application/json\r\n\
         transfer-encoding: chunked\r\n\r\n"
    );
    let unfinished = format!("{head}ea6\r\n{}\r\n", " ".repeat(0xea6));
    let mut open = wire::never_reading(&stage.rap.url, REQUESTS, &unfinished).await;
    tries.count = open.len();
    let mut too_large =
        wire::never_reading(&stage.rap.url, 1, &format!("{head}10000\r\n{}", " ".repeat(0x10000))).await;
    for stream in &mut too_large {
        let status = wire::first_status(stream, Duration::from_secs(5)).await;
        tries.add(format!("a sign-in of 64 KiB was answered {status}"), ![413, 503].contains(&status));
    }
    let message = json!({"message": format!("say {}", "x".repeat(LARGE))});
    let made = wire::post(&stage.rap.at("/v1/threads"), Some(BYSTANDER), &message).await;
    let status = made.map_or(0, |answer| answer.status);
    tries.add(format!("a large message of another client was answered {status}"), status != 201);
    let result = wire::post(call.url(), None, &call.result(&"x".repeat(LARGE))).await;
    let status = result.map_or(0, |answer| answer.status);
    tries.add(format!("a large callback was answered {status}"), status != 200);
    open.clear();
    tries
}
