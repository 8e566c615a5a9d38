//! The runtime asks tool servers whether active subscriptions are alive, like open calls.

use serde_json::json;

use rap_testkit::peer::Reply;
use rap_testkit::tools::Call;
use rap_testkit::{Rap, Setup, Tools, until};

const STATUS: &str = "/tool_call_status";

async fn subscribed(tools: &Tools) -> (Rap, String, Call) {
    let rap = Setup::new().tools(tools).limit("lost_after = \"300ms\"").start();
    let thread = rap.open("call watch {\"topic\": \"x\"}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    (rap, thread, watch)
}

#[tokio::test]
async fn a_subscription_unknown_to_its_server_ends_and_the_agent_is_notified() {
    let tools = Tools::start().await;
    tools.answer_always(STATUS, Reply::json(&json!({"alive": false})));
    let (rap, thread, watch) = subscribed(&tools).await;
    let kind = format!("\"kind\":\"interrupt:{} (subscription has ended)\"", watch.name());
    let told = async || {
        let transcript = rap.transcript(&thread).await;
        transcript
            .iter()
            .any(|line| line.starts_with("synthetic call ") && line.contains(&kind))
            .then_some(())
    };
    until("a last event", told).await;
    rap.until(&thread, "no subscription", |thread| thread["subscriptions"] == json!([])).await;
    assert_eq!(tools.count(STATUS), 2, "it ends at the second answer");
    for asked in tools.all(STATUS) {
        assert_eq!(asked.body, json!({"thread_id": thread, "tool_call_id": watch.id()}));
    }
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    assert_eq!(
        transcript.iter().filter(|line| line.contains("(subscription has ended)")).count(),
        1,
        "{transcript:#?}"
    );
    assert!(
        transcript.last().unwrap().starts_with("assistant: watch: "),
        "the model was notified: {transcript:#?}"
    );
    assert!(rap.listing("subscriptions").await.is_empty());
    assert_eq!(watch.post(&watch.inline("late")).await.refusal(), (410, "subscription_ended"));
}

#[tokio::test]
async fn any_other_answer_leaves_the_subscription_active() {
    let tools = Tools::start().await;
    let (alive, gone) = (Reply::json(&json!({"alive": true})), Reply::json(&json!({"alive": false})));
    // One negative answer is not enough, and a positive one in between resets the count.
    for answer in [&alive, &Reply::Status(404), &gone, &alive, &gone, &Reply::Status(404), &gone] {
        tools.answer_next(STATUS, answer.clone());
    }
    tools.answer_always(STATUS, alive);
    let (rap, thread, watch) = subscribed(&tools).await;
    until("all answers", async || (tools.count(STATUS) >= 8).then_some(())).await;
    assert_eq!(rap.thread(&thread).await["subscriptions"][0]["call_id"], watch.name());
    watch.says(&watch.inline("still here")).await;
    rap.until_line(&thread, "assistant: watch: still here").await;
}

/// The first answer is stored across a crash.
#[tokio::test]
async fn the_first_answer_about_a_subscription_survives_a_kill() {
    let tools = Tools::start().await;
    let gone = || Reply::json(&json!({"alive": false}));
    tools.answer_next(STATUS, gone());
    tools.answer_next(STATUS, Reply::Hang);
    tools.answer_always(STATUS, gone());
    let (rap, thread, _) = subscribed(&tools).await;
    until("the second question", async || (tools.count(STATUS) == 2).then_some(())).await;
    let rap = rap.restarted();
    rap.until(&thread, "no subscription", |thread| thread["subscriptions"] == json!([])).await;
    assert_eq!(tools.count(STATUS), 3);
}
