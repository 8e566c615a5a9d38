//! A tool server that hangs delays only its own requests.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::stage::{Bench, open_all, post_all, soon};
use rap_testkit::peer::{Reply, Request};
use rap_testkit::tools::{CLOSE, Call, INVOKE, tool, with};
use rap_testkit::{Rap, Setup, Tools};

/// Server that never acknowledges its tool `shout`.
async fn hanging_server() -> Tools {
    let deaf = Tools::offering("deaf", &["shout"]).await;
    deaf.answer_always(INVOKE, Reply::Hang);
    deaf
}

fn ids(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}-{number}")).collect()
}

/// URL for the answer to a call's question.
fn choice_url(rap: &Rap, thread: &str, call: &str) -> String {
    format!("{}/v1/threads/{thread}/calls/{call}/choice", rap.url)
}

/// An approved call is read from the table of due invocations, after 2,176 others.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_calls_to_a_hanging_server_do_not_hide_an_allowed_call_to_another() {
    const THREADS: usize = 17;
    const CALLS: usize = 128;
    let (deaf, good) = (hanging_server().await, Tools::start().await);
    let wipe = with(tool("wipe"), json!({"annotations": {"destructive": true}}));
    good.offer(good.document("bench", "1", vec![wipe]));
    let rap = Setup::new().tools(&deaf).tools(&good).limit("invoke_concurrency = 1").start();
    let loud = ids("loud", THREADS);
    open_all(&rap, &loud, Some(&vec!["call shout {}"; CALLS].join("\n"))).await;
    for thread in &loud {
        rap.until(thread, "all calls are open", |thread| open_calls(thread) == CALLS).await;
    }

    let thread = rap.open("call wipe {}").await;
    rap.until_status(&thread, "needs_you").await;
    let call = rap.call(&thread, "call_1_1").await;
    post_all(202, [(choice_url(&rap, &thread, &call), json!({"selected": 0}))]).await;
    soon("the allowed call", good.invocation()).await.returns("wiped").await;
    rap.until_line(&thread, "assistant: wipe: wiped").await;
    assert!(deaf.count(INVOKE) > 0);
}

fn open_calls(thread: &Value) -> usize {
    thread["waiting_on"].as_array().unwrap().len()
}

/// Each hanging tool asks 64 questions and accepts no answer; another tool waits for its answer.
#[tokio::test(flavor = "multi_thread")]
async fn answers_to_a_hanging_tool_do_not_delay_those_to_another() {
    const THREADS: usize = 33;
    const QUESTIONS: usize = 64;
    let (deaf, good) = (Tools::offering("deaf", &["ask"]).await, Tools::start().await);
    let paths = |thread: usize| (0..QUESTIONS).map(move |number| format!("/answers/{thread}/{number}"));
    for path in (0..THREADS).flat_map(paths) {
        deaf.answer_always(&path, Reply::Hang);
    }
    // No answer to the hanging tool is given up before the test has ended.
    let setup = Setup::new().tools(&deaf).tools(&good).limit("invoke_ack_timeout = \"10m\"");
    let rap = setup.limit(&format!("questions_per_thread = {QUESTIONS}")).start();
    open_all(&rap, &ids("loud", THREADS), Some("call ask {}")).await;
    let calls = deaf.invocations(THREADS).await;
    let questions = calls.iter().enumerate().flat_map(|(thread, call)| {
        paths(thread).map(|path| (call.url().to_owned(), call.question(&format!("{}{path}", deaf.url))))
    });
    post_all(200, questions).await;
    let choose = |call: &Call| (choice_url(&rap, call.thread(), call.id()), json!({"selected": 0}));
    post_all(202, calls.iter().flat_map(|call| vec![choose(call); QUESTIONS])).await;

    let thread = rap.open("call work {}").await;
    let call = good.invocation().await;
    call.says(&call.question(&format!("{}/answers", good.url))).await;
    post_all(202, [choose(&call)]).await;
    let answer = soon("the answer to the other tool", good.next("/answers")).await;
    assert_eq!(answer.body, json!({"id": call.id(), "selected": 0}));
    call.returns("red it is").await;
    rap.until_line(&thread, "assistant: work: red it is").await;
}

/// All lines of the delivery log.
async fn ledger(rap: &Rap) -> Vec<Value> {
    let (mut path, mut lines) = ("/v1/deliveries?limit=1000".to_owned(), Vec::new());
    loop {
        let page = rap.get(&path).await.expect(200);
        lines.extend(page["deliveries"].as_array().unwrap().iter().cloned());
        let Some(cursor) = page["next_cursor"].as_str() else { return lines };
        path = format!("/v1/deliveries?limit=1000&cursor={cursor}");
    }
}

/// Checks that everything sent to other servers than this one arrived at once: the delivery log names none of them.
async fn assert_only_failures_with(rap: &Rap, server: &str) {
    let others: Vec<Value> = ledger(rap).await.into_iter().filter(|line| line["server"] != *server).collect();
    assert!(others.is_empty(), "{} lines such as {}", others.len(), others[0]);
}

/// Proves: TC-13, TC-17
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_on_notifications_delays_no_other() {
    const THREADS: usize = 2_500;
    let (deaf, good) = (Tools::offering("deaf", &["shout"]).await, Bench::start().await);
    deaf.answer_always(CLOSE, Reply::Hang);
    // The hanging server is notified first.
    let rap = Setup::new().tools(&deaf).tool_server(&good.url).start();
    let threads = ids("thread", THREADS);
    open_all(&rap, &threads, None).await;
    let close = |id: &String| (format!("{}/v1/threads/{id}/close", rap.url), Value::Null);
    post_all(202, threads.iter().map(close)).await;
    // Dropped notifications would be in the delivery log by now.
    assert_only_failures_with(&rap, &deaf.url).await;

    let closing = |asked: &Request| asked.path == CLOSE;
    good.requests.until_count("closings that the other server heard of", THREADS, closing).await;
    let told = good.requests.look(|asked| {
        let closings = asked.iter().filter(|asked| closing(asked));
        closings.map(|asked| asked.body["thread_id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    });
    assert_eq!(told.len(), THREADS, "each closing is notified once");
    assert_eq!(told.into_iter().collect::<BTreeSet<_>>(), threads.into_iter().collect());
    assert_only_failures_with(&rap, &deaf.url).await;
}
