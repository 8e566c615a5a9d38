//! Interaction of tools with people: sign-ins, choices and views.

use rap_testkit::peer::Reply;
use rap_testkit::tools::{Call, INVOKE, with};
use rap_testkit::{Rap, Setup, Tools};
use serde_json::{Value, json};

async fn called() -> (Tools, Rap, String, Call) {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    (tools, rap, thread, call)
}

async fn choose(rap: &Rap, thread: &str, body: Value) -> rap_testkit::http::Response {
    rap.post(&format!("/v1/threads/{thread}/calls/call_1_1/choice"), &body).await
}

/// Proves: TR-10
#[tokio::test]
async fn a_sign_in_is_in_the_inbox_and_its_url_nowhere_else() {
    let (tools, rap, thread, call) = called().await;
    let url = "https://sign.example/in?state=topsecret";
    call.says(&call.oauth(url)).await;
    let shown = rap.until_status(&thread, "needs_you").await;
    assert_eq!(shown["waiting_on"][0]["call_id"], "call_1_1");
    let inbox = rap.listing("inbox").await;
    assert_eq!(inbox.len(), 1);
    let item = &inbox[0];
    assert_eq!((&item["kind"], &item["auth_url"]), (&json!("oauth"), &json!(url)));
    let place = (&item["thread_id"], &item["call_id"], &item["tool"]);
    assert_eq!(place, (&json!(thread), &json!("call_1_1"), &json!("work")));
    for path in [format!("/v1/threads/{thread}"), format!("/v1/threads/{thread}/history"), "/v1/calls".into()]
    {
        assert!(!rap.get(&path).await.body.to_string().contains("topsecret"), "{path}");
    }
    let files = std::fs::read_dir(rap.directory()).unwrap();
    for file in files.map(|file| file.unwrap().path()).filter(|path| path.is_file()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!bytes.windows(9).any(|window| window == b"topsecret"), "{} holds the URL", file.display());
    }
    // A new URL of the same call replaces the old one. A sign-in cannot be answered by a choice.
    call.says(&call.oauth("https://sign.example/again")).await;
    let inbox = rap.listing("inbox").await;
    assert_eq!((inbox.len(), &inbox[0]["auth_url"]), (1, &json!("https://sign.example/again")));
    assert_eq!(choose(&rap, &thread, json!({"selected": 0})).await.refusal(), (404, "no_question"));

    call.returns("signed in").await;
    rap.until_line(&thread, "assistant: work: signed in").await;
    assert!(rap.listing("inbox").await.is_empty());
    assert!(!rap.log().contains("sign.example"));
    assert_eq!(tools.count(INVOKE), 1, "the invocation is not repeated");
    call.says(&call.oauth(url)).await;
    assert!(rap.listing("inbox").await.is_empty(), "the call is settled");
}

#[tokio::test]
async fn a_choice_reaches_the_tool_that_asked() {
    let (tools, rap, thread, call) = called().await;
    let answers = format!("{}/answers?token=topsecret", tools.url);
    for _ in 0..2 {
        call.says(&call.question(&answers)).await;
    }
    rap.until_status(&thread, "needs_you").await;
    let inbox = rap.listing("inbox").await;
    assert_eq!(inbox.len(), 1, "the same question twice is one");
    let item = with(inbox[0].clone(), json!({"asked_at": null}));
    let expected = json!({
        "kind": "choice",
        "prompt": "Which colour?",
        "choices": ["red", "green"],
        "default": 1,
        "thread_id": thread,
        "call_id": "call_1_1",
        "tool": "work",
        "asked_at": null,
        "arguments": {},
    });
    assert_eq!(item, expected);

    assert_eq!(choose(&rap, &thread, json!({"selected": 2})).await.refusal(), (400, "no_such_choice"));
    for body in [
        json!({}),
        json!({"selected": 0, "dismiss": true}),
        json!({"selected": -1}),
        json!({"selected": "red"}),
    ] {
        assert_eq!(choose(&rap, &thread, body.clone()).await.refusal(), (400, "invalid"), "{body}");
    }
    choose(&rap, &thread, json!({"selected": 0})).await.expect(202);
    let asked = tools.next("/answers").await;
    assert_eq!(asked.body, json!({"id": call.id(), "selected": 0}));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    assert_eq!(choose(&rap, &thread, json!({"selected": 1})).await.refusal(), (404, "no_question"));
    // A repeat of an answered question is not a new question.
    call.says(&call.question(&answers)).await;
    assert!(rap.listing("inbox").await.is_empty());
    call.returns("red it is").await;
    rap.until_line(&thread, "assistant: work: red it is").await;
    assert_eq!(tools.count("/answers"), 1);
    assert!(!rap.log().contains("topsecret"));
}

