//! Adapts the JSON Schemas of tools to what providers accept.
//!
//! A schema is changed only in ways that keep its meaning, given that arguments are always an object. A schema that would
//! need other changes is refused, with the reason.

use rap_protocol::InputSchema;
use serde_json::{Map, Value, json};

/// Provider whose rules apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    OpenAi,
    Anthropic,
}

const NOT_AT_TOP: [&str; 7] = ["oneOf", "anyOf", "allOf", "enum", "const", "not", "$ref"];
/// Keywords whose value maps names to schemas.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is a schema.
const SINGLE: [&str; 8] =
    ["items", "contains", "not", "if", "then", "else", "propertyNames", "contentSchema"];
/// Keywords whose value is a list of schemas.
const LISTS: [&str; 4] = ["oneOf", "anyOf", "allOf", "prefixItems"];
/// Keywords whose value is a schema or a boolean. Booleans are kept.
const SCHEMA_OR_BOOL: [&str; 3] = ["additionalProperties", "unevaluatedProperties", "unevaluatedItems"];
/// Maximum length of an argument's name in Anthropic's API, in bytes.
const MAX_KEY_BYTES: usize = 64;

/// Returns the schema in a form that the provider accepts, or the reason why there is none.
pub(super) fn fitted(schema: &Value, dialect: Dialect) -> Result<Value, String> {
    let Value::Object(top) = schema else { return Err("the schema is not an object".into()) };
    let mut top = top.clone();
    let draft = top.remove("$schema");
    if let Some(keyword) = NOT_AT_TOP.iter().find(|keyword| top.contains_key(**keyword)) {
        return Err(format!("the model does not accept `{keyword}` at the top level of a schema"));
    }
    let object = match top.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|one| one == "object"),
        Some(one) => one == "object",
    };
    if !object {
        return Err("the schema's type is not `object`".into());
    }
    top.insert("type".into(), "object".into());
    top.entry("properties").or_insert_with(|| json!({}));
    adapt_keywords(&mut top, dialect)?;
    let fitted = Value::Object(top);
    if draft.is_some_and(|draft| draft != "https://json-schema.org/draft/2020-12/schema") {
        // The schema was checked against the draft that it names, but providers support only this one.
        InputSchema::new(fitted.clone())
            .map_err(|error| format!("not a schema of draft 2020-12: {error}"))?;
    }
    Ok(fitted)
}

fn adapt_subschema(schema: &mut Value, dialect: Dialect) -> Result<(), String> {
    match schema {
        Value::Bool(true) => *schema = json!({}),
        Value::Bool(false) => *schema = json!({"not": {}}),
        Value::Object(object) => adapt_keywords(object, dialect)?,
        _ => return Err("a part of the schema is not a schema".into()),
    }
    Ok(())
}

fn adapt_keywords(object: &mut Map<String, Value>, dialect: Dialect) -> Result<(), String> {
    let array = match object.get("type") {
        Some(Value::Array(types)) => types.iter().any(|one| one == "array"),
        one => one.is_some_and(|one| one == "array"),
    };
    if array {
        object.entry("items").or_insert_with(|| json!({}));
    }
    for (keyword, value) in object.iter_mut() {
        let keyword = keyword.as_str();
        match value {
            Value::Object(parts) if MAPS.contains(&keyword) => {
                if keyword == "properties" && dialect == Dialect::Anthropic {
                    parts.keys().try_for_each(|key| check_argument_name(key))?;
                }
                parts.values_mut().try_for_each(|part| adapt_subschema(part, dialect))?;
            }
            Value::Array(parts) if LISTS.contains(&keyword) => {
                parts.iter_mut().try_for_each(|part| adapt_subschema(part, dialect))?;
            }
            Value::Bool(_) if SCHEMA_OR_BOOL.contains(&keyword) => {}
            part if SINGLE.contains(&keyword) || SCHEMA_OR_BOOL.contains(&keyword) => {
                adapt_subschema(part, dialect)?
            }
            _ if MAPS.contains(&keyword) || LISTS.contains(&keyword) => {
                return Err(format!("`{keyword}` does not contain schemas"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_argument_name(key: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if (1..=MAX_KEY_BYTES).contains(&key.len()) && key.chars().all(plain) {
        return Ok(());
    }
    Err(format!("the model does not accept an argument with the name {key:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_changed_only_in_ways_that_keep_its_meaning() {
        let table = [
            (json!({}), json!({"type": "object", "properties": {}})),
            (json!({"type": ["object", "null"]}), json!({"type": "object", "properties": {}})),
            (
                json!({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": true}}),
                json!({"type": "object", "properties": {"a": {}}}),
            ),
            (
                json!({"properties": {"a": {"type": "array"}, "b": {"type": ["array", "null"]}, "c": false}}),
                json!({"type": "object", "properties": {
                    "a": {"type": "array", "items": {}},
                    "b": {"type": ["array", "null"], "items": {}},
                    "c": {"not": {}},
                }}),
            ),
            (
                json!({"properties": {"a": {"anyOf": [true, {"type": "array"}]}}, "additionalProperties": false}),
                json!({"type": "object", "additionalProperties": false, "properties": {
                    "a": {"anyOf": [{}, {"type": "array", "items": {}}]},
                }}),
            ),
        ];
        for (schema, expected) in table {
            for dialect in [Dialect::OpenAi, Dialect::Anthropic] {
                assert_eq!(fitted(&schema, dialect).as_ref(), Ok(&expected));
            }
        }
    }

    #[test]
    fn a_schema_that_cannot_be_adapted_is_refused_with_the_reason() {
        let table = [
            (json!(true), "not an object"),
            (json!({"type": "string"}), "type is not `object`"),
            (json!({"type": ["string"]}), "type is not `object`"),
            (json!({"type": "object", "oneOf": []}), "`oneOf` at the top level"),
            (json!({"$ref": "#/$defs/A", "$defs": {}}), "`$ref` at the top level"),
            (json!({"properties": {"a": {"items": [{}]}}}), "not a schema"),
            (json!({"properties": []}), "does not contain schemas"),
            (
                json!({"$schema": "http://json-schema.org/draft-04/schema#",
                    "properties": {"a": {"type": "number", "minimum": 1, "exclusiveMinimum": true}}}),
                "2020-12",
            ),
        ];
        for (schema, expected) in table {
            let why = fitted(&schema, Dialect::OpenAi).unwrap_err();
            assert!(why.contains(expected), "{schema}: {why}");
        }
        let odd = json!({"properties": {"a": {"properties": {"b c": {}}}}});
        assert!(fitted(&odd, Dialect::OpenAi).is_ok());
        assert!(fitted(&odd, Dialect::Anthropic).unwrap_err().contains("b c"));
    }
}
