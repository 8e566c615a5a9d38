//! How threads, entries and what agents wait on look in the API.

use std::collections::HashMap;

use rap_agent::{Arguments, Entry, Head, Item, OpenCall, Phase, Seq, Speaker};
use rap_protocol::{Body, CallId, Timestamp, Tool};
use serde_json::{Value, json};

use crate::display;
use crate::store::Asked;
use crate::store::{CallRow, InboxItem, SubscriptionRow, ThreadRow, TimerRow, ViewRow};
use crate::toolsets::SessionTools;

fn time(at: Timestamp) -> String {
    at.to_rfc3339()
}

pub(super) fn thread(row: &ThreadRow) -> Value {
    let ThreadRow { thread, head, .. } = row;
    let waiting_on: Vec<Value> = head.open_calls().map(waiting).collect();
    let subscriptions: Vec<Value> = head
        .subscriptions
        .iter()
        .map(|held| json!({"call_id": held.id, "tool": held.name, "since": time(held.since)}))
        .collect();
    json!({
        "id": thread.id,
        "parent": row.parent_id,
        "root": row.root_id,
        "agent": thread.agent,
        "title": thread.title,
        "user_id": thread.user_id,
        "status": head.status(),
        "why": why(head),
        "retry_at": retry_at(head),
        "waiting_on": waiting_on,
        "subscriptions": subscriptions,
        "children": head.children.len(),
        "held": head.held.inputs + head.queued.inputs,
        "turn": head.turn,
        "usage": head.usage,
        "created_at": time(thread.created_at),
        "updated_at": time(row.updated_at),
    })
}

/// The same with what people see of its open calls, where their tools have said how to show them.
pub(super) fn thread_with(row: &ThreadRow, displays: &HashMap<CallId, String>) -> Value {
    let mut thread = thread(row);
    for (waiting, call) in
        thread["waiting_on"].as_array_mut().into_iter().flatten().zip(row.head.open_calls())
    {
        waiting["display"] = json!(displays.get(&call.id));
    }
    thread
}

/// Why a thread has failed or is paused.
pub(super) fn why(head: &Head) -> Option<&str> {
    match &head.phase {
        Phase::Failed { why, .. } | Phase::Paused { why } => Some(why),
        _ => None,
    }
}

/// When a failed thread asks again by itself.
pub(super) fn retry_at(head: &Head) -> Option<String> {
    match &head.phase {
        Phase::Failed { retry_at, .. } => retry_at.map(time),
        _ => None,
    }
}

pub(super) fn waiting(call: &OpenCall) -> Value {
    json!({
        "call_id": call.id,
        "tool": call.name,
        "since": time(call.since),
        "until": call.until.map(time),
    })
}

pub(super) fn entry(seq: Seq, entry: Entry) -> Value {
    let mut value = match entry.item {
        Item::User { text, from: Speaker::User } => json!({"kind": "user", "text": text}),
        Item::User { text, from } => json!({"kind": "user", "text": text, "from": from}),
        Item::Assistant { text, calls, .. } => {
            let calls: Vec<Value> = calls.into_iter().map(call).collect();
            json!({"kind": "assistant", "text": text, "calls": calls})
        }
        Item::Result { call_id, content, display, synthetic } => {
            let content = match content {
                Body::Text(text) => json!(text),
                Body::Content(items) => json!(items),
            };
            json!({
                "kind": "result",
                "call_id": call_id,
                "content": content,
                "display": display,
                "synthetic": synthetic,
            })
        }
        Item::Notice { text } => json!({"kind": "notice", "text": text}),
    };
    value["seq"] = json!(seq);
    value["at"] = json!(time(entry.at));
    value
}

fn call(call: rap_agent::CallEntry) -> Value {
    let synthetic = call.arguments.is_synthetic();
    let arguments = match call.arguments {
        Arguments::Given(arguments) => json!(arguments),
        Arguments::Unusable(text) => json!(text),
        Arguments::Echo { kind, arguments, .. } => {
            json!(rap_agent::words::with_kind(arguments.unwrap_or_default(), kind))
        }
    };
    let display = call.display.unwrap_or_else(|| display::plainly(&call.name, &arguments));
    json!({
        "id": call.id,
        "name": call.name,
        "arguments": arguments,
        "display": display,
        "synthetic": synthetic,
    })
}

pub(super) fn open_call(row: &CallRow) -> Value {
    json!({
        "thread_id": row.thread,
        "call_id": row.call,
        "tool": row.tool,
        "server": row.server,
        "since": time(row.since),
        "until": row.until.map(time),
        "acknowledged_at": row.acknowledged_at.map(time),
        "attempts": row.attempts,
        "last_attempt": row.outcome,
    })
}

pub(super) fn subscription(row: &SubscriptionRow) -> Value {
    json!({
        "thread_id": row.thread,
        "call_id": row.call,
        "tool": row.tool,
        "server": row.server,
        "since": time(row.since),
        "waiting": row.waiting,
    })
}

pub(super) fn timer(row: &TimerRow) -> Value {
    json!({
        "thread_id": row.thread,
        "call_id": row.call,
        "tool": row.tool,
        "kind": row.kind,
        "at": time(row.at),
    })
}

/// The URL for an answer is ours to use; the one to sign in is for the person.
pub(super) fn inbox_item(item: &InboxItem) -> Value {
    let mut value = match &item.question {
        Asked::Choice { prompt, choices, default, .. } => {
            json!({"kind": "choice", "prompt": prompt, "choices": choices, "default": default})
        }
        Asked::SignIn { auth_url } => json!({"kind": "oauth", "auth_url": auth_url}),
    };
    value["thread_id"] = json!(item.thread);
    value["call_id"] = json!(item.call);
    value["tool"] = json!(item.tool);
    value["asked_at"] = json!(time(item.asked_at));
    value
}

pub(super) fn view(row: &ViewRow) -> Value {
    json!({"view_type": row.view_type, "server": row.server, "content": row.content, "at": time(row.at)})
}

pub(super) fn tools(tools: &SessionTools) -> Value {
    let servers: Vec<Value> = tools
        .servers
        .iter()
        .map(|server| {
            let toolset = server.toolset.as_deref();
            let offered = |tool: &&Tool| tools.find(tool.name.as_str()).is_some();
            let offered: Vec<&Tool> =
                toolset.iter().flat_map(|toolset| &toolset.tools).filter(offered).collect();
            json!({
                "url": server.url,
                "name": toolset.map(|toolset| &toolset.name),
                "version": toolset.and_then(|toolset| toolset.version.as_ref()),
                "tools": offered,
                "errors": server.errors,
            })
        })
        .collect();
    json!({"servers": servers})
}
