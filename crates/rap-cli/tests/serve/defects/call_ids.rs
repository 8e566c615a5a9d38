//! Ids of calls are unique, whatever ids the model uses.

use std::collections::HashSet;

use serde_json::json;

use rap_testkit::model::ModelServer;
use rap_testkit::tools::Call;
use rap_testkit::{Rap, Setup, Tools};

#[track_caller]
fn check_id(id: &str) {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    assert!((1..=40).contains(&id.len()) && id.bytes().all(plain), "{id}");
}

/// Calls of two sessions whose models use the same ids.
async fn calls_with_equal_model_ids(tools: &Tools, model: &ModelServer, rap: &Rap) -> Vec<(String, Call)> {
    let mut calls = Vec::new();
    for n in 1..=2 {
        model.calls(&[("call_1", "work", json!({"n": n}))]);
        let thread = rap.open("go").await;
        let call = tools.invocation().await;
        assert_eq!((call.thread(), call.arguments()), (thread.as_str(), &json!({"n": n})));
        model.question().await;
        calls.push((thread, call));
    }
    calls
}

#[tokio::test]
async fn ids_on_the_wire_are_unique_though_models_repeat_theirs() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    let calls = calls_with_equal_model_ids(&tools, &model, &rap).await;
    let (first, second) = (&calls[0].1, &calls[1].1);
    assert_ne!(first.id(), second.id(), "a tool server may key its work by the id alone");
    for (_, call) in &calls {
        check_id(call.id());
        assert_eq!(call.request.body["call_id"], "call_1", "the model's own id travels along");
    }
    // Each result is matched to its call, in reverse order.
    for (n, (thread, call)) in calls.iter().enumerate().rev() {
        model.says("Done.");
        call.returns(&format!("result {n}")).await;
        rap.until_line(thread, "assistant: Done.").await;
        let question = model.question().await;
        let [.., asked, result] = question["messages"].as_array().unwrap().as_slice() else { unreachable!() };
        assert_eq!(asked["tool_calls"][0]["id"], call.id(), "prompts use our id as well");
        assert_eq!(
            (&result["tool_call_id"], &result["content"]),
            (&json!(call.id()), &json!(format!("result {n}")))
        );
        let history = rap.raw_history(thread).await;
        assert_eq!(history[1]["calls"][0]["id"], call.id());
        assert_eq!(history[2]["call_id"], call.id());
    }
}

#[tokio::test]
async fn ids_of_calls_and_events_never_repeat_within_a_thread() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    let mut seen = HashSet::new();
    for _ in 0..2 {
        model.calls(&[("call_1", "watch", json!({}))]);
        let thread = rap.open("go").await;
        model.says("Watching.");
        let watch = tools.invocation().await;
        assert_eq!(watch.request.body["call_id"], "call_1");
        watch.confirms("watching").await;
        rap.until_idle(&thread).await;
        model.says("Heard.");
        watch.says(&watch.inline("ding")).await;
        rap.until_line(&thread, "assistant: Heard.").await;
        model.calls(&[("call_1", "work", json!({})), ("call_1", "work", json!({}))]);
        rap.say(&thread, "go").await;
        model.says("Done.");
        for call in tools.invocations(2).await {
            call.returns("done").await;
        }
        rap.until_line(&thread, "assistant: Done.").await;
        let history = rap.raw_history(&thread).await;
        let calls = history.iter().filter_map(|entry| entry["calls"].as_array()).flatten();
        for id in calls.map(|call| call["id"].as_str().unwrap()) {
            check_id(id);
            assert!(seen.insert(id.to_owned()), "{id} is there twice");
        }
    }
    assert_eq!(seen.len(), 8);
}
