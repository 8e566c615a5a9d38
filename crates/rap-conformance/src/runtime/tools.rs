//! The tool servers: their toolsets, their answers to requests, and the callbacks of a call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use rap_io::client::{self, Client};
use serde_json::{Value, json};
use url::Url;

use super::Timeouts;
use super::latch::Latch;
use super::mock_server::{RecordedRequest, Reply};
use crate::{Exchange, RedactedMessage, Verdict};

/// Path of the invocation endpoint, relative to a server's base URL.
pub(crate) const INVOKE_PATH: &str = "/invoke";
/// Index of the server of [`WORK`] and [`WATCH`].
pub(crate) const MAIN: usize = 0;
/// Index of the server of [`CHANGING`], whose toolset changes.
pub(crate) const SECOND: usize = 1;
/// Index of the server of [`UNREACHABLE`], whose endpoint has another port.
pub(crate) const THIRD: usize = 2;

/// Tool that returns a result.
pub(crate) const WORK: &str = "rapcheck_work";
/// Tool that makes a subscription.
pub(crate) const WATCH: &str = "rapcheck_watch";
/// Tool of the server whose toolset changes.
pub(crate) const CHANGING: &str = "rapcheck_fickle";
/// Tool that is added when the toolset changes.
pub(crate) const ADDED: &str = "rapcheck_new";
/// Tool that two toolsets offer.
pub(crate) const DOUBLE: &str = "rapcheck_double";
/// Name that no tool may have.
pub(crate) const INVALID_NAME: &str = "rapcheck invalid!";
/// Tool whose endpoint refuses connections at first.
pub(crate) const UNREACHABLE: &str = "rapcheck_away";
/// Argument that carries the marker of a call.
pub(crate) const MARKER: &str = "mark";
/// Maximum number of bytes of a posted body that a report shows.
const SHOWN_BYTES: usize = 4096;
/// Pause before a callback is retried after a 5xx.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Path of a tool server's base URL.
pub(crate) fn base_path(at: usize) -> &'static str {
    ["/main", "/second", "/third"][at]
}

/// Initial toolset of a server.
pub(crate) fn document(at: usize, url: &str, third_url: &str) -> Value {
    let endpoint = |url: &str| format!("{url}{}{INVOKE_PATH}", base_path(at));
    match at {
        MAIN => json!({
            "name": "rapcheck-main", "version": "main-1", "endpoint": endpoint(url), "tools": [tool(WORK), tool(WATCH)],
        }),
        SECOND => second_toolset(url, "second-1", &[CHANGING]),
        _ => json!({"name": "rapcheck-third", "endpoint": endpoint(third_url), "tools": [tool(UNREACHABLE)]}),
    }
}

/// Toolset of the second server in a version.
pub(crate) fn second_toolset(url: &str, version: &str, tools: &[&str]) -> Value {
    let tools: Vec<Value> = tools.iter().map(|name| tool(name)).collect();
    let endpoint = format!("{url}{}{INVOKE_PATH}", base_path(SECOND));
    json!({"name": "rapcheck-second", "version": version, "endpoint": endpoint, "tools": tools})
}

pub(crate) fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {MARKER: {"type": "string"}}, "required": [MARKER]});
    json!({"name": name, "description": format!("A tool of a conformance check: {name}."), "inputSchema": schema})
}

/// Answer to an invocation. The default is 200.
#[derive(Debug, Clone)]
pub(crate) enum Acknowledgement {
    /// A status with an empty body.
    Status(u16),
    /// 200 with a body that looks like a result of the call.
    Result(String),
    /// 200 when the latch is released.
    Hold(Latch),
}

impl Default for Acknowledgement {
    fn default() -> Self {
        Acknowledgement::Status(200)
    }
}

impl Acknowledgement {
    pub(crate) fn reply(self, invocation: &Value) -> (Reply, Option<Latch>) {
        match self {
            Acknowledgement::Status(status) => (Reply::status(status), None),
            Acknowledgement::Result(text) => {
                (Reply::json(&with(message("tool_result", invocation), json!({"text": text}))), None)
            }
            Acknowledgement::Hold(latch) => (Reply::status(200), Some(latch)),
        }
    }
}

