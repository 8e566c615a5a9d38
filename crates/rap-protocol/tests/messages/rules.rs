//! Validation rules: which messages are rejected, with the exact error, and which unusual messages are accepted.
//!
//! Each row of a table changes one value of a valid message. An error is written as its [`rap_protocol::Fault`] and its
//! text.

use rap_protocol::{
    Body, Callback, Content, Invalid, Segment, limits, parse_callback, parse_cancel_tool_call,
    parse_choice_answer, parse_close_thread, parse_invocation, parse_migrate, parse_status_answer,
    parse_status_query, parse_toolset,
};
use serde_json::{Value, json};

type Parse = fn(&[u8]) -> Result<(), Invalid>;

const TOOLSET: Parse = |bytes| parse_toolset(bytes).map(drop);
const INVOCATION: Parse = |bytes| parse_invocation(bytes).map(drop).map_err(|bad| bad.error);
const CALLBACK: Parse = |bytes| parse_callback(bytes).map(drop);
const ANSWER: Parse = |bytes| parse_choice_answer(bytes, 2).map(drop);
const CLOSE: Parse = |bytes| parse_close_thread(bytes).map(drop);
const CANCEL: Parse = |bytes| parse_cancel_tool_call(bytes).map(drop);
const QUERY: Parse = |bytes| parse_status_query(bytes).map(drop);
const ALIVE: Parse = |bytes| parse_status_answer(bytes).map(drop);
const MIGRATE: Parse = |bytes| parse_migrate(bytes).map(drop);

fn toolset() -> Value {
    let tool = json!({"name": "now", "description": "The time", "inputSchema": {"type": "object"}});
    json!({"name": "clock", "endpoint": "https://tool.example.com/invoke", "tools": [tool]})
}

fn invocation() -> Value {
    let callback_url = "https://agent.example.com/callback";
    json!({"operation": "now", "arguments": {}, "id": "c1", "callback_url": callback_url, "group_id": "t1"})
}

fn tool_result() -> Value {
    json!({"type": "tool_result", "group_id": "t1", "id": "c1", "text": "42"})
}

fn event() -> Value {
    json!({"type": "subscription_event", "group_id": "t1", "tool_call_id": "c1", "text": "a line"})
}

fn oauth() -> Value {
    json!({"type": "oauth", "group_id": "t1", "id": "c1", "auth_url": "https://id.example.com/a"})
}

fn user_choice() -> Value {
    let mut message = json!({"type": "user_choice", "group_id": "t1", "id": "c1", "prompt": "Really?"});
    message["choices"] = json!(["no", "yes"]);
    message["default"] = json!(0);
    message["response_url"] = json!("https://tool.example.com/answer");
    message
}

fn view_update() -> Value {
    json!({"type": "view_update", "group_id": "t1", "view_type": "progress", "content": 1})
}

fn cancel() -> Value {
    json!({"thread_id": "t1", "tool_call_id": "c1"})
}

fn migrate() -> Value {
    json!({"session_id": "t1", "destination_url": "https://new.example.com/"})
}

/// Sets the value at a JSON pointer of the message; `None` removes the field.
fn changed(mut message: Value, pointer: &str, value: Option<Value>) -> Value {
    let (parent, name) = pointer.rsplit_once('/').expect("the pointer has a slash");
    let parent = message.pointer_mut(parent).expect("the parent exists in the message");
    match (parent, value) {
        (Value::Object(fields), Some(value)) => drop(fields.insert(name.into(), value)),
        (Value::Object(fields), None) => assert!(fields.remove(name).is_some(), "{pointer}"),
        (parent, value) => parent[name.parse::<usize>().expect("an index")] = value.expect("a value"),
    }
    message
}

/// Outcome of the parser: `ok`, or fault and text of the error.
fn outcome(parse: Parse, message: &Value) -> String {
    match parse(message.to_string().as_bytes()) {
        Ok(()) => "ok".into(),
        Err(error) => format!("{:?} {error}", error.fault),
    }
}

/// Asserts the outcome of the parser for each row: JSON pointer, value that is set there, expected outcome.
fn check<const N: usize>(parse: Parse, message: Value, rows: [(&str, Value, &str); N]) {
    assert_eq!(outcome(parse, &message), "ok");
    for (pointer, value, expected) in rows {
        let message = changed(message.clone(), pointer, Some(value));
        assert_eq!(outcome(parse, &message), expected, "{message:.300}");
    }
}

/// Asserts that a missing field, `null` and a value of the wrong type are rejected.
fn check_required(parse: Parse, message: Value, fields: &[(&str, &str)]) {
    for (name, expected) in fields {
        let pointer = format!("/{name}");
        let outcome_with = |value| outcome(parse, &changed(message.clone(), &pointer, value));
        let error = |found| format!("Shape $.{name}: expected {expected}, found {found}");
        assert_eq!(outcome_with(None), error("nothing"));
        assert_eq!(outcome_with(Some(Value::Null)), error("null"));
        let boolean = if *expected == "a URL" { "a boolean" } else { "true" };
        let wrong = if *expected == "true or false" { (json!(1), "1") } else { (json!(true), boolean) };
        assert_eq!(outcome_with(Some(wrong.0)), error(wrong.1));
    }
}

