//! Async client of a runtime.
//!
//! A request that the runtime refused and a request that did not reach it are different errors: the first carries the
//! runtime's message, the second can be retried. No error and no `Debug` output contains the token. Every request has a
//! time limit, and every answer a maximum size.
//!
//! ```
//! use rap_api::client::{Client, IdempotencyKey, Update};
//! use rap_api::{CreateThread, ThreadEvent, Item, SendMessage, Status};
//!
//! /// Asks an agent, and returns all of its answers.
//! async fn ask(client: &Client, text: &str) -> Result<Vec<String>, rap_api::client::Error> {
//!     let thread = client.create_thread(&CreateThread::default()).await?;
//!     client.send_message(&thread.id, &SendMessage::new(text), &IdempotencyKey::random()).await?;
//!     let mut answers = Vec::new();
//!     let mut follower = client.follow(&thread.id, 0);
//!     loop {
//!         match follower.next().await? {
//!             Update::Event(ThreadEvent::Entry(entry)) => match entry.item {
//!                 Item::Assistant { text, .. } => answers.push(text),
//!                 _ => {}
//!             },
//!             Update::Event(ThreadEvent::Status(update)) if update.status == Status::Idle => return Ok(answers),
//!             _ => {}
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let runtime = fake_runtime::start()?;
//! let client = Client::new(&runtime.url)?.with_token("s3cr3t")?;
//! assert_eq!(ask(&client, "Good morning").await?, ["Hello!"]);
//! # Ok(())
//! # }
//! # mod fake_runtime {
//! #     use std::io::{BufRead, BufReader, Read, Write};
//! #     use std::net::{TcpListener, TcpStream};
//! #     pub struct Fake { pub url: String }
//! #     pub fn start() -> std::io::Result<Fake> {
//! #         let listener = TcpListener::bind("127.0.0.1:0")?;
//! #         let url = format!("http://{}", listener.local_addr()?);
//! #         std::thread::spawn(move || listener.incoming().take(3).try_for_each(|stream| answer(stream?)));
//! #         Ok(Fake { url })
//! #     }
//! #     fn answer(mut stream: TcpStream) -> std::io::Result<()> {
//! #         let mut reader = BufReader::new(stream.try_clone()?);
//! #         let mut head = Vec::new();
//! #         while head.last().is_none_or(|line: &String| line != "\r\n") {
//! #             let mut line = String::new();
//! #             reader.read_line(&mut line)?;
//! #             head.push(line);
//! #         }
//! #         let length = head.iter().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
//! #         reader.read_exact(&mut vec![0; length.unwrap_or(0)])?;
//! #         let at = "2026-11-16T09:30:00.000Z";
//! #         let body = match head[0].as_str() {
//! #             line if line.contains("/events") => format!(
//! #                 "id: 1\nevent: entry\ndata: {{\"seq\": 1, \"at\": \"{at}\", \"kind\": \"assistant\", \"text\": \"Hello!\", \"calls\": []}}\n\n\
//! #                  event: status\ndata: {{\"status\": \"idle\", \"turn\": 1, \"held\": 0, \"children\": 0}}\n\n"),
//! #             line if line.contains("/messages") => "{\"turn\": 1}".to_owned(),
//! #             _ => format!("{{\"id\": \"t\", \"root\": \"t\", \"agent\": \"default\", \"status\": \"idle\", \"waiting_on\": [], \
//! #                 \"subscriptions\": [], \"children\": 0, \"held\": 0, \"turn\": 0, \
//! #                 \"usage\": {{\"input\": 0, \"output\": 0, \"cached\": 0}}, \"created_at\": \"{at}\", \"updated_at\": \"{at}\"}}"),
//! #         };
//! #         write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}")
//! #     }
//! # }
//! ```

