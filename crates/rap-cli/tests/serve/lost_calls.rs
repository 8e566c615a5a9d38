//! Lost calls: the runtime asks the tool server whether a call is alive. Two negative answers settle the call.

use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::json;

const STATUS: &str = "/tool_call_status";
const LOST: &str = "result call_1_1: Error: the tool server does not know this call any more; it was lost";

async fn acknowledged(tools: &Tools) -> (Rap, String) {
    let rap = Setup::new().tools(tools).limit("lost_after = \"300ms\"").start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await;
    (rap, thread)
}

#[tokio::test]
async fn a_call_unknown_to_its_server_is_settled_at_the_second_answer() {
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
async fn a_late_result_of_a_lost_call_arrives_once() {
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
    until("the late result", async || rap.transcript(&thread).await.iter().any(is_late).then_some(())).await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    assert_eq!(transcript.iter().filter(|line| is_late(line)).count(), 1, "{transcript:#?}");
}

#[tokio::test]
async fn any_other_answer_leaves_the_call_open() {
    let tools = Tools::start().await;
    let gone = || Reply::json(&json!({"alive": false}));
    let answers =
        [Reply::json(&json!({"alive": true})), Reply::Status(404), Reply::json(&json!("no")), gone()];
    // One negative answer is not enough, and a positive one in between resets the count.
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
async fn the_first_answer_survives_a_kill() {
    let tools = Tools::start().await;
    let gone = || Reply::json(&json!({"alive": false}));
    tools.answer_next(STATUS, gone());
    tools.answer_next(STATUS, Reply::Hang);
    tools.answer_always(STATUS, gone());
    let (rap, thread) = acknowledged(&tools).await;
    // The first answer is stored before the server is asked again.
    until("the second question", async || (tools.count(STATUS) == 2).then_some(())).await;
    let rap = rap.restarted();
    rap.until_line(&thread, LOST).await;
    rap.until_idle(&thread).await;
    assert_eq!(tools.count(STATUS), 3);
    let rap = rap.restarted();
    let transcript = rap.transcript(&thread).await;
    assert_eq!(transcript.iter().filter(|line| *line == LOST).count(), 1, "{transcript:?}");
    assert_eq!(tools.count(INVOKE), 1);
}

#[tokio::test]
async fn a_result_between_the_two_answers_settles_the_call() {
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
    assert!(!rap.transcript(&thread).await.iter().any(|line| line == LOST));
}
