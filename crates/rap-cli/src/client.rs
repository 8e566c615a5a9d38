//! A client of the runtime's API.
//!
//! What the runtime refuses and what never reached it are different errors: the first says what the runtime said, the
//! second can be tried again. The token stands in no error and in no `Debug`.

mod events;
mod pauses;

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderName, HeaderValue};
use rap_io::client::{self, ClientLimits};
use rap_protocol::{Secret, UrlPolicy};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use url::Url;

pub use events::{ENTRY, Event, Events, Follower, LeftOut, News};
pub use pauses::Pauses;

use crate::api::{Entry, Page, Question, Thread, Timer};

/// Where a runtime listens unless it is told otherwise.
pub const DEFAULT_URL: &str = "http://127.0.0.1:7420";

/// The largest answer that is read, in bytes.
const ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// Largest part of an answer that is read where a stream was asked for and refused, in bytes.
const REFUSAL_BYTES: usize = 64 * 1024;
/// How many rows the largest page of a listing has.
const PAGE: usize = 1000;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// A runtime shows every quarter of a minute that it is alive.
const SILENCE: Duration = Duration::from_secs(60);

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL of the runtime is none.
    #[error("{url} is no URL of a runtime: {why}; it looks like {DEFAULT_URL}")]
    BadUrl {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The token can not stand in a header.
    #[error("the token has characters that no token has; look at RAP_TOKEN or --token")]
    BadToken,
    /// Nothing was sent.
    #[error(
        "nothing answers at {url}: start it with: rap serve\n(or name another with --url or RAP_URL; {why})"
    )]
    NothingAnswers {
        /// Where.
        url: String,
        /// What the system said.
        why: String,
    },
    /// It may have arrived.
    #[error("no answer from {url}: {why}")]
    Broken {
        /// Where.
        url: String,
        /// What happened.
        why: String,
    },
    /// The answer is larger than what is read.
    #[error("the answer of {url} has more than {ANSWER_BYTES} bytes")]
    TooLong {
        /// Where.
        url: String,
    },
    /// The runtime wants another token.
    #[error("{url} wants a token{}: set RAP_TOKEN (or --token) to one of its server.tokens", wrong(*given))]
    Unauthorised {
        /// Where.
        url: String,
        /// Whether one was shown.
        given: bool,
    },
    /// The runtime does not do it.
    #[error("{message}")]
    Refused {
        /// The status.
        status: u16,
        /// The code that stays.
        code: String,
        /// What it said.
        message: String,
    },
    /// What came is not what this version reads.
    #[error("{url} did not answer like a runtime: {why}")]
    NotARuntime {
        /// Where.
        url: String,
        /// What is wrong.
        why: String,
    },
}

fn wrong(given: bool) -> &'static str {
    if given { " other than the one it was shown" } else { "" }
}

impl Error {
    /// Whether the runtime may be back in a moment.
    pub fn is_passing(&self) -> bool {
        match self {
            Error::NothingAnswers { .. } | Error::Broken { .. } => true,
            Error::Refused { status, .. } => matches!(status, 429 | 503),
            _ => false,
        }
    }

    /// The runtime's code, if it refused.
    pub fn code(&self) -> Option<&str> {
        match self {
            Error::Refused { code, .. } => Some(code),
            _ => None,
        }
    }
}

/// A client. Clones are cheap and share connections.
#[derive(Clone)]
pub struct Client {
    http: client::Client,
    base: Url,
    token: Option<HeaderValue>,
}

impl Client {
    /// A client of the runtime at this URL.
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

