//! The OpenAI API end to end: requests to the model, its answers and its failures.

use rap_agent::texts::TOOL_DATA_NOTE;
use rap_testkit::anthropic::AnthropicServer;
use rap_testkit::ids::short;
use rap_testkit::model::{ModelServer, messages};
use rap_testkit::peer::Reply;
use rap_testkit::stream::Stream;
use rap_testkit::{Rap, Setup, Tools};
use serde_json::{Value, json};

async fn stage() -> (Tools, ModelServer, Rap) {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let setup =
        Setup::new().tools(&tools).model(&model.lines()).agent("name = \"default\"\nsystem = \"Be brief.\"");
    let rap = setup.start();
    (tools, model, rap)
}

#[tokio::test]
async fn text_and_parallel_calls_come_from_a_stream_and_results_go_back_in_order() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("call_a", "work", json!({"n": 1})), ("call_b", "watch", json!({"n": 2}))]);
    model.says("All done.");
    let thread = rap.open("go").await;
    let question = model.question().await;
    assert_eq!(messages(&question), ["system: Be brief.", "user: go"]);
    assert_eq!((&question["model"], &question["stream"]), (&json!("gpt"), &json!(true)));
    let offered: Vec<&str> = question["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["function"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(offered[..3], ["work", "watch", "cancel_subscription"]);

    let calls = tools.invocations(2).await;
    assert_eq!((calls[0].name(), calls[0].arguments()), ("call_a", &json!({"n": 1})));
    assert_eq!((calls[1].name(), calls[1].arguments()), ("call_b", &json!({"n": 2})));
    calls[1].returns("two").await;
    calls[0].returns("one").await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["usage"], json!({"input": 20, "output": 6, "cached": 0}));
    let asked = [
        "system: Be brief.",
        "user: go",
        "assistant calls rap_1=work{\"n\":1} rap_2=watch{\"n\":2}",
        "tool rap_1: one",
        "tool rap_2: two",
    ];
    assert_eq!(model.messages().await, asked);
    assert_eq!(*rap.transcript(&thread).await.last().unwrap(), "assistant: All done.");
}

/// Proves: SE-07, SE-14
#[tokio::test]
async fn what_the_model_sees_is_always_a_valid_prompt() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("s1", "watch", json!({"topic": "x"}))]);
    model.says("Subscribed.");
    let thread = rap.open("watch x").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;

    // An open call, a message that joins, an event in between, then the late result.
    model.calls(&[("w1", "work", json!({}))]);
    rap.say(&thread, "work").await;
    let work = tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    watch.says(&watch.inline("tick")).await;
    model.says("Both noted.");
    rap.say(&thread, "and?").await;
    rap.until_line(&thread, "assistant: Both noted.").await;
    model.says("Finished.");
    work.returns("done").await;
    rap.until_line(&thread, "assistant: Finished.").await;

    for _ in 0..4 {
        model.question().await;
    }
    let asked = model.messages().await;
    let active = "{\"kind\":\"interrupt:rap_1 (subscription remains active)\",\"topic\":\"x\"}";
    let late = "{\"kind\":\"interrupt:rap_2 (result of a call that was still running)\"}";
    let expected = [
        "system: Be brief.".to_owned(),
        "user: watch x".into(),
        "assistant calls rap_1=watch{\"topic\":\"x\"}".into(),
        "tool rap_1: watching".into(),
        "assistant: Subscribed.".into(),
        "user: work".into(),
        "assistant calls rap_2=work{}".into(),
        "tool rap_2: still running; the result will follow".into(),
        format!("assistant calls rap_3=watch{active}"),
        format!("tool rap_3: {TOOL_DATA_NOTE}\ntick"),
        "user: and?".into(),
        format!("assistant says Both noted. calls rap_4=work{late}"),
        format!("tool rap_4: {TOOL_DATA_NOTE}\ndone"),
    ];
    assert_eq!(asked, expected);
}

