//! Why a message was not understood.

use std::fmt;

use serde_json::Value;

use crate::limits;

/// What is wrong with a message: where, what was expected there, and what was found.
///
/// `found` never repeats a URL, since a URL may be a capability.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: expected {expected}, found {found}")]
pub struct Invalid {
    /// Whether the message could not be read at all or breaks a rule.
    pub fault: Fault,
    /// A JSON path such as `$.choices[2]`.
    pub path: String,
    /// What the protocol wants there.
    pub expected: String,
    /// What was there instead.
    pub found: String,
}

/// The two ways in which a message can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No JSON, more of it than is read, a field that is missing, or one of another type.
    Shape,
    /// A field of the right type whose value breaks a rule.
    Value,
}

impl Invalid {
    pub(crate) fn shape(path: &Path<'_>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        let (path, expected, found) = (path.to_string(), expected.into(), found.into());
        Invalid { fault: Fault::Shape, path, expected, found }
    }

    pub(crate) fn value(path: &Path<'_>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Invalid { fault: Fault::Value, ..Invalid::shape(path, expected, found) }
    }
}

/// Where in a message we are: a chain back to the root, written out only when something is wrong.
#[derive(Clone, Copy)]
pub(crate) enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

impl Path<'_> {
    pub(crate) fn field<'a>(&'a self, name: &'a str) -> Path<'a> {
        Path::Field(self, name)
    }

    pub(crate) fn item(&self, index: usize) -> Path<'_> {
        Path::Item(self, index)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root => f.write_str("$"),
            Path::Field(parent, name) => write_field(f, parent, name),
            Path::Item(parent, index) => write!(f, "{parent}[{index}]"),
        }
    }
}

fn write_field(f: &mut fmt::Formatter<'_>, parent: &Path<'_>, name: &str) -> fmt::Result {
    let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    let plain = !name.is_empty() && name.len() <= limits::FOUND_CHARS && name.chars().all(word);
    if plain { write!(f, "{parent}.{name}") } else { write!(f, "{parent}[{}]", quote(name)) }
}

/// A value in a few words: scalars as they are, the others by their kind.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(bool) => bool.to_string(),
        Value::Number(number) => cut(number.to_string(), limits::FOUND_CHARS),
        Value::String(text) => format!("the string {}", quote(text)),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// Like [`describe`], but only the kind: for fields whose value must not be repeated.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A text in quotes, control characters escaped, cut to [`limits::FOUND_CHARS`].
pub(crate) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(limits::FOUND_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(limits::FOUND_CHARS).is_some() {
        quoted.push('…');
    }
    format!("\"{quoted}\"")
}

/// A text of at most so many characters; what is left out shows as `…`.
pub(crate) fn cut(mut text: String, most: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
        text.push('…');
    }
    text
}
