//! Query parameters. Each listing accepts exactly the parameters that are listed here for it; `/openapi.json` is
//! generated from the same lists.

use std::collections::HashMap;
use std::str::FromStr;

use rap_api::{DeliveryOutcome, ID_PATTERN, Status};
use rap_protocol::ThreadId;
use serde_json::{Value, json};

use super::ErrorResponse;
use crate::store::Cursor;

/// Default and maximum number of rows of a listing.
const ROWS: (usize, usize) = (100, 1000);

/// A query parameter or a header.
#[derive(Clone, Copy)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) schema: fn() -> Value,
}

const LIMIT: Parameter = Parameter {
    name: "limit",
    about: "Maximum number of items.",
    schema: || json!({"type": "integer", "minimum": 1, "maximum": ROWS.1, "default": ROWS.0}),
};
const CURSOR: Parameter =
    Parameter { name: "cursor", about: "The `next_cursor` of the previous page.", schema: cursor };
const STATUS: Parameter = Parameter {
    name: "status",
    about: "Only threads with this status.",
    schema: || json!({"type": "string", "enum": Status::ALL.map(Status::as_str)}),
};
const PARENT: Parameter =
    Parameter { name: "parent", about: "Only the children of this thread.", schema: id };
const AFTER: Parameter = Parameter { name: "after", about: "Only entries after this one.", schema: number };
const THREAD: Parameter =
    Parameter { name: "thread", about: "Only deliveries about this thread.", schema: id };
const OUTCOME: Parameter = Parameter {
    name: "outcome",
    about: "Only deliveries with this outcome.",
    schema: || json!({"type": "string", "enum": DeliveryOutcome::ALL.map(DeliveryOutcome::as_str)}),
};

fn number() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
}

fn cursor() -> Value {
    json!({"type": "string", "pattern": Cursor::PATTERN})
}

fn id() -> Value {
    json!({"type": "string", "pattern": ID_PATTERN})
}

const KEY_CURSOR: Parameter = Parameter {
    name: "cursor",
    about: "The `next_cursor` of the previous page.",
    schema: || json!({"type": "string"}),
};

pub(super) const CURSOR_PARAMETERS: &[Parameter] = &[KEY_CURSOR];
pub(super) const THREAD_PARAMETERS: &[Parameter] = &[STATUS, PARENT, LIMIT, CURSOR];
pub(super) const HISTORY_PARAMETERS: &[Parameter] = &[AFTER, LIMIT];
pub(super) const DELIVERY_PARAMETERS: &[Parameter] = &[THREAD, OUTCOME, LIMIT, CURSOR];
pub(super) const PAGE_PARAMETERS: &[Parameter] = &[LIMIT, CURSOR];

/// Query parameters of a request. Each name occurs once.
pub(super) struct QueryParams(HashMap<String, String>);

impl QueryParams {
    /// Rejects parameters that are not in `accepted`.
    pub(super) fn check(
        params: HashMap<String, String>,
        accepted: &[Parameter],
    ) -> Result<QueryParams, ErrorResponse> {
        let names = || accepted.iter().map(|parameter| parameter.name);
        match params.keys().find(|key| !names().any(|name| name == *key)) {
            None => Ok(QueryParams(params)),
            Some(key) => {
                let names = names().collect::<Vec<_>>().join(", ");
                Err(ErrorResponse::invalid(format!("{key}: unknown parameter; there are: {names}")))
            }
        }
    }

    pub(super) fn rows(&self) -> Result<usize, ErrorResponse> {
        let (default, max) = ROWS;
        match self.0.get("limit") {
            None => Ok(default),
            Some(text) => match text.parse() {
                Ok(limit) if (1..=max).contains(&limit) => Ok(limit),
                _ => Err(ErrorResponse::invalid(format!("limit: expected a number from 1 to {max}"))),
            },
        }
    }

    /// Parses a cursor or a sequence number from an earlier response.
    pub(super) fn parsed<T: FromStr>(&self, name: &str) -> Result<Option<T>, ErrorResponse> {
        let wrong = |_| ErrorResponse::invalid(format!("{name}: expected a value from an earlier response"));
        self.0.get(name).map(|text| T::from_str(text)).transpose().map_err(wrong)
    }

    /// Parses a thread id. The thread need not exist.
    pub(super) fn thread(&self, name: &str) -> Result<Option<ThreadId>, ErrorResponse> {
        let id = self.0.get(name).cloned().map(ThreadId::new).transpose();
        id.map_err(|error| ErrorResponse::invalid(format!("{name}: {error}")))
    }

    /// Parses one of the `known` values, each of which `word` names.
    pub(super) fn one_of<T: Copy>(
        &self,
        name: &str,
        known: &[T],
        word: impl Fn(T) -> &'static str,
    ) -> Result<Option<T>, ErrorResponse> {
        let Some(text) = self.0.get(name) else { return Ok(None) };
        let found = known.iter().copied().find(|known| word(*known) == text);
        let expected = || known.iter().copied().map(&word).collect::<Vec<_>>().join(", ");
        found
            .map(Some)
            .ok_or_else(|| ErrorResponse::invalid(format!("{name}: expected one of {}", expected())))
    }
}
