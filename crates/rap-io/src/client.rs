//! An HTTP client for untrusted URLs. It POSTs JSON, fetches documents and reads streams.
//!
//! Invariants:
//! - It connects only to addresses that its rules permit. A name is resolved once per connection, and the connection
//!   goes to the address that was checked.
//! - It follows no redirects and uses no proxy, because both would lead to other hosts.
//! - No error text contains the path, query or user of a URL, because a callback URL is a credential.
//! - A call ends within its total time and keeps a bounded part of the answer. A stream has no total time, but each
//!   wait for the next chunk is bounded. The reader decides how much to keep.

mod connector;
mod error;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, DATE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rap_protocol::UrlRules;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use tokio::time::{Instant, timeout_at};
use url::{Position, Url};

use connector::{Connector, Lookup, system_lookup};
pub use error::Error;

/// Time that an idle connection is kept. Shorter than usual server timeouts, so that servers rarely close a
/// connection just when a request is sent.
const IDLE_TIME: Duration = Duration::from_secs(20);
/// Time for which the root certificates of the system that one client has read are used by others, too.
const ROOTS_SHARED_FOR: Duration = Duration::from_secs(60);
/// Upper bound for `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Headers of model servers: `Retry-After` in milliseconds, and whether the request should be repeated.
const RETRY_AFTER_MS: &str = "retry-after-ms";
const SHOULD_RETRY: &str = "x-should-retry";

/// `User-Agent` of requests to URLs that somebody else named: a runtime's requests to tool servers, and a tool server's
/// callbacks. An API without tokens refuses it, so that nobody can use these requests to operate the API.
const OUTGOING_AGENT: &str = concat!("rap-outgoing/", env!("CARGO_PKG_VERSION"));

/// Returns true if a request was sent by [`Client::outgoing`] of any version.
pub fn is_outgoing(headers: &HeaderMap) -> bool {
    let product = OUTGOING_AGENT.split('/').next().unwrap_or(OUTGOING_AGENT).as_bytes();
    headers.get_all(USER_AGENT).iter().any(|agent| agent.as_bytes().starts_with(product))
}

/// An HTTP client. Clones are cheap and share connections.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpsConnector<Connector>, Full<Bytes>>,
    rules: Arc<UrlRules>,
    limits: ClientLimits,
    trust: Trust,
    agent: Option<HeaderValue>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Trust {
    NativeRoots,
    None,
}

/// Limits of a client.
#[derive(Debug, Clone, Copy)]
pub struct ClientLimits {
    /// Time to establish the TCP connection, for all addresses of a name together.
    pub connect: Duration,
    /// Time for a whole call: resolving, connecting, sending and reading the answer. Does not apply to streams.
    pub total: Duration,
    /// Time until the status of a stream arrives. A busy model may take long.
    pub stream_head: Duration,
    /// Time until the next chunk of a stream.
    pub stream_idle: Duration,
    /// Maximum number of bytes to read of a body. If the body is longer, the connection is closed.
    pub drain_bytes: usize,
    /// Maximum number of idle connections per host.
    pub idle_per_host: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        ClientLimits {
            connect: Duration::from_secs(5),
            total: Duration::from_secs(30),
            stream_head: Duration::from_secs(300),
            stream_idle: Duration::from_secs(120),
            drain_bytes: 16 * 1024,
            idle_per_host: 64,
        }
    }
}

/// The answer of a server, with a possibly truncated body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status. Redirects are not followed, so it may be a 3xx.
    pub status: u16,
    /// Value of `Retry-After`, at most one day. `None` if it is missing or malformed.
    pub retry_after: Option<Duration>,
    /// The first `drain_bytes` of the body, for error texts.
    pub body: Bytes,
}

/// The answer of a server, with its whole body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// HTTP status. Redirects are not followed, so it may be a 3xx.
    pub status: u16,
    /// Value of `Retry-After`, at most one day. `None` if it is missing or malformed.
    pub retry_after: Option<Duration>,
    /// The whole body.
    pub body: Bytes,
}

/// The answer of a server with its headers, and with a possibly truncated body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status. Redirects are not followed, so it may be a 3xx.
    pub status: u16,
    /// Headers of the answer.
    pub headers: HeaderMap,
    /// The body, up to the limit of the request.
    pub body: Bytes,
    /// True if the body is longer, was cut off, or did not end in time.
    pub truncated: bool,
}

