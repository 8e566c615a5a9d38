//! The tools that ship with rap: what `fetch` may reach, and which webhooks are forwarded.

use std::sync::Arc;
use std::time::SystemTime;

use futures_util::StreamExt;
use rap_testkit::peer::Reply;
use rap_testkit::{Rap, Setup, poll};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::direction::{add_hits, metadata_hosts, own_names, traps};
use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{REACHED_WITHIN, Stage};
use crate::wire;

const SSRF: &str = "ssrf";
const WEBHOOKS: &str = "webhooks";
const SECRET: &str = "s3cret-of-the-sender-of-webhooks";
/// Requests of a model that are open at the same time.
const AT_ONCE: usize = 8;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(
            SSRF,
            "fetch of the runtime or a metadata service",
            "the tool connects to it, also after a redirect",
            fetch
        ),
        attempt!(WEBHOOKS, "forged or repeated webhook", "it becomes an event", webhooks),
    ]
}

async fn start(setup: Setup) -> Rap {
    tokio::task::spawn_blocking(|| setup.start()).await.expect("the runtime did not start")
}

/// Lets a model call a tool in a new thread. Returns the thread and its history when the thread is idle.
async fn call(rap: &Rap, tool: &str, arguments: &Value) -> (String, String) {
    let thread = rap.open(&format!("call {tool} {arguments}")).await;
    rap.until_idle(&thread).await;
    let history = rap.get(&format!("/v1/threads/{thread}/history")).await.text;
    (thread, history)
}

async fn fetch(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    if stage.isolation.isolated {
        traps().await;
    }
    let rap = start(Setup::new().tool_lines("run = \"http\"")).await;
    let port = wire::port(&rap.url).to_owned();
    let mut urls: Vec<String> =
        metadata_hosts(&stage).into_iter().map(|host| format!("http://{host}/latest/meta-data")).collect();
    urls.extend(own_names(&stage).map(|name| format!("http://{name}:{port}/v1/threads")));
    urls.extend(["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1/"].map(str::to_owned));
    // The attacker's server leads to the same places.
    let redirects: Vec<String> = urls
        .iter()
        .enumerate()
        .map(|(number, url)| {
            let path = format!("/redirect{number}");
            let reply = Reply::Full(302, Some(("location", url.clone())), "".into());
            stage.elsewhere.answer_always(&path, reply);
            format!("{}{path}", stage.elsewhere.url)
        })
        .collect();
    urls.extend(redirects);
    let rap = &rap;
    let fetched = futures_util::stream::iter(urls).map(|url| async move {
        let (_, history) = call(rap, "fetch", &json!({"url": url})).await;
        (url, history)
    });
    let fetched: Vec<(String, String)> = fetched.buffer_unordered(AT_ONCE).collect().await;
    for (url, history) in fetched {
        // The result has to be an error.
        let refused = history.contains("\"content\":\"Error: ");
        tries.add(format!("{url}: {history}"), !refused);
    }
    add_hits(&stage, &mut tries).await;
    tries
}

