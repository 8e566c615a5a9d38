//! Validation of arguments agrees with another implementation of JSON Schema, and its cost is bounded.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use jsonschema::PatternOptions;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use rap_protocol::schema::{Budget, Error, Rejected};
use rap_protocol::{InputSchema, limits};
use serde_json::{Value, json};

fn schema(document: Value) -> InputSchema {
    InputSchema::new(document).unwrap()
}

/// Returns the result of a validation and the steps that it took.
fn steps(schema: &InputSchema, arguments: &Value) -> (Result<(), Rejected>, u64) {
    let mut budget = Budget::default();
    let result = schema.validate_within(arguments, &mut budget);
    (result, limits::VALIDATION_STEPS - budget.left())
}

fn violations(result: Result<(), Rejected>) -> Vec<String> {
    match result {
        Err(Rejected::Violations(violations)) => violations.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

fn constants() -> Value {
    (0..2_000).map(|n| json!({ "const": n })).collect()
}

#[test]
fn many_constants_and_many_items_cost_one_step_for_each_pair_at_most_and_few_errors() {
    let items = json!({"a": vec!["x"; 8_000]});
    // The first item is the first violation. Then the other violations are looked for.
    let plain = schema(json!({"properties": {"a": {"items": {"anyOf": constants()}}}}));
    let (result, spent) = steps(&plain, &items);
    assert!(violations(result)[0].starts_with("$.a[0]: \"x\" is not valid under any of the schemas"));
    assert!(spent < 20_000, "{spent}");
    // Here all items are valid, so that every constant is compared with every item.
    let (result, spent) = steps(&plain, &json!({"a": vec![1_999; 8_000]}));
    assert_eq!(result, Ok(()));
    assert!((16_000_000..64_000_000).contains(&spent), "{spent}");
    // An inner violation is not described, because another branch could have held.
    let nested = schema(json!({"anyOf": [{"properties": {"a": {"items": {"anyOf": constants()}}}}]}));
    let (result, spent) = steps(&nested, &items);
    assert_eq!(violations(result).len(), 1);
    assert!(spent < 20_000, "{spent}");
}

#[test]
fn a_long_list_of_an_enum_with_a_wrong_item_names_the_item() {
    let variants = ["alpha", "beta", "gamma", "delta", "epsilon"];
    let variants: Value = variants.iter().map(|name| json!({"type": "string", "const": name})).collect();
    let list = schema(
        json!({"type": "object", "properties": {"a": {"type": "array", "items": {"oneOf": variants}}}}),
    );
    let mut items = vec![json!("epsilon"); 300_000];
    items[299_999] = json!("zeta");
    let (result, spent) = steps(&list, &json!({ "a": items }));
    assert_eq!(
        violations(result),
        ["$.a[299999]: \"zeta\" is not valid under any of the schemas listed in the 'oneOf' keyword"]
    );
    assert!(spent < 10_000_000, "{spent}");
    let (result, _) = steps(&list, &json!({"a": vec!["zeta"; 300_000]}));
    assert_eq!(violations(result).len(), limits::VIOLATIONS);
}

#[test]
fn a_pattern_costs_in_proportion_to_its_size_and_the_text() {
    let mut state = 1u32;
    let digit = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 31 == 0 { '0' } else { '1' }
    };
    let digits: String = (0..1_000_000).map(digit).collect();
    let text = json!({ "s": digits });
    let of = |pattern: &str| schema(json!({"properties": {"s": {"pattern": pattern}}}));
    // Ordinary patterns read the text once.
    for pattern in ["^[01]+$", "^(1|0)*$", "^((a+)+|[01]+)$"] {
        let (result, spent) = steps(&of(pattern), &text);
        assert_eq!(result, Ok(()), "{pattern}");
        assert!(spent < 300_000, "{pattern}: {spent}");
    }
    // This one remembers the last 1,000 characters, so it has thousands of states for each character.
    let costly = of("1[01]{1000}[a-z]$");
    assert_eq!(steps(&costly, &text).0, Err(Rejected::TooCostly));
    let (result, spent) = steps(&costly, &json!({"s": digits[..10_000]}));
    assert_eq!(violations(result).len(), 1, "it is usable for shorter texts");
    assert!((10_000_000..limits::VALIDATION_STEPS).contains(&spent), "{spent}");
}

#[test]
fn a_schema_beyond_the_bounds_is_refused_with_the_reason() {
    let doubling = |keyword: &str| {
        let twice = |n: usize| json!([{"$ref": format!("#/$defs/d{n}")}, {"$ref": format!("#/$defs/d{n}")}]);
        let defs = (0..25).map(|n| (format!("d{n}"), json!({keyword: twice(n + 1)})));
        let defs: serde_json::Map<String, Value> = defs.chain([("d25".to_owned(), json!({}))]).collect();
        json!({"$defs": defs, "properties": {"a": {"$ref": "#/$defs/d0"}}})
    };
    let long: Vec<Value> = (0..limits::SCHEMA_NODES).map(|_| json!({})).collect();
    let deep = (0..=limits::SCHEMA_DEPTH).fold(json!({}), |inner, _| json!({ "not": inner }));
    let patterns = (0..60).map(|n| (format!("p{n}"), json!({"pattern": format!("^x{n}.{{1,300}}$")})));
    let patterns: serde_json::Map<String, Value> = patterns.collect();
    let table = [
        (doubling("allOf"), "when the references are expanded"),
        (doubling("anyOf"), "when the references are expanded"),
        (doubling("oneOf"), "when the references are expanded"),
        (json!({"$ref": "#"}), "leads back to itself"),
        (json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}), "leads back to itself"),
        (deep, "inside each other"),
        (json!({ "prefixItems": long }), "more than 20000 subschemas"),
        (json!({ "properties": patterns }), "patterns that need more than"),
        (json!({"pattern": "(x{1000}){1000}"}), "$.pattern: a pattern that needs more than"),
        (json!({"pattern": "(?=x)"}), "$.pattern: not a regular expression"),
    ];
    for (document, expected) in table {
        let why = InputSchema::new(document).unwrap_err();
        assert!(why.to_string().contains(expected), "{expected}: {why}");
        assert!(matches!(why, Error::TooComplex(_) | Error::DoesNotCompile(_)));
    }
    // A recursive schema is fine if each step goes deeper into the value.
    let tree = schema(json!({"type": "object", "additionalProperties": {"$ref": "#"}}));
    assert_eq!(tree.validate(&json!({"a": {"b": {}}})), Ok(()));
    assert_eq!(violations(tree.validate(&json!({"a": {"b": 1}}))), ["$.a.b: 1 is not of type \"object\""]);
}

