//! Properties of all messages: serializing and parsing is lossless, unknown fields are ignored, and invalid input gives
//! a short error and never a panic.

use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::Index;
use rap_protocol::schema::Rejected;
use rap_protocol::{
    Address, Annotations, AuthUrl, Body, CallId, Callback, CallbackUrl, CancelToolCall, ChoiceAnswer,
    CloseThread, Content, EndpointUrl, EventId, Fault, Image, InputSchema, Invalid, Invocation, Migrate,
    Oauth, ResponseUrl, Segment, StatusAnswer, StatusQuery, SubscriptionEvent, ThreadId, Tool, ToolName,
    ToolResult, Toolset, UserChoice, UserId, ViewUpdate, parse_callback, parse_cancel_tool_call,
    parse_choice_answer, parse_close_thread, parse_invocation, parse_migrate, parse_status_answer,
    parse_status_query, parse_toolset, redact,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Maximum length of an error message, in bytes.
const ERROR_BYTES: usize = 2 * 1024;
/// Number of choices of the question that a generated [`ChoiceAnswer`] answers.
const CHOICES: usize = 8;

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
enum Message {
    Toolset(Toolset),
    Invocation(Invocation),
    Callback(Callback),
    ChoiceAnswer(ChoiceAnswer),
    CloseThread(CloseThread),
    CancelToolCall(CancelToolCall),
    StatusQuery(StatusQuery),
    StatusAnswer(StatusAnswer),
    Migrate(Migrate),
}

/// Indices into [`PARSERS`].
const TOOLSET: usize = 0;
const INVOCATION: usize = 1;
const CALLBACK: usize = 2;
const STATUS_ANSWER: usize = 7;
const MIGRATE: usize = 8;

type Parse = fn(&[u8]) -> Result<Message, Invalid>;

const PARSERS: [Parse; 9] = [
    |bytes| parse_toolset(bytes).map(Message::Toolset),
    |bytes| parse_invocation(bytes).map(Message::Invocation).map_err(|bad| bad.error),
    |bytes| parse_callback(bytes).map(Message::Callback),
    |bytes| parse_choice_answer(bytes, CHOICES).map(Message::ChoiceAnswer),
    |bytes| parse_close_thread(bytes).map(Message::CloseThread),
    |bytes| parse_cancel_tool_call(bytes).map(Message::CancelToolCall),
    |bytes| parse_status_query(bytes).map(Message::StatusQuery),
    |bytes| parse_status_answer(bytes).map(Message::StatusAnswer),
    |bytes| parse_migrate(bytes).map(Message::Migrate),
];

impl Message {
    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a message can be serialized")
    }

    fn value(&self) -> Value {
        serde_json::to_value(self).expect("a message can be serialized")
    }

    /// Parses bytes as a message of the same kind.
    fn parse_same_kind(&self, bytes: &[u8]) -> Result<Message, Invalid> {
        let parser = match self {
            Message::Toolset(_) => TOOLSET,
            Message::Invocation(_) => INVOCATION,
            Message::Callback(_) => CALLBACK,
            Message::ChoiceAnswer(_) => 3,
            Message::CloseThread(_) => 4,
            Message::CancelToolCall(_) => 5,
            Message::StatusQuery(_) => 6,
            Message::StatusAnswer(_) => STATUS_ANSWER,
            Message::Migrate(_) => MIGRATE,
        };
        PARSERS[parser](bytes)
    }
}

fn id<T: TryFrom<String, Error: std::fmt::Debug> + std::fmt::Debug>() -> impl Strategy<Value = T> {
    "\\PC{1,40}".prop_map(|text| T::try_from(text).expect("an id"))
}

fn tool_name() -> impl Strategy<Value = ToolName> {
    "[A-Za-z0-9_-]{1,128}".prop_map(|text| ToolName::new(text).expect("a name"))
}

fn url<T: TryFrom<String, Error: std::fmt::Debug> + std::fmt::Debug>() -> impl Strategy<Value = T> {
    "https://([a-z]{1,5}:[a-z]{1,5}@)?[a-z]{1,9}\\.example(:[1-9][0-9]{0,3})?(/[\\PC&&\\S]{0,20})?(\\?[a-z%=&/]{0,20})?"
        .prop_map(|text| T::try_from(text).expect("a URL"))
}

