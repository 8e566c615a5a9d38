//! The tool server under test, with the requests that probes send to it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{DISCOVERY_PATH, Secret, Toolset, UrlPolicy, limits, parse_toolset};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use url::{Position, Url};

use super::inbox::{Delivery, Inbox, Listener, Replies, Reply};
use super::{Error, OperationCall, Options, Timeouts, selection};
use crate::report::{Exchange, RedactedMessage, Verdict};

/// Maximum number of bytes of an answer that are read.
const ANSWER_BYTES: usize = 64 * 1024;
/// Pause before a request is repeated that was answered 503 or 429, and maximum number of repetitions.
const PAUSE: Duration = Duration::from_secs(1);
const RETRIES: usize = 3;
/// Maximum number of exchanges that a failure shows.
const SHOWN_EXCHANGES: usize = 6;

pub(super) struct Target {
    base: String,
    /// Base URL without user, password and query.
    displayed_base: String,
    client: Client,
    bearer: Option<Secret>,
    listener: Listener,
    pub(super) timeouts: Timeouts,
    /// Operation that the user chose.
    requested: Option<OperationCall>,
    subscription: Option<OperationCall>,
    toolset: Option<Toolset>,
    /// Operation that probes call, or the reason why there is none.
    operation: Result<OperationCall, String>,
    /// Set if the server did not answer the discovery request.
    is_unreachable: bool,
    /// Set when a result of the operation has arrived.
    pub(super) operation_works: OnceLock<()>,
    /// Random part of all ids, so that runs do not interfere with each other.
    run_id: String,
    ids_made: AtomicUsize,
}

/// Credentials of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Credentials {
    Valid,
    Missing,
    Wrong,
}

/// Answer of the server to one request.
#[derive(Debug, Clone)]
pub(super) struct ServerResponse {
    pub(super) status: u16,
    pub(super) body: Bytes,
    pub(super) took: Duration,
    pub(super) exchange: Exchange,
}

/// A call and the inbox for its callbacks.
pub(super) struct Call {
    pub(super) thread: String,
    pub(super) id: String,
    pub(super) invocation: Value,
    pub(super) inbox: Inbox,
    acknowledged: OnceLock<Exchange>,
}

impl Target {
    pub(super) async fn new(options: Options) -> Result<Target, Error> {
        let Options { url, bearer, operation, subscription, listen, timeouts } = options;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(Error::Url("the URL of a tool server has to begin with http:// or https://".into()));
        }
        if bearer.as_ref().is_some_and(|bearer| authorization(bearer.expose()).is_none()) {
            return Err(Error::Url(
                "the bearer token has characters that are not permitted in an HTTP header".into(),
            ));
        }
        let own_ip = own_ip(&url, timeouts.answer).await;
        let address = listen.unwrap_or(SocketAddr::new(own_ip, 0));
        let listener =
            Listener::start(address, own_ip).await.map_err(|source| Error::Listen { address, source })?;
        let client_limits =
            ClientLimits { total: timeouts.answer, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        let scheme = &url[..Position::BeforeUsername];
        Ok(Target {
            displayed_base: format!("{scheme}{}", &url[Position::BeforeHost..Position::AfterPath])
                .trim_end_matches('/')
                .into(),
            base: url.as_str().trim_end_matches('/').to_owned(),
            client: Client::new(UrlPolicy::Loopback, client_limits),
            bearer,
            listener,
            timeouts,
            requested: operation,
            subscription,
            toolset: None,
            operation: Err("the toolset has not been fetched".into()),
            is_unreachable: false,
            operation_works: OnceLock::new(),
            run_id: random(),
            ids_made: AtomicUsize::new(0),
        })
    }

    /// Fetches the toolset, unless that has succeeded before, and selects the operation to call.
    pub(super) async fn load_toolset(&mut self) -> Result<(), Error> {
        if self.toolset.is_some() {
            return Ok(());
        }
        let discovered = self.discover().await;
        self.is_unreachable = discovered.is_err();
        let Ok(response) = discovered else { return Ok(()) };
        let Ok(toolset) = parse_toolset(&response.body) else { return Ok(()) };
        for operation_call in self.requested.iter().chain(&self.subscription) {
            selection::check(&toolset, operation_call).map_err(Error::Operation)?;
        }
        let selected = || selection::operation(&toolset);
        let none = "no operation is safe to call without arguments; choose one with --operation";
        self.operation = self.requested.clone().or_else(selected).ok_or(none.into());
        self.toolset = Some(toolset);
        Ok(())
    }

    /// Name of the server and of the operations, for the head of a report.
    pub(super) fn describe(&self) -> String {
        let mut text = self.displayed_base.clone();
        if let Some(toolset) = &self.toolset {
            text += &format!(" ({})", toolset.name);
        }
        if let Ok(operation_call) = &self.operation {
            text += &format!(" --operation {}", operation_call.operation);
        }
        if let Some(operation_call) = &self.subscription {
            text += &format!(" --subscription {}", operation_call.operation);
        }
        text
    }

