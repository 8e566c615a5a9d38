//! Requests for Anthropic's API: thinking blocks and cache breakpoints.

use crate::items::{
    answer, answer_with_thinking, body, call, calls, entries, result, synthetic_call,
    without_cache_breakpoints,
};
use proptest::prelude::*;
use rap_agent::prompt::{Prompt, Thinking, ToolSpec, anthropic};
use rap_agent::{Item, Thought, ThoughtKind, Thoughts};
use serde_json::{Value, json};

const NEW_RESULTS: &str = "user: (The results above are new. Respond to them now, as the task requires.)";

/// Returns the messages for a model `m` that always thinks, without cache breakpoints.
fn messages_with_thinking(items: Vec<Item>) -> Value {
    let entries = entries(items);
    let prompt = Prompt { thinking: Thinking::Always { model: "m" }, ..Prompt::new("", &entries, &[]) };
    let body = body(anthropic::request(&prompt));
    crate::strict::anthropic_accepts(&body, crate::strict::Thinking::Always)
        .unwrap_or_else(|why| panic!("{why}: {body}"));
    without_cache_breakpoints(body)["messages"].clone()
}

/// Formats each message as its role and blocks.
fn lines(messages: &Value) -> Vec<String> {
    let block = |block: &Value| match block["type"].as_str().unwrap() {
        "text" => block["text"].as_str().unwrap().to_owned(),
        "tool_use" => format!("calls {}", block["id"].as_str().unwrap()),
        "tool_result" => format!("returns {}", block["tool_use_id"].as_str().unwrap()),
        "thinking" => format!("<{}>", block["thinking"].as_str().unwrap()),
        other => format!("<{other}>"),
    };
    let message = |message: &Value| {
        let blocks: Vec<_> = message["content"].as_array().unwrap().iter().map(block).collect();
        format!("{}: {}", message["role"].as_str().unwrap(), blocks.join(" | "))
    };
    messages.as_array().unwrap().iter().map(message).collect()
}

#[test]
fn thinking_is_sent_back_at_its_position() {
    let items = vec![
        Item::user("go"),
        answer_with_thinking("ab", &[0, 1, 2], vec![call("c1", "t", json!({}))]),
        result("c1", "one"),
        calls("", vec![call("c2", "t", json!({}))]),
        result("c2", "two"),
    ];
    let expected = [
        "user: go",
        "assistant: <thought 0> | a | <thought 1> | b | <thought 2> | calls c1",
        "user: returns c1",
        "assistant: calls c2",
        "user: returns c2",
    ];
    assert_eq!(lines(&messages_with_thinking(items.clone())), expected);
    let entries = entries(items);
    for thinking in [Thinking::Off, Thinking::Optional { model: "another" }] {
        let prompt = Prompt { thinking, ..Prompt::new("", &entries, &[]) };
        let body = without_cache_breakpoints(body(anthropic::request(&prompt)));
        assert_eq!(lines(&body["messages"])[1], "assistant: ab | calls c1");
    }
}

#[test]
fn a_trailing_or_incomplete_thinking_block_is_omitted() {
    let cut = ThoughtKind::Readable { text: "half a th".into(), signature: String::new() };
    let sealed = ThoughtKind::Redacted { data: "xyz".into() };
    let parts = [cut, sealed].map(|kind| Thought { at: 0, calls: 0, kind }).to_vec();
    let thoughts = Some(Thoughts { model: "m".into(), parts, ..Thoughts::default() });
    let messages = messages_with_thinking(vec![
        Item::user("go"),
        answer_with_thinking("done", &[0, 4], vec![]),
        Item::user("on"),
        Item::Assistant { text: "yes".into(), calls: vec![], thoughts, usage: None },
        Item::user("and on"),
        answer_with_thinking("one", &[0], vec![]),
        answer_with_thinking("two", &[0], vec![]),
        Item::user("on and on"),
    ]);
    let expected = [
        "user: go",
        "assistant: <thought 0> | done",
        "user: on",
        "assistant: <redacted_thinking> | yes",
        "user: and on",
        "assistant: <thought 0> | one | two",
        "user: on and on",
    ];
    assert_eq!(lines(&messages), expected);
}

