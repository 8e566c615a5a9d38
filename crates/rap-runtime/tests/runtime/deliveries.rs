//! The delivery log: refused, retried and given-up deliveries are listed, and invocations can be redelivered.

use std::time::Duration;

use rap_runtime::Limits;
use rap_testkit::peer::Reply;
use rap_testkit::tools::{CANCEL, CLOSE, DISCOVERY, INVOKE};
use rap_testkit::{Tools, http, until};
use serde_json::{Value, json};

use crate::local::{LocalRuntime, tool_server};

/// Polls until the delivery log has a matching line.
async fn line(rap: &LocalRuntime, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    until(what, async || rap.listing("deliveries").await.into_iter().find(|line| is(line))).await
}

async fn redeliver(rap: &LocalRuntime, line: &Value) -> http::Response {
    rap.post(&format!("/v1/deliveries/{}/redeliver", line["id"].as_str().unwrap()), &json!({})).await
}

#[tokio::test]
async fn a_delivery_that_succeeds_at_once_is_not_listed() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
    rap.close(&thread).await;
    tools.notified(CLOSE, 1).await;
    // The delivery log is written in order, so earlier lines would be there too.
    http::post(&format!("{}/callback/made-up", rap.url), &json!({})).await.expect_refusal(401);
    line(&rap, "the refused callback", |line| line["kind"] == "callback").await;
    assert_eq!(rap.listing("deliveries").await.len(), 1);
}

#[tokio::test]
async fn an_invocation_that_is_retried_is_one_line_until_it_is_delivered() {
    let tools = Tools::start().await;
    tools.answer_next(INVOKE, Reply::Status(500));
    tools.answer_next(INVOKE, Reply::Status(503));
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    let retrying = line(&rap, "retrying", |line| line["outcome"] == "retrying").await;
    assert_eq!(retrying["kind"], "invocation");
    assert_eq!((&retrying["thread_id"], &retrying["call_id"]), (&json!(thread), &json!("call_1_1")));
    assert_eq!(retrying["server"], *tools.url);
    assert!(retrying["next_at"].is_string(), "{retrying}");
    let calls = tools.invocations(3).await;
    let delivered = line(&rap, "delivered", |line| line["outcome"] == "delivered").await;
    assert_eq!((&delivered["attempts"], &delivered["id"]), (&json!(3), &retrying["id"]));
    assert_eq!((&delivered["detail"], &delivered["next_at"]), (&json!("answered 200"), &Value::Null));
    assert_eq!(redeliver(&rap, &delivered).await.refusal(), (409, "already_delivered"));
    calls[2].returns("done").await;
    rap.until_idle(&thread).await;
    assert_eq!(rap.listing("deliveries").await, std::slice::from_ref(&delivered));
    assert_eq!(redeliver(&rap, &delivered).await.refusal(), (409, "call_settled"));
    let one = rap.get(&format!("/v1/deliveries/{}", delivered["id"].as_str().unwrap())).await;
    let mut one = rap.ids(&thread).await.named_in(&one.expect(200));
    let attempts = one.as_object_mut().unwrap().remove("last_attempts").unwrap();
    assert_eq!(one, delivered);
    let details: Vec<&Value> =
        attempts.as_array().unwrap().iter().map(|attempt| &attempt["detail"]).collect();
    assert_eq!(details, ["answered 500", "answered 503", "answered 200"]);
    assert_eq!((&attempts[0]["at"], &attempts[2]["at"]), (&delivered["first_at"], &delivered["last_at"]));
}

#[tokio::test]
async fn redeliver_sends_a_waiting_invocation_at_once() {
    let tools = Tools::start().await;
    let retry_after = Some(("retry-after", "600".to_owned()));
    tools.answer_next(INVOKE, Reply::Full(503, retry_after, "".into()));
    let rap = LocalRuntime::with(
        vec![tool_server(&tools, None)],
        Limits { invoke_retry_for: Duration::from_secs(3600), ..Limits::default() },
    )
    .await;
    let thread = rap.open("call work").await;
    tools.invocation().await;
    let retrying = line(&rap, "retrying", |line| line["outcome"] == "retrying").await;
    assert!(retrying["next_at"].as_str() > retrying["last_at"].as_str(), "{retrying}");
    redeliver(&rap, &retrying).await.expect(202);
    tools.invocation().await.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    assert_eq!(tools.count(INVOKE), 2);
}

