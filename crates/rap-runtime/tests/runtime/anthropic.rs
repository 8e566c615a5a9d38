//! Tests of the Anthropic model against a fake server, with correct and faulty responses.

use std::sync::Arc;
use std::time::Duration;

use crate::canned::{
    Canned, Harness, KEY, LONG_NAME, ask_and_cut, call_fields, events_of, failing, non_answers, ok, request,
};
use rap_agent::{Arguments, CallEntry, Entry, Item, Thought, ThoughtKind, Thoughts, Usage};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Body, CallId, Content, Image, Secret, Timestamp, UrlPolicy};
use rap_runtime::model::anthropic::{Anthropic, Settings, Thinking};
use rap_runtime::model::{Error, HistoryScope, Model, ModelAnswer, ModelRequest, Prices};
use serde_json::{Map, Value, json};
use url::Url;

async fn start(answers: impl IntoIterator<Item = Canned>) -> Harness {
    start_thinking(Thinking::Off, answers).await
}

async fn start_thinking(thinking: Thinking, answers: impl IntoIterator<Item = Canned>) -> Harness {
    crate::canned::start("/v1/messages", answers, |url| model(url, thinking)).await
}

fn model(base_url: Url, thinking: Thinking) -> Arc<dyn Model> {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let api_key = Some(Secret::new(KEY));
    let settings =
        Settings { base_url, name: "claude".into(), api_key, max_tokens: 4096, thinking, prices: None };
    Arc::new(Anthropic::new(client, settings).unwrap())
}

/// Asks the model once. A stream is also cut at every byte.
async fn ask(canned: Canned) -> Result<ModelAnswer, Error> {
    ask_and_cut(canned, async |answers| start(answers).await).await
}

/// Returns a stream of these events.
fn events(events: &[Value]) -> String {
    let event = |data: &Value| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap());
    events.iter().map(event).collect()
}

fn begin() -> Value {
    let usage = json!({"input_tokens": 3, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 100,
        "output_tokens": 1});
    json!({"type": "message_start", "message": {"id": "msg_1", "type": "message", "role": "assistant",
        "content": [], "model": "claude", "stop_reason": null, "stop_sequence": null, "usage": usage}})
}

fn block(index: u64, block: Value) -> Value {
    json!({"type": "content_block_start", "index": index, "content_block": block})
}

fn delta(index: u64, delta: Value) -> Value {
    json!({"type": "content_block_delta", "index": index, "delta": delta})
}

fn stop(index: u64) -> Value {
    json!({"type": "content_block_stop", "index": index})
}

fn end(reason: &str) -> Vec<Value> {
    vec![
        json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null},
            "usage": {"output_tokens": 15}}),
        json!({"type": "message_stop"}),
    ]
}

/// Returns the events of a text block in pieces.
fn text(index: u64, pieces: &[&str]) -> Vec<Value> {
    let mut all = vec![block(index, json!({"type": "text", "text": ""}))];
    all.extend(pieces.iter().map(|piece| delta(index, json!({"type": "text_delta", "text": piece}))));
    all.push(stop(index));
    all
}

/// Returns the events of a call whose arguments come in pieces.
fn call(index: u64, id: &str, name: &str, pieces: &[&str]) -> Vec<Value> {
    let mut all = vec![block(index, json!({"type": "tool_use", "id": id, "name": name, "input": {}}))];
    let piece = |piece| delta(index, json!({"type": "input_json_delta", "partial_json": piece}));
    all.extend(pieces.iter().map(piece));
    all.push(stop(index));
    all
}

fn thought(index: u64, pieces: &[&str], signature: &str) -> Vec<Value> {
    let mut all = vec![block(index, json!({"type": "thinking", "thinking": "", "signature": ""}))];
    all.extend(pieces.iter().map(|piece| delta(index, json!({"type": "thinking_delta", "thinking": piece}))));
    all.push(delta(index, json!({"type": "signature_delta", "signature": signature})));
    all.push(stop(index));
    all
}

fn whole(parts: Vec<Vec<Value>>, reason: &str) -> Vec<Value> {
    [vec![begin()], parts.concat(), end(reason)].concat()
}