#[test]
fn a_turn_that_does_not_begin_with_thinking_is_closed() {
    let event = |id: &str| vec![calls("", vec![synthetic_call(id, "c1", None)]), result(id, "tick")];
    // The event is added to an answer that began with thinking, so the turn need not be closed.
    let mut items =
        vec![Item::user("watch"), answer_with_thinking("", &[0], vec![call("c1", "t", json!({}))])];
    items.extend([result("c1", "watching"), answer_with_thinking("ok", &[0], vec![])]);
    items.extend(event("e1"));
    assert_eq!(
        lines(&messages_with_thinking(items.clone()))[3..],
        ["assistant: <thought 0> | ok | calls e1", "user: returns e1"]
    );
    // After the user's message there is no thinking yet.
    items.extend([Item::user("and?")]);
    items.extend(event("e2"));
    items.extend(event("e3"));
    let noted = [
        "user: returns e1 | and?",
        "assistant: calls e2",
        "user: returns e2",
        "assistant: (Noted.)",
        NEW_RESULTS,
        "assistant: calls e3",
        "user: returns e3",
        "assistant: (Noted.)",
    ];
    let messages = lines(&messages_with_thinking(items.clone()));
    assert_eq!(messages[4..12], noted);
    assert_eq!(messages[12..], [NEW_RESULTS]);
    items.push(Item::user("well?"));
    assert_eq!(lines(&messages_with_thinking(items))[12..], ["user: well?"]);
}

/// The documentation asks for the blocks of an answer in their order, whatever comes first, and for thinking in the last
/// turn only: a turn is a tool loop, from a user's text to the next.
#[test]
fn a_text_before_thinking_keeps_its_place_and_only_the_last_turn_has_to_begin_with_thinking() {
    let mut items = vec![
        Item::user("go"),
        answer_with_thinking("ab", &[1], vec![call("c1", "t", json!({}))]),
        result("c1", "one"),
        answer_with_thinking("done", &[0], vec![]),
        Item::user("again"),
        answer_with_thinking("", &[0], vec![call("c2", "t", json!({}))]),
        result("c2", "two"),
    ];
    let messages = lines(&messages_with_thinking(items.clone()));
    assert_eq!(
        messages[1..4],
        ["assistant: a | <thought 1> | b | calls c1", "user: returns c1", "assistant: (Noted.)"]
    );
    assert_eq!(messages[messages.len() - 2..], ["assistant: <thought 0> | calls c2", "user: returns c2"]);
    // The first turn is closed in every request, so that the longer one begins with the shorter one.
    items.truncate(3);
    let shorter = lines(&messages_with_thinking(items));
    assert_eq!(messages[..shorter.len()], shorter);
    assert_eq!(shorter.last().unwrap(), NEW_RESULTS);
}

/// A model may think between the calls of one answer. The API refuses the answer if its thinking comes back at another
/// place.
#[test]
fn thinking_between_calls_is_sent_back_between_them() {
    let thought = |at, calls| {
        let kind = ThoughtKind::Readable { text: format!("after {calls}"), signature: "sig".into() };
        Thought { at, calls, kind }
    };
    // The last one is at the end of the answer, where the API accepts none.
    let parts = vec![thought(0, 0), thought(2, 1), thought(2, 1), thought(2, 3)];
    let thoughts = Some(Thoughts { model: "m".into(), parts, ..Thoughts::default() });
    let made = ["c1", "c2", "c3"].map(|id| call(id, "t", json!({}))).to_vec();
    let items = vec![
        Item::user("go"),
        Item::Assistant { text: "so".into(), calls: made, thoughts, usage: None },
        result("c1", "one"),
        result("c2", "two"),
        result("c3", "three"),
    ];
    let expected = [
        "user: go",
        "assistant: <after 0> | so | calls c1 | <after 1> | <after 1> | calls c2 | calls c3",
        "user: returns c1 | returns c2 | returns c3",
    ];
    assert_eq!(lines(&messages_with_thinking(items.clone())), expected);
    let entries = entries(items);
    let body = without_cache_breakpoints(body(anthropic::request(&Prompt::new("", &entries, &[]))));
    assert_eq!(lines(&body["messages"])[1], "assistant: so | calls c1 | calls c2 | calls c3");
}

fn breakpoints(body: &Value) -> Vec<String> {
    let blocks = |message: &Value| message["content"].as_array().unwrap().clone();
    let all = body["tools"].as_array().into_iter().flatten().cloned();
    let all = all.chain(body["system"].as_array().into_iter().flatten().cloned());
    let all = all.chain(body["messages"].as_array().unwrap().iter().flat_map(blocks));
    let marked = all.filter(|block| block.get("cache_control").is_some());
    let name = |block: Value| {
        let names = ["name", "text", "tool_use_id"].map(|key| block[key].as_str().map(str::to_owned));
        names.into_iter().flatten().next().unwrap()
    };
    marked.map(name).collect()
}