#[tokio::test]
async fn refused_and_given_up_deliveries_are_listed_with_their_reason_and_not_redelivered() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::with(
        vec![tool_server(&tools, None)],
        Limits { invoke_retry_for: Duration::from_secs(1), ..Limits::default() },
    )
    .await;
    tools.answer_next(INVOKE, Reply::Status(403));
    let thread = rap.open("call work").await;
    let refused = line(&rap, "refused", |line| line["outcome"] == "refused").await;
    assert_eq!((&refused["thread_id"], &refused["detail"]), (&json!(thread), &json!("answered 403")));
    tools.answer_always(INVOKE, Reply::Status(500));
    let other = rap.open("call work").await;
    let given_up = line(&rap, "given up", |line| line["outcome"] == "given_up").await;
    assert!(given_up["attempts"].as_u64() > Some(1), "{given_up}");
    for settled in [&refused, &given_up] {
        let answer = redeliver(&rap, settled).await;
        assert_eq!(answer.refusal(), (409, "call_settled"));
        assert!(answer.message().contains("send the thread a message"), "{}", answer.message());
    }
    let sent = tools.count(INVOKE);
    rap.until_idle(&other).await;
    assert_eq!(tools.count(INVOKE), sent);
}

#[tokio::test]
async fn the_delivery_of_a_call_that_settles_during_retries_gets_its_outcome() {
    let tools = Tools::start().await;
    let retry_after = Some(("retry-after", "600".to_owned()));
    tools.answer_always(INVOKE, Reply::Full(503, retry_after, "".into()));
    let rap = LocalRuntime::with(
        vec![tool_server(&tools, None)],
        Limits { invoke_retry_for: Duration::from_secs(3600), ..Limits::default() },
    )
    .await;
    let returned = rap.open("call work").await;
    let call = tools.invocation().await;
    line(&rap, "the first", |line| line["thread_id"] == *returned).await;
    let cancelled = rap.open("call work").await;
    line(&rap, "the second", |line| line["thread_id"] == *cancelled).await;
    call.returns("it had arrived after all").await;
    rap.act(&cancelled, "interrupt").await.expect(202);
    let lines = rap.listing("deliveries").await;
    let outcomes: Vec<_> = lines.iter().map(|line| (&line["thread_id"], &line["outcome"])).collect();
    let [returned, cancelled] = [json!(returned), json!(cancelled)];
    assert_eq!(outcomes, [(&cancelled, &json!("dropped")), (&returned, &json!("delivered"))]);
    assert_eq!(rap.listing("deliveries?outcome=dropped").await, lines[..1]);
}

#[tokio::test]
async fn notifications_that_fail_are_listed_for_each_server_and_sent_once() {
    let (tools, mut gone) = (Tools::start().await, Tools::offering("gone", &["other"]).await);
    let rap =
        LocalRuntime::with(vec![tool_server(&tools, None), tool_server(&gone, None)], Limits::default())
            .await;
    let thread = rap.open("call work").await;
    tools.invocation().await;
    tools.answer_always(CANCEL, Reply::Status(400));
    gone.stop().await;
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    let refused = line(&rap, "refused", |line| line["outcome"] == "refused").await;
    let place = (&refused["kind"], &refused["topic"], &refused["call_id"], &refused["server"]);
    let expected = [json!("notification"), json!("cancel_tool_call"), json!("call_1_1"), json!(tools.url)];
    assert_eq!(place, (&expected[0], &expected[1], &expected[2], &expected[3]));
    let unreachable = line(&rap, "given up", |line| line["outcome"] == "given_up").await;
    assert_eq!((&unreachable["server"], &unreachable["attempts"]), (&json!(gone.url), &json!(1)));
    assert!(unreachable["detail"].as_str().unwrap().contains("could not connect"), "{unreachable}");
    assert_eq!(redeliver(&rap, &refused).await.refusal(), (409, "not_redeliverable"));
    assert_eq!(tools.count(CANCEL), 1);
}

#[tokio::test]
async fn an_answer_to_a_choice_that_is_retried_or_refused_is_listed_without_its_url() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    tools.answer_next("/answer/s3cret", Reply::Status(500));
    tools.answer_next("/answer/s3cret", Reply::Status(410));
    let url = format!("{}/answer/s3cret", tools.url);
    call.says(&call.question(&url)).await;
    rap.post(&format!("/v1/threads/{thread}/calls/{}/choice", call.id()), &json!({"selected": 1}))
        .await
        .expect(202);
    let refused = line(&rap, "refused", |line| line["outcome"] == "refused").await;
    assert_eq!((&refused["kind"], &refused["attempts"]), (&json!("answer"), &json!(2)));
    assert_eq!((&refused["detail"], &refused["server"]), (&json!("answered 410"), &Value::Null));
    assert!(!rap.listing("deliveries").await.iter().any(|line| line.to_string().contains("s3cret")));
}

