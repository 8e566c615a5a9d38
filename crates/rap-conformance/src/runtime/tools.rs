//! The tool servers: what they offer, how they take what they are sent, and the voice of a call.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use rap_io::client::{self, Client};
use serde_json::{Value, json};
use url::Url;

use super::Pace;
use super::gate::Gate;
use super::stage::{Asked, Reply};
use crate::{Exchange, Shown, Verdict};

/// Where invocations go, below a server's base.
pub(crate) const INVOKE_PATH: &str = "/invoke";
/// The server of [`WORK`] and [`WATCH`].
pub(crate) const MAIN: usize = 0;
/// The server of [`FICKLE`], whose toolset changes.
pub(crate) const SECOND: usize = 1;
/// The server of [`AWAY`], whose endpoint is somewhere else.
pub(crate) const THIRD: usize = 2;

/// A tool that does something and returns.
pub(crate) const WORK: &str = "rapcheck_work";
/// A tool that subscribes.
pub(crate) const WATCH: &str = "rapcheck_watch";
/// A tool that changes.
pub(crate) const FICKLE: &str = "rapcheck_fickle";
/// A tool that comes with the change.
pub(crate) const NEW: &str = "rapcheck_new";
/// A tool that can not be reached at first.
pub(crate) const AWAY: &str = "rapcheck_away";
/// The argument that carries the mark of a call.
pub(crate) const MARK: &str = "mark";
/// How much of what was posted a report can show, in bytes.
const SHOWN_BYTES: usize = 4096;
/// How long a tool waits before it repeats what was answered 5xx.
const AGAIN: Duration = Duration::from_millis(100);

/// The base of a server, below the stage's address. A base may have a path.
pub(crate) fn base_path(at: usize) -> &'static str {
    ["/main", "/second", "/third"][at]
}

/// What a server offers at first.
pub(crate) fn document(at: usize, url: &str, away_url: &str) -> Value {
    let endpoint = |url: &str| format!("{url}{}{INVOKE_PATH}", base_path(at));
    match at {
        MAIN => json!({
            "name": "rapcheck-main", "version": "main-1", "endpoint": endpoint(url), "tools": [tool(WORK), tool(WATCH)],
        }),
        SECOND => second(url, "second-1", &[FICKLE]),
        _ => json!({"name": "rapcheck-third", "endpoint": endpoint(away_url), "tools": [tool(AWAY)]}),
    }
}

/// What the second server offers in a version.
pub(crate) fn second(url: &str, version: &str, tools: &[&str]) -> Value {
    let tools: Vec<Value> = tools.iter().map(|name| tool(name)).collect();
    let endpoint = format!("{url}{}{INVOKE_PATH}", base_path(SECOND));
    json!({"name": "rapcheck-second", "version": version, "endpoint": endpoint, "tools": tools})
}

fn tool(name: &str) -> Value {
    let schema = json!({"type": "object", "properties": {MARK: {"type": "string"}}, "required": [MARK]});
    json!({"name": name, "description": format!("A tool of a conformance check: {name}."), "inputSchema": schema})
}

/// How an attempt to send a call is answered: at once with 200, unless a probe wants it otherwise.
#[derive(Debug, Clone)]
pub(crate) enum Acknowledgement {
    /// With an empty body.
    Status(u16),
    /// 200, and the body is a result of the call.
    Result(String),
}

impl Default for Acknowledgement {
    fn default() -> Self {
        Acknowledgement::Status(200)
    }
}

impl Acknowledgement {
    pub(crate) fn reply(self, invocation: &Value) -> Reply {
        match self {
            Acknowledgement::Status(status) => Reply::status(status),
            Acknowledgement::Result(text) => {
                Reply::json(&with(message("tool_result", invocation), json!({"text": text})))
            }
        }
    }
}

/// The fields that every message about a call has. `call_id` is echoed where it was given.
fn message(kind: &str, invocation: &Value) -> Value {
    let mut message = json!({"type": kind, "group_id": invocation["group_id"], "id": invocation["id"]});
    if let Some(id) = invocation.get("call_id").filter(|id| !id.is_null()) {
        message["call_id"] = id.clone();
    }
    message
}

/// How the servers take notifications about a thread.
#[derive(Debug, Clone, Default)]
pub(crate) enum Conduct {
    /// 200 at once.
    #[default]
    Good,
    /// An error, with a body that means nothing.
    Fails,
    /// 200 once the gate is open.
    Holds(Gate),
}

impl Conduct {
    pub(crate) fn answer(self) -> (Reply, Option<Gate>) {
        match self {
            Conduct::Good => (Reply::status(200), None),
            Conduct::Fails => {
                let body = json!({"type": "tool_result", "text": "of no meaning here"});
                (Reply { status: 500, ..Reply::json(&body) }, None)
            }
            Conduct::Holds(gate) => (Reply::status(200), Some(gate)),
        }
    }
}

/// An invocation, and the voice of its tool.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) asked: Arc<Asked>,
    pub(crate) http: Client,
    pub(crate) pace: Pace,
    pub(crate) notes: Notes,
}

/// What was said in a scene, and when, for the report.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Vec<(Instant, Exchange)>>>);

impl Notes {
    pub(crate) fn add(&self, exchange: Exchange) {
        self.all().push((Instant::now(), exchange));
    }

