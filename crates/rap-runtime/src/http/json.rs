//! JSON types of the client API. `/openapi.json` is generated from them.

use std::borrow::Cow;
use std::collections::HashMap;

use rap_agent::{Arguments, Head, OpenCall, Pause, Phase, Seq, Speaker, Status, Usage};
use rap_protocol::{Body, CallId, Segment, ThreadId, Timestamp, Tool};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Value, json};

use crate::display;
use crate::store::{self, CallRow, InboxItem, SubscriptionRow, ThreadRow, TimerRow, ViewRow};
use crate::toolsets::SessionTools;

pub(super) fn status_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": Status::ALL.map(Status::as_str)})
}

/// A time in UTC in RFC 3339 format.
#[derive(Serialize, PartialEq)]
#[serde(transparent)]
pub(super) struct Time(String);

impl From<Timestamp> for Time {
    fn from(at: Timestamp) -> Time {
        Time(at.to_rfc3339())
    }
}

impl JsonSchema for Time {
    fn schema_name() -> Cow<'static, str> {
        "Time".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "date-time"})
    }
}

/// A thread.
#[derive(Serialize, JsonSchema)]
pub(super) struct Thread {
    #[schemars(with = "String")]
    id: ThreadId,
    /// Parent thread. Null for the root of a session.
    #[schemars(with = "Option<String>")]
    parent: Option<ThreadId>,
    /// Root thread of the session.
    #[schemars(with = "String")]
    root: ThreadId,
    /// Thread whose history a fork begins with.
    #[schemars(with = "Option<String>")]
    forked_from: Option<ThreadId>,
    agent: String,
    title: Option<String>,
    #[schemars(with = "Option<String>")]
    user_id: Option<rap_protocol::UserId>,
    #[schemars(schema_with = "status_schema")]
    status: Status,
    /// Reason why the thread has failed or is paused.
    why: Option<String>,
    /// Time at which a failed or paused thread continues automatically.
    retry_at: Option<Time>,
    /// Open calls.
    waiting_on: Vec<WaitingOn>,
    /// Active subscriptions.
    subscriptions: Vec<Subscribed>,
    /// Number of active child threads.
    children: usize,
    /// Number of inputs that wait because the thread is busy.
    held: u32,
    /// Number of the current turn.
    turn: u64,
    /// Tokens that the thread has used.
    #[schemars(with = "Tokens")]
    usage: Usage,
    created_at: Time,
    updated_at: Time,
}

impl From<&ThreadRow> for Thread {
    fn from(row: &ThreadRow) -> Thread {
        let ThreadRow { thread, head, .. } = row;
        let subscribed = |held: &rap_agent::Subscription| Subscribed {
            call_id: held.id.clone(),
            tool: held.name.clone(),
            since: held.since.into(),
        };
        Thread {
            id: thread.id.clone(),
            parent: row.parent_id.clone(),
            root: row.root_id.clone(),
            forked_from: row.forked_from.clone(),
            agent: thread.agent.clone(),
            title: thread.title.clone(),
            user_id: thread.user_id.clone(),
            status: head.status(),
            why: failure_reason(head).map(str::to_owned),
            retry_at: retry_at(head),
            waiting_on: head.open_calls().map(WaitingOn::from).collect(),
            subscriptions: head.subscriptions().iter().map(subscribed).collect(),
            children: head.children().count(),
            held: head.held().inputs + head.queued().inputs,
            turn: head.turn(),
            usage: head.usage(),
            created_at: thread.created_at.into(),
            updated_at: row.updated_at.into(),
        }
    }
}

impl Thread {
    /// Adds the display texts of the open calls, for tools that provide them.
    pub(super) fn with(row: &ThreadRow, displays: &HashMap<CallId, String>) -> Thread {
        let mut thread = Thread::from(row);
        for waiting in &mut thread.waiting_on {
            waiting.display = displays.get(&waiting.call_id).cloned();
        }
        thread
    }
}

/// Returns the reason why a thread has failed or is paused.
fn failure_reason(head: &Head) -> Option<&str> {
    match head.phase() {
        Phase::Failed { why, .. } | Phase::Paused(Pause { why, .. }) => Some(why),
        _ => None,
    }
}

