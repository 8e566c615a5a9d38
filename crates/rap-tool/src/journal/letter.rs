//! From what the rules want to say to the message that is sent.

use rap_protocol::{Callback, EventId, Oauth, SubscriptionEvent, ToolResult, UserChoice, ViewUpdate};

use rusqlite::ToSql;
use rusqlite::types::{FromSql, FromSqlResult, ToSqlOutput, ValueRef};

use super::CallRow;
use crate::rules::{Aside, Kind, Post, Question};

pub(super) fn kind(post: &Post) -> Kind {
    match post {
        Post::Result { .. } => Kind::Result,
        Post::Event { .. } => Kind::Event,
        Post::Aside(_) => Kind::Aside,
    }
}

/// What an aside is about.
pub(super) fn topic(aside: &Aside) -> Topic {
    match aside {
        Aside::View { view_type, .. } => Topic::View(view_type.clone()),
        Aside::Choice { question, .. } | Aside::Authorise { question, .. } => Topic::Question(*question),
    }
}

/// A view's content takes the place of an earlier one; a question that is refused will not be answered.
pub(super) enum Topic {
    View(String),
    Question(Question),
}

/// A view's name is stored as text, a question's as bytes.
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

pub(super) fn message(row: &CallRow, post: Post) -> Callback {
    let (group_id, id, call_id) = (row.thread.clone(), row.id.clone(), row.secondary.clone());
    match post {
        Post::Result { body, display_as, subscription } => {
            Callback::ToolResult(ToolResult { group_id, id, call_id, body, display_as, subscription })
        }
        Post::Event { number, text, associative, is_final } => {
            let event_id = Some(event_id(row, number));
            let tool_call_id = id;
            let event = SubscriptionEvent { group_id, tool_call_id, text, associative, is_final, event_id };
            Callback::SubscriptionEvent(event)
        }
        Post::Aside(Aside::View { view_type, content }) => {
            Callback::ViewUpdate(ViewUpdate { group_id, view_type, content })
        }
        Post::Aside(Aside::Choice { prompt, choices, default, response_url, .. }) => {
            Callback::UserChoice(UserChoice { group_id, id, call_id, prompt, choices, default, response_url })
        }
        Post::Aside(Aside::Authorise { auth_url, .. }) => {
            Callback::Oauth(Oauth { group_id, id, call_id, auth_url })
        }
    }
}

/// Stable over retries and restarts, and another one in every subscription.
fn event_id(row: &CallRow, number: u64) -> EventId {
    let subscription = u64::from_be_bytes(*row.identity.first_chunk().expect("bug: 32 bytes"));
    EventId::new(format!("{subscription:016x}-{number}")).expect("bug: hexadecimal digits are an id")
}
