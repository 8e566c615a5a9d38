//! Threads that a model spawns: inherited history, reports and closing.

use std::time::Duration;

use rap_testkit::model::ModelServer;
use rap_testkit::tools::CLOSE;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::json;

/// A message that makes the scripted model spawn a child with these instructions.
fn spawn(instructions: &str) -> String {
    format!("call spawn_thread {}", json!({"instructions": instructions}))
}

#[tokio::test]
async fn a_child_works_by_itself_and_its_reports_wake_the_parent() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&format!("{}\ncall work {{\"at\": 1}}", spawn("call work {\"at\": 2}"))).await;
    let child = rap.child(&thread).await;
    let calls = tools.invocations(2).await;
    let of = |id: &str| calls.iter().find(|call| call.thread() == id).unwrap();
    assert_eq!(of(&thread).request.body["thread_ancestors"], json!(null));
    assert_eq!(of(&child).request.body["thread_ancestors"], json!([thread]));
    assert_eq!(of(&child).arguments(), &json!({"at": 2}));
    of(&child).returns("found").await;
    rap.until_line(&child, "assistant: work: found").await;

    let transcript = rap.transcript(&child).await;
    let own = transcript
        .iter()
        .position(|line| line.starts_with("result call_1_1: You are a thread of your own"))
        .unwrap();
    assert!(transcript[own].ends_with("Your instructions:\n\ncall work {\"at\": 2}"));
    assert_eq!(transcript[own + 1], "result call_1_2: the thread that started you deals with this call");
    // The parent does not see the child's history.
    of(&thread).returns("here").await;
    rap.until_idle(&thread).await;
    assert!(!rap.transcript(&thread).await.iter().any(|line| line.contains("found")));

    let order = json!({"thread_id": child, "message": "call report_to_parent {\"report\": \"halfway\"}"});
    rap.say(&thread, &format!("call send_message_to_child {order}")).await;
    rap.until_line(&thread, "assistant: spawn_thread: halfway").await;
    let kind = format!("interrupt:call_1_1 (report of thread {child})");
    let reported = rap.transcript(&thread).await;
    let reported = reported.iter().find(|line| line.starts_with("synthetic call") && line.contains(&kind));
    assert!(reported.is_some(), "{:?}", rap.transcript(&thread).await);

    let order = json!({"thread_id": child, "message": "call close_thread {\"report\": \"done\"}"});
    rap.say(&thread, &format!("call send_message_to_child {order}")).await;
    rap.until_line(&thread, "assistant: spawn_thread: done").await;
    rap.until_status(&child, "closed").await;
    assert_eq!(tools.notified(CLOSE, 1).await, [json!({"thread_id": child})]);
    rap.until(&thread, "no child", |thread| thread["children"] == 0).await;
}

#[tokio::test]
async fn closing_a_thread_closes_its_descendants() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&spawn(&spawn("say deep"))).await;
    let child = rap.child(&thread).await;
    let grandchild = rap.child(&child).await;
    rap.until_line(&grandchild, "assistant: deep").await;
    rap.close(&thread).await;
    for closed in [&thread, &child, &grandchild] {
        rap.until_status(closed, "closed").await;
    }
    let mut told: Vec<_> = tools.notified(CLOSE, 3).await;
    told.sort_by_key(|body| body["thread_id"].to_string());
    let mut closed =
        vec![json!({"thread_id": thread}), json!({"thread_id": child}), json!({"thread_id": grandchild})];
    closed.sort_by_key(|body| body["thread_id"].to_string());
    assert_eq!(told, closed);
}

#[tokio::test]
async fn a_report_survives_a_crash_of_the_runtime() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&spawn("call work {}")).await;
    let child = rap.child(&thread).await;
    let look = tools.invocation().await;
    rap.until_idle(&thread).await;
    let rap = rap.restarted();
    look.returns("found").await;
    rap.until_line(&child, "assistant: work: found").await;
    rap.say(&child, "call close_thread {\"report\": \"dug it up\"}").await;
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: spawn_thread: dug it up").await;
    rap.until_status(&child, "closed").await;
    let reports = rap
        .transcript(&thread)
        .await
        .iter()
        .filter(|line| line.starts_with("assistant: spawn_thread: dug"))
        .count();
    assert_eq!(reports, 1);
}

