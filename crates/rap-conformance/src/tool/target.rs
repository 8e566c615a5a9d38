//! The tool server under test, as the probes see it.

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
use super::{Error, Options, Order, Patience, choice};
use crate::report::{Exchange, Shown, Verdict};

/// How much of an answer is read.
const ANSWER_BYTES: usize = 64 * 1024;
/// How long to leave a server alone that is sent too much, and how often.
const PAUSE: Duration = Duration::from_secs(1);
const SECOND_ATTEMPTS: usize = 3;
/// How many exchanges a failure shows.
const SHOWN: usize = 6;

pub(super) struct Target {
    base: String,
    /// The base without user, password and query.
    shown: String,
    client: Client,
    bearer: Option<Secret>,
    listener: Listener,
    pub(super) patience: Patience,
    /// What the user named.
    named: Option<Order>,
    subscription: Option<Order>,
    toolset: Option<Toolset>,
    /// What is called, or why nothing is.
    operation: Result<Order, String>,
    /// Nothing answers there at all.
    is_silent: bool,
    /// Set once a result of the operation has come.
    pub(super) works: OnceLock<()>,
    /// In all ids, so that no run meets what another left behind.
    run: String,
    made: AtomicUsize,
}

/// Whom a request says that it is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Credentials {
    Ours,
    Missing,
    Wrong,
}

/// What a server answered.
#[derive(Debug, Clone)]
pub(super) struct Said {
    pub(super) status: u16,
    pub(super) body: Bytes,
    pub(super) took: Duration,
    pub(super) exchange: Exchange,
}

/// One call, with where its callbacks arrive.
pub(super) struct Call {
    pub(super) thread: String,
    pub(super) id: String,
    pub(super) invocation: Value,
    pub(super) inbox: Inbox,
    acknowledged: OnceLock<Exchange>,
}

impl Target {
    pub(super) async fn new(options: Options) -> Result<Target, Error> {
        let Options { url, bearer, operation, subscription, listen, patience } = options;
        if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
            return Err(Error::Url("the URL of a tool server begins with http:// or https://".into()));
        }
        if bearer.as_ref().is_some_and(|bearer| authorization(bearer.expose()).is_none()) {
            return Err(Error::Url("the bearer token has characters that no header can hold".into()));
        }
        let seen = our_address(&url, patience.answer).await;
        let address = listen.unwrap_or(SocketAddr::new(seen, 0));
        let listener =
            Listener::start(address, seen).await.map_err(|source| Error::Listen { address, source })?;
        let client_limits =
            ClientLimits { total: patience.answer, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        let seen = &url[..Position::BeforeUsername];
        Ok(Target {
            shown: format!("{seen}{}", &url[Position::BeforeHost..Position::AfterPath])
                .trim_end_matches('/')
                .into(),
            base: url.as_str().trim_end_matches('/').to_owned(),
            client: Client::new(UrlPolicy::Local, client_limits),
            bearer,
            listener,
            patience,
            named: operation,
            subscription,
            toolset: None,
            operation: Err("no toolset is known".into()),
            is_silent: false,
            works: OnceLock::new(),
            run: random(),
            made: AtomicUsize::new(0),
        })
    }

    /// Reads the toolset, once there is a valid one, and decides what to call.
    pub(super) async fn learn(&mut self) -> Result<(), Error> {
        if self.toolset.is_some() {
            return Ok(());
        }
        let discovered = self.discover().await;
        self.is_silent = discovered.is_err();
        let Ok(said) = discovered else { return Ok(()) };
        let Ok(toolset) = parse_toolset(&said.body) else { return Ok(()) };
        for order in self.named.iter().chain(&self.subscription) {
            choice::check(&toolset, order).map_err(Error::Order)?;
        }
        let picked = || choice::operation(&toolset);
        let none = "no operation does without arguments and is safe to call; name one with --operation";
        self.operation = self.named.clone().or_else(picked).ok_or(none.into());
        self.toolset = Some(toolset);
        Ok(())
    }

    /// The server and what was called, for the head of a report.
    pub(super) fn describe(&self) -> String {
        let mut text = self.shown.clone();
        if let Some(toolset) = &self.toolset {
            text += &format!(" ({})", toolset.name);
        }
        if let Ok(order) = &self.operation {
            text += &format!(" --operation {}", order.operation);
        }
        if let Some(order) = &self.subscription {
            text += &format!(" --subscription {}", order.operation);
        }
        text
    }

