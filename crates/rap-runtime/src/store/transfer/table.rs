//! The rows of a session besides its threads: their kinds and the columns of each.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rap_agent::{CallState, Entry, Server, Spending, ThreadMessage};
use rap_protocol::{CallId, ThreadId};
use serde_json::{Map, Value, json};

use crate::function::IN_PROCESS;
use crate::store::stored::state_from_number;

/// A kind of rows.
#[derive(Debug)]
pub(crate) struct Table {
    /// Name in records.
    pub(crate) name: &'static str,
    pub(crate) scope: Scope,
    pub(crate) columns: &'static [(&'static str, Kind)],
}

/// Owner of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Thread,
    Session,
}

/// Kind of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Number,
    MaybeNumber,
    Text,
    MaybeText,
    Bytes,
    /// An entry of a history, as JSON text.
    Entry,
    /// A message between threads, as JSON text.
    Message,
    /// Spending of a session, as JSON text.
    Spending,
    /// Any JSON text.
    Json,
}

impl Kind {
    pub(crate) fn is_number(self) -> bool {
        matches!(self, Kind::Number | Kind::MaybeNumber)
    }

    pub(crate) fn is_bytes(self) -> bool {
        self == Kind::Bytes
    }
}

use Kind::{Bytes, MaybeNumber, MaybeText, Number, Text};

/// All kinds of rows. An implementation has a statement that reads and one that writes for each, in this order.
pub(crate) const TABLES: [Table; 14] = [
    Table { name: "toolset_document", scope: Scope::Session, columns: &[("hash", Text), ("body", Bytes)] },
    Table {
        name: "toolset",
        scope: Scope::Session,
        columns: &[("server", Text), ("hash", MaybeText), ("error", MaybeText), ("fetched_at", Number)],
    },
    Table { name: "spending", scope: Scope::Session, columns: &[("body", Kind::Spending)] },
    Table { name: "entry", scope: Scope::Thread, columns: &[("seq", Number), ("body", Kind::Entry)] },
    Table {
        name: "held",
        scope: Scope::Thread,
        columns: &[("queue", Number), ("no", Number), ("body", Kind::Entry)],
    },
    Table {
        name: "waiting_event",
        scope: Scope::Thread,
        columns: &[("call", Text), ("no", Number), ("body", Kind::Entry)],
    },
    Table {
        name: "call",
        scope: Scope::Thread,
        columns: &[
            ("id", Text),
            ("state", Number),
            ("call_id", MaybeText),
            ("name", Text),
            ("server", Text),
            ("seq", Number),
            ("since", Number),
            ("until", MaybeNumber),
            ("invoke_at", MaybeNumber),
            ("attempts", Number),
            ("outcome", MaybeText),
            ("acknowledged_at", MaybeNumber),
            ("asked_after", MaybeNumber),
            ("gone_since", MaybeNumber),
            // None for a call that was not sent yet: the runtime that sends it uses its own.
            ("callback_base", MaybeText),
        ],
    },
    Table {
        name: "question",
        scope: Scope::Thread,
        columns: &[
            ("no", Number),
            ("call", Text),
            ("server", Text),
            ("sealed", Bytes),
            ("asked_at", Number),
            ("answer", MaybeNumber),
            ("answered_at", MaybeNumber),
            ("answer_at", MaybeNumber),
            ("attempts", Number),
        ],
    },
    Table {
        name: "view",
        scope: Scope::Thread,
        columns: &[("server", Text), ("view_type", Text), ("content", Kind::Json), ("at", Number)],
    },
    Table {
        name: "event_id",
        scope: Scope::Thread,
        columns: &[("call", Text), ("event", Text), ("no", Number)],
    },
    Table { name: "ended_subscription", scope: Scope::Thread, columns: &[("call", Text)] },
    Table {
        name: "message",
        scope: Scope::Session,
        columns: &[("sender", Text), ("receiver", Text), ("body", Kind::Message), ("due_at", Number)],
    },
    Table {
        name: "request",
        scope: Scope::Thread,
        columns: &[("digest", Bytes), ("request", Bytes), ("turn", Number), ("at", Number)],
    },
    Table {
        name: "delivery",
        scope: Scope::Thread,
        columns: &[
            ("kind", Text),
            ("call", Text),
            ("server", Text),
            ("topic", Text),
            ("outcome", Text),
            ("attempts", Number),
            ("detail", Text),
            ("first_at", Number),
            ("last_at", Number),
        ],
    },
];
/// Position of entries in [`TABLES`].
pub(crate) const ENTRY: usize = 3;
/// Position of calls in [`TABLES`].
pub(crate) const CALL: usize = 6;

/// A value of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cell {
    Number(Option<i64>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    /// Position in [`TABLES`].
    pub(crate) table: usize,
    /// Thread of the row. `None` if it belongs to the session.
    pub(crate) thread: Option<ThreadId>,
    pub(crate) cells: Vec<Cell>,
}

