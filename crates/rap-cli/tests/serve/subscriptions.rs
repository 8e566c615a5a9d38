//! Subscriptions: confirmation, events in the thread or in a child, and the end.

use rap_testkit::model::ModelServer;
use rap_testkit::tools::{CANCEL, CLOSE, Call, with};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

const ACTIVE: &str = "interrupt:call_1_1 (subscription remains active)";
const ENDED: &str = "interrupt:call_1_1 (subscription has ended)";

/// Subscribes in a new thread.
async fn subscribed(tools: &Tools, rap: &Rap) -> (String, Call) {
    let thread = rap.open("call watch {\"topic\": \"x\"}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    (thread, watch)
}

const BEGIN: [&str; 4] = [
    "user: call watch {\"topic\": \"x\"}",
    "call call_1_1 watch {\"topic\":\"x\"}",
    "result call_1_1: watching",
    "assistant: watch: watching",
];

/// Proves: SE-13
#[tokio::test]
async fn a_confirmed_subscription_is_tracked_and_listed() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, _) = subscribed(&tools, &rap).await;
    let shown = rap.thread(&thread).await;
    assert_eq!(shown["subscriptions"][0]["call_id"], "call_1_1");
    assert_eq!(shown["subscriptions"][0]["tool"], "watch");
    assert!(shown["waiting_on"].as_array().unwrap().is_empty());
    let rap = rap.restarted();
    let listed = rap.listing("subscriptions").await;
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0]["thread_id"], &listed[0]["call_id"]), (&json!(thread), &json!("call_1_1")));
    assert_eq!((&listed[0]["tool"], &listed[0]["server"]), (&json!("watch"), &json!(tools.url)));
}

/// Proves: SE-02, SE-05, SE-06, SE-07, SE-08
#[tokio::test]
async fn an_associative_event_becomes_a_synthetic_call() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    for text in ["one", "two"] {
        watch.says(&watch.inline(text)).await;
        rap.until_line(&thread, &format!("assistant: watch: {text}")).await;
    }
    let call = |id: &str| format!("synthetic call {id} watch {{\"kind\":\"{ACTIVE}\",\"topic\":\"x\"}}");
    let events = [
        call("rap_1"),
        "result rap_1: one".into(),
        "assistant: watch: one".into(),
        call("rap_2"),
        "result rap_2: two".into(),
        "assistant: watch: two".into(),
    ];
    let transcript = rap.transcript(&thread).await;
    assert_eq!((&transcript[..4], &transcript[4..]), (&BEGIN.map(String::from)[..], &events[..]));
    assert!(rap.children(&thread).await.is_empty());
}

/// Proves: SE-07
#[tokio::test]
async fn an_argument_named_kind_is_kept_under_another_name() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {\"kind\": \"mine\", \"kind_\": 2}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.inline("one")).await;
    rap.until_line(&thread, "assistant: watch: one").await;
    let expected =
        format!("synthetic call rap_1 watch {{\"kind\":\"{ACTIVE}\",\"kind_\":2,\"kind__\":\"mine\"}}");
    assert_eq!(rap.transcript(&thread).await[4], expected);
}

/// Proves: SE-02, SE-05, SE-09
#[tokio::test]
async fn any_other_event_is_handled_by_a_child_that_is_closed_afterwards() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    watch.says(&watch.event("one")).await;
    let child = rap.child(&thread).await;
    let closed = rap.until_status(&child, "closed").await;
    assert_eq!((&closed["parent"], &closed["root"]), (&json!(thread), &json!(thread)));
    let transcript = rap.transcript(&child).await;
    assert_eq!(transcript[..4], BEGIN);
    assert_eq!(
        transcript[4],
        format!("synthetic call rap_1 watch {{\"kind\":\"{ACTIVE}\",\"topic\":\"x\"}}")
    );
    assert_eq!(transcript[5], "result rap_1: one");
    assert!(transcript[6].starts_with("runtime: You are a thread of your own"), "{}", transcript[6]);
    assert_eq!(transcript[7..], ["assistant: watch: one", "notice: the thread was closed"]);
    let numbers: Vec<u64> =
        rap.history(&child).await.iter().map(|entry| entry["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=9).collect::<Vec<_>>());
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": child}));

    assert_eq!(rap.transcript(&thread).await, BEGIN);
    let parent = rap.until(&thread, "without children", |thread| thread["children"] == 0).await;
    assert_eq!((&parent["status"], &parent["turn"]), (&json!("idle"), &json!(2)));
    assert_eq!(parent["subscriptions"].as_array().unwrap().len(), 1);
}

/// Proves: SE-09
#[tokio::test]
async fn a_child_sees_its_parent_up_to_the_last_settled_point() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    watch.says(&watch.event("one")).await;
    let child = rap.child(&thread).await;
    rap.until_status(&child, "closed").await;
    let transcript = rap.transcript(&child).await;
    assert_eq!(transcript[..4], BEGIN);
    assert_eq!(transcript[5], "result rap_1: one");
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    work.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    assert_eq!(rap.transcript(&child).await, transcript);
}

