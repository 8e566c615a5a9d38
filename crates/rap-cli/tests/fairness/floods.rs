//! A subscription that sends events faster than they are handled: few children at a time, and no event is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rap_testkit::tools::{Call, with};
use rap_testkit::{Rap, Setup, Tools, http, until};
use serde_json::json;
use tokio::task::JoinSet;

const SENDERS: usize = 16;

const SUBSCRIBES: &str = r#"
    [[turn]]
    calls = [{name = "watch", arguments = {}}]

    [[turn]]
    say = "ok"
"#;

/// Counts how often each event occurs in the histories of the thread's children, and the number of children.
async fn count_events(rap: &Rap, thread: &str) -> (BTreeMap<String, usize>, usize) {
    let path = format!("/v1/threads?parent={thread}&limit=1000");
    let (mut heard, mut children, mut cursor) = (BTreeMap::new(), 0, String::new());
    loop {
        let page = rap.get(&format!("{path}{cursor}")).await.expect(200);
        for child in page["threads"].as_array().unwrap() {
            children += 1;
            for line in rap.transcript(child["id"].as_str().unwrap()).await {
                if let Some(word) =
                    line.strip_prefix("result rap_").and_then(|rest| rest.split(": event ").nth(1))
                {
                    *heard.entry(word.to_owned()).or_default() += 1;
                }
            }
        }
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return (heard, children),
        }
    }
}

/// Sends events from several senders at a time, each until it is accepted. Without an answer a sender does not know
/// whether its event was accepted. Returns a counter of accepted events.
fn flood(watch: &Call, events: usize) -> (JoinSet<()>, Arc<AtomicUsize>) {
    let (mut senders, taken) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
    for sender in 0..SENDERS {
        let (watch, taken) = (watch.clone(), Arc::clone(&taken));
        senders.spawn(async move {
            for number in (sender..events).step_by(SENDERS) {
                while !is_taken(&watch, number).await {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                taken.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    (senders, taken)
}

async fn is_taken(watch: &Call, number: usize) -> bool {
    let event = with(watch.event(&format!("event {number}")), json!({"event_id": format!("e{number}")}));
    let headers = [("content-type", "application/json")];
    match http::attempt("POST", watch.url(), &headers, event.to_string().as_bytes()).await {
        Ok(answer) if answer.status != 503 => {
            answer.expect(200);
            true
        }
        _ => false,
    }
}

/// A thread with a subscription.
async fn watcher(rap: &Rap, tools: &Tools) -> (String, Call) {
    let thread = rap.open("call watch {}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    (thread, watch)
}

/// Waits until each event is in the history of exactly one child. Returns the number of children.
async fn until_all_handled(rap: &Rap, thread: &str, events: usize) -> usize {
    rap.until(thread, "no children", |thread| thread["children"] == 0).await;
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 0);
    let (heard, children) = count_events(rap, thread).await;
    assert_eq!((heard.len(), heard.values().max()), (events, Some(&1)));
    children
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_events_uses_few_children_at_a_time_and_loses_none() {
    let events = 1_500;
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 100").start();
    let (thread, watch) = watcher(&rap, &tools).await;
    let (senders, taken) = flood(&watch, events);
    let mut most = 0;
    while taken.load(Ordering::Relaxed) < events {
        most = most.max(rap.thread(&thread).await["children"].as_u64().unwrap());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    senders.join_all().await;
    assert!(most <= 4, "{most} children at a time");
    let children = until_all_handled(&rap, &thread, events).await;
    assert!(children < events, "{children} children for {events} events");
}

/// A sender without an answer sends the event again with the same id.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_with_crashes_loses_and_repeats_no_event() {
    let events = 600;
    let tools = Tools::start().await;
    let mut rap = Setup::new().tools(&tools).limit("held_per_thread = 100").start();
    let (thread, watch) = watcher(&rap, &tools).await;
    let (senders, taken) = flood(&watch, events);
    for crash in [100, 250, 400] {
        until("more events", async || (taken.load(Ordering::Relaxed) >= crash).then_some(())).await;
        assert!(taken.load(Ordering::Relaxed) < events, "it was over before the crash");
        rap = rap.restarted();
    }
    senders.join_all().await;
    until_all_handled(&rap, &thread, events).await;
}

/// A subscription with an event child that occupies the only slot: each thread subscribes in its first turn, and the
/// child waits for its confirmation.
async fn occupied(setup: Setup, tools: &Tools) -> (Rap, String, Call, String) {
    let setup = setup.tools(tools).limit("event_children_per_subscription = 1");
    let rap = setup.start_with_script(SUBSCRIBES);
    let (thread, watch) = watcher(&rap, tools).await;
    watch.says(&watch.event("event first")).await;
    let busy = rap.child(&thread).await;
    tools.invocation().await;
    (rap, thread, watch, busy)
}

#[tokio::test]
async fn waiting_events_are_shown_and_survive_a_crash() {
    let tools = Tools::start().await;
    let (rap, thread, watch, busy) = occupied(Setup::new(), &tools).await;
    for number in 0..3 {
        watch.says(&watch.event(&format!("event {number}"))).await;
    }
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 3);
    let rap = rap.restarted();
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 3);
    rap.close(&busy).await;
    until("the second child", async || (rap.children(&thread).await.len() == 2).then_some(())).await;
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 0);
    let (heard, _) = count_events(&rap, &thread).await;
    assert_eq!(heard.into_keys().collect::<Vec<_>>(), ["0", "1", "2", "first"]);
}

#[tokio::test]
async fn waiting_events_are_limited_by_their_size() {
    let tools = Tools::start().await;
    let setup = Setup::new().limit("held_bytes_per_thread = \"64KiB\"");
    let (rap, thread, watch, busy) = occupied(setup, &tools).await;
    let large = watch.event(&format!("event {}", "x".repeat(40 * 1024)));
    watch.says(&large).await;
    watch.says(&large).await;
    watch.post(&large).await.expect_refusal(503);
    watch.post(&watch.event("event small")).await.expect_refusal(503);
    rap.close(&busy).await;
    until("the second child", async || (rap.children(&thread).await.len() == 2).then_some(())).await;
    watch.says(&large).await;
}
