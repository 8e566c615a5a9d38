//! Toolsets and arguments that are expensive to check.

use std::sync::Arc;

use rap_testkit::poll;
use rap_testkit::tools::{tool, with};
use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, REACHED_WITHIN, Stage, TOOL};
use crate::wire;

const TOPIC: &str = "validation";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "hostile schema", "a schema without bounds is offered to the model", schemas),
        attempt!(TOPIC, "hostile toolset", "an invalid toolset is offered to the model", toolsets),
        attempt!(TOPIC, "2,000 constants and 8,000 items", "the check costs more than its budget", constants),
        attempt!(TOPIC, "list of an enum in 2.4 MB", "the check costs more than its budget", list_of_enum),
        attempt!(TOPIC, "expensive patterns on 1 MB", "the check costs more than its budget", patterns),
        attempt!(
            TOPIC,
            "hostile arguments at a tool server",
            "the check costs more than its budget",
            tool_server
        ),
        attempt!(TOPIC, "hostile display script", "a script runs for longer than its limit", scripts),
    ]
}

/// Waits until the call of a thread was sent or refused. Returns its history.
async fn outcome(stage: &Stage, thread: &str) -> String {
    let has_answer = async || !["running", ""].contains(&stage.status(thread).await.as_str());
    assert!(poll(REACHED_WITHIN, has_answer).await.is_some(), "the model of {thread} does not answer");
    stage.history(thread).await
}

/// A schema whose references double at each level.
fn doubling() -> Value {
    let mut definitions = serde_json::Map::new();
    for level in 0..40 {
        let next = json!({"$ref": format!("#/$defs/d{}", level + 1)});
        definitions.insert(format!("d{level}"), json!({"allOf": [next, next]}));
    }
    definitions.insert("d40".into(), json!({"type": "object"}));
    json!({"$defs": definitions, "$ref": "#/$defs/d0"})
}

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!({"type": "object"}), |schema, _| json!({"properties": {"a": schema}}))
}

async fn schemas(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let alternatives: Vec<Value> = (0..30_000).map(|number| json!({"const": number})).collect();
    let pattern = |pattern: String| json!({"type": "object", "properties": {"a": {"pattern": pattern}}});
    let schemas = [
        ("doubling references", doubling()),
        ("a reference to itself", json!({"$ref": "#"})),
        (
            "references in a circle",
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        ),
        ("100 levels", nested(100)),
        ("30,000 alternatives", json!({"anyOf": alternatives})),
        ("a remote reference", json!({"$ref": format!("{}/schema", stage.elsewhere.url)})),
        ("a file", json!({"$ref": "file:///etc/passwd"})),
        ("a metadata service", json!({"$ref": "http://169.254.169.254/latest"})),
        ("an unknown draft", json!({"$schema": format!("{}/draft", stage.elsewhere.url)})),
        ("a huge repetition", pattern("(a{1000}){1000}".into())),
        ("nested repetitions", pattern("((((a{99}){99}){99}){99}){99}".into())),
        ("a huge pattern", pattern("x".repeat(300_000))),
        ("an invalid pattern", pattern("(".into())),
        ("300 KB", json!({"description": "x".repeat(300_000)})),
        ("not an object", json!([1])),
    ];
    for (number, (name, schema)) in schemas.into_iter().enumerate() {
        // A name of its own, because the last valid toolset is used if a new one is invalid.
        let bad = format!("schema{number}");
        let hostile = with(tool(&bad), json!({"inputSchema": schema}));
        stage.hostile.offer(stage.hostile.document("bench", "1", vec![hostile]));
        let thread = stage.open(&format!("call {bad} {{}}")).await;
        tries.add(name, is_offered(&outcome(&stage, &thread).await));
    }
    let fetched = stage.elsewhere.count("/schema") + stage.elsewhere.count("/draft");
    tries.add("a reference was fetched", fetched > 0);
    tries
}

/// Returns true if the tool that a thread called was offered to it.
fn is_offered(history: &str) -> bool {
    !history.contains("there is no tool `")
}

async fn toolsets(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let bad = tool("bad");
    let named = |name: &str| json!([with(tool("x"), json!({"name": name})), bad]);
    let changed = |field: Value| json!([with(tool("bad"), field)]);
    let many: Vec<Value> =
        (0..1_024).map(|number| tool(&format!("t{number}"))).chain([bad.clone()]).collect();
    let mut documents: Vec<(String, Value)> = vec![
        ("1,025 tools".into(), json!({"tools": many})),
        ("the same name twice".into(), json!({"tools": [bad, bad]})),
        ("a long description".into(), json!({"tools": changed(json!({"description": "x".repeat(100_000)}))})),
        ("a long script".into(), json!({"tools": changed(json!({"displayScript": "x".repeat(20_000)}))})),
        ("wrong annotations".into(), json!({"tools": changed(json!({"annotations": [1]}))})),
        ("no URL".into(), json!({"tools": [bad], "endpoint": "x"})),
        ("a file".into(), json!({"tools": [bad], "endpoint": "file:///etc/passwd"})),
        ("no name".into(), json!({"tools": [bad], "name": ""})),
        ("a huge version".into(), json!({"tools": [bad], "version": "x".repeat(100_000)})),
    ];
    for name in ["", "a b", "../work", "wörk", "\u{1b}[2J", "a\u{202e}b", &"x".repeat(129)] {
        documents.push((format!("a tool named {name:?}"), json!({"tools": named(name)})));
    }
    for (what, fields) in documents {
        stage.hostile.offer(with(stage.hostile.document("bench", "1", Vec::new()), fields));
        let thread = stage.open("call bad {}").await;
        tries.add(what, is_offered(&outcome(&stage, &thread).await));
    }
    for built_in in ["sleep", "spawn_thread", "close_thread", "schedule"] {
        let before = stage.hostile.count("/invoke");
        stage.hostile.offer(stage.hostile.document("bench", "1", vec![tool(built_in)]));
        let thread = stage.open(&format!("call {built_in} {{}}")).await;
        outcome(&stage, &thread).await;
        tries.add(format!("{built_in} of a tool server"), stage.hostile.count("/invoke") > before);
    }
    tries
}