/// Proves: TR-21, TR-23
#[test]
fn a_required_field_that_is_missing_null_or_of_another_type_is_rejected() {
    let (string, url, array, object) = ("a string", "a URL", "an array", "an object");
    let index = "an index from 0 to 1";
    check_required(TOOLSET, toolset(), &[("name", string), ("endpoint", url), ("tools", array)]);
    let identity = [("id", string), ("group_id", string), ("callback_url", url)];
    check_required(INVOCATION, invocation(), &identity);
    check_required(INVOCATION, invocation(), &[("operation", string), ("arguments", object)]);
    check_required(CALLBACK, tool_result(), &[("type", string), ("group_id", string), ("id", string)]);
    let event_fields = [("group_id", string), ("tool_call_id", string), ("text", string)];
    check_required(CALLBACK, event(), &event_fields);
    check_required(CALLBACK, oauth(), &[("group_id", string), ("id", string), ("auth_url", url)]);
    check_required(CALLBACK, user_choice(), &[("group_id", string), ("id", string), ("prompt", string)]);
    let choice_fields = [("choices", array), ("default", index), ("response_url", url)];
    check_required(CALLBACK, user_choice(), &choice_fields);
    check_required(CALLBACK, view_update(), &[("group_id", string), ("view_type", string)]);
    check_required(ANSWER, json!({"id": "c1", "selected": 1}), &[("id", string), ("selected", index)]);
    check_required(CLOSE, json!({"thread_id": "t1"}), &[("thread_id", string)]);
    check_required(CANCEL, cancel(), &[("thread_id", string), ("tool_call_id", string)]);
    check_required(QUERY, cancel(), &[("thread_id", string), ("tool_call_id", string)]);
    check_required(ALIVE, json!({"alive": true}), &[("alive", "true or false")]);
    check_required(MIGRATE, migrate(), &[("session_id", string), ("destination_url", url)]);
}

/// Proves: TR-21, TR-23
#[test]
fn an_optional_field_of_another_type_is_rejected() {
    let rows = [
        ("/description", json!(5), "Shape $.description: expected a string, found 5"),
        ("/version", json!([]), "Shape $.version: expected a string, found an array"),
        (
            "/needsMigration",
            json!("no"),
            "Shape $.needsMigration: expected true or false, found the string \"no\"",
        ),
        (
            "/tools/0/annotations",
            json!([1]),
            "Shape $.tools[0].annotations: expected an object, found an array",
        ),
        (
            "/tools/0/displayScript",
            json!({}),
            "Shape $.tools[0].displayScript: expected a string, found an object",
        ),
    ];
    check(TOOLSET, toolset(), rows);
    let rows = [
        (
            "/thread_ancestors",
            json!("t0"),
            "Shape $.thread_ancestors: expected an array, found the string \"t0\"",
        ),
        ("/thread_ancestors", json!(["t0", 1]), "Shape $.thread_ancestors[1]: expected a string, found 1"),
        ("/thread_ancestors", json!([null]), "Shape $.thread_ancestors[0]: expected a string, found null"),
        ("/user_id", json!(-1.5), "Shape $.user_id: expected a string, found -1.5"),
        ("/toolset_version", json!(2), "Shape $.toolset_version: expected a string, found 2"),
    ];
    check(INVOCATION, invocation(), rows);
    let rows = [
        ("/call_id", json!(7), "Shape $.call_id: expected a string, found 7"),
        ("/text", json!(["42"]), "Shape $.text: expected a string, found an array"),
        ("/content", json!("42"), "Shape $.content: expected an array, found the string \"42\""),
        ("/display_as", json!({}), "Shape $.display_as: expected an array, found an object"),
        ("/subscription", json!(1), "Shape $.subscription: expected true or false, found 1"),
    ];
    check(CALLBACK, tool_result(), rows);
    let rows = [
        (
            "/associative",
            json!("yes"),
            "Shape $.associative: expected true or false, found the string \"yes\"",
        ),
        ("/final", json!(0), "Shape $.final: expected true or false, found 0"),
        ("/event_id", json!(9), "Shape $.event_id: expected a string, found 9"),
    ];
    check(CALLBACK, event(), rows);
}

