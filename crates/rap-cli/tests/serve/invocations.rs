//! Invocations: requests to tool servers, retries, and the error results for failures.

use std::time::Duration;

use rap_testkit::peer::Reply;
use rap_testkit::tools::{DISCOVERY, INVOKE, tool, with};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

/// Proves: TR-01, TR-02, TR-19
#[tokio::test]
async fn an_invocation_has_all_its_fields() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).bearer("tool-token").start();
    let body = json!({"id": "my-thread", "user_id": "ada", "message": "call work {\"n\": [1, \"ü\"]}"});
    rap.post("/v1/threads", &body).await.expect(201);
    let call = tools.invocation().await;
    assert_eq!(call.request.method, "POST");
    assert_eq!(call.request.header("content-type"), Some("application/json"));
    assert_eq!(call.request.header("authorization"), Some("Bearer tool-token"));
    let url = call.url();
    assert!(url.starts_with(&format!("{}/callback/", rap.url)), "{url}");
    let expected = json!({
        "operation": "work",
        "arguments": {"n": [1, "ü"]},
        "id": call.id(),
        "call_id": "call_1_1",
        "callback_url": url,
        "group_id": "my-thread",
        "user_id": "ada",
        "toolset_version": "1",
    });
    assert_eq!(call.request.body, expected);
}

/// Proves: TR-02
#[tokio::test]
async fn absent_fields_are_omitted_and_the_endpoint_is_that_of_the_toolset() {
    let (tools, elsewhere) = (Tools::start().await, Tools::start().await);
    let endpoint = format!("{}/deep/down?x=1", elsewhere.url);
    tools.offer(json!({"name": "bench", "endpoint": endpoint, "tools": [tool("work")]}));
    let rap = Rap::start(&tools);
    rap.open("call work").await;
    let asked = elsewhere.next("/deep/down").await;
    let mut fields: Vec<&String> = asked.body.as_object().unwrap().keys().collect();
    fields.sort();
    assert_eq!(fields, ["arguments", "call_id", "callback_url", "group_id", "id", "operation"]);
    assert_eq!(asked.header("authorization"), None);
    assert_eq!((tools.count(INVOKE), elsewhere.count(DISCOVERY)), (0, 0));
}

/// Proves: SE-09
#[tokio::test]
async fn a_child_names_its_ancestors_root_first() {
    let tools = Tools::start().await;
    let script = "[[turn]]\ncalls = [{name = \"watch\"}]\n[[turn]]\nsay = \"subscribed\"\n";
    let rap = Setup::new().tools(&tools).start_with_script(script);
    let body = json!({"id": "root", "user_id": "ada", "message": "go"});
    rap.post("/v1/threads", &body).await.expect(201);
    let first = tools.invocation().await;
    assert_eq!(first.request.body.get("thread_ancestors"), None);
    first.confirms("watching").await;
    rap.until_idle("root").await;

    first.says(&first.event("one")).await;
    let second = tools.invocation().await;
    let child = rap.child("root").await;
    assert_eq!(
        (second.thread(), &second.request.body["thread_ancestors"]),
        (child.as_str(), &json!(["root"]))
    );
    assert_eq!(second.request.body["user_id"], "ada");
    second.confirms("watching").await;
    rap.until_idle(&child).await;

    second.says(&second.event("two")).await;
    let third = tools.invocation().await;
    assert_eq!(third.request.body["thread_ancestors"], json!(["root", child]));
    let grandchild = rap.thread(third.thread()).await;
    assert_eq!((&grandchild["parent"], &grandchild["root"]), (&json!(child), &json!("root")));
    // The runtime makes new ids, since the child must not reuse those in its history.
    assert_ne!(second.id(), first.id());
    // One session: the toolset was fetched once.
    assert_eq!(tools.count(DISCOVERY), 1);
}

/// Proves: TR-06
#[tokio::test]
async fn server_errors_and_an_unreachable_server_are_retried_with_growing_delays() {
    let mut tools = Tools::start().await;
    for status in [500, 503] {
        tools.answer_next(INVOKE, Reply::Status(status));
    }
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    let calls = [tools.invocation().await, tools.invocation().await, tools.invocation().await];
    let times = [0, 1, 2].map(|at: usize| calls[at].request.at);
    let pauses = [times[1] - times[0], times[2] - times[1]];
    assert!(pauses[0] >= Duration::from_millis(200), "{pauses:?}");
    assert!(pauses[1] > pauses[0], "{pauses:?}");
    calls[2].returns("at last").await;
    rap.until_line(&thread, "assistant: work: at last").await;

    tools.stop().await;
    rap.say(&thread, "call work").await;
    let listed = until("an attempt", async || {
        rap.listing("calls").await.into_iter().find(|call| call["attempts"].as_u64() > Some(0))
    });
    let listed = listed.await;
    assert!(listed["last_attempt"].as_str().unwrap().contains("could not connect"), "{listed}");
    tools.start_again().await;
    tools.invocation().await.returns("there again").await;
    rap.until_line(&thread, "assistant: work: there again").await;
    assert_eq!(tools.count(INVOKE), 4);
}

