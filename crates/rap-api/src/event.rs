//! Events of the streams `/v1/threads/{id}/events` and `/v1/events`.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::string_enum::string_enum;
use crate::{Delivery, Entry, OpenCall, Question, QuestionKind, Status, Time, View};

/// An event of a thread.
///
/// A stream begins with the entries that the reader does not have yet, then the current calls, questions and views,
/// then the status. Live events follow.
///
/// Serialized, it is the data of the event, without its name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ThreadEvent {
    /// A new entry of the history.
    Entry(Entry),
    /// A piece of an answer in progress. The entry that follows it is authoritative.
    Delta(Delta),
    /// The status of the thread. The first one marks the end of the replayed entries.
    Status(StatusEvent),
    /// A call was made or has settled.
    Call(CallEvent),
    /// A tool asks the user to choose or to sign in.
    Question(Question),
    /// A message to people that is not stored in the history, unlike [`Item::Notice`](crate::Item::Notice).
    Notice(Notice),
    /// A view that a tool shows to people.
    View(View),
    /// A child was spawned: by the model, or for events of a subscription. Sent once, and not when a stream begins.
    Child(ChildEvent),
    /// The runtime ends the stream. The reader connects again.
    End(End),
}

impl ThreadEvent {
    /// Name of the events with an entry. Only these have an id, the sequence number of the entry.
    pub const ENTRY: &str = "entry";
    /// Name of the last event of a stream.
    pub const END: &str = "end";

    /// Parses an event. Returns `None` for an event that this version does not know.
    ///
    /// ```
    /// use rap_api::{ThreadEvent, Status};
    ///
    /// let event = ThreadEvent::parse("status", r#"{"status": "idle", "turn": 3, "held": 0, "children": 0}"#);
    /// assert!(matches!(event, Some(ThreadEvent::Status(update)) if update.status == Status::Idle));
    /// assert_eq!(ThreadEvent::parse("of a newer runtime", "{}"), None);
    /// ```
    pub fn parse(name: &str, data: &str) -> Option<ThreadEvent> {
        Some(match name {
            ThreadEvent::ENTRY => ThreadEvent::Entry(read(data)?),
            "delta" => ThreadEvent::Delta(read(data)?),
            "status" => ThreadEvent::Status(read(data)?),
            "call" => ThreadEvent::Call(read(data)?),
            "choice" | "oauth" => ThreadEvent::Question(read(data)?),
            "notice" => ThreadEvent::Notice(read(data)?),
            "view" => ThreadEvent::View(read(data)?),
            "child" => ThreadEvent::Child(read(data)?),
            ThreadEvent::END => ThreadEvent::End(read(data)?),
            _ => return None,
        })
    }

    /// Returns the name of the event in the stream.
    pub fn name(&self) -> &'static str {
        match self {
            ThreadEvent::Entry(_) => ThreadEvent::ENTRY,
            ThreadEvent::Delta(_) => "delta",
            ThreadEvent::Status(_) => "status",
            ThreadEvent::Call(_) => "call",
            ThreadEvent::Question(question) => question_name(question),
            ThreadEvent::Notice(_) => "notice",
            ThreadEvent::View(_) => "view",
            ThreadEvent::Child(_) => "child",
            ThreadEvent::End(_) => ThreadEvent::END,
        }
    }
}

/// An event of the stream of all threads. The stream begins with the questions that wait for a user.
///
/// Serialized, it is the data of the event, without its name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RuntimeEvent {
    /// The status of a thread has changed.
    Status(ThreadStatus),
    /// A tool asks the user to choose or to sign in.
    Question(Question),
    /// A message to people that is not stored in a history.
    Notice(Notice),
    /// An attempt at a delivery has failed, or a failed delivery has ended.
    Delivery(Delivery),
    /// The runtime ends the stream. The reader connects again.
    End(End),
}

impl RuntimeEvent {
    /// Parses an event. Returns `None` for an event that this version does not know.
    pub fn parse(name: &str, data: &str) -> Option<RuntimeEvent> {
        Some(match name {
            "status" => RuntimeEvent::Status(read(data)?),
            "choice" | "oauth" => RuntimeEvent::Question(read(data)?),
            "notice" => RuntimeEvent::Notice(read(data)?),
            "delivery" => RuntimeEvent::Delivery(read(data)?),
            ThreadEvent::END => RuntimeEvent::End(read(data)?),
            _ => return None,
        })
    }

    /// Returns the name of the event in the stream.
    pub fn name(&self) -> &'static str {
        match self {
            RuntimeEvent::Status(_) => "status",
            RuntimeEvent::Question(question) => question_name(question),
            RuntimeEvent::Notice(_) => "notice",
            RuntimeEvent::Delivery(_) => "delivery",
            RuntimeEvent::End(_) => ThreadEvent::END,
        }
    }
}

fn read<T: DeserializeOwned>(data: &str) -> Option<T> {
    serde_json::from_str(data).ok()
}

fn question_name(question: &Question) -> &'static str {
    match question.kind {
        QuestionKind::SignIn { .. } => "oauth",
        QuestionKind::Choice { .. } | QuestionKind::Unknown => "choice",
    }
}

/// A piece of an answer in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    /// Turn of the answer.
    pub turn: u64,
    /// Attempt within the turn. Text of an earlier attempt is void.
    pub attempt: u32,
    /// The piece.
    pub text: String,
}