    pub(super) async fn discover(&self) -> Result<ServerResponse, Verdict> {
        let url = self.url(DISCOVERY_PATH)?;
        let request = RedactedMessage::head(format!("GET {DISCOVERY_PATH}"));
        let start = Instant::now();
        match self.client.get(&url, &self.headers(Credentials::Valid), limits::BODY_BYTES).await {
            Ok(fetched) => Ok(self.response(request, fetched.status, fetched.body, start.elapsed())),
            Err(error) => Err(no_answer(request, &error)),
        }
    }

    pub(super) fn toolset(&self) -> Result<&Toolset, Verdict> {
        let not_observable =
            || Verdict::not_observable("the server has no valid toolset: see the probe toolset_is_valid");
        self.toolset.as_ref().ok_or_else(not_observable)
    }

    pub(super) fn has_bearer(&self) -> bool {
        self.bearer.is_some()
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// The operation that probes call.
    pub(super) fn operation_call(&self) -> Result<&OperationCall, Verdict> {
        self.toolset()?;
        self.operation.as_ref().map_err(|why| Verdict::not_observable(why.as_str()))
    }

    /// Prepares a call of the operation.
    pub(super) fn operation(&self) -> Result<Call, Verdict> {
        self.operation_answering(&[])
    }

    /// Prepares a call of the operation. Its results are answered with `replies`, and with 200 after that.
    pub(super) fn operation_answering(&self, replies: &[Reply]) -> Result<Call, Verdict> {
        let operation_call = self.operation_call()?;
        if self.operation_works.get().is_none() {
            return Err(Verdict::not_observable(
                "the operation sent no result: see the probe result_is_delivered",
            ));
        }
        let replies = Replies { results: replies.iter().copied().collect(), ..Replies::default() };
        self.call(&operation_call.operation, Value::Object(operation_call.arguments.clone()), "", replies)
    }

    /// Prepares a call of the subscription. Its events are answered with `replies`, and with 200 after that.
    pub(super) fn subscription(&self, replies: &[Reply]) -> Result<Call, Verdict> {
        self.toolset()?;
        let none =
            "no subscription was given; name one that quickly sends several events with --subscription";
        let operation_call = self.subscription.as_ref().ok_or_else(|| Verdict::not_observable(none))?;
        let replies = Replies { events: replies.iter().copied().collect(), ..Replies::default() };
        self.call(&operation_call.operation, Value::Object(operation_call.arguments.clone()), "", replies)
    }

    /// Prepares a call of any operation. `suffix` is appended to its callback URL.
    pub(super) fn call(
        &self,
        operation: &str,
        arguments: Value,
        suffix: &str,
        replies: Replies,
    ) -> Result<Call, Verdict> {
        let token = random();
        let inbox = self.listener.inbox(&token, suffix, replies);
        let (thread, id) = (self.fresh_id("thread"), self.fresh_id("call"));
        let mut invocation = json!({
            "operation": operation,
            "arguments": arguments,
            "id": id,
            "group_id": thread,
            "callback_url": inbox.url,
        });
        if let Some(version) = &self.toolset()?.version {
            invocation["toolset_version"] = version.as_str().into();
        }
        Ok(Call { thread, id, invocation, inbox, acknowledged: OnceLock::new() })
    }

    /// Returns an id that was never used before.
    pub(super) fn fresh_id(&self, prefix: &str) -> String {
        let number = self.ids_made.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}_{}_{number}", self.run_id)
    }

    /// Sends an invocation, and repeats it after a 503. Any other answer than 2xx is a failure.
    pub(super) async fn invoke(&self, call: &Call) -> Result<ServerResponse, Verdict> {
        let mut response = self.send_invocation(call, Credentials::Valid).await?;
        for _ in 0..RETRIES {
            if response.status == 503 {
                tokio::time::sleep(PAUSE).await;
                response = self.send_invocation(call, Credentials::Valid).await?;
            }
        }
        if (200..300).contains(&response.status) {
            return Ok(response);
        }
        Err(Verdict::fail(
            format!("an invocation was answered {} instead of 200", response.status),
            vec![response.exchange],
        ))
    }

    /// Sends an invocation once and returns any answer.
    pub(super) async fn send_invocation(
        &self,
        call: &Call,
        credentials: Credentials,
    ) -> Result<ServerResponse, Verdict> {
        let body = serde_json::to_vec(&call.invocation).expect("bug: an invocation is JSON");
        let response = self.post_to_endpoint(body.into(), credentials).await?;
        // If a call is sent twice, reports show the first acknowledgement.
        call.acknowledged.set(response.exchange.clone()).ok();
        Ok(response)
    }

    pub(super) async fn post_to_endpoint(
        &self,
        body: Bytes,
        credentials: Credentials,
    ) -> Result<ServerResponse, Verdict> {
        let url = self.toolset()?.endpoint.to_url();
        let head = format!("POST {}", url.path());
        self.post(&url, head, body, credentials).await
    }

