//! Table tests of the scripted model.

use rap_agent::Arguments;
use rap_protocol::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::model::{AnswerMemory, Spent};

fn id(text: &str) -> CallId {
    CallId::new(text).unwrap()
}

fn call(call_id: &str, name: &str, arguments: Arguments) -> Item {
    let call = CallEntry { id: id(call_id), model_id: None, name: name.into(), arguments, display: None };
    Item::assistant("", vec![call])
}

fn given(call_id: &str, name: &str) -> Item {
    call(call_id, name, Arguments::Given(Map::new()))
}

fn synthetic(call_id: &str, name: &str, of: &str) -> Item {
    call(call_id, name, Arguments::Synthetic { of: id(of), kind: format!("interrupt:{of}"), arguments: None })
}

fn answer(text: &str) -> Item {
    Item::assistant(text, Vec::new())
}

fn runtime_text(text: &str) -> Item {
    Item::message(text, Speaker::Runtime)
}

fn request(items: Vec<Item>, turn: u64) -> ModelRequest {
    let entries = items.into_iter().map(|item| Entry { at: Timestamp(0), item }).collect();
    ModelRequest {
        system: String::new(),
        entries,
        tools: Arc::new([]),
        turn,
        images: false,
        spent: Spent::default(),
        memory: AnswerMemory::default(),
    }
}

/// Returns text and calls of the answer. Checks that the text was streamed too.
async fn ask(model: &Scripted, items: Vec<Item>, turn: u64) -> (String, Vec<(String, String, Value)>) {
    let mut streamed = String::new();
    let reply = model.ask(request(items, turn), &mut |delta| streamed.push_str(delta)).await.unwrap();
    assert_eq!(streamed, reply.text);
    let calls = reply.calls.into_iter().map(|call| {
        let arguments = call.arguments.map_or_else(|raw| json!({"unusable": raw}), Value::Object);
        (call.id, call.name, arguments)
    });
    (reply.text, calls.collect())
}

async fn text(items: Vec<Item>) -> String {
    ask(&Scripted::command_driven(), items, 1).await.0
}

#[tokio::test(start_paused = true)]
async fn the_commands_of_the_last_user_message_are_followed() {
    let message = "say hello\ncall read {\"path\": \"a b\"}\n  call now\nsleep 90\nwhat?\n\ncall bad {\"cut\ncall list [1]\nsleep -1\n\n";
    let began = tokio::time::Instant::now();
    let model = Scripted::command_driven();
    let (text, calls) = ask(&model, vec![Item::user("say old"), Item::user(message)], 3).await;
    assert_eq!(text, "hello\nwhat?\n\nsleep -1");
    let expected = [
        ("call_3_1", "read", json!({"path": "a b"})),
        ("call_3_2", "now", json!({})),
        ("call_3_3", "bad", json!({"unusable": "{\"cut"})),
        ("call_3_4", "list", json!({"unusable": "[1]"})),
    ];
    assert_eq!(calls, expected.map(|(id, name, arguments)| (id.to_owned(), name.to_owned(), arguments)));
    assert_eq!(began.elapsed(), Duration::from_secs(90));
    assert_eq!(model.history_scope(), HistoryScope::SinceLastUser);
    assert_eq!((model.destination(), model.window().await), ("scripted", None));
}

#[tokio::test]
async fn a_line_that_is_not_a_command_is_echoed() {
    for message in ["hello there", "calling home", "call", "sleep well", "ü\n\n  indented"] {
        assert_eq!(text(vec![Item::user(message)]).await, message);
    }
    assert_eq!(text(vec![Item::user("say")]).await, "");
}

#[tokio::test]
async fn results_are_answered_with_a_line_each() {
    let batch = vec![
        Item::user("call read {}"),
        given("c1", "read"),
        Item::notice("for people"),
        Item::runtime_result(id("c1"), "two\nlines"),
    ];
    assert_eq!(text(batch.clone()).await, "read: two lines");
    let woken = [
        batch,
        vec![
            answer("read: two lines"),
            synthetic("e1", "watch", "w"),
            Item::runtime_result(id("e1"), "changed"),
        ],
    ];
    let woken = woken.concat();
    assert_eq!(text(woken.clone()).await, "watch: changed");
    let twice =
        [woken.clone(), vec![synthetic("e2", "timer", "t"), Item::runtime_result(id("e2"), "rang")]].concat();
    assert_eq!(text(twice).await, "watch: changed\ntimer: rang");
    let interrupted = [
        woken,
        vec![Item::user("say hi"), synthetic("e2", "timer", "t"), Item::runtime_result(id("e2"), "rang")],
    ];
    assert_eq!(text(interrupted.concat()).await, "hi\ntimer: rang");
}

