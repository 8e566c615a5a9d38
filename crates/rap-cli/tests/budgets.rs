//! Budgets: a session that has spent its own waits for a person.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use serde_json::json;
use support::{Setup, Tools};

#[tokio::test]
async fn a_session_without_a_budget_holds_what_comes_and_goes_on_when_it_is_lifted() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("turns_in_total = 2").start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await.returns("one").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "say two").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    let why = "the budget of this session is spent: 2 turns in total; resume it for as many again";
    assert_eq!(paused["why"], why);
    rap.say(&thread, "say three").await;
    let rap = rap.restarted();
    let held = rap.thread(&thread).await;
    assert_eq!((&held["status"], &held["held"]), (&json!("needs_you"), &json!(1)));
    rap.order(&thread, "resume").await.expect(202);
    rap.until_idle(&thread).await;
    assert!(rap.story(&thread).await.iter().any(|line| line == "assistant: three"));
    rap.say(&thread, "say four").await;
    rap.until_line(&thread, "assistant: four").await;
    rap.say(&thread, "say five").await;
    rap.until_status(&thread, "needs_you").await;
}

#[tokio::test]
async fn children_spend_the_budget_of_their_session_and_are_resumed_with_it() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("turns_per_hour = 2").start();
    let thread = rap.open("call spawn_thread {\"instructions\": \"say dug\"}").await;
    let child = rap.child(&thread).await;
    // Three questions in all: two of the parent, one of the child. Whoever comes last waits.
    support::until("somebody waits", async || {
        let statuses =
            [rap.thread(&thread).await["status"].clone(), rap.thread(&child).await["status"].clone()];
        statuses.contains(&json!("needs_you")).then_some(())
    })
    .await;
    let waits = if rap.thread(&thread).await["status"] == "needs_you" { &thread } else { &child };
    rap.order(waits, "resume").await.expect(202);
    rap.until_idle(&thread).await;
    rap.until_idle(&child).await;
    assert!(rap.story(&child).await.iter().any(|line| line == "assistant: dug"));
}
