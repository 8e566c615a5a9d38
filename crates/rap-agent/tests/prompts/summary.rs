//! Prompts of histories with a summary.

use crate::items::{answer, body, call, calls, entries, result, synthetic_call};
use rap_agent::prompt::{
    Prompt, SUMMARY_INSTRUCTIONS, anthropic, entries_to_summarise, estimate_tokens, openai, visible_entries,
};
use rap_agent::{Entry, Item, Seq};
use rap_protocol::{Body, Content, Image};
use serde_json::{Value, json};

fn numbered(items: Vec<Item>) -> Vec<(Seq, Entry)> {
    (1..).zip(entries(items)).collect()
}

fn summary(text: &str, covers: Seq) -> Item {
    Item::Summary { text: text.into(), covers }
}

fn messages(entries: &[Entry]) -> Vec<Value> {
    let prompt = Prompt::new("be good", entries, &[]);
    let (openai, anthropic) = (body(openai::request(&prompt)), body(anthropic::request(&prompt)));
    crate::strict::openai_accepts(&openai).unwrap();
    crate::strict::anthropic_accepts(&anthropic, crate::strict::Thinking::Off).unwrap();
    openai["messages"].as_array().unwrap().clone()
}

#[test]
fn a_model_sees_the_last_summary_and_the_entries_after_it() {
    let history = numbered(vec![
        Item::user("one"),
        answer("first"),
        Item::user("two"),
        summary("S", 1),
        answer("second"),
        Item::user("three"),
        Item::notice("for people"),
        summary("T", 4),
    ]);
    let messages = messages(&visible_entries(history));
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    let first = messages[1]["content"].as_str().unwrap();
    assert!(first.starts_with("(The conversation so far is no longer shown.") && first.ends_with("\n\nT"));
    assert_eq!((&messages[2]["content"], &messages[3]["content"]), (&json!("second"), &json!("three")));
}

#[test]
fn without_a_summary_all_entries_are_visible() {
    let history = numbered(vec![Item::user("one"), answer("first"), Item::user("two")]);
    let all: Vec<Entry> = history.iter().map(|(_, entry)| entry.clone()).collect();
    assert_eq!(visible_entries(history), all);
}

/// Proves: SE-07
#[test]
fn a_synthetic_call_keeps_the_arguments_of_an_original_that_a_summary_covers() {
    let history = numbered(vec![
        Item::user("watch"),
        calls("", vec![call("c1", "echoed", json!({"path": "a"}))]),
        result("c1", "watching"),
        answer("done"),
        calls("", vec![synthetic_call("e1", "c1", None)]),
        result("e1", "ding"),
        summary("S", 3),
    ]);
    let messages = messages(&visible_entries(history));
    let arguments = messages[2]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert_eq!(arguments, json!({"path": "a", "kind": "interrupt:c1 (subscription remains active)"}));
}

#[test]
fn a_request_for_a_summary_has_truncated_results_and_no_images() {
    let image = Image { data: "aGk=".into(), media_type: "image/png".into() };
    let long = Body::Content(vec![Content::Text { text: "x".repeat(9_000) }, Content::Image(image)]);
    let history = entries(vec![
        Item::user("look"),
        calls("", vec![call("c1", "look", json!({}))]),
        crate::items::returns("c1", long),
    ]);
    let messages = messages(&entries_to_summarise(history));
    let shown = messages[3]["content"].as_str().unwrap();
    assert!(shown.ends_with("[cut: 8192 of 9011 bytes are shown]"), "{}", &shown[8_000..]);
    assert_eq!(messages[4]["content"], SUMMARY_INSTRUCTIONS);
}

#[test]
fn tokens_are_estimated_from_bytes_and_images_do_not_count_as_text() {
    let data = "A".repeat(1_000_000);
    let image = Content::Image(Image { data, media_type: "image/png".into() });
    let items = vec![
        Item::user("x".repeat(3_000)),
        Item::notice("x".repeat(3_000)),
        calls("", vec![call("c1", "look", json!({"at": "x".repeat(3_000)}))]),
        crate::items::returns("c1", Body::Content(vec![image])),
        summary(&"x".repeat(3_000), 0),
    ];
    let each: Vec<u64> = entries(items).chunks(1).map(estimate_tokens).collect();
    let fits = |at: usize, from: u64| assert!((from..from + 60).contains(&each[at]), "{each:?}");
    fits(0, 1_000);
    fits(1, 0);
    fits(2, 1_000);
    fits(3, 1_600);
    fits(4, 1_000);
}

#[test]
fn a_result_has_the_same_estimate_as_a_text_and_as_a_list_with_one_text() {
    let text = "x".repeat(3_000);
    let estimate = |body: Body| estimate_tokens(&entries(vec![crate::items::returns("c1", body)]));
    let listed = Body::Content(vec![Content::Text { text: text.clone() }]);
    assert_eq!((estimate(listed), estimate(Body::Text(text))), (1_008, 1_008));
}