#[test]
fn a_null_optional_field_counts_as_absent() {
    let nulls = |mut message: Value, names: &[&str]| {
        names.iter().for_each(|name| message[*name] = Value::Null);
        message
    };
    let mut manifest = nulls(toolset(), &["description", "version", "needsMigration"]);
    manifest["tools"][0] = nulls(manifest["tools"][0].clone(), &["annotations", "displayScript"]);
    let hints = ["requiresAuth", "readOnly", "destructive", "idempotent", "longRunning"];
    let mut hinted = toolset();
    hinted["tools"][0]["annotations"] = nulls(json!({}), &hints);
    for message in [manifest, hinted] {
        let read = parse_toolset(message.to_string().as_bytes()).unwrap();
        assert_eq!(read, parse_toolset(toolset().to_string().as_bytes()).unwrap());
    }

    let optional = ["call_id", "thread_ancestors", "user_id", "toolset_version"];
    let read = parse_invocation(nulls(invocation(), &optional).to_string().as_bytes()).unwrap();
    assert_eq!(read, parse_invocation(invocation().to_string().as_bytes()).unwrap());

    let table = [
        (tool_result(), &["call_id", "content", "display_as", "subscription"][..]),
        (event(), &["associative", "final", "event_id"]),
        (oauth(), &["call_id"]),
        (user_choice(), &["call_id"]),
    ];
    for (message, optional) in table {
        let read = parse_callback(nulls(message.clone(), optional).to_string().as_bytes()).unwrap();
        assert_eq!(read, parse_callback(message.to_string().as_bytes()).unwrap());
    }
}

/// Proves: TR-21, TR-23
#[test]
fn a_body_that_is_not_a_json_object_is_rejected() {
    let table: [(&[u8], &str); 9] = [
        (b"", "Shape $: expected JSON, found an error: EOF while parsing a value at line 1 column 0"),
        (b"{", "Shape $: expected JSON, found an error: EOF while parsing an object at line 1 column 1"),
        (b"{} {}", "Shape $: expected JSON, found an error: trailing characters at line 1 column 4"),
        (b"\xef\xbb\xbf{}", "Shape $: expected JSON, found an error: expected value at line 1 column 1"),
        (
            b"{\"\xff\": 1}",
            "Shape $: expected JSON, found an error: invalid unicode code point at line 1 column 3",
        ),
        (b"null", "Shape $: expected an object, found null"),
        (b"[]", "Shape $: expected an object, found an array"),
        (b"\"{}\"", "Shape $: expected an object, found the string \"{}\""),
        (b"1e400", "Shape $: expected JSON, found an error: number out of range at line 1 column 5"),
    ];
    let parsers = [TOOLSET, INVOCATION, CALLBACK, ANSWER, CLOSE, CANCEL, QUERY, ALIVE, MIGRATE];
    for (bytes, expected) in table {
        for parse in parsers {
            let error = parse(bytes).unwrap_err();
            assert_eq!(format!("{:?} {error}", error.fault), expected);
        }
    }
}

/// Proves: TR-21
#[test]
fn an_unknown_message_type_is_rejected() {
    let known = "tool_result, subscription_event, oauth, user_choice or view_update";
    for kind in ["", "Tool_Result", "tool_result ", "error", "https"] {
        let expected = format!("Value $.type: expected {known}, found {kind:?}");
        check(CALLBACK, tool_result(), [("/type", json!(kind), expected.as_str())]);
    }
}

#[test]
fn unknown_fields_are_ignored() {
    for message in [tool_result(), event(), oauth(), user_choice(), view_update()] {
        check(CALLBACK, message, [("/future", json!({"a": [1]}), "ok")]);
    }
    check(TOOLSET, toolset(), [("/future", json!(1), "ok"), ("/tools/0/future", json!(1), "ok")]);
    check(INVOCATION, invocation(), [("/future", json!(1), "ok")]);
    check(CANCEL, cancel(), [("/future", json!(1), "ok")]);
}

/// Proves: TR-21
#[test]
fn a_result_needs_text_or_content() {
    let neither = "Shape $: expected `text` or `content`, found neither";
    check(CALLBACK, tool_result(), [("/text", Value::Null, neither)]);
    assert_eq!(outcome(CALLBACK, &changed(tool_result(), "/text", None)), neither);
}

#[test]
fn content_is_used_if_text_is_given_too() {
    let body = |message: Value| match parse_callback(message.to_string().as_bytes()) {
        Ok(Callback::ToolResult(result)) => result.body,
        other => panic!("{other:?}"),
    };
    let content = json!([{"type": "text", "text": "from content"}]);
    let both = changed(tool_result(), "/content", Some(content));
    let expected = Body::Content(vec![Content::Text { text: "from content".into() }]);
    assert_eq!(body(both.clone()), expected);
    assert_eq!(body(changed(both.clone(), "/text", Some(json!(5)))), expected);
    assert_eq!(body(changed(both, "/content", Some(Value::Null))), Body::Text("42".into()));
    assert_eq!(body(changed(tool_result(), "/content", Some(json!([])))), Body::Content(vec![]));
}

