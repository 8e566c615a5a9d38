//! The peers of the runtime, which survive its crashes: clients and tool servers, and their requests.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::OnBusy;
use rap_protocol::{Body, CallId, Content, ThreadId, Timestamp};
use serde_json::{Value, json};

use super::reference::ThreadIndex;

/// Identifies one input. Its text begins with the tag, so the input can be found in histories and held rows.
pub(super) type Tag = u64;

pub(super) fn tag_text(tag: Tag) -> String {
    format!("w{tag}")
}

/// Returns the tag that a text begins with.
pub(super) fn tag_of(text: &str) -> Option<Tag> {
    let digits = text.strip_prefix('w')?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// Returns the first text of a body.
pub(super) fn text_in(body: &Body) -> &str {
    match body {
        Body::Text(text) => text,
        Body::Content(items) => match items.first() {
            Some(Content::Text { text }) => text,
            _ => "",
        },
    }
}

#[derive(Default)]
pub(super) struct Peers {
    /// Requests without a final response, by number.
    pub(super) requests: BTreeMap<u64, Request>,
    /// Requests that the runtime is handling now.
    pub(super) in_flight: BTreeSet<u64>,
    /// Requests to send, ordered by time.
    pub(super) send_queue: BTreeSet<(Timestamp, u64)>,
    /// Callbacks with a final response. The network may deliver them again.
    pub(super) answered_callbacks: Vec<Request>,
    /// Invocations that a tool server has accepted.
    pub(super) accepted: BTreeMap<CallId, ToolCall>,
    pub(super) servers: Vec<Server>,
    last_tag: Tag,
    last_number: u64,
}

pub(super) struct Server {
    pub(super) url: String,
    /// The version of its toolset.
    pub(super) version: u64,
}

/// A call that a tool server has accepted.
#[derive(Debug, Clone)]
pub(super) struct ToolCall {
    pub(super) thread: ThreadId,
    pub(super) index: ThreadIndex,
    pub(super) callback: String,
    /// True if the server has lost it.
    pub(super) lost: bool,
    pub(super) results: u32,
    /// Tag of its result, and whether the result starts a subscription. A repeated invocation gives the same result.
    pub(super) result: Option<(Tag, bool)>,
}

/// A request to the runtime.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) path: String,
    pub(super) idempotency_key: Option<u64>,
    pub(super) body: Value,
    /// Tag of the input in the request, if the input can be found later.
    pub(super) tag: Option<Tag>,
    pub(super) kind: RequestKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// A client API request.
    Client,
    /// A callback of a tool server.
    Callback,
    /// An event without an id. Sent again, it counts as another event.
    EventWithoutId,
}

impl Peers {
    pub(super) fn next_tag(&mut self) -> Tag {
        self.last_tag += 1;
        self.last_tag
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Schedules a request.
    pub(super) fn send(&mut self, request: Request, at: Timestamp) {
        let number = self.next_number();
        self.requests.insert(number, request);
        self.send_queue.insert((at, number));
    }

    /// Schedules a request again that had no response.
    pub(super) fn send_again(&mut self, number: u64, at: Timestamp) {
        self.in_flight.remove(&number);
        if let Some(Request { kind: RequestKind::EventWithoutId, tag, body, .. }) =
            self.requests.get_mut(&number)
        {
            self.last_tag += 1;
            *tag = Some(self.last_tag);
            body["text"] = tag_text(self.last_tag).into();
        }
        self.send_queue.insert((at, number));
    }
}

impl Request {
    pub(super) fn create(thread: &str, agent: &str, tag: Option<Tag>, idempotency_key: u64) -> Request {
        let mut body = json!({"id": thread, "agent": agent});
        if let Some(tag) = tag {
            body["message"] = tag_text(tag).into();
        }
        Request {
            path: "/v1/threads".into(),
            idempotency_key: Some(idempotency_key),
            body,
            tag,
            kind: RequestKind::Client,
        }
    }