/// An answer whose body is read as a stream. Dropping it closes the connection, unless it was read to its end.
#[derive(Debug)]
pub struct Streaming {
    /// HTTP status. Redirects are not followed, so it may be a 3xx.
    pub status: u16,
    /// Value of `Retry-After`, at most one day. `None` if it is missing or malformed.
    pub retry_after: Option<Duration>,
    /// Value of `x-should-retry`. `None` if it is missing or malformed.
    pub should_retry: Option<bool>,
    /// The server's `Content-Type` with its parameters. `None` if it is missing or not ASCII text.
    pub content_type: Option<String>,
    headers: HeaderMap,
    body: Incoming,
    idle: Duration,
    /// Timeout of the current wait for a chunk.
    chunk_deadline: Option<Instant>,
}

impl Streaming {
    /// Returns the value of a header. `None` if it is missing or not ASCII text.
    pub fn header(&self, name: &HeaderName) -> Option<String> {
        Some(self.headers.get(name)?.to_str().ok()?.to_owned())
    }

    /// Returns the next chunk of the body, or `None` at its end. A truncated body is an error. Cancel safe: the
    /// future can be dropped without losing data, and the timeout of the chunk continues to run.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let chunk_deadline = *self.chunk_deadline.get_or_insert_with(|| Instant::now() + self.idle);
        loop {
            match timeout_at(chunk_deadline, self.body.frame()).await.map_err(|_| Error::TimedOut)? {
                None => return Ok(None),
                Some(Err(error)) => return Err(Error::of_body(&error)),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => {
                        self.chunk_deadline = None;
                        return Ok(Some(data));
                    }
                    _ => {}
                },
            }
        }
    }
}

impl Client {
    /// Creates a client that trusts the root certificates of the system. Reads them now, which blocks. If there are
    /// none, https fails with [`Error::NoCertificates`] and http still works.
    pub fn new(rules: impl Into<UrlRules>, limits: ClientLimits) -> Client {
        Client::with_tls(rules.into(), limits, native_tls(), system_lookup())
    }

    /// Creates a client for URLs that somebody else named. Its `User-Agent` identifies such requests.
    pub fn outgoing(rules: impl Into<UrlRules>, limits: ClientLimits) -> Client {
        let agent = Some(HeaderValue::from_static(OUTGOING_AGENT));
        Client { agent, ..Client::new(rules, limits) }
    }

    /// Like [`Client::outgoing`], with other root certificates or a client certificate.
    #[cfg(feature = "server")]
    pub(crate) fn outgoing_with_tls(rules: UrlRules, limits: ClientLimits, tls: ClientConfig) -> Client {
        let agent = Some(HeaderValue::from_static(OUTGOING_AGENT));
        Client { agent, ..Client::with_tls(rules, limits, Some(tls), system_lookup()) }
    }

