//! The API without tokens: web pages, other names of this machine, and requests of servers.

use std::sync::Arc;

use serde_json::json;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::Stage;
use crate::wire::{self, JSON};

const TOPIC: &str = "local API";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "web page of another site", "a foreign Origin is served", origins),
        attempt!(TOPIC, "foreign Host", "a name that was rebound to loopback is served", hosts),
        attempt!(TOPIC, "request of a server", "rap's own outgoing requests are served", outgoing),
        attempt!(
            TOPIC,
            "answer that may be sniffed or stored",
            "a header that forbids it is missing",
            headers
        ),
    ]
}

const PATHS: [(&str, &str); 7] = [
    ("GET", "/v1/threads"),
    ("GET", "/v1/inbox"),
    ("GET", "/v1/tools"),
    ("POST", "/v1/threads"),
    ("POST", "/v1/threads/victim/messages"),
    ("POST", "/v1/threads/victim/close"),
    ("POST", "/v1/threads/victim/interrupt"),
];

/// Sends requests with these headers to every path. The thread `victim` has to stay as it is.
async fn try_headers(stage: &Stage, headers: &[(&str, String)], tries: &mut Tries) {
    wire::post(&stage.local.at("/v1/threads"), None, &json!({"id": "victim"})).await;
    for (name, value) in headers {
        for (method, path) in PATHS {
            for body in [&b"{\"text\": \"x\"}"[..], b""] {
                let headers = [(*name, value.as_str()), JSON];
                let status = wire::status(method, &stage.local.at(path), &headers, body).await;
                tries.add(format!("{method} {path} with {name}: {value}"), wire::is_success(status));
            }
        }
    }
    let victim = wire::get(&stage.local.at("/v1/threads/victim"), None).await;
    tries.add("the thread has changed", victim.is_none_or(|victim| victim.body["status"] != "idle"));
}

async fn origins(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let port = wire::port(&stage.local.url);
    let origins = [
        "http://evil.example".to_owned(),
        "https://evil.example".to_owned(),
        format!("http://evil.example:{port}"),
        "null".to_owned(),
        "http://127.0.0.1:1".to_owned(),
        "http://localhost".to_owned(),
        format!("http://127.0.0.1:{port}.evil.example"),
        format!("http://evil.example/127.0.0.1:{port}"),
        format!("http://127.0.0.1@evil.example:{port}"),
        "chrome-extension://abcdef".to_owned(),
        "file://".to_owned(),
        String::new(),
    ];
    try_headers(&stage, &origins.map(|origin| ("origin", origin)), &mut tries).await;
    tries
}

async fn hosts(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let port = wire::port(&stage.local.url);
    let hosts = [
        "evil.example".to_owned(),
        format!("evil.example:{port}"),
        format!("127.0.0.1.evil.example:{port}"),
        format!("localhost.evil.example:{port}"),
        format!("evil.example@127.0.0.1:{port}"),
        "169.254.169.254".to_owned(),
        String::new(),
    ];
    try_headers(&stage, &hosts.clone().map(|host| ("host", host)), &mut tries).await;
    for target in [&stage.rap, &stage.local] {
        for path in ["/healthz", "/readyz", "/metrics", "/openapi.json"] {
            for host in &hosts {
                let status = wire::status("GET", &target.at(path), &[("host", host)], b"").await;
                tries.add(format!("{path} with the host {host}"), wire::is_success(status));
            }
        }
    }
    tries
}

async fn outgoing(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    let agent = call.request.header("user-agent").unwrap_or_default().to_owned();
    tries.add("outgoing requests do not say what sends them", !agent.starts_with("rap-outgoing/"));
    try_headers(&stage, &[("user-agent", agent)], &mut tries).await;
    call.post(&call.result("done")).await;
    tries
}

async fn headers(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for target in stage.targets() {
        for path in
            ["/healthz", "/metrics", "/openapi.json", "/nothing", "/v1/threads", "/v1/nothing", "/callback/x"]
        {
            let Some(answer) = wire::get(&target.at(path), None).await else { continue };
            let sniffed = answer.header("x-content-type-options") != Some("nosniff");
            // An unknown path of a tool server is answered by nothing.
            tries.add(format!("{path} may be sniffed"), sniffed);
            let is_api = path.starts_with("/v1/") && !std::ptr::eq(target, &stage.kitchen);
            let stored = answer.header("cache-control") != Some("no-store");
            tries.add(format!("{path} may be stored"), is_api && stored);
        }
    }
    tries
}