/// Proves: TR-21
#[test]
fn malformed_content_is_rejected() {
    let image = |data: &str, media: &str| json!([{"type": "image", "data": data, "mediaType": media}]);
    let media = "Value $.content[0].mediaType: expected a media type such as image/png, found ";
    let base64 = |found: &str| format!("Value $.content[0].data: expected base64, found the string {found}");
    let rows = [
        ("/content", json!([5]), "Shape $.content[0]: expected an object, found 5"),
        ("/content", json!([{}]), "Shape $.content[0].type: expected a string, found nothing"),
        (
            "/content",
            json!([{"type": "video"}]),
            "Value $.content[0].type: expected text or image, found \"video\"",
        ),
        ("/content", json!([{"type": "text"}]), "Shape $.content[0].text: expected a string, found nothing"),
        ("/content", json!([{"type": "image"}]), "Shape $.content[0].data: expected a string, found nothing"),
        (
            "/content",
            json!([{"type": "image", "data": ""}]),
            "Shape $.content[0].mediaType: expected a string, found nothing",
        ),
        ("/content", image("AAA", "image/png"), &base64("\"AAA\"")),
        ("/content", image("A===", "image/png"), &base64("\"A===\"")),
        ("/content", image("AA=A", "image/png"), &base64("\"AA=A\"")),
        ("/content", image("AA-_", "image/png"), &base64("\"AA-_\"")),
        ("/content", image("AA\nA", "image/png"), &base64("\"AA\\nA\"")),
        ("/content", image("+/==", "png"), &format!("{media}\"png\"")),
        ("/content", image("AAA=", "image/"), &format!("{media}\"image/\"")),
        ("/content", image("AAAA", "image/p ng"), &format!("{media}\"image/p ng\"")),
        ("/content", image("AAAA", "image/svg+xml"), "ok"),
    ];
    check(CALLBACK, tool_result(), rows);
}

#[test]
fn a_segment_of_an_unknown_type_is_skipped() {
    let segments =
        json!([{"type": "chart", "content": 5}, {"type": "text", "content": "x"}, {"type": "map"}]);
    let message = changed(tool_result(), "/display_as", Some(segments));
    let Ok(Callback::ToolResult(result)) = parse_callback(message.to_string().as_bytes()) else {
        panic!("not a result")
    };
    assert_eq!(result.display_as, [Segment::Text("x".into())]);
}

/// Proves: TR-21
#[test]
fn a_malformed_segment_of_a_known_type_is_rejected() {
    let rows = [
        ("/display_as", json!([5]), "Shape $.display_as[0]: expected an object, found 5"),
        (
            "/display_as",
            json!([{"content": "x"}]),
            "Shape $.display_as[0].type: expected a string, found nothing",
        ),
        (
            "/display_as",
            json!([{"type": "text", "content": {}}]),
            "Shape $.display_as[0].content: expected a string, found an object",
        ),
        (
            "/display_as",
            json!([{"type": "diff", "content": "x"}]),
            "Shape $.display_as[0].content: expected an object, found the string \"x\"",
        ),
        (
            "/display_as",
            json!([{"type": "diff", "content": {"path": "a"}}]),
            "Shape $.display_as[0].content.patch: expected a string, found nothing",
        ),
        (
            "/display_as",
            json!([{"type": "image", "content": {"data": "?"}}]),
            "Value $.display_as[0].content.data: expected base64, found the string \"?\"",
        ),
    ];
    check(CALLBACK, tool_result(), rows);
}

/// Proves: TR-21
#[test]
fn an_index_outside_of_the_choices_is_rejected() {
    let rows = [
        ("/default", json!(1), "ok"),
        ("/default", json!(2), "Value $.default: expected an index from 0 to 1, found 2"),
        ("/default", json!(-1), "Shape $.default: expected an index from 0 to 1, found -1"),
        ("/default", json!(1.0), "Shape $.default: expected an index from 0 to 1, found 1.0"),
        (
            "/default",
            json!(u64::MAX),
            "Value $.default: expected an index from 0 to 1, found 18446744073709551615",
        ),
        ("/default", json!("no"), "Shape $.default: expected an index from 0 to 1, found the string \"no\""),
        ("/choices", json!([]), "Value $.choices: expected at least one choice, found none"),
        ("/choices", json!(["no", {}]), "Shape $.choices[1]: expected a string, found an object"),
    ];
    check(CALLBACK, user_choice(), rows);
    let rows = [
        ("/selected", json!(0), "ok"),
        ("/selected", json!(2), "Value $.selected: expected an index from 0 to 1, found 2"),
    ];
    check(ANSWER, json!({"id": "c1", "selected": 1}), rows);
}

