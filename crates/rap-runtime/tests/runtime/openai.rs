//! Tests of the OpenAI model against a fake server, with correct and faulty responses.

use std::sync::Arc;
use std::time::Duration;

use crate::canned::{
    Canned, Harness, KEY, LONG_NAME, ask_and_cut, call_fields, events_of, failing, non_answers, ok, request,
};
use rap_agent::{Arguments, CallEntry, Entry, Item, Usage};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{CallId, Secret, Timestamp, UrlPolicy};
use rap_runtime::model::openai::{OpenAi, Settings};
use rap_runtime::model::{CallIds, Error, HistoryScope, Model, ModelAnswer};
use serde_json::{Map, Value, json};
use url::Url;

async fn start(answers: impl IntoIterator<Item = Canned>) -> Harness {
    crate::canned::start("/v1/chat/completions", answers, |url| model(url.join("v1/").unwrap())).await
}

fn model(base_url: Url) -> Arc<dyn Model> {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let settings = Settings {
        base_url,
        name: "gpt".into(),
        api_key: Some(Secret::new(KEY)),
        call_ids: None,
        prices: None,
    };
    Arc::new(OpenAi::new(client, settings).unwrap())
}

/// Asks the model once. A stream is also cut at every byte.
async fn ask(canned: Canned) -> Result<ModelAnswer, Error> {
    ask_and_cut(canned, async |answers| start(answers).await).await
}

/// Returns a stream of these chunks, followed by `[DONE]`.
fn events(chunks: &[Value]) -> String {
    chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect::<String>() + "data: [DONE]\n\n"
}

fn delta(delta: Value) -> Value {
    json!({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

fn finish(reason: &str) -> Value {
    json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

fn calls(pieces: Value) -> Value {
    delta(json!({"tool_calls": pieces}))
}

async fn answered(chunks: &[Value]) -> ModelAnswer {
    ask(ok(events(chunks))).await.unwrap()
}

#[tokio::test]
async fn a_text_is_streamed_with_its_usage() {
    let usage = json!({"choices": [], "usage": {
        "prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8},
    }});
    let chunks = [
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"content": "Hel"})),
        delta(json!({"content": "lo ☃"})),
        finish("stop"),
        usage,
    ];
    let harness = start([ok(events(&chunks))]).await;
    let (answer, streamed) = harness.ask().await;
    let usage = Usage { input: 10, output: 3, cached: 8, ..Usage::default() };
    assert_eq!(answer, Ok(ModelAnswer { text: "Hello ☃".into(), usage, ..ModelAnswer::default() }));
    assert_eq!(streamed, "Hello ☃");
    assert_eq!(harness.model.history_scope(), HistoryScope::Full);
    let (headers, body) = &harness.server.requests()[0];
    assert_eq!(headers["authorization"], format!("Bearer {KEY}"));
    assert_eq!((&body["model"], &body["stream"]), (&json!("gpt"), &json!(true)));
    assert_eq!(body["stream_options"], json!({"include_usage": true}));
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "be good"}));
    assert_eq!(body["tools"].as_array().unwrap().len(), 2);
}

