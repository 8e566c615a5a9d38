//! Tests of the OpenAI model against a fake server, with correct and faulty responses.

use std::sync::Arc;
use std::time::Duration;

use crate::canned::{
    Canned, Harness, KEY, LONG_NAME, call_fields, events_of, failing, non_answers, ok, request,
};
use rap_agent::Usage;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Secret, UrlPolicy};
use rap_runtime::model::openai::{OpenAi, Settings};
use rap_runtime::model::{Error, HistoryScope, Model, ModelAnswer};
use serde_json::{Value, json};
use url::Url;

async fn start(answers: impl IntoIterator<Item = Canned>) -> Harness {
    crate::canned::start("/v1/chat/completions", answers, |url| model(url.join("v1/").unwrap())).await
}

fn model(base_url: Url) -> Arc<dyn Model> {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let settings = Settings { base_url, name: "gpt".into(), api_key: Some(Secret::new(KEY)) };
    Arc::new(OpenAi::new(client, settings).unwrap())
}

async fn ask(canned: Canned) -> Result<ModelAnswer, Error> {
    start([canned]).await.ask().await.0
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
    let usage = Usage { input: 10, output: 3, cached: 8 };
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
    let busy = Canned { retry_after: Some("7"), ..failing(429, "{\"error\": {\"message\": \"slow down\"}}") };
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
        assert!(matches!(&error, Error::Refused { why } if why.contains(expected)), "{error}");
    }
    let too_long = [
        "{\"error\": {\"message\": \"no\", \"code\": \"context_length_exceeded\"}}",
        "{\"error\": {\"message\": \"This model's maximum context length is 8192 tokens.\"}}",
        "{\"error\": {\"message\": \"the request exceeds the available context size\"}}",
    ];
    for body in too_long {
        let error = ask(failing(400, body)).await.unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_web_page_or_an_empty_body_is_an_error_in_the_configuration() {
    for (canned, why) in non_answers() {
        assert_eq!(ask(canned).await, Err(Error::Refused { why }));
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
        finish("error"),
    ];
    for chunk in table {
        let error = ask(ok(events(&[text.clone(), chunk]))).await.unwrap_err();
        assert!(matches!(error, Error::Retry { .. }), "{error}");
    }
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
    let (started, finished) = (end_of(0), end_of(5));
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
