//! Fuzz targets for messages, schemas, event streams and exported sessions. `cargo xtask fuzz` runs them for longer.

use std::path::Path;

use rap_io::sse;
use rap_protocol::schema::{Budget, Rejected};
use rap_protocol::{
    InputSchema, limits, parse_callback, parse_cancel_tool_call, parse_choice_answer, parse_close_thread,
    parse_invocation, parse_migrate, parse_status_answer, parse_status_query, parse_toolset,
};
use rap_testkit::fuzz::Fuzz;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Maximum length of an error message, in bytes.
const ERROR_BYTES: usize = 2 * 1024;
/// Number of choices of the question that an answer is for.
const CHOICES: usize = 8;

/// Length of the streams, in bytes. Longer ones show nothing more.
const STREAM_BYTES: usize = 1024;

/// Names of the fields of all messages.
const FIELDS: &[&str] = &[
    "type",
    "group_id",
    "thread_id",
    "id",
    "call_id",
    "tool_call_id",
    "callback_url",
    "text",
    "content",
    "display",
    "subscription",
    "event_id",
    "associative",
    "final",
    "prompt",
    "choices",
    "default",
    "response_url",
    "auth_url",
    "view_type",
    "tool_result",
    "subscription_event",
    "user_choice",
    "oauth",
    "view_update",
    "name",
    "arguments",
    "session_id",
    "ancestors",
    "user_id",
    "version",
    "toolset_version",
    "description",
    "inputSchema",
    "annotations",
    "displayScript",
    "endpoint",
    "tools",
    "destructive",
    "selected",
    "alive",
    "image",
    "mediaType",
    "data",
    "https://example.com/",
    "http://127.0.0.1:1/x",
];
/// Keywords of JSON Schema.
const KEYWORDS: &[&str] = &[
    "schema",
    "arguments",
    "type",
    "properties",
    "required",
    "items",
    "prefixItems",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "$ref",
    "$defs",
    "#",
    "#/$defs/a",
    "$anchor",
    "$dynamicRef",
    "pattern",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "multipleOf",
    "uniqueItems",
    "contains",
    "minContains",
    "maxItems",
    "format",
    "object",
    "array",
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "(a|b)*",
    "^[a-z]{1,9}$",
    "unevaluatedProperties",
    "dependentSchemas",
    "examples",
    "http://json-schema.org/draft-07/schema#",
    "$schema",
];

/// Returns the golden files of the protocol whose names contain one of these words.
fn golden(words: &[&str]) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rap-protocol/tests/golden");
    let files = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut paths: Vec<_> = files
        .filter(|path| words.iter().any(|word| path.file_name().unwrap().to_str().unwrap().contains(word)))
        .collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty(), "no golden file for {words:?}");
    seeds
}

/// A message that is accepted is written as JSON that is read as the same message. An error is short.
fn check_message<T, E>(parse: impl Fn(&[u8]) -> Result<T, E>, input: &[u8]) -> String
where
    T: Serialize + PartialEq + std::fmt::Debug,
    E: std::fmt::Display + std::fmt::Debug,
{
    match parse(input) {
        Ok(message) => {
            let written = serde_json::to_vec(&message).unwrap();
            assert_eq!(parse(&written).unwrap(), message);
            let fields = serde_json::to_value(&message).unwrap();
            let names = fields.as_object().map(|fields| fields.keys().cloned().collect::<Vec<_>>().join(" "));
            format!("ok {}", names.unwrap_or_default())
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && text.len() <= ERROR_BYTES, "{text}");
            text
        }
    }
}

#[test]
fn callbacks() {
    let words = ["tool_result", "subscription_event", "choice.json", "oauth", "view_update"];
    Fuzz { name: "callbacks", seeds: golden(&words), words: FIELDS }
        .run(|input| check_message(parse_callback, input));
}

#[test]
fn invocations() {
    Fuzz { name: "invocations", seeds: golden(&["invocation"]), words: FIELDS }
        .run(|input| check_message(|bytes| parse_invocation(bytes).map_err(|bad| bad.error), input));
}

