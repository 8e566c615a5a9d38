//! Conversions from rows and heads to the types of the client API.

use std::collections::HashMap;
use std::time::Duration;

use rap_agent::{Arguments, Head, Pause, Phase, Seq, Speaker};
use rap_api::{
    Call, Content, Cost, Entry, Item, ListedCall, ListedSubscription, Node, OpenCall, Question, QuestionKind,
    Sender, ServerHealth, StatusEvent, Subscription, Thread, Time, Timer, Tool, ToolServer, Tools, Usage,
    UsualDuration, View,
};
use rap_protocol::{Body, CallId, ThreadId, Timestamp};
use serde_json::{Value, json};

use crate::display;
use crate::store::{self, CallRow, InboxItem, StoredQuestion, SubscriptionRow, ThreadRow, TimerRow, ViewRow};
use crate::toolsets::{ServerTools, SessionTools, Toolsets, UsualDurations};

/// Size at which a page of tool servers ends, in bytes.
const TOOLS_BYTES: usize = 1024 * 1024;

pub(super) fn time(at: Timestamp) -> Time {
    Time::from_millis(at.0)
}

pub(super) fn node(node: store::Node) -> Node {
    let store::Node { id, url, started_at, seen_at, activity } = node;
    let (started_at, seen_at) = (time(started_at), time(seen_at));
    Node { id, url, started_at, seen_at, asking: activity.asking as u64, invoking: activity.invoking as u64 }
}

fn id(id: &ThreadId) -> String {
    id.as_str().to_owned()
}

fn call_id(id: &CallId) -> String {
    id.as_str().to_owned()
}

impl From<&ThreadRow> for Thread {
    fn from(row: &ThreadRow) -> Thread {
        let ThreadRow { thread, head, .. } = row;
        let subscribed = |held: &rap_agent::Subscription| Subscription {
            call_id: call_id(&held.id),
            tool: held.name.clone(),
            since: time(held.since),
        };
        Thread {
            id: id(&thread.id),
            parent: row.parent_id.as_ref().map(id),
            root: id(&row.root_id),
            forked_from: row.forked_from.as_ref().map(id),
            agent: thread.agent.clone(),
            title: thread.title.clone().or_else(|| head.title().map(str::to_owned)),
            user_id: thread.user_id.as_ref().map(|user| user.as_str().to_owned()),
            status: head.status(),
            why: failure_reason(head).map(str::to_owned),
            retry_at: retry_at(head),
            waiting_on: head.open_calls().map(open_call).collect(),
            subscriptions: head.subscriptions().iter().map(subscribed).collect(),
            children: head.children().count(),
            held: head.held().inputs + head.queued().inputs,
            turn: head.turn(),
            usage: usage(head.usage()),
            created_at: time(thread.created_at),
            updated_at: time(row.updated_at),
        }
    }
}

pub(super) fn usage(usage: rap_agent::Usage) -> Usage {
    let rap_agent::Usage { input, output, cached, cost, .. } = usage;
    Usage { input, output, cached, cost: Cost::from_nanos(cost) }
}

/// Returns a thread with the display texts of its open calls, for tools that provide them.
pub(super) fn thread_with_displays(row: &ThreadRow, displays: &HashMap<CallId, String>) -> Thread {
    let mut thread = Thread::from(row);
    for (open, call) in thread.waiting_on.iter_mut().zip(row.head.open_calls()) {
        open.display = displays.get(&call.id).cloned();
    }
    thread
}

/// Adds the usual durations of the open calls of a thread.
pub(super) fn add_usual_durations(
    thread: &mut Thread,
    row: &ThreadRow,
    known: &UsualDurations,
    now: Timestamp,
) {
    for (open, call) in thread.waiting_on.iter_mut().zip(row.head.open_calls()) {
        (open.usually, open.overdue) =
            usual_duration(known, (&call.server.0, &call.name), now.since(call.since));
    }
}