mod backoff;
mod follow;

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderName, HeaderValue};
use rap_io::client::{self as http_client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use url::Url;

pub use backoff::Backoff;
use follow::Connection;
pub use follow::{Follower, RawEvent, Skipped, StreamEvent, Update};

use crate::{
    Answer, CreateThread, CreateToken, CreatedToken, Delivery, Done, Entries, ErrorBody, Fork, Listing,
    Migrate, Move, Prune, Pruned, RuntimeEvent, SendMessage, SessionUsage, Thread, Tools, Turn, Views,
};

/// URL of a runtime that listens on its default address.
pub const DEFAULT_URL: &str = "http://127.0.0.1:7420";

/// Maximum size of an answer, in bytes.
const ANSWER_BYTES: usize = 64 * MIB;
const MIB: usize = 1024 * 1024;
/// Maximum number of bytes that are read of an error answer to a stream request.
const REFUSAL_BYTES: usize = 64 * 1024;
/// Maximum number of rows in a page of a listing.
const PAGE: usize = 1000;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// A stream that is silent for this long is broken: the runtime sends a keep-alive every 15 seconds.
const SILENCE: Duration = Duration::from_secs(60);

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL cannot be that of a runtime.
    #[error("{url} is not the URL of a runtime: {why}; example: {DEFAULT_URL}")]
    BadUrl {
        /// URL as it was given.
        url: String,
        /// Reason.
        why: String,
    },
    /// The token is not a valid header value.
    #[error("the token must consist of visible ASCII characters")]
    BadToken,
    /// The connection failed; nothing was sent.
    #[error("no runtime answers at {url}: {why}")]
    Unreachable {
        /// URL of the runtime.
        url: String,
        /// Reason.
        why: String,
    },
    /// There was no response. The request may have arrived.
    #[error("no answer from {url}: {why}")]
    NoAnswer {
        /// URL of the runtime.
        url: String,
        /// Reason.
        why: String,
    },
    /// The response is too large.
    #[error("the response of {url} is larger than {} MiB; request fewer rows", ANSWER_BYTES / MIB)]
    TooLong {
        /// URL of the runtime.
        url: String,
    },
    /// The runtime requires a token, or another one.
    #[error("{}", unauthorized(url, *given))]
    Unauthorized {
        /// URL of the runtime.
        url: String,
        /// True if the request carried a token.
        given: bool,
    },
    /// The runtime answered with an error.
    #[error("{message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Stable error code.
        code: String,
        /// Text for people.
        message: String,
    },
    /// The answer is not one that this version understands.
    #[error("{url} did not answer like a runtime: {why}")]
    NotARuntime {
        /// URL of the runtime.
        url: String,
        /// Reason.
        why: String,
    },
}

fn unauthorized(url: &str, given: bool) -> String {
    if given { format!("{url} does not accept the token") } else { format!("{url} requires a token") }
}

impl Error {
    /// Returns true if the request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Unreachable { .. } | Error::NoAnswer { .. } => true,
            Error::Refused { status, .. } => matches!(status, 429 | 503),
            _ => false,
        }
    }

    /// Returns the error code, if the runtime answered with an error.
    pub fn code(&self) -> Option<&str> {
        match self {
            Error::Refused { code, .. } => Some(code),
            _ => None,
        }
    }
}

/// Key that makes a repeat of a request harmless.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey(HeaderValue);

impl IdempotencyKey {
    /// Returns a new random key.
    pub fn random() -> IdempotencyKey {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("bug: the system has no source of random bytes");
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        IdempotencyKey(HeaderValue::try_from(text).expect("bug: hexadecimal digits are a valid header value"))
    }
}

/// Client of one runtime. Clones are cheap and share connections.
#[derive(Clone)]
pub struct Client {
    http: http_client::Client,
    base: Url,
    token: Option<HeaderValue>,
}

impl Client {
    /// Creates a client for the runtime at a base URL.
    pub fn new(url: &str) -> Result<Client, Error> {
        let bad = |why: String| Error::BadUrl { url: url.to_owned(), why };
        let base = Url::parse(url).map_err(|error| bad(error.to_string()))?;
        UrlPolicy::Loopback.check(&base).map_err(|error| bad(error.to_string()))?;
        let limits = ClientLimits {
            stream_head: Duration::from_secs(30),
            stream_idle: SILENCE,
            drain_bytes: ANSWER_BYTES,
            ..ClientLimits::default()
        };
        Ok(Client { http: http_client::Client::new(UrlPolicy::Loopback, limits), base, token: None })
    }

