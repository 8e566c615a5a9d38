//! JSON Schema of a tool's arguments, compiled by its constructor.
//!
//! A schema comes from an untrusted server. Remote references are therefore never fetched, and patterns run in time
//! linear in the length of the text.

use std::fmt;
use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::invalid::{Invalid, Path, cut, describe};
use crate::limits;

/// JSON Schema that has been compiled.
#[derive(Clone)]
pub struct InputSchema {
    document: Arc<Value>,
    validator: Arc<Validator>,
}

/// Reason why a document is not a usable schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The document is not a JSON object. Boolean schemas are rejected.
    #[error("not a JSON object")]
    NotAnObject,
    /// The document is larger than [`limits::SCHEMA_BYTES`].
    #[error("a schema of more than {} bytes", limits::SCHEMA_BYTES)]
    TooLarge,
    /// The document is not a valid schema; the text says where and why.
    #[error("{0}")]
    DoesNotCompile(String),
}

/// Violation of a schema by arguments.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct Violation {
    /// JSON path into the arguments, such as `$.items[2].name`.
    pub path: String,
    /// Description of the violation.
    pub problem: String,
}

impl InputSchema {
    /// Compiles a schema. The draft is 2020-12 unless `$schema` names another one.
    pub fn new(document: Value) -> Result<Self, Error> {
        if !document.is_object() {
            return Err(Error::NotAnObject);
        }
        if document.to_string().len() > limits::SCHEMA_BYTES {
            return Err(Error::TooLarge);
        }
        let validator = jsonschema::options()
            .with_pattern_options(PatternOptions::regex())
            .build(&document)
            .map_err(|error| Error::DoesNotCompile(Violation::new(&error).to_string()))?;
        Ok(InputSchema { document: Arc::new(document), validator: Arc::new(validator) })
    }

    /// Returns the schema as JSON.
    pub fn document(&self) -> &Value {
        &self.document
    }

    /// Validates arguments. The error holds at most [`limits::VIOLATIONS`] violations.
    pub fn validate(&self, arguments: &Value) -> Result<(), Vec<Violation>> {
        if self.validator.is_valid(arguments) {
            return Ok(());
        }
        let violations: Vec<Violation> = self
            .validator
            .iter_errors(arguments)
            .take(limits::VIOLATIONS)
            .map(|error| Violation::new(&error))
            .collect();
        if violations.is_empty() { Ok(()) } else { Err(violations) }
    }
}

impl Violation {
    fn new(error: &jsonschema::ValidationError<'_>) -> Self {
        let path = cut(json_path(error.instance_path().as_str()), limits::PATH_CHARS);
        Violation { path, problem: problem(error) }
    }
}

/// Description of a violation. The validator's text repeats the whole value; if that makes it too long, the value is
/// left out.
fn problem(error: &jsonschema::ValidationError<'_>) -> String {
    let text = error.to_string();
    if text.chars().nth(limits::PROBLEM_CHARS).is_none() {
        return text;
    }
    cut(error.masked_with("the value").to_string(), limits::PROBLEM_CHARS)
}

/// Converts a JSON pointer (`/items/2/name`) to the notation of all errors of this crate (`$.items[2].name`).
fn json_path(pointer: &str) -> String {
    fn extend(parent: &Path<'_>, mut rest: std::str::Split<'_, char>) -> String {
        match rest.next() {
            None => parent.to_string(),
            Some(part) => match part.parse::<usize>() {
                Ok(index) => extend(&parent.item(index), rest),
                Err(_) => extend(&parent.field(&part.replace("~1", "/").replace("~0", "~")), rest),
            },
        }
    }
    let mut parts = pointer.split('/');
    parts.next();
    extend(&Path::Root, parts)
}

pub(crate) fn parse(document: Value, path: &Path<'_>) -> Result<InputSchema, Invalid> {
    let found = describe(&document);
    InputSchema::new(document).map_err(|error| match error {
        Error::NotAnObject => Invalid::shape(path, "a JSON Schema object", found),
        Error::TooLarge => Invalid::value(path, format!("at most {} bytes", limits::SCHEMA_BYTES), "more"),
        Error::DoesNotCompile(why) => {
            Invalid::value(path, "a JSON Schema that compiles", format!("an error at {why}"))
        }
    })
}

impl PartialEq for InputSchema {
    fn eq(&self, other: &Self) -> bool {
        self.document == other.document
    }
}

impl fmt::Debug for InputSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InputSchema({})", self.document)
    }
}

impl Serialize for InputSchema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.document.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn violations(schema: Value, arguments: Value) -> Vec<String> {
        let errors = InputSchema::new(schema).unwrap().validate(&arguments).err().unwrap_or_default();
        errors.iter().map(Violation::to_string).collect()
    }

    /// Proves: LC-31
    #[test]
    fn a_violation_names_the_path() {
        let schema = json!({
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "items": {"type": "array", "items": {"type": "object", "properties": {"n": {"minimum": 1}}}},
            },
        });
        let found = violations(schema.clone(), json!({"name": 5, "items": [{"n": 1}, {"n": 0}]}));
        assert_eq!(
            found,
            ["$.items[1].n: 0 is less than the minimum of 1", "$.name: 5 is not of type \"string\""]
        );
        assert_eq!(violations(schema.clone(), json!({})), ["$: \"name\" is a required property"]);
        assert!(violations(schema, json!({"name": "x", "unknown": 1})).is_empty());
    }

    #[test]
    fn invalid_and_remote_schemas_are_rejected() {
        let bad = [
            json!({"type": "nonsense"}),
            json!({"pattern": "(unclosed"}),
            json!({"$ref": "#/$defs/missing"}),
            json!({"$ref": "https://example.com/remote.json"}),
            json!({"$ref": "file:///etc/passwd"}),
        ];
        for schema in bad {
            assert!(matches!(InputSchema::new(schema.clone()), Err(Error::DoesNotCompile(_))), "{schema}");
        }
        assert_eq!(InputSchema::new(json!(true)), Err(Error::NotAnObject));
        let large = json!({"description": "x".repeat(limits::SCHEMA_BYTES)});
        assert_eq!(InputSchema::new(large), Err(Error::TooLarge));
    }

    #[test]
    fn a_hostile_pattern_runs_in_linear_time() {
        let schema = json!({"properties": {"s": {"pattern": "^(a+)+$"}}});
        let found = violations(schema, json!({"s": format!("{}!", "a".repeat(50_000))}));
        assert_eq!(found, [r#"$.s: the value does not match "^(a+)+$""#]);
    }

    #[test]
    fn a_json_pointer_is_converted_to_a_path() {
        assert_eq!(json_path(""), "$");
        assert_eq!(json_path("/a~1b/0/c"), "$[\"a/b\"][0].c");
    }
}