/// Proves: SE-03, SE-22
#[tokio::test]
async fn a_final_event_ends_the_subscription_inline_and_in_a_child() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    watch.says(&with(watch.inline("last"), json!({"final": true}))).await;
    rap.until_line(&thread, "assistant: watch: last").await;
    assert_eq!(
        rap.transcript(&thread).await[4],
        format!("synthetic call rap_1 watch {{\"kind\":\"{ENDED}\",\"topic\":\"x\"}}")
    );
    assert_eq!(rap.thread(&thread).await["subscriptions"], json!([]));

    let (parent, watch) = subscribed(&tools, &rap).await;
    watch.says(&with(watch.event("last"), json!({"final": true}))).await;
    let child = rap.child(&parent).await;
    rap.until_status(&child, "closed").await;
    assert_eq!(
        rap.transcript(&child).await[4],
        format!("synthetic call rap_1 watch {{\"kind\":\"{ENDED}\",\"topic\":\"x\"}}")
    );
    assert!(rap.listing("subscriptions").await.is_empty());
    assert_eq!(watch.post(&watch.event("more")).await.refusal(), (410, "subscription_ended"));
    // The tool ended the subscription itself, so it is not notified.
    assert_eq!(tools.count(CANCEL), 0);
}

fn events(transcript: &[String]) -> usize {
    transcript.iter().filter(|line| line.starts_with("synthetic call")).count()
}

/// Proves: LC-30, TR-25
#[tokio::test]
async fn an_event_with_the_same_id_is_the_same_event() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    let named = |text: &str, id: &str| with(watch.inline(text), json!({"event_id": id}));
    for _ in 0..3 {
        watch.says(&named("one", "e1")).await;
    }
    rap.until_line(&thread, "assistant: watch: one").await;
    for header in ["webhook-id", "Idempotency-Key", "WEBHOOK-ID"] {
        watch.post_with(&[(header, "e2")], &watch.inline("two")).await.expect(200);
    }
    rap.until_line(&thread, "assistant: watch: two").await;
    // The field takes precedence over the header.
    watch.post_with(&[("webhook-id", "e2")], &named("three", "e3")).await.expect(200);
    rap.until_line(&thread, "assistant: watch: three").await;
    rap.until_idle(&thread).await;
    assert_eq!(events(&rap.transcript(&thread).await), 3);
    let rap = rap.restarted();
    watch.says(&named("one", "e1")).await;
    assert_eq!(events(&rap.transcript(&thread).await), 3);

    // Without an id each event is new, and ids are scoped to a subscription.
    for _ in 0..2 {
        watch.says(&watch.inline("plain")).await;
        rap.until_idle(&thread).await;
    }
    assert_eq!(events(&rap.transcript(&thread).await), 5);
    let (other, second) = subscribed(&tools, &rap).await;
    second.says(&with(second.inline("one"), json!({"event_id": "e1"}))).await;
    rap.until_line(&other, "assistant: watch: one").await;
    // The same for events that are handled in children.
    for _ in 0..2 {
        second.says(&with(second.event("child"), json!({"event_id": "e9"}))).await;
    }
    assert_eq!(rap.children(&other).await.len(), 1);
}

/// Proves: SE-14, SE-16, SE-17, SE-18, SE-22
#[tokio::test]
async fn the_model_cancels_a_subscription_of_its_own_thread() {
    let (tools, other) = (Tools::start().await, Tools::offering("other", &["idle"]).await);
    let rap = Setup::new().tools(&tools).tools(&other).start();
    let (thread, watch) = subscribed(&tools, &rap).await;
    rap.say(&thread, &format!("call cancel_subscription {{\"tool_call_id\": {:?}}}", watch.id())).await;
    rap.until_line(&thread, "assistant: cancel_subscription: subscription call_1_1 was cancelled").await;
    let expected = json!({"thread_id": thread, "tool_call_id": watch.id()});
    for server in [&tools, &other] {
        server.next(CANCEL).await;
        assert_eq!(server.all(CANCEL)[0].body, expected);
    }
    assert_eq!(rap.thread(&thread).await["subscriptions"], json!([]));
    assert!(rap.listing("subscriptions").await.is_empty());
    assert_eq!(watch.post(&watch.inline("x")).await.refusal(), (410, "subscription_ended"));
    // The call and its result were written in one step.
    let history = rap.history(&thread).await;
    assert_eq!(history[5]["at"], history[6]["at"]);
}