fn auth_url() -> impl Strategy<Value = AuthUrl> {
    "https://[a-z]{1,9}\\.example(:[1-9][0-9]{0,3})?(/[\\PC&&\\S]{0,20})?(\\?[a-z%=&/]{0,20})?"
        .prop_map(|text| AuthUrl::new(text).expect("a URL"))
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(any::<String>(), inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn any_object() -> impl Strategy<Value = Map<String, Value>> {
    btree_map(any::<String>(), any_json(), 0..4).prop_map(|map| map.into_iter().collect())
}

fn schema() -> impl Strategy<Value = InputSchema> {
    let kind = prop_oneof![Just("string"), Just("integer"), Just("array"), Just("object")];
    let documents = btree_map("\\PC{1,8}", kind, 0..4).prop_map(|properties| {
        let names: Vec<String> = properties.keys().cloned().collect();
        let kinds: BTreeMap<_, _> =
            properties.into_iter().map(|(name, kind)| (name, json!({"type": kind}))).collect();
        json!({"type": "object", "properties": kinds, "required": names})
    });
    documents.prop_map(|document| InputSchema::new(document).expect("a schema"))
}

fn annotations() -> impl Strategy<Value = Annotations> {
    let flag = || proptest::option::of(any::<bool>());
    let extensions = btree_map("x-[a-z]{0,5}", any_json(), 0..3);
    (proptest::option::of(any::<String>()), flag(), flag(), flag(), flag(), extensions).prop_map(
        |(requires_auth, read_only, destructive, idempotent, long_running, extensions)| Annotations {
            requires_auth,
            read_only,
            destructive,
            idempotent,
            long_running,
            extensions,
        },
    )
}

fn tool() -> impl Strategy<Value = Tool> {
    let script = proptest::option::of(any::<String>());
    (tool_name(), any::<String>(), schema(), annotations(), script).prop_map(
        |(name, description, input_schema, annotations, display_script)| Tool {
            name,
            description,
            input_schema,
            annotations,
            display_script,
        },
    )
}

fn toolset() -> impl Strategy<Value = Toolset> {
    let tools = vec(tool(), 1..4).prop_map(|tools| {
        let unique: BTreeMap<_, _> = tools.into_iter().map(|tool| (tool.name.clone(), tool)).collect();
        unique.into_values().collect()
    });
    let text = || proptest::option::of(any::<String>());
    let version = proptest::option::of("\\PC{0,40}");
    ("\\PC{1,128}", text(), url(), tools, version, any::<bool>()).prop_map(
        |(name, description, endpoint, tools, version, needs_migration)| Toolset {
            name,
            description,
            endpoint,
            tools,
            version,
            needs_migration,
        },
    )
}

fn address() -> impl Strategy<Value = Address> {
    (id(), proptest::option::of(id()), url(), id())
        .prop_map(|(id, call_id, callback_url, group_id)| Address { id, call_id, callback_url, group_id })
}

fn invocation() -> impl Strategy<Value = Invocation> {
    let version = proptest::option::of("\\PC{0,40}");
    let user = proptest::option::of(id::<UserId>());
    (tool_name(), any_object(), address(), vec(id(), 0..4), user, version).prop_map(
        |(operation, arguments, address, thread_ancestors, user_id, toolset_version)| Invocation {
            operation,
            arguments,
            address,
            thread_ancestors,
            user_id,
            toolset_version,
        },
    )
}

fn image() -> impl Strategy<Value = Image> {
    ("([A-Za-z0-9+/]{4}){0,8}([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", "[a-z]{1,9}/[a-z.+-]{1,9}")
        .prop_map(|(data, media_type)| Image { data, media_type })
}

fn tool_result() -> impl Strategy<Value = ToolResult> {
    let content = prop_oneof![
        any::<String>().prop_map(|text| Content::Text { text }),
        image().prop_map(Content::Image)
    ];
    let body = prop_oneof![any::<String>().prop_map(Body::Text), vec(content, 0..4).prop_map(Body::Content)];
    let segment = prop_oneof![
        any::<String>().prop_map(Segment::Text),
        (any::<String>(), any::<String>()).prop_map(|(path, patch)| Segment::Diff { path, patch }),
        image().prop_map(Segment::Image),
    ];
    (address(), body, vec(segment, 0..4), any::<bool>()).prop_map(
        |(address, body, display_as, subscription)| {
            let plain = ToolResult::new(&address, body);
            ToolResult { display_as, subscription, ..plain }
        },
    )
}

fn event() -> impl Strategy<Value = SubscriptionEvent> {
    let event_id = proptest::option::of(id::<EventId>());
    (id(), id(), any::<String>(), any::<bool>(), any::<bool>(), event_id).prop_map(
        |(group_id, tool_call_id, text, associative, is_final, event_id)| SubscriptionEvent {
            group_id,
            tool_call_id,
            text,
            associative,
            is_final,
            event_id,
        },
    )
}

fn user_choice() -> impl Strategy<Value = UserChoice> {
    (address(), any::<String>(), vec(any::<String>(), 1..CHOICES), any::<Index>(), url()).prop_map(
        |(address, prompt, choices, default, response_url)| UserChoice {
            group_id: address.group_id,
            id: address.id,
            call_id: address.call_id,
            prompt,
            default: default.index(choices.len()),
            choices,
            response_url,
        },
    )
}

fn callback() -> impl Strategy<Value = Callback> {
    let oauth = (address(), auth_url()).prop_map(|(Address { group_id, id, call_id, .. }, auth_url)| {
        Callback::Oauth(Oauth { group_id, id, call_id, auth_url })
    });
    let view = (id(), "\\PC{1,128}", any_json()).prop_map(|(group_id, view_type, content)| {
        Callback::ViewUpdate(ViewUpdate { group_id, view_type, content })
    });
    prop_oneof![
        tool_result().prop_map(Callback::ToolResult),
        event().prop_map(Callback::SubscriptionEvent),
        user_choice().prop_map(Callback::UserChoice),
        oauth,
        view,
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let call = || (id::<ThreadId>(), id::<CallId>());
    let answer = (id(), 0..CHOICES).prop_map(|(id, selected)| ChoiceAnswer { id, selected });
    let cancel = call().prop_map(|(thread_id, tool_call_id)| CancelToolCall { thread_id, tool_call_id });
    let query = call().prop_map(|(thread_id, tool_call_id)| StatusQuery { thread_id, tool_call_id });
    let migrate =
        (id(), url()).prop_map(|(session_id, destination_url)| Migrate { session_id, destination_url });
    prop_oneof![
        2 => toolset().prop_map(Message::Toolset),
        3 => invocation().prop_map(Message::Invocation),
        8 => callback().prop_map(Message::Callback),
        1 => answer.prop_map(Message::ChoiceAnswer),
        1 => id().prop_map(|thread_id| Message::CloseThread(CloseThread { thread_id })),
        1 => cancel.prop_map(Message::CancelToolCall),
        1 => query.prop_map(Message::StatusQuery),
        1 => any::<bool>().prop_map(|alive| Message::StatusAnswer(StatusAnswer { alive })),
        1 => migrate.prop_map(Message::Migrate),
    ]
}

/// Adds an unknown field to every object of a message, except to objects in which every field is data.
fn add_unknown_fields(value: &mut Value, unknown: &Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| add_unknown_fields(item, unknown)),
        Value::Object(fields) => {
            let is_view = fields.contains_key("view_type");
            for (name, value) in fields.iter_mut() {
                let is_data = matches!(name.as_str(), "arguments" | "inputSchema")
                    || name.starts_with("x-")
                    || (is_view && name == "content");
                if !is_data {
                    add_unknown_fields(value, unknown);
                }
            }
            fields.insert("future field".into(), unknown.clone());
        }
        _ => {}
    }
}

/// JSON pointers to all values inside of a JSON value.
fn places(value: &Value) -> Vec<String> {
    fn walk(value: &Value, here: String, found: &mut Vec<String>) {
        match value {
            Value::Array(items) => items
                .iter()
                .enumerate()
                .for_each(|(index, item)| walk(item, format!("{here}/{index}"), found)),
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                walk(value, format!("{here}/{}", name.replace('~', "~0").replace('/', "~1")), found);
            }),
            _ => {}
        }
        found.push(here);
    }
    let mut found = Vec::new();
    walk(value, String::new(), &mut found);
    found
}

