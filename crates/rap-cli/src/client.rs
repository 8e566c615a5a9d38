//! Client of the runtime's API.
//!
//! A request that the runtime refused and a request that did not reach it are different errors: the first carries the
//! runtime's message, the second can be retried. No error and no `Debug` output contains the token.

mod backoff;
mod events;

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderName, HeaderValue};
use rap_io::client::{self, ClientLimits};
use rap_protocol::{Secret, UrlPolicy};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use url::Url;

pub use backoff::Backoff;
pub use events::{ENTRY, Event, Events, Follower, Update};

use crate::api::{Entry, Page, Question, Thread, Timer};

/// URL of a runtime that listens on its default address.
pub const DEFAULT_URL: &str = "http://127.0.0.1:7420";

/// Maximum size of an answer, in bytes.
const ANSWER_BYTES: usize = 64 * 1024 * 1024;
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
    #[error("{url} is not the URL of a runtime: {why}; example: {DEFAULT_URL}")]
    BadUrl { url: String, why: String },
    /// The token is not a valid header value.
    #[error("the token contains invalid characters; check RAP_TOKEN or --token")]
    BadToken,
    /// The connection failed; nothing was sent.
    #[error(
        "no runtime answers at {url}: start it with: rap serve\n(or set another URL with --url or RAP_URL; {why})"
    )]
    Unreachable { url: String, why: String },
    /// There was no answer. The request may have arrived.
    #[error("no answer from {url}: {why}")]
    NoAnswer { url: String, why: String },
    #[error("the answer of {url} is larger than {ANSWER_BYTES} bytes")]
    TooLong { url: String },
    #[error("{}: set RAP_TOKEN (or --token) to one of its server.tokens", unauthorised(url, *given))]
    Unauthorised {
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
        message: String,
    },
    /// The answer is not one that this version understands.
    #[error("{url} did not answer like a runtime: {why}")]
    NotARuntime { url: String, why: String },
}