/// Proves: SE-15
#[tokio::test]
async fn a_subscription_of_another_thread_cannot_be_cancelled() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    let cancel = format!("call cancel_subscription {{\"tool_call_id\": {:?}}}", watch.id());
    let stranger = rap.open(&format!("{cancel}\ncall cancel_subscription {{}}")).await;
    rap.until_idle(&stranger).await;
    let transcript = rap.transcript(&stranger).await;
    let none = format!("Error: this thread has no active subscription `{}`; it has none", watch.id());
    assert_eq!(transcript[3], format!("result call_1_1: {none}"));
    assert_eq!(transcript[4], "result call_1_2: Error: $.tool_call_id: expected a string");
    rap.say(&thread, "call cancel_subscription {\"tool_call_id\": \"call_7\"}").await;
    let error = "Error: this thread has no active subscription `call_7`; active subscriptions: call_1_1";
    rap.until_line(&thread, &format!("assistant: cancel_subscription: {error}")).await;
    watch.says(&watch.inline("still here")).await;
    rap.until_line(&thread, "assistant: watch: still here").await;
    assert_eq!(tools.count(CANCEL), 0);
}

/// A child cannot end a subscription of its parent, though it sees the call.
///
/// Proves: SE-15
#[tokio::test]
async fn a_child_cannot_cancel_its_parents_subscription() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    model.calls(&[("s1", "watch", json!({}))]);
    let thread = rap.open("go").await;
    let watch = tools.invocation().await;
    model.says("Watching.");
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    model.calls(&[("c1", "cancel_subscription", json!({"tool_call_id": watch.id()}))]);
    model.says("So be it.");
    watch.says(&watch.event("one")).await;
    let child = rap.child(&thread).await;
    rap.until_line(&child, "assistant: So be it.").await;
    let error = "result c1: Error: this thread has no active subscription `s1`; it has none";
    rap.until_line(&child, error).await;
    assert_eq!(rap.thread(&thread).await["subscriptions"][0]["call_id"], "s1");
}

/// Proves: SE-25
#[tokio::test]
async fn a_subscription_beyond_the_limit_is_not_kept_and_its_tool_is_notified() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("subscriptions_per_thread = 1").start();
    let (thread, _) = subscribed(&tools, &rap).await;
    rap.say(&thread, "call watch").await;
    let second = tools.invocation().await;
    second.confirms("watching too").await;
    rap.until_idle(&thread).await;
    let cancelled = tools.next(CANCEL).await.body;
    assert_eq!(cancelled, json!({"thread_id": thread, "tool_call_id": second.name()}));
    let result = &rap.history(&thread).await[6];
    let text = result["content"].as_str().unwrap();
    assert!(text.starts_with("watching too\n\nThe subscription was not kept: this thread has 1"), "{text}");
    assert_eq!(rap.listing("subscriptions").await.len(), 1);
    assert_eq!(second.post(&second.inline("x")).await.refusal(), (410, "subscription_ended"));
}

/// Proves: SE-20, SE-21, TC-01
#[tokio::test]
async fn closing_cancels_no_subscription_and_later_events_are_discarded() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    rap.close(&thread).await;
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": thread}));
    let transcript = rap.transcript(&thread).await;
    for body in [watch.event("x"), watch.inline("x"), with(watch.inline("x"), json!({"final": true}))] {
        assert_eq!(watch.post(&body).await.refusal(), (410, "thread_closed"));
    }
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert!(rap.children(&thread).await.is_empty());
    assert!(rap.listing("subscriptions").await.is_empty());
    assert_eq!(tools.count(CANCEL), 0);
    // Each of the three is in the log, or in the delivery log if it comes later.
    let discarded = || rap.log().matches("a callback of a closed thread was discarded").count();
    until("three discarded events in the log", async || discarded() == 3).await;
}