/// Proves: SE-09
#[tokio::test]
async fn the_prompt_of_an_event_child_contains_the_inherited_history() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("s1", "watch", json!({"topic": "x"}))]);
    model.says("Subscribed.");
    let thread = rap.open("watch x").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    // The child's model reuses an id of its history; the tool gets another one.
    model.calls(&[("s1", "work", json!({}))]);
    model.says("Handled.");
    watch.says(&watch.event("tick")).await;
    let work = tools.invocation().await;
    assert_eq!(work.request.body["thread_ancestors"], json!([thread]));
    assert_ne!(work.id(), "s1");
    assert_eq!(work.request.body["call_id"], "s1");
    work.returns("done").await;
    let child = rap.child(&thread).await;
    rap.until_status(&child, "closed").await;
    for _ in 0..2 {
        model.question().await;
    }
    let asked = model.messages().await;
    let kind = "interrupt:rap_1 (subscription remains active)";
    let expected = [
        "system: Be brief.".to_owned(),
        "user: watch x".into(),
        "assistant calls rap_1=watch{\"topic\":\"x\"}".into(),
        "tool rap_1: watching".into(),
        format!("assistant says Subscribed. calls rap_2=watch{{\"kind\":\"{kind}\",\"topic\":\"x\"}}"),
        format!("tool rap_2: {TOOL_DATA_NOTE}\ntick"),
    ];
    assert_eq!(asked[..6], expected);
    assert!(asked[6].starts_with("user: You are a thread of your own"), "{}", asked[6]);
    let last = model.messages().await;
    assert_eq!(
        last[7..],
        [
            format!("assistant calls {}=work{{}}", short(work.id())),
            format!("tool {}: done", short(work.id()))
        ]
    );
    assert_eq!(rap.transcript(&thread).await.len(), 4, "the parent knows nothing of it");
}

#[tokio::test]
async fn the_runtime_makes_every_id_and_sends_that_of_the_model_along() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("same", "work", json!({})), ("same", "work", json!({}))]);
    model.says("Once.");
    let thread = rap.open("go").await;
    let mut ids = Vec::new();
    for call in tools.invocations(2).await {
        assert_eq!(call.name(), "same");
        ids.push(call.id().to_owned());
        call.returns(call.id()).await;
    }
    rap.until_line(&thread, "assistant: Once.").await;
    model.calls(&[("same", "work", json!({}))]);
    model.says("Twice.");
    rap.say(&thread, "again").await;
    let call = tools.invocation().await;
    assert_eq!(call.name(), "same");
    ids.push(call.id().to_owned());
    call.returns("done").await;
    rap.until_line(&thread, "assistant: Twice.").await;
    let plain = |id: &String| id.len() <= 40 && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    assert!(ids.iter().all(plain), "{ids:?}");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

/// Proves: LC-22
#[tokio::test]
async fn a_model_that_fails_is_asked_again() {
    let (_tools, model, rap) = stage().await;
    model.answer(Reply::Full(500, None, "overloaded".into()));
    let cut = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"half an ans\"}}]}\n\n";
    model.answer(Reply::Full(200, Some(("content-type", "text/event-stream".into())), cut.into()));
    model.says("There you are.");
    let thread = rap.open("go").await;
    rap.until_line(&thread, "assistant: There you are.").await;
    assert_eq!(rap.transcript(&thread).await.len(), 2);
    let questions = [model.question().await, model.question().await, model.question().await];
    assert!(questions.iter().all(|question| *question == questions[0]));
}

/// Proves: LC-22
#[tokio::test]
async fn an_html_page_instead_of_an_answer_fails_the_thread_at_once() {
    let (_tools, model, rap) = stage().await;
    let html = Some(("content-type", "text/html".into()));
    model.answer(Reply::Full(200, html, "<!doctype html><title>Welcome</title>".into()));
    let thread = rap.open("first").await;
    let failed = rap.until_status(&thread, "failed").await;
    let why = "the model's server answered 200 with text/html, not with an answer (it begins `<!doctype \
               html><title>Welcome</title>`); check model.base_url";
    assert_eq!(failed["why"], why);
    assert_eq!(model.questions(), 1, "asking again would not help");
}

#[tokio::test]
async fn a_refusal_fails_the_thread_with_its_reason_and_a_new_message_asks_again() {
    let (_tools, model, rap) = stage().await;
    let body = json!({"error": {"message": "the context is too long"}}).to_string();
    let refusal = || Reply::Full(400, Some(("content-type", "application/json".into())), body.clone().into());
    model.answer(refusal());
    let thread = rap.open("first").await;
    let failed = rap.until_status(&thread, "failed").await;
    let why = "the model's server answered 400: the context is too long";
    assert_eq!(failed["why"], why);
    assert_eq!(
        rap.transcript(&thread).await,
        ["user: first".to_owned(), format!("notice: the model request failed: {why}")]
    );

    let rap = rap.restarted();
    assert_eq!(rap.thread(&thread).await["status"], "failed");
    model.answer(refusal());
    rap.act(&thread, "resume").await.expect(202);
    rap.until(&thread, "failed again", |thread| thread["turn"] == 2 && thread["status"] == "failed").await;
    model.says("Better.");
    rap.say(&thread, "second").await;
    rap.until_line(&thread, "assistant: Better.").await;
    for _ in 0..2 {
        model.question().await;
    }
    assert_eq!(model.messages().await, ["system: Be brief.", "user: first\n\nsecond"]);
    let healthy = rap.until_idle(&thread).await;
    assert_eq!(healthy["why"], Value::Null);
}