fn unauthorised(url: &str, given: bool) -> String {
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

/// Client of one runtime. Clones are cheap and share connections.
#[derive(Clone)]
pub struct Client {
    http: client::Client,
    base: Url,
    token: Option<HeaderValue>,
}

impl Client {
    pub fn new(url: &str, token: Option<&Secret>) -> Result<Client, Error> {
        let bad = |why: String| Error::BadUrl { url: url.to_owned(), why };
        let base = Url::parse(url).map_err(|error| bad(error.to_string()))?;
        UrlPolicy::Local.check(&base).map_err(|error| bad(error.to_string()))?;
        let limits = ClientLimits {
            stream_head: Duration::from_secs(30),
            stream_idle: SILENCE,
            drain_bytes: ANSWER_BYTES,
            ..ClientLimits::default()
        };
        let token = token.map(bearer).transpose()?;
        Ok(Client { http: client::Client::new(UrlPolicy::Local, limits), base, token })
    }

    /// URL of the runtime, without a trailing slash.
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    pub async fn get(&self, path: &[&str], parameters: &[(&str, &str)]) -> Result<Value, Error> {
        let mut url = self.path(path);
        if !parameters.is_empty() {
            url.query_pairs_mut().extend_pairs(parameters);
        }
        let answer = self.http.get(&url, &self.headers(), ANSWER_BYTES).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.read(answer.status, &answer.body)
    }

    pub async fn post(&self, path: &[&str], body: &Value) -> Result<Value, Error> {
        self.post_with(path, body, &[]).await
    }

    async fn post_with(
        &self,
        path: &[&str],
        body: &Value,
        more: &[(HeaderName, HeaderValue)],
    ) -> Result<Value, Error> {
        let mut headers = self.headers();
        headers.extend_from_slice(more);
        let answer = self.http.post_json(&self.path(path), &headers, Bytes::from(body.to_string())).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.read(answer.status, &answer.body)
    }

    pub async fn thread(&self, id: &str) -> Result<Thread, Error> {
        self.typed(self.get(&["v1", "threads", id], &[]).await?)
    }

    pub async fn create_thread(&self, new: &Value) -> Result<Thread, Error> {
        let key = idempotency_key();
        self.typed(self.post_with(&["v1", "threads"], new, &[(IDEMPOTENCY_KEY, key)]).await?)
    }

    /// Sends a message to a thread. A repeat with the same key has no effect.
    pub async fn send_message(&self, id: &str, body: &Value, key: &HeaderValue) -> Result<Value, Error> {
        self.post_with(&["v1", "threads", id, "messages"], body, &[(IDEMPOTENCY_KEY, key.clone())]).await
    }

    /// Performs `interrupt`, `close` or `resume` on a thread.
    pub async fn thread_action(&self, id: &str, action: &str) -> Result<Value, Error> {
        self.post(&["v1", "threads", id, action], &json!({})).await
    }

    /// Cancels a call or a subscription.
    pub async fn cancel(&self, id: &str, call: &str) -> Result<Value, Error> {
        self.post(&["v1", "threads", id, "calls", call, "cancel"], &json!({})).await
    }

    /// Answers a choice with the index of the selected text; `None` dismisses the question.
    pub async fn answer_choice(&self, id: &str, call: &str, selected: Option<usize>) -> Result<Value, Error> {
        let body = match selected {
            Some(selected) => json!({"selected": selected}),
            None => json!({"dismiss": true}),
        };
        self.post(&["v1", "threads", id, "calls", call, "choice"], &body).await
    }

    /// Returns true if an agent has the scripted model instead of a language model. False if the runtime does not say.
    pub async fn is_scripted(&self, agent: &str) -> bool {
        let Ok(description) = self.get(&["openapi.json"], &[]).await else { return false };
        let agents = description["info"]["x-scripted-agents"].as_array();
        agents.is_some_and(|agents| agents.iter().any(|name| name == agent))
    }

    /// Returns a page of threads.
    pub async fn threads(&self, parameters: &[(&str, &str)]) -> Result<Page, Error> {
        self.typed(self.get(&["v1", "threads"], parameters).await?)
    }

    /// Returns a listing as the API gives it: a page of `limit` rows, or all rows as one page if `limit` is `None`.
    pub async fn list(
        &self,
        path: &str,
        filters: &[(&str, &str)],
        limit: Option<usize>,
    ) -> Result<Value, Error> {
        let rows = limit.unwrap_or(PAGE).to_string();
        let parameters: Vec<_> = filters.iter().copied().chain([("limit", rows.as_str())]).collect();
        let mut answer = self.get(&["v1", path], &parameters).await?;
        if limit.is_some() {
            return Ok(answer);
        }
        while let Some(cursor) = answer["next_cursor"].as_str().map(str::to_owned) {
            let next: Vec<_> = parameters.iter().copied().chain([("cursor", cursor.as_str())]).collect();
            let mut more = self.get(&["v1", path], &next).await?;
            let (Some(all), Some(rows)) = (rows_of(&mut answer), rows_of(&mut more)) else {
                return Err(self.not_a_runtime("a page of the listing has no rows"));
            };
            all.append(rows);
            let next = take_at(&mut more, "/next_cursor");
            if next == cursor.as_str() {
                return Err(self.not_a_runtime("a page of the listing points to itself"));
            }
            answer["next_cursor"] = next;
        }
        Ok(answer)
    }

    pub fn rows<T: DeserializeOwned>(&self, mut answer: Value) -> Result<Vec<T>, Error> {
        let rows = rows_of(&mut answer).map(std::mem::take);
        self.typed(Value::Array(rows.ok_or_else(|| self.not_a_runtime("the answer is not a listing"))?))
    }

    /// Returns all questions that wait for a person.
    pub async fn inbox(&self) -> Result<Vec<Question>, Error> {
        self.rows(self.list("inbox", &[], None).await?)
    }

    /// Returns the next timers, at most [`PAGE`].
    pub async fn timers(&self) -> Result<Vec<Timer>, Error> {
        self.rows(self.list("timers", &[], Some(PAGE)).await?)
    }

    /// Returns at most `limit` entries of a thread that follow the entry `after`.
    pub async fn history(&self, id: &str, after: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        let path = ["v1", "threads", id, "history"];
        let (after, limit) = (after.to_string(), limit.to_string());
        let mut answer = self.get(&path, &[("after", &after), ("limit", &limit)]).await?;
        self.typed(take_at(&mut answer, "/entries"))
    }

    /// Opens the event stream of a thread, beginning after the entry `after`.
    pub async fn events(&self, id: &str, after: u64) -> Result<Events, Error> {
        let mut headers = self.headers();
        headers.push((ACCEPT, HeaderValue::from_static("text/event-stream")));
        headers.push((LAST_EVENT_ID, HeaderValue::from(after)));
        let url = self.path(&["v1", "threads", id, "events"]);
        let mut stream = self.http.get_stream(&url, &headers).await.map_err(|error| self.failed(error))?;
        if stream.status == 200 {
            return Ok(Events::new(stream));
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

    /// Deserializes an answer of the API.
    pub fn typed<T: DeserializeOwned>(&self, value: Value) -> Result<T, Error> {
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
            return Err(Error::Unauthorised { url: self.url().to_owned(), given: self.token.is_some() });
        }
        let value = serde_json::from_slice::<Value>(body);
        if (200..300).contains(&status) {
            return value.map_err(|_| {
                self.not_a_runtime(format!("it answered {status} with a body that is not JSON"))
            });
        }
        let mut value = value.unwrap_or_default();
        match (take_at(&mut value, "/error/code"), take_at(&mut value, "/error/message")) {
            (Value::String(code), Value::String(message)) => Err(Error::Refused { status, code, message }),
            // A proxy answers like this while the runtime is down.
            _ if matches!(status, 502..=504) => {
                Err(Error::NoAnswer { url: self.url().to_owned(), why: format!("a proxy answered {status}") })
            }
            _ => Err(self.not_a_runtime(format!("it answered {status}"))),
        }
    }

    fn failed(&self, error: client::Error) -> Error {
        let (url, why) = (self.url().to_owned(), error.to_string());
        match error {
            client::Error::Unreachable(_) => Error::Unreachable { url, why },
            client::Error::TooLong { .. } => Error::TooLong { url },
            _ => Error::NoAnswer { url, why },
        }
    }

    fn not_a_runtime(&self, why: impl Into<String>) -> Error {
        Error::NotARuntime { url: self.url().to_owned(), why: why.into() }
    }
}

fn bearer(token: &Secret) -> Result<HeaderValue, Error> {
    let mut value =
        HeaderValue::try_from(format!("Bearer {}", token.expose())).map_err(|_| Error::BadToken)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Takes the value at a JSON pointer out of a document; null if there is none.
pub fn take_at(document: &mut Value, pointer: &str) -> Value {
    document.pointer_mut(pointer).map(Value::take).unwrap_or_default()
}

/// Returns the rows of a listing: the only array in the object.
fn rows_of(answer: &mut Value) -> Option<&mut Vec<Value>> {
    answer.as_object_mut()?.values_mut().find_map(Value::as_array_mut)
}

/// Returns a new random key.
pub fn idempotency_key() -> HeaderValue {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("bug: the system has no source of random bytes");
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::try_from(text).expect("bug: hexadecimal digits are a valid header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_segments_are_escaped() {
        let client = Client::new("http://127.0.0.1:1/base/", None).unwrap();
        assert_eq!(
            client.path(&["v1", "threads", "a/b?c"]).as_str(),
            "http://127.0.0.1:1/base/v1/threads/a%2Fb%3Fc"
        );
        assert_eq!(client.url(), "http://127.0.0.1:1/base");
    }

    #[test]
    fn an_invalid_url_is_reported() {
        for url in ["", "127.0.0.1:7420", "ftp://h", "http://"] {
            let Err(error) = Client::new(url, None) else { panic!("{url}") };
            assert!(error.to_string().contains("is not the URL of a runtime"), "{error}");
        }
    }

    #[test]
    fn an_error_does_not_contain_the_token() {
        let secret = Secret::new("s3cr3t\n");
        let Err(error) = Client::new("http://h", Some(&secret)) else { panic!() };
        assert!(!error.to_string().contains("s3cr3t"));
    }
}
