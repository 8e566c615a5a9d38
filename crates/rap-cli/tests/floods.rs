//! A subscription that sends more than anybody can work off: a few children at a time, and nothing is lost.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use support::{Rap, Setup, Tools, until};

const EVENTS: usize = 1_500;
const SENDERS: usize = 16;

const SUBSCRIBES: &str = r#"
    [[turn]]
    calls = [{name = "watch", arguments = {}}]

    [[turn]]
    say = "ok"
"#;

/// How often the words of each event stand in the histories of the thread's children, and how many children there were.
async fn heard(rap: &Rap, thread: &str) -> (BTreeMap<String, usize>, usize) {
    let path = format!("/v1/threads?parent={thread}&limit=1000");
    let (mut heard, mut children, mut cursor) = (BTreeMap::new(), 0, String::new());
    loop {
        let page = rap.get(&format!("{path}{cursor}")).await.expect(200);
        for child in page["threads"].as_array().unwrap() {
            children += 1;
            for line in rap.story(child["id"].as_str().unwrap()).await {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_events_costs_a_few_children_at_a_time_and_none_is_lost() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 100").start();
    let thread = rap.open("call watch {}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    let mut senders = Vec::new();
    for sender in 0..SENDERS {
        let watch = watch.clone();
        senders.push(tokio::spawn(async move {
            let mut refused = 0;
            for number in (sender..EVENTS).step_by(SENDERS) {
                // As tools do it: a 503 is tried again until it is taken.
                while watch.post(&watch.event(&format!("event {number}"))).await.status == 503 {
                    refused += 1;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            refused
        }));
    }
    let mut most = 0;
    while senders.iter().any(|sender| !sender.is_finished()) {
        most = most.max(rap.thread(&thread).await["children"].as_u64().unwrap());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut refused = 0;
    for sender in senders {
        refused += sender.await.unwrap();
    }
    assert!(most <= 4, "{most} children at a time");
    rap.until(&thread, "no children", |thread| thread["children"] == 0).await;
    let waiting = rap.listing("subscriptions").await[0]["waiting"].clone();
    assert_eq!(waiting, 0);
    let (heard, children) = heard(&rap, &thread).await;
    assert_eq!((heard.len(), heard.values().max()), (EVENTS, Some(&1)));
    assert!(children < EVENTS, "{children} children for {EVENTS} events, {refused} were refused at first");
}

#[tokio::test]
async fn what_waits_is_shown_and_survives_a_crash() {
    let tools = Tools::start().await;
    // Whoever is asked for the first time subscribes: the first child waits for its confirmation, and keeps its place.
    let setup = Setup::new().tools(&tools).limit("event_children_per_subscription = 1");
    let rap = setup.start_with_script(SUBSCRIBES);
    let thread = rap.open("go").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.event("event first")).await;
    let busy = rap.child(&thread).await;
    tools.invocation().await;
    for number in 0..3 {
        watch.says(&watch.event(&format!("event {number}"))).await;
    }
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 3);
    let rap = rap.restarted();
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 3);
    rap.close(&busy).await;
    until("the second child", async || (rap.children(&thread).await.len() == 2).then_some(())).await;
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], 0);
    let (heard, _) = heard(&rap, &thread).await;
    assert_eq!(heard.into_keys().collect::<Vec<_>>(), ["0", "1", "2", "first"]);
}
