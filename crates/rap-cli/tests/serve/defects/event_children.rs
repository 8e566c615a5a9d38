//! Number of waiting events that one event child takes.

use rap_testkit::tools::Call;
use rap_testkit::{Rap, Setup, Tools};

/// Each thread subscribes first, so that a child for an event stays until its call returns.
const SCRIPT: &str = "[[turn]]\ncalls = [{name = \"watch\"}]\n[[turn]]\nsay = \"subscribed\"\n";

/// A subscription with one event in a child and others waiting.
async fn waiting(tools: &Tools, rap: &Rap, events: usize) -> (String, Call) {
    let thread = rap.open("go").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.event("first")).await;
    let first = tools.invocation().await;
    for number in 0..events {
        watch.says(&watch.event(&format!("event {number}"))).await;
    }
    assert_eq!(rap.listing("subscriptions").await[0]["waiting"], events);
    (thread, first)
}

/// Ends a child and returns the next one with the texts of its events.
async fn next(tools: &Tools, rap: &Rap, child: &Call) -> (Call, Vec<String>) {
    child.returns("done").await;
    let next = tools.invocation().await;
    assert_ne!(next.thread(), child.thread());
    let transcript = rap.transcript(next.thread()).await;
    let events = transcript
        .iter()
        .filter_map(|line| line.split_once(": event ").filter(|_| line.starts_with("result ")));
    let events = events.map(|(_, number)| number.to_owned()).collect();
    (next, events)
}

/// Proves: SE-09
#[tokio::test]
async fn with_one_event_per_child_each_waiting_event_gets_its_own_thread() {
    let tools = Tools::start().await;
    let setup = Setup::new().tools(&tools).limit("event_children_per_subscription = 1\nevents_per_child = 1");
    let rap = setup.start_with_script(SCRIPT);
    let (thread, mut child) = waiting(&tools, &rap, 3).await;
    for number in 0..3 {
        let (next, events) = next(&tools, &rap, &child).await;
        assert_eq!(events, [number.to_string()]);
        child = next;
    }
    child.returns("done").await;
    rap.until(&thread, "without children", |thread| thread["children"] == 0).await;
    assert_eq!(rap.children(&thread).await.len(), 4);
}

#[tokio::test]
async fn by_default_a_child_takes_a_hundred_waiting_events() {
    let tools = Tools::start().await;
    let setup = Setup::new().tools(&tools).limit("event_children_per_subscription = 1");
    let rap = setup.start_with_script(SCRIPT);
    let (_, first) = waiting(&tools, &rap, 103).await;
    let numbers = |range: std::ops::Range<usize>| range.map(|number| number.to_string()).collect::<Vec<_>>();
    let (second, events) = next(&tools, &rap, &first).await;
    assert_eq!(events, numbers(0..100));
    let (_, events) = next(&tools, &rap, &second).await;
    assert_eq!(events, numbers(100..103));
}