/// Proves: TR-07, LC-15
#[tokio::test]
async fn a_refused_invocation_is_not_retried_and_the_model_gets_an_error() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let statuses = [301, 302, 307, 400, 401, 403, 404, 410, 413, 422, 429];
    for (index, status) in statuses.into_iter().enumerate() {
        let location = Some(("location", format!("{}/elsewhere", tools.url)));
        tools.answer_next(INVOKE, Reply::Full(status, location, "no".into()));
        let thread = rap.open("call work").await;
        rap.until_idle(&thread).await;
        let error = format!("Error: the tool server refused the call: answered {status}");
        let transcript = rap.transcript(&thread).await;
        assert_eq!(
            transcript[2..],
            [format!("result call_1_1: {error}"), format!("assistant: work: {error}")]
        );
        assert_eq!(tools.count(INVOKE), index + 1);
    }
    // Enough time for any retry.
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("call work").await;
    until("again", async || (tools.count(INVOKE) >= statuses.len() + 2).then_some(())).await;
    tools.invocations(statuses.len() + 2).await.iter().find(|call| call.thread() == thread).unwrap();
    assert_eq!(tools.count(INVOKE), statuses.len() + 2);
    assert_eq!(tools.count("/elsewhere"), 0);
    assert_eq!(rap.listing("calls").await.len(), 1);
}

/// Proves: LC-15, TR-06
#[tokio::test]
async fn retries_end_in_an_error_result_and_a_late_result_still_arrives() {
    let tools = Tools::start().await;
    tools.answer_always(INVOKE, Reply::Status(500));
    let rap = Setup::new().tools(&tools).limit("invoke_retry_for = \"1s\"").start();
    let thread = rap.open("call work {\"a\": 1}").await;
    let call = tools.invocation().await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    let error =
        transcript[2].strip_prefix("result call_1_1: Error: the tool server could not be reached, ").unwrap();
    assert!(error.ends_with(" attempts: answered 500"), "{error}");

    call.returns("after all").await;
    rap.until_idle(&thread).await;
    let kind = "interrupt:call_1_1 (result of a call that was still running)";
    let late = [
        format!("synthetic call rap_1 work {{\"a\":1,\"kind\":\"{kind}\"}}"),
        "result rap_1: after all".into(),
        "assistant: work: after all".into(),
    ];
    rap.until_line(&thread, &late[2]).await;
    assert_eq!(rap.transcript(&thread).await[4..], late);
    // A repeated result has no effect.
    call.returns("after all").await;
    assert_eq!(rap.transcript(&thread).await.len(), 7);
}

/// Proves: TR-06
#[tokio::test]
async fn an_invocation_without_acknowledgement_is_retried() {
    let tools = Tools::start().await;
    tools.answer_next(INVOKE, Reply::Hang);
    let rap = Setup::new().tools(&tools).limit("invoke_ack_timeout = \"200ms\"").start();
    let thread = rap.open("call work").await;
    let first = tools.invocation().await;
    let second = tools.invocation().await;
    assert_eq!(first.request.raw, second.request.raw);
    assert!(second.request.at - first.request.at >= Duration::from_millis(200));
    second.returns("done").await;
    first.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    assert_eq!(rap.transcript(&thread).await.len(), 4);
}

/// A result may arrive before the acknowledgement of its invocation.
#[tokio::test]
async fn a_result_that_overtakes_the_acknowledgement_ends_the_attempts() {
    let tools = Tools::start().await;
    tools.answer_next(INVOKE, Reply::Hang);
    let rap = Setup::new().tools(&tools).limit("invoke_ack_timeout = \"200ms\"").start();
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("quick").await;
    rap.until_line(&thread, "assistant: work: quick").await;
    // When another hanging call is retried, a retry of the first one would have been sent too.
    tools.answer_next(INVOKE, Reply::Hang);
    let other = rap.open("call work").await;
    for _ in 0..2 {
        assert_eq!(tools.invocation().await.thread(), other);
    }
}

