//! Tests of the Responses model against a fake server, with correct and faulty responses.

use std::sync::Arc;

use crate::canned::{
    Canned, Harness, KEY, LONG_NAME, ask_and_cut, call_fields, events_of, failing, non_answers, ok, request,
};
use rap_agent::{Arguments, CallEntry, Entry, Item, ThoughtKind, Thoughts, Usage};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Body, CallId, Content, Image, Secret, Timestamp, UrlPolicy};
use rap_runtime::model::openai::Settings;
use rap_runtime::model::responses::Responses;
use rap_runtime::model::{Error, Model, ModelAnswer};
use serde_json::{Map, Value, json};
use url::Url;

async fn start(answers: impl IntoIterator<Item = Canned>) -> Harness {
    crate::canned::start("/v1/responses", answers, |url| model(url.join("v1").unwrap())).await
}

fn model(base_url: Url) -> Arc<dyn Model> {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let api_key = Some(Secret::new(KEY));
    Arc::new(
        Responses::new(
            client,
            Settings { base_url, name: "gpt".into(), api_key, call_ids: None, prices: None },
        )
        .unwrap(),
    )
}

/// Asks the model once. A stream is also cut at every byte.
async fn ask(canned: Canned) -> Result<ModelAnswer, Error> {
    ask_and_cut(canned, async |answers| start(answers).await).await
}

async fn answered(stream: &[Value]) -> ModelAnswer {
    ask(ok(events(stream))).await.unwrap()
}

fn events(events: &[Value]) -> String {
    let event = |data: &Value| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap());
    events.iter().map(event).collect()
}

fn usage() -> Value {
    json!({"input_tokens": 10, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 13})
}

fn reasoning() -> Value {
    json!({"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"})
}