#[test]
fn notifications() {
    let words = ["close_thread", "cancel_tool_call", "tool_call_status", "migrate", "choice_answer"];
    Fuzz { name: "notifications", seeds: golden(&words), words: FIELDS }.run(|input| {
        [
            check_message(parse_close_thread, input),
            check_message(parse_cancel_tool_call, input),
            check_message(parse_status_query, input),
            check_message(parse_status_answer, input),
            check_message(parse_migrate, input),
            check_message(|bytes| parse_choice_answer(bytes, CHOICES), input),
        ]
        .join(";")
    });
}

#[test]
fn toolsets() {
    Fuzz { name: "toolsets", seeds: golden(&["toolset"]), words: FIELDS }
        .run(|input| check_message(parse_toolset, input));
}

/// The input is `{"schema": …, "arguments": […]}`. The examples of the schema are arguments too.
#[test]
fn schemas() {
    let seed = |schema: Value, arguments: Value| {
        json!({"schema": schema, "arguments": arguments}).to_string().into_bytes()
    };
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "multipleOf": 1},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": true, "maxItems": 3},
        },
        "required": ["name"],
        "additionalProperties": false,
    });
    let tree = json!({
        "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}},
        "$ref": "#/$defs/a",
        "examples": [{"next": {"next": {}}}],
    });
    let choice = json!({
        "type": "object",
        "oneOf": [{"properties": {"k": {"const": 1}}}, {"required": ["l"], "not": {"required": ["k"]}}],
        "if": {"minProperties": 2}, "then": {"propertyNames": {"maxLength": 3}},
        "patternProperties": {"^x": {"type": ["number", "null"]}}, "unevaluatedProperties": true,
        "dependentSchemas": {"l": {"properties": {"l": {"contains": {"type": "string"}}}}},
    });
    let draft7 = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
        "properties": {"list": {"items": [{"type": "number"}, {}], "additionalItems": false}},
    });
    let seeds = vec![
        seed(
            person,
            json!([{"name": "ada", "age": 36, "tags": ["a"]}, {"name": "", "age": -1.5, "b": 1}, 7]),
        ),
        seed(tree, json!([{"next": {"next": 5}}])),
        seed(choice, json!([{"k": 1}, {"l": ["x"]}, {"k": 2, "long": null, "x1": "no"}])),
        seed(draft7, json!([{"list": [1, "x"]}, {"list": [1, 2, 3]}])),
    ];
    Fuzz { name: "schemas", seeds, words: KEYWORDS }.run(check_schema);
}

fn check_schema(input: &[u8]) -> String {
    let Ok(given) = serde_json::from_slice::<Value>(input) else { return "not JSON".into() };
    let document = given["schema"].clone();
    let schema = match InputSchema::new(document.clone()) {
        Ok(schema) => schema,
        Err(error) => {
            assert!(error.to_string().len() <= ERROR_BYTES, "{error}");
            return error.to_string();
        }
    };
    assert_eq!(*schema.document(), document);
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let examples = [list(&given["arguments"]), list(&document["examples"])].concat();
    let outcomes = examples.iter().map(|arguments| check_arguments(&schema, arguments));
    outcomes.collect::<Vec<_>>().join(";")
}

/// A validation takes no more than its steps, finds the same each time, and with fewer steps finds that or nothing.
fn check_arguments(schema: &InputSchema, arguments: &Value) -> String {
    let steps = limits::INLINE_VALIDATION_STEPS;
    let mut budget = Budget::new(steps);
    let outcome = schema.validate_within(arguments, &mut budget);
    let spent = steps - budget.left();
    for less in [spent / 2, spent.saturating_sub(1), spent] {
        let again = schema.validate_within(arguments, &mut Budget::new(less));
        let is_same = again == outcome;
        assert!(
            is_same || again == Err(Rejected::TooCostly),
            "{less} of {spent} steps: {again:?}, {outcome:?}"
        );
        assert!(is_same || less < spent, "{spent} steps are enough: {again:?}, {outcome:?}");
    }
    match outcome {
        Ok(()) => "valid".into(),
        Err(Rejected::Violations(violations)) => {
            assert!((1..=limits::VIOLATIONS).contains(&violations.len()));
            assert!(violations.iter().all(|violation| violation.path.starts_with('$')), "{violations:?}");
            violations.iter().map(|violation| violation.problem.as_str()).collect::<Vec<_>>().join(",")
        }
        Err(other) => other.to_string(),
    }
}

