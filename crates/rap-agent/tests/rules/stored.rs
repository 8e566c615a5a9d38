//! The stored form of entries and heads.

use rap_agent::{
    Arguments, CallEntry, Effect, Entry, Facts, Head, Identity, Ignored, Input, Item, Limits, OnBusy, Phase,
    Speaker, Status, Step, Thought, ThoughtKind, Thoughts, ToolResult, step,
};
use rap_protocol::{Body, Content, Image, Segment, Timestamp};
use serde_json::{Map, Value};

use crate::notation;

/// Heads that the first release stored, one per line.
const FIRST_RELEASE: &str = include_str!("fixtures/heads-of-the-first-release.jsonl");

fn head_of_the_first_release(line: usize) -> Head {
    serde_json::from_str(FIRST_RELEASE.lines().nth(line).unwrap()).unwrap()
}

fn take(head: &Head, input: Input, now: i64) -> Result<Step, Ignored> {
    let thread = Identity { id: notation::thread_id("t0"), incarnation: 7, depth: 0 };
    step(head.clone(), input, Facts::of(thread), Timestamp(now), &notation::small_limits())
}

#[test]
fn heads_of_the_first_release_can_be_read() {
    use Status::{Closed, Failed, Idle, NeedsYou, Running, Waiting};
    let expected = [
        (Idle, 0, 0),
        (Running, 8, 1),
        (NeedsYou, 7, 3),
        (Failed, 5, 1),
        (Failed, 2, 0),
        (NeedsYou, 8, 0),
        (NeedsYou, 2, 0),
        (Idle, 3, 0),
        (Running, 3, 0),
        (Waiting, 5, 1),
        (Closed, 2, 0),
        (Failed, 8, 0),
    ];
    assert_eq!(FIRST_RELEASE.lines().count(), expected.len());
    for (line, expected) in expected.into_iter().enumerate() {
        let head = head_of_the_first_release(line);
        assert_eq!((head.status(), head.seq(), head.open_calls().count()), expected, "line {line}");
        let stored = serde_json::to_string(&head).unwrap();
        assert_eq!(serde_json::from_str::<Head>(&stored).unwrap(), head, "line {line}");
    }
}

#[test]
fn threads_of_the_first_release_continue() {
    let asking = head_of_the_first_release(1);
    assert_eq!((asking.held().entries(), asking.queued().entries(), asking.subscriptions().len()), (2, 1, 2));
    let returned = |call: &str| Input::ToolResult { call: notation::id(call), result: ToolResult::text("1") };
    let held = take(&asking, returned("r"), 0).unwrap().head;
    assert_eq!((held.held().entries(), held.open_calls().count()), (4, 0));
    let waiting = head_of_the_first_release(2);
    assert_eq!((waiting.batch().len(), waiting.children().count(), waiting.questions().len()), (3, 3, 3));
    let choose = Input::Choose { call: notation::id("b"), selected: Some(0) };
    let server = waiting.batch()[1].server.clone();
    let effects = take(&waiting, choose, 0).unwrap().effects;
    assert_eq!(effects, [Effect::InvokeApproved { call: notation::id("b"), server }]);
    let dropped = head_of_the_first_release(8);
    let more = Input::UserMessage { message: "five".into(), on_busy: OnBusy::Join };
    assert_eq!(take(&dropped, more, 0).unwrap().effects, [], "a third answer in a row is not dropped");
    let failed = head_of_the_first_release(3);
    assert_eq!(take(&failed, Input::Due, 29_999).unwrap_err(), Ignored::NotDue);
    assert_eq!(take(&failed, Input::Due, 30_000).unwrap().head.turn_in_progress(), Some(3));
    let asleep = head_of_the_first_release(9);
    let timer = Input::TimerFired { call: notation::id("a") };
    assert_eq!(take(&asleep, timer, 50_000).unwrap().head.turn_in_progress(), Some(4));
}

/// No user watches event children, and their parents would wait for them forever.
#[test]
fn failed_event_children_of_the_first_release_retry() {
    let child = head_of_the_first_release(11);
    assert!(matches!(child.phase(), Phase::Failed { .. }));
    assert_eq!(child.due(&Limits::default()), Some(Timestamp(0)));
    assert_eq!(take(&child, Input::Due, 0).unwrap().head.turn_in_progress(), Some(2));
    let root = head_of_the_first_release(4);
    assert_eq!(root.due(&Limits::default()), None);
}

#[test]
fn every_kind_of_entry_survives_a_round_trip() {
    let call = |id: &str, arguments| CallEntry {
        id: notation::id(id),
        model_id: Some(notation::id("own")),
        name: "look".into(),
        arguments,
        display: Some("a look".into()),
    };
    let given = Map::from_iter([("kind".to_owned(), Value::from("mine"))]);
    let synthetic =
        |arguments| Arguments::Synthetic { of: notation::id("a"), kind: "interrupt:a".into(), arguments };
    let image = Image { data: "aGk=".into(), media_type: "image/png".into() };
    let content = Body::Content(vec![Content::Text { text: "see".into() }, Content::Image(image.clone())]);
    let diff = Segment::Diff { path: "a.txt".into(), patch: "+1".into() };
    let display = vec![Segment::Text("short".into()), diff, Segment::Image(image)];
    let open = ThoughtKind::Readable { text: "hm".into(), signature: "s".into() };
    let sealed = ThoughtKind::Redacted { data: "d".into() };
    let thoughts = vec![Thought { at: 0, calls: 0, kind: open }, Thought { at: 3, calls: 1, kind: sealed }];
    let fields = || serde_json::json!({"reasoning": {"a": [1, "b"]}}).as_object().unwrap().clone();
    let item = ThoughtKind::Item { item: fields() };
    let usage = rap_agent::Usage { input: 5, output: 2, cached: 1, written: 3, cost: 7 };
    let own = Thoughts {
        model: "m".into(),
        server: Some("https://models.test/v1".into()),
        parts: vec![Thought { at: 1, calls: 2, kind: item }],
        fields: fields(),
        call_fields: vec![Map::new(), fields()],
    };
    let items = [
        Item::user("hi"),
        Item::message("you are a child", Speaker::Runtime),
        Item::assistant("", Vec::new()),
        Item::Assistant {
            text: "looking".into(),
            calls: vec![
                call("a", Arguments::Given(given.clone())),
                call("b", Arguments::Unusable("{".into())),
                call("c", synthetic(None)),
                call("d", synthetic(Some(given))),
            ],
            thoughts: Some(Thoughts { model: "m".into(), parts: thoughts, ..Thoughts::default() }),
            usage: None,
        },
        Item::Assistant { text: "so".into(), calls: Vec::new(), thoughts: Some(own), usage: Some(usage) },
        Item::Result { call_id: notation::id("a"), content, display, synthetic: false },
        Item::runtime_result(notation::id("b"), "Error: no"),
        Item::Summary { text: "much was said".into(), covers: 4 },
        Item::notice("a notice"),
    ];
    for item in items {
        let entry = Entry { at: Timestamp(7), item };
        let json = serde_json::to_string(&entry).unwrap();
        assert_eq!(serde_json::from_str::<Entry>(&json).unwrap(), entry, "{json}");
    }
}