    fn with_tls(rules: UrlRules, limits: ClientLimits, tls: Option<ClientConfig>, lookup: Lookup) -> Client {
        let trust = if tls.is_some() { Trust::NativeRoots } else { Trust::None };
        let tls = tls.unwrap_or_else(|| {
            tls_builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth()
        });
        let rules = Arc::new(rules);
        let tcp = Connector::new(Arc::clone(&rules), lookup, limits.connect);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIME)
            .pool_max_idle_per_host(limits.idle_per_host)
            .build(connector);
        Client { http, rules, limits, trust, agent: None }
    }

    /// POSTs `body` as JSON. Any status is a success, even a redirect.
    ///
    /// A header in `headers` replaces an earlier one of the same name and the client's own. User and password in the
    /// URL are sent as a Basic `Authorization` header. Once the status has arrived, the call succeeds, even if the
    /// body is too long, is truncated or takes too long.
    pub async fn post_json(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Reply, Error> {
        let deadline = Instant::now() + self.limits.total;
        let (head, body) = self.send(Method::POST, url, headers, body, deadline).await?.into_parts();
        Ok(Reply {
            status: head.status.as_u16(),
            retry_after: retry_after(&head.headers),
            body: drain(body, self.limits.drain_bytes, deadline).await,
        })
    }

    /// GETs a document. Any status is a success. A body of more than `max_bytes` is [`Error::TooLong`]. A body that
    /// is truncated or does not end in time is an error.
    pub async fn get(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        max_bytes: usize,
    ) -> Result<Fetched, Error> {
        self.fetch(Method::GET, url, headers, max_bytes).await
    }

    /// Sends a request of any method, and keeps at most `max_bytes` of the body of its answer. Any status is a success.
    pub async fn request(
        &self,
        method: Method,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
        max_bytes: usize,
    ) -> Result<Answer, Error> {
        let deadline = Instant::now() + self.limits.total;
        let (head, mut body) = self.send(method, url, headers, body, deadline).await?.into_parts();
        let (mut read, mut truncated) = (BytesMut::new(), false);
        loop {
            let frame = match timeout_at(deadline, body.frame()).await {
                Ok(None) => break,
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(_))) | Err(_) => {
                    truncated = true;
                    break;
                }
            };
            let Some(data) = frame.data_ref() else { continue };
            let room = max_bytes - read.len();
            read.extend_from_slice(&data[..data.len().min(room)]);
            if data.len() > room {
                truncated = true;
                break;
            }
        }
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body: read.freeze(), truncated })
    }

    /// Sends DELETE. The answer is read as by [`Client::get`].
    pub async fn delete(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        max_bytes: usize,
    ) -> Result<Fetched, Error> {
        self.fetch(Method::DELETE, url, headers, max_bytes).await
    }

    async fn fetch(
        &self,
        method: Method,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        max_bytes: usize,
    ) -> Result<Fetched, Error> {
        let deadline = Instant::now() + self.limits.total;
        let response = self.send(method, url, headers, Bytes::new(), deadline).await?;
        let (head, body) = response.into_parts();
        Ok(Fetched {
            status: head.status.as_u16(),
            retry_after: retry_after(&head.headers),
            body: read_whole(body, max_bytes, deadline).await?,
        })
    }

    /// POSTs `body` as JSON and returns when the status has arrived. Any status is a success.
    pub async fn post_stream(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Streaming, Error> {
        self.stream(Method::POST, url, headers, body).await
    }

    /// GETs a document as a stream. Any status is a success.
    pub async fn get_stream(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
    ) -> Result<Streaming, Error> {
        self.stream(Method::GET, url, headers, Bytes::new()).await
    }

    async fn stream(
        &self,
        method: Method,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Streaming, Error> {
        let deadline = Instant::now() + self.limits.stream_head;
        let (head, body) = self.send(method, url, headers, body, deadline).await?.into_parts();
        Ok(Streaming {
            status: head.status.as_u16(),
            retry_after: retry_after(&head.headers),
            should_retry: should_retry(&head.headers),
            content_type: head
                .headers
                .get(CONTENT_TYPE)
                .and_then(|kind| Some(kind.to_str().ok()?.to_owned())),
            headers: head.headers,
            body,
            idle: self.limits.stream_idle,
            chunk_deadline: None,
        })
    }

    async fn send(
        &self,
        method: Method,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
        deadline: Instant,
    ) -> Result<Response<Incoming>, Error> {
        self.rules.check(url)?;
        if url.scheme() == "https" && self.trust == Trust::None {
            return Err(Error::NoCertificates);
        }
        let mut request = request(method, url, headers, body)?;
        if let Some(agent) = &self.agent {
            request.headers_mut().insert(USER_AGENT, agent.clone());
        }
        let answer = timeout_at(deadline, self.http.request(request)).await.map_err(|_| Error::TimedOut)?;
        answer.map_err(|error| Error::of(&error))
    }
}

// Argued: TR-24 both sides use https for every https URL; server.tls or a reverse proxy serves it
pub(crate) fn tls_builder() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("bug: ring supports the default TLS versions")
}

/// Returns the settings with the root certificates of the system. Clients that are created at about the same time share
/// them, since they take more memory and time than the rest of a client.
fn native_tls() -> Option<ClientConfig> {
    static SHARED: Mutex<Option<(std::time::Instant, ClientConfig)>> = Mutex::new(None);
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((read_at, tls)) = shared.as_ref()
        && read_at.elapsed() < ROOTS_SHARED_FOR
    {
        return Some(tls.clone());
    }
    match tls_builder().with_native_roots() {
        Ok(builder) => {
            let tls = builder.with_no_client_auth();
            *shared = Some((std::time::Instant::now(), tls.clone()));
            Some(tls)
        }
        Err(error) => {
            tracing::warn!(%error, "https requests will fail: no root certificates were found");
            None
        }
    }
}

