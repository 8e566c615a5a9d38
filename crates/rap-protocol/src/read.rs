//! Reads the fields of a message from bytes. Every parser of this crate uses it.
//!
//! Size, nesting and memory are checked before the JSON is parsed, so the work is bounded. Unknown fields are ignored, and a
//! field that is `null` counts as absent.

use serde_json::{Map, Value};

use crate::id::Id;
use crate::invalid::{Invalid, Path, describe, kind, quote};
use crate::limits;

/// Fields of one JSON object. Each accessor removes the field that it returns.
pub(crate) struct Object<'a> {
    fields: Map<String, Value>,
    path: Path<'a>,
}

/// Parses a message, which has to be a JSON object.
pub(crate) fn message(bytes: &[u8]) -> Result<Object<'static>, Invalid> {
    Object::new(json(bytes)?, Path::Root)
}

/// Parses JSON within the limits of size, nesting and memory.
pub(crate) fn json(bytes: &[u8]) -> Result<Value, Invalid> {
    if bytes.len() > limits::BODY_BYTES {
        let expected = format!("at most {} bytes", limits::BODY_BYTES);
        return Err(Invalid::shape(&Path::Root, expected, format!("{} bytes", bytes.len())));
    }
    check_json(bytes, limits::PARSED_BYTES)?;
    serde_json::from_slice(bytes)
        .map_err(|error| Invalid::shape(&Path::Root, "JSON", format!("an error: {error}")))
}

/// Checks JSON before it is parsed: it must not be nested deeper than [`limits::NESTING`], and its parsed form must not need
/// more than `memory` bytes besides its texts, as estimated from its numbers of objects, arrays and values. Returns the
/// estimate. Malformed JSON may pass; the parser rejects it.
pub fn check_json(bytes: &[u8], memory: usize) -> Result<usize, Invalid> {
    let shape = Shape::of(bytes);
    if shape.nesting > limits::NESTING {
        let expected = format!("at most {} levels of nesting", limits::NESTING);
        return Err(Invalid::shape(&Path::Root, expected, "more"));
    }
    if shape.memory > memory {
        let expected = "fewer objects, arrays and values";
        let found = format!("so many that they need more than {memory} bytes");
        return Err(Invalid::shape(&Path::Root, expected, found));
    }
    Ok(shape.memory)
}

/// Memory of the parsed form of an object with at least one field, of an array and of a value in it, in bytes.
const OBJECT_BYTES: usize = 640;
const ARRAY_BYTES: usize = 128;
const VALUE_BYTES: usize = 32;

/// Properties of JSON that can be known without parsing it.
#[derive(Default)]
struct Shape {
    /// Number of levels, at most one more than allowed.
    nesting: usize,
    memory: usize,
}

impl Shape {
    /// Counts brackets and commas outside of strings. The answer for malformed JSON does not matter, because the parser
    /// rejects it later.
    fn of(bytes: &[u8]) -> Shape {
        let (mut shape, mut depth, mut in_string, mut escaped) = (Shape::default(), 0usize, false, false);
        for byte in bytes {
            if in_string {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = true,
                    b'"' => in_string = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => in_string = true,
                b'[' => (depth, shape.memory) = (depth + 1, shape.memory + ARRAY_BYTES),
                b'{' => (depth, shape.memory) = (depth + 1, shape.memory + OBJECT_BYTES),
                b']' | b'}' => depth = depth.saturating_sub(1),
                b',' => shape.memory += VALUE_BYTES,
                _ => {}
            }
            shape.nesting = shape.nesting.max(depth);
            if depth > limits::NESTING {
                break;
            }
        }
        shape
    }
}

impl<'a> Object<'a> {
    pub(crate) fn new(value: Value, path: Path<'a>) -> Result<Self, Invalid> {
        match value {
            Value::Object(fields) => Ok(Object { fields, path }),
            other => Err(Invalid::shape(&path, "an object", describe(&other))),
        }
    }