impl Row {
    pub(crate) fn table(&self) -> &'static Table {
        &TABLES[self.table]
    }

    /// Returns the thread, the id and the state of an open call or an active subscription.
    pub(crate) fn open_call(&self) -> Option<(ThreadId, CallId, CallState)> {
        let [Cell::Text(Some(id)), Cell::Number(Some(state)), ..] = self.cells.as_slice() else {
            return None;
        };
        let state = state_from_number(*state)?;
        let open = matches!(state, CallState::Open | CallState::Subscribed);
        Some((self.thread.clone()?, CallId::new(id.clone()).ok()?, state)).filter(|_| open)
    }

    /// Returns true for an open call or subscription whose result has to arrive at a callback URL that was sent, or that
    /// waits for an answer to a question.
    pub(crate) fn awaits_callback(&self) -> bool {
        let is_unsent = self.number("invoke_at").is_some() && self.number("attempts") == Some(0);
        self.open_call().is_some() && self.is_remote() && !is_unsent
    }

    /// Returns true for an open call that its tool server has not acknowledged, and that would be sent again with another
    /// URL by a runtime with another base of callback URLs.
    pub(crate) fn is_unacknowledged(&self) -> bool {
        let is_open = matches!(self.open_call(), Some((_, _, CallState::Open)));
        let has_base = matches!(self.cell("callback_base"), Some(Cell::Text(Some(_))));
        is_open && self.is_remote() && self.number("invoke_at").is_some() && !has_base
    }

    /// Records that an attempt to send a call has begun. Returns false if that was recorded before.
    pub(crate) fn mark_sent(&mut self) -> bool {
        match self.cell_mut("attempts") {
            Some(Cell::Number(Some(attempts))) if *attempts == 0 => {
                *attempts = 1;
                true
            }
            _ => false,
        }
    }

    fn number(&self, name: &str) -> Option<i64> {
        match self.cell(name) {
            Some(Cell::Number(number)) => *number,
            _ => None,
        }
    }

    fn is_remote(&self) -> bool {
        match self.cell("server") {
            Some(Cell::Text(Some(server))) => !Server(server.clone()).is_runtime() && server != IN_PROCESS,
            _ => false,
        }
    }

    /// Replaces the URL of a tool server. The new server is soon asked about calls that the old one had accepted.
    pub(super) fn rename_server(&mut self, from: &str, to: &str) {
        // The destination fetches the toolset of its own server, which has another endpoint.
        if self.table().name == "toolset" {
            return;
        }
        let Some(Cell::Text(Some(server))) = self.cell_mut("server") else { return };
        if server != from {
            return;
        }
        *server = to.to_owned();
        if let Some(Cell::Number(Some(_))) = self.cell("acknowledged_at") {
            for (column, value) in [("asked_after", Some(0)), ("gone_since", None)] {
                if let Some(cell) = self.cell_mut(column) {
                    *cell = Cell::Number(value);
                }
            }
        }
    }

    fn cell_mut(&mut self, name: &str) -> Option<&mut Cell> {
        let at = self.table().columns.iter().position(|(column, _)| *column == name)?;
        self.cells.get_mut(at)
    }

    pub(super) fn cell(&self, name: &str) -> Option<&Cell> {
        let at = self.table().columns.iter().position(|(column, _)| *column == name)?;
        self.cells.get(at)
    }

    pub(super) fn to_json(&self) -> Value {
        let mut fields = Map::new();
        if let Some(thread) = &self.thread {
            fields.insert("thread".into(), json!(thread));
        }
        for ((name, _), cell) in self.table().columns.iter().zip(&self.cells) {
            let value = match cell {
                Cell::Number(number) => json!(number),
                Cell::Text(text) => json!(text),
                Cell::Bytes(bytes) => BASE64_STANDARD.encode(bytes).into(),
            };
            fields.insert((*name).into(), value);
        }
        Value::Object(fields)
    }

    pub(super) fn from_json(name: &str, value: Value) -> Result<Row, String> {
        let Some(table) = TABLES.iter().position(|table| table.name == name) else {
            return Err(format!("`{name}` is not a kind of record"));
        };
        let Value::Object(mut fields) = value else { return Err(format!("{name}: it is not an object")) };
        let thread = match TABLES[table].scope {
            Scope::Session => None,
            Scope::Thread => {
                let thread = fields.remove("thread").unwrap_or_default();
                let thread = serde_json::from_value(thread);
                Some(thread.map_err(|error| format!("{name}: thread: {error}"))?)
            }
        };
        let mut cells = Vec::with_capacity(TABLES[table].columns.len());
        for (column, kind) in TABLES[table].columns {
            let value = fields.remove(*column).unwrap_or_default();
            cells.push(cell(*kind, value).map_err(|why| format!("{name}: {column}: {why}"))?);
        }
        if let Some((unknown, _)) = fields.into_iter().next() {
            return Err(format!("{name}: `{unknown}` is not a field of it"));
        }
        Ok(Row { table, thread, cells })
    }
}

fn cell(kind: Kind, value: Value) -> Result<Cell, String> {
    let is_text = |text: &str| match kind {
        Kind::Entry => serde_json::from_str::<Entry>(text).map(drop),
        Kind::Message => serde_json::from_str::<ThreadMessage>(text).map(drop),
        Kind::Spending => serde_json::from_str::<Spending>(text).map(drop),
        Kind::Json => serde_json::from_str::<serde::de::IgnoredAny>(text).map(drop),
        _ => Ok(()),
    };
    match (kind, value) {
        (Kind::MaybeNumber, Value::Null) => Ok(Cell::Number(None)),
        (Kind::MaybeText, Value::Null) => Ok(Cell::Text(None)),
        (Number | MaybeNumber, Value::Number(number)) => {
            let number = number.as_i64().ok_or_else(|| format!("{number} is not a whole number"))?;
            Ok(Cell::Number(Some(number)))
        }
        (Kind::Bytes, Value::String(text)) => {
            BASE64_STANDARD.decode(text).map(Cell::Bytes).map_err(|error| error.to_string())
        }
        (Number | MaybeNumber, _) => Err("it is not a number".into()),
        (_, Value::String(text)) => {
            is_text(&text).map_err(|error| error.to_string())?;
            Ok(Cell::Text(Some(text)))
        }
        (_, Value::Null) => Err("it is missing".into()),
        _ => Err("it is not a text".into()),
    }
}