    pub(crate) fn all(&self) -> MutexGuard<'_, Vec<(Instant, Exchange)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of a callback.
#[derive(Debug)]
pub(crate) struct Posted {
    /// Nothing if there was no answer.
    pub(crate) status: Option<u16>,
    /// Whether an answer was waited for in vain, and nobody hung up.
    pub(crate) timed_out: bool,
    pub(crate) exchange: Exchange,
}

impl Posted {
    pub(crate) fn is_refused(&self) -> bool {
        self.status.is_some_and(|status| (400..500).contains(&status))
    }
}

impl Call {
    pub(crate) fn id(&self) -> &str {
        self.asked.field("id")
    }

    pub(crate) fn thread(&self) -> &str {
        self.asked.field("group_id")
    }

    pub(crate) fn url(&self) -> &str {
        self.asked.field("callback_url")
    }

    pub(crate) fn operation(&self) -> &str {
        self.asked.field("operation")
    }

    /// What tells this call from all others of the run, whatever its id.
    pub(crate) fn mark(&self) -> &str {
        self.asked.mark()
    }

    /// A message about this call, still without what it says.
    pub(crate) fn message(&self, kind: &str) -> Value {
        message(kind, &self.asked.body)
    }

    pub(crate) fn result(&self, text: &str) -> Value {
        with(self.message("tool_result"), json!({"text": text}))
    }

    pub(crate) fn confirmation(&self, text: &str) -> Value {
        with(self.result(text), json!({"subscription": true}))
    }

    /// An event that is handled in a thread of its own.
    pub(crate) fn event(&self, text: &str) -> Value {
        json!({"type": "subscription_event", "group_id": self.thread(), "tool_call_id": self.id(), "text": text})
    }

    /// An event that is handled in the thread itself.
    pub(crate) fn inline(&self, text: &str) -> Value {
        with(self.event(text), json!({"associative": true}))
    }

    /// Posts as a tool does: what is answered 5xx, or not at all, is sent again.
    pub(crate) async fn says(&self, body: &Value) -> Result<Posted, Verdict> {
        let began = Instant::now();
        loop {
            let posted = self.post(body).await?;
            let passing = posted.status.is_none_or(|status| status >= 500);
            if !passing || began.elapsed() > self.pace.patience {
                return Ok(posted);
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Posts what has to be accepted.
    pub(crate) async fn insists(&self, body: &Value) -> Result<Posted, Verdict> {
        let posted = self.says(body).await?;
        match posted.status {
            Some(200..300) => Ok(posted),
            status => {
                let kind = body["type"].as_str().unwrap_or_default();
                let status = status.map_or_else(|| "not at all".into(), |status| status.to_string());
                let what = format!("a {kind} was answered {status} instead of 200");
                Err(Verdict::fail(what, vec![self.asked.exchange(), posted.exchange]))
            }
        }
    }

    /// The same, and the answer has to be 200 and nothing else.
    pub(crate) async fn insists_on_200(&self, body: &Value) -> Result<(), Verdict> {
        let posted = self.insists(body).await?;
        match posted.status {
            Some(200) => Ok(()),
            _ => Err(Verdict::fail("what was received was not answered 200", vec![posted.exchange])),
        }
    }

    pub(crate) async fn returns(&self, text: &str) -> Result<(), Verdict> {
        self.insists(&self.result(text)).await.map(|_| ())
    }

    pub(crate) async fn confirms(&self, text: &str) -> Result<(), Verdict> {
        self.insists(&self.confirmation(text)).await.map(|_| ())
    }

    pub(crate) async fn post(&self, body: &Value) -> Result<Posted, Verdict> {
        self.noted(post(&self.http, self.url(), None, body.to_string().into()).await)
    }

    /// Posts anything at all.
    pub(crate) async fn post_raw(&self, kind: &'static str, body: Bytes) -> Result<Posted, Verdict> {
        self.noted(post(&self.http, self.url(), Some(kind), body).await)
    }

    fn noted(&self, posted: Result<Posted, Verdict>) -> Result<Posted, Verdict> {
        if let Ok(posted) = &posted {
            self.notes.add(posted.exchange.clone());
        }
        posted
    }
}

/// POSTs to a callback URL, which no report shows.
pub(crate) async fn post(
    http: &Client,
    url: &str,
    kind: Option<&'static str>,
    body: Bytes,
) -> Result<Posted, Verdict> {
    let url = Url::parse(url)
        .map_err(|_| Verdict::fail("an invocation has no callback_url that can be used", Vec::new()))?;
    let kind = kind.map(|kind| (http::header::CONTENT_TYPE, HeaderValue::from_static(kind)));
    let headers: Vec<(HeaderName, HeaderValue)> = kind.into_iter().collect();
    let head = "POST (its callback URL)";
    let shown = Shown::new(head, &body[..body.len().min(SHOWN_BYTES)]);
    let sent = http.post_json(&url, &headers, body).await;
    let timed_out = matches!(sent, Err(client::Error::TimedOut));
    let (status, answer) = match sent {
        Ok(reply) => (Some(reply.status), Shown::new(reply.status.to_string(), &reply.body)),
        Err(client::Error::Forbidden(why)) => {
            return Err(Verdict::fail(format!("the callback_url can not be used: {why}"), Vec::new()));
        }
        Err(error) => (None, Shown::head(error.to_string())),
    };
    Ok(Posted { status, timed_out, exchange: Exchange::new(shown, answer) })
}

/// The same with other fields.
pub(crate) fn with(mut body: Value, more: Value) -> Value {
    if let (Some(fields), Value::Object(more)) = (body.as_object_mut(), more) {
        fields.extend(more);
    }
    body
}