/// Fields that every callback of a call has. `call_id` is echoed if the invocation has one.
fn message(kind: &str, invocation: &Value) -> Value {
    let mut message = json!({"type": kind, "group_id": invocation["group_id"], "id": invocation["id"]});
    if let Some(id) = invocation.get("call_id").filter(|id| !id.is_null()) {
        message["call_id"] = id.clone();
    }
    message
}

/// Treatment of notifications about a thread by the tool servers.
#[derive(Debug, Clone, Default)]
pub(crate) enum NotificationBehavior {
    /// 200 at once.
    #[default]
    Accept,
    /// An error with this text, which the runtime has to ignore.
    Fail(String),
    /// 200 when the latch is released.
    Hold(Latch),
}

impl NotificationBehavior {
    pub(crate) fn answer(self) -> (Reply, Option<Latch>) {
        match self {
            NotificationBehavior::Accept => (Reply::status(200), None),
            NotificationBehavior::Fail(text) => {
                let body = json!({"type": "tool_result", "text": text});
                (Reply { status: 500, ..Reply::json(&body) }, None)
            }
            NotificationBehavior::Hold(latch) => (Reply::status(200), Some(latch)),
        }
    }
}

/// An invocation, with methods that post its callbacks.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) request: Arc<RecordedRequest>,
    pub(crate) http: Client,
    pub(crate) timeouts: Timeouts,
    pub(crate) log: ExchangeLog,
}

/// Exchanges of a scenario with their times, for the report.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExchangeLog(Arc<Mutex<Vec<(Instant, Exchange)>>>);

impl ExchangeLog {
    pub(crate) fn add(&self, exchange: Exchange) {
        self.all().push((Instant::now(), exchange));
    }

    pub(crate) fn all(&self) -> MutexGuard<'_, Vec<(Instant, Exchange)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Outcome of a POST to a callback URL.
#[derive(Debug)]
pub(crate) struct PostOutcome {
    /// Status of the answer; `None` if there was none.
    pub(crate) status: Option<u16>,
    /// True if the answer did not arrive in time and the connection was not closed either.
    pub(crate) timed_out: bool,
    pub(crate) exchange: Exchange,
}

impl PostOutcome {
    pub(crate) fn is_rejected(&self) -> bool {
        self.status.is_some_and(|status| (400..500).contains(&status))
    }
}

impl Call {
    pub(crate) fn id(&self) -> &str {
        self.request.field("id")
    }

    pub(crate) fn thread(&self) -> &str {
        self.request.field("group_id")
    }

    pub(crate) fn url(&self) -> &str {
        self.request.field("callback_url")
    }

    pub(crate) fn operation(&self) -> &str {
        self.request.field("operation")
    }

    /// Marker in the arguments, which identifies the call independently of its id.
    pub(crate) fn marker(&self) -> &str {
        self.request.marker()
    }

    /// A callback with the ids of this call, but without content.
    pub(crate) fn message(&self, kind: &str) -> Value {
        message(kind, &self.request.body)
    }

    pub(crate) fn result(&self, text: &str) -> Value {
        with(self.message("tool_result"), json!({"text": text}))
    }

    pub(crate) fn confirmation(&self, text: &str) -> Value {
        with(self.result(text), json!({"subscription": true}))
    }

    /// An event that is handled in an event child.
    pub(crate) fn event(&self, text: &str) -> Value {
        json!({"type": "subscription_event", "group_id": self.thread(), "tool_call_id": self.id(), "text": text})
    }

    /// An event that is handled in the subscribing thread.
    pub(crate) fn inline_event(&self, text: &str) -> Value {
        with(self.event(text), json!({"associative": true}))
    }