/// Returns the time at which a failed or paused thread continues automatically.
fn retry_at(head: &Head) -> Option<Time> {
    match head.phase() {
        Phase::Failed { retry_at, .. } => retry_at.map(Time::from),
        Phase::Paused(Pause { until, .. }) => until.map(Time::from),
        _ => None,
    }
}

/// Number of tokens, as [`Usage`] counts them.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "describes `Usage`, whose crate does not depend on schemars")]
struct Tokens {
    /// Input tokens, including cached ones.
    input: u64,
    /// Output tokens.
    output: u64,
    /// Input tokens that were read from the provider's cache.
    cached: u64,
}

/// A page of threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Threads {
    pub(super) threads: Vec<Thread>,
    /// Cursor of the next page. Null on the last page.
    pub(super) next_cursor: Option<String>,
}

/// Data of a `status` event on the stream of a thread.
#[derive(Serialize, PartialEq)]
pub(super) struct StatusEvent {
    status: Status,
    turn: u64,
    held: u32,
    children: usize,
    why: Option<String>,
    retry_at: Option<Time>,
}

impl From<&Head> for StatusEvent {
    fn from(head: &Head) -> StatusEvent {
        StatusEvent {
            status: head.status(),
            turn: head.turn(),
            held: head.held().inputs + head.queued().inputs,
            children: head.children().count(),
            why: failure_reason(head).map(str::to_owned),
            retry_at: retry_at(head),
        }
    }
}

/// An open call of a thread.
#[derive(Serialize, JsonSchema)]
pub(super) struct WaitingOn {
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    since: Time,
    /// Time at which the call times out. Null if it never does.
    until: Option<Time>,
    /// Problem of the last callback, if it was refused and no valid one came since.
    problem: Option<String>,
    /// Display text for users, if the tool provides one.
    display: Option<String>,
}

impl From<&OpenCall> for WaitingOn {
    fn from(call: &OpenCall) -> WaitingOn {
        WaitingOn {
            call_id: call.id.clone(),
            tool: call.name.clone(),
            since: call.since.into(),
            until: call.timer().map(Time::from),
            problem: call.problem.as_ref().map(|problem| format!("refused ({})", problem.why)),
            display: None,
        }
    }
}

/// An active subscription of a thread.
#[derive(Serialize, JsonSchema)]
struct Subscribed {
    /// Call that created the subscription.
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    since: Time,
}

/// Entries of a history.
#[derive(Serialize, JsonSchema)]
pub(super) struct Entries {
    pub(super) entries: Vec<Entry>,
}

/// An entry of a history.
#[derive(Serialize, JsonSchema)]
pub(super) struct Entry {
    /// Sequence number in the thread, starting at 1.
    seq: Seq,
    at: Time,
    #[serde(flatten)]
    item: Item,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Item {
    /// A message to the model.
    User {
        text: String,
        /// Sender, if it is not the user: `runtime` or `parent`.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<String>")]
        from: Option<Speaker>,
    },
    /// An answer of the model, with its calls.
    Assistant { text: String, calls: Vec<Call> },
    /// The result of a call.
    Result {
        #[schemars(with = "String")]
        call_id: CallId,
        content: Content,
        /// Content for users, shown instead of `content`.
        #[schemars(with = "Vec<Value>")]
        display: Vec<Segment>,
        /// True if the runtime made the result or its call.
        synthetic: bool,
    },
    /// A summary. The model sees it instead of the entries up to `covers`.
    Summary { text: String, covers: Seq },
    /// A notice for users. The model does not see it.
    Notice { text: String },
}

/// A text, or a list of texts and images.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Items(#[schemars(with = "Vec<Value>")] Vec<rap_protocol::Content>),
}

/// A call of a tool.
#[derive(Serialize, JsonSchema)]
struct Call {
    #[schemars(with = "String")]
    id: CallId,
    /// Id that the model gave the call, if any.
    #[schemars(with = "Option<String>")]
    model_id: Option<CallId>,
    name: String,
    /// An object, or the model's text if it is not a JSON object.
    arguments: Value,
    /// Display text for users.
    display: String,
    /// True if the runtime made the call, to present an event or a late result to the model.
    synthetic: bool,
}

