//! Prompts of long conversations: what a model sees of a history with a summary.

#![allow(clippy::unwrap_used)]

mod items;
mod strict;

use items::{body, call, calls, echo, entries, result, says};
use rap_agent::prompt::{Prompt, SUMMARISE, anthropic, openai, seen, to_summarise, tokens};
use rap_agent::{Entry, Item, Seq};
use rap_protocol::{Body, Content, Image};
use serde_json::{Value, json};

fn numbered(items: Vec<Item>) -> Vec<(Seq, Entry)> {
    (1..).zip(entries(items)).collect()
}

fn summary(text: &str, covers: Seq) -> Item {
    Item::Summary { text: text.into(), covers }
}

fn told(entries: &[Entry]) -> Vec<Value> {
    let prompt = Prompt::new("be good", entries, &[]);
    let (openai, anthropic) = (body(openai::request(&prompt)), body(anthropic::request(&prompt)));
    strict::openai_accepts(&openai).unwrap();
    strict::anthropic_accepts(&anthropic, strict::Thinking::Off).unwrap();
    openai["messages"].as_array().unwrap().clone()
}

#[test]
fn a_model_sees_the_last_summary_and_what_it_does_not_cover() {
    let history = numbered(vec![
        Item::said("one"),
        says("first"),
        Item::said("two"),
        summary("S", 1),
        says("second"),
        Item::said("three"),
        Item::notice("for people"),
        summary("T", 4),
    ]);
    let told = told(&seen(history));
    let roles: Vec<&str> = told.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    let first = told[1]["content"].as_str().unwrap();
    assert!(first.starts_with("(What was said so far is not shown any more.") && first.ends_with("\n\nT"));
    assert_eq!((&told[2]["content"], &told[3]["content"]), (&json!("second"), &json!("three")));
}

#[test]
fn without_a_summary_everything_is_seen() {
    let history = numbered(vec![Item::said("one"), says("first"), Item::said("two")]);
    let all: Vec<Entry> = history.iter().map(|(_, entry)| entry.clone()).collect();
    assert_eq!(seen(history), all);
}

/// Proves: SE-07
#[test]
fn a_synthetic_call_keeps_the_arguments_of_an_original_that_is_covered() {
    let history = numbered(vec![
        Item::said("watch"),
        calls("", vec![call("c1", "echoed", json!({"path": "a"}))]),
        result("c1", "watching"),
        says("done"),
        calls("", vec![echo("e1", "c1", None)]),
        result("e1", "ding"),
        summary("S", 3),
    ]);
    let told = told(&seen(history));
    let arguments = told[2]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(arguments, json!({"path": "a", "kind": "interrupt:c1 (subscription remains active)"}));
}

#[test]
fn whoever_makes_a_summary_sees_long_results_cut_and_no_images() {
    let image = Image { data: "aGk=".into(), media_type: "image/png".into() };
    let long = Body::Content(vec![Content::Text { text: "x".repeat(9_000) }, Content::Image(image)]);
    let history = entries(vec![
        Item::said("look"),
        calls("", vec![call("c1", "look", json!({}))]),
        items::returns("c1", long),
    ]);
    let told = told(&to_summarise(history));
    let shown = told[3]["content"].as_str().unwrap();
    assert!(shown.ends_with("[cut: 8192 of 9011 bytes are shown]"), "{}", &shown[8_000..]);
    assert_eq!(told[4]["content"], SUMMARISE);
}

#[test]
fn tokens_are_estimated_from_bytes_and_images_do_not_count_as_text() {
    let data = "A".repeat(1_000_000);
    let image = Content::Image(Image { data, media_type: "image/png".into() });
    let items = vec![
        Item::said("x".repeat(3_000)),
        Item::notice("x".repeat(3_000)),
        calls("", vec![call("c1", "look", json!({"at": "x".repeat(3_000)}))]),
        items::returns("c1", Body::Content(vec![image])),
        summary(&"x".repeat(3_000), 0),
    ];
    let each: Vec<u64> = entries(items).chunks(1).map(tokens).collect();
    let fits = |at: usize, from: u64| assert!((from..from + 60).contains(&each[at]), "{each:?}");
    fits(0, 1_000);
    fits(1, 0);
    fits(2, 1_000);
    fits(3, 1_600);
    fits(4, 1_000);
}