/// Returns the usual duration of a call to this server and tool, and whether the elapsed time is far beyond it.
pub(super) fn usual_duration(
    known: &UsualDurations,
    (server, tool): (&str, &str),
    elapsed: Duration,
) -> (Option<UsualDuration>, bool) {
    let expected = known.of(server, tool);
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let usually =
        expected.map(|expected| UsualDuration { min_ms: millis(expected.min), max_ms: millis(expected.max) });
    (usually, expected.is_some_and(|expected| expected.is_far_exceeded_by(elapsed)))
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
        Phase::Failed { retry_at, .. } => retry_at.map(time),
        Phase::Paused(Pause { until, .. }) => until.map(time),
        _ => None,
    }
}

pub(super) fn status_event(head: &Head) -> StatusEvent {
    StatusEvent {
        status: head.status(),
        turn: head.turn(),
        held: head.held().inputs + head.queued().inputs,
        children: head.children().count(),
        why: failure_reason(head).map(str::to_owned),
        retry_at: retry_at(head),
    }
}

pub(super) fn open_call(call: &rap_agent::OpenCall) -> OpenCall {
    OpenCall {
        call_id: call_id(&call.id),
        tool: call.name.clone(),
        since: time(call.since),
        until: call.timer().map(time),
        needs_approval: call.unapproved,
        problem: call.problem.as_ref().map(|problem| format!("refused ({})", problem.why)),
        display: None,
        usually: None,
        overdue: false,
    }
}

pub(super) fn entry((seq, entry): (Seq, rap_agent::Entry)) -> Entry {
    let item = match entry.item {
        rap_agent::Item::User { text, content, from } => {
            let content = content.iter().map(|item| json!(item)).collect();
            Item::User { text, content, from: sender(from) }
        }
        rap_agent::Item::Assistant { text, calls, usage: used, .. } => {
            Item::Assistant { text, calls: calls.into_iter().map(call).collect(), usage: used.map(usage) }
        }
        rap_agent::Item::Result { call_id: id, content, display, synthetic } => {
            let content = match content {
                Body::Text(text) => Content::Text(text),
                Body::Content(items) => Content::Items(items.iter().map(|item| json!(item)).collect()),
            };
            let display = display.iter().map(|segment| json!(segment)).collect();
            Item::Result { call_id: call_id(&id), content, display, synthetic }
        }
        rap_agent::Item::Summary { text, covers } => Item::Summary { text, covers },
        rap_agent::Item::Notice { text } => Item::Notice { text },
    };
    Entry { seq, at: time(entry.at), item }
}

/// Returns the sender of a message, unless it is the user.
fn sender(speaker: Speaker) -> Option<Sender> {
    match speaker {
        Speaker::User => None,
        Speaker::Parent => Some(Sender::Parent),
        Speaker::Runtime => Some(Sender::Runtime),
    }
}

fn call(call: rap_agent::CallEntry) -> Call {
    let synthetic = call.arguments.is_synthetic();
    let arguments = match call.arguments {
        Arguments::Given(arguments) => json!(arguments),
        Arguments::Unusable(text) => json!(text),
        Arguments::Synthetic { kind, arguments, .. } => {
            json!(rap_agent::texts::with_kind(arguments.unwrap_or_default(), kind))
        }
    };
    let display = call.display.unwrap_or_else(|| display::plain_text(&call.name, &arguments));
    let model_id = call.model_id.as_ref().map(call_id);
    Call { id: call_id(&call.id), model_id, name: call.name, arguments, display, synthetic }
}

impl From<CallRow> for ListedCall {
    fn from(row: CallRow) -> ListedCall {
        let needs_approval = row.needs_approval();
        ListedCall {
            thread_id: id(&row.thread),
            call_id: call_id(&row.call),
            tool: row.tool,
            server: row.server,
            since: time(row.since),
            until: row.until.map(time),
            needs_approval,
            acknowledged_at: row.acknowledged_at.map(time),
            next_attempt_at: row.next_attempt_at.map(time),
            attempts: row.attempts,
            last_attempt: row.outcome,
            usually: None,
            overdue: false,
        }
    }
}