    /// Sends a bearer token with every request.
    pub fn with_token(self, token: &str) -> Result<Client, Error> {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| Error::BadToken)?;
        value.set_sensitive(true);
        Ok(Client { token: Some(value), ..self })
    }

    /// URL of the runtime, without a trailing slash.
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Creates a thread.
    pub async fn create_thread(&self, new: &CreateThread) -> Result<Thread, Error> {
        self.post(&["v1", "threads"], new, Some(&IdempotencyKey::random())).await
    }

    /// Returns a thread.
    pub async fn thread(&self, id: &str) -> Result<Thread, Error> {
        self.typed(self.get_json(&["v1", "threads", id], &[]).await?)
    }

    /// Returns the tokens and costs of a thread and of its session.
    pub async fn usage(&self, id: &str) -> Result<SessionUsage, Error> {
        self.typed(self.get_json(&["v1", "threads", id, "usage"], &[]).await?)
    }

    /// Sends a message to a thread. A repeat with the same key has no effect.
    pub async fn send_message(
        &self,
        id: &str,
        message: &SendMessage,
        key: &IdempotencyKey,
    ) -> Result<Turn, Error> {
        self.post(&["v1", "threads", id, "messages"], message, Some(key)).await
    }

    /// Returns at most `limit` entries of a thread that follow the entry `after`. The first entry follows 0. A page may
    /// have fewer entries, if they are large.
    pub async fn history(&self, id: &str, after: u64, limit: usize) -> Result<Entries, Error> {
        let (after, limit) = (after.to_string(), limit.to_string());
        let path = ["v1", "threads", id, "history"];
        self.typed(self.get_json(&path, &[("after", &after), ("limit", &limit)]).await?)
    }

    /// Interrupts a thread: cancels its open calls and discards the answer in progress.
    pub async fn interrupt(&self, id: &str) -> Result<Done, Error> {
        self.act(&["v1", "threads", id, "interrupt"]).await
    }

    /// Closes a thread and its descendants.
    pub async fn close(&self, id: &str) -> Result<Done, Error> {
        self.act(&["v1", "threads", id, "close"]).await
    }

    /// Resumes a failed or paused thread.
    pub async fn resume(&self, id: &str) -> Result<Done, Error> {
        self.act(&["v1", "threads", id, "resume"]).await
    }

    /// Creates a thread that begins with the history of another one.
    pub async fn fork(&self, id: &str, fork: &Fork) -> Result<Thread, Error> {
        self.post(&["v1", "threads", id, "fork"], fork, Some(&IdempotencyKey::random())).await
    }

    /// Cancels a call or a subscription.
    pub async fn cancel(&self, id: &str, call: &str) -> Result<Done, Error> {
        self.act(&["v1", "threads", id, "calls", call, "cancel"]).await
    }

    /// Answers the question of a call.
    pub async fn answer(&self, id: &str, call: &str, answer: &Answer) -> Result<Done, Error> {
        self.post(&["v1", "threads", id, "calls", call, "choice"], answer, None).await
    }

    /// Returns the latest views of a thread.
    pub async fn views(&self, id: &str) -> Result<Views, Error> {
        self.typed(self.all_pages(&["v1", "threads", id, "views"], "views", &[]).await?)
    }

    /// Returns a delivery.
    pub async fn delivery(&self, id: &str) -> Result<Delivery, Error> {
        self.typed(self.get_json(&["v1", "deliveries", id], &[]).await?)
    }

    /// Retries an invocation at once.
    pub async fn redeliver(&self, id: &str) -> Result<Done, Error> {
        self.act(&["v1", "deliveries", id, "redeliver"]).await
    }

    /// Creates a client token. No other response contains it.
    pub async fn create_token(&self, new: &CreateToken) -> Result<CreatedToken, Error> {
        self.post(&["v1", "tokens"], new, None).await
    }

    /// Revokes a client token.
    pub async fn revoke_token(&self, id: &str) -> Result<Done, Error> {
        self.delete(&["v1", "tokens", id]).await
    }

    /// Deletes a closed session.
    pub async fn delete_session(&self, id: &str) -> Result<Done, Error> {
        self.delete(&["v1", "threads", id]).await
    }

    /// Deletes sessions that have been closed for a time, or counts them.
    pub async fn prune(&self, request: &Prune) -> Result<Pruned, Error> {
        self.post(&["v1", "prune"], request, None).await
    }

    async fn delete(&self, path: &[&str]) -> Result<Done, Error> {
        let answer = self.http.delete(&self.path(path), &self.headers(), ANSWER_BYTES).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.typed(self.read(answer.status, &answer.body)?)
    }

    /// Begins to move a session to another runtime. [`Client::last_move`] tells how it went.
    pub async fn migrate(&self, session: &str, request: &Migrate) -> Result<Done, Error> {
        self.post(&["v1", "threads", session, "migrate"], request, None).await
    }

    /// Returns the state of the last move of a session.
    pub async fn last_move(&self, session: &str) -> Result<Move, Error> {
        self.typed(self.get_json(&["v1", "threads", session, "move"], &[]).await?)
    }

    /// Returns the tool servers and their tools.
    pub async fn tools(&self) -> Result<Tools, Error> {
        self.typed(self.tools_json().await?)
    }

    /// Like [`Client::tools`], with all fields that the runtime sends.
    pub async fn tools_json(&self) -> Result<Value, Error> {
        self.all_pages(&["v1", "tools"], "servers", &[]).await
    }

    /// Returns a page of a listing with at most `limit` rows, or all rows as one page if `limit` is `None`. Filters are
    /// query parameters, such as `("status", "idle")`.
    ///
    /// ```no_run
    /// # async fn example(client: rap_api::client::Client) -> Result<(), rap_api::client::Error> {
    /// let page: rap_api::Threads = client.list(&[("status", "needs_you")], Some(10)).await?;
    /// let all: rap_api::Inbox = client.list(&[], None).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn list<L: Listing>(&self, filters: &[(&str, &str)], limit: Option<usize>) -> Result<L, Error> {
        self.typed(self.list_json::<L>(filters, limit).await?)
    }

    /// Like [`Client::list`], with all fields that the runtime sends.
    pub async fn list_json<L: Listing>(
        &self,
        filters: &[(&str, &str)],
        limit: Option<usize>,
    ) -> Result<Value, Error> {
        let rows = limit.unwrap_or(PAGE).to_string();
        let parameters: Vec<_> = filters.iter().copied().chain([("limit", rows.as_str())]).collect();
        let path = ["v1", L::NAME];
        match limit {
            Some(_) => self.get_json(&path, &parameters).await,
            None => self.all_pages(&path, L::FIELD, &parameters).await,
        }
    }

    /// GETs all pages of a listing and returns them as one, with the rows in `field`.
    async fn all_pages(
        &self,
        path: &[&str],
        field: &str,
        parameters: &[(&str, &str)],
    ) -> Result<Value, Error> {
        let mut answer = self.get_json(path, parameters).await?;
        while let Some(cursor) = answer["next_cursor"].as_str().map(str::to_owned) {
            let next: Vec<_> = parameters.iter().copied().chain([("cursor", cursor.as_str())]).collect();
            let mut more = self.get_json(path, &next).await?;
            let rows = |page: &mut Value| {
                page.get_mut(field).and_then(|rows| rows.as_array_mut().map(std::mem::take))
            };
            let (Some(mut all), Some(rows)) = (rows(&mut answer), rows(&mut more)) else {
                return Err(self.not_a_runtime("a page of the listing has no rows"));
            };
            all.extend(rows);
            answer[field] = Value::Array(all);
            let next = more["next_cursor"].take();
            if next == cursor.as_str() {
                return Err(self.not_a_runtime("a page of the listing points to itself"));
            }
            answer["next_cursor"] = next;
        }
        Ok(answer)
    }

    /// Returns true if an agent has the scripted model instead of a language model. False if the runtime does not say.
    pub async fn is_scripted(&self, agent: &str) -> bool {
        let Ok(description) = self.get_json(&["openapi.json"], &[]).await else { return false };
        let agents = description["info"]["x-scripted-agents"].as_array();
        agents.is_some_and(|agents| agents.iter().any(|name| name == agent))
    }

    /// Follows a thread, beginning after the entry `after`; 0 replays the whole history.
    pub fn follow(&self, thread: &str, after: u64) -> Follower {
        Follower::new(self.clone(), thread_events(thread), after)
    }

    /// Like [`Client::follow`], with events that are not parsed.
    pub fn follow_raw(&self, thread: &str, after: u64) -> Follower<RawEvent> {
        Follower::new(self.clone(), thread_events(thread), after)
    }

    /// Follows all threads. After a reconnection, open questions are repeated, and other events may be missing.
    pub fn follow_all(&self) -> Follower<RuntimeEvent> {
        Follower::new(self.clone(), ["v1", "events"].map(str::to_owned).to_vec(), 0)
    }

    /// Returns the metrics of the runtime in the Prometheus text format.
    pub async fn metrics(&self) -> Result<String, Error> {
        let answer = self.http.get(&self.path(&["metrics"]), &self.headers(), ANSWER_BYTES).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        match answer.status {
            200 => Ok(String::from_utf8_lossy(&answer.body).into_owned()),
            _ => Err(self
                .read(answer.status, &answer.body)
                .err()
                .unwrap_or_else(|| self.not_a_runtime("it has no metrics"))),
        }
    }

    /// GETs a path, given as segments, and returns the answer with all fields that the runtime sends.
    pub async fn get_json(&self, path: &[&str], parameters: &[(&str, &str)]) -> Result<Value, Error> {
        let mut url = self.path(path);
        if !parameters.is_empty() {
            url.query_pairs_mut().extend_pairs(parameters);
        }
        let answer = self.http.get(&url, &self.headers(), ANSWER_BYTES).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.read(answer.status, &answer.body)
    }

    async fn act(&self, path: &[&str]) -> Result<Done, Error> {
        self.post(path, &json!({}), None).await
    }

    async fn post<T: DeserializeOwned>(
        &self,
        path: &[&str],
        body: &impl Serialize,
        key: Option<&IdempotencyKey>,
    ) -> Result<T, Error> {
        let mut headers = self.headers();
        headers.extend(key.map(|key| (IDEMPOTENCY_KEY, key.0.clone())));
        let body = serde_json::to_vec(body).expect("bug: a request is JSON");
        let answer = self.http.post_json(&self.path(path), &headers, Bytes::from(body)).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.typed(self.read(answer.status, &answer.body)?)
    }

    /// Opens an event stream, beginning after the entry `after`.
    async fn connect(&self, path: &[String], after: u64) -> Result<Connection, Error> {
        let mut headers = self.headers();
        headers.push((ACCEPT, HeaderValue::from_static("text/event-stream")));
        headers.push((LAST_EVENT_ID, HeaderValue::from(after)));
        let segments: Vec<&str> = path.iter().map(String::as_str).collect();
        let url = self.path(&segments);
        let mut stream = self.http.get_stream(&url, &headers).await.map_err(|error| self.failed(error))?;
        if stream.status == 200 {
            return Ok(Connection::new(stream));
        }
        let mut body = Vec::new();
        while body.len() < REFUSAL_BYTES
            && let Ok(Some(chunk)) = stream.chunk().await
        {
            body.extend_from_slice(&chunk);
        }
        match self.read(stream.status, &body) {
            Err(error) => Err(error),
            Ok(_) => Err(self.not_a_runtime("the answer is not an event stream")),
        }
    }

    fn typed<T: DeserializeOwned>(&self, value: Value) -> Result<T, Error> {
        serde_json::from_value(value).map_err(|error| self.not_a_runtime(error.to_string()))
    }

    fn path(&self, segments: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        url
    }

    fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        self.token.iter().map(|token| (AUTHORIZATION, token.clone())).collect()
    }

    fn read(&self, status: u16, body: &[u8]) -> Result<Value, Error> {
        if status == 401 {
            return Err(Error::Unauthorized { url: self.url().to_owned(), given: self.token.is_some() });
        }
        if (200..300).contains(&status) {
            return serde_json::from_slice(body).map_err(|_| {
                self.not_a_runtime(format!("it answered {status} with a body that is not JSON"))
            });
        }
        match serde_json::from_slice::<ErrorBody>(body) {
            Ok(ErrorBody { error }) => {
                Err(Error::Refused { status, code: error.code, message: error.message })
            }
            // A proxy answers like this while the runtime is down.
            Err(_) if matches!(status, 502..=504) => {
                Err(Error::NoAnswer { url: self.url().to_owned(), why: format!("a proxy answered {status}") })
            }
            Err(_) => Err(self.not_a_runtime(format!("it answered {status}"))),
        }
    }

    fn failed(&self, error: http_client::Error) -> Error {
        let (url, why) = (self.url().to_owned(), error.to_string());
        match error {
            http_client::Error::Unreachable(_) => Error::Unreachable { url, why },
            http_client::Error::TooLong { .. } => Error::TooLong { url },
            _ => Error::NoAnswer { url, why },
        }
    }

    fn not_a_runtime(&self, why: impl Into<String>) -> Error {
        Error::NotARuntime { url: self.url().to_owned(), why: why.into() }
    }
}

fn thread_events(thread: &str) -> Vec<String> {
    ["v1", "threads", thread, "events"].map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_segments_are_escaped() {
        let client = Client::new("http://127.0.0.1:1/base/").unwrap();
        assert_eq!(
            client.path(&["v1", "threads", "a/b?c"]).as_str(),
            "http://127.0.0.1:1/base/v1/threads/a%2Fb%3Fc"
        );
        assert_eq!(client.url(), "http://127.0.0.1:1/base");
    }

    #[test]
    fn an_invalid_url_is_reported() {
        for url in ["", "127.0.0.1:7420", "ftp://h", "http://"] {
            let Err(error) = Client::new(url) else { panic!("{url}") };
            assert!(error.to_string().contains("is not the URL of a runtime"), "{error}");
        }
    }

    #[test]
    fn an_error_does_not_contain_the_token() {
        let Err(error) = Client::new("http://h").unwrap().with_token("s3cr3t\n") else { panic!() };
        assert!(!error.to_string().contains("s3cr3t"));
    }
}