#[tokio::test]
async fn an_answer_is_retried_and_dismissing_sends_the_default() {
    let (tools, rap, thread, call) = called().await;
    tools.answer_next("/answers", Reply::Status(503));
    call.says(&call.question(&format!("{}/answers", tools.url))).await;
    choose(&rap, &thread, json!({"dismiss": true})).await.expect(202);
    let first = tools.next("/answers").await;
    assert_eq!(first.body, json!({"id": call.id(), "selected": 1}));
    // The second question of the same call waits for the first.
    call.says(&call.question(&format!("{}/other", tools.url))).await;
    assert_eq!(rap.listing("inbox").await.len(), 1);
    let rap = rap.restarted();
    assert_eq!(tools.next("/answers").await.raw, first.raw);
    choose(&rap, &thread, json!({"selected": 0})).await.expect(202);
    assert_eq!(tools.next("/other").await.body["selected"], 0);
    call.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}

#[tokio::test]
async fn an_answer_refused_by_the_tool_ends_its_call() {
    let (tools, rap, thread, call) = called().await;
    tools.answer_next("/answers", Reply::Status(404));
    call.says(&call.question(&format!("{}/answers", tools.url))).await;
    choose(&rap, &thread, json!({"selected": 0})).await.expect(202);
    let error = "Error: the user's answer could not be delivered to the tool: answered 404";
    rap.until_line(&thread, &format!("result call_1_1: {error}")).await;
    rap.until_idle(&thread).await;
    assert_eq!(tools.count("/answers"), 1);
}

#[tokio::test]
async fn a_question_ends_with_its_call() {
    let (tools, rap, thread, call) = called().await;
    call.says(&call.question(&format!("{}/answers", tools.url))).await;
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    rap.until_idle(&thread).await;
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(choose(&rap, &thread, json!({"selected": 0})).await.refusal(), (404, "no_question"));
    call.says(&call.question(&format!("{}/answers", tools.url))).await;
    assert!(rap.listing("inbox").await.is_empty());
    assert_eq!(tools.count("/answers"), 0);
}

#[tokio::test]
async fn too_many_questions_are_refused() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("questions_per_thread = 1").start();
    rap.open("call work").await;
    let call = tools.invocation().await;
    call.says(&call.question("https://a.example/1")).await;
    assert_eq!(call.post(&call.question("https://a.example/2")).await.refusal(), (503, "thread_full"));
    assert_eq!(rap.listing("inbox").await.len(), 1);
}

#[tokio::test]
async fn the_latest_view_of_each_type_is_kept_and_never_reaches_the_model() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("view_bytes = \"1KiB\"").limit("views_per_thread = 2").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    call.says(&call.view("progress", json!({"percent": 1}))).await;
    call.says(&call.view("plan", json!(["a", "b"]))).await;
    call.says(&call.view("progress", Value::Null)).await;
    call.says(&call.view("progress", json!({"percent": 2}))).await;
    let large = call.post(&call.view("progress", json!("x".repeat(1024)))).await;
    assert_eq!(large.refusal(), (413, "view_too_large"));
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    let mut shown: Vec<String> = views["views"]
        .as_array()
        .unwrap()
        .iter()
        .map(|view| format!("{} {} {}", view["view_type"], view["content"], view["server"]))
        .collect();
    shown.sort();
    let server = json!(tools.url);
    assert_eq!(
        shown,
        [format!("\"plan\" [\"a\",\"b\"] {server}"), format!("\"progress\" {{\"percent\":2}} {server}")]
    );
    assert_eq!(rap.thread(&thread).await["turn"], 1);
    assert_eq!(rap.transcript(&thread).await.len(), 2);

    call.says(&call.view("third", json!(3))).await;
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    assert_eq!(views["views"].as_array().unwrap().len(), 2, "there is a bound: {views}");
    // A view that follows its call's result is kept.
    call.returns("done").await;
    rap.until_idle(&thread).await;
    call.says(&call.view("third", json!("late"))).await;
    let views = rap.restarted().get(&format!("/v1/threads/{thread}/views")).await.expect(200).to_string();
    assert!(views.contains("late"), "{views}");
}

/// A subscription may send views while it is active.
#[tokio::test]
async fn a_subscription_may_show_views() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.view("chart", json!([1, 2]))).await;
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    assert_eq!(views["views"][0]["content"], json!([1, 2]));
    assert_eq!(rap.thread(&thread).await["turn"], 2);
}
