//! Receives the callbacks of tool servers. Each call has a URL with a token of its own, which is the credential.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::post;
use http::{HeaderMap, StatusCode};
use rap_io::body::{BodyError, BodyLimits, BodyMemory};
use rap_io::serve::{ServeLimits, serve_until};
use rap_protocol::{Callback, CallbackUrl, EventId, limits, parse_callback};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::call::Call;
use super::random_hex;
use super::session::Session;

/// Maximum number of tokens of calls that are not open any more. Their callbacks get 200 and change nothing.
const SETTLED: usize = 10_000;
/// Memory for callbacks that are being received, in bytes.
const MEMORY: usize = 64 * 1024 * 1024;
const BODY: BodyLimits = BodyLimits { bytes: limits::BODY_BYTES, within: Duration::from_secs(30) };
const LIMITS: ServeLimits =
    ServeLimits { connections: 1_000, head_within: Duration::from_secs(30), urgent_paths: &[] };
/// Headers that hold the event id if the body has none.
const EVENT_ID_HEADERS: [&str; 2] = ["webhook-id", "idempotency-key"];

/// Listener for callbacks.
pub(super) struct Callbacks {
    base: String,
    receiver: Arc<Receiver>,
    stop: CancellationToken,
}

struct Receiver {
    calls: Mutex<Calls>,
    memory: BodyMemory,
}

#[derive(Default)]
struct Calls {
    open: HashMap<String, Open>,
    /// Tokens of settled calls, oldest first.
    settled: VecDeque<String>,
}

#[derive(Clone)]
struct Open {
    call: Arc<Call>,
    session: Weak<Session>,
}

impl Callbacks {
    /// Listens on `address`. Callback URLs begin with `public`, or with that address.
    pub(super) async fn listen(address: SocketAddr, public: Option<&Url>) -> io::Result<Callbacks> {
        let socket = TcpListener::bind(address).await?;
        let bound = socket.local_addr()?;
        let base = public
            .map_or_else(|| format!("http://{bound}"), |url| url.as_str().trim_end_matches('/').to_owned());
        let receiver = Arc::new(Receiver { calls: Mutex::default(), memory: BodyMemory::new(MEMORY) });
        let router =
            Router::new().route("/callback/{token}", post(receive)).with_state(Arc::clone(&receiver));
        let stop = CancellationToken::new();
        tokio::spawn(serve_until(socket, router, LIMITS, stop.clone().cancelled_owned()));
        Ok(Callbacks { base, receiver, stop })
    }

    /// Registers a call. Returns its token and its callback URL.
    pub(super) fn register(
        &self,
        call: &Arc<Call>,
        session: &Arc<Session>,
    ) -> Result<(String, CallbackUrl), String> {
        let token = random_hex::<32>().map_err(|error| error.to_string())?;
        let url =
            CallbackUrl::new(format!("{}/callback/{token}", self.base)).map_err(|error| error.to_string())?;
        let open = Open { call: Arc::clone(call), session: Arc::downgrade(session) };
        self.receiver.calls().open.insert(token.clone(), open);
        Ok((token, url))
    }

    /// Forgets a call. Later callbacks for it are acknowledged and change nothing.
    pub(super) fn forget(&self, token: &str) {
        let mut calls = self.receiver.calls();
        if calls.open.remove(token).is_some() {
            calls.settled.push_back(token.to_owned());
            if calls.settled.len() > SETTLED {
                calls.settled.pop_front();
            }
        }
    }

    /// Number of calls that can still get callbacks.
    pub(super) fn open(&self) -> usize {
        self.receiver.calls().open.len()
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Receiver {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) type Refusal = (StatusCode, String);

async fn receive(
    State(receiver): State<Arc<Receiver>>,
    Path(token): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, Refusal> {
    let open = {
        let calls = receiver.calls();
        match calls.open.get(&token) {
            Some(open) => open.clone(),
            None if calls.settled.contains(&token) => return Ok(StatusCode::OK),
            None => {
                let why = "the callback URL was not issued by this process, or its call has ended";
                return Err((StatusCode::UNAUTHORIZED, why.into()));
            }
        }
    };
    let received = receiver.memory.read_json(&headers, body, BODY).await.map_err(refused)?;
    let callback = parse_callback(&received.bytes)
        .map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))
        .and_then(|callback| checked(callback, &open.call))?;
    let applied = open.call.apply(with_event_id(callback, &headers));
    if let Some(session) = open.session.upgrade() {
        session.callback_applied(&open.call, &applied);
    }
    Ok(StatusCode::OK)
}

/// Refuses a callback with the ids of another call.
fn checked(callback: Callback, call: &Call) -> Result<Callback, Refusal> {
    let id = match &callback {
        Callback::ToolResult(message) => Some(&message.id),
        Callback::SubscriptionEvent(message) => Some(&message.tool_call_id),
        Callback::Oauth(message) => Some(&message.id),
        Callback::UserChoice(message) => Some(&message.id),
        Callback::ViewUpdate(_) => None,
    };
    if callback.group_id() == &call.group && id.is_none_or(|id| id == &call.id) {
        return Ok(callback);
    }
    Err((
        StatusCode::BAD_REQUEST,
        "group_id and id are not those of the call that this URL was issued for".into(),
    ))
}

/// Takes the id of an event from the headers if the body has none.
fn with_event_id(mut callback: Callback, headers: &HeaderMap) -> Callback {
    if let Callback::SubscriptionEvent(event) = &mut callback
        && event.event_id.is_none()
    {
        let id = EVENT_ID_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok());
        event.event_id = id.and_then(|id| EventId::new(id).ok());
    }
    callback
}

/// Returns the answer to a request whose body was refused.
pub(super) fn refused(error: BodyError) -> Refusal {
    let status = match error {
        BodyError::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        BodyError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
        BodyError::TooSlow => StatusCode::REQUEST_TIMEOUT,
        BodyError::CutOff => StatusCode::BAD_REQUEST,
        BodyError::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, error.to_string())
}
