//! Callbacks whose cost is bounded: the rate of events, and the reading of views.

use std::time::{Duration, Instant};

use rap_io::sqlite::open_sqlite;
use rap_runtime::Limits;
use rap_testkit::Tools;
use rap_testkit::stream::Stream;
use serde_json::json;

use crate::local::{LocalRuntime, tool_server};

#[tokio::test]
async fn events_beyond_the_rate_of_a_subscription_are_refused_until_later() {
    let tools = Tools::start().await;
    let limits = Limits { events_per_second: Some(1), ..Limits::default() };
    let rap = LocalRuntime::with(vec![tool_server(&tools, None)], limits).await;
    let thread = rap.open("call watch").await;
    let call = tools.invocation().await;
    call.confirms("watching").await;
    rap.until_idle(&thread).await;
    let (began, mut texts, mut refused) = (Instant::now(), vec!["one", "two", "three"], 0);
    while let Some(text) = texts.pop() {
        let answer = call.post(&call.inline(text)).await;
        if answer.status == 200 {
            continue;
        }
        assert_eq!(answer.refusal(), (503, "too_many_events"));
        assert_eq!(answer.header("retry-after"), Some("1"));
        // A view of the same call is not an event.
        call.says(&call.view("progress", json!(refused))).await;
        texts.push(text);
        refused += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(refused > 0 && began.elapsed() >= Duration::from_secs(2), "{refused} in {:?}", began.elapsed());
    for text in ["one", "two", "three"] {
        rap.until_line(&thread, &format!("assistant: watch: {text}")).await;
    }
}

/// The content of a view that nobody may read shows whether it is read.
#[tokio::test]
async fn an_event_stream_reads_a_view_only_when_it_has_changed() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let mut stream = Stream::of(&rap, &thread).await;
    // The last event of the state at the start, which contains all views.
    stream.until("status").await;
    call.says(&call.view("first", json!(1))).await;
    assert_eq!(stream.until("view").await["content"], 1);
    let database = open_sqlite(&rap.directory().join("rap.db")).unwrap();
    assert_eq!(database.execute("UPDATE views SET content = 'unreadable'", []).unwrap(), 1);
    call.returns("done").await;
    while stream.until("status").await["status"] != "idle" {}
    call.says(&call.view("second", json!(2))).await;
    assert_eq!(stream.until("view").await["content"], 2);
    call.says(&call.view("first", json!(3))).await;
    assert_eq!(stream.until("view").await["content"], 3);
}

#[tokio::test]
async fn views_are_listed_in_pages() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    for number in 0..6 {
        call.says(&call.view(&format!("view {number}"), json!("x".repeat(220 * 1024)))).await;
    }
    let path = format!("/v1/threads/{thread}/views");
    let first = rap.get(&path).await.expect(200);
    let cursor = first["next_cursor"].as_str().unwrap().replace(' ', "%20");
    let second = rap.get(&format!("{path}?cursor={cursor}")).await.expect(200);
    let count = |page: &serde_json::Value| page["views"].as_array().unwrap().len();
    assert_eq!((count(&first), count(&second), &second["next_cursor"]), (6 - 1, 1, &json!(null)));
    let last = rap.get(&format!("{path}?cursor=~")).await.expect(200);
    assert_eq!(count(&last), 0, "every text is a position in the order of views");
}
