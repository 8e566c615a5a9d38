//! Budgets: a session that has used its budget waits for a person.

use rap_testkit::{Rap, Setup, Tools};
use serde_json::json;

#[tokio::test]
async fn a_session_over_budget_holds_input_until_it_is_resumed() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("turns_in_total = 2").start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await.returns("one").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "say two").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    let why = "this session has used its budget of 2 turns in total; resuming it renews the budget";
    assert_eq!(paused["why"], why);
    rap.say(&thread, "say three").await;
    let rap = rap.restarted();
    let held = rap.thread(&thread).await;
    assert_eq!((&held["status"], &held["held"]), (&json!("needs_you"), &json!(1)));
    rap.act(&thread, "resume").await.expect(202);
    rap.until_idle(&thread).await;
    assert!(rap.transcript(&thread).await.iter().any(|line| line == "assistant: three"));
    rap.say(&thread, "say four").await;
    rap.until_line(&thread, "assistant: four").await;
    rap.say(&thread, "say five").await;
    rap.until_status(&thread, "needs_you").await;
}

#[tokio::test]
async fn children_spend_the_budget_of_their_session() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("turns_per_hour = 2").start();
    let thread = rap.open("call spawn_thread {\"instructions\": \"say dug\"}").await;
    let child = rap.child(&thread).await;
    // Three turns in total: the child's turn is counted when it is spawned, the parent's second one after it.
    rap.until_line(&child, "assistant: dug").await;
    rap.until_status(&thread, "needs_you").await;
    rap.act(&thread, "resume").await.expect(202);
    rap.until_idle(&thread).await;
}

#[tokio::test]
async fn turns_and_tokens_are_counted_per_hour_and_in_total() {
    // Each answer has two words, which the scripted model counts as tokens.
    let table = [
        ("tokens_per_hour = 3", "3 tokens in this hour"),
        ("tokens_in_total = 3", "3 tokens in total"),
        ("turns_per_hour = 2", "2 turns in this hour"),
    ];
    let tools = Tools::start().await;
    for (limit, reason) in table {
        let rap = Setup::new().tools(&tools).limit(limit).start();
        let thread = rap.open("say one more").await;
        rap.until_idle(&thread).await;
        rap.say(&thread, "say two more").await;
        rap.until_line(&thread, "assistant: two more").await;
        rap.until_idle(&thread).await;
        rap.say(&thread, "say three more").await;
        let paused = rap.until_status(&thread, "needs_you").await;
        assert!(paused["why"].as_str().unwrap().contains(reason), "{limit}: {paused}");
        rap.act(&thread, "resume").await.expect(202);
        rap.until_line(&thread, "assistant: three more").await;
    }
}

/// Sends a message and waits for its answer.
async fn answered(rap: &Rap, thread: &str, word: &str) {
    rap.say(thread, &format!("say {word}")).await;
    rap.until_line(thread, &format!("assistant: {word}")).await;
    rap.until_idle(thread).await;
}

#[tokio::test]
async fn usage_is_counted_once_whenever_the_runtime_is_killed() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("turns_in_total = 3").start();
    let thread = rap.open("say one").await;
    rap.until_idle(&thread).await;
    // kill -9 during a model request, which is repeated and counts once.
    rap.say(&thread, "sleep 0.3\nsay two").await;
    rap.until_status(&thread, "running").await;
    let rap = rap.restarted().restarted();
    rap.until_line(&thread, "assistant: two").await;
    rap.until_idle(&thread).await;
    let rap = rap.restarted();
    answered(&rap, &thread, "three").await;
    rap.say(&thread, "say four").await;
    rap.until_status(&thread, "needs_you").await;
    // kill -9 right after resuming, which allows three more turns.
    rap.act(&thread, "resume").await.expect(202);
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: four").await;
    rap.until_idle(&thread).await;
    answered(&rap, &thread, "five").await;
    answered(&rap, &thread, "six").await;
    rap.say(&thread, "say seven").await;
    let rap = rap.restarted();
    rap.until_status(&thread, "needs_you").await;
}

#[tokio::test]
async fn without_a_budget_only_a_model_that_talks_to_itself_is_paused() {
    let tools = Tools::start().await;
    let talks = "repeat = true\n[[turn]]\ncalls = [{name = \"nothing\", arguments = {}}]";
    let rap = Setup::new().tools(&tools).start_with_script(talks);
    let thread = rap.open("go").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    let why = "paused: 50 turns in a row without new external input; resume the thread to continue";
    assert_eq!((&paused["why"], &paused["turn"]), (&json!(why), &json!(50)));
    let rap = rap.restarted();
    rap.act(&thread, "resume").await.expect(202);
    rap.until(&thread, "paused again", |thread| thread["status"] == "needs_you" && thread["turn"] == 100)
        .await;
}

/// Each resume allows as many turns as the budget has, however many threads wait.
#[tokio::test]
async fn threads_beyond_the_budget_continue_one_after_the_other() {
    let tools = Tools::start().await;
    let mut rap = Setup::new().tools(&tools).limit("turns_in_total = 1").start();
    let thread = rap.open("call spawn_thread {\"instructions\": \"say dug\"}\ncall spawn_thread {\"instructions\": \"say dug\"}").await;
    rap.until(&thread, "two children", |thread| thread["children"] == 2).await;
    let mut waiting = vec![thread.clone()];
    waiting.extend(rap.children(&thread).await.iter().map(|child| child["id"].as_str().unwrap().to_owned()));
    for left in (0..3).rev() {
        for waits in &waiting {
            assert_eq!(rap.thread(waits).await["status"], "needs_you");
        }
        rap.act(&waiting[0], "resume").await.expect(202);
        rap = rap.restarted();
        let mut still = Vec::new();
        for waits in waiting {
            let seen = rap.until(&waits, "idle or paused", |thread| thread["status"] != "running").await;
            still.extend((seen["status"] == "needs_you").then_some(waits));
        }
        assert_eq!(still.len(), left);
        waiting = still;
    }
    assert!(rap.transcript(&thread).await.last().unwrap().starts_with("assistant: spawn_thread: thread "));
}

#[tokio::test]
async fn wakes_do_not_include_messages_of_people() {
    let tools = Tools::start().await;
    let table =
        [("wakes_per_hour = 2", "limit of 2 wakes per hour"), ("wakes_in_total = 2", "2 wakes in total")];
    for (limit, reason) in table {
        let rap = Setup::new().tools(&tools).limit(limit).start();
        let thread = rap.open("call watch").await;
        let watch = tools.invocation().await;
        watch.confirms("watching").await;
        rap.until_idle(&thread).await;
        for number in 0..3 {
            rap.say(&thread, &format!("say person {number}")).await;
            rap.until_line(&thread, &format!("assistant: person {number}")).await;
        }
        for number in 0..2 {
            watch.says(&watch.inline(&format!("event {number}"))).await;
            rap.until_line(&thread, &format!("assistant: watch: event {number}")).await;
        }
        watch.says(&watch.inline("event 2")).await;
        let paused = rap.until_status(&thread, "needs_you").await;
        assert!(paused["why"].as_str().unwrap().contains(reason), "{limit}: {paused}");
        rap.act(&thread, "resume").await.expect(202);
        rap.until_line(&thread, "assistant: watch: event 2").await;
    }
}
