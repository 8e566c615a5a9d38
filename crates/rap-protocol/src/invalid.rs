//! The error of every parser in this crate.

use std::fmt;

use serde_json::Value;

use crate::limits;

/// A message that could not be parsed or that breaks a rule of the protocol.
///
/// `found` never repeats a URL, because a URL may be a capability.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: expected {expected}, found {found}")]
pub struct Invalid {
    /// Kind of the error: the message cannot be read, or a value breaks a rule.
    pub fault: Fault,
    /// JSON path of the offending value, such as `$.choices[2]`.
    pub path: String,
    /// Description of what the protocol expects at `path`.
    pub expected: String,
    /// Description of what the message has at `path`, shortened.
    pub found: String,
}

/// Kind of an [`Invalid`] error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The body is not JSON, is too large or too deeply nested, or a field is missing or has the wrong type.
    Shape,
    /// A field has the right type, but its value breaks a rule.
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

/// Position in a message, as a linked list to the root. It is formatted only when there is an error.
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
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    let plain = !name.is_empty() && name.len() <= limits::FOUND_CHARS && name.chars().all(is_plain);
    if plain { write!(f, "{parent}.{name}") } else { write!(f, "{parent}[{}]", quote(name)) }
}

/// Short description of a value: scalars are repeated, arrays and objects are only named.
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

/// Name of a value's JSON type, for fields whose value must not be repeated.
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

/// Quotes a text, escapes its control characters and truncates it to [`limits::FOUND_CHARS`].
pub(crate) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(limits::FOUND_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(limits::FOUND_CHARS).is_some() {
        quoted.push('…');
    }
    format!("\"{quoted}\"")
}

/// Truncates a text to `most` characters and appends `…` if something was removed.
pub(crate) fn cut(mut text: String, most: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(most) {
        text.truncate(end);
        text.push('…');
    }
    text
}