#[test]
fn cache_breakpoints_follow_tools_system_prompt_settled_answer_and_newest_block() {
    let schema = json!({"type": "object"});
    let tools = ["a", "b"].map(|name| ToolSpec { name, description: "", schema: &schema });
    let mut items = vec![Item::user("go")];
    let mut check = |more: Vec<Item>, expected: &[&str]| {
        items.extend(more);
        let entries = entries(items.clone());
        let body = body(anthropic::request(&Prompt::new("be good", &entries, &tools)));
        crate::strict::anthropic_accepts(&body, crate::strict::Thinking::Off).unwrap();
        assert_eq!(breakpoints(&body), expected);
    };
    check(vec![], &["b", "be good", "go"]);
    check(vec![calls("so", vec![call("c1", "a", json!({}))]), result("c1", "1")], &["b", "be good", "c1"]);
    check(vec![answer("done"), Item::user("more")], &["b", "be good", "done", "more"]);
    check(
        vec![calls("", vec![call("c2", "a", json!({}))]), result("c2", "2")],
        &["b", "be good", "done", "c2"],
    );
    check(vec![answer("fine")], &["b", "be good", "fine"]);
    check(
        vec![calls("", vec![synthetic_call("e1", "c1", None)]), result("e1", "3")],
        &["b", "be good", "fine", "e1"],
    );
}

/// Entries that may be added to a history between two requests.
#[derive(Debug, Clone, Copy)]
enum Exchange {
    Said,
    Answered { thinks: bool },
    Called { thinks: bool, speaks: bool },
    Woken,
}

fn any_exchange() -> impl Strategy<Value = Exchange> {
    prop_oneof![
        Just(Exchange::Said),
        any::<bool>().prop_map(|thinks| Exchange::Answered { thinks }),
        any::<(bool, bool)>().prop_map(|(thinks, speaks)| Exchange::Called { thinks, speaks }),
        Just(Exchange::Woken),
    ]
}

fn exchange_entries(exchange: Exchange, number: usize) -> Vec<Item> {
    let id = format!("c{number}");
    let positions = |thinks: bool| if thinks { vec![0] } else { vec![] };
    match exchange {
        Exchange::Said => vec![Item::user(format!("say {number}"))],
        Exchange::Answered { thinks: thought } => {
            vec![answer_with_thinking("answer", &positions(thought), vec![]), Item::user("and then?")]
        }
        Exchange::Called { thinks: thought, speaks } => {
            let text = if speaks { "let me see" } else { "" };
            vec![
                answer_with_thinking(text, &positions(thought), vec![call(&id, "t", json!({}))]),
                result(&id, "done"),
            ]
        }
        Exchange::Woken => vec![calls("", vec![synthetic_call(&id, "c0", None)]), result(&id, "tick")],
    }
}

/// Returns every block with its role, in order.
fn flat(body: &Value) -> Vec<String> {
    let blocks = |message: &Value| {
        let role = message["role"].clone();
        let blocks = message["content"].as_array().unwrap().clone();
        blocks.into_iter().map(move |block| format!("{role} {block}"))
    };
    body["messages"].as_array().unwrap().iter().flat_map(blocks).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn everything_before_a_cache_breakpoint_is_a_prefix_of_every_longer_request(
        items in proptest::collection::vec(any_exchange(), 1..10),
        model in prop_oneof![Just("m"), Just("n")],
        first in any::<bool>(),
    ) {
        let thinking = if first { Thinking::Always { model } } else { Thinking::Optional { model } };
        let mut history = Vec::new();
        let mut before: Vec<String> = Vec::new();
        for (number, exchange) in items.into_iter().enumerate() {
            history.extend(exchange_entries(exchange, number));
            let entries = entries(history.clone());
            let prompt = Prompt { thinking, ..Prompt::new("s", &entries, &[]) };
            let body = body(anthropic::request(&prompt));
            let blocks = flat(&without_cache_breakpoints(body.clone()));
            prop_assert!(blocks.starts_with(&before), "{before:#?} is not a prefix of {blocks:#?}");
            let marked = flat(&body);
            let end = marked.iter().rposition(|block| block.contains("cache_control")).unwrap();
            before = blocks[..=end].to_vec();
        }
    }
}