#[tokio::test]
async fn attempts_are_limited_and_the_key_is_never_shown() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let setup = Setup::new().tools(&tools).model(&model.lines()).limit("model_attempts = 2");
    let rap = setup.start();
    for _ in 0..2 {
        model.answer(Reply::Full(503, None, "wrong key sk-key".into()));
    }
    let thread = rap.open("go").await;
    let failed = rap.until_status(&thread, "failed").await;
    assert!(failed["why"].as_str().unwrap().contains("answered 503"), "{failed}");
    assert_eq!(model.questions(), 2);
    let asked = model.all("/v1/chat/completions");
    assert!(asked.iter().all(|asked| asked.header("authorization") == Some("Bearer sk-key")));
    assert!(!rap.log().contains("sk-key") && !failed.to_string().contains("sk-key"));
    // The model server is back before the automatic retry.
    model.says("Here.");
    rap.say(&thread, "are you there?").await;
    rap.until_line(&thread, "assistant: Here.").await;
}

/// The answer in progress is dropped.
#[tokio::test]
async fn a_model_request_is_dropped_when_the_user_sends_a_message() {
    let (_tools, model, rap) = stage().await;
    model.answer(Reply::Hang);
    model.says("Hello.");
    let thread = rap.open("first").await;
    model.question().await;
    rap.say(&thread, "second").await;
    rap.until_line(&thread, "assistant: Hello.").await;
    assert_eq!(model.messages().await, ["system: Be brief.", "user: first\n\nsecond"]);
    assert_eq!(rap.thread(&thread).await["turn"], 2);
}

#[tokio::test]
async fn a_pause_that_a_server_asks_for_is_bounded() {
    let model = ModelServer::start().await;
    let rap = Setup::new().model(&model.lines()).start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let mut stream = Stream::of(&rap, "t").await;
    stream.until("status").await;
    model.answer(Reply::Full(429, Some(("retry-after", "86400".into())), "slow down".into()));
    rap.say("t", "hi").await;
    let notice = stream.until("notice").await;
    let text = notice["text"].as_str().unwrap();
    let is_bounded = ["in 600.0s", "in 599."].iter().any(|pause| text.contains(pause));
    assert!(text.contains("answered 429: slow down") && is_bounded, "{text}");
}

#[tokio::test]
async fn tokens_and_costs_are_counted_for_each_turn_and_thread() {
    let model = ModelServer::start().await;
    let prices = "input_price = 2.50\noutput_price = 10\ncached_price = \"0.25\"";
    let rap = Setup::new().model(&format!("{}\n{prices}", model.lines())).start();
    model.says_to(1_000, "One.");
    model.says_to(2_000, "Two.");
    let thread = rap.open("hi").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "and?").await;
    rap.until_line(&thread, "assistant: Two.").await;
    let idle = rap.until_idle(&thread).await;
    // 3,000 input tokens at 2.50 dollars and 6 output tokens at 10 dollars per million.
    assert_eq!(idle["usage"], json!({"input": 3_000, "output": 6, "cached": 0, "cost": 0.00756}));
    let history = rap.get(&format!("/v1/threads/{thread}/history")).await.expect(200);
    let entries = history["entries"].as_array().unwrap().clone();
    let turns: Vec<_> = entries.iter().filter_map(|entry| entry.get("usage").cloned()).collect();
    let turn = |input: u64, cost: f64| json!({"input": input, "output": 3, "cached": 0, "cost": cost});
    assert_eq!(turns, [turn(1_000, 0.00253), turn(2_000, 0.00503)]);
    let (code, shown) = rap.command(&["threads", "show", &thread]);
    assert_eq!(code, Some(0));
    assert!(shown.contains("3,000 tokens in, 6 out; cost $0.0076"), "{shown}");
    assert!(shown.contains("last answer: 2,000 tokens in, 3 out; cost $0.0050"), "{shown}");
    let metrics = rap.send("GET", "/metrics", &[], b"").await.text;
    let labels = "agent=\"default\",model=\"gpt\",provider=\"openai\"";
    assert!(metrics.contains(&format!("rap_model_cost_dollars_total{{{labels}}} 0.00756")), "{metrics}");
}