/// Returns the root certificates of the system. Without any, every https request fails with an error of TLS.
#[cfg(feature = "server")]
pub(crate) fn native_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn request(
    method: Method,
    url: &Url,
    headers: &[(HeaderName, HeaderValue)],
    body: Bytes,
) -> Result<Request<Full<Bytes>>, Error> {
    let scheme = &url[..Position::BeforeUsername];
    let rest = &url[Position::BeforeHost..Position::AfterQuery];
    let kind = if method == Method::GET { ACCEPT } else { CONTENT_TYPE };
    let request = Request::builder().method(method).uri(format!("{scheme}{rest}"));
    let mut request = request.body(Full::new(body)).map_err(|_| Error::BadUrl)?;
    let all = request.headers_mut();
    all.insert(kind, HeaderValue::from_static("application/json"));
    if let Some(basic) = basic_auth(url) {
        all.insert(AUTHORIZATION, basic);
    }
    for (name, value) in headers {
        all.insert(name, value.clone());
    }
    Ok(request)
}

fn basic_auth(url: &Url) -> Option<HeaderValue> {
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    Some(basic(&percent_decoded(url.username()), &percent_decoded(url.password().unwrap_or(""))))
}

/// Returns the `Authorization` header of a user and a password.
pub(crate) fn basic(user: &[u8], password: &[u8]) -> HeaderValue {
    let text = format!("Basic {}", BASE64_STANDARD.encode([user, b":", password].concat()));
    let mut value = HeaderValue::try_from(text).expect("bug: base64 is a valid header value");
    value.set_sensitive(true);
    value
}

/// Decodes percent-encoding. A `%` without two hexadecimal digits is kept.
pub(crate) fn percent_decoded(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let (byte, next) = match escaped(rest) {
            Some(byte) => (byte, &rest[3..]),
            None => (*first, after),
        };
        bytes.push(byte);
        rest = next;
    }
    bytes
}

fn escaped(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    Some((digit(*high)? * 16 + digit(*low)?) as u8)
}

/// Time that a server asks to wait: `retry-after-ms`, or `Retry-After` as a number of seconds or as a date. A date counts
/// from the server's own `Date`, if it sends one, because clocks differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| Some(headers.get(name)?.to_str().ok()?.trim());
    let number = |name: &str| {
        let text = text(name)?;
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        text.parse::<f64>().ok().filter(|_| is_number)
    };
    let milliseconds = number(RETRY_AFTER_MS).map(|milliseconds| milliseconds / 1000.0);
    if let Some(seconds) = milliseconds.or_else(|| number(RETRY_AFTER.as_str())) {
        // A number that is too large for a duration is longer than a day.
        let pause = Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER_MAX);
        return Some(pause.min(RETRY_AFTER_MAX));
    }
    let date = |name: &str| httpdate::parse_http_date(text(name)?).ok();
    let until = date(RETRY_AFTER.as_str())?;
    let now = date(DATE.as_str()).unwrap_or_else(SystemTime::now);
    Some(until.duration_since(now).unwrap_or_default().min(RETRY_AFTER_MAX))
}

/// Value of `x-should-retry`.
fn should_retry(headers: &HeaderMap) -> Option<bool> {
    headers.get(SHOULD_RETRY)?.to_str().ok()?.trim().to_ascii_lowercase().parse().ok()
}

/// Reads up to `limit` bytes. If the body was read to its end, the connection goes back to the pool; otherwise it is
/// closed.
async fn drain(mut body: Incoming, limit: usize, deadline: Instant) -> Bytes {
    let mut read = BytesMut::new();
    while let Ok(Some(Ok(frame))) = timeout_at(deadline, body.frame()).await {
        let Some(data) = frame.data_ref() else { continue };
        let room = limit - read.len();
        read.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            break;
        }
    }
    read.freeze()
}

/// Reads a whole body of at most `limit` bytes.
async fn read_whole(mut body: Incoming, limit: usize, deadline: Instant) -> Result<Bytes, Error> {
    let mut read = BytesMut::new();
    while let Some(frame) = timeout_at(deadline, body.frame()).await.map_err(|_| Error::TimedOut)? {
        let frame = frame.map_err(|error| Error::of_body(&error))?;
        let Some(data) = frame.data_ref() else { continue };
        if data.len() > limit - read.len() {
            return Err(Error::TooLong { limit });
        }
        read.extend_from_slice(data);
    }
    Ok(read.freeze())
}