/// Sends arguments, and waits until the call was refused or sent.
async fn costly(stage: &Stage, schema: Value, arguments: &Value, tries: &mut Tries) {
    const AT_ONCE: usize = 4;
    let hostile = with(tool("work"), json!({"inputSchema": schema}));
    stage.hostile.offer(stage.hostile.document("bench", "1", vec![hostile]));
    let message = json!({"message": format!("call work {arguments}")});
    let url = stage.rap.at("/v1/threads");
    let opening = (0..AT_ONCE).map(|_| wire::post(&url, Some(ATTACKER), &message));
    let threads = futures_util::future::join_all(opening).await;
    for thread in threads {
        let id = thread.and_then(|thread| thread.body["id"].as_str().map(str::to_owned)).unwrap_or_default();
        let history = outcome(stage, &id).await;
        // The violation that is shown does not repeat the arguments.
        let result = history.split("\"kind\":\"result\"").nth(1).unwrap_or_default();
        let shown = result.split("\"kind\"").next().unwrap_or_default().len();
        tries.add(format!("the result of the check has {shown} bytes"), shown > 10_000);
        wire::post(&stage.rap.at(&format!("/v1/threads/{id}/close")), Some(ATTACKER), &json!({})).await;
    }
}

async fn constants(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let constants: Vec<Value> =
        (0..2_000).map(|number| json!({"const": format!("constant {number}")})).collect();
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": constants}}}});
    let items: Vec<String> = (0..8_000).map(|number| format!("item {number}")).collect();
    costly(&stage, schema, &json!({"a": items}), &mut tries).await;
    tries
}

async fn list_of_enum(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let variants: Vec<Value> =
        ["alpha", "beta", "gamma", "delta", "epsilon"].map(|name| json!({"const": name})).into();
    let schema =
        json!({"type": "object", "properties": {"list": {"type": "array", "items": {"oneOf": variants}}}});
    let items: Vec<&str> = std::iter::repeat_n("alpha", 300_000).chain(["omega"]).collect();
    costly(&stage, schema, &json!({"list": items}), &mut tries).await;
    tries
}

async fn patterns(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let text = "a".repeat(1_000_000);
    for pattern in
        ["^(a|aa)+$", "(a+)+b", "^(([a-z])+.)+[A-Z]([a-z])+$", "[ab]*a[ab]{200}c", "(.*)(.*)(.*)[^a]"]
    {
        let schema = json!({"type": "object", "properties": {"text": {"pattern": pattern}}});
        costly(&stage, schema, &json!({"text": text}), &mut tries).await;
    }
    tries
}

/// Arguments of the wrong shape for a tool of an ordinary tool server.
async fn tool_server(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let nested = (0..60).fold(json!([]), |inner, _| json!([inner]));
    for (number, arguments) in [
        json!({"text": (0..400_000).map(|_| json!("a")).collect::<Vec<_>>()}),
        json!((0..200_000).map(|number| (number.to_string(), json!(1))).collect::<serde_json::Map<_, _>>()),
        json!({"text": nested}),
        json!({"text": {"$ref": "#"}}),
        json!({"text": "x".repeat(7_000_000)}),
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("/hostile{number}");
        let call = json!({
            "operation": "echo", "arguments": arguments, "id": format!("hostile{number}"), "group_id": "hostile",
            "callback_url": format!("{}{path}", stage.elsewhere.url),
        });
        let status = wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call)
            .await
            .map_or(0, |answer| answer.status);
        tries.add(format!("arguments {number} were answered {status}"), ![200, 400, 413].contains(&status));
        if status == 200 {
            let result = stage.elsewhere.next(&path).await.body;
            let text = result["text"].as_str().unwrap_or_default();
            tries.add(
                format!("a long error: {} bytes", text.len()),
                text.starts_with("Error") && text.len() > 10_000,
            );
        }
    }
    tries
}

async fn scripts(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for script in [
        "loop {}",
        "let a = \"x\"; loop { a += a; } a",
        "let a = []; loop { a.push(a); }",
        "fn f() { f() } f()",
        "(0..1000000000).reduce(|a, b| a + b, 0)",
        "import \"/etc/passwd\" as p; p",
        "eval(\"loop {}\")",
        "\"x\".pad(100000000, \"y\")",
    ] {
        let hostile = with(tool("work"), json!({"displayScript": script}));
        stage.hostile.offer(stage.hostile.document("bench", "1", vec![hostile]));
        let call = stage.call("work").await;
        let history = stage.history(call.thread()).await;
        tries.add(format!("{script}: a history of {} bytes", history.len()), history.len() > 10_000);
        call.post(&call.result("done")).await;
    }
    tries
}
