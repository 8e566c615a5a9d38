//! Callbacks: views after a result, and refused results.

use serde_json::{Value, json};

use rap_testkit::http;
use rap_testkit::tools::with;
use rap_testkit::{Rap, Setup, Tools};

async fn views(rap: &Rap, thread: &str) -> Vec<Value> {
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    views["views"].as_array().unwrap().clone()
}

/// Tool servers send a result first and its diff right after.
#[tokio::test]
async fn a_view_that_follows_the_result_of_its_call_is_kept() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {}\ncall work {}").await;
    let calls = tools.invocations(2).await;
    calls[0].returns("done").await;
    calls[0].says(&calls[0].view("diff", json!({"patch": "+1"}))).await;
    let shown = views(&rap, &thread).await;
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert_eq!((&shown[0]["view_type"], &shown[0]["content"]), (&json!("diff"), &json!({"patch": "+1"})));
    assert_eq!(shown[0]["server"], json!(tools.url));
    calls[1].returns("done").await;
    let turn = rap.until_idle(&thread).await["turn"].clone();
    calls[1].says(&calls[1].view("diff", json!({"patch": "+2"}))).await;
    let rap = rap.restarted();
    assert_eq!(views(&rap, &thread).await[0]["content"], json!({"patch": "+2"}));
    assert_eq!(rap.thread(&thread).await["turn"], turn, "a view does not wake the model");
}

#[tokio::test]
async fn a_view_of_an_interrupted_call_is_not_kept() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {}").await;
    let (interrupted, other) = (tools.invocation().await, rap.open("call work {}").await);
    let returned = tools.invocation().await;
    rap.act(&thread, "interrupt").await.expect(202);
    for (call, thread, kept) in [(&returned, &other, 1), (&interrupted, &thread, 0)] {
        call.returns("done").await;
        rap.until_idle(thread).await;
        call.post(&call.view("diff", json!("+1"))).await;
        assert_eq!(views(&rap, thread).await.len(), kept, "{thread}");
    }
}

/// Problem of the first open call of a thread, as shown to people.
async fn problem(rap: &Rap, thread: &str) -> Value {
    rap.thread(thread).await["waiting_on"][0]["problem"].clone()
}

/// Proves: TR-01
#[tokio::test]
async fn a_result_that_is_refused_shows_as_the_problem_of_its_call() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("body = \"4KiB\"").start();
    let thread = rap.open("call work {}").await;
    let call = tools.invocation().await;
    assert_eq!(problem(&rap, &thread).await, Value::Null);
    // A request without the right token changes nothing.
    let forged = format!("{}A", call.url());
    assert_eq!(http::post(&forged, &json!({"type": "nonsense"})).await.status, 401);
    assert_eq!(problem(&rap, &thread).await, Value::Null);

    assert_eq!(call.post(&call.result(&"x".repeat(5000))).await.status, 413);
    assert_eq!(problem(&rap, &thread).await, "refused (413: too large)");
    let rap = rap.restarted();
    assert_eq!(problem(&rap, &thread).await, "refused (413: too large)");
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    assert_eq!(call.post(&with(call.result("x"), json!({"text": 7}))).await.status, 400);
    let shown = problem(&rap, &thread).await;
    assert!(shown.as_str().is_some_and(|shown| shown.starts_with("refused (400: ")), "{shown}");

    call.returns("short").await;
    rap.until_line(&thread, "assistant: work: short").await;
    assert_eq!(rap.until_idle(&thread).await["waiting_on"], json!([]));
    assert!(!rap.transcript(&thread).await.iter().any(|line| line.contains("refused")));
}

/// Each call has its own problem; a returned call has none.
#[tokio::test]
async fn a_valid_result_clears_the_problem_of_its_call_and_of_no_other() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {\"n\": 1}\ncall work {\"n\": 2}").await;
    let calls = tools.invocations(2).await;
    for call in &calls {
        assert_eq!(call.post(&with(call.result("x"), json!({"text": 7}))).await.status, 400);
    }
    let waiting = rap.thread(&thread).await["waiting_on"].clone();
    let with_problem = |waiting: &Value| -> Vec<String> {
        let items = waiting.as_array().unwrap().iter().filter(|item| item["problem"].is_string());
        items.map(|item| item["call_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(with_problem(&waiting).len(), 2, "{waiting}");
    calls[0].returns("done").await;
    let waiting = rap.thread(&thread).await["waiting_on"].clone();
    assert_eq!(with_problem(&waiting), [calls[1].name()], "{waiting}");
}
