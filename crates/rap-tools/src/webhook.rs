//! `subscribe_webhook`: forwards webhooks as events.
//!
//! A subscription gives a URL to register at the sender. A webhook is forwarded only if its signature is valid and it is not
//! a repeat, and is answered with 200 only when its event is on disk. See `delivery_id`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use rap_io::body::{BodyError, BodyLimits, BodyMemory};
use rap_io::serve::{ServeLimits, serve_until};
use rap_protocol::check_json;
use rap_tool::prelude::*;
use rap_tool::webhook::Webhook;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use crate::{Error as StartError, Options};

/// Maximum size of a webhook in bytes, and time until it has arrived.
const BODY: BodyLimits = BodyLimits { bytes: 2 * 1024 * 1024, within: WITHIN };
/// Memory for webhooks that are being received, in bytes. Beyond it, the sender has to send it again.
const BODY_MEMORY: usize = 32 * 1024 * 1024;
/// Maximum memory of a parsed webhook, besides its texts, in bytes.
const PARSED_BYTES: usize = 16 * 1024 * 1024;
/// Maximum number of webhooks of a subscription that wait to be written. Beyond it, the sender has to send it again.
const WAITING: usize = 64;
/// Number of delivery ids that a subscription remembers.
const REMEMBERED: usize = 200;
/// Maximum length of a delivery id that is remembered, in bytes.
const ID_BYTES: usize = 128;
/// Time until a webhook is written, and until its body has arrived.
const WITHIN: Duration = Duration::from_secs(10);
const CONNECTIONS: usize = 256;

/// Subscribes you to the webhooks of a service. The answer has the URL to register there.
#[derive(Deserialize, JsonSchema)]
struct SubscribeWebhook {
    /// Sender of the webhooks: github, stripe, slack or standard (Standard Webhooks).
    source: String,
    /// Filter of the webhooks to forward; all by default. A text is the type of the event, such as push. An object has
    /// fields that the payload must have, by name or JSON pointer, such as {"/repository/name": "rap"}.
    filter: Option<Value>,
}

/// State that the calls and the receiver share.
struct Hooks {
    base: String,
    bodies: BodyMemory,
    sources: HashMap<String, Webhook>,
    subscriptions: Mutex<HashMap<String, Registered>>,
}

#[derive(Clone)]
struct Registered {
    webhook: Webhook,
    source: String,
    received: mpsc::Sender<Received>,
}

/// A webhook whose signature is valid.
struct Received {
    /// Recognises a repeated delivery.
    id: String,
    /// Id that people find at the sender.
    delivery: String,
    kind: Option<String>,
    payload: Value,
    written: oneshot::Sender<()>,
}