/// Parallel calls in pieces, as recorded from a server.
fn recorded() -> Vec<Value> {
    vec![
        delta(json!({"role": "assistant", "content": "Let me see ☃."})),
        calls(
            json!([{"index": 0, "id": "call_a", "type": "function", "function": {"name": "read", "arguments": ""}}]),
        ),
        calls(json!([{"index": 0, "function": {"arguments": "{\"path\": \"a"}}])),
        calls(json!([{"index": 1, "id": "call_b", "function": {"name": "read", "arguments": ""}}])),
        calls(
            json!([{"index": 1, "function": {"arguments": "{}"}}, {"index": 0, "function": {"arguments": "b\"}"}}]),
        ),
        finish("tool_calls"),
        json!({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
    ]
}

#[tokio::test]
async fn parallel_calls_are_assembled_by_their_index() {
    let answer = answered(&recorded()).await;
    assert_eq!(answer.text, "Let me see ☃.");
    let expected = [("call_a", "read", json!({"path": "ab"})), ("call_b", "read", json!({}))];
    assert_eq!(call_fields(&answer), expected);
}

#[tokio::test]
async fn a_fitted_name_is_mapped_back() {
    let harness = start([ok(events(&[finish("stop")]))]).await;
    harness.ask().await.0.unwrap();
    let fitted = harness.server.requests()[0].1["tools"][1]["function"]["name"].clone();
    assert_ne!(fitted, LONG_NAME);
    let call = json!([{"index": 0, "id": "c", "function": {"name": fitted, "arguments": "{}"}}]);
    assert_eq!(answered(&[calls(call), finish("tool_calls")]).await.calls[0].name, LONG_NAME);
}

#[tokio::test]
async fn every_format_of_calls_is_understood() {
    let whole = |id: Option<&str>, n: u64| {
        let mut call = json!({"type": "function", "function": {"name": "read", "arguments": json!({"n": n}).to_string()}});
        if let Some(id) = id {
            call["id"] = id.into();
        }
        call
    };
    let indexed = |mut call: Value| {
        call["index"] = json!(0);
        call
    };
    let object = json!({"id": "a", "function": {"name": "read", "arguments": {"n": 1}}});
    let table = [
        ("whole, in one chunk", vec![calls(json!([whole(Some("a"), 1), whole(Some("b"), 2)]))]),
        ("whole, without ids", vec![calls(json!([whole(None, 1), whole(None, 2)]))]),
        ("whole, in two chunks", vec![calls(json!([whole(None, 1)])), calls(json!([whole(None, 2)]))]),
        (
            "all with index 0",
            vec![calls(json!([indexed(whole(Some("a"), 1))])), calls(json!([indexed(whole(Some("b"), 2))]))],
        ),
        (
            "all with index 0 and no ids",
            vec![calls(json!([indexed(whole(None, 1))])), calls(json!([indexed(whole(None, 2))]))],
        ),
        ("arguments as an object", vec![calls(json!([object])), calls(json!([whole(None, 2)]))]),
        (
            "pieces without an index",
            vec![
                calls(json!([{"id": "a", "function": {"name": "read", "arguments": "{\"n\":"}}])),
                calls(json!([{"function": {"arguments": "1}"}}])),
                calls(json!([{"id": "b", "function": {"name": "read"}}])),
                calls(json!([{"id": "b", "function": {"name": "read", "arguments": "{\"n\":2}"}}])),
            ],
        ),
    ];
    for (way, mut chunks) in table {
        chunks.push(finish("tool_calls"));
        let answer = answered(&chunks).await;
        let numbers: Vec<_> = answer
            .calls
            .iter()
            .map(|call| (&*call.name, call.arguments.clone().unwrap()["n"].clone()))
            .collect();
        assert_eq!(numbers, [("read", json!(1)), ("read", json!(2))], "{way}");
        assert!(
            answer.calls[0].id != answer.calls[1].id && answer.calls.iter().all(|call| !call.id.is_empty())
        );
    }
    let unnamed = answered(&[calls(json!([whole(None, 1)])), finish("tool_calls")]).await;
    assert_eq!(unnamed.calls[0].id, "call_7_1");
}

#[tokio::test]
async fn odd_values_do_not_discard_an_answer() {
    let piece = |index: Value, id: &str, name: &str, arguments: &str| {
        calls(json!([{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}]))
    };
    let number = json!({"choices": [{"delta": {}, "finish_reason": 1}], "usage": {
        "prompt_tokens": 4.0, "completion_tokens": "5", "prompt_tokens_details": {"cached_tokens": -1},
    }});
    let table = [
        ("index -1", vec![piece(json!(-1), "a", "read", "{\"n\":"), piece(json!(-1), "", "", "1}")]),
        ("index as text", vec![piece(json!("0"), "a", "read", "{\"n\":"), piece(json!("0"), "", "", "1}")]),
        ("no index", vec![piece(json!(null), "a", "read", "{\"n\":"), piece(json!(null), "", "", "1}")]),
        (
            "a new id in every delta",
            vec![
                piece(json!(0), "a", "read", "{\"n\":"),
                piece(json!(0), "b", "", "1"),
                piece(json!(0), "c", "", "}"),
            ],
        ),
        (
            "a new id in every delta, without an index",
            vec![piece(json!(null), "a", "read", "{\"n\":"), piece(json!(null), "b", "", "1}")],
        ),
        (
            "a new id and the name in every delta",
            vec![piece(json!(0), "a", "read", "{\"n\":"), piece(json!(0), "b", "read", "1}")],
        ),
        (
            "{} before the arguments",
            vec![piece(json!(0), "a", "read", "{}"), piece(json!(0), "a", "", "{\"n\":1}")],
        ),
        (
            "a single call",
            vec![calls(json!({"id": "a", "function": {"name": "read", "arguments": {"n": 1}}}))],
        ),
        (
            "a whole message in an event",
            vec![json!({"choices": [{"message": {"content": "", "tool_calls": [
                {"id": "a", "function": {"name": "read", "arguments": "{\"n\":1}"}}]}}]})],
        ),
        (
            "a whole message after its pieces",
            vec![
                piece(json!(0), "a", "read", "{\"n\":1}"),
                json!({"choices": [{"message": {"content": "again", "tool_calls": []}}]}),
            ],
        ),
        (
            "odd choices",
            vec![
                json!({"choices": null}),
                json!({"choices": [], "usage": null}),
                piece(json!(0), "a", "read", "{\"n\":1}"),
            ],
        ),
    ];
    for (oddity, mut chunks) in table {
        chunks.push(number.clone());
        let answer = answered(&chunks).await;
        assert_eq!(call_fields(&answer), [("a", "read", json!({"n": 1}))], "{oddity}");
        assert_eq!(answer.usage, Usage { input: 4, output: 5, cached: 0, ..Usage::default() }, "{oddity}");
    }
    // A number that means that there is no reason yet does not end the answer.
    let unfinished = json!({"choices": [{"delta": {"content": "half"}, "finish_reason": 0}]});
    let cut = ask(events_of(format!("data: {unfinished}\n\n"))).await;
    assert!(matches!(cut, Err(Error::Retry { .. })), "{cut:?}");
}

#[tokio::test]
async fn nul_characters_are_removed() {
    let arguments = "{\"a\\u0000b\": [\"x\\u0000y\", {\"c\": \"\\u0000\"}]}";
    let call =
        calls(json!([{"index": 0, "id": "a\0", "function": {"name": "read\0", "arguments": arguments}}]));
    let answer = answered(&[delta(json!({"content": "so\0 far"})), call, finish("stop")]).await;
    assert_eq!(answer.text, "so far");
    assert_eq!(call_fields(&answer), [("a", "read", json!({"ab": ["xy", {"c": ""}]}))]);
    let raw = calls(
        json!([{"index": 0, "id": "a", "function": {"name": "read", "arguments": "{\"a\": \"x\0\"}"}}]),
    );
    assert_eq!(call_fields(&answered(&[raw, finish("stop")]).await), [("a", "read", json!({"a": "x"}))]);
}

#[tokio::test]
async fn the_last_event_is_read_without_its_empty_line() {
    let text = delta(json!({"content": "whole"}));
    for end in ["\n\n", "\n", ""] {
        for last in [finish("stop").to_string(), "[DONE]".to_owned()] {
            let answer = ask(events_of(format!("data: {text}\n\ndata: {last}{end}"))).await;
            assert_eq!(answer.unwrap().text, "whole", "{last} {end:?}");
        }
    }
}

/// Fields that a server sent are kept with its URL and the name of the model, and go back with the next request.
#[tokio::test]
async fn additional_fields_are_kept_and_sent_back_to_the_same_server() {
    let signature = json!({"google": {"thought_signature": "c2ln"}});
    let function = json!({"name": "read", "arguments": "{}", "thought_signature": "in the "});
    let call = json!([{"index": 0, "id": "a", "extra_content": signature, "function": function}]);
    let rest = json!([{"index": 0, "function": {"thought_signature": "function"}}]);
    let chunks = [
        delta(json!({"role": "assistant", "content": null, "reasoning_content": "Let me "})),
        delta(json!({"reasoning_content": "think."})),
        calls(call),
        calls(rest),
        finish("tool_calls"),
    ];
    let harness = start([ok(events(&chunks)), ok(events(&[finish("stop")]))]).await;
    let answer = harness.ask().await.0.unwrap();
    let thoughts = answer.thoughts.clone().unwrap();
    assert_eq!((&*thoughts.model, thoughts.server.as_deref()), ("gpt", Some(harness.model.destination())));
    let item = Item::Assistant {
        text: String::new(),
        calls: vec![CallEntry {
            id: CallId::new("t_1").unwrap(),
            model_id: None,
            name: "read".into(),
            arguments: Arguments::Given(Map::new()),
            display: None,
        }],
        thoughts: Some(thoughts),
        usage: None,
    };
    let mut next = request();
    next.entries.push(Entry { at: Timestamp(0), item });
    harness.ask_with(next).await.0.unwrap();
    let message = harness.server.requests()[1].1["messages"][2].clone();
    assert_eq!(message["reasoning_content"], "Let me think.");
    assert_eq!(
        (&message["tool_calls"][0]["extra_content"], &message["tool_calls"][0]["id"]),
        (&signature, &json!("t_1"))
    );
    let function = json!({"name": "read", "arguments": "{}", "thought_signature": "in the function"});
    assert_eq!(message["tool_calls"][0]["function"], function);
    assert_eq!(answered(&[finish("stop")]).await.thoughts, None);
    let large = delta(json!({"reasoning_content": "x".repeat(2_000_000)}));
    assert_eq!(answered(&[large, finish("stop")]).await.thoughts, None);
}

#[tokio::test]
async fn every_name_of_a_token_count_is_read_and_a_later_chunk_takes_none_back() {
    let table = [
        (json!({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}), (4, 0)),
        (json!({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 5}), (4, 0)),
        (
            json!({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3}}),
            (4, 3),
        ),
        (json!({"prompt_tokens": 9, "prompt_tokens_details": {"cache_creation_tokens": 3}}), (0, 3)),
    ];
    for (usage, (cached, written)) in table {
        let chunks = [
            json!({"choices": [{"delta": {"content": "so"}}], "usage": usage}),
            finish("stop"),
            json!({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": null}}),
            json!({"choices": [], "usage": {}}),
        ];
        let expected = Usage { input: 9, output: 2, cached, written, cost: 0 };
        assert_eq!(answered(&chunks).await.usage, expected, "{usage}");
    }
}

#[tokio::test]
async fn call_ids_are_short_where_the_configuration_or_the_url_says_so() {
    let client = || Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let short = |url: &str, call_ids| {
        let settings = Settings {
            base_url: Url::parse(url).unwrap(),
            name: "m".into(),
            api_key: None,
            call_ids,
            prices: None,
        };
        format!("{:?}", OpenAi::new(client(), settings).unwrap()).contains("Short")
    };
    for (url, expected) in [
        ("https://api.mistral.ai/v1", true),
        ("https://mistral.ai/v1", true),
        ("https://notmistral.ai/v1", false),
        ("https://api.openai.com/v1", false),
    ] {
        assert_eq!(short(url, None), expected, "{url}");
        assert!(short(url, Some(CallIds::Short)) && !short(url, Some(CallIds::Wire)), "{url}");
    }
}

#[tokio::test]
async fn an_answer_that_reached_a_limit_says_so() {
    let text = delta(json!({"content": "so far"}));
    let cut =
        calls(json!([{"index": 0, "id": "c", "function": {"name": "read", "arguments": "{\"path\": \"a"}}]));
    let bare = calls(json!([{"index": 1, "id": "d", "function": {"name": "read"}}]));
    let answer = answered(&[text.clone(), cut, bare, finish("length")]).await;
    assert!(answer.text.starts_with("so far\n[cut: "), "{}", answer.text);
    assert_eq!(
        call_fields(&answer),
        [("c", "read", json!({"unusable": "{\"path\": \"a"})), ("d", "read", json!({"unusable": ""}))]
    );
    let answer = answered(&[finish("content_filter")]).await;
    assert!(answer.text.starts_with("[cut: the model's provider"), "{}", answer.text);
}

#[tokio::test]
async fn arguments_that_do_not_parse_are_kept_as_text() {
    let call = |arguments: &str| {
        calls(json!([{"index": 0, "id": "c", "function": {"name": "read", "arguments": arguments}}]))
    };
    for (raw, expected) in
        [("", json!({})), ("[1]", json!({"unusable": "[1]"})), ("{a", json!({"unusable": "{a"}))]
    {
        let answer = answered(&[call(raw), finish("tool_calls")]).await;
        assert_eq!(call_fields(&answer), [("c", "read", expected)]);
    }
}

#[tokio::test]
async fn a_response_without_streaming_is_understood() {
    let document = json!({
        "choices": [{"message": {"role": "assistant", "content": "hello", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}},
        ]}, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 5},
    });
    let text = serde_json::to_string_pretty(&document).unwrap();
    let answer = ask(ok(format!("\n  {text}"))).await.unwrap();
    assert_eq!((&*answer.text, answer.usage.input, answer.usage.output), ("hello", 4, 5));
    assert_eq!(call_fields(&answer), [("a", "read", json!({}))]);
    for body in [&text[..text.len() - 1], "{}", "{\"error\": {\"message\": \"no\"}}"] {
        assert!(matches!(ask(ok(body)).await, Err(Error::Retry { .. })), "{body}");
    }
}

#[tokio::test]
async fn failures_are_classified_and_contain_no_key() {
    let busy = Canned {
        headers: vec![("retry-after", "7")],
        ..failing(429, "{\"error\": {\"message\": \"slow down\"}}")
    };
    let why = "the model's server answered 429: slow down".to_owned();
    assert_eq!(ask(busy).await, Err(Error::Retry { why, retry_after: Some(Duration::from_secs(7)) }));
    for status in [408, 500, 503, 529] {
        assert!(matches!(ask(failing(status, "oops")).await, Err(Error::Retry { .. })), "{status}");
    }
    let masked = format!(
        "{{\"error\": {{\"message\": \"Incorrect key: sk-ve***key. See https://x.test/a?k={KEY}\"}}}}"
    );
    let table = [
        (400, "{\"error\": {\"message\": \"bad\\nschema\"}}", "answered 400: bad schema"),
        (400, "{\"error\": \"plain\"}", "answered 400: plain"),
        (404, "{\"detail\": \"no model\"}", "answered 404: no model"),
        (302, "", "answered 302:"),
        (401, &masked, "answered 401: Incorrect key: [key] See https://x.test/…"),
        (403, KEY, "answered 403: [key]"),
    ];
    for (status, body, expected) in table {
        let error = ask(failing(status, body)).await.unwrap_err();
        assert!(matches!(&error, Error::Refused { why, .. } if why.contains(expected)), "{error}");
        // The key is wrong for the requests of all threads.
        let is_key_refused = matches!(error, Error::Refused { every_request: true, .. });
        assert_eq!(is_key_refused, matches!(status, 401 | 403), "{status}");
    }
    let too_long = [
        "{\"error\": {\"message\": \"no\", \"code\": \"context_length_exceeded\"}}",
        "{\"error\": {\"message\": \"This model's maximum context length is 8192 tokens.\"}}",
        "{\"error\": {\"message\": \"the request exceeds the available context size\"}}",
    ];
    let too_large = "<html><head><title>413 Request Entity Too Large</title></head></html>";
    let too_long = too_long.map(|body| (400, body)).into_iter().chain([(413, too_large), (413, "")]);
    for (status, body) in too_long {
        let error = ask(failing(status, body)).await.unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_server_says_when_and_whether_a_request_can_be_repeated() {
    let answer = |status, headers| Canned { headers, ..failing(status, "no") };
    let pauses = [
        (vec![("retry-after", "1.5")], Some(1_500)),
        (vec![("retry-after", "9"), ("retry-after-ms", "250")], Some(250)),
        (
            vec![("date", "Sun, 06 Nov 1994 08:49:30 GMT"), ("retry-after", "Sun, 06 Nov 1994 08:49:37 GMT")],
            Some(7_000),
        ),
        (vec![("retry-after", "soon")], None),
    ];
    for (headers, expected) in pauses {
        let why = "the model's server answered 503: no".to_owned();
        let retry_after = expected.map(Duration::from_millis);
        assert_eq!(
            ask(answer(503, headers.clone())).await,
            Err(Error::Retry { why, retry_after }),
            "{headers:?}"
        );
    }
    for status in [400, 409, 429, 500] {
        let error = ask(answer(status, vec![("x-should-retry", "true")])).await;
        assert!(matches!(error, Err(Error::Retry { .. })), "{status}: {error:?}");
        let error = ask(answer(status, vec![("x-should-retry", "false")])).await;
        assert!(matches!(error, Err(Error::Refused { .. })), "{status}: {error:?}");
    }
}

#[tokio::test]
async fn a_request_that_is_too_long_is_recognised_before_and_inside_a_stream_and_the_window_is_learned() {
    let tgi = json!({"error_type": "validation",
        "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 9001. Given: 9500"});
    let vllm = json!({"object": "error", "code": 400,
        "message": "The decoder prompt (length 9500) is longer than the maximum model length of 9001."});
    let gemini = json!([{"error": {"code": 400, "status": "INVALID_ARGUMENT",
        "message": "The input token count (9500) exceeds the maximum number of tokens allowed (9001)."}}]);
    let llama = json!({"error": {"code": 500, "type": "exceed_context_size_error",
        "message": "request (9500 tokens) exceeds the available context size (9001 tokens), try increasing it"}});
    let half = delta(json!({"content": "half"}));
    let table = [
        failing(422, &tgi.to_string()),
        failing(400, &vllm.to_string()),
        failing(400, &gemini.to_string()),
        failing(500, &llama.to_string()),
        ok(events(&[half.clone(), tgi])),
        ok(events(&[half, llama.clone()])),
        ok(llama.to_string()),
    ];
    for canned in table {
        let harness = start([canned]).await;
        let error = harness.ask().await.0.unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
        assert_eq!(harness.model.window().await, Some(9_001), "{error}");
    }
    let busy = failing(429, "{\"error\": \"maximum context length is 9001\"}");
    assert!(matches!(ask(busy).await, Err(Error::Retry { .. })));
}

#[tokio::test]
async fn a_web_page_or_an_empty_body_is_an_error_in_the_configuration() {
    for (canned, why) in non_answers() {
        assert_eq!(ask(canned).await, Err(Error::Refused { why, every_request: false }));
    }
}

#[tokio::test]
async fn a_stream_that_ends_before_its_first_event_is_retried() {
    let table = [events_of(""), ok(": wait"), ok("data: {\"choi"), Canned { breaks: true, ..ok("") }];
    for canned in table {
        let answer = ask(canned).await;
        assert!(matches!(answer, Err(Error::Retry { .. })), "{answer:?}");
    }
}

#[tokio::test]
async fn an_error_inside_the_stream_is_a_failure() {
    let text = delta(json!({"content": "half"}));
    let table = [
        json!({"error": {"message": "overloaded", "code": 503}}),
        json!({"error": format!("the key {KEY} ran out")}),
        // vLLM sends 400 for its own failures, too.
        json!({"error": {"message": "engine died", "type": "BadRequestError", "code": 400}}),
        json!({"error": {"message": "slow down", "type": "invalid_request_error", "code": "rate_limit_exceeded"}}),
        json!({"error": {"message": "prompt is too long", "code": 429}}),
        finish("error"),
    ];
    for chunk in table {
        let error = ask(ok(events(&[text.clone(), chunk]))).await.unwrap_err();
        assert!(matches!(error, Error::Retry { .. }), "{error}");
    }
    let permanent = [
        (json!({"message": "no", "code": 401}), true),
        (json!({"message": "no", "code": "403"}), true),
        (json!({"message": "no", "code": 402}), false),
        (json!({"message": "no", "status": 404}), false),
        (json!({"message": "no", "type": "invalid_request_error", "code": "invalid_value"}), false),
    ];
    for (error, every_request) in permanent {
        let answer = ask(ok(events(&[text.clone(), json!({"error": error})]))).await;
        let why = "the model's server: no".to_owned();
        assert_eq!(answer, Err(Error::Refused { why, every_request }), "{error}");
    }
    let too_large = json!({"error": {"message": "no", "code": 413}});
    assert!(matches!(ask(ok(events(&[too_large]))).await, Err(Error::TooLong { .. })));
    let malformed = ask(ok("data: {\"choices\": [\n\ndata: [DONE]\n\n")).await.unwrap_err();
    assert_eq!(malformed.to_string(), "the model's answer is malformed");
}

#[tokio::test]
async fn an_unreachable_server_is_retried_and_a_forbidden_address_is_refused() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gone = model(Url::parse(&format!("http://{free}/v1")).unwrap());
    assert!(matches!(gone.ask(request(), &mut |_| {}).await, Err(Error::Retry { .. })));
    let forbidden = model(Url::parse("http://169.254.169.254/v1").unwrap());
    assert!(matches!(forbidden.ask(request(), &mut |_| {}).await, Err(Error::Refused { .. })));
}

#[tokio::test]
async fn a_truncated_stream_is_never_an_answer() {
    let stream = events(&recorded()).into_bytes();
    let whole = ask(ok(stream.clone())).await.unwrap();
    // End of the event that starts the answer, and of the one that completes it.
    let end_of = |event: usize| {
        stream.windows(2).enumerate().filter(|(_, two)| two == b"\n\n").nth(event).unwrap().0 + 2
    };
    // An event is read as soon as its JSON is complete: the empty line may be missing at the end.
    let (started, finished) = (end_of(0) - 2, end_of(5) - 2);
    for breaks in [true, false] {
        let cuts = (0..stream.len()).map(|cut| Canned { breaks, ..events_of(&stream[..cut]) });
        let harness = start(cuts).await;
        for cut in 0..stream.len() {
            let (answer, streamed) = harness.ask().await;
            assert_eq!(streamed == whole.text, cut >= started, "cut at {cut}: {streamed}");
            match answer {
                Err(Error::Retry { .. }) => assert!(cut < finished, "cut at {cut}"),
                Ok(answer) => {
                    assert!(cut >= finished, "cut at {cut}: {answer:?}");
                    assert_eq!((&answer.text, &answer.calls), (&whole.text, &whole.calls));
                }
                Err(error) => panic!("cut at {cut}: {error}"),
            }
        }
    }
}

#[tokio::test]
async fn an_answer_with_too_many_calls_is_an_error() {
    let piece = |index: u64| json!({"index": index, "id": format!("c{index}"), "function": {"name": "read"}});
    let all: Vec<_> = (0..257).map(piece).collect();
    let error = ask(ok(events(&[calls(all.into()), finish("tool_calls")]))).await.unwrap_err();
    assert_eq!(error.to_string(), "the model's answer has more than 256 calls");
}

#[test]
fn the_destination_is_the_base_url_without_its_secrets() {
    let table = [
        ("https://api.openai.com/v1", "https://api.openai.com/v1"),
        ("https://api.openai.com:443/v1/", "https://api.openai.com/v1"),
        ("http://user:s3cr3t@127.0.0.1:8000?key=s3cr3t#s3cr3t", "http://127.0.0.1:8000"),
    ];
    for (base_url, expected) in table {
        assert_eq!(model(Url::parse(base_url).unwrap()).destination(), expected);
    }
}
