//! Receives the callbacks of a tool server. Each call has an inbox with its own URL.
//!
//! A probe decides how callbacks are answered before it makes the call. Every delivery is recorded before it is
//! answered.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use rap_io::serve::{ServeLimits, serve_until};
use rap_protocol::limits;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use crate::report::{Exchange, RedactedMessage};

/// Maximum number of recorded deliveries of one call. A server that sends more has failed long before.
const DELIVERIES: usize = 1_000;
/// Maximum time that an answer is held back.
const HOLD: Duration = Duration::from_secs(20);
const LIMITS: ServeLimits =
    ServeLimits { connections: 1_000, head_within: Duration::from_secs(30), urgent_paths: &[] };

/// Receives the callbacks of all calls. It stops when this is dropped.
pub(super) struct Listener {
    address: SocketAddr,
    inboxes: Inboxes,
    _stop: oneshot::Sender<()>,
}

type Inboxes = Arc<Mutex<HashMap<String, Arc<Shared>>>>;

/// Answer to a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    Status(u16),
    /// 200, sent when the inbox is released.
    Held,
}

/// Answers to the next results and events, in order. Later deliveries are answered 200.
#[derive(Debug, Default, Clone)]
pub(super) struct Replies {
    pub(super) results: VecDeque<Reply>,
    pub(super) events: VecDeque<Reply>,
}

/// A callback that arrived.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub(super) at: Instant,
    pub(super) method: String,
    /// Path and query.
    pub(super) path: String,
    pub(super) content_type: String,
    pub(super) body: Bytes,
    /// Parsed body; null if it is not JSON.
    pub(super) message: Value,
    host: SocketAddr,
    answered: Reply,
}

/// Callbacks of one call.
pub(super) struct Inbox {
    pub(super) url: String,
    shared: Arc<Shared>,
}

struct Shared {
    host: SocketAddr,
    state: Mutex<(Vec<Delivery>, Replies)>,
    count: watch::Sender<usize>,
    released: watch::Sender<bool>,
}

impl Listener {
    /// Starts to listen. If `address` is unspecified (all interfaces), callback URLs use `reachable_ip`.
    pub(super) async fn start(address: SocketAddr, reachable_ip: IpAddr) -> io::Result<Listener> {
        let socket = TcpListener::bind(address).await?;
        let mut address = socket.local_addr()?;
        if address.ip().is_unspecified() {
            address.set_ip(reachable_ip);
        }
        let inboxes = Inboxes::default();
        let router = Router::new().fallback(receive).with_state(Arc::clone(&inboxes));
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(async move {
            // Ends when the sender is dropped.
            drop(serve_until(socket, router, LIMITS, async { drop(stopped.await) }).await);
        });
        Ok(Listener { address, inboxes, _stop: stop })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Creates an inbox whose URL contains `token`, followed by `suffix`.
    pub(super) fn inbox(&self, token: &str, suffix: &str, replies: Replies) -> Inbox {
        let shared = Arc::new(Shared {
            host: self.address,
            state: Mutex::new((Vec::new(), replies)),
            count: watch::Sender::new(0),
            released: watch::Sender::new(false),
        });
        lock(&self.inboxes).insert(token.to_owned(), Arc::clone(&shared));
        Inbox { url: format!("http://{}/callback/{token}{suffix}", self.address), shared }
    }
}

impl Inbox {
    pub(super) fn deliveries(&self) -> Vec<Delivery> {
        lock(&self.shared.state).0.clone()
    }

    /// Waits until `look` returns a value for the deliveries so far; `None` after the time limit.
    pub(super) async fn wait_for<T>(
        &self,
        within: Duration,
        look: impl Fn(&[Delivery]) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + within;
        let mut count = self.shared.count.subscribe();
        loop {
            count.borrow_and_update();
            if let Some(found) = look(&lock(&self.shared.state).0) {
                return Some(found);
            }
            timeout_at(deadline, count.changed()).await.ok()?.ok()?;
        }
    }

    /// Sends the answers that were held back.
    pub(super) fn release(&self) {
        self.shared.released.send_replace(true);
    }
}

impl Shared {
    fn record(&self, mut delivery: Delivery) -> Reply {
        let mut state = lock(&self.state);
        let (deliveries, replies) = &mut *state;
        let reply = match delivery.kind() {
            "subscription_event" => replies.events.pop_front(),
            "tool_result" => replies.results.pop_front(),
            _ => None,
        };
        delivery.answered = reply.unwrap_or(Reply::Status(200));
        let reply = delivery.answered;
        if deliveries.len() < DELIVERIES {
            deliveries.push(delivery);
        }
        self.count.send_replace(deliveries.len());
        reply
    }

    async fn wait_for_release(&self) {
        let mut released = self.released.subscribe();
        // The probe may have ended without releasing the inbox. The delivery is answered in any case.
        drop(timeout(HOLD, released.wait_for(|released| *released)).await);
    }
}

impl Delivery {
    /// The `type` of the message.
    pub(super) fn kind(&self) -> &str {
        self.text("type")
    }

    /// A string field, or the empty string.
    pub(super) fn text(&self, field: &str) -> &str {
        self.message[field].as_str().unwrap_or("")
    }

    /// Text of a result or an event.
    pub(super) fn result_text(&self) -> String {
        match self.message["content"].as_array() {
            Some(items) => {
                items.iter().filter_map(|item| item["text"].as_str()).collect::<Vec<_>>().join("\n")
            }
            None => self.text("text").to_owned(),
        }
    }

    pub(super) fn exchange(&self) -> Exchange {
        let answer = match self.answered {
            Reply::Status(status) => RedactedMessage::head(status.to_string()),
            Reply::Held => RedactedMessage::head("200, held back"),
        };
        let head = format!("{} http://{}{} (callback)", self.method, self.host, self.path);
        Exchange::new(RedactedMessage::new(head, &self.body), answer)
    }
}

async fn receive(State(inboxes): State<Inboxes>, request: Request) -> StatusCode {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or("", |path| path.as_str()).to_owned();
    let token = head.uri.path().strip_prefix("/callback/").and_then(|rest| rest.split('/').next());
    let Some(shared) = token.and_then(|token| lock(&inboxes).get(token).cloned()) else {
        return StatusCode::NOT_FOUND;
    };
    let content_type = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let body = match to_bytes(Body::new(body), limits::BODY_BYTES).await {
        Ok(body) => body,
        Err(_) => return StatusCode::PAYLOAD_TOO_LARGE,
    };
    let delivery = Delivery {
        at: Instant::now(),
        method: head.method.to_string(),
        path,
        content_type: content_type.unwrap_or("").to_owned(),
        message: serde_json::from_slice(&body).unwrap_or(Value::Null),
        body,
        host: shared.host,
        answered: Reply::Held,
    };
    match shared.record(delivery) {
        Reply::Status(status) => StatusCode::from_u16(status).expect("bug: a probe uses an invalid status"),
        Reply::Held => {
            shared.wait_for_release().await;
            StatusCode::OK
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("bug: a thread panicked while it held the lock")
}