/// Number of reports with exactly this text in a thread.
async fn count_reports(rap: &Rap, thread: &str, report: &str) -> usize {
    let is_it = |line: &&String| line.starts_with("result rap_") && line.ends_with(&format!(": {report}"));
    rap.transcript(thread).await.iter().filter(is_it).count()
}

#[tokio::test]
async fn a_report_held_by_its_parent_survives_kill_9_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let reports = spawn("call report_to_parent {\"report\": \"gold\"}");
    let thread = rap.open(&format!("{reports}\ncall work {{}}")).await;
    let work = tools.invocation().await;
    // A report is a synthetic call and its result.
    until("a held report", async || (rap.rows("held") == 2).then_some(())).await;
    let rap = rap.restarted();
    assert_eq!(count_reports(&rap, &thread, "gold").await, 0);
    work.returns("done").await;
    rap.until_idle(&thread).await;
    let rap = rap.restarted();
    assert_eq!(count_reports(&rap, &thread, "gold").await, 1);
    assert_eq!(rap.children(&thread).await.len(), 1);
}

/// The runtime is killed at different moments while a report is delivered.
#[tokio::test]
async fn whenever_the_runtime_is_killed_a_report_counts_once() {
    const REPORTS: u64 = 8;
    let tools = Tools::start().await;
    let mut rap = Rap::start(&tools);
    let thread = rap.open(&spawn("say here")).await;
    let child = rap.child(&thread).await;
    for number in 0..REPORTS {
        let order = format!("call report_to_parent {{\"report\": \"find {number}\"}}");
        rap.until_idle(&child).await;
        rap.say(&child, &order).await;
        tokio::time::sleep(Duration::from_millis(2 * number)).await;
        rap = rap.restarted();
    }
    for number in 0..REPORTS {
        let find = format!("find {number}");
        until(&find, async || (count_reports(&rap, &thread, &find).await > 0).then_some(())).await;
    }
    rap.until_idle(&thread).await;
    for number in 0..REPORTS {
        assert_eq!(count_reports(&rap, &thread, &format!("find {number}")).await, 1, "{number}");
    }
}

#[tokio::test]
async fn descendants_are_closed_after_a_kill_in_between() {
    let tools = Tools::start().await;
    let mut rap = Rap::start(&tools);
    for pause in [0, 1, 3] {
        let thread = rap.open(&spawn(&spawn("say deep"))).await;
        let child = rap.child(&thread).await;
        let grandchild = rap.child(&child).await;
        rap.until_line(&grandchild, "assistant: deep").await;
        rap.close(&thread).await;
        tokio::time::sleep(Duration::from_millis(pause)).await;
        rap = rap.restarted();
        for closed in [&thread, &child, &grandchild] {
            rap.until_status(closed, "closed").await;
        }
        let transcript = rap.transcript(&grandchild).await;
        assert_eq!(transcript.iter().filter(|line| *line == "notice: the thread was closed").count(), 1);
    }
}

#[tokio::test]
async fn threads_nest_at_most_eight_deep() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let instructions = (0..9).fold("say too deep".to_owned(), |inner, _| spawn(&inner));
    let mut thread = rap.open(&instructions).await;
    for _ in 0..8 {
        thread = rap.child(&thread).await;
    }
    let told = "assistant: spawn_thread: Error: threads nest 8 deep at most; do the work in this thread";
    rap.until_line(&thread, told).await;
    rap.until_idle(&thread).await;
    assert!(rap.children(&thread).await.is_empty());
}

#[tokio::test]
async fn a_thread_has_at_most_64_open_children() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open(&vec![spawn("say here"); 65].join("\n")).await;
    rap.until_line(
        &thread,
        "result call_1_65: Error: this thread has 64 open children, the most it may have; let some of them finish first",
    )
    .await;
    rap.until_idle(&thread).await;
    assert_eq!(rap.thread(&thread).await["children"], 64);
    // A child that ends makes room for another.
    rap.close(&rap.child(&thread).await).await;
    rap.until(&thread, "a free place", |thread| thread["children"] == 63).await;
    rap.say(&thread, &spawn("say here")).await;
    rap.until(&thread, "the next child", |thread| thread["children"] == 64).await;
}