    /// Sends a notification, and repeats it after a 429.
    pub(super) async fn notify(&self, path: &str, body: &Value) -> Result<ServerResponse, Verdict> {
        let mut response = self.notify_as(path, body, Credentials::Valid).await?;
        for _ in 0..RETRIES {
            if response.status == 429 {
                tokio::time::sleep(PAUSE).await;
                response = self.notify_as(path, body, Credentials::Valid).await?;
            }
        }
        Ok(response)
    }

    /// POSTs to a path below the base URL, once.
    pub(super) async fn notify_as(
        &self,
        path: &str,
        body: &Value,
        credentials: Credentials,
    ) -> Result<ServerResponse, Verdict> {
        let body = serde_json::to_vec(body).expect("bug: a notification is JSON");
        self.post(&self.url(path)?, format!("POST {path}"), body.into(), credentials).await
    }

    async fn post(
        &self,
        url: &Url,
        head: String,
        body: Bytes,
        credentials: Credentials,
    ) -> Result<ServerResponse, Verdict> {
        if self.is_unreachable {
            return Err(Verdict::not_observable(
                "the server does not answer: see the probe toolset_is_served",
            ));
        }
        let request = RedactedMessage::new(head, &body);
        let start = Instant::now();
        match self.client.post_json(url, &self.headers(credentials), body).await {
            Ok(reply) => Ok(self.response(request, reply.status, reply.body, start.elapsed())),
            Err(error) => Err(no_answer(request, &error)),
        }
    }

    fn url(&self, path: &str) -> Result<Url, Verdict> {
        Url::parse(&format!("{}{path}", self.base))
            .map_err(|error| Verdict::fail(error.to_string(), Vec::new()))
    }

    fn headers(&self, credentials: Credentials) -> Vec<(HeaderName, HeaderValue)> {
        let token = match credentials {
            Credentials::Valid => self.bearer.as_ref().map(Secret::expose),
            Credentials::Missing => None,
            Credentials::Wrong => Some("not-the-token"),
        };
        let header = token.and_then(authorization);
        header.into_iter().map(|value| (AUTHORIZATION, value)).collect()
    }

    fn response(&self, request: RedactedMessage, status: u16, body: Bytes, took: Duration) -> ServerResponse {
        let answer = RedactedMessage::new(format!("{status} after {} ms", took.as_millis()), &body);
        let mut exchange = Exchange::new(request, answer);
        if let Some(bearer) = &self.bearer {
            exchange = exchange.redact(bearer);
        }
        ServerResponse { status, body, took, exchange }
    }
}

impl Call {
    /// Waits for the first result.
    pub(super) async fn result(&self, timeouts: Timeouts) -> Result<Delivery, Verdict> {
        let first = |deliveries: &[Delivery]| results(deliveries).next().cloned();
        let result = self.inbox.wait_for(timeouts.result, first).await;
        let seconds = timeouts.result.as_secs_f64();
        result.ok_or_else(|| self.fail(format!("no tool_result arrived within {seconds} s")))
    }

    /// Waits for the first event.
    pub(super) async fn event(&self, timeouts: Timeouts) -> Result<Delivery, Verdict> {
        let first = |deliveries: &[Delivery]| events(deliveries).next().cloned();
        let event = self.inbox.wait_for(timeouts.result, first).await;
        let seconds = timeouts.result.as_secs_f64();
        event.ok_or_else(|| Verdict::not_observable(format!("no event arrived within {seconds} s")))
    }

    /// Creates a failure with the exchanges of this call.
    pub(super) fn fail(&self, what: impl Into<String>) -> Verdict {
        Verdict::fail(what, self.exchanges())
    }

    pub(super) fn exchanges(&self) -> Vec<Exchange> {
        let deliveries = self.inbox.deliveries();
        let callbacks = deliveries.iter().map(Delivery::exchange);
        self.acknowledged.get().cloned().into_iter().chain(callbacks).take(SHOWN_EXCHANGES).collect()
    }
}

pub(super) fn results(deliveries: &[Delivery]) -> impl Iterator<Item = &Delivery> {
    deliveries.iter().filter(|delivery| delivery.kind() == "tool_result")
}

pub(super) fn events(deliveries: &[Delivery]) -> impl Iterator<Item = &Delivery> {
    deliveries.iter().filter(|delivery| delivery.kind() == "subscription_event")
}

fn no_answer(request: RedactedMessage, error: &rap_io::client::Error) -> Verdict {
    Verdict::fail(
        "the server did not answer",
        vec![Exchange::new(request, RedactedMessage::head(format!("no answer: {error}")))],
    )
}

fn authorization(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Local IP address of a connection to the server.
async fn own_ip(url: &Url, within: Duration) -> IpAddr {
    let host = url.host_str().unwrap_or("").trim_matches(['[', ']']);
    let port = url.port_or_known_default().unwrap_or(80);
    match timeout(within, TcpStream::connect((host, port))).await {
        Ok(Ok(stream)) => stream.local_addr().map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip()),
        // The first probe reports that the server cannot be reached.
        _ => Ipv4Addr::LOCALHOST.into(),
    }
}

fn random() -> String {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("bug: the operating system has no random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