#[tokio::test]
async fn an_event_child_answers_its_event_and_not_the_message_of_the_runtime() {
    let spawned = vec![
        synthetic("e1", "watch", "w"),
        Item::runtime_result(id("e1"), "changed"),
        runtime_text("you are a child"),
    ];
    assert_eq!(text(spawned).await, "watch: changed");
    assert_eq!(text(vec![answer("done"), runtime_text("go on")]).await, "go on");
    assert_eq!(text(vec![runtime_text("go on")]).await, "go on");
    assert_eq!(text(Vec::new()).await, NOTHING_TO_ANSWER);
    assert_eq!(text(vec![Item::user("hi"), answer("hi")]).await, NOTHING_TO_ANSWER);
}

#[tokio::test]
async fn a_long_result_is_truncated_and_an_image_is_named() {
    let image = Content::Image(rap_protocol::Image { data: "aGk=".into(), media_type: "image/png".into() });
    let content = Body::Content(vec![Content::Text { text: "x".repeat(RESULT_LINE_CHARS - 5) }, image]);
    let result = Item::Result { call_id: id("c1"), content, display: Vec::new(), synthetic: false };
    let line = text(vec![Item::user("call t"), given("c1", "t"), result]).await;
    assert!(line.starts_with("t: xxx") && line.ends_with("x [ima…"), "{}", line.len());
}

fn scenario(text: &str) -> Result<Scripted, Error> {
    Ok(Scripted { scenario: Some(Scenario::parse(Path::new("script.toml"), text)?) })
}

const SCRIPT: &str = r#"
[[turn]]
say = "first"
calls = [{ name = "read", arguments = { path = "a", depth = 2 } }, { name = "now" }]

[[turn]]
sleep = 1
say = "second"
"#;

#[tokio::test(start_paused = true)]
async fn a_scenario_is_replayed_by_turn() {
    let model = scenario(SCRIPT).unwrap();
    assert_eq!(model.history_scope(), HistoryScope::None);
    let (text, calls) = ask(&model, Vec::new(), 1).await;
    assert_eq!(text, "first");
    assert_eq!(calls[0], ("call_1_1".into(), "read".into(), json!({"path": "a", "depth": 2})));
    assert_eq!(calls[1], ("call_1_2".into(), "now".into(), json!({})));
    assert_eq!(ask(&model, vec![Item::user("say no")], 2).await, ("second".into(), vec![]));
    assert_eq!(ask(&model, Vec::new(), 3).await.0, "the script has ended");
    let model = scenario(&format!("repeat = true\n{SCRIPT}")).unwrap();
    assert_eq!(ask(&model, Vec::new(), 3).await.0, "first");
    assert_eq!(ask(&model, Vec::new(), 4).await.0, "second");
    assert_eq!(ask(&scenario("repeat = true").unwrap(), Vec::new(), 1).await.0, "the script has ended");
}

#[test]
fn a_bad_scenario_names_file_and_line() {
    let table = [
        ("[[turn]]\nsay = 5", "script.toml:2: "),
        ("[[turn]]\n\nsay = \"a\"\nsays = \"b\"", "script.toml:4: "),
        ("[[turn]]\nsleep = -1", "script.toml:2: expected 0 to 86400 seconds, found -1"),
        ("[[turn]]\nsleep = nan", "script.toml:2: "),
        ("\n\n[[turn", "script.toml:3: "),
        ("[[turn]]\ncalls = [{ arguments = {} }]", "script.toml:2: "),
    ];
    for (text, expected) in table {
        let error = scenario(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text:?}: {error}");
    }
    let error = Scripted::from_file(Path::new("no/such/script.toml")).unwrap_err().to_string();
    assert!(error.contains("no/such/script.toml"), "{error}");
}

#[tokio::test]
async fn a_summary_lists_the_last_user_messages() {
    let message = (1..=12).map(|number| Item::user(format!("say {number}\nmore")));
    let mut items: Vec<Item> = message.flat_map(|message| [message, answer("yes")]).collect();
    items.push(runtime_text(SUMMARY_INSTRUCTIONS));
    let (text, calls) = ask(&Scripted::command_driven(), items, 3).await;
    let lines: String = (3..=12).map(|number| format!("\n- say {number}")).collect();
    assert_eq!((text, calls.len()), (format!("24 entries; the user said:{lines}"), 0));
}