    pub(crate) fn path(&self) -> &Path<'a> {
        &self.path
    }

    pub(crate) fn is_absent(&self, name: &str) -> bool {
        self.fields.get(name).is_none_or(Value::is_null)
    }

    pub(crate) fn optional(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn required(&mut self, name: &str, expected: &str) -> Result<Value, Invalid> {
        match self.fields.remove(name) {
            Some(Value::Null) => Err(self.shape(name, expected, "null")),
            Some(value) => Ok(value),
            None => Err(self.shape(name, expected, "nothing")),
        }
    }

    pub(crate) fn optional_string(&mut self, name: &str, most: usize) -> Result<Option<String>, Invalid> {
        match self.optional(name) {
            None => Ok(None),
            Some(Value::String(text)) => self.within(name, text, most).map(Some),
            Some(other) => Err(self.shape(name, "a string", describe(&other))),
        }
    }

    pub(crate) fn string(&mut self, name: &str, most: usize) -> Result<String, Invalid> {
        match self.required(name, "a string")? {
            Value::String(text) => self.within(name, text, most),
            other => Err(self.shape(name, "a string", describe(&other))),
        }
    }

    fn within(&self, name: &str, text: String, most: usize) -> Result<String, Invalid> {
        if text.len() <= most {
            return Ok(text);
        }
        Err(self.value(name, format!("at most {most} bytes"), format!("{} bytes", text.len())))
    }

    pub(crate) fn optional_bool(&mut self, name: &str) -> Result<Option<bool>, Invalid> {
        match self.optional(name) {
            None => Ok(None),
            Some(Value::Bool(bool)) => Ok(Some(bool)),
            Some(other) => Err(self.shape(name, "true or false", describe(&other))),
        }
    }

    pub(crate) fn bool(&mut self, name: &str) -> Result<bool, Invalid> {
        match self.required(name, "true or false")? {
            Value::Bool(bool) => Ok(bool),
            other => Err(self.shape(name, "true or false", describe(&other))),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Map<String, Value>, Invalid> {
        match self.required(name, "an object")? {
            Value::Object(map) => Ok(map),
            other => Err(self.shape(name, "an object", describe(&other))),
        }
    }

    /// Reads an index into a list of `length` items.
    pub(crate) fn index(&mut self, name: &str, length: usize) -> Result<usize, Invalid> {
        let expected = format!("an index from 0 to {}", length.saturating_sub(1));
        let value = self.required(name, &expected)?;
        let index = value.as_u64().and_then(|index| usize::try_from(index).ok());
        match index {
            Some(index) if index < length => Ok(index),
            Some(_) => Err(self.value(name, expected, describe(&value))),
            None => Err(self.shape(name, expected, describe(&value))),
        }
    }

    pub(crate) fn array(&mut self, name: &str, most: usize) -> Result<Vec<Value>, Invalid> {
        let value = self.required(name, "an array")?;
        self.items(name, value, most)
    }

    pub(crate) fn optional_array(&mut self, name: &str, most: usize) -> Result<Vec<Value>, Invalid> {
        match self.optional(name) {
            None => Ok(Vec::new()),
            Some(value) => self.items(name, value, most),
        }
    }

    fn items(&self, name: &str, value: Value, most: usize) -> Result<Vec<Value>, Invalid> {
        match value {
            Value::Array(items) if items.len() <= most => Ok(items),
            Value::Array(items) => {
                Err(self.value(name, format!("at most {most} items"), format!("{} items", items.len())))
            }
            other => Err(self.shape(name, "an array", describe(&other))),
        }
    }

    /// Reads an identifier. The error repeats the value, shortened.
    pub(crate) fn id<T: Id>(&mut self, name: &str) -> Result<T, Invalid> {
        match self.required(name, "a string")? {
            Value::String(text) => self.checked_id(name, text),
            other => Err(self.shape(name, "a string", describe(&other))),
        }
    }

    /// Reads an identifier that may be absent.
    pub(crate) fn optional_id<T: Id>(&mut self, name: &str) -> Result<Option<T>, Invalid> {
        match self.optional(name) {
            None => Ok(None),
            Some(Value::String(text)) => self.checked_id(name, text).map(Some),
            Some(other) => Err(self.shape(name, "a string", describe(&other))),
        }
    }

    fn checked_id<T: Id>(&self, name: &str, text: String) -> Result<T, Invalid> {
        T::take(text).map_err(|(error, text)| self.value(name, error.expected(), quote(&text)))
    }

    /// Reads a URL. The error never repeats the value.
    pub(crate) fn url<T>(&mut self, name: &str) -> Result<T, Invalid>
    where
        T: TryFrom<String, Error = crate::url::Error>,
    {
        match self.required(name, "a URL")? {
            Value::String(text) => {
                T::try_from(text).map_err(|error| self.value(name, error.expected(), error.found()))
            }
            other => Err(self.shape(name, "a URL", kind(&other))),
        }
    }

    pub(crate) fn shape(&self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Invalid {
        Invalid::shape(&self.path.field(name), expected, found)
    }

    pub(crate) fn value(&self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Invalid {
        Invalid::value(&self.path.field(name), expected, found)
    }

    /// Reads the field `content`, which may be any JSON value, including `null`.
    pub(crate) fn content(&mut self) -> Result<Value, Invalid> {
        self.fields.remove("content").ok_or_else(|| self.shape("content", "any JSON", "nothing"))
    }

    /// Returns the fields that were not read.
    pub(crate) fn into_rest(self) -> Map<String, Value> {
        self.fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_limited_and_brackets_in_strings_do_not_count() {
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(json(deep(limits::NESTING).as_bytes()).is_ok());
        let error = json(deep(limits::NESTING + 1).as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), "$: expected at most 64 levels of nesting, found more");
        let text = format!("\"{}\\\"{}\"", "[".repeat(100), "{".repeat(100));
        assert!(json(text.as_bytes()).is_ok());
        assert!(json("[".repeat(5_000_000).as_bytes()).is_err());
    }

    #[test]
    fn a_body_whose_parsed_form_needs_too_much_memory_is_rejected() {
        let bulk = |value: &str, count: usize| format!("[{}{value}]", format!("{value},").repeat(count - 1));
        // A long list of objects or numbers is ordinary.
        for (value, count) in [("{\"kind\":\"alpha\"}", 150_000), ("0", 4_000_000), ("\"{[,\"", 1_000_000)] {
            assert!(json(bulk(value, count).as_bytes()).is_ok(), "{value}");
        }
        for (value, count) in [("{\"a\":1}", 1_000_000), ("[0]", 2_000_000), ("{}", 2_500_000)] {
            let error = json(bulk(value, count).as_bytes()).unwrap_err().to_string();
            assert!(error.contains("expected fewer objects, arrays and values"), "{value}: {error}");
        }
    }

    #[test]
    fn a_body_over_the_limit_is_rejected_before_it_is_parsed() {
        let error = json(&vec![b' '; limits::BODY_BYTES + 1]).unwrap_err();
        assert_eq!(error.to_string(), "$: expected at most 8388608 bytes, found 8388609 bytes");
    }
}