#[tokio::test]
async fn depth_and_number_of_children_are_configurable() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("depth = 1\nchildren_per_thread = 1").start();
    let thread = rap.open(&[spawn(&spawn("say deep")), spawn("say two")].join("\n")).await;
    let child = rap.child(&thread).await;
    let deep = "result call_1_1: Error: threads nest 1 deep at most; do the work in this thread";
    rap.until_line(&child, deep).await;
    let many = "result call_1_2: Error: this thread has 1 open children, the most it may have; let some of them finish first";
    rap.until_line(&thread, many).await;
    assert_eq!(rap.children(&thread).await.len(), 1);
}

/// Proves: SE-28
#[tokio::test]
async fn the_description_of_close_thread_names_active_subscriptions() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    let closing = async || {
        let question = model.question().await;
        let offered = question["tools"].as_array().unwrap().last().unwrap()["function"].clone();
        assert_eq!(offered["name"], "close_thread");
        offered["description"].as_str().unwrap().to_owned()
    };
    model.calls(&[("s1", "watch", json!({}))]);
    let thread = rap.open("go").await;
    assert!(!closing().await.contains("Still active"));
    model.says("Watching.");
    tools.invocation().await.confirms("watching").await;
    let id = rap.call(&thread, "s1").await;
    let named = format!("Still active: {id} (watch).");
    assert!(closing().await.ends_with(&named));
    rap.until_idle(&thread).await;
    // The same after a restart.
    let rap = rap.restarted();
    model.calls(&[("c1", "cancel_subscription", json!({"tool_call_id": id}))]);
    model.says("Cancelled.");
    rap.say(&thread, "enough").await;
    assert!(closing().await.ends_with(&named));
    assert!(!closing().await.contains("Still active"));
}

#[tokio::test]
async fn a_mistake_with_a_child_is_explained_to_the_model() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call spawn_thread {}\ncall report_to_parent {\"report\": \"x\"}\ncall send_message_to_child {\"thread_id\": \"t0\", \"message\": \"x\"}").await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    for line in [
        "result call_1_1: Error: $.instructions: expected a string",
        "result call_1_2: Error: this thread has no parent; tell the user instead",
        "result call_1_3: Error: this thread has no open child `t0`; it has none",
    ] {
        assert!(transcript.iter().any(|told| told == line), "{transcript:?}");
    }
}

/// Proves: SE-28
#[tokio::test]
async fn closing_names_the_subscriptions_that_end_with_it() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {}").await;
    tools.invocation().await.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call close_thread {}\ncall work {}").await;
    rap.until_status(&thread, "closed").await;
    let transcript = rap.transcript(&thread).await;
    assert!(
        transcript
            .iter()
            .any(|line| line.ends_with("the thread is closed; subscriptions that end with it: call_1_1"))
    );
    assert!(
        transcript.iter().any(|line| line.ends_with("not called: the thread was closed")),
        "{transcript:?}"
    );
    tools.notified(CLOSE, 1).await;
}

#[tokio::test]
async fn whenever_the_runtime_is_killed_a_message_reaches_its_child_once() {
    let tools = Tools::start().await;
    let mut rap = Rap::start(&tools);
    let thread = rap.open(&spawn("say here")).await;
    let child = rap.child(&thread).await;
    for number in 0..4 {
        rap.until_idle(&thread).await;
        let order = json!({"thread_id": child, "message": format!("say word {number}")});
        rap.say(&thread, &format!("call send_message_to_child {order}")).await;
        tokio::time::sleep(Duration::from_millis(3 * number)).await;
        rap = rap.restarted();
    }
    let told = async |number: u64| {
        let line = format!("user: say word {number}");
        rap.transcript(&child).await.iter().filter(|told| **told == line).count()
    };
    for number in 0..4 {
        until("the message", async || (told(number).await > 0).then_some(())).await;
    }
    rap.until_idle(&thread).await;
    rap.until_idle(&child).await;
    for number in 0..4 {
        assert_eq!(told(number).await, 1, "{number}");
    }
}
