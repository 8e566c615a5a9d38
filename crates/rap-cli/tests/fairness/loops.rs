//! Loops of models and failed children are stopped by limits and block nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tokio::sync::watch;

use crate::stage::{Answer, Model, Question};
use rap_testkit::tools::Call;
use rap_testkit::{Rap, Setup, Tools, until};

/// Thread whose model has subscribed by `watch`.
async fn subscribed(rap: &Rap, tools: &Tools) -> (String, Call) {
    let thread = rap.open("subscribe").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    (thread, watch)
}

/// The API key is invalid for a while, and as many children fail as a thread may have.
#[tokio::test]
async fn children_that_failed_do_not_block_later_events() {
    const CHILDREN: usize = 2;
    let wrong_key = Arc::new(AtomicBool::new(false));
    let tools = Tools::start().await;
    let model = Model::start({
        let wrong_key = Arc::clone(&wrong_key);
        move |question: Arc<Question>| {
            std::future::ready(if wrong_key.load(Ordering::SeqCst) {
                Answer::Fails(401, None)
            } else if question.last() == "subscribe" {
                Answer::Calls(vec![("watch", json!({}))])
            } else {
                Answer::Says("Handled.".into())
            })
        }
    })
    .await;
    let setup = Setup::new().tools(&tools).model(&model.lines());
    let rap = setup.limit(&format!("children_per_thread = {CHILDREN}")).start();
    let (thread, watch) = subscribed(&rap, &tools).await;

    wrong_key.store(true, Ordering::SeqCst);
    for number in 0..CHILDREN {
        let event = format!("event of the bad time, {number}");
        watch.says(&watch.event(&event)).await;
        model.requests.until_count(&event, 1, |question| question.mentions(&event)).await;
        let stuck = async || {
            let children = rap.children(&thread).await;
            let over = |status: &str| ["failed", "closed"].contains(&status);
            let all = children.iter().all(|child| over(child["status"].as_str().unwrap()));
            (children.len() > number && all).then_some(())
        };
        until("the child has failed", stuck).await;
    }
    wrong_key.store(false, Ordering::SeqCst);

    let event = "event of the good time";
    watch.says(&watch.event(event)).await;
    model.requests.until_count("a child for the new event", 1, |question| question.mentions(event)).await;
    let handled = async || {
        for child in rap.children(&thread).await {
            let transcript = rap.transcript(child["id"].as_str().unwrap()).await;
            let heard = transcript.iter().any(|line| line.ends_with(event));
            if heard && transcript.iter().any(|line| line == "assistant: Handled.") {
                return Some(());
            }
        }
        None
    };
    until("the new event is handled", handled).await;
}

#[tokio::test]
async fn a_model_that_only_sleeps_briefly_is_paused() {
    let naps = "repeat = true\n[[turn]]\ncalls = [{name = \"sleep\", arguments = {seconds = 0.05}}]";
    let rap = Setup::new().limit("turns_per_wake = 10").start_with_script(naps);
    let thread = rap.open("go").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    assert_eq!(paused["turn"], 10, "{paused}");
    rap.act(&thread, "resume").await.expect(202);
    rap.until(&thread, "paused again", |thread| thread["status"] == "needs_you" && thread["turn"] == 20)
        .await;
}

/// Each answers every message of the other.
#[tokio::test]
async fn a_parent_and_a_child_that_only_message_each_other_are_paused() {
    const TURNS: usize = 6;
    let (known, child) = watch::channel(String::new());
    let model = Model::start(move |question: Arc<Question>| {
        let mut child = child.clone();
        async move {
            if question.last() == "spawn" {
                return Answer::Calls(vec![("spawn_thread", json!({"instructions": "Say: thanks"}))]);
            }
            if !question.last().ends_with("thanks") {
                return Answer::Says("They were told.".into());
            }
            if question.is_of_child() {
                return Answer::Calls(vec![("report_to_parent", json!({"report": "thanks"}))]);
            }
            let child = child.wait_for(|child| !child.is_empty()).await.unwrap().clone();
            Answer::Calls(vec![("send_message_to_child", json!({"thread_id": child, "message": "thanks"}))])
        }
    })
    .await;
    let setup = Setup::new().model(&model.lines());
    let rap = setup.limit(&format!("turns_per_wake = {TURNS}")).start();
    let parent = rap.open("spawn").await;
    let child = rap.child(&parent).await;
    known.send(child.clone()).unwrap();
    let stopped = async || {
        let threads = [rap.thread(&parent).await, rap.thread(&child).await];
        threads.iter().any(|thread| thread["status"] == "needs_you").then_some(())
    };
    until("one of them is stopped", stopped).await;
    let turns = model.requests.look(<[_]>::len);
    assert!(turns <= 6 * TURNS, "{turns} turns");
}

/// Only events count towards the limit. People are still answered.
#[tokio::test]
async fn past_its_wakes_per_hour_a_session_holds_events_and_still_answers_people() {
    const WAKES: usize = 3;
    let tools = Tools::start().await;
    let model = Model::start(async |question: Arc<Question>| match question.last() {
        "subscribe" => Answer::Calls(vec![("watch", json!({}))]),
        last => Answer::Says(format!("Heard: {last}")),
    })
    .await;
    let setup = Setup::new().tools(&tools).model(&model.lines());
    let rap = setup.limit(&format!("wakes_per_hour = {WAKES}")).start();
    let (thread, watch) = subscribed(&rap, &tools).await;
    // The model has answered it.
    let heard = async |text: &str| {
        let answered = async || {
            let transcript = rap.transcript(&thread).await;
            let at = transcript.iter().position(|line| line.ends_with(text))?;
            transcript[at..].iter().any(|line| line.starts_with("assistant: Heard")).then_some(())
        };
        until(text, answered).await;
    };
    for number in 1..=WAKES {
        rap.say(&thread, &format!("person {number}")).await;
        heard(&format!("person {number}")).await;
        watch.says(&watch.inline(&format!("event {number}"))).await;
        heard(&format!("event {number}")).await;
    }

    // The event is accepted, and another session is served long before this one gets it.
    let held = async |text: &str| {
        watch.says(&watch.inline(text)).await;
        for number in 0..3 {
            let other = rap.open(&format!("other {number}")).await;
            rap.until_line(&other, &format!("assistant: Heard: other {number}")).await;
        }
        assert_eq!(model.requests.count(|question| question.mentions(text)), 0, "{text}");
    };
    held("first event too many").await;
    rap.say(&thread, "person at the limit").await;
    heard("person at the limit").await;
    held("second event too many").await;
    rap.act(&thread, "resume").await.expect(202);
    for event in ["first event too many", "second event too many"] {
        heard(event).await;
    }
    let transcript = rap.transcript(&thread).await;
    for event in ["first event too many", "second event too many"] {
        let results = transcript.iter().filter(|line| line.starts_with("result ") && line.ends_with(event));
        assert_eq!(results.count(), 1, "{event}: {transcript:#?}");
    }
}
