//! Converts the messages of the rules to the callbacks of the protocol.

use rap_protocol::{Callback, EventId, Oauth, SubscriptionEvent, ToolResult, UserChoice, ViewUpdate};

use rusqlite::ToSql;
use rusqlite::types::{FromSql, FromSqlResult, ToSqlOutput, ValueRef};

use super::CallRow;
use crate::rules::{MessageKind, OutboxContent, QuestionName, UserMessage};

pub(super) fn kind(post: &OutboxContent) -> MessageKind {
    match post {
        OutboxContent::Result { .. } => MessageKind::Result,
        OutboxContent::Event { .. } => MessageKind::Event,
        OutboxContent::UserMessage(_) => MessageKind::UserMessage,
    }
}

pub(super) fn topic(message: &UserMessage) -> Topic {
    match message {
        UserMessage::View { view_type, .. } => Topic::View(view_type.clone()),
        UserMessage::Choice { question, .. } | UserMessage::Authorize { question, .. } => {
            Topic::Question(*question)
        }
    }
}

/// Subject of a message to the user. New content replaces unsent content of the same view, and the refusal of a
/// question ends the wait for its answer.
pub(super) enum Topic {
    View(String),
    Question(QuestionName),
}

/// The name of a view is stored as text, that of a question as a blob.
impl ToSql for Topic {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Topic::View(name) => name.to_sql(),
            Topic::Question(name) => name.to_sql(),
        }
    }
}

impl FromSql for Topic {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        match value {
            ValueRef::Blob(_) => FromSql::column_result(value).map(Topic::Question),
            _ => FromSql::column_result(value).map(Topic::View),
        }
    }
}

pub(super) fn to_callback(row: &CallRow, post: OutboxContent) -> Callback {
    let (group_id, id, call_id) = (row.thread.clone(), row.id.clone(), row.secondary.clone());
    match post {
        OutboxContent::Result { body, display_as, subscription } => {
            Callback::ToolResult(ToolResult { group_id, id, call_id, body, display_as, subscription })
        }
        OutboxContent::Event { number, text, associative, is_final } => {
            let event_id = Some(event_id(row, number));
            let tool_call_id = id;
            let event = SubscriptionEvent { group_id, tool_call_id, text, associative, is_final, event_id };
            Callback::SubscriptionEvent(event)
        }
        OutboxContent::UserMessage(UserMessage::View { view_type, content }) => {
            Callback::ViewUpdate(ViewUpdate { group_id, view_type, content })
        }
        OutboxContent::UserMessage(UserMessage::Choice {
            prompt, choices, default, response_url, ..
        }) => {
            Callback::UserChoice(UserChoice { group_id, id, call_id, prompt, choices, default, response_url })
        }
        OutboxContent::UserMessage(UserMessage::Authorize { auth_url, .. }) => {
            Callback::Oauth(Oauth { group_id, id, call_id, auth_url })
        }
    }
}

/// Returns the id of an event: stable over retries and restarts, and different in every subscription. It contains the
/// part of the identity that is a hash of caller, thread, call id and callback URL.
fn event_id(row: &CallRow, number: u64) -> EventId {
    let subscription = u128::from_be_bytes(*row.identity.last_chunk().expect("bug: 32 bytes"));
    EventId::new(format!("{subscription:032x}-{number}")).expect("bug: hexadecimal digits are an id")
}
