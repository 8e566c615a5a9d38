//! What is outside of the runtime and survives its crashes: clients, tool servers, and the requests they have in flight.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::OnBusy;
use rap_protocol::{Body, CallId, Content, ThreadId, Timestamp};
use serde_json::{Value, json};

use super::disk::Place;

/// A word stands for one input, and is found nowhere else.
pub(super) type Word = u64;

pub(super) fn text_of(word: Word) -> String {
    format!("w{word}")
}

/// The word that a text begins with.
pub(super) fn word_of(text: &str) -> Option<Word> {
    let digits = text.strip_prefix('w')?;
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// The text that a body begins with.
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
pub(super) struct Outside {
    /// Requests that have no final answer yet.
    pub(super) requests: BTreeMap<u64, Request>,
    /// Those of them that are with the runtime now.
    pub(super) in_flight: BTreeSet<u64>,
    /// When requests are sent, in order.
    pub(super) agenda: BTreeSet<(Timestamp, u64)>,
    /// Callbacks that had a final answer; the network may bring them again.
    pub(super) sent: Vec<Request>,
    /// Invocations that a tool server has accepted.
    pub(super) accepted: BTreeMap<CallId, ToolCall>,
    pub(super) servers: Vec<Server>,
    words: Word,
    numbers: u64,
}

pub(super) struct Server {
    pub(super) url: String,
    /// The version of its toolset.
    pub(super) version: u64,
}

/// A call that a tool server works on.
#[derive(Debug, Clone)]
pub(super) struct ToolCall {
    pub(super) thread: ThreadId,
    pub(super) place: Place,
    pub(super) callback: String,
    /// Whether the server has forgotten it.
    pub(super) forgotten: bool,
    pub(super) results: u32,
    /// Word of its result. A repeat of the invocation gives the same result.
    pub(super) result: Option<(Word, bool)>,
}

/// A request to the runtime.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) path: String,
    pub(super) key: Option<u64>,
    pub(super) body: Value,
    /// The input that it brings, if that can be found again.
    pub(super) word: Option<Word>,
    pub(super) what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    /// A request of a client.
    Client,
    /// A callback of a tool server.
    Callback,
    /// An event without an id: sent again, it is another event.
    NamelessEvent,
}

impl Outside {
    pub(super) fn word(&mut self) -> Word {
        self.words += 1;
        self.words
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Has a request sent at a time.
    pub(super) fn send(&mut self, request: Request, at: Timestamp) {
        let no = self.number();
        self.requests.insert(no, request);
        self.agenda.insert((at, no));
    }

    /// A request had no answer. It is sent again.
    pub(super) fn send_again(&mut self, no: u64, at: Timestamp) {
        self.in_flight.remove(&no);
        if let Some(Request { what: What::NamelessEvent, word, body, .. }) = self.requests.get_mut(&no) {
            self.words += 1;
            *word = Some(self.words);
            body["text"] = text_of(self.words).into();
        }
        self.agenda.insert((at, no));
    }
}

impl Request {
    pub(super) fn create(thread: &str, agent: &str, word: Option<Word>, key: u64) -> Request {
        let mut body = json!({"id": thread, "agent": agent});
        if let Some(word) = word {
            body["message"] = text_of(word).into();
        }
        Request { path: "/v1/threads".into(), key: Some(key), body, word, what: What::Client }
    }

    pub(super) fn message(thread: &ThreadId, word: Word, on_busy: OnBusy, key: u64) -> Request {
        let on_busy = match on_busy {
            OnBusy::Join => "join",
            OnBusy::Interrupt => "interrupt",
            OnBusy::Enqueue => "enqueue",
            OnBusy::Reject => "reject",
        };
        Request {
            path: format!("/v1/threads/{thread}/messages"),
            key: Some(key),
            body: json!({"text": text_of(word), "on_busy": on_busy}),
            word: Some(word),
            what: What::Client,
        }
    }

    /// A request of a client about a thread, without a key.
    pub(super) fn order(thread: &ThreadId, order: &str, body: Value) -> Request {
        let path = format!("/v1/threads/{thread}/{order}");
        Request { path, key: None, body, word: None, what: What::Client }
    }

    pub(super) fn fork(thread: &ThreadId, at: Option<u64>, key: u64) -> Request {
        let body = at.map_or_else(|| json!({}), |at| json!({"at": at}));
        Request {
            path: format!("/v1/threads/{thread}/fork"),
            key: Some(key),
            body,
            word: None,
            what: What::Client,
        }
    }

    pub(super) fn callback(callback: &str, body: Value, word: Option<Word>, what: What) -> Request {
        Request { path: callback.to_owned(), key: None, body, word, what }
    }
}

impl ToolCall {
    pub(super) fn result(&self, call: &CallId, word: Word, subscription: bool) -> Request {
        let mut body = json!({"type": "tool_result", "group_id": self.thread, "id": call});
        // Some results are more than a text.
        if word.is_multiple_of(7) {
            body["content"] = json!([{"type": "text", "text": text_of(word)}]);
        } else {
            body["text"] = text_of(word).into();
        }
        if subscription {
            body["subscription"] = true.into();
        }
        Request::callback(&self.callback, body, Some(word), What::Callback)
    }

    pub(super) fn event(&self, call: &CallId, event: &SimEvent) -> Request {
        let mut body = json!({
            "type": "subscription_event", "group_id": self.thread, "tool_call_id": call,
            "text": text_of(event.word),
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
        let what = if event.id.is_some() || event.is_final { What::Callback } else { What::NamelessEvent };
        Request::callback(&self.callback, body, Some(event.word), what)
    }

    pub(super) fn sign_in(&self, call: &CallId, no: u64) -> Request {
        let body = json!({
            "type": "oauth", "group_id": self.thread, "id": call, "auth_url": format!("https://example.com/{no}"),
        });
        Request::callback(&self.callback, body, None, What::Callback)
    }

    pub(super) fn choice(&self, call: &CallId, no: u64, server: &str) -> Request {
        let body = json!({
            "type": "user_choice", "group_id": self.thread, "id": call, "prompt": "Which?",
            "choices": ["this", "that"], "default": 1, "response_url": format!("{server}/answer/{no}"),
        });
        Request::callback(&self.callback, body, None, What::Callback)
    }

    pub(super) fn view(&self, no: u64) -> Request {
        let body = json!({
            "type": "view_update", "group_id": self.thread, "view_type": format!("v{}", no % 3), "content": no,
        });
        Request::callback(&self.callback, body, None, What::Callback)
    }

    /// A callback that cannot be read.
    pub(super) fn nonsense(&self) -> Request {
        Request::callback(&self.callback, json!({"type": "nonsense"}), None, What::Callback)
    }
}

/// An event of a simulated subscription.
pub(super) struct SimEvent {
    pub(super) id: Option<u64>,
    pub(super) word: Word,
    pub(super) associative: bool,
    pub(super) is_final: bool,
}