#[test]
fn a_tools_name_is_letters_digits_underscore_and_dash() {
    for name in ["", "a b", "a.b", "a/b", "ä", "a\u{0}", &"x".repeat(129)] {
        let found = format!("\"{}\"", name.chars().take(60).flat_map(char::escape_debug).collect::<String>());
        let found = if name.len() > 60 { format!("{}…\"", found.trim_end_matches('"')) } else { found };
        let rule = format!("expected 1 to 128 letters, digits, `_` or `-`, found {found}");
        let error = format!("Value $.tools[0].name: {rule}");
        check(TOOLSET, toolset(), [("/tools/0/name", json!(name), error.as_str())]);
        let error = format!("Value $.operation: {rule}");
        check(INVOCATION, invocation(), [("/operation", json!(name), error.as_str())]);
    }
}

#[test]
fn a_toolset_has_at_least_one_tool_and_unique_names() {
    let tool = toolset()["tools"][0].clone();
    let other = changed(tool.clone(), "/name", Some(json!("Now")));
    let rows = [
        ("/tools", json!([tool, other]), "ok"),
        ("/tools", json!([]), "Value $.tools: expected at least one tool, found none"),
        (
            "/tools",
            json!([tool, other, tool]),
            "Value $.tools[2].name: expected a unique name, found \"now\" a second time",
        ),
        ("/tools", json!([tool, 5]), "Shape $.tools[1]: expected an object, found 5"),
        ("/name", json!(""), "Value $.name: expected 1 to 128 characters, found \"\""),
    ];
    check(TOOLSET, toolset(), rows);
}

#[test]
fn one_invalid_tool_makes_the_whole_toolset_invalid() {
    let tool = toolset()["tools"][0].clone();
    let parts = [
        ("/name", None, "Shape $.tools[1].name: expected a string, found nothing"),
        ("/description", None, "Shape $.tools[1].description: expected a string, found nothing"),
        ("/inputSchema", None, "Shape $.tools[1].inputSchema: expected a JSON Schema object, found nothing"),
        (
            "/inputSchema",
            Some(json!(true)),
            "Shape $.tools[1].inputSchema: expected a JSON Schema object, found true",
        ),
        (
            "/annotations",
            Some(json!({"readOnly": "no"})),
            "Shape $.tools[1].annotations.readOnly: expected true or false, found the string \"no\"",
        ),
        (
            "/annotations",
            Some(json!({"requiresAuth": true})),
            "Shape $.tools[1].annotations.requiresAuth: expected a string, found true",
        ),
    ];
    for (pointer, value, expected) in parts {
        let bad = changed(changed(tool.clone(), "/name", Some(json!("other"))), pointer, value);
        check(TOOLSET, toolset(), [("/tools", json!([tool, bad]), expected)]);
    }
}

