//! Query parameters. Each listing accepts exactly the parameters that are listed here for it; `/openapi.json` is
//! generated from the same lists.

use std::collections::HashMap;
use std::str::FromStr;

use rap_api::{DeliveryOutcome, ID_PATTERN, Status, ThreadOrder};
use rap_protocol::ThreadId;
use serde_json::{Value, json};

use super::ErrorResponse;
use crate::store::Cursor;

/// Default and maximum number of rows of a listing.
const ROWS: (usize, usize) = (100, 1000);

/// Maximum length of a phrase to search for, in characters.
const PHRASE_CHARS: usize = 200;
/// Maximum length of the time that figures are given for, in hours.
const MAX_HOURS: u32 = 90 * 24;

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
const ROOTS: Parameter = Parameter {
    name: "roots",
    about: "Only threads without a parent, if it is `true`.",
    schema: || json!({"type": "boolean", "default": false}),
};
const PHRASE: Parameter = Parameter {
    name: "q",
    about: "Only threads with this phrase in their title or in a text of a person or a model, newest first. Words have to be \
            complete, except for the last one. Capital letters do not matter.",
    schema: || json!({"type": "string", "minLength": 1, "maxLength": PHRASE_CHARS}),
};
const HOURS: Parameter = Parameter {
    name: "hours",
    about: "Length of the time before now that is described, in hours.",
    schema: || json!({"type": "integer", "minimum": 1, "maximum": MAX_HOURS, "default": 24}),
};
const ORDER: Parameter = Parameter {
    name: "order",
    about: "Order of the threads. A cursor is valid for the order that it comes from.",
    schema: || json!({"type": "string", "enum": ThreadOrder::ALL.map(ThreadOrder::as_str), "default": "oldest"}),
};
const BEFORE: Parameter = Parameter {
    name: "before",
    about: "Only entries before this one, and of these the last `limit` ones.",
    schema: number,
};
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
pub(super) const THREAD_PARAMETERS: &[Parameter] = &[STATUS, PARENT, ROOTS, PHRASE, ORDER, LIMIT, CURSOR];
pub(super) const FIGURES_PARAMETERS: &[Parameter] = &[HOURS];
pub(super) const HISTORY_PARAMETERS: &[Parameter] = &[AFTER, BEFORE, LIMIT];
pub(super) const DELIVERY_PARAMETERS: &[Parameter] = &[THREAD, OUTCOME, LIMIT, CURSOR];
pub(super) const RECORD_PARAMETERS: &[Parameter] =
    &[Parameter { name: "from", about: "Number of the first record of the page, from 0.", schema: number }];
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
                Err(ErrorResponse::invalid(format!("{key}: unknown parameter; known parameters: {names}")))
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

    /// Returns the phrase to search for.
    pub(super) fn phrase(&self) -> Result<Option<String>, ErrorResponse> {
        match self.0.get("q") {
            None => Ok(None),
            Some(phrase) if phrase.is_empty() || phrase.chars().nth(PHRASE_CHARS).is_some() => {
                Err(ErrorResponse::invalid(format!("q: expected 1 to {PHRASE_CHARS} characters")))
            }
            Some(phrase) => Ok(Some(phrase.replace('\0', " "))),
        }
    }

    pub(super) fn hours(&self) -> Result<u32, ErrorResponse> {
        match self.0.get("hours").map(|text| text.parse()) {
            None => Ok(24),
            Some(Ok(hours)) if (1..=MAX_HOURS).contains(&hours) => Ok(hours),
            Some(_) => Err(ErrorResponse::invalid(format!("hours: expected a number from 1 to {MAX_HOURS}"))),
        }
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
