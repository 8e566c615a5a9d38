//! Threads that a model starts: what they see, what they report, how they end.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use serde_json::json;
use support::tools::CLOSE;
use support::{Rap, Tools};

/// A message that starts a child with these instructions for the scripted model.
fn spawn(instructions: &str) -> String {
    format!("call spawn_thread {}", json!({"instructions": instructions}))
}

#[tokio::test]
async fn a_child_works_by_itself_and_its_reports_wake_the_parent() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&format!("{}\ncall work {{\"at\": 1}}", spawn("call work {\"at\": 2}"))).await;
    let child = rap.child(&thread).await;
    let calls = tools.invocations(2).await;
    let of = |id: &str| calls.iter().find(|call| call.thread() == id).unwrap();
    assert_eq!(of(&thread).asked.body["thread_ancestors"], json!(null));
    assert_eq!(of(&child).asked.body["thread_ancestors"], json!([thread]));
    assert_eq!(of(&child).arguments(), &json!({"at": 2}));
    of(&child).returns("found").await;
    rap.until_line(&child, "assistant: work: found").await;

    let story = rap.story(&child).await;
    let own = story
        .iter()
        .position(|line| line.starts_with("result call_1_1: You are a thread of your own"))
        .unwrap();
    assert!(story[own].ends_with("Your instructions:\n\ncall work {\"at\": 2}"));
    assert_eq!(story[own + 1], "result call_1_2: the thread that started you deals with this call");
    // The parent does not see what its child does.
    of(&thread).returns("here").await;
    rap.until_idle(&thread).await;
    assert!(!rap.story(&thread).await.iter().any(|line| line.contains("found")));

    let order = json!({"thread_id": child, "message": "call report_to_parent {\"report\": \"halfway\"}"});
    rap.say(&thread, &format!("call send_message_to_child {order}")).await;
    rap.until_line(&thread, "assistant: spawn_thread: halfway").await;
    let kind = format!("interrupt:call_1_1 (report of thread {child})");
    let reported = rap.story(&thread).await;
    let reported = reported.iter().find(|line| line.starts_with("synthetic call") && line.contains(&kind));
    assert!(reported.is_some(), "{:?}", rap.story(&thread).await);

    let order = json!({"thread_id": child, "message": "call close_thread {\"report\": \"done\"}"});
    rap.say(&thread, &format!("call send_message_to_child {order}")).await;
    rap.until_line(&thread, "assistant: spawn_thread: done").await;
    rap.until_status(&child, "closed").await;
    assert_eq!(tools.notified(CLOSE, 1).await, [json!({"thread_id": child})]);
    rap.until(&thread, "no child", |thread| thread["children"] == 0).await;
}

#[tokio::test]
async fn closing_a_thread_closes_its_descendants() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&spawn(&spawn("say deep"))).await;
    let child = rap.child(&thread).await;
    let grandchild = rap.child(&child).await;
    rap.until_line(&grandchild, "assistant: deep").await;
    rap.close(&thread).await;
    for closed in [&thread, &child, &grandchild] {
        rap.until_status(closed, "closed").await;
    }
    let mut told: Vec<_> = tools.notified(CLOSE, 3).await;
    told.sort_by_key(|body| body["thread_id"].to_string());
    let mut closed =
        vec![json!({"thread_id": thread}), json!({"thread_id": child}), json!({"thread_id": grandchild})];
    closed.sort_by_key(|body| body["thread_id"].to_string());
    assert_eq!(told, closed);
}

#[tokio::test]
async fn a_report_survives_a_crash_of_the_runtime() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&spawn("call work {}")).await;
    let child = rap.child(&thread).await;
    let look = tools.invocation().await;
    rap.until_idle(&thread).await;
    let rap = rap.restarted();
    look.returns("found").await;
    rap.until_line(&child, "assistant: work: found").await;
    rap.say(&child, "call close_thread {\"report\": \"dug it up\"}").await;
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: spawn_thread: dug it up").await;
    rap.until_status(&child, "closed").await;
    let reports = rap
        .story(&thread)
        .await
        .iter()
        .filter(|line| line.starts_with("assistant: spawn_thread: dug"))
        .count();
    assert_eq!(reports, 1);
}

#[tokio::test]
async fn a_mistake_with_a_child_is_explained_to_the_model() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call spawn_thread {}\ncall report_to_parent {\"report\": \"x\"}\ncall send_message_to_child {\"thread_id\": \"t0\", \"message\": \"x\"}").await;
    rap.until_idle(&thread).await;
    let story = rap.story(&thread).await;
    for line in [
        "result call_1_1: Error: $.instructions: expected a string",
        "result call_1_2: Error: this thread has no parent; say it to the user",
        "result call_1_3: Error: this thread has no open child `t0`; it has none",
    ] {
        assert!(story.iter().any(|told| told == line), "{story:?}");
    }
}

/// Proves: SE-28
#[tokio::test]
async fn closing_names_the_subscriptions_that_end_with_it() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {}").await;
    tools.invocation().await.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call close_thread {}\ncall work {}").await;
    rap.until_status(&thread, "closed").await;
    let story = rap.story(&thread).await;
    assert!(
        story
            .iter()
            .any(|line| line.ends_with("the thread is closed; with it end the subscriptions call_1_1"))
    );
    assert!(story.iter().any(|line| line.ends_with("not called: the thread was closed")), "{story:?}");
    tools.notified(CLOSE, 1).await;
}