#[test]
fn a_schema_that_does_not_compile_is_rejected() {
    let error = |why: &str| {
        format!("Value $.tools[0].inputSchema: expected a JSON Schema that compiles, found an error at {why}")
    };
    let schemas = [
        (json!({"required": "x"}), r#"$.required: "x" is not of type "array""#),
        (
            json!({"properties": {"a": {"pattern": "("}}}),
            "$.properties.a.pattern: not a regular expression, or one with look-around or back-references",
        ),
        (json!({"$ref": "#/$defs/none"}), "$[\"$ref\"]: Pointer '/$defs/none' does not exist"),
    ];
    for (schema, why) in schemas {
        check(TOOLSET, toolset(), [("/tools/0/inputSchema", schema, error(why).as_str())]);
    }
}

/// Proves: CN-23
#[test]
fn an_id_has_1_to_256_bytes_and_no_control_characters() {
    let places: [(Parse, Value, &[&str]); 8] = [
        (INVOCATION, invocation(), &["id", "group_id", "user_id"]),
        (CALLBACK, tool_result(), &["group_id", "id", "call_id"]),
        (CALLBACK, event(), &["group_id", "tool_call_id", "event_id"]),
        (CALLBACK, oauth(), &["group_id", "id", "call_id"]),
        (CALLBACK, user_choice(), &["group_id", "id", "call_id"]),
        (CALLBACK, view_update(), &["group_id"]),
        (CANCEL, cancel(), &["thread_id", "tool_call_id"]),
        (MIGRATE, migrate(), &["session_id"]),
    ];
    let cut = format!("\"{}…\"", "x".repeat(60));
    for (parse, message, names) in places {
        for name in names {
            let pointer = format!("/{name}");
            let error = |found: &str| {
                format!("Value $.{name}: expected 1 to 256 bytes without control characters, found {found}")
            };
            let rows = [
                (pointer.as_str(), json!("x".repeat(256)), "ok"),
                (&pointer, json!("../ü ☃"), "ok"),
                (&pointer, json!(""), &error("\"\"")),
                (&pointer, json!("a\u{0}b\n"), &error("\"a\\0b\\n\"")),
                (&pointer, json!("\u{7f}"), &error("\"\\u{7f}\"")),
                (&pointer, json!("x".repeat(257)), &error(&cut)),
            ];
            check(parse, message.clone(), rows);
        }
    }
    let expected = "Value $.thread_ancestors[1]: expected 1 to 256 bytes without control characters, found the string \"\"";
    check(INVOCATION, invocation(), [("/thread_ancestors", json!(["t0", ""]), expected)]);
}

#[test]
fn a_view_type_has_1_to_128_characters_and_no_control_characters() {
    let error = |found: &str| {
        format!("Value $.view_type: expected 1 to 128 characters without control characters, found {found}")
    };
    let rows = [("/view_type", json!(""), error("\"\"")), ("/view_type", json!("a\tb"), error("\"a\\tb\""))];
    for (pointer, value, error) in rows {
        check(CALLBACK, view_update(), [(pointer, value, error.as_str())]);
    }
    let absent = changed(view_update(), "/content", None);
    let expected = "Shape $.content: expected any JSON, found nothing";
    assert_eq!(outcome(CALLBACK, &absent), expected);
}

#[test]
fn a_url_is_absolute_and_http() {
    let places: [(Parse, Value, &str); 5] = [
        (TOOLSET, toolset(), "endpoint"),
        (INVOCATION, invocation(), "callback_url"),
        (CALLBACK, oauth(), "auth_url"),
        (CALLBACK, user_choice(), "response_url"),
        (MIGRATE, migrate(), "destination_url"),
    ];
    for (parse, message, name) in places {
        let pointer = format!("/{name}");
        let absolute =
            format!("Value $.{name}: expected an absolute http or https URL, found something else");
        let scheme = format!("Value $.{name}: expected an http or https URL, found another scheme");
        let rows = [
            (pointer.as_str(), json!(""), absolute.as_str()),
            (&pointer, json!("/callback"), &absolute),
            (&pointer, json!("https://"), &absolute),
            (&pointer, json!("https://h:99999/"), &absolute),
            (&pointer, json!("ftp://h/"), &scheme),
            (&pointer, json!("javascript:alert(1)"), &scheme),
            (&pointer, json!("http://localhost:1/"), "ok"),
        ];
        check(parse, message, rows);
    }
}

#[test]
fn an_auth_url_is_https_unless_it_is_on_loopback() {
    let error = "Value $.auth_url: expected an https URL, or http on loopback, found http to another machine";
    let user = "Value $.auth_url: expected a URL without a user, found @ before the host";
    let rows = [
        ("/auth_url", json!("http://id.example.com/a"), error),
        ("/auth_url", json!("http://localhost.example.com/"), error),
        ("/auth_url", json!("http://127.0.0.1@example.com/"), user),
        ("/auth_url", json!("https://@example.com/"), user),
        ("/auth_url", json!("http://127.0.0.1:8080/a"), "ok"),
        ("/auth_url", json!("http://[::1]/a"), "ok"),
    ];
    check(CALLBACK, oauth(), rows);
}

/// Proves: LC-34
#[test]
fn an_error_never_repeats_a_url() {
    const SECRET: &str = "s3cr3t";
    let assert_no_secret = |parse: Parse, bytes: &[u8]| {
        if let Err(error) = parse(bytes) {
            let texts = format!("{error} {error:?}");
            assert!(!texts.contains(SECRET), "{texts}");
        }
    };
    let values = [
        json!(SECRET),
        json!("/s3cr3t"),
        json!("ftp://s3cr3t@h/s3cr3t"),
        json!("https://s3cr3t:99999/s3cr3t"),
        json!("https://[s3cr3t/s3cr3t"),
        json!("http://h/s3cr3t?s3cr3t"),
        json!(format!("https://h/{}", SECRET.repeat(2_000))),
        json!(["https://h/s3cr3t"]),
        json!({"s3cr3t": "https://h/s3cr3t"}),
    ];
    let places: [(Parse, Value, &str); 5] = [
        (TOOLSET, toolset(), "/endpoint"),
        (INVOCATION, invocation(), "/callback_url"),
        (CALLBACK, oauth(), "/auth_url"),
        (CALLBACK, user_choice(), "/response_url"),
        (MIGRATE, migrate(), "/destination_url"),
    ];
    for (parse, message, pointer) in places {
        for value in &values {
            let text = changed(message.clone(), pointer, Some(value.clone())).to_string();
            // The whole message, and the message truncated at every byte.
            let most = text.len().min(2_000);
            (1..most).chain([text.len()]).for_each(|end| assert_no_secret(parse, &text.as_bytes()[..end]));
        }
    }
    let addressed = changed(invocation(), "/callback_url", Some(json!("https://u:s3cr3t@h/s3cr3t")));
    let bad = changed(addressed, "/arguments", Some(json!(5)));
    let bad = parse_invocation(bad.to_string().as_bytes()).unwrap_err();
    assert!(bad.address.is_some() && !format!("{bad} {bad:?}").contains(SECRET), "{bad:?}");
}

/// Proves: TR-23
#[test]
fn an_invalid_invocation_has_an_address_if_it_can_be_read() {
    let long = "x".repeat(300);
    let table = [
        ("/operation", None, true),
        ("/operation", Some(json!("a b")), true),
        ("/arguments", Some(json!([])), true),
        ("/thread_ancestors", Some(json!([1])), true),
        ("/user_id", Some(json!("")), true),
        ("/toolset_version", Some(json!(long)), true),
        ("/id", None, false),
        ("/id", Some(json!("")), false),
        ("/group_id", Some(json!(5)), false),
        ("/group_id", Some(json!(long)), false),
        ("/callback_url", None, false),
        ("/callback_url", Some(json!("not a url")), false),
    ];
    for (pointer, value, addressed) in table {
        let message = changed(invocation(), pointer, value);
        let bad = parse_invocation(message.to_string().as_bytes()).unwrap_err();
        assert_eq!(bad.address.is_some(), addressed, "{message:.300}");
        assert_eq!(bad.to_string(), bad.error.to_string());
        if let Some(address) = bad.address {
            let url = address.callback_url.expose();
            assert_eq!((address.id.as_str(), address.group_id.as_str()), ("c1", "t1"));
            assert_eq!((address.call_id, url), (None, "https://agent.example.com/callback"));
        }
    }
    assert_eq!(parse_invocation(b"{").unwrap_err().address, None);
}

#[test]
fn an_unusable_secondary_id_is_left_out_of_the_address() {
    let table = [(json!("fc_1"), Some("fc_1")), (json!(""), None), (json!(5), None), (json!("a\n"), None)];
    for (call_id, expected) in table {
        let message = changed(invocation(), "/call_id", Some(call_id));
        let read = parse_invocation(message.to_string().as_bytes()).unwrap();
        assert_eq!(read.address.call_id.as_ref().map(|id| id.as_str()), expected);
        let bad = changed(message, "/arguments", None);
        let address = parse_invocation(bad.to_string().as_bytes()).unwrap_err().address.unwrap();
        assert_eq!(address.call_id.as_ref().map(|id| id.as_str()), expected);
    }
}

/// Proves: CN-23
#[test]
fn a_notification_without_an_id_is_a_shape_error_and_one_with_a_malformed_id_a_value_error() {
    let rule = "expected 1 to 256 bytes without control characters, found \"\"";
    let (bad_thread, bad_call) =
        (format!("Value $.thread_id: {rule}"), format!("Value $.tool_call_id: {rule}"));
    let missing = "Shape $.tool_call_id: expected a string, found nothing";
    let table = [
        (json!({"thread_id": "", "tool_call_id": "c1"}), bad_thread.as_str()),
        (json!({"thread_id": "t1", "tool_call_id": ""}), &bad_call),
        (json!({"thread_id": "", "tool_call_id": ""}), &bad_thread),
        (json!({"thread_id": ""}), missing),
        (json!({"thread_id": "t1"}), missing),
        (json!({"tool_call_id": ""}), "Shape $.thread_id: expected a string, found nothing"),
        (json!({"thread_id": 1, "tool_call_id": null}), "Shape $.thread_id: expected a string, found 1"),
    ];
    for (message, expected) in table {
        assert_eq!(outcome(CANCEL, &message), expected);
        assert_eq!(outcome(QUERY, &message), expected);
    }
    assert_eq!(outcome(CLOSE, &json!({"thread_id": ""})), bad_thread);
    assert_eq!(outcome(CLOSE, &json!({})), "Shape $.thread_id: expected a string, found nothing");
}

#[test]
fn every_limit_is_exact() {
    let bytes = |count: usize| json!("x".repeat(count));
    let names = |count: usize| json!("é".repeat(count));
    let list = |item: Value| move |count: usize| json!(vec![item.clone(); count]);
    let tool = |index: usize| json!({"name": format!("t{index}"), "description": "", "inputSchema": {}});
    let tools = |count: usize| (0..count).map(tool).collect();
    let hints = |count: usize| (0..count).map(|index| (format!("x-{index}"), json!(1))).collect();
    // {"description":"…"}
    let schema = |count: usize| json!({"description": "x".repeat(count - 18)});
    let url = |count: usize| json!(format!("https://h/{}", "x".repeat(count - 10)));
    let media = |count: usize| json!([{"type": "image", "data": "", "mediaType": format!("image/{}", "x".repeat(count - 6))}]);
    let diff = |count: usize| json!([{"type": "diff", "content": {"path": bytes(count), "patch": ""}}]);
    let text = list(json!({"type": "text", "text": "x"}));
    let segment = list(json!({"type": "text", "content": "x"}));
    let nested = |count: usize| (1..count).fold(json!(1), |inner, _| json!([inner]));
    let sixty = |character: &str| format!("\"{}…\"", character.repeat(60));

    // Each row: parser, message, pointer, a function that makes a value of a given size, the limit, and the error for a
    // value of one more.
    type Fill<'a> = &'a dyn Fn(usize) -> Value;
    let rows: [(Parse, Value, &str, Fill<'_>, usize, String); 23] = [
        (
            TOOLSET,
            toolset(),
            "/name",
            &names,
            128,
            format!("Value $.name: expected 1 to 128 characters, found {}", sixty("é")),
        ),
        (TOOLSET, toolset(), "/description", &bytes, 65_536, over_limit("$.description", "bytes", 65_536)),
        (TOOLSET, toolset(), "/endpoint", &url, 8_192, long_url("endpoint")),
        (TOOLSET, toolset(), "/version", &bytes, 256, over_limit("$.version", "bytes", 256)),
        (TOOLSET, toolset(), "/tools", &tools, 1_024, over_limit("$.tools", "items", 1_024)),
        (
            TOOLSET,
            toolset(),
            "/tools/0/description",
            &bytes,
            65_536,
            over_limit("$.tools[0].description", "bytes", 65_536),
        ),
        (
            TOOLSET,
            toolset(),
            "/tools/0/displayScript",
            &bytes,
            16_384,
            over_limit("$.tools[0].displayScript", "bytes", 16_384),
        ),
        (
            TOOLSET,
            toolset(),
            "/tools/0/annotations",
            &hints,
            64,
            "Value $.tools[0].annotations: expected at most 64 annotations, found 65".into(),
        ),
        (
            TOOLSET,
            toolset(),
            "/tools/0/inputSchema",
            &schema,
            262_144,
            "Value $.tools[0].inputSchema: expected at most 262144 bytes, found more".into(),
        ),
        (INVOCATION, invocation(), "/callback_url", &url, 8_192, long_url("callback_url")),
        (
            INVOCATION,
            invocation(),
            "/thread_ancestors",
            &list(json!("t0")),
            64,
            over_limit("$.thread_ancestors", "items", 64),
        ),
        (
            INVOCATION,
            invocation(),
            "/toolset_version",
            &bytes,
            256,
            over_limit("$.toolset_version", "bytes", 256),
        ),
        (INVOCATION, invocation(), "/arguments", &|count| json!({"a": nested(count - 1)}), 64, too_deep()),
        (CALLBACK, tool_result(), "/content", &text, 256, over_limit("$.content", "items", 256)),
        (
            CALLBACK,
            tool_result(),
            "/content",
            &media,
            128,
            over_limit("$.content[0].mediaType", "bytes", 128),
        ),
        (CALLBACK, tool_result(), "/display_as", &segment, 64, over_limit("$.display_as", "items", 64)),
        (
            CALLBACK,
            tool_result(),
            "/display_as",
            &diff,
            8_192,
            over_limit("$.display_as[0].content.path", "bytes", 8_192),
        ),
        (CALLBACK, user_choice(), "/choices", &list(json!("no")), 256, over_limit("$.choices", "items", 256)),
        (CALLBACK, user_choice(), "/choices/1", &bytes, 4_096, over_limit("$.choices[1]", "bytes", 4_096)),
        (CALLBACK, user_choice(), "/prompt", &bytes, 65_536, over_limit("$.prompt", "bytes", 65_536)),
        (CALLBACK, user_choice(), "/response_url", &url, 8_192, long_url("response_url")),
        (
            CALLBACK,
            view_update(),
            "/view_type",
            &names,
            128,
            format!(
                "Value $.view_type: expected 1 to 128 characters without control characters, found {}",
                sixty("é")
            ),
        ),
        (CALLBACK, view_update(), "/content", &nested, 64, too_deep()),
    ];
    for (parse, message, pointer, fill, most, error) in rows {
        check(parse, message, [(pointer, fill(most), "ok"), (pointer, fill(most + 1), error.as_str())]);
    }
}

fn over_limit(path: &str, unit: &str, most: usize) -> String {
    format!("Value {path}: expected at most {most} {unit}, found {} {unit}", most + 1)
}

fn long_url(name: &str) -> String {
    format!("Value $.{name}: expected a URL of at most 8192 bytes, found a longer one")
}

fn too_deep() -> String {
    "Shape $: expected at most 64 levels of nesting, found more".into()
}

#[test]
fn a_body_of_8_mib_is_accepted_and_one_byte_more_is_rejected() {
    let body = |length: usize| {
        let empty = changed(tool_result(), "/text", Some(json!(""))).to_string();
        changed(tool_result(), "/text", Some(json!("x".repeat(length - empty.len()))))
    };
    assert_eq!(outcome(CALLBACK, &body(limits::BODY_BYTES)), "ok");
    let expected = "Shape $: expected at most 8388608 bytes, found 8388609 bytes";
    assert_eq!(outcome(CALLBACK, &body(limits::BODY_BYTES + 1)), expected);
}