async fn answered(parts: Vec<Vec<Value>>, reason: &str) -> ModelAnswer {
    ask(ok(events(&whole(parts, reason)))).await.unwrap()
}

fn open(at: usize, text: &str, signature: &str) -> Thought {
    let kind = ThoughtKind::Readable { text: text.into(), signature: signature.into() };
    Thought { at, calls: 0, kind }
}

#[tokio::test]
async fn a_text_is_streamed_with_its_usage() {
    let harness = start([ok(events(&whole(vec![text(0, &["Hel", "lo ☃"])], "end_turn")))]).await;
    let (answer, _) = harness.ask().await;
    let usage = Usage { input: 113, output: 15, cached: 100, written: 10, cost: 0 };
    assert_eq!(answer, Ok(ModelAnswer { text: "Hello ☃".into(), usage, ..ModelAnswer::default() }));
    assert_eq!(harness.model.history_scope(), HistoryScope::Full);
    let (headers, body) = &harness.server.requests()[0];
    assert_eq!(headers["x-api-key"], KEY);
    assert_eq!(headers["anthropic-version"], "2023-06-01");
    assert!(headers.get("authorization").is_none());
    let cached = json!({"type": "ephemeral"});
    assert_eq!(body["system"], json!([{"type": "text", "text": "be good", "cache_control": cached}]));
    assert_eq!(
        (&body["model"], &body["stream"], &body["max_tokens"], body.get("thinking")),
        (&json!("claude"), &json!(true), &json!(4096), None)
    );
    let message = json!({"type": "text", "text": "hi", "cache_control": cached});
    assert_eq!(body["messages"], json!([{"role": "user", "content": [message]}]));
    assert_eq!((body["tools"].as_array().unwrap().len(), &body["tools"][1]["cache_control"]), (2, &cached));
}

#[tokio::test]
async fn a_base_url_may_end_with_the_version() {
    for base in ["", "v1", "v1/"] {
        let answers = [ok(events(&whole(vec![text(0, &["here"])], "end_turn")))];
        let asked = crate::canned::start("/v1/messages", answers, |url| {
            model(url.join(base).unwrap(), Thinking::Off)
        });
        assert_eq!(asked.await.ask().await.0.unwrap().text, "here", "{base}");
    }
}

/// A recorded answer with thinking blocks of both kinds, text and parallel calls.
fn recorded() -> Vec<Value> {
    let mut all = whole(
        vec![
            thought(0, &["Let me ", "think."], "c2ln"),
            vec![block(1, json!({"type": "redacted_thinking", "data": "c2VjcmV0"})), stop(1)],
            text(2, &["Let me see", " ☃."]),
            call(3, "toolu_a", "read", &["", "{\"path\": \"a", "b\"}"]),
            call(4, "toolu_b", "read", &[]),
        ],
        "tool_use",
    );
    all.insert(2, json!({"type": "ping"}));
    all.insert(9, json!({"type": "of_a_later_version", "index": 1, "delta": {"type": "what"}}));
    all.insert(11, delta(2, json!({"type": "citations_delta", "citation": {}})));
    all
}

#[tokio::test]
async fn every_event_is_understood() {
    let answer = ask(ok(events(&recorded()))).await.unwrap();
    assert_eq!(answer.text, "Let me see ☃.");
    assert_eq!(
        call_fields(&answer),
        [("toolu_a", "read", json!({"path": "ab"})), ("toolu_b", "read", json!({}))]
    );
    let sealed = Thought { at: 0, calls: 0, kind: ThoughtKind::Redacted { data: "c2VjcmV0".into() } };
    let parts = vec![open(0, "Let me think.", "c2ln"), sealed];
    assert_eq!(answer.thoughts, Some(Thoughts { model: "claude".into(), parts, ..Thoughts::default() }));
}

#[tokio::test]
async fn a_stream_that_is_truncated_at_any_byte_is_retried() {
    let stream = events(&recorded()).into_bytes();
    let whole = ask(ok(stream.clone())).await.unwrap();
    for breaks in [true, false] {
        let cuts = (0..stream.len()).map(|cut| Canned { breaks, ..events_of(&stream[..cut]) });
        let harness = start(cuts).await;
        for cut in 0..stream.len() {
            let (answer, streamed) = harness.ask().await;
            // The empty line after the last event may be missing.
            match answer {
                Ok(answer) => assert!(cut + 2 >= stream.len() && answer == whole, "cut at {cut}: {answer:?}"),
                Err(Error::Retry { .. }) => assert!(cut + 2 < stream.len(), "cut at {cut}"),
                Err(error) => panic!("cut at {cut}: {error}"),
            }
            assert!("Let me see ☃.".starts_with(&streamed), "cut at {cut}: {streamed}");
        }
    }
}