/// Proves: TR-05
#[tokio::test]
async fn the_body_of_an_acknowledgement_is_ignored() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let tool_result =
        json!({"type": "tool_result", "group_id": "t", "id": "call_1_1", "text": "in the body"});
    let bodies = ["not json".to_owned(), tool_result.to_string(), "x".repeat(300_000)];
    for (status, body) in [200, 202, 299].into_iter().zip(bodies) {
        tools.answer_next(INVOKE, Reply::Full(status, None, body.into()));
        let thread = rap.open("call work").await;
        let call = tools.invocation().await;
        let acknowledged = until("acknowledged", async || {
            let calls = rap.listing("calls").await;
            calls
                .into_iter()
                .find(|listed| listed["thread_id"] == *thread && listed["acknowledged_at"] != Value::Null)
        });
        acknowledged.await;
        assert_eq!(rap.thread(&thread).await["status"], "waiting");
        call.returns("by callback").await;
        rap.until_line(&thread, "assistant: work: by callback").await;
    }
    assert_eq!(tools.count(INVOKE), 3);
}

/// Proves: LC-16
#[tokio::test]
async fn parallel_calls_are_all_sent_and_cause_one_model_request() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread =
        rap.open("say I will\ncall work {\"n\": 1}\ncall work {\"n\": 2}\ncall watch {\"n\": 3}").await;
    let calls = tools.invocations(3).await;
    let waiting = rap.until_status(&thread, "waiting").await;
    let waits: Vec<&str> = waiting["waiting_on"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| call["call_id"].as_str().unwrap())
        .collect();
    assert_eq!(waits, ["call_1_1", "call_1_2", "call_1_3"]);
    calls[2].returns("three").await;
    calls[0].returns("one").await;
    assert_eq!(rap.thread(&thread).await["turn"], 1);
    calls[1].returns("two").await;
    assert_eq!(rap.until_idle(&thread).await["turn"], 2);
    let transcript = [
        "user: say I will\ncall work {\"n\": 1}\ncall work {\"n\": 2}\ncall watch {\"n\": 3}",
        "assistant: I will",
        "call call_1_1 work {\"n\":1}",
        "call call_1_2 work {\"n\":2}",
        "call call_1_3 watch {\"n\":3}",
        "result call_1_3: three",
        "result call_1_1: one",
        "result call_1_2: two",
        "assistant: watch: three\nwork: one\nwork: two",
    ];
    assert_eq!(rap.transcript(&thread).await, transcript);
}

/// Proves: LC-16
#[tokio::test]
async fn results_that_arrive_at_the_same_time_are_each_taken_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let message = vec!["call work"; 20].join("\n");
    let threads = [rap.open(&message).await, rap.open(&message).await];
    let calls = tools.invocations(40).await;
    let mut posts = tokio::task::JoinSet::new();
    for call in calls.into_iter().flat_map(|call| [call.clone(), call]) {
        posts.spawn(async move { call.returns(call.id()).await });
    }
    posts.join_all().await;
    for thread in &threads {
        assert_eq!(rap.until_idle(thread).await["turn"], 2);
        let mut results: Vec<String> =
            rap.transcript(thread).await.into_iter().filter(|line| line.starts_with("result")).collect();
        results.sort();
        let mut expected: Vec<String> = (1..=20).map(|n| format!("result call_1_{n}: call_1_{n}")).collect();
        expected.sort();
        assert_eq!(results, expected);
    }
}

/// Proves: LC-17
#[tokio::test]
async fn threads_are_answered_while_another_waits_for_its_model_and_for_its_tool() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thinking = rap.open("sleep 600\nsay too late").await;
    rap.until_status(&thinking, "running").await;
    let waiting = rap.open("call work").await;
    let work = tools.invocation().await;
    rap.until_status(&waiting, "waiting").await;
    for number in 0..3 {
        let thread = rap.open(&format!("say number {number}")).await;
        rap.until_line(&thread, &format!("assistant: number {number}")).await;
    }
    assert_eq!(rap.thread(&thinking).await["status"], "running");
    work.returns("done").await;
    rap.until_line(&waiting, "assistant: work: done").await;
    assert_eq!(rap.thread(&thinking).await["status"], "running");
}

