//! How threads, entries and what agents wait on look in the API. `/openapi.json` describes these very types.

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

/// A time in UTC, as RFC 3339 has it.
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
    /// The thread that it came from.
    #[schemars(with = "Option<String>")]
    parent: Option<ThreadId>,
    /// The root of its session.
    #[schemars(with = "String")]
    root: ThreadId,
    /// The thread whose history it begins with, where it was forked.
    #[schemars(with = "Option<String>")]
    forked_from: Option<ThreadId>,
    agent: String,
    title: Option<String>,
    #[schemars(with = "Option<String>")]
    user_id: Option<rap_protocol::UserId>,
    #[schemars(schema_with = "status_schema")]
    status: Status,
    /// Why it has failed or is paused.
    why: Option<String>,
    /// When a failed one asks again by itself.
    retry_at: Option<Time>,
    /// Its open calls.
    waiting_on: Vec<WaitingOn>,
    /// Its active subscriptions.
    subscriptions: Vec<Subscribed>,
    /// How many of its children are at work.
    children: usize,
    /// How many inputs from outside wait.
    held: u32,
    /// How often the model was asked.
    turn: u64,
    /// What the answers of the model have cost, in tokens.
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
            why: why(head).map(str::to_owned),
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
    /// The same with what people see of its open calls, where their tools have said how to show them.
    pub(super) fn with(row: &ThreadRow, displays: &HashMap<CallId, String>) -> Thread {
        let mut thread = Thread::from(row);
        for waiting in &mut thread.waiting_on {
            waiting.display = displays.get(&waiting.call_id).cloned();
        }
        thread
    }
}

/// Why a thread has failed or is paused.
fn why(head: &Head) -> Option<&str> {
    match head.phase() {
        Phase::Failed { why, .. } | Phase::Paused(Pause { why, .. }) => Some(why),
        _ => None,
    }
}

/// When a failed thread asks again by itself.
fn retry_at(head: &Head) -> Option<Time> {
    match head.phase() {
        Phase::Failed { retry_at, .. } => retry_at.map(Time::from),
        Phase::Paused(Pause { until, .. }) => until.map(Time::from),
        _ => None,
    }
}

/// Tokens as [`Usage`] counts them.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "it describes a type of a crate that knows no schemas")]
struct Tokens {
    /// Read.
    input: u64,
    /// Written.
    output: u64,
    /// Read, but from the provider's cache.
    cached: u64,
}

/// A page of threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Threads {
    pub(super) threads: Vec<Thread>,
    /// Where the next page begins.
    pub(super) next_cursor: Option<String>,
}

/// The news of a thread on its stream.
#[derive(Serialize, PartialEq)]
pub(super) struct StatusNews {
    status: Status,
    turn: u64,
    held: u32,
    children: usize,
    why: Option<String>,
    retry_at: Option<Time>,
}

impl From<&Head> for StatusNews {
    fn from(head: &Head) -> StatusNews {
        StatusNews {
            status: head.status(),
            turn: head.turn(),
            held: head.held().inputs + head.queued().inputs,
            children: head.children().count(),
            why: why(head).map(str::to_owned),
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
    /// When it times out.
    until: Option<Time>,
    /// A callback of its tool that was refused, if nothing valid came since.
    problem: Option<String>,
    /// What people see of it.
    display: Option<String>,
}

impl From<&OpenCall> for WaitingOn {
    fn from(call: &OpenCall) -> WaitingOn {
        WaitingOn {
            call_id: call.id.clone(),
            tool: call.name.clone(),
            since: call.since.into(),
            until: call.until.map(Time::from),
            problem: call.problem.as_ref().map(|problem| format!("refused ({})", problem.why)),
            display: None,
        }
    }
}

/// An active subscription of a thread.
#[derive(Serialize, JsonSchema)]
struct Subscribed {
    /// The call that made it.
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

/// One item of a history.
#[derive(Serialize, JsonSchema)]
pub(super) struct Entry {
    /// Its place, counted from 1.
    seq: Seq,
    at: Time,
    #[serde(flatten)]
    item: Item,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Item {
    /// Something said to the model.
    User {
        text: String,
        /// Who said it, where it was not a user: `runtime` or `parent`.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<String>")]
        from: Option<Speaker>,
    },
    /// What the model said and called.
    Assistant { text: String, calls: Vec<Call> },
    /// The result of a call.
    Result {
        #[schemars(with = "String")]
        call_id: CallId,
        content: Content,
        /// What people see instead.
        #[schemars(with = "Vec<Value>")]
        display: Vec<Segment>,
        /// Whether the runtime made it, or made the call that it answers.
        synthetic: bool,
    },
    /// What was said so far, in short. The model sees it instead of the entries up to `covers`.
    Summary { text: String, covers: Seq },
    /// Something for people, which no model sees.
    Notice { text: String },
}

/// A text, or a list of texts and images.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Items(#[schemars(with = "Vec<Value>")] Vec<rap_protocol::Content>),
}

/// A call that the model makes.
#[derive(Serialize, JsonSchema)]
struct Call {
    #[schemars(with = "String")]
    id: CallId,
    /// The id that the model gave the call, if it gave one.
    #[schemars(with = "Option<String>")]
    model_id: Option<CallId>,
    name: String,
    /// An object, or the text that the model wrote instead of one.
    arguments: Value,
    /// What people see of it.
    display: String,
    /// Whether the runtime made it, to tell the model of an event or a late result.
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
            Arguments::Echo { kind, arguments, .. } => {
                json!(rap_agent::words::with_kind(arguments.unwrap_or_default(), kind))
            }
        };
        let display = call.display.unwrap_or_else(|| display::plainly(&call.name, &arguments));
        Call { id: call.id, model_id: call.call_id, name: call.name, arguments, display, synthetic }
    }
}

/// The open calls of all threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Calls {
    pub(super) calls: Vec<ListedCall>,
    /// Where the next page begins.
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
    /// The base URL of the tool's server.
    server: String,
    since: Time,
    /// When it times out.
    until: Option<Time>,
    /// When the tool's server took it.
    acknowledged_at: Option<Time>,
    /// How often it was sent in vain.
    attempts: u32,
    /// How the last of these ended.
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
            attempts: row.attempts,
            last_attempt: row.outcome,
        }
    }
}