/// The first byte is the limit of the parser, and the second one the length of the chunks.
#[test]
fn event_streams() {
    let seeds = [
        "\u{40}\u{3}data: a\n\n: a comment\nevent: x\nid: 7\ndata:  b\ndata\ndata:c:d\nretry: 5\n\ndata: ü☃\n\n",
        "\u{10}\u{1}id: 2\r\nevent: b\r\ndata: 34567890123\r\ndata: 45678901234567890\r\n\r\ndata: 1\r\n\r\n",
        "\u{7f}\u{5}\u{feff}data: {\"choices\": [{\"delta\": {\"content\": \"hi\"}}]}\n\ndata: [DONE]\n\n",
    ];
    let seeds = seeds.map(|seed| seed.as_bytes().to_vec()).to_vec();
    let words =
        &["data:", "event:", "id:", "retry:", "\n", "\r", "\n\n", "\r\n\r\n", ": ", "\u{feff}", "[DONE]"];
    Fuzz { name: "event_streams", seeds, words }.run(check_event_stream);
}

fn check_event_stream(input: &[u8]) -> String {
    let [limit, length, stream @ ..] = input else { return "empty".into() };
    let stream = &stream[..stream.len().min(STREAM_BYTES)];
    let (limit, length) = (usize::from(*limit), usize::from(*length).max(1));
    let events = sse::Parser::new(limit).push(stream);
    for length in [1, length] {
        let mut parser = sse::Parser::new(limit);
        let split: Vec<_> = stream.chunks(length).flat_map(|chunk| parser.push(chunk)).collect();
        assert_eq!(split, events, "chunks of {length}");
    }
    for event in events.iter().flatten() {
        // An invalid byte is replaced by three.
        assert!(event.data.len() + event.name.len() <= 3 * limit, "{event:?}");
        assert!(!event.name.contains(['\n', '\r']) && !event.data.contains('\r'), "{event:?}");
    }
    let (good, bad) = (events.iter().flatten().count(), events.iter().filter(|event| event.is_err()).count());
    format!("{} events, {} too long", "x".repeat(good.min(9)), "x".repeat(bad.min(9)))
}

/// Records of exported sessions.
#[test]
fn transfers() {
    let header = json!({"session": {
        "version": 1, "session": "t", "exported_at": 0,
        "origin": {"key_id": "k", "key_ids": ["k"], "public_url": "http://127.0.0.1:1"},
    }});
    let thread = json!({"thread": {
        "id": "t", "key": 1, "token_key": 1, "parent": null, "source": null, "inherits": 0, "ancestors": [],
        "incarnation": 1, "agent": "default", "user_id": null, "title": null, "created_at": 0, "updated_at": 0,
        "version": 1, "ask": null, "head": "{}",
    }});
    let end = |records: u64| json!({"end": {"records": records}});
    let seeds = [
        format!("{header}\n{thread}\n{}", end(2)),
        format!("{header}\n{}", end(1)),
        format!("{}\n{}", json!({"store": {"version": 1}}), json!({"store_end": {"sessions": 0}})),
    ];
    let words = &[
        "session", "thread", "entry", "call", "end", "records", "store", "version", "head", "parent", "null",
        "\n", "{}", "[]", "99",
    ];
    let seeds = seeds.map(String::into_bytes).to_vec();
    Fuzz { name: "transfers", seeds, words }.run(check_transfer);
}

/// Reads the lines of an input as records. Their checksums are correct, because anybody can compute them.
fn check_transfer(input: &[u8]) -> String {
    let (mut chain, mut file) = ([0; 32], Vec::new());
    for record in input.split(|byte| *byte == b'\n') {
        chain = Sha256::new().chain_update(chain).chain_update(record).finalize().into();
        let sum: String = chain[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        file.extend_from_slice(format!("[\"{sum}\",").as_bytes());
        file.extend_from_slice(record);
        file.extend_from_slice(b"]\n");
    }
    match rap_runtime::transfer::verify(&mut &file[..]) {
        Ok(sessions) => format!("{} sessions", sessions.min(3)),
        Err(error) => error.to_string().chars().filter(|c| c.is_alphabetic() || *c == ' ').take(30).collect(),
    }
}