/// Passes bytes to every parser. None may panic, and every error has to be short.
fn parse_with_all(bytes: &[u8]) {
    PARSERS.into_iter().for_each(|parse| parse_with(parse, bytes));
}

fn parse_with(parse: Parse, bytes: &[u8]) {
    if let Err(error) = parse(bytes) {
        let (shown, debugged) = (error.to_string(), format!("{error:?}"));
        assert!(shown.len() <= ERROR_BYTES, "{} bytes: {shown:.300}", shown.len());
        assert!(debugged.len() <= 2 * ERROR_BYTES, "{} bytes: {debugged:.300}", debugged.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_serialized_message_parses_to_itself(message in message()) {
        prop_assert_eq!(message.parse_same_kind(&message.bytes()), Ok(message));
    }

    #[test]
    fn a_message_is_written_as_one_json_object_in_utf_8(message in message()) {
        let bytes = message.bytes();
        prop_assert!(std::str::from_utf8(&bytes).is_ok());
        prop_assert_eq!(serde_json::from_slice::<Value>(&bytes).unwrap(), message.value());
        prop_assert!(message.value().is_object());
    }

    #[test]
    fn unknown_fields_are_ignored_at_every_level(message in message(), unknown in any_json()) {
        let mut value = message.value();
        add_unknown_fields(&mut value, &unknown);
        prop_assert_eq!(message.parse_same_kind(value.to_string().as_bytes()), Ok(message));
    }

    #[test]
    fn unknown_fields_in_arguments_are_kept(mut invocation in invocation(), unknown in any_json()) {
        invocation.arguments.insert("future field".into(), unknown);
        let bytes = serde_json::to_vec(&invocation).unwrap();
        prop_assert_eq!(parse_invocation(&bytes).unwrap().arguments, invocation.arguments);
    }

    /// Proves: TR-21
    #[test]
    fn an_unknown_message_type_is_rejected_whatever_the_other_fields_are(callback in callback(), kind in "\\PC{0,80}|[a-z_]{1,20}") {
        let known = ["tool_result", "subscription_event", "oauth", "user_choice", "view_update"];
        prop_assume!(!known.contains(&kind.as_str()));
        let mut value = serde_json::to_value(&callback).unwrap();
        value["type"] = json!(kind);
        let error = parse_callback(value.to_string().as_bytes()).unwrap_err();
        prop_assert_eq!((error.fault, error.path.as_str()), (Fault::Value, "$.type"));
    }

    #[test]
    fn an_unknown_type_is_rejected_in_content_and_skipped_in_display_as(
        result in tool_result(),
        item in any_object(),
        kind in "[a-z_]{0,20}",
        place in any::<Index>(),
    ) {
        prop_assume!(!["text", "image", "diff"].contains(&kind.as_str()));
        let mut item = Value::Object(item);
        item["type"] = json!(kind);
        let with = |name: &str, length: usize| {
            let at = place.index(length + 1);
            let mut value = serde_json::to_value(Callback::ToolResult(result.clone())).unwrap();
            if value[name].is_null() {
                value[name] = json!([]);
            }
            value[name].as_array_mut().unwrap().insert(at, item.clone());
            (at, parse_callback(value.to_string().as_bytes()))
        };
        let (_, read) = with("display_as", result.display_as.len());
        prop_assert_eq!(read, Ok(Callback::ToolResult(result.clone())));
        let items = match &result.body { Body::Text(_) => 0, Body::Content(items) => items.len() };
        let (at, read) = with("content", items);
        prop_assert_eq!(read.unwrap_err().path, format!("$.content[{at}].type"));
    }

    #[test]
    fn arbitrary_bytes_give_a_short_error(bytes in vec(any::<u8>(), 0..300)) {
        parse_with_all(&bytes);
    }

    #[test]
    fn arbitrary_json_gives_a_short_error(value in any_json()) {
        parse_with_all(value.to_string().as_bytes());
    }

    #[test]
    fn a_message_with_one_value_replaced_gives_a_short_error(
        message in message(),
        place in any::<Index>(),
        other in any_json(),
    ) {
        let mut value = message.value();
        let places = places(&value);
        *value.pointer_mut(&places[place.index(places.len())]).unwrap() = other;
        parse_with_all(value.to_string().as_bytes());
    }

    #[test]
    fn a_message_with_flipped_bits_or_a_truncated_message_gives_a_short_error(
        message in message(),
        flips in vec((any::<Index>(), 1..=255u8), 1..4),
        end in any::<Index>(),
    ) {
        let mut bytes = message.bytes();
        parse_with_all(&bytes[..end.index(bytes.len())]);
        for (place, bits) in flips {
            *place.get_mut(&mut bytes) ^= bits;
        }
        parse_with_all(&bytes);
    }

    #[test]
    fn the_description_of_a_schema_violation_is_short(schema in schema(), arguments in any_object()) {
        if let Err(rejected) = schema.validate(&Value::Object(arguments.clone())) {
            let Rejected::Violations(violations) = rejected else { panic!("{rejected}") };
            for violation in violations {
                prop_assert!(violation.to_string().len() <= ERROR_BYTES, "{:.300}", violation.to_string());
            }
        }
    }

    /// Proves: LC-34
    #[test]
    fn display_and_debug_of_a_url_omit_user_path_query_and_fragment(secret in "[A-Z]{12}", host in "[a-z]{1,9}", port in 1..u16::MAX) {
        let text = format!("https://{secret}:{secret}@{host}.example:{port}/{secret}/?{secret}={secret}#{secret}");
        let printed = [
            format!("{0} {0:?}", CallbackUrl::new(text.clone()).unwrap()),
            format!("{0} {0:?}", AuthUrl::new(text.replace(&format!("{secret}:{secret}@"), "")).unwrap()),
            format!("{0} {0:?}", ResponseUrl::new(text.clone()).unwrap()),
            format!("{0} {0:?}", EndpointUrl::new(text.clone()).unwrap()),
            redact::text(&format!("→{text} and ({text}), \"{text}\"")),
        ];
        for printed in printed {
            prop_assert!(printed.contains(&host) && !printed.contains(&secret), "{}", printed);
        }
    }

    #[test]
    fn arbitrary_text_can_be_redacted(words in vec(prop_oneof![any::<String>(), Just("://".to_owned()), Just("/a/b".into())], 0..6)) {
        let redacted = redact::text(&words.concat());
        prop_assert!(redacted.chars().count() <= 16 * 1_024);
    }
}

/// Sets every field to a long value, including characters that grow when they are escaped.
#[test]
fn a_huge_value_in_any_field_gives_a_short_error() {
    let golden: [(usize, &[u8]); 8] = [
        (TOOLSET, include_bytes!("../golden/toolset_full.json")),
        (INVOCATION, include_bytes!("../golden/invocation_child.json")),
        (CALLBACK, include_bytes!("../golden/tool_result_content.json")),
        (CALLBACK, include_bytes!("../golden/tool_result_display.json")),
        (CALLBACK, include_bytes!("../golden/user_choice.json")),
        (CALLBACK, include_bytes!("../golden/oauth.json")),
        (MIGRATE, include_bytes!("../golden/migrate.json")),
        (STATUS_ANSWER, include_bytes!("../golden/tool_call_status_answer.json")),
    ];
    for (parser, file) in golden {
        let message: Value = serde_json::from_slice(file).unwrap();
        for place in places(&message) {
            for filler in ["x", "\u{10ffff}", "\\"] {
                let huge = Value::from(filler.repeat(20_000));
                for value in [huge.clone(), json!({"type": huge, "pattern": huge})] {
                    let mut message = message.clone();
                    *message.pointer_mut(&place).unwrap() = value;
                    parse_with(PARSERS[parser], message.to_string().as_bytes());
                }
            }
        }
    }
}

#[test]
fn a_body_of_8_mib_gives_a_short_error() {
    const MOST: usize = 8 * 1024 * 1024;
    for filler in ["x", "[", "{\"a\":", "\"\\"] {
        parse_with(PARSERS[CALLBACK], filler.repeat(MOST / filler.len()).as_bytes());
    }
    let kind = json!({"type": "\u{10ffff}".repeat(MOST / 4 - 10), "id": 1});
    assert!(parse_callback(kind.to_string().as_bytes()).unwrap_err().to_string().len() <= ERROR_BYTES);
    let schema = json!({"properties": {"a".repeat(100_000): {"type": "\u{10ffff}".repeat(30_000)}}});
    let error = InputSchema::new(schema).unwrap_err().to_string();
    assert!(error.len() <= ERROR_BYTES, "{}", error.len());
}
