//! Requests to a tool server: discovery, invocations, answers of people, and notifications.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::retry::{Attempt, Next, Outcome, RetryPolicy, after_attempt};
use rap_protocol::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, CancelToolCall, ChoiceAnswer, CloseThread,
    DISCOVERY_PATH, Invocation, Secret, ThreadId, Timestamp, Toolset, UrlRules, UserChoice, limits,
    parse_toolset,
};
use serde::Serialize;
use url::Url;

use super::random;

/// Time limit of discovery, and of one attempt of an invocation or an answer.
const REQUEST_TIME: Duration = Duration::from_secs(10);
/// Time limit of a notification, which is attempted once.
const NOTIFY_TIME: Duration = Duration::from_secs(5);
/// Retries of invocations and answers. Somebody waits for them, so they end sooner than those of a runtime.
const RETRIES: RetryPolicy = RetryPolicy {
    give_up_after: Duration::from_secs(30),
    longest_pause: Duration::from_secs(5),
    ..RetryPolicy::INVOCATION
};
/// Answer to an invocation of a toolset that has changed.
const CONFLICT: u16 = 409;

/// A tool server whose tools are offered.
pub(super) struct ToolServer {
    base: Url,
    bearer: Option<HeaderValue>,
    rules: Arc<UrlRules>,
    requests: Client,
    notifications: Client,
    toolset: Mutex<Option<Arc<Toolset>>>,
}

/// Reason why a call was not sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotSent {
    /// The server has other tools now.
    Changed,
    Failed(String),
}

/// Clients that all servers share.
#[derive(Clone)]
pub(super) struct Clients {
    rules: Arc<UrlRules>,
    requests: Client,
    notifications: Client,
}

impl Clients {
    pub(super) fn new(rules: UrlRules) -> Clients {
        let client =
            |total| Client::outgoing(rules.clone(), ClientLimits { total, ..ClientLimits::default() });
        let (requests, notifications) = (client(REQUEST_TIME), client(NOTIFY_TIME));
        Clients { rules: Arc::new(rules), requests, notifications }
    }
}

impl ToolServer {
    pub(super) fn new(base: Url, bearer: Option<&Secret>, clients: Clients) -> anyhow::Result<ToolServer> {
        let bearer = bearer.map(|bearer| {
            let mut value = HeaderValue::try_from(format!("Bearer {}", bearer.expose())).map_err(|_| {
                super::WrongUsage(
                    "the bearer token has characters that are not permitted in an HTTP header".into(),
                )
            })?;
            value.set_sensitive(true);
            Ok::<_, super::WrongUsage>(value)
        });
        let Clients { rules, requests, notifications } = clients;
        let bearer = bearer.transpose()?;
        Ok(ToolServer { base, bearer, rules, requests, notifications, toolset: Mutex::default() })
    }

    /// Returns the URL for people, without user and password.
    pub(super) fn name(&self) -> String {
        let host = self.base.host_str().unwrap_or_default();
        let port = self.base.port().map_or(String::new(), |port| format!(":{port}"));
        format!("{}://{host}{port}{}", self.base.scheme(), self.base.path().trim_end_matches('/'))
    }