/// Returns a message as one document, with the blocks of [`recorded`].
fn document() -> Value {
    let content = json!([
        {"type": "thinking", "thinking": "Let me think.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
        {"type": "text", "text": "Let me see ☃."},
        {"type": "tool_use", "id": "toolu_a", "name": "read", "input": {"path": "ab"}},
        {"type": "tool_use", "id": "toolu_b", "name": "read", "input": {}},
    ]);
    let usage = json!({"input_tokens": 3, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 100,
        "output_tokens": 15});
    json!({"id": "msg_1", "type": "message", "role": "assistant", "content": content, "model": "claude",
        "stop_reason": "tool_use", "stop_sequence": null, "usage": usage})
}

#[tokio::test]
async fn a_document_in_answer_to_a_streamed_request_is_read() {
    let text = serde_json::to_string_pretty(&document()).unwrap();
    let answer = ask(ok(format!("\n {text}"))).await.unwrap();
    assert_eq!(answer, ask(ok(events(&recorded()))).await.unwrap());
    for cut in 0..text.len() {
        let Some(start) = text.get(..cut) else { continue };
        if cut % 7 == 0 && !start.trim().is_empty() {
            let answer = ask(ok(start)).await;
            assert!(matches!(answer, Err(Error::Retry { .. })), "cut at {cut}: {answer:?}");
        }
    }
    let mut cut = document();
    cut["stop_reason"] = "max_tokens".into();
    assert!(
        ask(ok(cut.to_string())).await.unwrap().text.ends_with("[cut: the answer reached the model's limit]")
    );
    let error = json!({"type": "error", "error": {"type": "authentication_error", "message": "no"}});
    assert!(matches!(ask(ok(error.to_string())).await, Err(Error::Refused { .. })));
}

#[tokio::test]
async fn odd_values_do_not_discard_an_answer() {
    let indexed = |index: Value| {
        let mut all = recorded();
        for event in &mut all {
            if event.get("index").is_some() {
                match index {
                    Value::Null => event.as_object_mut().unwrap().remove("index"),
                    _ => event.as_object_mut().unwrap().insert("index".into(), index.clone()),
                };
            }
        }
        all
    };
    let expected = ask(ok(events(&recorded()))).await.unwrap();
    for index in [json!(null), json!(-1), json!("0"), json!(0)] {
        let answer = ask(ok(events(&indexed(index.clone())))).await.unwrap();
        assert_eq!(answer, expected, "{index}");
    }
    let usage = json!({"input_tokens": 3.0, "output_tokens": "15", "cache_read_input_tokens": null});
    let end = |usage: Value| {
        vec![
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
            json!({"type": "message_stop"}),
        ]
    };
    // The counts of the cache came with the start of the message.
    let counts = Usage { input: 113, output: 15, cached: 100, written: 10, cost: 0 };
    for usage in [usage, json!({"output_tokens": 15, "input_tokens": 0})] {
        let all = [vec![begin()], text(0, &["so"]), end(usage.clone())].concat();
        assert_eq!(ask(ok(events(&all))).await.unwrap().usage, counts, "{usage}");
    }
    let bare = [vec![json!({"type": "message_start"})], text(0, &["so"]), end(Value::Null)].concat();
    assert_eq!(ask(ok(events(&bare))).await.unwrap().usage, Usage::default());
    let twice = answered(vec![call(0, "c", "read", &["{}", "{\"a\": \"x\\u0000\"}"])], "tool_use").await;
    assert_eq!(call_fields(&twice), [("c", "read", json!({"a": "x"}))]);
}

#[tokio::test]
async fn every_stop_reason_is_handled() {
    let blocks = || vec![text(0, &["so far"]), call(1, "c", "read", &["{\"a\": 1}"])];
    for reason in ["end_turn", "tool_use", "stop_sequence", "of_a_later_version"] {
        let answer = answered(blocks(), reason).await;
        assert_eq!(answer.text, "so far", "{reason}");
        assert_eq!(call_fields(&answer), [("c", "read", json!({"a": 1}))], "{reason}");
    }
    let table = [
        ("max_tokens", "so far\n[cut: the answer reached the model's limit]"),
        ("model_context_window_exceeded", "so far\n[cut: the conversation fills the model's context window]"),
    ];
    for (reason, expected) in table {
        let answer = answered(blocks(), reason).await;
        assert_eq!((&*answer.text, answer.calls.len()), (expected, 1), "{reason}");
    }
    let refused = answered(blocks(), "refusal").await;
    assert_eq!(refused.text, "so far\n[cut: the model's provider stopped the answer]");
    assert!(refused.calls.is_empty(), "calls of a stopped answer are not made");
    assert_eq!(answered(vec![], "refusal").await.text, "[cut: the model's provider stopped the answer]");
    // A paused turn with calls is not resumed, because their results come first.
    assert_eq!(answered(blocks(), "pause_turn").await.calls.len(), 1);
}

#[tokio::test]
async fn a_paused_turn_is_resumed() {
    let searching = vec![
        block(1, json!({"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}})),
        delta(1, json!({"type": "input_json_delta", "partial_json": "{\"query\": \"x\"}"})),
        stop(1),
    ];
    let found = json!({"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []});
    let answers = [
        whole(vec![text(0, &["Searching."]), searching], "pause_turn"),
        whole(vec![vec![block(0, found.clone()), stop(0)], text(1, &["Still."])], "pause_turn"),
        whole(vec![text(0, &[" Found."])], "end_turn"),
    ];
    let harness = start(answers.map(|answer| ok(events(&answer)))).await;
    let answer = harness.ask().await.0.unwrap();
    assert_eq!(answer.text, "Searching.\n\nStill. Found.");
    assert_eq!(answer.usage, Usage { input: 339, output: 45, cached: 300, written: 30, cost: 0 });
    let asked = harness.server.requests();
    let search =
        json!({"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}});
    let mut content = vec![json!({"type": "text", "text": "Searching."}), search];
    assert_eq!(asked[1].1["messages"][1], json!({"role": "assistant", "content": content}));
    content.extend([found, json!({"type": "text", "text": "Still."})]);
    assert_eq!(asked[2].1["messages"].as_array().unwrap().len(), 2);
    assert_eq!(asked[2].1["messages"][1]["content"], json!(content));

    let answers = (0..9).map(|_| ok(events(&whole(vec![text(0, &["."])], "pause_turn"))));
    let answer = start(answers).await.ask().await.0.unwrap();
    assert_eq!(answer.text, ".........\n[cut: the model's provider paused the answer too often]");
}

#[tokio::test]
async fn incomplete_blocks_are_not_used() {
    // The answer reached its limit in the middle of a thinking block.
    let mut half = thought(0, &["hm"], "c2ln");
    half.truncate(2);
    let answer = answered(vec![half], "max_tokens").await;
    assert_eq!((answer.thoughts, answer.text.starts_with("[cut: ")), (None, true));
    // In the middle of arguments, with and without the end of their block.
    for closed in [true, false] {
        let mut cut = call(0, "c", "read", &["{\"path\": \"a"]);
        let mut bare = call(1, "d", "read", &[]);
        if !closed {
            cut.pop();
            bare.pop();
        }
        let answer = answered(vec![cut, bare], "max_tokens").await;
        let expected =
            [("c", "read", json!({"unusable": "{\"path\": \"a"})), ("d", "read", json!({"unusable": ""}))];
        assert_eq!(call_fields(&answer), expected);
    }
    let whole = answered(vec![call(0, "c", "read", &[]), text(1, &["so"])], "max_tokens").await;
    assert_eq!(call_fields(&whole), [("c", "read", json!({}))]);
}

#[tokio::test]
async fn separate_texts_are_separated_and_thoughts_keep_their_position() {
    let parts = vec![
        thought(0, &["a"], "1"),
        text(1, &["one"]),
        text(2, &[" and"]),
        thought(3, &["b"], "2"),
        text(4, &["", "two"]),
    ];
    let answer = answered(parts, "end_turn").await;
    assert_eq!(answer.text, "one and\n\ntwo");
    assert_eq!(answer.thoughts.unwrap().parts, [open(0, "a", "1"), open(7, "b", "2")]);
}

#[tokio::test]
async fn variants_of_compatible_servers_are_understood() {
    let table = [
        vec![block(0, json!({"type": "tool_use", "id": "", "name": "read", "input": {"n": 1}})), stop(0)],
        vec![
            block(7, json!({"type": "tool_use", "name": "read"})),
            delta(
                7,
                json!({"type": "input_json_delta",
            "partial_json": "{\"n\": 1}"}),
            ),
            stop(7),
        ],
    ];
    for parts in table {
        let answer = answered(vec![parts], "tool_use").await;
        assert_eq!(call_fields(&answer), [("call_7_1", "read", json!({"n": 1}))]);
    }
    let started = vec![block(0, json!({"type": "text", "text": "all at once"})), stop(0)];
    assert_eq!(answered(vec![started], "end_turn").await.text, "all at once");
    let odd = answered(vec![call(0, "c", "read", &["[1]"])], "tool_use").await;
    assert_eq!(call_fields(&odd), [("c", "read", json!({"unusable": "[1]"}))]);
}

#[tokio::test]
async fn a_fitted_name_is_mapped_back() {
    let harness = start([ok(events(&whole(vec![], "end_turn")))]).await;
    harness.ask().await.0.unwrap();
    let fitted = harness.server.requests()[0].1["tools"][1]["name"].as_str().unwrap().to_owned();
    assert_ne!(fitted, LONG_NAME);
    assert_eq!(answered(vec![call(0, "c", &fitted, &["{}"])], "tool_use").await.calls[0].name, LONG_NAME);
}

#[tokio::test]
async fn failures_are_classified_and_contain_no_key() {
    let body = |kind: &str, message: &str| {
        json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"})
            .to_string()
    };
    for (status, kind) in [(429, "rate_limit_error"), (529, "overloaded_error")] {
        let busy =
            Canned { headers: vec![("retry-after", "7")], ..failing(status, &body(kind, "slow down")) };
        let why = format!("the model's server answered {status}: slow down");
        assert_eq!(ask(busy).await, Err(Error::Retry { why, retry_after: Some(Duration::from_secs(7)) }));
    }
    for status in [429, 500, 504, 529] {
        let answer = ask(failing(status, &body("api_error", "oops"))).await;
        assert!(matches!(answer, Err(Error::Retry { retry_after: None, .. })), "{status}: {answer:?}");
    }
    let table = [
        (400, "invalid_request_error", "bad schema", "answered 400: bad schema"),
        (401, "authentication_error", &format!("invalid x-api-key {KEY}"), "invalid x-api-key [key]"),
        (403, "permission_error", "not yours", "answered 403: not yours"),
        (404, "not_found_error", "model: claude", "answered 404: model: claude"),
    ];
    for (status, kind, message, expected) in table {
        let error = ask(failing(status, &body(kind, message))).await.unwrap_err();
        assert!(matches!(&error, Error::Refused { why, .. } if why.contains(expected)), "{error}");
    }
    let long = "prompt is too long: 210000 tokens > 200000 maximum";
    for (status, kind, message) in
        [(400, "invalid_request_error", long), (413, "request_too_large", "too large")]
    {
        let error = ask(failing(status, &body(kind, message))).await.unwrap_err();
        assert!(matches!(&error, Error::TooLong { why, .. } if why.contains(message)), "{error}");
    }
}

#[tokio::test]
async fn a_web_page_or_an_empty_body_is_an_error_in_the_configuration() {
    for (canned, why) in non_answers() {
        assert_eq!(ask(canned).await, Err(Error::Refused { why, every_request: false }));
    }
}

#[tokio::test]
async fn an_error_inside_the_stream_is_a_failure() {
    let failed = |kind: &str| {
        let error = json!({"type": "error", "error": {"type": kind, "message": format!("no, {KEY}")}});
        [vec![begin()], text(0, &["half"]), vec![error]].concat()
    };
    for kind in ["overloaded_error", "api_error", "rate_limit_error", "timeout_error", "new_error"] {
        let error = ask(ok(events(&failed(kind)))).await.unwrap_err();
        assert!(matches!(error, Error::Retry { .. }), "{kind}: {error}");
    }
    for kind in ["invalid_request_error", "authentication_error", "billing_error"] {
        let error = ask(ok(events(&failed(kind)))).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{kind}: {error}");
    }
    let error = ask(ok(events(&failed("request_too_large")))).await.unwrap_err();
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_request_that_is_too_long_is_recognised_before_and_inside_a_stream_and_the_window_is_learned() {
    let message = "input length and `max_tokens` exceed context limit: 199759 + 8192 > 150000, decrease it";
    let error = json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}});
    let streamed = ok(events(&[vec![begin()], text(0, &["half"]), vec![error.clone()]].concat()));
    for canned in [failing(400, &error.to_string()), streamed, ok(error.to_string())] {
        let harness = start([canned]).await;
        let error = harness.ask().await.0.unwrap_err();
        assert!(matches!(&error, Error::TooLong { why, .. } if why.contains(message)), "{error}");
        assert_eq!(harness.model.window().await, Some(150_000));
    }
}

#[tokio::test]
async fn a_malformed_stream_is_not_an_answer() {
    let text_x = || text(0, &["x"]);
    let table = [
        vec![json!({"type": "message_stop"})],
        [vec![begin()], text_x(), vec![begin()], end("end_turn")].concat(),
        [text_x(), end("end_turn")].concat(),
        [vec![begin()], vec![delta(5, json!({"type": "text_delta", "text": "x"}))], end("end_turn")].concat(),
        [vec![begin()], text_x(), vec![stop(0)], end("end_turn")].concat(),
        [
            vec![begin(), block(0, json!({"type": "text", "text": ""}))],
            vec![delta(0, json!({"type": "input_json_delta", "partial_json": "x"}))],
            end("end_turn"),
        ]
        .concat(),
        [vec![begin(), block(0, json!({}))], end("end_turn")].concat(),
    ];
    for chunks in table {
        let error = ask(ok(events(&chunks))).await.unwrap_err();
        assert!(matches!(error, Error::Retry { .. }), "{error}");
        assert_eq!(error.to_string(), "the model's answer is malformed");
    }
    for body in ["data: {\"type\": \"message_st\n\n", "data: {}\n\n", "data: 5\n\n", "{}", ": wait"] {
        assert!(matches!(ask(ok(body)).await, Err(Error::Retry { .. })), "{body}");
    }
    let many: Vec<_> = (0..257).map(|index| call(index, &format!("c{index}"), "read", &[])).collect();
    let error = ask(ok(events(&whole(many, "tool_use")))).await.unwrap_err();
    assert_eq!(error.to_string(), "the model's answer has more than 256 calls");
}

#[tokio::test]
async fn an_answer_that_is_cut_reports_the_tokens_that_were_counted() {
    let half = [vec![begin()], text(0, &["half"])].concat();
    let counted = Usage { input: 113, output: 1, cached: 100, written: 10, cost: 0 };
    let overloaded = json!({"type": "error", "error": {"type": "overloaded_error", "message": "later"}});
    let refused = json!({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}});
    for end in [vec![], vec![overloaded], vec![refused]] {
        let harness = start([events_of(events(&[half.clone(), end].concat()))]).await;
        let request = request();
        let spent = request.spent.clone();
        harness.ask_with(request).await.0.unwrap_err();
        assert_eq!((spent.take(), spent.take()), (counted, Usage::default()));
    }
    // The tokens before a pause are counted if the turn cannot be resumed.
    let paused = events(&whole(vec![text(0, &["so"])], "pause_turn"));
    let harness = start([ok(paused), failing(503, "busy")]).await;
    let request = request();
    let spent = request.spent.clone();
    harness.ask_with(request).await.0.unwrap_err();
    assert!(spent.take().output > 0);
}

#[tokio::test]
async fn an_answer_has_its_cost_if_the_prices_are_known() {
    let prices = Prices { input: 1_000_000, output: 10_000_000, cached: 100_000, written: 2_000_000 };
    for (name, prices, cost) in [
        // 3 fresh, 100 cached, 10 written and 15 output tokens.
        ("some-model", Some(prices), 3_000 + 10_000 + 20_000 + 150_000),
        ("claude-sonnet-4-5", None, 3 * 3_000 + 100 * 300 + 10 * 3_750 + 15 * 15_000),
        ("some-model", None, 0),
    ] {
        let answers = [ok(events(&whole(vec![text(0, &["so"])], "end_turn")))];
        let harness = crate::canned::start("/v1/messages", answers, |base_url| {
            let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
            let (name, thinking) = (name.to_owned(), Thinking::Off);
            let settings = Settings { base_url, name, api_key: None, max_tokens: 4096, thinking, prices };
            Arc::new(Anthropic::new(client, settings).unwrap())
        });
        assert_eq!(harness.await.ask().await.0.unwrap().usage.cost, cost, "{name}");
    }
}

#[tokio::test]
async fn additional_fields_of_a_call_are_sent_back_to_the_same_server() {
    let mut made_call = call(0, "toolu_a", "read", &["{}"]);
    made_call[0]["content_block"]["signature"] = json!("c2ln");
    made_call[0]["content_block"]["caller"] = json!({"type": "direct"});
    let parts = vec![made_call, call(1, "toolu_b", "read", &["{}"])];
    let stream = || ok(events(&whole(parts.clone(), "tool_use")));
    let harness = start([stream(), stream(), stream()]).await;
    let thoughts = harness.ask().await.0.unwrap().thoughts.unwrap();
    assert_eq!((&*thoughts.model, thoughts.server.as_deref()), ("claude", Some(harness.model.destination())));
    let answer = |thoughts: Thoughts| Item::Assistant {
        text: String::new(),
        calls: vec![made("c1"), made("c2")],
        thoughts: Some(thoughts),
        usage: None,
    };
    let elsewhere = Thoughts { server: Some("http://elsewhere/v1".into()), ..thoughts.clone() };
    for thoughts in [thoughts, elsewhere] {
        let mut next = request();
        next.entries.push(entry(answer(thoughts)));
        harness.ask_with(next).await.0.unwrap();
    }
    let sent = |number: usize| harness.server.requests()[number].1["messages"][1]["content"].clone();
    assert_eq!(
        (&sent(1)[0]["signature"], &sent(1)[0]["caller"]),
        (&json!("c2ln"), &json!({"type": "direct"}))
    );
    assert_eq!((&sent(1)[0]["type"], &sent(1)[0]["id"]), (&json!("tool_use"), &json!("c1")));
    assert_eq!((sent(1)[1].get("signature"), sent(2)[0].get("signature")), (None, None));
}

fn entry(item: Item) -> Entry {
    Entry { at: Timestamp(0), item }
}

fn made(id: &str) -> CallEntry {
    let (id, arguments) = (CallId::new(id).unwrap(), Arguments::Given(Map::new()));
    CallEntry { id, model_id: None, name: "read".into(), arguments, display: None }
}

fn returned(id: &str, content: Body) -> Entry {
    let call_id = CallId::new(id).unwrap();
    entry(Item::Result { call_id, content, display: Vec::new(), synthetic: false })
}

/// Thinking blocks are sent back unchanged, with the results of their calls.
#[tokio::test]
async fn a_thought_is_sent_back_with_the_results_of_its_calls() {
    for (thinking, setting) in [
        (Thinking::Tokens(1024), json!({"type": "enabled", "budget_tokens": 1024})),
        (Thinking::Adaptive, json!({"type": "adaptive"})),
    ] {
        let done = ok(events(&whole(vec![text(0, &["done"])], "end_turn")));
        let harness = start_thinking(thinking, [ok(events(&recorded())), done]).await;
        let answer = harness.ask().await.0.unwrap();
        let calls = answer.calls.iter().map(|call| made(&call.id)).collect();
        let item = Item::Assistant { text: answer.text, calls, thoughts: answer.thoughts, usage: None };
        let results = ["toolu_a", "toolu_b"].map(|id| returned(id, Body::Text("ok".into())));
        let mut next = request();
        next.entries.push(entry(item));
        next.entries.extend(results);
        harness.ask_with(next).await.0.unwrap();
        let asked = harness.server.requests();
        assert_eq!(asked[1].1["thinking"], setting);
        let content = asked[1].1["messages"][1]["content"].as_array().unwrap().clone();
        let expected = [
            json!({"type": "thinking", "thinking": "Let me think.", "signature": "c2ln"}),
            json!({"type": "redacted_thinking", "data": "c2VjcmV0"}),
            json!({"type": "text", "text": "Let me see ☃."}),
        ];
        assert_eq!(content[..3], expected);
        assert_eq!(content.len(), 5);
    }
}

/// The API refuses an answer whose thinking comes back at another place.
#[tokio::test]
async fn blocks_go_back_in_the_order_of_the_answer() {
    let parts = vec![
        text(0, &["First."]),
        thought(1, &["a"], "1"),
        call(2, "toolu_a", "read", &["{}"]),
        thought(3, &["b"], "2"),
        vec![block(4, json!({"type": "redacted_thinking", "data": "c2VjcmV0"})), stop(4)],
        call(5, "toolu_b", "read", &["{}"]),
    ];
    let stream = events(&whole(parts, "tool_use"));
    let done = ok(events(&whole(vec![text(0, &["done"])], "end_turn")));
    let harness = start_thinking(Thinking::Adaptive, [ok(stream), done]).await;
    let answer = harness.ask().await.0.unwrap();
    let calls = answer.calls.iter().map(|call| made(&call.id)).collect();
    let item = Item::Assistant { text: answer.text, calls, thoughts: answer.thoughts, usage: None };
    let mut next = request();
    next.entries.push(entry(item));
    next.entries.extend(["toolu_a", "toolu_b"].map(|id| returned(id, Body::Text("ok".into()))));
    harness.ask_with(next).await.0.unwrap();
    let content = harness.server.requests()[1].1["messages"][1]["content"].clone();
    let kinds: Vec<_> = content.as_array().unwrap().iter().map(|block| block["type"].clone()).collect();
    let expected = ["text", "thinking", "tool_use", "thinking", "redacted_thinking", "tool_use"];
    assert_eq!(kinds, expected);
    assert_eq!((&content[1]["signature"], &content[3]["signature"]), (&json!("1"), &json!("2")));
    assert_eq!((&content[2]["id"], &content[5]["id"]), (&json!("toolu_a"), &json!("toolu_b")));
}

#[tokio::test]
async fn images_in_results_are_sent_only_to_a_model_that_accepts_images() {
    let image = Content::Image(Image { data: "aGk=".into(), media_type: "image/png".into() });
    let mut seen = request();
    seen.entries.push(entry(Item::assistant("", vec![made("c")])));
    seen.entries.push(returned("c", Body::Content(vec![image])));
    let blind = ModelRequest { images: false, ..seen.clone() };
    let answer = || ok(events(&whole(vec![text(0, &["a cat"])], "end_turn")));
    let harness = start([answer(), answer()]).await;
    harness.ask_with(seen).await.0.unwrap();
    harness.ask_with(blind).await.0.unwrap();
    let content = |at: usize| harness.server.requests()[at].1["messages"][2]["content"][0]["content"].clone();
    let source = json!({"type": "base64", "media_type": "image/png", "data": "aGk="});
    assert_eq!(content(0), json!([{"type": "image", "source": source}]));
    let note = content(1)[0]["text"].as_str().unwrap().to_owned();
    assert_eq!(note, "[an image (image/png) is not shown: the model does not accept images]");
}

#[tokio::test]
async fn an_unreachable_server_is_retried_and_a_forbidden_address_is_refused() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gone = model(Url::parse(&format!("http://{free}")).unwrap(), Thinking::Off);
    assert!(matches!(gone.ask(request(), &mut |_| {}).await, Err(Error::Retry { .. })));
    let forbidden = model(Url::parse("http://169.254.169.254").unwrap(), Thinking::Off);
    assert!(matches!(forbidden.ask(request(), &mut |_| {}).await, Err(Error::Refused { .. })));
}

#[test]
fn the_destination_is_the_same_with_and_without_the_version() {
    for base_url in ["http://u:p@h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"] {
        let model = model(Url::parse(base_url).unwrap(), Thinking::Off);
        assert_eq!(model.destination(), "http://h:8000/v1");
    }
}
