//! What stands behind the question mark. A listing takes the parameters that are written down here for it, and no
//! others; `/openapi.json` lists the same.

use std::collections::HashMap;
use std::str::FromStr;

use rap_agent::Status;
use rap_protocol::ThreadId;
use serde_json::{Value, json};

use super::Refused;
use crate::store::{Cursor, DeliveryOutcome};

/// How many rows a listing has unless it is told, and at most.
const ROWS: (usize, usize) = (100, 1000);

/// A parameter: of a query, or a header.
#[derive(Clone, Copy)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) schema: fn() -> Value,
}

const LIMIT: Parameter = Parameter {
    name: "limit",
    about: "How many at most.",
    schema: || json!({"type": "integer", "minimum": 1, "maximum": ROWS.1, "default": ROWS.0}),
};
const CURSOR: Parameter =
    Parameter { name: "cursor", about: "The `next_cursor` of the page before.", schema: cursor };
const STATUS: Parameter = Parameter {
    name: "status",
    about: "Only threads that are at this.",
    schema: || json!({"type": "string", "enum": Status::ALL.map(Status::as_str)}),
};
const PARENT: Parameter =
    Parameter { name: "parent", about: "Only the children of this thread.", schema: id };
const AFTER: Parameter = Parameter { name: "after", about: "Only entries behind this one.", schema: number };
const THREAD: Parameter =
    Parameter { name: "thread", about: "Only deliveries about this thread.", schema: id };
const OUTCOME: Parameter = Parameter {
    name: "outcome",
    about: "Only deliveries that went like this.",
    schema: || json!({"type": "string", "enum": DeliveryOutcome::ALL.map(DeliveryOutcome::as_str)}),
};

fn number() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u32::MAX})
}

fn cursor() -> Value {
    json!({"type": "string", "pattern": Cursor::PATTERN})
}

/// What an id of the wire is, 256 bytes of text without control characters, as far as characters can say it.
pub(super) const ID: &str = r"^([ -~]{1,256}|[^\u0000-\u001f\u007f-\u009f]{1,64})$";

fn id() -> Value {
    json!({"type": "string", "pattern": ID})
}

pub(super) const OF_THREADS: &[Parameter] = &[STATUS, PARENT, LIMIT, CURSOR];
pub(super) const OF_HISTORY: &[Parameter] = &[AFTER, LIMIT];
pub(super) const OF_DELIVERIES: &[Parameter] = &[THREAD, OUTCOME, LIMIT, CURSOR];
pub(super) const OF_LISTINGS: &[Parameter] = &[LIMIT, CURSOR];

/// What was given; each name once.
pub(super) struct Given(HashMap<String, String>);

impl Given {
    /// Checks that nothing is given that is not taken.
    pub(super) fn check(given: HashMap<String, String>, taken: &[Parameter]) -> Result<Given, Refused> {
        let names = || taken.iter().map(|parameter| parameter.name);
        match given.keys().find(|key| !names().any(|name| name == *key)) {
            None => Ok(Given(given)),
            Some(key) => {
                let names = names().collect::<Vec<_>>().join(", ");
                Err(Refused::invalid(format!("{key}: unknown parameter; there are: {names}")))
            }
        }
    }

    pub(super) fn rows(&self) -> Result<usize, Refused> {
        let (usual, most) = ROWS;
        match self.0.get("limit") {
            None => Ok(usual),
            Some(text) => match text.parse() {
                Ok(limit) if (1..=most).contains(&limit) => Ok(limit),
                _ => Err(Refused::invalid(format!("limit: a number from 1 to {most}"))),
            },
        }
    }

    /// A place that an earlier answer gave.
    pub(super) fn place<T: FromStr>(&self, name: &str) -> Result<Option<T>, Refused> {
        let wrong = |_| Refused::invalid(format!("{name}: expected what an earlier answer gave"));
        self.0.get(name).map(|text| T::from_str(text)).transpose().map_err(wrong)
    }

    /// A thread; it need not exist.
    pub(super) fn thread(&self, name: &str) -> Result<Option<ThreadId>, Refused> {
        let id = self.0.get(name).cloned().map(ThreadId::new).transpose();
        id.map_err(|error| Refused::invalid(format!("{name}: {error}")))
    }

    /// One of some words.
    pub(super) fn one_of<T: Copy>(
        &self,
        name: &str,
        known: &[T],
        word: impl Fn(T) -> &'static str,
    ) -> Result<Option<T>, Refused> {
        let Some(text) = self.0.get(name) else { return Ok(None) };
        let found = known.iter().copied().find(|known| word(*known) == text);
        let words = || known.iter().copied().map(&word).collect::<Vec<_>>().join(", ");
        found.map(Some).ok_or_else(|| Refused::invalid(format!("{name}: one of {}", words())))
    }
}