impl Hooks {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Registered>> {
        self.subscriptions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) async fn server(options: Options) -> Result<ToolServer, StartError> {
    let mut sources = HashMap::new();
    for (source, secret) in options.secrets {
        let webhook = Webhook::named(&source, secret.expose());
        let webhook = webhook.ok_or_else(|| StartError::UnknownSource(source.clone()))?;
        let webhook = webhook.map_err(|error| StartError::BadSecret(source.clone(), error))?;
        sources.insert(source, webhook);
    }
    let address = options.hooks;
    let failed = |source| StartError::Hooks { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let base = options.hooks_url.map_or_else(|| format!("http://{bound}"), |url| url.to_string());
    let base = base.trim_end_matches('/').to_owned();
    tracing::info!(url = base, "webhooks are received on {bound}");
    let hooks = Arc::new(Hooks {
        base,
        bodies: BodyMemory::new(BODY_MEMORY),
        sources,
        subscriptions: Mutex::default(),
    });
    let router = Router::new().route("/hook/{token}", post(receive)).with_state(Arc::clone(&hooks));
    let limits = ServeLimits { connections: CONNECTIONS, head_within: WITHIN, urgent_paths: &[] };
    // It ends with the process.
    tokio::spawn(serve_until(listener, router, limits, std::future::pending()));
    let subscribe = move |args: SubscribeWebhook, subscribe: Subscribe| {
        subscribe_webhook(Arc::clone(&hooks), args, subscribe)
    };
    let tool = Tool::subscription("subscribe_webhook", subscribe).read_only();
    Ok(ToolServer::new("webhook").description("Forwards webhooks as events.").offer(tool))
}

/// Removes the subscription from the receiver when its handler ends.
struct Registration {
    hooks: Arc<Hooks>,
    token: String,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.hooks.lock().remove(&self.token);
    }
}

async fn subscribe_webhook(hooks: Arc<Hooks>, args: SubscribeWebhook, subscribe: Subscribe) -> Result<()> {
    let Some(webhook) = hooks.sources.get(&args.source).cloned() else {
        let mut known: Vec<&str> = hooks.sources.keys().map(String::as_str).collect();
        known.sort_unstable();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return Err(Error::new(format!(
            "webhooks of {:?} are not configured, since their secret is not known; configured are: {known}",
            args.source
        )));
    };
    let token = token(&subscribe);
    let (sender, mut received) = mpsc::channel(WAITING);
    let registered = Registered { webhook, source: args.source.clone(), received: sender };
    hooks.lock().insert(token.clone(), registered);
    let url = format!("{}/hook/{token}", hooks.base);
    let _registration = Registration { hooks, token };
    let mut seen: VecDeque<String> = subscribe.cursor()?.unwrap_or_default();
    let text = format!("Register this URL at {}: {url}", args.source);
    let subscription = subscribe.confirm(text).await?;
    while let Some(Received { id, delivery, kind, payload, written }) = received.recv().await {
        let is_new = !seen.contains(&id);
        if is_new && passes(args.filter.as_ref(), kind.as_deref(), &payload) {
            seen.push_back(id);
            let excess = seen.len().saturating_sub(REMEMBERED);
            seen.drain(..excess);
            let event =
                json!({"source": args.source, "event": kind, "delivery": delivery, "payload": payload});
            subscription.send(Event::json(&event)?.cursor(&seen)).await?;
        }
        // The sender may have given up.
        written.send(()).ok();
    }
    Ok(())
}

/// Returns the secret part of a subscription's URL. It is the same after a restart. The key of the thread cannot be
/// guessed, since it is made with the server's own key.
fn token(call: &Call) -> String {
    let digest = Sha256::new().chain_update(call.thread().key()).chain_update(call.id().as_str()).finalize();
    digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if a webhook is to be forwarded.
fn passes(filter: Option<&Value>, kind: Option<&str>, payload: &Value) -> bool {
    let field = |name: &str| match name.strip_prefix('/') {
        Some(_) => payload.pointer(name),
        None => payload.get(name),
    };
    match filter {
        None | Some(Value::Null) => true,
        Some(Value::Object(fields)) => fields.iter().all(|(name, value)| match name.as_str() {
            "event" if payload.get("event").is_none() => value.as_str() == kind,
            _ => field(name) == Some(value),
        }),
        Some(Value::String(text)) => kind == Some(text),
        Some(_) => false,
    }
}

async fn receive(
    State(hooks): State<Arc<Hooks>>,
    Path(token): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> (StatusCode, String) {
    let answer = |status: StatusCode, text: &str| (status, text.to_owned());
    let registered = hooks.lock().get(&token).cloned();
    let Some(Registered { webhook, source, received }) = registered else {
        return answer(StatusCode::NOT_FOUND, "nobody is subscribed at this URL");
    };
    let received_body = match hooks.bodies.read(&headers, body, BODY).await {
        Ok(body) => body,
        Err(error) => {
            let status = match error {
                BodyError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
                BodyError::TooSlow => StatusCode::REQUEST_TIMEOUT,
                BodyError::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
                BodyError::CutOff | BodyError::NotJson => StatusCode::BAD_REQUEST,
            };
            return (status, error.to_string());
        }
    };
    let body = &received_body.bytes;
    if let Err(rejected) = webhook.verify(&headers, body, SystemTime::now()) {
        tracing::warn!(source, why = %rejected, "a webhook was rejected");
        return answer(StatusCode::UNAUTHORIZED, &rejected.to_string());
    }
    let Some(payload) = payload(&headers, body) else {
        return answer(StatusCode::BAD_REQUEST, "the webhook is not JSON");
    };
    // Slack verifies the URL once.
    if let (Some("url_verification"), Some(challenge)) =
        (payload["type"].as_str(), payload["challenge"].as_str())
    {
        return answer(StatusCode::OK, challenge);
    }
    let (written, is_written) = oneshot::channel();
    let (id, kind) =
        (delivery_id(&source, &headers, &payload, body), event_type(&source, &headers, &payload));
    let delivery = header_id(&source, &headers).unwrap_or_else(|| id.clone());
    if received.try_send(Received { id, delivery, kind, payload, written }).is_err() {
        return answer(StatusCode::SERVICE_UNAVAILABLE, "too many webhooks wait; send it again later");
    }
    match tokio::time::timeout(WITHIN, is_written).await {
        Ok(Ok(())) => answer(StatusCode::OK, ""),
        _ => answer(StatusCode::SERVICE_UNAVAILABLE, "the webhook could not be stored; send it again later"),
    }
}

/// Returns the payload. GitHub and Slack can also send a form with JSON in it.
fn payload(headers: &HeaderMap, body: &[u8]) -> Option<Value> {
    check_json(body, PARSED_BYTES).ok()?;
    if let Ok(payload) = serde_json::from_slice(body) {
        return Some(payload);
    }
    let kind = headers.get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("application/x-www-form-urlencoded") {
        return None;
    }
    let fields: serde_json::Map<String, Value> = url::form_urlencoded::parse(body)
        .map(|(name, value)| (name.into_owned(), Value::String(value.into_owned())))
        .collect();
    match fields.get("payload").and_then(Value::as_str) {
        Some(text) => {
            check_json(text.as_bytes(), PARSED_BYTES).ok().and_then(|_| serde_json::from_str(text).ok())
        }
        None => Some(Value::Object(fields)),
    }
}

/// Returns the id by which a repeated delivery is recognised. It is signed: without a signed id, a delivery is recognised by
/// its content. GitHub signs the content only, so one who has recorded a webhook could give it another id.
fn delivery_id(source: &str, headers: &HeaderMap, payload: &Value, body: &[u8]) -> String {
    let named = match source {
        "github" => None,
        "standard" => headers.get("webhook-id").and_then(|value| value.to_str().ok()),
        "stripe" => payload["id"].as_str(),
        _ => payload["event_id"].as_str(),
    };
    match named.filter(|id| is_id(id)) {
        Some(id) => id.to_owned(),
        None => Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

fn is_id(text: &str) -> bool {
    (1..=ID_BYTES).contains(&text.len())
}

/// Returns the id that GitHub shows for a delivery. It is not signed.
fn header_id(source: &str, headers: &HeaderMap) -> Option<String> {
    let id = headers.get("x-github-delivery").filter(|_| source == "github")?.to_str().ok()?;
    is_id(id).then(|| id.to_owned())
}

fn event_type(source: &str, headers: &HeaderMap, payload: &Value) -> Option<String> {
    let kind = match source {
        "github" => headers.get("x-github-event").and_then(|kind| kind.to_str().ok()),
        "slack" => payload.pointer("/event/type").and_then(Value::as_str),
        _ => payload["type"].as_str(),
    };
    kind.map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_webhook_is_recognised_by_what_its_sender_signs() {
        let headers = |name: &'static str, id: &str| {
            HeaderMap::from_iter([(name.parse().unwrap(), id.parse().unwrap())])
        };
        let (payload, body) = (json!({"id": "evt_1", "event_id": "Ev1"}), b"{}");
        let id = |source: &str, headers: &HeaderMap| delivery_id(source, headers, &payload, body);
        let [first, second] = ["1", "2"].map(|id| headers("x-github-delivery", id));
        assert_eq!(id("github", &first), id("github", &second), "the header is not signed");
        assert_eq!(header_id("github", &second).as_deref(), Some("2"));
        assert_eq!(header_id("slack", &second), None);
        let [first, second] = ["1", "2"].map(|id| headers("webhook-id", id));
        assert_ne!(id("standard", &first), id("standard", &second));
        assert_eq!((id("stripe", &first), id("slack", &first)), ("evt_1".to_owned(), "Ev1".to_owned()));
    }

    #[test]
    fn a_webhook_that_needs_too_much_memory_is_not_parsed() {
        let bulk = format!("[{}0]", "{\"a\":0},".repeat(100_000));
        assert_eq!(payload(&HeaderMap::new(), bulk.as_bytes()), None);
        assert!(payload(&HeaderMap::new(), b"[{\"a\": 0}]").is_some());
    }

    #[test]
    fn a_filter_compares_the_type_or_fields() {
        let payload = json!({"action": "opened", "repository": {"name": "rap"}});
        for (filter, expected) in [
            (json!(null), true),
            (json!("push"), true),
            (json!("issues"), false),
            (json!({"action": "opened"}), true),
            (json!({"action": "opened", "/repository/name": "rap", "event": "push"}), true),
            (json!({"/repository/name": "other"}), false),
            (json!({"missing": 1}), false),
            (json!(["push"]), false),
        ] {
            assert_eq!(passes(Some(&filter), Some("push"), &payload), expected, "{filter}");
        }
        assert!(passes(None, None, &payload));
    }
}