    pub(super) async fn discover(&self) -> Result<Said, Verdict> {
        let url = self.url(DISCOVERY_PATH)?;
        let asked = Shown::head(format!("GET {DISCOVERY_PATH}"));
        let start = Instant::now();
        match self.client.get(&url, &self.headers(Credentials::Ours), limits::BODY_BYTES).await {
            Ok(fetched) => Ok(self.said(asked, fetched.status, fetched.body, start.elapsed())),
            Err(error) => Err(silence(asked, &error)),
        }
    }

    pub(super) fn toolset(&self) -> Result<&Toolset, Verdict> {
        let hidden = || Verdict::not_observable("there is no valid toolset: see toolset_is_valid");
        self.toolset.as_ref().ok_or_else(hidden)
    }

    pub(super) fn has_bearer(&self) -> bool {
        self.bearer.is_some()
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// What is called where a probe needs a result.
    pub(super) fn order(&self) -> Result<&Order, Verdict> {
        self.toolset()?;
        self.operation.as_ref().map_err(|why| Verdict::not_observable(why.as_str()))
    }

    /// A call of the operation.
    pub(super) fn operation(&self) -> Result<Call, Verdict> {
        self.operation_answering(&[])
    }

    /// A call of the operation whose results are answered so, and with 200 after that.
    pub(super) fn operation_answering(&self, replies: &[Reply]) -> Result<Call, Verdict> {
        let order = self.order()?;
        if self.works.get().is_none() {
            return Err(Verdict::not_observable("the operation brought no result: see result_is_delivered"));
        }
        let replies = Replies { results: replies.iter().copied().collect(), ..Replies::default() };
        self.call(&order.operation, Value::Object(order.arguments.clone()), "", replies)
    }

    /// A call of the subscription whose events are answered so, and with 200 after that.
    pub(super) fn subscription(&self, replies: &[Reply]) -> Result<Call, Verdict> {
        self.toolset()?;
        let none = "no subscription was named; name one that sends several events soon with --subscription";
        let order = self.subscription.as_ref().ok_or_else(|| Verdict::not_observable(none))?;
        let replies = Replies { events: replies.iter().copied().collect(), ..Replies::default() };
        self.call(&order.operation, Value::Object(order.arguments.clone()), "", replies)
    }

    /// A call of anything. `rest` stands at the end of its callback URL.
    pub(super) fn call(
        &self,
        operation: &str,
        arguments: Value,
        rest: &str,
        replies: Replies,
    ) -> Result<Call, Verdict> {
        let token = random();
        let inbox = self.listener.inbox(&token, rest, replies);
        let (thread, id) = (self.fresh("thread"), self.fresh("call"));
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

    /// An id that was never used.
    pub(super) fn fresh(&self, word: &str) -> String {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        format!("{word}_{}_{number}", self.run)
    }

    /// Sends an invocation, again if the server has no room for it; anything but 2xx is a failure.
    pub(super) async fn invoke(&self, call: &Call) -> Result<Said, Verdict> {
        let mut said = self.send_invocation(call, Credentials::Ours).await?;
        for _ in 0..SECOND_ATTEMPTS {
            if said.status == 503 {
                tokio::time::sleep(PAUSE).await;
                said = self.send_invocation(call, Credentials::Ours).await?;
            }
        }
        if (200..300).contains(&said.status) {
            return Ok(said);
        }
        Err(Verdict::fail(format!("an invocation was answered {}", said.status), vec![said.exchange]))
    }

    /// Sends an invocation; any answer will do.
    pub(super) async fn send_invocation(
        &self,
        call: &Call,
        credentials: Credentials,
    ) -> Result<Said, Verdict> {
        let body = serde_json::to_vec(&call.invocation).expect("bug: an invocation is JSON");
        let said = self.post_to_endpoint(body.into(), credentials).await?;
        // A call that is sent twice shows its first acknowledgement.
        call.acknowledged.set(said.exchange.clone()).ok();
        Ok(said)
    }

    pub(super) async fn post_to_endpoint(
        &self,
        body: Bytes,
        credentials: Credentials,
    ) -> Result<Said, Verdict> {
        let url = self.toolset()?.endpoint.to_url();
        let head = format!("POST {}", url.path());
        self.post(&url, head, body, credentials).await
    }

    /// Sends a notification, again if there were too many of them.
    pub(super) async fn notify(&self, path: &str, body: &Value) -> Result<Said, Verdict> {
        let mut said = self.notify_as(path, body, Credentials::Ours).await?;
        for _ in 0..SECOND_ATTEMPTS {
            if said.status == 429 {
                tokio::time::sleep(PAUSE).await;
                said = self.notify_as(path, body, Credentials::Ours).await?;
            }
        }
        Ok(said)
    }

    /// POSTs to a path below the base URL, once.
    pub(super) async fn notify_as(
        &self,
        path: &str,
        body: &Value,
        credentials: Credentials,
    ) -> Result<Said, Verdict> {
        let body = serde_json::to_vec(body).expect("bug: a notification is JSON");
        self.post(&self.url(path)?, format!("POST {path}"), body.into(), credentials).await
    }

    async fn post(
        &self,
        url: &Url,
        head: String,
        body: Bytes,
        credentials: Credentials,
    ) -> Result<Said, Verdict> {
        if self.is_silent {
            return Err(Verdict::not_observable("the server does not answer: see toolset_is_served"));
        }
        let asked = Shown::new(head, &body);
        let start = Instant::now();
        match self.client.post_json(url, &self.headers(credentials), body).await {
            Ok(reply) => Ok(self.said(asked, reply.status, reply.body, start.elapsed())),
            Err(error) => Err(silence(asked, &error)),
        }
    }

    fn url(&self, path: &str) -> Result<Url, Verdict> {
        Url::parse(&format!("{}{path}", self.base))
            .map_err(|error| Verdict::fail(error.to_string(), Vec::new()))
    }

    fn headers(&self, credentials: Credentials) -> Vec<(HeaderName, HeaderValue)> {
        let token = match credentials {
            Credentials::Ours => self.bearer.as_ref().map(Secret::expose),
            Credentials::Missing => None,
            Credentials::Wrong => Some("not-the-token"),
        };
        let header = token.and_then(authorization);
        header.into_iter().map(|value| (AUTHORIZATION, value)).collect()
    }

    fn said(&self, asked: Shown, status: u16, body: Bytes, took: Duration) -> Said {
        let answered = Shown::new(format!("{status} after {} ms", took.as_millis()), &body);
        let mut exchange = Exchange::new(asked, answered);
        if let Some(bearer) = &self.bearer {
            exchange = exchange.hide(bearer);
        }
        Said { status, body, took, exchange }
    }
}

impl Call {
    /// The first result.
    pub(super) async fn result(&self, patience: Patience) -> Result<Delivery, Verdict> {
        let first = |deliveries: &[Delivery]| results(deliveries).next().cloned();
        let result = self.inbox.until(patience.result, first).await;
        let seconds = patience.result.as_secs_f64();
        result.ok_or_else(|| self.fail(format!("no tool_result came within {seconds} s")))
    }

    /// The first event.
    pub(super) async fn event(&self, patience: Patience) -> Result<Delivery, Verdict> {
        let first = |deliveries: &[Delivery]| events(deliveries).next().cloned();
        let event = self.inbox.until(patience.result, first).await;
        let seconds = patience.result.as_secs_f64();
        event.ok_or_else(|| Verdict::not_observable(format!("no event came within {seconds} s")))
    }

    /// A failure, with all that was said about this call.
    pub(super) fn fail(&self, what: impl Into<String>) -> Verdict {
        Verdict::fail(what, self.story())
    }

    pub(super) fn story(&self) -> Vec<Exchange> {
        let deliveries = self.inbox.deliveries();
        let said = deliveries.iter().map(Delivery::exchange);
        self.acknowledged.get().cloned().into_iter().chain(said).take(SHOWN).collect()
    }
}

pub(super) fn results(deliveries: &[Delivery]) -> impl Iterator<Item = &Delivery> {
    deliveries.iter().filter(|delivery| delivery.kind() == "tool_result")
}

pub(super) fn events(deliveries: &[Delivery]) -> impl Iterator<Item = &Delivery> {
    deliveries.iter().filter(|delivery| delivery.kind() == "subscription_event")
}

fn silence(asked: Shown, error: &rap_io::client::Error) -> Verdict {
    Verdict::fail("it did not answer", vec![Exchange::new(asked, Shown::head(format!("no answer: {error}")))])
}

fn authorization(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The address of ours that the server sees when we talk to it.
async fn our_address(url: &Url, within: Duration) -> IpAddr {
    let host = url.host_str().unwrap_or("").trim_matches(['[', ']']);
    let port = url.port_or_known_default().unwrap_or(80);
    match timeout(within, TcpStream::connect((host, port))).await {
        Ok(Ok(stream)) => stream.local_addr().map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip()),
        // The first probe will find out and say so.
        _ => Ipv4Addr::LOCALHOST.into(),
    }
}

fn random() -> String {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("bug: the system has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