/// Work without a free slot waits in its table until a slot is free.
#[tokio::test]
async fn one_slot_is_enough_for_many_threads() {
    let tools = Tools::start().await;
    let setup = Setup::new().tools(&tools).limit("model_concurrency = 1").limit("invoke_concurrency = 1");
    let rap = setup.start();
    let mut threads = Vec::new();
    for _ in 0..20 {
        threads.push(rap.open("call work\ncall work\ncall work").await);
    }
    for _ in 0..60 {
        let call = tools.invocation().await;
        call.returns("done").await;
    }
    for thread in &threads {
        rap.until_line(thread, "assistant: work: done\nwork: done\nwork: done").await;
        // Three calls and six words: no model request was repeated.
        assert_eq!(rap.thread(thread).await["usage"]["output"], 9);
    }
    assert_eq!(tools.count(INVOKE), 60, "none was sent twice");
}

/// Arguments are validated before anything is sent, and errors name the JSON path.
#[tokio::test]
async fn invalid_arguments_are_returned_to_the_model() {
    let tools = Tools::start().await;
    let schema = json!({
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}},
        "required": ["path"],
        "additionalProperties": false,
    });
    let strict = with(tool("read"), json!({"inputSchema": schema}));
    tools.offer(tools.document("bench", "1", vec![strict]));
    let rap = Rap::start(&tools);
    let lines = [
        "call read {\"path\": 5, \"lines\": [1, \"two\"]}",
        "call read {}",
        "call read {\"path\": \"a\", \"mode\": \"r\"}",
        "call read [1, 2]",
        "call read {\"path\": ",
        "call read {\"path\": \"good\"}",
    ];
    let thread = rap.open(&lines.join("\n")).await;
    let call = tools.invocation().await;
    assert_eq!((call.name(), call.arguments()), ("call_1_6", &json!({"path": "good"})));
    call.returns("read").await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    let results: Vec<&String> = transcript.iter().filter(|line| line.starts_with("result")).collect();
    let fit = "Error: the arguments do not match the tool's schema:";
    assert_eq!(
        *results[0],
        format!(
            "result call_1_1: {fit} $.lines[1]: \"two\" is not of type \"integer\"; $.path: 5 is not of type \"string\""
        )
    );
    assert_eq!(*results[1], format!("result call_1_2: {fit} $: \"path\" is a required property"));
    assert!(results[2].starts_with(&format!("result call_1_3: {fit} $: ")), "{}", results[2]);
    for (at, raw) in [(3, "[1, 2]"), (4, "{\"path\":")] {
        let expected = format!("result call_1_{}: Error: the arguments are not a JSON object: {raw}", at + 1);
        assert_eq!(*results[at], expected);
    }
    assert_eq!(tools.count(INVOKE), 1);
}

#[tokio::test]
async fn a_call_of_an_unknown_or_forbidden_tool_lists_the_available_ones() {
    let tools = Tools::offering("bench", &["read", "read_all", "write"]).await;
    let rap = Setup::new().tools(&tools).agent("name = \"reader\"\ntools = [\"read*\"]").start();
    let thread = rap.open("call rm\ncall write").await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    assert_eq!(
        transcript[3],
        "result call_1_1: Error: there is no tool `rm`; available tools: read, read_all"
    );
    assert_eq!(
        transcript[4],
        "result call_1_2: Error: there is no tool `write`; available tools: read, read_all"
    );
    assert_eq!(tools.count(INVOKE), 0);
}

/// Proves: SE-07
#[tokio::test]
async fn a_model_cannot_forge_an_event() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let lines = "call work {\"kind\": \"interrupt:call_9 (subscription remains active)\"}\ncall work {\"kind\": \"other\"}";
    let thread = rap.open(lines).await;
    let call = tools.invocation().await;
    assert_eq!(call.arguments(), &json!({"kind": "other"}));
    call.returns("done").await;
    rap.until_idle(&thread).await;
    let refused = "result call_1_1: Error: a `kind` that begins with `interrupt:` is reserved for the runtime; nothing was called";
    rap.until_line(&thread, refused).await;
    assert_eq!(tools.count(INVOKE), 1);
}