    /// The URL of the runtime.
    pub fn url(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// Asks for a document.
    pub async fn get(&self, path: &[&str], parameters: &[(&str, &str)]) -> Result<Value, Error> {
        let mut url = self.path(path);
        if !parameters.is_empty() {
            url.query_pairs_mut().extend_pairs(parameters);
        }
        let answer = self.http.get(&url, &self.headers(), ANSWER_BYTES).await;
        let answer = answer.map_err(|error| self.failed(error))?;
        self.read(answer.status, &answer.body)
    }

    /// Gives an order.
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

    /// One thread.
    pub async fn thread(&self, id: &str) -> Result<Thread, Error> {
        self.typed(self.get(&["v1", "threads", id], &[]).await?)
    }

    /// Makes a thread.
    pub async fn create_thread(&self, new: &Value) -> Result<Thread, Error> {
        let key = idempotency_key();
        self.typed(self.post_with(&["v1", "threads"], new, &[(IDEMPOTENCY_KEY, key)]).await?)
    }

    /// Says something to an agent. The key makes a repeat harmless.
    pub async fn say(&self, id: &str, body: &Value, key: &HeaderValue) -> Result<Value, Error> {
        self.post_with(&["v1", "threads", id, "messages"], body, &[(IDEMPOTENCY_KEY, key.clone())]).await
    }

    /// An order to a thread that needs no words: `interrupt`, `close`, `resume`.
    pub async fn order(&self, id: &str, order: &str) -> Result<Value, Error> {
        self.post(&["v1", "threads", id, order], &json!({})).await
    }

    /// Cancels a call or a subscription.
    pub async fn cancel(&self, id: &str, call: &str) -> Result<Value, Error> {
        self.post(&["v1", "threads", id, "calls", call, "cancel"], &json!({})).await
    }

    /// Answers a question; `None` leaves it to the default.
    pub async fn choose(&self, id: &str, call: &str, selected: Option<usize>) -> Result<Value, Error> {
        let body = match selected {
            Some(selected) => json!({"selected": selected}),
            None => json!({"dismiss": true}),
        };
        self.post(&["v1", "threads", id, "calls", call, "choice"], &body).await
    }

    /// A page of threads.
    pub async fn threads(&self, parameters: &[(&str, &str)]) -> Result<Page, Error> {
        self.typed(self.get(&["v1", "threads"], parameters).await?)
    }

    /// A listing as the API gives it: a page of so many rows, or all of them as one where no number is given.
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
                return Err(self.not_a_runtime("a page of its listing has no rows"));
            };
            all.append(rows);
            let next = taken(&mut more, "/next_cursor");
            if next == cursor.as_str() {
                return Err(self.not_a_runtime("a page of its listing leads to itself"));
            }
            answer["next_cursor"] = next;
        }
        Ok(answer)
    }

    /// The rows of a listing.
    pub fn rows<T: DeserializeOwned>(&self, mut answer: Value) -> Result<Vec<T>, Error> {
        let rows = rows_of(&mut answer).map(std::mem::take);
        self.typed(Value::Array(rows.ok_or_else(|| self.not_a_runtime("it gave no listing"))?))
    }

    /// Everything that waits for a person.
    pub async fn inbox(&self) -> Result<Vec<Question>, Error> {
        self.rows(self.list("inbox", &[], None).await?)
    }

    /// What happens by itself next.
    pub async fn timers(&self) -> Result<Vec<Timer>, Error> {
        self.rows(self.list("timers", &[], Some(PAGE)).await?)
    }

    /// Entries of a thread, from the one after `after` on; `limit` at most.
    pub async fn history(&self, id: &str, after: u64, limit: usize) -> Result<Vec<Entry>, Error> {
        let path = ["v1", "threads", id, "history"];
        let (after, limit) = (after.to_string(), limit.to_string());
        let mut answer = self.get(&path, &[("after", &after), ("limit", &limit)]).await?;
        self.typed(taken(&mut answer, "/entries"))
    }

    /// What happens in a thread, from the entry after `after` on. It ends when the runtime ends it.
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
            Ok(_) => Err(self.not_a_runtime("it gave no stream")),
        }
    }

    /// Reads what the API gave.
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
            return value.map_err(|_| self.not_a_runtime(format!("it answered {status} without JSON")));
        }
        let mut value = value.unwrap_or_default();
        match (taken(&mut value, "/error/code"), taken(&mut value, "/error/message")) {
            (Value::String(code), Value::String(message)) => Err(Error::Refused { status, code, message }),
            // A proxy says so of a runtime that is not there at the moment.
            _ if matches!(status, 502..=504) => {
                Err(Error::Broken { url: self.url().to_owned(), why: format!("a proxy answered {status}") })
            }
            _ => Err(self.not_a_runtime(format!("it answered {status}"))),
        }
    }

    fn failed(&self, error: client::Error) -> Error {
        let (url, why) = (self.url().to_owned(), error.to_string());
        match error {
            client::Error::Unreachable(_) => Error::NothingAnswers { url, why },
            client::Error::TooLong { .. } => Error::TooLong { url },
            _ => Error::Broken { url, why },
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

/// Takes a value out of a document, by its JSON pointer; null where there is none.
pub fn taken(document: &mut Value, pointer: &str) -> Value {
    document.pointer_mut(pointer).map(Value::take).unwrap_or_default()
}

/// The rows of a listing are its one array.
fn rows_of(answer: &mut Value) -> Option<&mut Vec<Value>> {
    answer.as_object_mut()?.values_mut().find_map(Value::as_array_mut)
}

/// A key that no other message has.
pub fn idempotency_key() -> HeaderValue {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("bug: the system gives random bytes");
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::try_from(text).expect("bug: digits are fit for a header")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_segment_stays_one_whatever_is_in_it() {
        let client = Client::new("http://127.0.0.1:1/base/", None).unwrap();
        assert_eq!(
            client.path(&["v1", "threads", "a/b?c"]).as_str(),
            "http://127.0.0.1:1/base/v1/threads/a%2Fb%3Fc"
        );
        assert_eq!(client.url(), "http://127.0.0.1:1/base");
    }

    #[test]
    fn a_url_that_is_none_is_told() {
        for url in ["", "127.0.0.1:7420", "ftp://h", "http://"] {
            let Err(error) = Client::new(url, None) else { panic!("{url}") };
            assert!(error.to_string().contains("is no URL of a runtime"), "{error}");
        }
    }

    #[test]
    fn a_token_is_told_nowhere() {
        let secret = Secret::new("s3cr3t\n");
        let Err(error) = Client::new("http://h", Some(&secret)) else { panic!() };
        assert!(!error.to_string().contains("s3cr3t"));
    }
}