/// Proves: SE-08, LC-16
#[tokio::test]
async fn events_wait_while_the_thread_is_busy_and_are_answered_together() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    for text in ["one", "two", "three"] {
        watch.says(&watch.inline(text)).await;
    }
    let busy = rap.thread(&thread).await;
    assert_eq!((&busy["held"], &busy["turn"]), (&json!(3), &json!(3)));
    work.returns("done").await;
    rap.until_line(&thread, "assistant: work: done\nwatch: one\nwatch: two\nwatch: three").await;
    assert_eq!(rap.until_idle(&thread).await["turn"], 4);

    // They also wait during a model request.
    rap.say(&thread, "sleep 0.5\nsay thinking").await;
    rap.until_status(&thread, "running").await;
    watch.says(&watch.inline("four")).await;
    assert_eq!(rap.thread(&thread).await["held"], 1);
    rap.until_line(&thread, "assistant: watch: four").await;
    let transcript = rap.transcript(&thread).await;
    let thinking = transcript.iter().position(|line| line == "assistant: thinking").unwrap();
    assert!(transcript[thinking + 1].starts_with("synthetic call"), "{transcript:?}");
}

#[tokio::test]
async fn number_and_depth_of_event_children_are_limited() {
    let tools = Tools::start().await;
    let script = "[[turn]]\ncalls = [{name = \"watch\"}]\n[[turn]]\nsay = \"subscribed\"\n";
    let setup = Setup::new().tools(&tools).limit("children_per_thread = 1").limit("depth = 1");
    let rap = setup.limit("held_per_thread = 1").start_with_script(script);
    let thread = rap.open("go").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.event("one")).await;
    let inner = tools.invocation().await;
    watch.says(&watch.event("two")).await;
    let full = watch.post(&watch.event("three")).await;
    assert_eq!(full.refusal(), (503, "thread_full"));
    assert!(full.retry_after().is_some());

    // The child is at the maximum depth, so events of its own subscription are handled inline.
    inner.confirms("watching").await;
    let child = rap.child(&thread).await;
    rap.until_idle(&child).await;
    inner.says(&with(inner.event("inner"), json!({"final": true}))).await;
    rap.until_status(&child, "closed").await;
    assert!(rap.transcript(&child).await.iter().any(|line| line.ends_with(": inner")));
    assert!(rap.children(&child).await.is_empty());
    until("the next child", async || (rap.children(&thread).await.len() == 2).then_some(())).await;
    until("the first child is gone", async || (rap.thread(&thread).await["children"] == 1).then_some(()))
        .await;
}

/// An event child is closed as soon as it has nothing left to do, whatever ended last.
#[tokio::test]
async fn an_event_child_with_nothing_left_to_do_is_closed() {
    let tools = Tools::start().await;
    let script = "[[turn]]\ncalls = [{name = \"watch\"}]\n[[turn]]\nsay = \"subscribed\"\n";
    let rap = Setup::new().tools(&tools).start_with_script(script);
    let thread = rap.open("go").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;

    // Its last event is handled by another child.
    watch.says(&watch.event("one")).await;
    let inner = tools.invocation().await;
    let child = inner.thread().to_owned();
    inner.confirms("watching").await;
    rap.until_idle(&child).await;
    inner.says(&with(inner.event("last"), json!({"final": true}))).await;
    let innermost = tools.invocation().await;
    assert_eq!(rap.thread(&child).await["status"], "idle");
    innermost.returns("done").await;
    rap.until_status(innermost.thread(), "closed").await;
    rap.until_status(&child, "closed").await;

    // A client cancels the call that it waits for.
    for order in ["calls/ID/cancel", "interrupt"] {
        watch.says(&watch.event("again")).await;
        let inner = tools.invocation().await;
        if order != "interrupt" {
            inner.confirms("watching").await;
            rap.until_idle(inner.thread()).await;
        }
        rap.act(inner.thread(), &order.replace("ID", inner.id())).await.expect(202);
        rap.until_status(inner.thread(), "closed").await;
    }
    rap.until(&thread, "without children", |thread| thread["children"] == 0).await;
}

/// A subscription that a client cancelled does not wake the thread.
///
/// Proves: SE-22, CN-01
#[tokio::test]
async fn a_client_cancels_a_subscription() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let (thread, watch) = subscribed(&tools, &rap).await;
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    assert_eq!(tools.next(CANCEL).await.body, json!({"thread_id": thread, "tool_call_id": "call_1_1"}));
    assert_eq!(rap.transcript(&thread).await[4..], ["notice: subscription call_1_1 was cancelled"]);
    assert_eq!(watch.post(&watch.event("x")).await.refusal(), (410, "subscription_ended"));
    assert_eq!(rap.thread(&thread).await["subscriptions"], Value::Array(vec![]));
}