#[tokio::test]
async fn the_tokens_and_costs_of_a_session_include_its_children() {
    let model = ModelServer::start().await;
    let rap = Setup::new().model(&format!("{}\ninput_price = 1\noutput_price = 0", model.lines())).start();
    model.calls(&[("c1", "spawn_thread", json!({"instructions": "dig"}))]);
    // The parent and the child are asked at the same time.
    model.says_to(1_000, "Fine.");
    model.says_to(1_000, "Fine.");
    let thread = rap.open("delegate").await;
    let child = rap.child(&thread).await;
    for thread in [&thread, &child] {
        rap.until_line(thread, "assistant: Fine.").await;
        rap.until_idle(thread).await;
    }
    let usage = |id: &str| {
        let path = format!("/v1/threads/{id}/usage");
        let rap = &rap;
        async move { rap.get(&path).await.expect(200) }
    };
    let (of_root, of_child) = (usage(&thread).await, usage(&child).await);
    assert_eq!((&of_root["session"], &of_root["threads"]), (&of_child["session"], &json!(2)));
    for part in ["input", "output"] {
        let sum = of_root["thread"][part].as_u64().unwrap() + of_child["thread"][part].as_u64().unwrap();
        assert_eq!(of_root["session"][part], sum, "{part}");
    }
    assert_eq!(of_child["thread"]["cost"], 0.001);
    let input = of_root["session"]["input"].as_u64().unwrap();
    assert!(input >= 2_000, "{of_root}");
    assert_eq!(of_root["session"]["cost"].as_f64().unwrap(), input as f64 / 1e6);
    let (code, shown) = rap.command(&["threads", "show", &thread]);
    assert!(code == Some(0) && shown.contains("session of 2 threads: "), "{shown}");
    assert_eq!(rap.get("/v1/threads/nobody/usage").await.status, 404);
}

#[tokio::test]
async fn a_budget_counts_the_tokens_of_an_answer_that_was_cut() {
    let model = ModelServer::start().await;
    let rap = Setup::new().model(&model.lines()).limit("tokens_in_total = 400").start();
    let cut = "data: {\"choices\": [{\"delta\": {\"content\": \"half\"}}], \"usage\": {\"prompt_tokens\": 500, \
               \"completion_tokens\": 1}}\n\n";
    model.answer(Reply::Full(200, Some(("content-type", "text/event-stream".into())), cut.into()));
    model.says("Whole.");
    let thread = rap.open("hi").await;
    rap.until_line(&thread, "assistant: Whole.").await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["usage"], json!({"input": 510, "output": 4, "cached": 0}));
    rap.say(&thread, "and?").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    assert!(paused["why"].as_str().unwrap().contains("400 tokens in total"), "{paused}");
}

/// The model is dropped in the middle of its answer, first because it takes too long, then because of a message.
#[tokio::test]
async fn a_budget_counts_the_tokens_of_an_answer_that_was_dropped() {
    let model = AnthropicServer::start().await;
    let prices = "input_price = 1\noutput_price = 1\ncached_price = 1";
    let setup = Setup::new().model(&format!("{}\n{prices}", model.lines()));
    let rap = setup.limit("model_timeout = \"1s\"").start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let mut stream = Stream::of(&rap, "t").await;
    stream.until("status").await;
    model.begins("Half an ans");
    model.begins("Another ha");
    rap.say("t", "hello").await;
    assert_eq!(stream.until("delta").await["text"], "Half an ans");
    assert_eq!(stream.until("delta").await["text"], "Another ha");
    model.says("Whole.");
    rap.say("t", "and?").await;
    rap.until_line("t", "assistant: Whole.").await;
    let idle = rap.until_idle("t").await;
    // Each of the three requests has 100 input tokens, of which 90 are cached.
    assert_eq!((&idle["usage"]["input"], &idle["usage"]["cached"]), (&json!(300), &json!(270)), "{idle}");
    let metrics = rap.send("GET", "/metrics", &[], b"").await.text;
    let labels = "kind=\"input\",agent=\"default\",model=\"claude\",provider=\"anthropic\"";
    assert!(metrics.contains(&format!("rap_model_tokens_total{{{labels}}} 300")), "{metrics}");
}

#[tokio::test]
async fn a_subscription_is_cancelled_by_a_short_id() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let lines = format!("{}\ncall_ids = \"short\"", model.lines());
    let rap = Setup::new().tools(&tools).model(&lines).start();
    model.calls(&[("s1", "watch", json!({"topic": "x"}))]);
    model.says("Subscribed.");
    let thread = rap.open("watch x").await;
    tools.invocation().await.confirms("watching").await;
    rap.until_idle(&thread).await;
    model.question().await;
    let asked = model.question().await;
    let id = asked["messages"][1]["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    model.calls(&[("c1", "cancel_subscription", json!({"tool_call_id": id}))]);
    model.says("Cancelled.");
    rap.say(&thread, "stop").await;
    rap.until_line(&thread, "assistant: Cancelled.").await;
    assert_eq!(rap.thread(&thread).await["subscriptions"], json!([]));
}