    /// Returns the toolset that was fetched last.
    pub(super) fn toolset(&self) -> Option<Arc<Toolset>> {
        self.toolset.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fetches the toolset. If that fails, the one that was fetched before stays in use.
    pub(super) async fn discover(&self) -> Result<Arc<Toolset>, String> {
        let url = self.url(DISCOVERY_PATH)?;
        let fetched = self.requests.get(&url, &self.headers(&url), limits::BODY_BYTES).await;
        let fetched = fetched.map_err(|error| error.to_string())?;
        match fetched.status {
            200..=299 => {}
            401 | 403 => {
                return Err(format!(
                    "it answered {} to a request for its toolset; if it needs a bearer token, pass it with --bearer \
                     or RAP_TOOL_BEARER",
                    fetched.status
                ));
            }
            status => return Err(format!("it answered {status} to a request for its toolset")),
        }
        let toolset =
            parse_toolset(&fetched.body).map_err(|error| format!("its toolset is not valid: {error}"))?;
        self.rules
            .check_named_by(&self.base, &toolset.endpoint.to_url())
            .map_err(|why| format!("the endpoint of its toolset is not allowed: {why}"))?;
        let toolset = Arc::new(toolset);
        *self.toolset.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&toolset));
        Ok(toolset)
    }

    /// Sends an invocation until the server acknowledges or refuses it.
    pub(super) async fn invoke(&self, toolset: &Toolset, invocation: &Invocation) -> Result<(), NotSent> {
        match self.deliver(&toolset.endpoint.to_url(), json(invocation)).await {
            Err(Undelivered::Refused(CONFLICT)) => Err(NotSent::Changed),
            Err(Undelivered::Refused(status)) => {
                Err(NotSent::Failed(format!("the tool server refused the call: it answered {status}")))
            }
            Err(Undelivered::GaveUp(why)) => {
                Err(NotSent::Failed(format!("the tool server could not be reached: {why}")))
            }
            Ok(()) => Ok(()),
        }
    }

    /// Sends the answer to a question.
    pub(super) async fn answer(&self, choice: &UserChoice, selected: usize) -> Result<(), String> {
        let url = choice.response_url.to_url();
        self.rules
            .check_named_by(&self.base, &url)
            .map_err(|why| format!("the URL for the answer is not allowed: {why}"))?;
        let answer = ChoiceAnswer { id: choice.id.clone(), selected };
        self.deliver(&url, json(&answer)).await.map_err(|error| match error {
            Undelivered::Refused(status) => format!("it answered {status}"),
            Undelivered::GaveUp(why) => why,
        })
    }

    /// Tells the server that the result or the events of a call are not needed any more.
    pub(super) async fn cancel(&self, thread_id: ThreadId, tool_call_id: CallId) {
        self.notify(CANCEL_TOOL_CALL_PATH, json(&CancelToolCall { thread_id, tool_call_id })).await;
    }

    /// Tells the server that a thread is closed.
    pub(super) async fn close(&self, thread_id: ThreadId) {
        self.notify(CLOSE_THREAD_PATH, json(&CloseThread { thread_id })).await;
    }

    /// Sends a notification once. Nobody depends on its arrival.
    async fn notify(&self, path: &str, body: Bytes) {
        let Ok(url) = self.url(path) else { return };
        if let Err(error) = self.notifications.post_json(&url, &self.headers(&url), body).await {
            tracing::debug!(server = self.name(), path, %error, "a notification was not delivered");
        }
    }

    async fn deliver(&self, url: &Url, body: Bytes) -> Result<(), Undelivered> {
        let since = now();
        for number in 1.. {
            let (outcome, why) = match self.requests.post_json(url, &self.headers(url), body.clone()).await {
                Ok(reply) => {
                    let outcome = Outcome::Answered { status: reply.status, retry_after: reply.retry_after };
                    (outcome, format!("it answered {}", reply.status))
                }
                Err(error @ rap_io::client::Error::Forbidden(_)) => {
                    return Err(Undelivered::GaveUp(error.to_string()));
                }
                Err(error) => (Outcome::NoAnswer, error.to_string()),
            };
            let attempt =
                Attempt { number, since, now: now(), jitter: random::<4>().map_or(0, u32::from_le_bytes) };
            match after_attempt(outcome, attempt, &RETRIES) {
                Next::Done => return Ok(()),
                Next::Refused { status } => return Err(Undelivered::Refused(status)),
                Next::GaveUp => return Err(Undelivered::GaveUp(why)),
                Next::Retry { at } => tokio::time::sleep(at.since(now())).await,
            }
        }
        Ok(())
    }

    fn url(&self, path: &str) -> Result<Url, String> {
        let text = format!("{}{path}", self.base.as_str().trim_end_matches('/'));
        Url::parse(&text).map_err(|error| error.to_string())
    }

    /// Returns the credentials, if `url` may have them.
    fn headers(&self, url: &Url) -> Vec<(HeaderName, HeaderValue)> {
        let bearer = self.bearer.iter().filter(|_| self.rules.may_have_credentials(&self.base, url));
        bearer.map(|bearer| (AUTHORIZATION, bearer.clone())).collect()
    }
}

enum Undelivered {
    Refused(u16),
    GaveUp(String),
}

fn json(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).expect("bug: a message is JSON").into()
}

fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}
