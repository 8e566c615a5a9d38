//! Golden files: each message is parsed into its type and serialized back to the same JSON.
//!
//! The files `seed_*.json` are examples from the specification, byte for byte.

use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;

use rap_protocol::{
    Address, Annotations, Body, CallId, Callback, CallbackUrl, CancelToolCall, ChoiceAnswer, CloseThread,
    Content, EndpointUrl, EventId, Image, InputSchema, Invocation, Migrate, Oauth, Segment, StatusAnswer,
    StatusQuery, SubscriptionEvent, ThreadId, Tool, ToolName, ToolResult, Toolset, UserChoice, UserId,
    ViewUpdate, parse_callback, parse_cancel_tool_call, parse_choice_answer, parse_close_thread,
    parse_invocation, parse_migrate, parse_status_answer, parse_status_query, parse_toolset,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Asserts that the file parses to `expected` and that `expected` is serialized to the JSON of the file.
fn golden<T, E>(name: &str, parse: impl Fn(&[u8]) -> Result<T, E>, expected: T)
where
    T: Debug + PartialEq + Serialize,
    E: Debug,
{
    let file = fs::read(directory().join(name).with_extension("json")).expect("the golden file is readable");
    assert_eq!(parse(&file).expect(name), expected, "{name}");
    let written: Value = serde_json::from_slice(&serde_json::to_vec(&expected).expect(name)).expect(name);
    assert_eq!(written, serde_json::from_slice::<Value>(&file).expect(name), "{name}");
}

fn thread(id: &str) -> ThreadId {
    ThreadId::new(id).expect(id)
}

fn call(id: &str) -> CallId {
    CallId::new(id).expect(id)
}

/// Address of the call in all golden files.
fn address(call_id: Option<&str>) -> Address {
    Address {
        id: call("call_abc123"),
        call_id: call_id.map(call),
        callback_url: CallbackUrl::new("https://agent.example.com/callback").expect("a URL"),
        group_id: thread("thread_xyz"),
    }
}

fn text_result(text: &str) -> ToolResult {
    ToolResult::new(&address(None), Body::Text(text.into()))
}

fn png() -> Image {
    Image { data: "iVBORw0KGgo=".into(), media_type: "image/png".into() }
}

fn event(text: &str) -> SubscriptionEvent {
    SubscriptionEvent {
        group_id: thread("thread_xyz"),
        tool_call_id: call("call_abc123"),
        text: text.into(),
        associative: false,
        is_final: false,
        event_id: None,
    }
}

fn tool(name: &str, description: &str, schema: Value) -> Tool {
    Tool {
        name: ToolName::new(name).expect(name),
        description: description.into(),
        input_schema: InputSchema::new(schema).expect(name),
        annotations: Annotations::default(),
        display_script: None,
    }
}

fn fields(object: Value) -> Map<String, Value> {
    object.as_object().expect("an object").clone()
}

#[test]
fn a_toolset_with_only_the_required_fields() {
    let expected = Toolset {
        name: "clock".into(),
        description: None,
        endpoint: EndpointUrl::new("https://tool.example.com/invoke").unwrap(),
        tools: vec![tool("now", "The time of day", json!({"type": "object"}))],
        version: None,
        needs_migration: false,
    };
    golden("toolset_minimal", parse_toolset, expected);
}

#[test]
fn a_toolset_with_all_fields() {
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"owner": {"type": "string"}, "repo": {"type": "string"}},
        "required": ["owner", "repo"],
    });
    let what = "Wakes the agent when something happens in a repository";
    let subscribe = Tool {
        annotations: Annotations {
            requires_auth: Some("github".into()),
            read_only: Some(true),
            destructive: Some(false),
            idempotent: Some(true),
            long_running: Some(true),
            extensions: fields(json!({"x-cost": {"per_call": 0.25}, "x-note": null})).into_iter().collect(),
        },
        display_script: Some("`${args.owner}/${args.repo}`".into()),
        ..tool("subscribe_github_events", what, schema)
    };
    let delete = tool("delete-repo_2", "", json!({"type": "object", "additionalProperties": false}));
    let expected = Toolset {
        name: "GitHub".into(),
        description: Some("Repositories and their events".into()),
        endpoint: EndpointUrl::new("https://tool.example.com/invoke").unwrap(),
        tools: vec![subscribe, delete],
        version: Some("2024-05-01".into()),
        needs_migration: true,
    };
    golden("toolset_full", parse_toolset, expected);
}

#[test]
fn an_invocation_from_a_root_thread() {
    let expected = Invocation {
        operation: ToolName::new("now").unwrap(),
        arguments: Map::new(),
        address: address(None),
        thread_ancestors: Vec::new(),
        user_id: None,
        toolset_version: None,
    };
    golden("invocation_root", parse_invocation, expected);
}