/// The active subscriptions of all threads.
#[derive(Serialize, JsonSchema)]
pub(super) struct Subscriptions {
    pub(super) subscriptions: Vec<ListedSubscription>,
    /// Where the next page begins.
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
    /// The base URL of the tool's server.
    server: String,
    since: Time,
    /// How many of its events wait for a child.
    waiting: u64,
}

impl From<SubscriptionRow> for ListedSubscription {
    fn from(row: SubscriptionRow) -> ListedSubscription {
        let SubscriptionRow { thread, call, tool, server, since, waiting } = row;
        ListedSubscription { thread_id: thread, call_id: call, tool, server, since: since.into(), waiting }
    }
}

/// Everything that happens at a time by itself.
#[derive(Serialize, JsonSchema)]
pub(super) struct Timers {
    pub(super) timers: Vec<Timer>,
    /// Where the next page begins.
    pub(super) next_cursor: Option<String>,
}

/// Something that happens at a time by itself.
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

/// Every question that waits for a person.
#[derive(Serialize, JsonSchema)]
pub(super) struct Inbox {
    pub(super) items: Vec<Question>,
    /// Where the next page begins.
    pub(super) next_cursor: Option<String>,
}

/// A question that waits for a person.
#[derive(Serialize, JsonSchema)]
pub(super) struct Question {
    #[schemars(with = "String")]
    thread_id: ThreadId,
    #[schemars(with = "String")]
    call_id: CallId,
    tool: String,
    asked_at: Time,
    #[serde(flatten)]
    asked: Asked,
}

/// The URL for an answer is ours to use; the one to sign in is for the person.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Asked {
    /// One of some choices.
    Choice {
        prompt: String,
        choices: Vec<String>,
        /// Which one counts if the question is dismissed.
        default: usize,
    },
    /// To sign in.
    Oauth { auth_url: String },
}

impl From<InboxItem> for Question {
    fn from(item: InboxItem) -> Question {
        let asked = match item.question {
            store::StoredQuestion::Choice { prompt, choices, default, .. } => {
                Asked::Choice { prompt, choices, default }
            }
            store::StoredQuestion::SignIn { auth_url } => Asked::Oauth { auth_url },
        };
        let InboxItem { thread, call, tool, asked_at, .. } = item;
        Question { thread_id: thread, call_id: call, tool, asked_at: asked_at.into(), asked }
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
    /// The base URL of the server of the tool that shows it.
    server: String,
    content: Value,
    at: Time,
}

impl From<ViewRow> for View {
    fn from(row: ViewRow) -> View {
        View { view_type: row.view_type, server: row.server, content: row.content, at: row.at.into() }
    }
}

/// The tool servers, and what they offer.
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
    /// The tools that are offered to models, as the server describes them.
    #[schemars(with = "Vec<Value>")]
    tools: Vec<Tool>,
    /// What is wrong with the others.
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

/// A turn that a message began, or will be part of.
#[derive(Serialize, JsonSchema)]
pub(super) struct Turn {
    pub(super) turn: u64,
}

/// Nothing but that it was done.
#[derive(Serialize, JsonSchema)]
pub(super) struct Done {}

/// Why a request was not served.
#[derive(Serialize, JsonSchema)]
pub(super) struct Problem {
    pub(super) error: Reason,
}

/// A code that stays, and a sentence that says what to do.
#[derive(Serialize, JsonSchema)]
pub(super) struct Reason {
    pub(super) code: &'static str,
    pub(super) message: String,
}
