//! The tool server under test, with the requests that probes send to it.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, DISCOVERY_PATH, Secret, Toolset, UrlPolicy, limits,
    parse_toolset,
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use url::{Position, Url};

use super::inbox::{Delivery, Inbox, Listener, Replies, Reply};
use super::{Error, OperationCall, Options, ProbeResult, Timeouts, selection};
use crate::report::{Exchange, RedactedMessage, Verdict};

/// Maximum number of bytes of an answer that are read.
const ANSWER_BYTES: usize = 64 * 1024;
/// Pause before a request is repeated that was answered 503 or 429, and maximum number of repetitions.
const PAUSE: Duration = Duration::from_secs(1);
const RETRIES: usize = 3;
/// Operation that no server has.
pub(super) const UNKNOWN: &str = "rap_check_no_such_operation";
/// Path that no server has.
const UNKNOWN_PATH: &str = "/rap-check-no-such-path";
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
    /// Operation that works for a while, if there is one.
    slow: Option<OperationCall>,
    /// Operation that has to be called first in each thread.
    setup: Option<OperationCall>,
    subscription: Option<OperationCall>,
    toolset: Option<Toolset>,
    /// Operation that probes call, or the reason why there is none.
    operation: Result<OperationCall, String>,
    /// Thread and id of the first call of the operation, set when its result has arrived.
    pub(super) operation_works: OnceLock<(String, String)>,
    /// Set if the operation sends several results for one call.
    pub(super) repeats_results: OnceLock<()>,
    /// Notification endpoints that the server does not have, once that is known.
    missing_endpoints: OnceLock<Vec<&'static str>>,
    /// Threads in which the setup operation has been called.
    set_up: Mutex<HashSet<String>>,
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
        let Options {
            url,
            bearer,
            operation,
            slow_operation,
            setup_operation,
            subscription,
            listen,
            timeouts,
            profile: _,
        } = options;
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
            slow: slow_operation,
            setup: setup_operation,
            subscription,
            toolset: None,
            operation: Err("the toolset has not been fetched".into()),
            operation_works: OnceLock::new(),
            repeats_results: OnceLock::new(),
            missing_endpoints: OnceLock::new(),
            set_up: Mutex::default(),
            run_id: random(),
            ids_made: AtomicUsize::new(0),
        })
    }

    /// Fetches the toolset and selects the operations to call. An invalid toolset is the failure of a probe.
    pub(super) async fn load_toolset(&mut self) -> Result<(), Error> {
        let url = self.url(DISCOVERY_PATH).map_err(|_| Error::Url("the URL is not valid".into()))?;
        let fetched = self.client.get(&url, &self.headers(Credentials::Valid), limits::BODY_BYTES).await;
        let fetched = fetched.map_err(|error| Error::Unreachable {
            url: self.displayed_base.clone(),
            why: error.to_string(),
        })?;
        self.expect_authorized(fetched.status, "a request for its toolset")?;
        let Ok(toolset) = parse_toolset(&fetched.body) else { return Ok(()) };
        for operation_call in self.named() {
            selection::check(&toolset, operation_call).map_err(Error::Operation)?;
        }
        let selected = || selection::operation(&toolset);
        let none =
            "no operation is annotated as readOnly and needs no arguments; choose one with --operation";
        self.operation = self.requested.clone().or_else(selected).ok_or(none.into());
        self.slow = self.slow.clone().or_else(|| selection::slow_operation(&toolset));
        self.toolset = Some(toolset);
        Ok(())
    }

    /// Operations that the user named.
    fn named(&self) -> impl Iterator<Item = &OperationCall> {
        let Target { requested, slow, setup, subscription, .. } = self;
        [requested, setup, slow, subscription].into_iter().flatten()
    }

    /// Fails if the server rejects the credentials of the checker with an invocation.
    pub(super) async fn check_credentials(&self) -> Result<(), Error> {
        let Ok(call) = self.call(UNKNOWN, json!({}), "", Replies::default()) else { return Ok(()) };
        match self.send_invocation(&call, Credentials::Valid).await {
            Ok(response) => self.expect_authorized(response.status, "an invocation"),
            Err(_) => Ok(()),
        }
    }

    fn expect_authorized(&self, status: u16, what: &str) -> Result<(), Error> {
        if !matches!(status, 401 | 403) {
            return Ok(());
        }
        let advice = match self.bearer {
            Some(_) => "the token of --bearer (or RAP_TOOL_BEARER) is not the one that it expects",
            None => "if it needs a bearer token, pass it with --bearer or RAP_TOOL_BEARER",
        };
        Err(Error::Unauthorized(format!("{} answered {status} to {what}; {advice}", self.displayed_base)))
    }

    /// Name of the server and of the operations, for the head of a report.
    pub(super) fn describe(&self) -> String {
        let mut text = self.displayed_base.clone();
        if let Some(toolset) = &self.toolset {
            text += &format!(" ({})", toolset.name);
        }
        let operation = self.operation.as_ref().ok();
        let flags = [
            ("setup-operation", self.setup.as_ref()),
            ("operation", operation),
            ("slow-operation", self.slow.as_ref()),
            ("subscription", self.subscription.as_ref()),
        ];
        for (flag, operation_call) in flags {
            if let Some(OperationCall { operation, .. }) = operation_call {
                text += &format!(" --{flag} {operation}");
            }
        }
        text
    }

    /// Finds out which notification endpoints the server has: a missing one answers like a path that no server has, also
    /// for a thread and a call that it knows.
    pub(super) async fn find_notification_endpoints(&self) -> ProbeResult {
        let (thread, id) = match self.operation_works.get() {
            Some((thread, id)) => (thread.clone(), id.clone()),
            None => (self.fresh_id("thread"), self.fresh_id("call")),
        };
        let body = Bytes::from(json!({"thread_id": thread, "tool_call_id": id}).to_string());
        let answer = async |path: &str| {
            let response =
                self.post(&self.url(path)?, format!("POST {path}"), body.clone(), Credentials::Valid).await?;
            Ok::<_, Verdict>((response.status, response.body))
        };
        let unknown = answer(UNKNOWN_PATH).await?;
        let mut missing = Vec::new();
        for path in [CLOSE_THREAD_PATH, CANCEL_TOOL_CALL_PATH] {
            let found = answer(path).await?;
            if matches!(found.0, 404 | 405 | 501) && found == unknown {
                missing.push(path);
            }
        }
        self.missing_endpoints.set(missing).ok();
        Ok(())
    }

    /// Not observable if the server does not have this notification endpoint.
    pub(super) fn has_endpoint(&self, path: &str) -> ProbeResult {
        if self.missing_endpoints.get().is_some_and(|missing| missing.contains(&path)) {
            return Err(Verdict::not_observable(format!("the server has no {path}")));
        }
        Ok(())
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

    /// Not observable if the operation sends several results for one call.
    pub(super) fn one_result(&self) -> ProbeResult {
        match self.repeats_results.get() {
            None => Ok(()),
            Some(()) => Err(Verdict::not_observable(
                "a call has several results: see the probe one_result_for_a_call",
            )),
        }
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

    /// Prepares a call of the slow operation.
    pub(super) fn slow_operation(&self) -> Result<Call, Verdict> {
        self.toolset()?;
        let none = "no operation is known to work for a while; name one that works for two seconds or longer with \
                    --slow-operation";
        let slow = self.slow.as_ref().ok_or_else(|| Verdict::not_observable(none))?;
        self.call(&slow.operation, json!(slow.arguments), "", Replies::default())
    }

    /// Calls whose arguments violate a schema.
    pub(super) fn invalid_calls(&self) -> Result<Vec<Call>, Verdict> {
        let mut called: Vec<&OperationCall> = self.operation.iter().collect();
        called.extend(self.named());
        let invalid = selection::invalid_calls(self.toolset()?, &called);
        if invalid.is_empty() {
            return Err(Verdict::not_observable(
                "no operation that was named or is annotated as readOnly has a schema that rejects any arguments",
            ));
        }
        let call =
            |call: OperationCall| self.call(&call.operation, json!(call.arguments), "", Replies::default());
        invalid.into_iter().map(call).collect()
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

    /// Calls the setup operation in a thread, if there is one and this was not done before.
    async fn set_up(&self, thread: &str) -> ProbeResult {
        let Some(setup) = &self.setup else { return Ok(()) };
        if !self.set_up.lock().unwrap_or_else(PoisonError::into_inner).insert(thread.to_owned()) {
            return Ok(());
        }
        let mut call = self.call(&setup.operation, json!(setup.arguments), "", Replies::default())?;
        call.invocation["group_id"] = thread.into();
        self.send_invocation(&call, Credentials::Valid).await?;
        let no_result = |_| Verdict::not_observable("the operation of --setup-operation sent no result");
        call.result(self.timeouts).await.map(|_| ()).map_err(no_result)
    }

    /// Sends an invocation, and repeats it after a 503. Any other answer than 2xx is a failure. In a new thread the setup
    /// operation is called first.
    pub(super) async fn invoke(&self, call: &Call) -> Result<ServerResponse, Verdict> {
        self.set_up(call.invocation["group_id"].as_str().unwrap_or_default()).await?;
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

    /// Sends a notification, and repeats it after a 429. Not observable if that does not help.
    pub(super) async fn notify(&self, path: &str, body: &Value) -> Result<ServerResponse, Verdict> {
        let mut response = self.notify_as(path, body, Credentials::Valid).await?;
        for _ in 0..RETRIES {
            if response.status == 429 {
                tokio::time::sleep(PAUSE).await;
                response = self.notify_as(path, body, Credentials::Valid).await?;
            }
        }
        if response.status == 429 {
            return Err(Verdict::not_observable(
                "the server limits the rate of notifications: it answered 429",
            ));
        }
        Ok(response)
    }

    /// Maximum time of a prompt answer. A request for the toolset shows how fast the connection is at the moment.
    pub(super) async fn prompt(&self) -> Result<Duration, Verdict> {
        Ok(self.timeouts.prompt + self.discover().await?.took * 4)
    }

    /// POSTs to a path below the base URL, once.
    pub(super) async fn notify_as(
        &self,
        path: &str,
        body: &Value,
        credentials: Credentials,
    ) -> Result<ServerResponse, Verdict> {
        self.has_endpoint(path)?;
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
        // The request for the toolset reports that the server cannot be reached.
        _ => Ipv4Addr::LOCALHOST.into(),
    }
}

fn random() -> String {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("bug: the operating system has no random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