#[test]
fn an_invocation_from_a_child_thread_with_all_fields() {
    let callback_url = CallbackUrl::new("https://agent.example.com/callback?token=t0k3n").unwrap();
    let arguments = json!({
        "owner": "acme", "repo": "api", "limit": 1e21, "nested": {"unknown": [null, -1, 0.1]},
    });
    let expected = Invocation {
        operation: ToolName::new("subscribe_github_events").unwrap(),
        arguments: fields(arguments),
        address: Address { callback_url, ..address(Some("fc_1")) },
        thread_ancestors: vec![thread("thread_root"), thread("thread_parent")],
        user_id: Some(UserId::new("user ü").unwrap()),
        toolset_version: Some("2024-05-01".into()),
    };
    golden("invocation_child", parse_invocation, expected);
}

/// Proves: LC-11
#[test]
fn a_result_carries_the_ids_of_its_call() {
    golden("tool_result_text", parse_callback, Callback::ToolResult(text_result("42")));
    let items = vec![Content::Text { text: "a dot".into() }, Content::Image(png())];
    let expected = ToolResult::new(&address(Some("fc_1")), Body::Content(items));
    golden("tool_result_content", parse_callback, Callback::ToolResult(expected));
}

#[test]
fn a_result_with_display_segments() {
    let diff = Segment::Diff { path: "src/a.rs".into(), patch: "@@ -1 +1 @@\n-a\n+b\n".into() };
    let display_as = vec![diff, Segment::Image(png()), Segment::Text("edited src/a.rs".into())];
    let expected = ToolResult { display_as, ..text_result("edited") };
    golden("tool_result_display", parse_callback, Callback::ToolResult(expected));
}

#[test]
fn a_result_that_confirms_a_subscription() {
    let text = "Subscribed to pull_request events. Subscription ID: sub_abc";
    let expected = ToolResult { subscription: true, ..text_result(text) };
    golden("tool_result_subscription", parse_callback, Callback::ToolResult(expected));
}

#[test]
fn an_error_is_a_result_whose_text_has_the_error_prefix() {
    let expected =
        ToolResult::error(&address(Some("fc_1")), "no repository acme/api; check the owner's name");
    golden("tool_result_error", parse_callback, Callback::ToolResult(expected));
}

/// Proves: SE-02
#[test]
fn an_event_is_neither_associative_nor_final_by_default() {
    let text = r#"{"event_type": "pull_request", "action": "opened", "number": 42}"#;
    golden("seed_subscription_event", parse_callback, Callback::SubscriptionEvent(event(text)));

    let text = "build output line 1\nbuild output line 2\n[exit code: 0]";
    let last = SubscriptionEvent { associative: true, is_final: true, ..event(text) };
    golden("seed_subscription_event_associative", parse_callback, Callback::SubscriptionEvent(last));

    let event_id = Some(EventId::new("evt-1").unwrap());
    let known = SubscriptionEvent { associative: true, event_id, ..event("a line") };
    golden("subscription_event_with_id", parse_callback, Callback::SubscriptionEvent(known));
}

#[test]
fn a_request_for_authorization() {
    let Address { id, call_id, group_id, .. } = address(Some("fc_1"));
    let auth_url = "https://id.example.com/authorize?state=s".to_owned().try_into().unwrap();
    golden("oauth", parse_callback, Callback::Oauth(Oauth { group_id, id, call_id, auth_url }));
}

#[test]
fn a_question_to_the_user_and_its_answer() {
    let Address { id, call_id, group_id, .. } = address(None);
    let expected = UserChoice {
        group_id,
        id: id.clone(),
        call_id,
        prompt: "Delete acme/api?".into(),
        choices: vec!["no".into(), "yes".into()],
        default: 0,
        response_url: "https://tool.example.com/answer/1".to_owned().try_into().unwrap(),
    };
    golden("user_choice", parse_callback, Callback::UserChoice(expected));
    golden("choice_answer", |bytes| parse_choice_answer(bytes, 2), ChoiceAnswer { id, selected: 1 });
}

#[test]
fn the_content_of_a_view_is_any_json() {
    let view = |content| {
        let (group_id, view_type) = (thread("thread_xyz"), "progress".into());
        Callback::ViewUpdate(ViewUpdate { group_id, view_type, content })
    };
    golden("view_update", parse_callback, view(json!({"done": 3, "of": [4, null]})));
    golden("view_update_null", parse_callback, view(Value::Null));
}

#[test]
fn notifications_and_queries_of_a_runtime() {
    let (thread_id, tool_call_id) = (thread("thread_xyz"), call("call_abc123"));
    golden("seed_close_thread", parse_close_thread, CloseThread { thread_id: thread_id.clone() });
    let cancel = CancelToolCall { thread_id: thread_id.clone(), tool_call_id: tool_call_id.clone() };
    golden("seed_cancel_tool_call", parse_cancel_tool_call, cancel);
    golden("tool_call_status", parse_status_query, StatusQuery { thread_id, tool_call_id });
    golden("tool_call_status_answer", parse_status_answer, StatusAnswer { alive: false });
    let destination_url = EndpointUrl::new("https://new.example.com/import").unwrap();
    golden("migrate", parse_migrate, Migrate { session_id: thread("thread_root"), destination_url });
}

#[test]
fn every_golden_file_is_read_by_a_test() {
    for file in fs::read_dir(directory()).unwrap() {
        let stem = file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned();
        assert!(include_str!("golden.rs").contains(&format!("golden(\"{stem}\"")), "{stem}");
    }
}