    /// Posts a callback, and retries it if it is answered 5xx or not at all.
    pub(crate) async fn post_with_retry(&self, body: &Value) -> Result<PostOutcome, Verdict> {
        let began = Instant::now();
        loop {
            let posted = self.post(body).await?;
            let is_temporary = posted.status.is_none_or(|status| status >= 500);
            if !is_temporary || began.elapsed() > self.timeouts.arrival {
                return Ok(posted);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Posts a callback that has to be answered 2xx.
    pub(crate) async fn post_accepted(&self, body: &Value) -> Result<PostOutcome, Verdict> {
        let posted = self.post_with_retry(body).await?;
        match posted.status {
            Some(200..300) => Ok(posted),
            status => {
                let kind = body["type"].as_str().unwrap_or_default();
                let status = status.map_or_else(|| "no response".into(), |status| status.to_string());
                let what = format!("a {kind} got {status} instead of 200");
                Err(Verdict::fail(what, vec![self.request.exchange(), posted.exchange]))
            }
        }
    }

    /// Posts a callback that has to be answered with exactly 200.
    pub(crate) async fn post_expecting_200(&self, body: &Value) -> Result<(), Verdict> {
        let posted = self.post_accepted(body).await?;
        match posted.status {
            Some(200) => Ok(()),
            _ => Err(Verdict::fail(
                "an accepted callback was answered with another status than 200",
                vec![posted.exchange],
            )),
        }
    }

    pub(crate) async fn return_result(&self, text: &str) -> Result<(), Verdict> {
        self.post_accepted(&self.result(text)).await.map(|_| ())
    }

    pub(crate) async fn confirm(&self, text: &str) -> Result<(), Verdict> {
        self.post_accepted(&self.confirmation(text)).await.map(|_| ())
    }

    pub(crate) async fn post(&self, body: &Value) -> Result<PostOutcome, Verdict> {
        self.logged(post(&self.http, self.url(), None, body.to_string().into()).await)
    }

    /// Posts arbitrary bytes with a content type.
    pub(crate) async fn post_raw(&self, kind: &'static str, body: Bytes) -> Result<PostOutcome, Verdict> {
        self.logged(post(&self.http, self.url(), Some(kind), body).await)
    }

    fn logged(&self, posted: Result<PostOutcome, Verdict>) -> Result<PostOutcome, Verdict> {
        if let Ok(posted) = &posted {
            self.log.add(posted.exchange.clone());
        }
        posted
    }
}

/// Posts to a callback URL. Reports do not show the URL.
pub(crate) async fn post(
    http: &Client,
    url: &str,
    kind: Option<&'static str>,
    body: Bytes,
) -> Result<PostOutcome, Verdict> {
    let url = Url::parse(url)
        .map_err(|_| Verdict::fail("the callback_url of an invocation is not a valid URL", Vec::new()))?;
    let kind = kind.map(|kind| (http::header::CONTENT_TYPE, HeaderValue::from_static(kind)));
    let headers: Vec<(HeaderName, HeaderValue)> = kind.into_iter().collect();
    let head = "POST (its callback URL)";
    let shown = RedactedMessage::new(head, &body[..body.len().min(SHOWN_BYTES)]);
    let sent = http.post_json(&url, &headers, body).await;
    let timed_out = matches!(sent, Err(client::Error::TimedOut));
    let (status, answer) = match sent {
        Ok(reply) => (Some(reply.status), RedactedMessage::new(reply.status.to_string(), &reply.body)),
        Err(client::Error::Forbidden(why)) => {
            return Err(Verdict::fail(format!("the callback_url cannot be used: {why}"), Vec::new()));
        }
        Err(error) => (None, RedactedMessage::head(error.to_string())),
    };
    Ok(PostOutcome { status, timed_out, exchange: Exchange::new(shown, answer) })
}

/// Adds fields to an object, or replaces them.
pub(crate) fn with(mut body: Value, more: Value) -> Value {
    if let (Some(fields), Value::Object(more)) = (body.as_object_mut(), more) {
        fields.extend(more);
    }
    body
}
