//! JSON Schema of a tool's arguments, compiled by its constructor.
//!
//! A schema comes from an untrusted server, and arguments come from a model. Both are bounded: a schema that is too
//! complex is refused when it is compiled, a validation takes at most the steps of its [`Budget`] and can be stopped at
//! any time, and it records no more than [`limits::VIOLATIONS`] short violations. Remote references are never fetched.

mod budget;
mod compile;
mod pattern;
mod program;
mod run;
mod value;

use std::fmt;
use std::sync::{Arc, OnceLock};

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::invalid::{Invalid, Path, cut, describe};
use crate::limits;

pub use budget::Budget;
use budget::Stop;
use program::Program;

/// JSON Schema that has been compiled.
#[derive(Clone)]
pub struct InputSchema {
    document: Arc<Value>,
    /// Size of the document as JSON, in bytes.
    document_bytes: usize,
    program: Arc<Program>,
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
    /// Validation against the document could take too long; the text says which limit it exceeds.
    #[error("too complex: {0}")]
    TooComplex(String),
    /// The document is not a valid schema; the text says where and why.
    #[error("{0}")]
    DoesNotCompile(String),
}

/// Reason why arguments are not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// The arguments violate the schema. There is at least one violation and at most [`limits::VIOLATIONS`].
    #[error("{}", list(.0))]
    Violations(Vec<Violation>),
    /// The budget was spent before the result was known.
    #[error("the arguments are too large for the schema: validating them takes too many steps")]
    TooCostly,
    /// The flag of the budget was set.
    #[error("the validation was stopped")]
    Stopped,
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
        let document_bytes = document.to_string().len();
        if document_bytes > limits::SCHEMA_BYTES {
            return Err(Error::TooLarge);
        }
        check_document(&document)?;
        let program = compile::compile(&document)?;
        Ok(InputSchema { document: Arc::new(document), document_bytes, program: Arc::new(program) })
    }

    /// Returns the schema as JSON.
    pub fn document(&self) -> &Value {
        &self.document
    }

    /// Returns the size of the schema as JSON, in bytes.
    pub fn document_bytes(&self) -> usize {
        self.document_bytes
    }

    /// Validates arguments in at most [`limits::VALIDATION_STEPS`], which can take seconds.
    pub fn validate(&self, arguments: &Value) -> Result<(), Rejected> {
        self.validate_within(arguments, &mut Budget::default())
    }

    /// Validates arguments. Steps are taken from the budget. If there are violations, finding out where they are takes
    /// about as many steps again, which are not taken from it.
    pub fn validate_within(&self, arguments: &Value, budget: &mut Budget) -> Result<(), Rejected> {
        match run::violations(&self.program, arguments, budget) {
            Ok(violations) if violations.is_empty() => Ok(()),
            Ok(violations) => Err(Rejected::Violations(violations)),
            Err(Stop::Flag) => Err(Rejected::Stopped),
            Err(Stop::Spent | Stop::TooDeep | Stop::Enough) => Err(Rejected::TooCostly),
        }
    }

    /// Returns the approximate size of the compiled schema, in bytes.
    pub(crate) fn program_bytes(&self) -> usize {
        self.program.bytes()
    }
}

/// Validates a schema against the schema of its draft.
fn check_document(document: &Value) -> Result<(), Error> {
    static DRAFTS: [OnceLock<Program>; 5] = [const { OnceLock::new() }; 5];
    let draft = compile::draft(document)?;
    let place = draft as usize;
    let program = DRAFTS[place]
        .get_or_init(|| compile::compile_meta(draft).expect("bug: the schema of a draft compiles"));
    match run::violations(program, document, &mut Budget::default()) {
        Ok(violations) if violations.is_empty() => Ok(()),
        Ok(violations) => Err(Error::DoesNotCompile(violations[0].to_string())),
        Err(_) => Err(Error::TooComplex("the schema is nested too deep".into())),
    }
}

fn list(violations: &[Violation]) -> String {
    let violations: Vec<String> = violations.iter().map(ToString::to_string).collect();
    violations.join("; ")
}

impl Violation {
    fn at(path: String, problem: String) -> Self {
        Violation { path: cut(path, limits::PATH_CHARS), problem: cut(problem, limits::PROBLEM_CHARS) }
    }
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
        Error::TooComplex(why) => Invalid::value(path, "a JSON Schema that is not too complex", why),
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
        match InputSchema::new(schema).unwrap().validate(&arguments) {
            Ok(()) => Vec::new(),
            Err(Rejected::Violations(violations)) => violations.iter().map(Violation::to_string).collect(),
            Err(other) => panic!("{other}"),
        }
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