#[tokio::test]
async fn callbacks_that_are_refused_are_counted_by_their_reason() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    for _ in 0..3 {
        http::post(&format!("{}/callback/made-up", rap.url), &json!({})).await.expect_refusal(401);
    }
    http::post(call.url(), &json!({"type": "tool_result"})).await.expect_refusal(400);
    call.returns("done").await;
    http::post(call.url(), &call.inline("too late")).await.expect_refusal(410);
    rap.close(&thread).await;
    // A tool that was not notified of the closing yet may still send callbacks.
    http::post(call.url(), &call.result("too late")).await.expect_refusal(410);
    let late = line(&rap, "ended", |line| line["topic"] == "subscription_ended").await;
    assert_eq!((&late["thread_id"], &late["call_id"]), (&json!(thread), &json!("call_1_1")));
    let made_up = line(&rap, "bad_token", |line| line["topic"] == "bad_token").await;
    assert_eq!((&made_up["attempts"], &made_up["thread_id"]), (&json!(3), &Value::Null));
    let invalid = line(&rap, "invalid", |line| line["topic"] == "invalid").await;
    assert_eq!((&invalid["outcome"], &invalid["kind"]), (&json!("refused"), &json!("callback")));
    let lines = rap.listing("deliveries").await;
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(!lines.iter().any(|line| line.to_string().contains("/callback/")));
    assert_eq!(redeliver(&rap, &made_up).await.refusal(), (409, "not_redeliverable"));
}

#[tokio::test]
async fn the_ledger_is_paged_and_filtered_and_survives_a_restart() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let mut threads = Vec::new();
    for _ in 0..5 {
        tools.answer_next(INVOKE, Reply::Status(400));
        threads.push(rap.open("call work").await);
        line(&rap, "refused", |line| line["thread_id"] == **threads.last().unwrap()).await;
    }
    let rap = rap.restarted().await;
    let (mut path, mut seen) = ("/v1/deliveries?limit=2".to_owned(), Vec::new());
    loop {
        let page = rap.get(&path).await.expect(200);
        let lines = page["deliveries"].as_array().unwrap();
        assert!(lines.len() <= 2);
        seen.extend(lines.iter().map(|line| line["thread_id"].as_str().unwrap().to_owned()));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/v1/deliveries?limit=2&cursor={cursor}"),
            None => break,
        }
    }
    threads.reverse();
    assert_eq!(seen, threads);
    let of_one = rap.get(&format!("/v1/deliveries?thread={}", threads[0])).await.expect(200);
    assert_eq!(of_one["deliveries"].as_array().unwrap().len(), 1);
    let none = rap.get("/v1/deliveries?thread=nobody").await.expect(200);
    assert_eq!(none, json!({"deliveries": [], "next_cursor": null}));
    for query in ["limit=0", "limit=1001", "cursor=x", "outcome=lost", "sort=up", "thread="] {
        let answer = rap.get(&format!("/v1/deliveries?{query}")).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{query}");
    }
    for id in ["0", "99", "x", "-1"] {
        assert_eq!(rap.get(&format!("/v1/deliveries/{id}")).await.refusal(), (404, "no_such_delivery"));
        let again = rap.post(&format!("/v1/deliveries/{id}/redeliver"), &json!({})).await;
        assert_eq!(again.refusal(), (404, "no_such_delivery"));
    }
}

/// The health of a tool server is what its last requests showed. Nothing is asked to find it out.
#[tokio::test]
async fn the_health_of_a_tool_server_follows_its_last_requests() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let health = async || rap.get("/v1/tools").await.expect(200)["servers"][0]["health"].clone();
    let known = health().await;
    assert_eq!((&known["state"], &known["last_failure"]), (&json!("ok"), &Value::Null));
    tools.answer_always(INVOKE, Reply::Status(503));
    let thread = rap.open("call work").await;
    let retrying = line(&rap, "retrying", |line| line["outcome"] == "retrying").await;
    let fetched = tools.count(DISCOVERY);
    let failing = health().await;
    assert_eq!((&failing["state"], &failing["last_failure"]), (&json!("failing"), &json!("answered 503")));
    assert!(failing["last_failure_at"].is_string() && failing["last_success_at"].is_string(), "{failing}");
    tools.answer_always(INVOKE, Reply::Status(200));
    redeliver(&rap, &retrying).await;
    line(&rap, "delivered", |line| line["outcome"] == "delivered").await;
    let again = health().await;
    assert_eq!((&again["state"], &again["last_failure"]), (&json!("ok"), &json!("answered 503")));
    assert_eq!((&again["next_attempt_at"], tools.count(DISCOVERY)), (&Value::Null, fetched));
    tools.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
}