impl From<(Seq, rap_agent::Entry)> for Entry {
    fn from((seq, entry): (Seq, rap_agent::Entry)) -> Entry {
        let item = match entry.item {
            rap_agent::Item::User { text, from } => {
                Item::User { text, from: Some(from).filter(|from| *from != Speaker::User) }
            }
            rap_agent::Item::Assistant { text, calls, .. } => {
                Item::Assistant { text, calls: calls.into_iter().map(Call::from).collect() }
            }
            rap_agent::Item::Result { call_id, content, display, synthetic } => {
                let content = match content {
                    Body::Text(text) => Content::Text(text),
                    Body::Content(items) => Content::Items(items),
                };
                Item::Result { call_id, content, display, synthetic }
            }
            rap_agent::Item::Summary { text, covers } => Item::Summary { text, covers },
            rap_agent::Item::Notice { text } => Item::Notice { text },
        };
        Entry { seq, at: entry.at.into(), item }
    }
}

impl From<rap_agent::CallEntry> for Call {
    fn from(call: rap_agent::CallEntry) -> Call {
        let synthetic = call.arguments.is_synthetic();
        let arguments = match call.arguments {
            Arguments::Given(arguments) => json!(arguments),
            Arguments::Unusable(text) => json!(text),
            Arguments::Synthetic { kind, arguments, .. } => {
                json!(rap_agent::texts::with_kind(arguments.unwrap_or_default(), kind))
            }
        };
        let display = call.display.unwrap_or_else(|| display::plain_text(&call.name, &arguments));
        Call { id: call.id, model_id: call.call_id, name: call.name, arguments, display, synthetic }
    }
}

/// A page of the open calls of all threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Calls {
    pub(super) calls: Vec<ListedCall>,
    /// Cursor of the next page. Null on the last page.
    pub(super) next_cursor: Option<String>,
}

/// An open call.
#[derive(Serialize, JsonSchema)]
pub(super) struct ListedCall {
    #[schemars(with = "String")]
    thread_id: ThreadId,
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    /// Base URL of the tool server.
    server: String,
    since: Time,
    /// Time at which the call times out. Null if it never does.
    until: Option<Time>,
    /// Time at which the tool server accepted the call. Null if it has not yet.
    acknowledged_at: Option<Time>,
    /// Time of the next attempt to send the call. Null if the tool server has accepted it, if it is a tool of the runtime
    /// itself, or if it needs an approval first.
    next_attempt_at: Option<Time>,
    /// Number of failed attempts to send the call.
    attempts: u32,
    /// Outcome of the last failed attempt.
    last_attempt: Option<String>,
}

impl From<CallRow> for ListedCall {
    fn from(row: CallRow) -> ListedCall {
        ListedCall {
            thread_id: row.thread,
            call_id: row.call,
            tool: row.tool,
            server: row.server,
            since: row.since.into(),
            until: row.until.map(Time::from),
            acknowledged_at: row.acknowledged_at.map(Time::from),
            next_attempt_at: row.next_attempt_at.map(Time::from),
            attempts: row.attempts,
            last_attempt: row.outcome,
        }
    }
}

/// A page of the active subscriptions of all threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Subscriptions {
    pub(super) subscriptions: Vec<ListedSubscription>,
    /// Cursor of the next page. Null on the last page.
    pub(super) next_cursor: Option<String>,
}

/// An active subscription.
#[derive(Serialize, JsonSchema)]
pub(super) struct ListedSubscription {
    #[schemars(with = "String")]
    thread_id: ThreadId,
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    /// Base URL of the tool server.
    server: String,
    since: Time,
    /// Number of events that wait for a child thread.
    waiting: u64,
}

impl From<SubscriptionRow> for ListedSubscription {
    fn from(row: SubscriptionRow) -> ListedSubscription {
        let SubscriptionRow { thread, call, tool, server, since, waiting } = row;
        ListedSubscription { thread_id: thread, call_id: call, tool, server, since: since.into(), waiting }
    }
}

/// A page of timers, the next one first.
#[derive(Serialize, JsonSchema)]
pub(super) struct Timers {
    pub(super) timers: Vec<Timer>,
    /// Cursor of the next page. Null on the last page.
    pub(super) next_cursor: Option<String>,
}

