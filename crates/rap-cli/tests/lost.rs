//! Calls that nobody works on any more: their servers are asked, and only a clear answer settles them.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use serde_json::json;
use support::peer::Reply;
use support::tools::INVOKE;
use support::{Rap, Setup, Tools, until};

const STATUS: &str = "/tool_call_status";
const LOST: &str = "result call_1_1: Error: the tool server does not know this call any more; it was lost";

async fn acknowledged(tools: &Tools) -> (Rap, String) {
    let rap = Setup::new().tools(tools).limit("lost_after = \"300ms\"").start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await;
    (rap, thread)
}

#[tokio::test]
async fn a_call_that_its_server_does_not_know_any_more_is_settled_at_the_second_word() {
    let tools = Tools::start().await;
    tools.answer_always(STATUS, Reply::json(&json!({"alive": false})));
    let (rap, thread) = acknowledged(&tools).await;
    rap.until_line(&thread, LOST).await;
    assert_eq!(tools.count(STATUS), 2);
    let asked = tools.next(STATUS).await;
    assert_eq!(asked.body, json!({"thread_id": thread, "tool_call_id": "call_1_1"}));
    rap.until_idle(&thread).await;
}

#[tokio::test]
async fn a_result_of_a_lost_call_that_comes_after_all_follows_once() {
    let tools = Tools::start().await;
    tools.answer_always(STATUS, Reply::json(&json!({"alive": false})));
    let rap = Setup::new().tools(&tools).limit("lost_after = \"300ms\"").start();
    let thread = rap.open("call work {}").await;
    let work = tools.invocation().await;
    rap.until_line(&thread, LOST).await;
    rap.until_idle(&thread).await;
    for _ in 0..2 {
        work.returns("after all").await;
    }
    let is_late = |line: &String| line.starts_with("result ") && line.ends_with(": after all");
    until("the late result", async || rap.story(&thread).await.iter().any(is_late).then_some(())).await;
    rap.until_idle(&thread).await;
    let story = rap.story(&thread).await;
    assert_eq!(story.iter().filter(|line| is_late(line)).count(), 1, "{story:#?}");
}

#[tokio::test]
async fn any_other_answer_means_that_it_is_not_known() {
    let tools = Tools::start().await;
    let gone = || Reply::json(&json!({"alive": false}));
    let answers =
        [Reply::json(&json!({"alive": true})), Reply::Status(404), Reply::json(&json!("no")), gone()];
    // Once is not enough, and whoever is alive in between begins anew.
    for answer in
        answers.into_iter().chain([Reply::json(&json!({"alive": true})), gone(), Reply::Status(500)])
    {
        tools.answer_next(STATUS, answer);
    }
    tools.answer_always(STATUS, Reply::json(&json!({"alive": true})));
    let (rap, thread) = acknowledged(&tools).await;
    until("all answers", async || (tools.count(STATUS) >= 8).then_some(())).await;
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
}

#[tokio::test]
async fn a_runtime_that_is_killed_between_the_two_words_needs_only_the_second() {
    let tools = Tools::start().await;
    let gone = || Reply::json(&json!({"alive": false}));
    tools.answer_next(STATUS, gone());
    tools.answer_next(STATUS, Reply::Hang);
    tools.answer_always(STATUS, gone());
    let (rap, thread) = acknowledged(&tools).await;
    // The first word is noted before the server is asked for the second.
    until("the second question", async || (tools.count(STATUS) == 2).then_some(())).await;
    let rap = rap.restarted();
    rap.until_line(&thread, LOST).await;
    rap.until_idle(&thread).await;
    assert_eq!(tools.count(STATUS), 3);
    let rap = rap.restarted();
    let story = rap.story(&thread).await;
    assert_eq!(story.iter().filter(|line| *line == LOST).count(), 1, "{story:?}");
    assert_eq!(tools.count(INVOKE), 1);
}

#[tokio::test]
async fn a_result_that_comes_while_its_call_is_doubted_settles_it_also_over_kill_9() {
    let tools = Tools::start().await;
    tools.answer_next(STATUS, Reply::json(&json!({"alive": false})));
    tools.answer_always(STATUS, Reply::Hang);
    let rap = Setup::new().tools(&tools).limit("lost_after = \"300ms\"").start();
    let thread = rap.open("call work {}").await;
    let work = tools.invocation().await;
    until("the second question", async || (tools.count(STATUS) == 2).then_some(())).await;
    work.returns("here").await;
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: work: here").await;
    rap.until_idle(&thread).await;
    assert!(!rap.story(&thread).await.iter().any(|line| line == LOST));
}
