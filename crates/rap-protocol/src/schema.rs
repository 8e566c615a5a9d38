//! The JSON Schema of a tool's arguments, compiled when it is made.
//!
//! It never fetches a remote reference, and its patterns run in time linear in the text: a schema comes from
//! the other side.

use std::fmt;
use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::invalid::{Invalid, Path, cut, describe};
use crate::limits;

/// A schema that is known to compile.
#[derive(Clone)]
pub struct InputSchema {
    document: Arc<Value>,
    validator: Arc<Validator>,
}

/// Why a document is not a usable schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A schema has to be a JSON object here, since arguments are one.
    #[error("not a JSON object")]
    NotAnObject,
    /// Larger than [`limits::SCHEMA_BYTES`].
    #[error("a schema of more than {} bytes", limits::SCHEMA_BYTES)]
    TooLarge,
    /// It does not compile.
    #[error("{0}")]
    DoesNotCompile(String),
}

/// One place in which arguments do not fit their schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct Violation {
    /// A JSON path into the arguments, such as `$.items[2].name`.
    pub path: String,
    /// What is wrong there.
    pub problem: String,
}

impl InputSchema {
    /// Compiles a schema; draft 2020-12 unless its `$schema` says otherwise.
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

    /// The schema itself.
    pub fn document(&self) -> &Value {
        &self.document
    }

    /// Checks arguments; the first few violations where they do not fit.
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

/// The validator repeats the whole value before it says what is wrong with it; a long one is left out.
fn problem(error: &jsonschema::ValidationError<'_>) -> String {
    let text = error.to_string();
    if text.chars().nth(limits::PROBLEM_CHARS).is_none() {
        return text;
    }
    cut(error.masked_with("the value").to_string(), limits::PROBLEM_CHARS)
}

/// From a JSON pointer (`/items/2/name`) to the path that all our errors use (`$.items[2].name`).
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
    fn what_does_not_compile_is_refused() {
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
    fn a_hostile_pattern_costs_linear_time() {
        let schema = json!({"properties": {"s": {"pattern": "^(a+)+$"}}});
        let found = violations(schema, json!({"s": format!("{}!", "a".repeat(50_000))}));
        assert_eq!(found, [r#"$.s: the value does not match "^(a+)+$""#]);
    }

    #[test]
    fn a_pointer_becomes_a_path() {
        assert_eq!(json_path(""), "$");
        assert_eq!(json_path("/a~1b/0/c"), "$[\"a/b\"][0].c");
    }
}