/// A timer.
#[derive(Serialize, JsonSchema)]
pub(super) struct Timer {
    #[schemars(with = "String")]
    thread_id: ThreadId,
    #[schemars(with = "Option<String>")]
    call_id: Option<CallId>,
    tool: Option<String>,
    #[schemars(extend("enum" = ["timeout", "sleep", "schedule", "retry"]))]
    kind: &'static str,
    at: Time,
}

impl From<TimerRow> for Timer {
    fn from(row: TimerRow) -> Timer {
        let TimerRow { thread, call, tool, kind, at } = row;
        Timer { thread_id: thread, call_id: call, tool, kind, at: at.into() }
    }
}

/// A page of the questions that wait for a user.
#[derive(Serialize, JsonSchema)]
pub(super) struct Inbox {
    pub(super) items: Vec<Question>,
    /// Cursor of the next page. Null on the last page.
    pub(super) next_cursor: Option<String>,
}

/// A question that waits for a user.
#[derive(Serialize, JsonSchema)]
pub(super) struct Question {
    #[schemars(with = "String")]
    thread_id: ThreadId,
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    asked_at: Time,
    #[serde(flatten)]
    question: QuestionKind,
}

/// Kind of a question. The response URL of a choice is not exposed, because the runtime itself posts to it.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum QuestionKind {
    /// The user selects one of the choices.
    Choice {
        prompt: String,
        choices: Vec<String>,
        /// Index of the choice that is used if the question is dismissed.
        default: usize,
    },
    /// The user signs in at a URL.
    Oauth { auth_url: String },
}

impl From<InboxItem> for Question {
    fn from(item: InboxItem) -> Question {
        let question = match item.question {
            store::StoredQuestion::Choice { prompt, choices, default, .. } => {
                QuestionKind::Choice { prompt, choices, default }
            }
            store::StoredQuestion::SignIn { auth_url } => QuestionKind::Oauth { auth_url },
        };
        let InboxItem { thread, call, tool, asked_at, .. } = item;
        Question { thread_id: thread, call_id: call, tool, asked_at: asked_at.into(), question }
    }
}

/// The latest views of a thread.
#[derive(Serialize, JsonSchema)]
pub(super) struct Views {
    pub(super) views: Vec<View>,
}

/// The latest content of a view.
#[derive(Serialize, JsonSchema)]
pub(super) struct View {
    view_type: String,
    /// Base URL of the tool server that sent the view.
    server: String,
    content: Value,
    at: Time,
}

impl From<ViewRow> for View {
    fn from(row: ViewRow) -> View {
        View { view_type: row.view_type, server: row.server, content: row.content, at: row.at.into() }
    }
}

/// The tool servers and their tools.
#[derive(Serialize, JsonSchema)]
pub(super) struct Tools {
    servers: Vec<Server>,
}

/// A tool server.
#[derive(Serialize, JsonSchema)]
struct Server {
    url: String,
    name: Option<String>,
    version: Option<String>,
    /// Tools that are offered to models, as the server describes them.
    #[schemars(with = "Vec<Value>")]
    tools: Vec<Tool>,
    /// Reasons why the toolset or some of its tools are not offered.
    errors: Vec<String>,
}

impl From<&SessionTools> for Tools {
    fn from(tools: &SessionTools) -> Tools {
        let offered = |tool: &&Tool| tools.find(tool.name.as_str()).is_some();
        let servers = tools.servers.iter().map(|server| {
            let toolset = server.toolset.as_deref();
            let all = toolset.iter().flat_map(|toolset| &toolset.tools);
            Server {
                url: server.url.clone(),
                name: toolset.map(|toolset| toolset.name.clone()),
                version: toolset.and_then(|toolset| toolset.version.clone()),
                tools: all.filter(offered).cloned().collect(),
                errors: server.errors.clone(),
            }
        });
        Tools { servers: servers.collect() }
    }
}

/// The turn that a message started or will be part of.
#[derive(Serialize, JsonSchema)]
pub(super) struct Turn {
    pub(super) turn: u64,
}

/// An empty object: the request was accepted.
#[derive(Serialize, JsonSchema)]
pub(super) struct Done {}

/// An error response.
#[derive(Serialize, JsonSchema)]
pub(super) struct Problem {
    pub(super) error: Reason,
}

/// A stable error code, and a sentence that tells the reader what to do.
#[derive(Serialize, JsonSchema)]
pub(super) struct Reason {
    pub(super) code: &'static str,
    pub(super) message: String,
}
