//! Anthropic's API: thoughts go back where they came from, and what stays the same is marked for the cache.

#![allow(clippy::unwrap_used)]

mod items;
mod strict;

use items::{body, call, calls, echo, entries, result, says, thinks, unmarked};
use proptest::prelude::*;
use rap_agent::prompt::{Prompt, Thinking, ToolSpec, anthropic};
use rap_agent::{Item, Thought, ThoughtKind, Thoughts};
use serde_json::{Value, json};

/// The messages for Anthropic's API with a model `m` that always thinks.
fn thought_over(items: Vec<Item>) -> Value {
    let entries = entries(items);
    let prompt = Prompt { thinking: Thinking::First { model: "m" }, ..Prompt::new("", &entries, &[]) };
    let body = body(anthropic::request(&prompt));
    strict::anthropic_accepts(&body, strict::Thinking::First).unwrap_or_else(|why| panic!("{why}: {body}"));
    unmarked(body)["messages"].clone()
}

/// Who says what, block by block.
fn told(messages: &Value) -> Vec<String> {
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
fn what_a_model_thought_is_sent_back_where_it_was_thought() {
    let items = vec![
        Item::said("go"),
        thinks("ab", &[0, 1, 2], vec![call("c1", "t", json!({}))]),
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
    assert_eq!(told(&thought_over(items.clone())), expected);
    let entries = entries(items);
    for thinking in [Thinking::Off, Thinking::Free { model: "another" }] {
        let prompt = Prompt { thinking, ..Prompt::new("", &entries, &[]) };
        let body = unmarked(body(anthropic::request(&prompt)));
        assert_eq!(told(&body["messages"])[1], "assistant: ab | calls c1");
    }
}

#[test]
fn a_thought_that_nothing_follows_or_that_is_not_whole_is_left_out() {
    let cut = ThoughtKind::Open { text: "half a th".into(), signature: String::new() };
    let sealed = ThoughtKind::Sealed { data: "xyz".into() };
    let parts = [cut, sealed].map(|kind| Thought { at: 0, kind }).to_vec();
    let thoughts = Some(Thoughts { model: "m".into(), parts });
    let messages = thought_over(vec![
        Item::said("go"),
        thinks("done", &[0, 4], vec![]),
        Item::said("on"),
        Item::Assistant { text: "yes".into(), calls: vec![], thoughts },
        Item::said("and on"),
        thinks("one", &[0], vec![]),
        thinks("two", &[0], vec![]),
        Item::said("on and on"),
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
    assert_eq!(told(&messages), expected);
}

#[test]
fn a_turn_that_no_thought_begins_is_closed_before_the_model_goes_on() {
    let event = |id: &str| vec![calls("", vec![echo(id, "c1", None)]), result(id, "tick")];
    // The event joins an answer that began with a thought: nothing has to be done.
    let mut items = vec![Item::said("watch"), thinks("", &[0], vec![call("c1", "t", json!({}))])];
    items.extend([result("c1", "watching"), thinks("ok", &[0], vec![])]);
    items.extend(event("e1"));
    assert_eq!(
        told(&thought_over(items.clone()))[3..],
        ["assistant: <thought 0> | ok | calls e1", "user: returns e1"]
    );
    // Behind the user's words there is no thought yet.
    items.extend([Item::said("and?")]);
    items.extend(event("e2"));
    items.extend(event("e3"));
    let noted = [
        "user: returns e1 | and?",
        "assistant: calls e2",
        "user: returns e2",
        "assistant: (Noted.)",
        "user: (Go on.)",
        "assistant: calls e3",
        "user: returns e3",
        "assistant: (Noted.)",
    ];
    let messages = told(&thought_over(items.clone()));
    assert_eq!(messages[4..12], noted);
    assert_eq!(messages[12..], ["user: (Go on.)"]);
    items.push(Item::said("well?"));
    assert_eq!(told(&thought_over(items))[12..], ["user: well?"]);
}

fn marks(body: &Value) -> Vec<String> {
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
fn what_stays_the_same_is_marked_for_the_cache() {
    let schema = json!({"type": "object"});
    let tools = ["a", "b"].map(|name| ToolSpec { name, description: "", schema: &schema });
    let mut items = vec![Item::said("go")];
    let mut check = |more: Vec<Item>, expected: &[&str]| {
        items.extend(more);
        let entries = entries(items.clone());
        let body = body(anthropic::request(&Prompt::new("be good", &entries, &tools)));
        strict::anthropic_accepts(&body, strict::Thinking::Off).unwrap();
        assert_eq!(marks(&body), expected);
    };
    check(vec![], &["b", "be good", "go"]);
    check(vec![calls("so", vec![call("c1", "a", json!({}))]), result("c1", "1")], &["b", "be good", "c1"]);
    check(vec![says("done"), Item::said("more")], &["b", "be good", "done", "more"]);
    check(
        vec![calls("", vec![call("c2", "a", json!({}))]), result("c2", "2")],
        &["b", "be good", "done", "c2"],
    );
    check(vec![says("fine")], &["b", "be good", "fine"]);
    check(vec![calls("", vec![echo("e1", "c1", None)]), result("e1", "3")], &["b", "be good", "fine", "e1"]);
}

/// What can happen to a thread between two questions.
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
    let places = |thinks: bool| if thinks { vec![0] } else { vec![] };
    match exchange {
        Exchange::Said => vec![Item::said(format!("say {number}"))],
        Exchange::Answered { thinks: thought } => {
            vec![thinks("answer", &places(thought), vec![]), Item::said("and then?")]
        }
        Exchange::Called { thinks: thought, speaks } => {
            let text = if speaks { "let me see" } else { "" };
            vec![thinks(text, &places(thought), vec![call(&id, "t", json!({}))]), result(&id, "done")]
        }
        Exchange::Woken => vec![calls("", vec![echo(&id, "c0", None)]), result(&id, "tick")],
    }
}

/// Every block with its role, in order.
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

    /// What is marked for the cache is in every request that comes after.
    #[test]
    fn what_was_marked_for_the_cache_begins_every_longer_request(
        items in proptest::collection::vec(any_exchange(), 1..10),
        model in prop_oneof![Just("m"), Just("n")],
        first in any::<bool>(),
    ) {
        let thinking = if first { Thinking::First { model } } else { Thinking::Free { model } };
        let mut history = Vec::new();
        let mut before: Vec<String> = Vec::new();
        for (number, exchange) in items.into_iter().enumerate() {
            history.extend(exchange_entries(exchange, number));
            let entries = entries(history.clone());
            let prompt = Prompt { thinking, ..Prompt::new("s", &entries, &[]) };
            let body = body(anthropic::request(&prompt));
            let blocks = flat(&unmarked(body.clone()));
            prop_assert!(blocks.starts_with(&before), "{before:#?} is not the begin of {blocks:#?}");
            let marked = flat(&body);
            let end = marked.iter().rposition(|block| block.contains("cache_control")).unwrap();
            before = blocks[..=end].to_vec();
        }
    }
}