/// The current status of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEvent {
    /// Current status.
    pub status: Status,
    /// Number of the current turn.
    pub turn: u64,
    /// Number of inputs that wait because the thread is busy.
    #[serde(default)]
    pub held: u32,
    /// Number of children that are not closed.
    #[serde(default)]
    pub children: usize,
    /// Reason why the thread has failed or is paused.
    pub why: Option<String>,
    /// Time at which a failed or paused thread continues automatically.
    pub retry_at: Option<Time>,
}

/// The status of a thread, in the stream of all threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadStatus {
    /// Id of the thread.
    pub thread_id: String,
    /// Current status.
    pub status: Status,
}

/// A call was made or has settled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallEvent {
    /// The call, as it was when it was open.
    #[serde(flatten)]
    pub call: OpenCall,
    /// Event: the call was made, or has settled.
    pub state: CallEventKind,
}

string_enum! {
    /// Kind of a [`CallEvent`].
    CallEventKind {
        /// The call has no result yet.
        Opened = "open",
        /// The call has its result.
        Settled = "settled",
    }
}

/// A child was spawned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildEvent {
    /// Id of the child.
    pub thread_id: String,
    /// Call that spawned the child, or that subscribed to its events.
    pub call_id: String,
    /// Tool of that call.
    pub tool: String,
    /// Title of the child: its event or the beginning of its instructions.
    pub title: Option<String>,
}

/// A message to people that is not stored in the history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Thread that it is about. `None` on the stream of a thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thread_id: Option<String>,
    /// Text of the message.
    pub text: String,
}

/// Reason why the runtime ends a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Text for people.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const AT: &str = "1970-01-01T00:00:00.000Z";

    /// An event is written as it is read, and the fields of a newer runtime are ignored.
    #[test]
    fn every_event_is_read_and_written() {
        let choice = json!({"thread_id": "t", "call_id": "c", "tool": "ask", "asked_at": AT, "kind": "choice",
            "prompt": "Which?", "choices": ["a", "b"], "default": 1});
        let events = [
            ("entry", json!({"seq": 1, "at": AT, "kind": "user", "text": "hi"})),
            ("delta", json!({"turn": 1, "attempt": 1, "text": "a"})),
            (
                "status",
                json!({"status": "idle", "turn": 1, "held": 0, "children": 2, "why": null, "retry_at": AT}),
            ),
            (
                "call",
                json!({"call_id": "c", "tool": "slow", "since": AT, "until": null, "needs_approval": false, "problem": null,
                "display": null, "usually": null, "overdue": false, "state": "settled"}),
            ),
            ("choice", choice.clone()),
            (
                "oauth",
                json!({"thread_id": "t", "call_id": "c", "tool": "ask", "asked_at": AT, "kind": "oauth",
                "auth_url": "https://example.com/x"}),
            ),
            ("notice", json!({"text": "a"})),
            ("view", json!({"view_type": "progress", "server": "s", "content": {"a": 1}, "at": AT})),
            (
                "child",
                json!({"thread_id": "t2", "call_id": "c", "tool": "tick", "title": "event of tick: 1"}),
            ),
            ("end", json!({"reason": "stopping"})),
        ];
        let with_more = |data: &Value| {
            let mut data = data.clone();
            data["added_later"] = json!({"x": [1]});
            data.to_string()
        };
        for (name, data) in events {
            let event =
                ThreadEvent::parse(name, &with_more(&data)).unwrap_or_else(|| panic!("{name}: {data}"));
            assert_eq!((event.name(), json!(event)), (name, data));
        }
        let of_all = [
            ("status", json!({"thread_id": "t", "status": "waiting"})),
            ("choice", choice),
            ("notice", json!({"thread_id": "t", "text": "a"})),
            (
                "delivery",
                json!({"id": "1", "kind": "callback", "thread_id": "t", "call_id": null, "server": null,
                "topic": "invalid", "outcome": "refused", "attempts": 1, "detail": "", "first_at": AT, "last_at": AT,
                "next_at": null}),
            ),
            ("end", json!({"reason": "stopping"})),
        ];
        for (name, data) in of_all {
            let event =
                RuntimeEvent::parse(name, &with_more(&data)).unwrap_or_else(|| panic!("{name}: {data}"));
            assert_eq!((event.name(), json!(event)), (name, data));
        }
    }

    #[test]
    fn unknown_words_and_kinds_are_read() {
        let entry = json!({"seq": 1, "at": AT, "kind": "of a newer runtime", "text": "hi"}).to_string();
        assert!(matches!(
            ThreadEvent::parse("entry", &entry),
            Some(ThreadEvent::Entry(Entry { item: crate::Item::Unknown, .. }))
        ));
        let question = json!({"thread_id": "t", "call_id": "c", "tool": "x", "asked_at": AT, "kind": "of a newer runtime"});
        assert_eq!(serde_json::from_value::<Question>(question).unwrap().kind, QuestionKind::Unknown);
        let status = json!({"thread_id": "t", "status": "of a newer runtime"});
        assert_eq!(serde_json::from_value::<ThreadStatus>(status).unwrap().status, Status::Unknown);
        for status in Status::ALL {
            assert_eq!(Status::from(status.as_str()), status);
        }
    }
}
