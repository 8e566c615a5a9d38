//! Questions, consent, views, shared state and [`TestRuntime`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rap_tool::prelude::*;
use rap_tool::{Callback, Limits, TestRuntime, UserChoice};
use serde_json::json;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

async fn choose(_: Nothing, call: Call) -> Result<String> {
    let first = call.choose("Which?", ["a", "b", "c"], 0).await?;
    let second = call.choose("Sure?", ["yes", "no"], 1).await?;
    Ok(format!("chose {first} and {second}"))
}

async fn authorize(_: Nothing, call: Call) -> Result<String> {
    let url = format!("https://id.example.com/authorize?redirect_uri={}", call.redirect_url());
    let consent = call.authorize(url).await?;
    Ok(format!("code {}", consent.get("code").unwrap_or("none")))
}

async fn show(_: Nothing, call: Call) -> Result<&'static str> {
    call.progress(0.5, "half").await?;
    call.view("diff", json!({"path": "a", "patch": "b"})).await?;
    call.progress(2.0, "all").await?;
    Ok("shown")
}

fn server() -> ToolServer {
    ToolServer::new("interaction")
        .offer(Tool::new("choose", choose).restartable())
        .offer(Tool::new("authorize", authorize).restartable())
        .tool("show", show)
}

async fn question(runtime: &mut TestRuntime) -> UserChoice {
    match runtime.next().await {
        Callback::UserChoice(question) => question,
        other => panic!("not a question: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_handler_gets_the_answer_to_a_choice() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    let call = runtime.invoke("choose", json!({})).await;
    let first = question(&mut runtime).await;
    assert_eq!((first.prompt.as_str(), first.default), ("Which?", 0));
    assert_eq!(first.choices, ["a", "b", "c"]);
    assert_eq!(runtime.answer(&first, 2).await, 200);
    let second = question(&mut runtime).await;
    assert_ne!(first.response_url, second.response_url);
    assert_eq!(runtime.answer(&second, 0).await, 200);
    assert_eq!(runtime.result_of(&call).await.text(), "chose 2 and 0");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn only_the_first_answer_to_a_question_is_accepted() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    runtime.invoke("choose", json!({})).await;
    let first = question(&mut runtime).await;
    assert_eq!(runtime.answer(&first, 3).await, 400, "there are three choices");
    assert_eq!(runtime.answer(&first, 1).await, 200);
    assert_eq!(runtime.answer(&first, 1).await, 200, "the same answer again is harmless");
    assert_eq!(runtime.answer(&first, 2).await, 409, "a different answer is a conflict");
    let mut guessed = first.clone();
    guessed.response_url = rap_protocol::ResponseUrl::new("https://tool.test/choice/0123456789").unwrap();
    assert_eq!(runtime.answer(&guessed, 1).await, 404);
    let mut mixed_up = first.clone();
    mixed_up.id = rap_protocol::CallId::new("another").unwrap();
    assert_eq!(runtime.answer(&mixed_up, 1).await, 404);
    Ok(())
}

/// Anyone can send requests to these URLs, so only requests to real questions count against the caller's rate.
#[tokio::test(start_paused = true)]
async fn requests_with_invented_urls_keep_nobody_from_answering() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    runtime.invoke("choose", json!({})).await;
    let first = question(&mut runtime).await;
    let real = first.response_url.expose().rsplit('/').next().unwrap().to_owned();
    let (mut refused, mut attempts) = (false, 0);
    while !refused && attempts < 1_000 {
        // The caller of the real question, but not its MAC.
        let invented = format!("{}{}", "0".repeat(40), &real[40..]);
        let (status, _) = runtime.visit(&format!("https://tool.test/consent/{invented}")).await;
        (refused, attempts) = (status == 503, attempts + 1);
    }
    assert!(refused, "invented URLs have a rate, too");
    assert_eq!(runtime.answer(&first, 1).await, 200);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_choice_survives_a_restart_before_and_after_its_answer() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    let call = runtime.invoke("choose", json!({})).await;
    let first = question(&mut runtime).await;
    runtime.crash().await;
    runtime.restart().await?;
    assert_eq!(runtime.answer(&first, 1).await, 200);
    let second = question(&mut runtime).await;
    runtime.crash().await;
    runtime.restart().await?;
    assert!(runtime.pending().is_empty(), "a question is not asked a second time");
    assert_eq!(runtime.answer(&second, 1).await, 200);
    assert_eq!(runtime.result_of(&call).await.text(), "chose 1 and 1");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_question_that_the_runtime_refuses_is_an_error() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    runtime.refuse_next(400);
    assert_eq!(runtime.call("choose", json!({})).await.text(), "Error: the user could not be asked");
    Ok(())
}

/// Proves: LC-08
#[tokio::test(start_paused = true)]
async fn a_call_continues_when_the_user_has_consented() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    let call = runtime.invoke("authorize", json!({})).await;
    let redirect = redirect_of(&mut runtime).await;
    assert_eq!(runtime.visit("https://tool.test/consent/guessed?code=x").await.0, 404);
    runtime.crash().await;
    runtime.restart().await?;
    let (status, page) = runtime.visit(&format!("{redirect}?code=c0de")).await;
    assert_eq!(status, 200);
    assert!(page.contains("You can close this page"), "{page}");
    assert_eq!(runtime.result_of(&call).await.text(), "code c0de");
    assert!(runtime.pending().is_empty(), "the user is asked once");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn without_consent_a_call_ends_with_an_error() -> Result<()> {
    let mut limits = Limits::default();
    limits.authorize_within = Duration::from_secs(600);
    let mut runtime = TestRuntime::start(server().limits(limits)).await?;
    let call = runtime.invoke("authorize", json!({})).await;
    let expected = "Error: the user did not authorise this within 10 minutes; ask them first";
    assert_eq!(runtime.result_of(&call).await.text(), expected);

    drop(runtime.pending());
    let call = runtime.invoke("authorize", json!({})).await;
    let redirect = redirect_of(&mut runtime).await;
    runtime.visit(&format!("{redirect}?error=access_denied")).await;
    let refused = runtime.result_of(&call).await;
    assert_eq!(refused.text(), "Error: the user did not authorise this: access_denied");
    Ok(())
}

/// Waits for the next authorisation and returns its `redirect_uri`.
async fn redirect_of(runtime: &mut TestRuntime) -> String {
    let Callback::Oauth(oauth) = runtime.next().await else { panic!("an authorisation") };
    let auth_url = oauth.auth_url.to_url();
    let mut parameters = auth_url.query_pairs();
    let (_, redirect) = parameters.find(|(name, _)| name == "redirect_uri").expect("a redirect_uri");
    redirect.into_owned()
}

#[tokio::test(start_paused = true)]
async fn views_are_sent_while_the_call_runs() -> Result<()> {
    let mut runtime = TestRuntime::start(server()).await?;
    let call = runtime.invoke("show", json!({})).await;
    let mut views = Vec::new();
    let result = loop {
        match runtime.next().await {
            Callback::ViewUpdate(view) => views.push((view.view_type, view.content)),
            Callback::ToolResult(result) => break result,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(result.id, call);
    assert!(views.contains(&("diff".into(), json!({"path": "a", "patch": "b"}))), "{views:?}");
    assert_eq!(views.last(), Some(&("progress".into(), json!({"fraction": 1.0, "text": "all"}))));
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn new_content_of_a_view_replaces_unsent_content() -> Result<()> {
    #[derive(Deserialize, JsonSchema)]
    struct Work {}
    let work = |_: Work, call: Call| async move {
        for percent in 1..=100 {
            call.progress(f64::from(percent) / 100.0, format!("{percent} %")).await?;
        }
        Ok("done")
    };
    let mut runtime = TestRuntime::start(ToolServer::new("work").tool("work", work)).await?;
    runtime.delay_next(Duration::from_secs(20));
    let call = runtime.invoke("work", json!({})).await;
    let mut seen = 0;
    loop {
        match runtime.next().await {
            Callback::ViewUpdate(_) => seen += 1,
            Callback::ToolResult(result) if result.id == call => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(seen <= 2, "{seen} updates, where the delayed one and the latest were expected");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_handler_shares_state_and_knows_its_caller() -> Result<()> {
    struct Visits(AtomicU32);
    let visit = |_: Nothing, call: Call| async move {
        let visits = call.state::<Visits>().0.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(format!("{visits} {} {} {:?}", call.thread().id(), call.ancestors().len(), call.user_id()))
    };
    let server = ToolServer::new("visits").tool("visit", visit).state(Visits(AtomicU32::new(0)));
    let mut runtime = TestRuntime::start(server).await?;
    assert_eq!(runtime.call("visit", json!({})).await.text(), "1 test-thread 0 None");
    assert_eq!(runtime.call("visit", json!({})).await.text(), "2 test-thread 0 None");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_test_can_duplicate_delay_and_refuse_callbacks() -> Result<()> {
    let echo = |_: Nothing, _: Call| async { Ok("echo") };
    let mut runtime = TestRuntime::start(ToolServer::new("echo").tool("echo", echo)).await?;
    runtime.duplicate_next();
    let first = runtime.call("echo", json!({})).await;
    let Callback::ToolResult(again) = runtime.next().await else { panic!("a result") };
    assert_eq!(first.result, again);
    runtime.refuse_next(503);
    assert_eq!(runtime.call("echo", json!({})).await.text(), "echo", "it is retried");
    runtime.refuse_next(413);
    assert_eq!(runtime.call("echo", json!({})).await.text(), "Error: the result was refused (413)");
    runtime.delay_next(Duration::from_secs(3600));
    assert_eq!(runtime.call("echo", json!({})).await.text(), "echo", "it is retried after the timeout");
    Ok(())
}

/// A handler that continues after the cancellation sends nothing, and a restart does not start it again.
///
/// Proves: SE-26
#[tokio::test(start_paused = true)]
async fn a_cancelled_subscription_stays_silent_also_after_a_restart() -> Result<()> {
    let sent = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&sent);
    let tick = move |_: Nothing, subscribe: Subscribe| {
        let sent = Arc::clone(&counter);
        async move {
            let subscription = subscribe.confirm("").await?;
            for _ in 0..1_000_000 {
                tokio::time::sleep(Duration::from_secs(1)).await;
                sent.fetch_add(1, Ordering::SeqCst);
                // An error is ignored, as a careless author would.
                drop(subscription.send("tick").await);
            }
            subscription.finish("over").await
        }
    };
    let mut runtime = TestRuntime::start(ToolServer::new("ticks").subscription("tick", tick)).await?;
    let cancelled = runtime.call("tick", json!({})).await;
    let kept = runtime.call("tick", json!({})).await;
    let (cancelled, kept) = (cancelled.result.id.clone(), kept.result.id.clone());
    runtime.next().await;
    runtime.cancel(&cancelled).await;
    runtime.pending();
    for restarted in [false, true] {
        if restarted {
            runtime.restart().await?;
        }
        let before = sent.load(Ordering::SeqCst);
        for _ in 0..10 {
            let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
            assert_eq!(event.tool_call_id, kept);
        }
        assert!(sent.load(Ordering::SeqCst) >= before + 9);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn no_two_subscriptions_share_an_event_id() -> Result<()> {
    let once =
        |_: Nothing, subscribe: Subscribe| async move { subscribe.confirm("").await?.finish("over").await };
    let mut runtime = TestRuntime::start(ToolServer::new("once").subscription("once", once)).await?;
    let mut ids = std::collections::HashSet::new();
    for thread in ["one", "one", "two"] {
        runtime.invoke_in(thread, "once", json!({})).await;
        let Callback::ToolResult(_) = runtime.next().await else { panic!("a confirmation") };
        let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
        assert!(ids.insert(event.event_id.unwrap()), "{ids:?}");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn closing_and_cancelling_can_be_tested() -> Result<()> {
    let wait = |_: Nothing, _: Call| async { std::future::pending::<Result<&str>>().await };
    let mut runtime = TestRuntime::start(ToolServer::new("wait").tool("wait", wait)).await?;
    let call = runtime.invoke("wait", json!({})).await;
    assert!(runtime.is_alive(&call).await);
    runtime.cancel(&call).await;
    assert_eq!(runtime.result_of(&call).await.text(), "Error: cancelled");
    let call = runtime.invoke("wait", json!({})).await;
    runtime.close().await;
    assert!(!runtime.is_alive(&call).await);
    assert!(runtime.pending().is_empty());
    Ok(())
}

/// Sends an event every hour for a week, which takes less than 10 seconds of real time.
#[tokio::test(start_paused = true)]
async fn a_week_of_hourly_events_runs_in_virtual_time() -> Result<()> {
    let begun = std::time::Instant::now();
    let hourly = |_: Nothing, subscribe: Subscribe| async move {
        let subscription = subscribe.confirm("").await?;
        for hour in 1..=7 * 24 {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            subscription.send(hour.to_string()).await?;
        }
        subscription.finish("over").await
    };
    let mut runtime = TestRuntime::start(ToolServer::new("hours").subscription("hourly", hourly)).await?;
    runtime.call("hourly", json!({})).await;
    for hour in 1..=7 * 24 {
        let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
        assert_eq!(event.text, hour.to_string());
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_view_after_a_cancellation_is_ignored() -> Result<()> {
    let work = |_: Nothing, call: Call| async move {
        call.progress(0.1, "begun").await?;
        call.cancelled().await;
        assert!(call.progress(0.2, "too late").await.is_err());
        Err::<&str, _>(Error::new("stopped"))
    };
    let mut runtime = TestRuntime::start(ToolServer::new("work").tool("work", work)).await?;
    runtime.delay_next(Duration::from_secs(10));
    let call = runtime.invoke("work", json!({})).await;
    // The first view is being sent when the call is cancelled.
    tokio::time::sleep(Duration::from_secs(1)).await;
    runtime.cancel(&call).await;
    assert_eq!(runtime.result_of(&call).await.text(), "Error: cancelled");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!runtime.is_alive(&call).await, "the call is not settled");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_question_that_the_handler_gave_up_does_not_delay_the_result() -> Result<()> {
    let ask_briefly = |_: Nothing, call: Call| async move {
        let asked = tokio::time::timeout(Duration::from_millis(1), call.choose("Well?", ["a", "b"], 0)).await;
        Ok(if asked.is_err() { "gave up asking" } else { "asked" })
    };
    let mut runtime = TestRuntime::start(ToolServer::new("ask").tool("ask", ask_briefly)).await?;
    let begun = tokio::time::Instant::now();
    let call = runtime.invoke("ask", json!({})).await;
    assert_eq!(runtime.result_of(&call).await.text(), "gave up asking");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    Ok(())
}
