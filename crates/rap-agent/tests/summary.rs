//! Long conversations: when a summary may be made, what it covers, and what a model sees afterwards.

#![allow(clippy::unwrap_used)]

mod items;
#[allow(dead_code, reason = "each test program uses another part of this")]
mod notation;
mod strict;

use items::{body, call, calls, echo, entries, result, says};
use notation::{check, check_child, check_spawned, from};
use rap_agent::prompt::{Prompt, SUMMARISE, anthropic, openai, seen, to_summarise, tokens};
use rap_agent::{Entry, Item, Seq};
use rap_protocol::{Body, Content, Image};
use serde_json::{Value, json};

#[test]
fn a_summary_covers_what_was_answered_and_the_question_is_asked_again() {
    check(
        "
        said one                   -> asking 1; user one; ask 1
        summarised: S              -> ignored: Duplicate
        answer fine:               -> idle; assistant fine
        said two                   -> asking 2; user two; ask 2
        summarised of 1: S         -> ignored: StaleTurn
        summarised: S              -> asking 3; summary to 1: S; ask 3
        summarised of 2: S         -> ignored: StaleTurn
        summarised: S              -> ignored: Duplicate
        answer good:               -> idle; assistant good
        summarised: S              -> ignored: StaleTurn
        said three                 -> asking 4; user three; ask 4
        summarised: T              -> asking 5; summary to 4: T; ask 5
        ",
    );
}

#[test]
fn results_that_the_model_has_not_seen_are_not_covered() {
    check(
        "
        said go                    -> asking 1; user go; ask 1
        answer: a b                -> waiting; assistant [a b]; open a; open b; invoke a; invoke b
        summarised: S              -> ignored: StaleTurn
        returned b: 2              -> waiting; settle b Returned; b: 2
        returned a: 1              -> asking 2; settle a Returned; a: 1; ask 2
        summarised: S              -> asking 3; summary to 1: S; ask 3
        answer: c                  -> waiting; assistant [c]; open c; invoke c
        returned c: 3              -> asking 4; settle c Returned; c: 3; ask 4
        summarised: S              -> asking 5; summary to 5: S; ask 5
        ",
    );
}

#[test]
fn what_is_open_is_named_with_its_id() {
    let way = ["said go", "answer: s", "subscribed s: ok", "answer: a k=spawn(dig)", "said and?"];
    from(
        &way,
        "
        summarised: S              -> asking 4; summary to 3: S Calls that are still running; their results will follow: - a (look) Active subscriptions, which cancel_subscription ends: - s (look) Threads that this one started, which send_message_to_child reaches: - t1; ask 4
        ",
    );
}

#[test]
fn summaries_are_not_the_model_talking_to_itself() {
    let way = ["said go", "answer: a=refuse", "answer: b=refuse", "summarised: S", "failed", "resume"];
    from(
        &way,
        "
        answer: c=refuse           -> asking 6; assistant [c]; c: Error: no such tool; ask 6
        ",
    );
    check(
        "
        said go                    -> asking 1; user go; ask 1
        answer: a=refuse           -> asking 2; assistant [a]; a: Error: no such tool; ask 2
        summarised: S              -> asking 3; summary to 1: S; ask 3
        answer: b=refuse           -> asking 4; assistant [b]; b: Error: no such tool; ask 4
        summarised: S              -> asking 5; summary to 4: S; ask 5
        answer: c=refuse           -> paused; assistant [c]; c: Error: no such tool; notice paused: 3 turns in a row without anythin…
        ",
    );
}

#[test]
fn input_that_comes_while_a_summary_is_made_is_not_lost() {
    let way = ["said go", "answer: s", "subscribed s: ok", "answer done:", "said more"];
    from(&way, "said again -> asking 4; user again; abandon 3; ask 4");
    let mut way = way.to_vec();
    way.extend(["event s: ding", "summarised: S"]);
    from(&way, "answer done: -> asking 5; assistant done; release 2 Held; ask 5");
}

#[test]
fn a_child_of_an_event_can_summarise_all_that_it_inherits() {
    check_child(
        "
        summarised: S              -> asking 2; summary to 4: S; ask 2
        summarised: S              -> ignored: Duplicate
        ",
    );
}

/// Of a summary that stands behind the point at which it was born, a child knows nothing, even if it covers all up to
/// that point: the child inherits the long history and has to be able to shorten it.
#[test]
fn a_child_that_does_not_see_its_parents_summary_can_make_one() {
    let mut thread = notation::Thread::new(notation::narrow());
    for message in ["said hi", "answer: s", "subscribed s: ok", "answer done:"] {
        thread.take(message);
    }
    let mut child = thread.bear("event s: ding, child");
    for message in ["summarised: S", "answer: z", "subscribed z: ok"] {
        child.take(message);
    }
    assert_eq!((child.head.settled, child.head.summarised), (4, 4));
    assert_eq!(child.bear("event z: dong, child").head.coverable(), Some(4));
}

#[test]
fn a_spawned_child_can_summarise_what_was_answered_before_it_was_born() {
    check_spawned(
        "
        summarised: S              -> asking 2; summary to 1: S; ask 2
        answer: a                  -> waiting; assistant [a]; open a; invoke a
        returned a: 1              -> asking 3; settle a Returned; a: 1; ask 3
        summarised: S              -> asking 4; summary to 4: S; ask 4
        ",
    );
}

#[test]
fn a_long_summary_is_cut() {
    let mut thread = notation::Thread::new(notation::narrow());
    for message in ["said go", "answer fine:", "said go"] {
        thread.take(message);
    }
    let shown = thread.take(&format!("summarised: {}", "ü".repeat(70_000)));
    let length = shown.chars().filter(|char| *char == 'ü').count();
    assert_eq!(length, 32 * 1024);
}

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