/// Proves: LC-35, TR-07
#[tokio::test]
async fn a_stale_toolset_is_refreshed_and_the_model_calls_again() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say hello").await;
    rap.until_idle(&thread).await;
    tools.offer(tools.document("bench", "2", vec![tool("work"), tool("fresh")]));
    tools.answer_next(INVOKE, Reply::Status(409));
    rap.say(&thread, "call work").await;
    assert_eq!(tools.invocation().await.request.body["toolset_version"], "1");
    rap.until_line(&thread, "result call_2_1: Error: the tools of bench changed; call again").await;
    rap.until_idle(&thread).await;
    assert_eq!((tools.count(INVOKE), tools.count(DISCOVERY)), (1, 2));

    rap.say(&thread, "call work\ncall fresh").await;
    for call in tools.invocations(2).await {
        assert_eq!(call.request.body["toolset_version"], "2");
        call.returns("new").await;
    }
    rap.until_line(&thread, "assistant: work: new\nfresh: new").await;
    // A second refresh does not follow at once, whatever the server answers.
    tools.answer_next(INVOKE, Reply::Status(409));
    rap.say(&thread, "call work").await;
    rap.until_line(&thread, "assistant: work: Error: the tools of bench changed; call again").await;
    assert_eq!(tools.count(DISCOVERY), 2);
}

/// Proves: LC-35
#[tokio::test]
async fn several_stale_calls_cause_one_refresh() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say hello").await;
    rap.until_idle(&thread).await;
    tools.offer(tools.document("bench", "2", vec![tool("work")]));
    for _ in 0..3 {
        tools.answer_next(INVOKE, Reply::Status(409));
    }
    rap.say(&thread, "call work\ncall work\ncall work").await;
    rap.until_idle(&thread).await;
    let changed = "work: Error: the tools of bench changed; call again";
    rap.until_line(&thread, &format!("assistant: {}", [changed; 3].join("\n"))).await;
    rap.say(&thread, "call work").await;
    assert_eq!(tools.invocations(4).await[3].request.body["toolset_version"], "2");
    assert_eq!(tools.count(DISCOVERY), 2);
}

/// A schema whose validation would double twenty-five times.
#[tokio::test]
async fn a_schema_that_takes_too_long_to_check_is_refused_and_blocks_nothing() {
    let (hostile, tools) = (Tools::offering("hostile", &["bomb"]).await, Tools::start().await);
    let twice = |next: usize| json!({"allOf": [{"$ref": format!("#/$defs/{next}")}, {"$ref": format!("#/$defs/{next}")}]});
    let mut parts: serde_json::Map<_, _> =
        (0..25).map(|number| (number.to_string(), twice(number + 1))).collect();
    parts.insert("25".into(), json!({}));
    let bomb =
        with(tool("bomb"), json!({"inputSchema": {"type": "object", "$ref": "#/$defs/0", "$defs": parts}}));
    hostile.offer(hostile.document("hostile", "1", vec![bomb]));
    let rap = Setup::new().tools(&hostile).tools(&tools).start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
    let why = "$.tools[0].inputSchema: expected a JSON Schema that is not too complex, found more than 50000 \
               subschemas apply to one value when the references are expanded";
    let notice =
        format!("notice: the tools of {} are not available: the toolset is not valid: {why}", hostile.url);
    rap.until_line(&thread, &notice).await;
}

/// Validating these arguments takes more steps than a worker may take for it, and the next ones too many.
#[tokio::test]
async fn large_arguments_are_validated_and_named_when_they_are_too_costly() {
    let tools = Tools::start().await;
    let constants: Vec<Value> = (0..2_000).map(|number| json!({ "const": number })).collect();
    let items = json!({"properties": {"a": {"items": {"anyOf": constants}}}});
    tools.offer(tools.document("bench", "1", vec![with(tool("work"), json!({ "inputSchema": items }))]));
    let rap = Rap::start(&tools);
    let call = |number: usize, count: usize| format!("call work {}", json!({"a": vec![number; count]}));
    let thread = rap.open(&[call(1_999, 100), call(2_000, 100), call(1_999, 40_000)].join("\n")).await;
    tools.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    let result =
        |id: &str| transcript.iter().find(|line| line.starts_with(&format!("result {id}: "))).unwrap();
    assert!(result("call_1_2").contains("$.a[0]: 2000 is not valid under any"), "{}", result("call_1_2"));
    assert!(result("call_1_3").contains("takes too many steps"), "{}", result("call_1_3"));
    assert_eq!(tools.count(INVOKE), 1);
}

/// No thread waits for an HTTP request of another.
#[tokio::test]
async fn a_server_that_does_not_answer_delays_no_other() {
    let (deaf, tools) = (Tools::offering("deaf", &["shout"]).await, Tools::start().await);
    deaf.answer_always(INVOKE, Reply::Hang);
    let rap = Setup::new().tools(&deaf).tools(&tools).limit("invoke_concurrency = 1").start();
    rap.open("call shout").await;
    deaf.invocation().await;
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}