/// The items have the same text without brackets, which is a bad case for hashing.
#[test]
fn unique_items_are_compared_in_bounded_steps() {
    let unique = schema(json!({"properties": {"a": {"uniqueItems": true}}}));
    let nested = |n: u32| {
        (0..15)
            .fold(json!([0]), |inner, bit| if n >> bit & 1 == 0 { json!([inner, 0]) } else { json!([inner]) })
    };
    let mut items: Vec<Value> = (0..30_000).map(nested).collect();
    let (result, spent) = steps(&unique, &json!({ "a": items }));
    assert_eq!(result, Ok(()));
    assert!(spent < 30_000_000, "{spent}");
    items.push(items[0].clone());
    assert!(unique.validate(&json!({ "a": items })).is_err());
}

#[test]
fn remembering_evaluated_properties_is_paid_for() {
    let branches: Vec<Value> = (0..20).map(|_| json!({"additionalProperties": true})).collect();
    let unevaluated =
        schema(json!({"properties": {"a": {"anyOf": branches, "unevaluatedProperties": false}}}));
    let object =
        |count: u32| (0..count).map(|n| (n.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    let (result, spent) = steps(&unevaluated, &json!({"a": object(1_000)}));
    assert_eq!(result, Ok(()));
    assert!(spent > 20 * 1_000 * 32, "{spent}");
    assert_eq!(steps(&unevaluated, &json!({"a": object(200_000)})).0, Err(Rejected::TooCostly));
}

#[test]
fn a_flag_stops_a_validation() {
    let costly = schema(json!({"properties": {"a": {"items": {"anyOf": constants()}}}}));
    let mut budget = Budget::stopped_by(Arc::new(AtomicBool::new(true)));
    let result = costly.validate_within(&json!({"a": vec![1_999; 8_000]}), &mut budget);
    assert_eq!(result, Err(Rejected::Stopped));
    assert!(limits::VALIDATION_STEPS - budget.left() < 50_000);
}

#[test]
fn a_body_of_8_mib_with_an_ordinary_schema_is_within_the_budget() {
    let order = json!({
        "type": "object",
        "required": ["id", "kind"],
        "additionalProperties": false,
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["alpha", "beta", "gamma", "delta", "epsilon"]},
            "name": {"type": "string", "maxLength": 40, "pattern": "^[a-z ]+$"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    });
    let orders = schema(
        json!({"properties": {"orders": {"items": order}, "numbers": {"items": {"type": "integer"}}}}),
    );
    let order = json!({"id": 1, "kind": "epsilon", "name": "a b", "note": null});
    let bodies = [
        json!({"orders": vec![order.clone(); limits::BODY_BYTES / order.to_string().len()]}),
        json!({"numbers": vec![1; limits::BODY_BYTES / 2]}),
    ];
    for body in bodies {
        let (result, spent) = steps(&orders, &body);
        assert_eq!(result, Ok(()));
        assert!(spent < limits::VALIDATION_STEPS / 2, "{spent}");
    }
    let encoded = schema(
        json!({"properties": {"file": {"pattern": "^data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+$"}}}),
    );
    let (result, spent) =
        steps(&encoded, &json!({"file": format!("data:image/png;base64,{}", "a".repeat(8_000_000))}));
    assert_eq!(result, Ok(()));
    assert!(spent < limits::VALIDATION_STEPS / 10, "{spent}");
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3..9i64).prop_map(Value::from),
        Just(json!(1.0)),
        Just(json!(2.5)),
        "[ab1]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map("[abc]", inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Keywords without subschemas.
fn assertion() -> impl Strategy<Value = (&'static str, Value)> {
    let small = || (0..4u64).prop_map(Value::from);
    let names = || {
        vec("[abc]", 0..3).prop_map(|names| {
            let names: std::collections::BTreeSet<String> = names.into_iter().collect();
            json!(names)
        })
    };
    let kind = prop_oneof![
        Just("string"),
        Just("integer"),
        Just("number"),
        Just("array"),
        Just("object"),
        Just("null"),
        Just("boolean")
    ];
    prop_oneof![
        kind.prop_map(|kind| ("type", kind.into())),
        vec(any_value(), 1..4).prop_map(|options| ("enum", options.into())),
        any_value().prop_map(|value| ("const", value)),
        (-2..5i64).prop_map(|limit| ("minimum", limit.into())),
        (-2..5i64).prop_map(|limit| ("exclusiveMaximum", limit.into())),
        prop_oneof![Just(json!(2)), Just(json!(0.5)), Just(json!(3))]
            .prop_map(|divisor| ("multipleOf", divisor)),
        small().prop_map(|limit| ("minLength", limit)),
        small().prop_map(|limit| ("maxLength", limit)),
        small().prop_map(|limit| ("minItems", limit)),
        small().prop_map(|limit| ("maxItems", limit)),
        small().prop_map(|limit| ("minProperties", limit)),
        small().prop_map(|limit| ("maxProperties", limit)),
        any::<bool>().prop_map(|unique| ("uniqueItems", unique.into())),
        names().prop_map(|names| ("required", names)),
        btree_map("[abc]", names(), 0..3).prop_map(|lists| ("dependentRequired", json!(lists))),
        prop_oneof![Just("^a"), Just("b{2}"), Just("^[ab]*$"), Just("\\d")]
            .prop_map(|text| ("pattern", text.into())),
    ]
}

/// Random schema of draft 2020-12. References lead to one of three definitions, through an item or a property.
fn any_schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        4 => vec(assertion(), 0..3).prop_map(|keywords| {
            Value::Object(keywords.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
        }),
        1 => any::<bool>().prop_map(Value::from),
        1 => (0..3).prop_map(|n| json!({"items": {"$ref": format!("#/$defs/d{n}")}})),
        1 => (0..3).prop_map(|n| json!({"additionalProperties": {"$ref": format!("#/$defs/d{n}")}})),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let lists = vec(inner.clone(), 1..4).prop_map(Value::from);
        let list_names = prop_oneof![Just("allOf"), Just("anyOf"), Just("oneOf"), Just("prefixItems")];
        let maps = btree_map("[abc]", inner.clone(), 0..3).prop_map(|map| json!(map));
        let map_names = prop_oneof![Just("properties"), Just("dependentSchemas"), Just("patternProperties")];
        let names =
            ["not", "items", "contains", "additionalProperties", "propertyNames", "if", "then", "else"];
        let names = names.into_iter().chain(["unevaluatedProperties", "unevaluatedItems"]);
        let names = proptest::sample::select(names.collect::<Vec<_>>());
        let applicator = prop_oneof![(list_names, lists), (map_names, maps), (names, inner)];
        vec(prop_oneof![applicator, assertion()], 1..4).prop_map(|keywords| {
            Value::Object(keywords.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
        })
    })
}

fn document() -> impl Strategy<Value = Value> {
    (any_schema(), any_schema(), any_schema(), any_schema()).prop_map(|(root, first, second, third)| {
        json!({"allOf": [root], "$defs": {"d0": first, "d1": second, "d2": third}})
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn random_schemas_and_values_have_the_same_result_elsewhere(document in document(), values in vec(any_value(), 1..6)) {
        let other = jsonschema::options().with_pattern_options(PatternOptions::regex()).build(&document).unwrap();
        let schema = InputSchema::new(document).unwrap();
        for value in values {
            let (result, spent) = steps(&schema, &value);
            prop_assert_eq!(result.is_ok(), other.is_valid(&value), "{}: {:?}", value, result);
            prop_assert!(spent < limits::INLINE_VALIDATION_STEPS, "{}", spent);
            // With fewer steps the result is the same, or there is none.
            let mut budget = Budget::new(spent / 2);
            let less = schema.validate_within(&value, &mut budget);
            prop_assert_eq!(less, Err(Rejected::TooCostly));
        }
    }

    #[test]
    fn no_document_makes_the_compiler_or_a_validation_fail(mut document in any_value(), value in any_value(), schema in any_schema()) {
        if let Value::Object(fields) = &mut document {
            for (name, keyword) in [("a", "allOf"), ("b", "$ref"), ("c", "items")] {
                if let Some(value) = fields.remove(name) {
                    fields.insert(keyword.into(), value);
                }
            }
            fields.insert("properties".into(), json!({ "a": schema }));
        }
        if let Ok(schema) = InputSchema::new(document) {
            let (result, spent) = steps(&schema, &value);
            prop_assert!(spent < limits::INLINE_VALIDATION_STEPS && result != Err(Rejected::TooCostly));
        }
    }
}

/// Compares with the official JSON Schema Test Suite, whose directory is in `JSON_SCHEMA_TEST_SUITE`. Groups that need
/// remote documents or unknown drafts are skipped, because such schemas are refused.
#[test]
#[ignore = "needs a copy of the JSON Schema Test Suite"]
fn the_official_test_suite_passes() {
    let root = std::env::var("JSON_SCHEMA_TEST_SUITE").expect("JSON_SCHEMA_TEST_SUITE");
    let mut failed = Vec::new();
    for (name, draft) in [
        ("draft4", "http://json-schema.org/draft-04/schema#"),
        ("draft6", "http://json-schema.org/draft-06/schema#"),
        ("draft7", "http://json-schema.org/draft-07/schema#"),
        ("draft2019-09", "https://json-schema.org/draft/2019-09/schema"),
        ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
    ] {
        let files =
            std::fs::read_dir(format!("{root}/tests/{name}")).unwrap().map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.is_file()) {
            let groups: Vec<Value> = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
            for mut group in groups {
                if let Some(fields) = group["schema"].as_object_mut() {
                    fields.entry("$schema").or_insert(draft.into());
                }
                let schema = match InputSchema::new(group["schema"].clone()) {
                    Ok(schema) => schema,
                    Err(Error::NotAnObject) => continue,
                    Err(error) if error.to_string().contains("localhost:1234") => continue,
                    Err(error) if error.to_string().contains("not a known draft") => continue,
                    Err(error) => panic!("{name}: {}: {error}", group["description"]),
                };
                for test in group["tests"].as_array().unwrap() {
                    if schema.validate(&test["data"]).is_ok() != test["valid"] {
                        failed.push(format!("{name}: {}: {}", group["description"], test["description"]));
                    }
                }
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