/// HMAC-SHA256 with a key of at most 64 bytes, in hexadecimal digits.
fn hmac(key: &str, content: &str) -> String {
    let pad = |with: u8| {
        let mut block = [with; 64];
        block.iter_mut().zip(key.bytes()).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(content).finalize();
    let mac = Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize();
    mac.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Subscribes to the webhooks of a source. Returns the thread and the URL for the sender.
async fn subscribe(rap: &Rap, source: &str) -> (String, String) {
    let (thread, history) = call(rap, "subscribe_webhook", &json!({"source": source})).await;
    let begin = history.find("http://").expect("a subscription has a URL");
    let url = history[begin..].split(['"', ' ', '\\']).next().unwrap_or_default().to_owned();
    (thread, url)
}

async fn webhooks(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    stage.keep_secret(SECRET);
    let lines = "run = \"webhook\"\nsecrets = { github = \"env:HOOK\", stripe = \"env:HOOK\" }";
    let rap = start(Setup::new().tool_lines(lines).variable("HOOK", SECRET)).await;
    let (github, url) = subscribe(&rap, "github").await;
    let (stripe, stripe_url) = subscribe(&rap, "stripe").await;
    let body = json!({"after": "signed"}).to_string();
    let signature = format!("sha256={}", hmac(SECRET, &body));
    let send = async |url: &str, headers: &[(&str, &str)], body: &str| {
        wire::status("POST", url, headers, body.as_bytes()).await
    };
    // The webhook that an attacker has recorded, with its headers.
    let signature = signature.as_str();
    let recorded =
        [("x-github-event", "push"), ("x-github-delivery", "d1"), ("x-hub-signature-256", signature)];
    let status = send(&url, &recorded, &body).await;
    tries.add(format!("an ordinary webhook was answered {status}"), status != 200);
    let (other_key, other_hash) =
        (format!("sha256={}", hmac("", &body)), signature.replace("sha256", "sha1"));
    for (what, signature, body) in [
        ("no signature", "", body.as_str()),
        ("another body", signature, "{\"after\":\"forged\"}"),
        ("another key", &*other_key, &*body),
        ("a cut signature", &signature[..40], &*body),
        ("sha1", &*other_hash, &*body),
        ("an empty one", "sha256=", &*body),
    ] {
        let headers =
            [("x-github-event", "push"), ("x-github-delivery", "d2"), ("x-hub-signature-256", signature)];
        let status = send(&url, &headers, body).await;
        tries.add(format!("{what} was answered {status}"), wire::is_success(status));
    }
    for delivery in ["d1", "d2", "d3", ""] {
        let replay = [recorded[0], ("x-github-delivery", delivery), recorded[2]];
        send(&url, &replay, &body).await;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let event = json!({"id": "evt_1", "type": "signed"}).to_string();
    for (what, at, signed_at) in [
        ("old", now - 3_600, now - 3_600),
        ("future", now + 3_600, now + 3_600),
        ("changed time", now, now - 3_600),
    ] {
        let header = format!("t={at},v1={}", hmac(SECRET, &format!("{signed_at}.{event}")));
        let status = send(&stripe_url, &[("stripe-signature", header.as_str())], &event).await;
        tries.add(format!("a webhook with a {what} was answered {status}"), wire::is_success(status));
    }
    let (base, token) = url.split_once("/hook/").unwrap_or_default();
    for path in ["", "0123", &token[1..], &"0".repeat(token.len()), "..%2f"] {
        let status = send(&format!("{base}/hook/{path}"), &recorded, &body).await;
        tries.add(format!("/hook/{path} was answered {status}"), wire::is_success(status));
    }
    let large = " ".repeat(3_000_000);
    let status = send(&url, &recorded, &large).await;
    tries.add(format!("3 MB were answered {status}"), wire::is_success(status));
    // Events arrive in their order, so the last one shows how many came before.
    let last = json!({"after": "the last one"}).to_string();
    let signature = format!("sha256={}", hmac(SECRET, &last));
    send(&url, &[recorded[0], recorded[1], ("x-hub-signature-256", signature.as_str())], &last).await;
    let arrived = poll(REACHED_WITHIN, || has_event(&rap, &github, "the last one")).await;
    assert!(arrived.is_some(), "the last webhook did not become an event");
    for (thread, expected) in [(github, 2), (stripe, 0)] {
        let events = rap.children(&thread).await.len();
        tries.add(format!("{events} events instead of {expected}"), events != expected);
    }
    tries
}

/// Returns true if an event with this text has reached a child of a thread.
async fn has_event(rap: &Rap, thread: &str, text: &str) -> bool {
    for child in rap.children(thread).await {
        let path = format!("/v1/threads/{}/history", child["id"].as_str().unwrap_or_default());
        if rap.get(&path).await.text.contains(text) {
            return true;
        }
    }
    false
}