impl From<SubscriptionRow> for ListedSubscription {
    fn from(row: SubscriptionRow) -> ListedSubscription {
        let SubscriptionRow { thread, call, tool, server, since, waiting, events } = row;
        ListedSubscription {
            thread_id: id(&thread),
            call_id: call_id(&call),
            tool,
            server,
            since: time(since),
            waiting,
            last_event_at: events.map(|events| time(events.last)),
            events_per_hour: events.and_then(|events| events.per_hour()),
        }
    }
}

impl From<TimerRow> for Timer {
    fn from(row: TimerRow) -> Timer {
        let TimerRow { thread, call, tool, kind, at, .. } = row;
        Timer { thread_id: id(&thread), call_id: call.as_ref().map(call_id), tool, kind, at: time(at) }
    }
}

/// The response URL of a choice is not exposed, because the runtime itself posts to it.
impl From<InboxItem> for Question {
    fn from(item: InboxItem) -> Question {
        let kind = match item.question {
            StoredQuestion::Choice { prompt, choices, default, .. } => {
                QuestionKind::Choice { prompt, choices, default }
            }
            StoredQuestion::SignIn { auth_url } => QuestionKind::SignIn { auth_url },
        };
        let InboxItem { thread, call, tool, asked_at, arguments, .. } = item;
        let (thread_id, call_id) = (id(&thread), call_id(&call));
        Question { thread_id, call_id, tool, asked_at: time(asked_at), arguments, kind }
    }
}

impl From<ViewRow> for View {
    fn from(row: ViewRow) -> View {
        View { view_type: row.key.view_type, server: row.key.server, content: row.content, at: time(row.at) }
    }
}

/// Returns a page of the tool servers, beginning after the one with the URL `after`. It ends at a size of about 1 MiB.
pub(super) fn tools_page(
    toolsets: &Toolsets,
    tools: &SessionTools,
    after: Option<&str>,
    now: Timestamp,
) -> Tools {
    let first = after.map_or(Some(0), |after| {
        tools.servers.iter().position(|server| server.url == after).map(|last| last + 1)
    });
    let (mut servers, mut bytes) = (Vec::new(), 0);
    for server in tools.servers.iter().skip(first.unwrap_or(usize::MAX)) {
        if bytes >= TOOLS_BYTES {
            let next_cursor = servers.last().map(|last: &ToolServer| last.url.clone());
            return Tools { servers, next_cursor };
        }
        let described =
            ToolServer { health: Some(health(toolsets, &server.url, now)), ..tool_server(tools, server) };
        bytes += json!(described).to_string().len();
        servers.push(described);
    }
    Tools { servers, next_cursor: None }
}

fn tool_server(tools: &SessionTools, server: &ServerTools) -> ToolServer {
    let offered = |tool: &&rap_protocol::Tool| tools.find(tool.name.as_str()).is_some();
    let toolset = server.toolset.as_deref();
    let all = toolset.iter().flat_map(|toolset| &toolset.tools);
    ToolServer {
        url: server.url.clone(),
        name: toolset.map(|toolset| toolset.name.clone()),
        version: toolset.and_then(|toolset| toolset.version.clone()),
        tools: all.filter(offered).map(described_tool).collect(),
        errors: server.errors.clone(),
        health: None,
    }
}

fn health(toolsets: &Toolsets, server: &str, now: Timestamp) -> ServerHealth {
    let (state, outcomes) = toolsets.health(server);
    let (failed_at, failure) = outcomes.failure.unzip();
    ServerHealth {
        state,
        last_success_at: outcomes.success_at.map(time),
        last_failure_at: failed_at.map(time),
        last_failure: failure,
        next_attempt_at: outcomes.retry_at.filter(|at| *at > now).map(time),
    }
}

fn described_tool(tool: &rap_protocol::Tool) -> Tool {
    let annotations = match json!(tool.annotations) {
        Value::Object(annotations) => annotations,
        _ => serde_json::Map::new(),
    };
    Tool {
        name: tool.name.as_str().to_owned(),
        description: tool.description.clone(),
        input_schema: json!(tool.input_schema),
        annotations,
        display_script: tool.display_script.clone(),
    }
}