    pub(super) fn message(thread: &ThreadId, tag: Tag, on_busy: OnBusy, idempotency_key: u64) -> Request {
        let on_busy = match on_busy {
            OnBusy::Join => "join",
            OnBusy::Interrupt => "interrupt",
            OnBusy::Enqueue => "enqueue",
            OnBusy::Reject => "reject",
        };
        Request {
            path: format!("/v1/threads/{thread}/messages"),
            idempotency_key: Some(idempotency_key),
            body: json!({"text": tag_text(tag), "on_busy": on_busy}),
            tag: Some(tag),
            kind: RequestKind::Client,
        }
    }

    /// A client request about a thread, without an idempotency key.
    pub(super) fn command(thread: &ThreadId, command: &str, body: Value) -> Request {
        let path = format!("/v1/threads/{thread}/{command}");
        Request { path, idempotency_key: None, body, tag: None, kind: RequestKind::Client }
    }

    pub(super) fn fork(thread: &ThreadId, at: Option<u64>, idempotency_key: u64) -> Request {
        let body = at.map_or_else(|| json!({}), |at| json!({"at": at}));
        Request {
            path: format!("/v1/threads/{thread}/fork"),
            idempotency_key: Some(idempotency_key),
            body,
            tag: None,
            kind: RequestKind::Client,
        }
    }

    pub(super) fn callback(callback: &str, body: Value, tag: Option<Tag>, kind: RequestKind) -> Request {
        Request { path: callback.to_owned(), idempotency_key: None, body, tag, kind }
    }
}

impl ToolCall {
    pub(super) fn result(&self, call: &CallId, tag: Tag, subscription: bool) -> Request {
        let mut body = json!({"type": "tool_result", "group_id": self.thread, "id": call});
        // Some results are content items instead of a text.
        if tag.is_multiple_of(7) {
            body["content"] = json!([{"type": "text", "text": tag_text(tag)}]);
        } else {
            body["text"] = tag_text(tag).into();
        }
        if subscription {
            body["subscription"] = true.into();
        }
        Request::callback(&self.callback, body, Some(tag), RequestKind::Callback)
    }

    pub(super) fn event(&self, call: &CallId, event: &SimEvent) -> Request {
        let mut body = json!({
            "type": "subscription_event", "group_id": self.thread, "tool_call_id": call,
            "text": tag_text(event.tag),
        });
        if event.associative {
            body["associative"] = true.into();
        }
        if event.is_final {
            body["final"] = true.into();
        }
        if let Some(id) = event.id {
            body["event_id"] = format!("e{id}").into();
        }
        let kind = if event.id.is_some() || event.is_final {
            RequestKind::Callback
        } else {
            RequestKind::EventWithoutId
        };
        Request::callback(&self.callback, body, Some(event.tag), kind)
    }

    pub(super) fn sign_in(&self, call: &CallId, number: u64) -> Request {
        let body = json!({
            "type": "oauth", "group_id": self.thread, "id": call, "auth_url": format!("https://example.com/{number}"),
        });
        Request::callback(&self.callback, body, None, RequestKind::Callback)
    }

    pub(super) fn choice(&self, call: &CallId, number: u64, server: &str) -> Request {
        let body = json!({
            "type": "user_choice", "group_id": self.thread, "id": call, "prompt": "Which?",
            "choices": ["this", "that"], "default": 1, "response_url": format!("{server}/answer/{number}"),
        });
        Request::callback(&self.callback, body, None, RequestKind::Callback)
    }

    pub(super) fn view(&self, number: u64) -> Request {
        let body = json!({
            "type": "view_update", "group_id": self.thread, "view_type": format!("v{}", number % 3), "content": number,
        });
        Request::callback(&self.callback, body, None, RequestKind::Callback)
    }

    /// A malformed callback.
    pub(super) fn malformed(&self) -> Request {
        Request::callback(&self.callback, json!({"type": "nonsense"}), None, RequestKind::Callback)
    }
}

/// An event of a simulated subscription.
pub(super) struct SimEvent {
    pub(super) id: Option<u64>,
    pub(super) tag: Tag,
    pub(super) associative: bool,
    pub(super) is_final: bool,
}