fn message(text: &str) -> Value {
    json!({"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}]})
}

fn call(id: &str, arguments: &str) -> Value {
    json!({"id": format!("fc_{id}"), "type": "function_call", "status": "completed", "call_id": id,
        "name": "read", "arguments": arguments})
}

fn completed(output: Value) -> Value {
    json!({"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "output": output,
        "usage": usage()}})
}

/// Returns the items of a whole answer: reasoning, a text and two calls.
fn items() -> Vec<Value> {
    vec![reasoning(), message("Let me see ☃."), call("call_a", "{\"path\": \"ab\"}"), call("call_b", "{}")]
}

/// A streamed answer, as the API describes it.
fn recorded() -> Vec<Value> {
    let added = |index: u64, item: Value| json!({"type": "response.output_item.added", "output_index": index, "item": item});
    let done = |index: u64| json!({"type": "response.output_item.done", "output_index": index, "item": items()[index as usize]});
    let text = |delta: &str| {
        json!({"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 1, "content_index": 0,
            "delta": delta})
    };
    let arguments = |index: u64, delta: &str| {
        json!({"type": "response.function_call_arguments.delta", "item_id": "fc", "output_index": index,
            "delta": delta})
    };
    vec![
        json!({"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}}),
        json!({"type": "response.in_progress", "response": {"id": "resp_1"}}),
        added(0, json!({"id": "rs_1", "type": "reasoning", "summary": []})),
        json!({"type": "response.reasoning_summary_text.delta", "output_index": 0, "delta": "hm"}),
        done(0),
        added(
            1,
            json!({"id": "msg_1", "type": "message", "role": "assistant", "content": [], "status": "in_progress"}),
        ),
        json!({"type": "response.content_part.added", "output_index": 1, "part": {"type": "output_text", "text": ""}}),
        text("Let me see"),
        text(" ☃."),
        json!({"type": "response.output_text.done", "output_index": 1, "text": "Let me see ☃."}),
        done(1),
        added(2, call("call_a", "")),
        arguments(2, "{\"path\": \"a"),
        added(3, call("call_b", "")),
        arguments(2, "b\"}"),
        json!({"type": "response.function_call_arguments.done", "output_index": 2, "arguments": "{\"path\": \"ab\"}"}),
        done(2),
        arguments(3, "{}"),
        done(3),
        completed(items().into()),
    ]
}

fn check(answer: &ModelAnswer) {
    assert_eq!(answer.text, "Let me see ☃.");
    let expected = [("call_a", "read", json!({"path": "ab"})), ("call_b", "read", json!({}))];
    assert_eq!(call_fields(answer), expected);
    assert_eq!(answer.usage, Usage { input: 10, output: 3, cached: 8, ..Usage::default() });
    let parts = &answer.thoughts.as_ref().unwrap().parts;
    assert!(
        matches!(&parts[..], [thought] if (thought.at, thought.calls) == (0, 0)
            && matches!(&thought.kind, ThoughtKind::Item { item } if Value::Object(item.clone()) == reasoning())),
        "{parts:?}"
    );
}

#[tokio::test]
async fn text_calls_reasoning_and_usage_are_read() {
    let harness = start([ok(events(&recorded()))]).await;
    let (answer, streamed) = harness.ask().await;
    check(&answer.unwrap());
    assert_eq!(streamed, "Let me see ☃.");
    let (headers, body) = &harness.server.requests()[0];
    assert_eq!(headers["authorization"], format!("Bearer {KEY}"));
    assert_eq!(
        (&body["model"], &body["stream"], &body["store"]),
        (&json!("gpt"), &json!(true), &json!(false))
    );
    assert_eq!(body["include"], json!(["reasoning.encrypted_content"]));
    assert_eq!(body["instructions"], "be good");
    assert_eq!(
        body["input"],
        json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
    );
    assert_eq!((&body["tools"][0]["name"], &body["tools"][0]["type"]), (&json!("read"), &json!("function")));
}

#[tokio::test]
async fn an_answer_is_read_from_a_document_and_from_its_last_event_alone() {
    let response = completed(items().into())["response"].clone();
    check(&ask(ok(response.to_string())).await.unwrap());
    check(&ask(ok(events(&[completed(items().into())]))).await.unwrap());
    let text = response.to_string();
    for body in [&text[..text.len() - 1], "{}", "{\"output\": null}"] {
        assert!(matches!(ask(ok(body)).await, Err(Error::Retry { .. })), "{body}");
    }
}

#[tokio::test]
async fn an_item_without_its_done_event_is_read_from_the_last_event() {
    let mut stream = recorded();
    stream.retain(|event| event["type"] != "response.output_item.done");
    check(&answered(&stream).await);
    stream.iter_mut().for_each(|event| drop(event.as_object_mut().unwrap().remove("output_index")));
    stream.retain(|event| event["type"] != "response.function_call_arguments.delta");
    check(&answered(&stream).await);
    // Of a response that was cut, only the items that are complete are taken.
    let mut cut = recorded();
    cut.retain(|event| event["type"] != "response.output_item.done");
    let last = cut.last_mut().unwrap();
    last["type"] = "response.incomplete".into();
    last["response"]["status"] = "incomplete".into();
    last["response"]["output"][3]["status"] = "in_progress".into();
    let answer = answered(&cut).await;
    let expected = [("call_a", "read", json!({"path": "ab"})), ("call_b", "read", json!({"unusable": "{}"}))];
    assert_eq!(call_fields(&answer), expected);
    // Another call at this place says nothing about this one.
    let mut other = recorded();
    other.retain(|event| event["type"] != "response.output_item.done");
    other.last_mut().unwrap()["response"]["output"][2]["call_id"] = "call_z".into();
    let answer = answered(&other).await;
    assert_eq!(call_fields(&answer)[0], ("call_a", "read", json!({"unusable": "{\"path\": \"ab\"}"})));
}

#[tokio::test]
async fn reasoning_calls_and_images_go_back() {
    let harness = start([ok(events(&recorded())), ok(events(&[completed(json!([message("done")]))]))]).await;
    let answer = harness.ask().await.0.unwrap();
    let made = |id: &str| CallEntry {
        id: CallId::new(id).unwrap(),
        model_id: None,
        name: LONG_NAME.into(),
        arguments: Arguments::Given(Map::new()),
        display: None,
    };
    let image = Content::Image(Image { data: "aGk=".into(), media_type: "image/png".into() });
    let result = |id: &str, content| Item::Result {
        call_id: CallId::new(id).unwrap(),
        content,
        display: Vec::new(),
        synthetic: false,
    };
    let mut next = request();
    let items = [
        Item::Assistant {
            text: answer.text,
            calls: vec![made("t_1"), made("t_2")],
            thoughts: answer.thoughts,
            usage: None,
        },
        result("t_1", Body::Text("one".into())),
        result("t_2", Body::Content(vec![image])),
    ];
    next.entries.extend(items.map(|item| Entry { at: Timestamp(0), item }));
    assert_eq!(harness.ask_with(next).await.0.unwrap().text, "done");
    let body = harness.server.requests()[1].1.clone();
    let input = body["input"].as_array().unwrap();
    assert_eq!(input[1], reasoning());
    assert_eq!(input[2], json!({"role": "assistant", "content": "Let me see ☃."}));
    let name = body["tools"][1]["name"].clone();
    assert_eq!(input[3], json!({"type": "function_call", "call_id": "t_1", "name": name, "arguments": "{}"}));
    assert_eq!(input[5], json!({"type": "function_call_output", "call_id": "t_1", "output": "one"}));
    assert_eq!(input[7]["content"][1]["image_url"], "data:image/png;base64,aGk=");
}

#[tokio::test]
async fn additional_fields_of_messages_and_calls_go_back_to_the_same_server() {
    let (mut said, mut made) = (message("Let me see."), call("call_a", "{}"));
    said["phase"] = json!("commentary");
    made["namespace"] = json!("files");
    let stream = [
        json!({"type": "response.output_item.added", "output_index": 0, "item": message("")}),
        json!({"type": "response.output_text.delta", "output_index": 0, "delta": "Let me see."}),
        json!({"type": "response.output_item.done", "output_index": 0, "item": said}),
        json!({"type": "response.output_item.done", "output_index": 1, "item": made}),
        completed(json!([said, made])),
    ];
    let answer = answered(&stream).await;
    let harness = start([ok(events(&stream)), ok(events(&stream)), ok(events(&stream))]).await;
    let thoughts = harness.ask().await.0.unwrap().thoughts.unwrap();
    assert_eq!(thoughts.call_fields, answer.thoughts.unwrap().call_fields);
    let made = CallEntry {
        id: CallId::new("t_1").unwrap(),
        model_id: None,
        name: "read".into(),
        arguments: Arguments::Given(Map::new()),
        display: None,
    };
    let elsewhere = Thoughts { server: Some("http://elsewhere".into()), ..thoughts.clone() };
    for thoughts in [thoughts, elsewhere] {
        let (text, calls, thoughts) = (answer.text.clone(), vec![made.clone()], Some(thoughts));
        let mut next = request();
        next.entries
            .push(Entry { at: Timestamp(0), item: Item::Assistant { text, calls, thoughts, usage: None } });
        harness.ask_with(next).await.0.unwrap();
    }
    let sent = |number: usize| harness.server.requests()[number].1["input"].clone();
    let expected = json!({"role": "assistant", "content": "Let me see.", "phase": "commentary"});
    assert_eq!(sent(1)[1], expected);
    assert_eq!((&sent(1)[2]["namespace"], &sent(1)[2]["call_id"]), (&json!("files"), &json!("t_1")));
    assert_eq!((sent(2)[1].get("phase"), sent(2)[2].get("namespace")), (None, None));
    // Several messages become one, with the fields of all.
    let (mut first, mut second) = (message("One."), message("Two."));
    (first["mood"], first["phase"]) = (json!("good"), json!("commentary"));
    second["phase"] = json!("final_answer");
    let answer = answered(&[completed(json!([first, second]))]).await;
    let fields = json!({"type": "message", "mood": "good", "phase": "final_answer"});
    assert_eq!(Value::Object(answer.thoughts.unwrap().fields), fields);
}

#[tokio::test]
async fn odd_values_do_not_discard_an_answer() {
    let piece =
        |arguments: &str| json!({"type": "response.function_call_arguments.delta", "delta": arguments});
    let added = |item: Value| json!({"type": "response.output_item.added", "item": item});
    let table = [
        (json!("0"), vec![added(call("a", "")), piece("{\"n\":1}")]),
        (json!(0.0), vec![added(call("a", "")), piece("{\"n\":1}")]),
        (json!(-1), vec![added(call("a", "")), piece("{\"n\":"), piece("1}")]),
        (json!(null), vec![added(call("a", "")), piece("{\"n\":"), piece("1}")]),
        // An empty object before the arguments, NUL, and an unknown event.
        (json!(0), vec![added(call("a", "{}")), piece("{\"n\":1}")]),
        (json!(0), vec![added(call("a\0", "")), piece("{\"n\0\":1}")]),
        (json!(0), vec![json!({"type": "response.new"}), added(call("a", "{\"n\":1}"))]),
    ];
    for (index, mut stream) in table {
        stream.push(json!({"type": "response.output_item.done", "item": {}}));
        stream.iter_mut().for_each(|event| event["output_index"] = index.clone());
        let oddity = json!(stream);
        let usage = json!({"input_tokens": 4.0, "output_tokens": "5", "input_tokens_details": null});
        stream.push(json!({"type": "response.completed", "response": {"status": 1, "usage": usage}}));
        let answer = answered(&stream).await;
        assert_eq!(call_fields(&answer), [("a", "read", json!({"n": 1}))], "{oddity}");
        assert_eq!((answer.usage.input, answer.usage.output), (4, 5), "{oddity}");
    }
}

#[tokio::test]
async fn a_request_that_is_too_long_is_recognised_before_and_inside_a_stream_and_the_window_is_learned() {
    let why = "This model's maximum context length is 9001 tokens. However, you requested 9500";
    let error = json!({"error": {"message": why, "code": "context_length_exceeded"}});
    let failed = json!({"type": "response.failed", "response": {"error": {"code": "invalid_prompt", "message": why},
        "usage": {"input_tokens": 7, "output_tokens": 0}}});
    for canned in
        [failing(400, &error.to_string()), ok(events(std::slice::from_ref(&failed))), ok(error.to_string())]
    {
        let harness = start([canned]).await;
        let error = harness.ask().await.0.unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
        assert_eq!(harness.model.window().await, Some(9_001), "{error}");
    }
    let (harness, request) = (start([ok(events(&[failed]))]).await, request());
    let spent = request.spent.clone();
    harness.ask_with(request).await.0.unwrap_err();
    assert_eq!(spent.take().input, 7, "the tokens of a failed response are counted");
}

#[tokio::test]
async fn failures_are_classified_and_contain_no_key() {
    let headers = vec![("retry-after-ms", "250")];
    let busy = Canned { headers, ..failing(429, &format!("slow down, {KEY}")) };
    let why = "the model's server answered 429: slow down, [key]".to_owned();
    let retry_after = Some(std::time::Duration::from_millis(250));
    assert_eq!(ask(busy).await, Err(Error::Retry { why, retry_after }));
    for (status, is_permanent) in [(400, true), (401, true), (404, true), (500, false), (503, false)] {
        let error = ask(failing(status, "{\"error\": {\"message\": \"no\"}}")).await.unwrap_err();
        assert_eq!(matches!(error, Error::Refused { .. }), is_permanent, "{status}: {error}");
        assert_eq!(error.to_string(), format!("the model's server answered {status}: no"));
    }
    let told = Canned { headers: vec![("x-should-retry", "true")], ..failing(400, "no") };
    assert!(matches!(ask(told).await, Err(Error::Retry { .. })));
}

#[tokio::test]
async fn a_model_that_does_not_reason_is_asked_without_reasoning() {
    let refusal = "{\"error\": {\"message\": \"Encrypted content is not supported with this model.\"}}";
    let done = || ok(events(&[completed(json!([message("done")]))]));
    let harness = start([failing(400, refusal), done(), done()]).await;
    for _ in 0..2 {
        assert_eq!(harness.ask().await.0.unwrap().text, "done");
    }
    let included =
        harness.server.requests().iter().map(|(_, body)| body.get("include").is_some()).collect::<Vec<_>>();
    assert_eq!(included, [true, false, false]);
}

/// Compares answers of different servers, whose reasoning is stored with different URLs.
fn same(one: &ModelAnswer, other: &ModelAnswer) -> bool {
    let parts = |answer: &ModelAnswer| answer.thoughts.as_ref().map(|thoughts| thoughts.parts.clone());
    (&one.text, &one.calls, one.usage, parts(one)) == (&other.text, &other.calls, other.usage, parts(other))
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
            match answer {
                Ok(answer) => {
                    assert!(cut + 2 >= stream.len() && same(&answer, &whole), "cut at {cut}: {answer:?}")
                }
                Err(Error::Retry { .. }) => assert!(cut + 2 < stream.len(), "cut at {cut}"),
                Err(error) => panic!("cut at {cut}: {error}"),
            }
            assert!("Let me see ☃.".starts_with(&streamed), "cut at {cut}: {streamed}");
        }
    }
}

#[tokio::test]
async fn an_answer_that_reached_a_limit_says_so() {
    let cut = json!({"id": "fc_1", "type": "function_call", "status": "incomplete", "call_id": "c", "name": "read",
        "arguments": "{\"path\": \"a"});
    for (reason, note) in [
        ("max_output_tokens", "[cut: the answer reached the model's limit]"),
        ("content_filter", "[cut: the model's provider stopped the answer]"),
    ] {
        let end = json!({"type": "response.incomplete", "response": {"status": "incomplete",
            "incomplete_details": {"reason": reason}, "output": [message("so far"), cut], "usage": usage()}});
        let answer = answered(&[end]).await;
        assert_eq!(answer.text, format!("so far\n{note}"));
        assert_eq!(call_fields(&answer), [("c", "read", json!({"unusable": "{\"path\": \"a"}))]);
    }
}

#[tokio::test]
async fn an_error_inside_the_stream_is_classified() {
    let failed = |code: &str, message: &str| json!({"type": "response.failed", "response": {"status": "failed", "error": {"code": code, "message": message}}});
    let error =
        json!({"type": "error", "code": "server_error", "message": format!("no, {KEY}"), "param": null});
    for event in [failed("server_error", "oops"), failed("rate_limit_exceeded", "slow down"), error] {
        let answer = ask(ok(events(&[recorded()[0].clone(), event.clone()]))).await;
        assert!(matches!(answer, Err(Error::Retry { .. })), "{event}: {answer:?}");
    }
    let refused = ask(ok(events(&[failed("invalid_prompt", "no")]))).await;
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
    let long = failed("context_length_exceeded", "Your input exceeds the context window of this model.");
    assert!(matches!(ask(ok(events(&[long]))).await, Err(Error::TooLong { .. })));
    for (canned, why) in non_answers() {
        assert_eq!(ask(canned).await, Err(Error::Refused { why, every_request: false }));
    }
    let many: Vec<_> = (0..257).map(|index| call(&format!("c{index}"), "{}")).collect();
    let error = ask(ok(events(&[completed(many.into())]))).await.unwrap_err();
    assert_eq!(error.to_string(), "the model's answer has more than 256 calls");
}
