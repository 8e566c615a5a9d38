//! Cleanup without a request: calls that take too long, subscriptions that no runtime wants, and threads that nobody
//! closes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::support::{Gate, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};
use rap_testkit::PATIENCE;
use rap_tool::prelude::*;
use rap_tool::{Limits, TestRuntime};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

const HOUR: Duration = Duration::from_secs(3600);

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

async fn hang(_: Nothing, _: Call) -> Result<&'static str> {
    std::future::pending().await
}

fn too_late(within: &str) -> String {
    format!(
        "Error: the tool did not finish within {within} and was stopped; it may have done part of its work, so check \
         before you call it again"
    )
}

/// Counts how many of it exist.
struct Guard(Arc<AtomicU32>);

impl Guard {
    fn new(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Guard(Arc::clone(count))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Proves: CN-11, CN-25
#[tokio::test]
async fn a_call_that_hangs_ends_with_an_error_and_its_handler_is_stopped() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (reporter, mut reports) = mpsc::unbounded_channel();
    let polite = move |_: Nothing, call: Call| {
        let reporter = reporter.clone();
        async move {
            call.cancelled().await;
            reporter.send(call.is_cancelled()).ok();
            Ok("too late")
        }
    };
    let running = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&running);
    let stubborn = move |args: Nothing, call: Call| {
        let guard = Guard::new(&counted);
        async move {
            let _guard = guard;
            hang(args, call).await
        }
    };
    let mut limits = short_pauses();
    (limits.call_timeout, limits.cancel_grace) = (Duration::from_millis(300), Duration::from_millis(50));
    let tools = ToolServer::new("test")
        .limits(limits)
        .offer(Tool::new("polite", polite).timeout(Duration::from_millis(100)))
        .tool("stubborn", stubborn);
    let server = Server::start(tools, data.path()).await;
    let caller = server.caller();
    caller.accepted(&runtime.invocation("polite", "t", "polite", json!({}))).await;
    assert_eq!(runtime.next().await.text(), too_late("100 milliseconds"));
    assert_eq!(tokio::time::timeout(PATIENCE, reports.recv()).await.unwrap(), Some(true));
    caller.accepted(&runtime.invocation("stubborn", "t", "stubborn", json!({}))).await;
    assert_eq!(runtime.next().await.text(), too_late("300 milliseconds"));
    caller.until_settled("t", "polite").await;
    caller.until_settled("t", "stubborn").await;
    rap_testkit::until("the handler is dropped", async || running.load(Ordering::SeqCst) == 0).await;
    assert!(runtime.pending().is_empty(), "a call has two results");
}

/// Proves: CN-11
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_call_ends_in_time_even_if_its_handler_blocks_its_thread() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = std::sync::Mutex::new(blocked);
    let block = move |_: Nothing, _: Call| {
        // Ends when the test drops the sender.
        assert!(blocked.lock().unwrap().recv().is_err());
        async { Ok("too late") }
    };
    let tool = Tool::new("block", block).timeout(Duration::from_millis(50));
    let server = Server::start(ToolServer::new("test").offer(tool), data.path()).await;
    server.caller().accepted(&runtime.invocation("block", "t", "c", json!({}))).await;
    assert_eq!(runtime.next().await.text(), too_late("50 milliseconds"));
    drop(release);
    server.caller().until_settled("t", "c").await;
    assert!(runtime.pending().is_empty());
}

/// Proves: CN-11
#[tokio::test(start_paused = true)]
async fn a_call_may_take_a_day_or_twice_its_expected_duration() -> Result<()> {
    let tools = ToolServer::new("slow")
        .tool("hang", hang)
        .offer(Tool::new("quick", hang).expected_duration(Duration::ZERO..=HOUR))
        .offer(Tool::new("long", hang).expected_duration(HOUR..=100 * HOUR))
        .offer(Tool::new("own", hang).expected_duration(HOUR..=100 * HOUR).timeout(HOUR / 2));
    let mut runtime = TestRuntime::start(tools).await?;
    let table = [("hang", 24 * HOUR, "24 hours"), ("quick", 24 * HOUR, "24 hours")];
    let longer = [("long", 200 * HOUR, "200 hours"), ("own", HOUR / 2, "30 minutes")];
    for (tool, timeout, words) in table.into_iter().chain(longer) {
        let begun = Instant::now();
        assert_eq!(runtime.call(tool, json!({})).await.text(), too_late(words));
        assert!((timeout..timeout + HOUR / 60).contains(&begun.elapsed()), "{tool}: {:?}", begun.elapsed());
    }
    Ok(())
}

/// Proves: CN-11
#[tokio::test(start_paused = true)]
async fn time_counts_across_a_restart() -> Result<()> {
    let tool = Tool::new("hang", hang).restartable().timeout(HOUR);
    let mut runtime = TestRuntime::start(ToolServer::new("slow").offer(tool)).await?;
    // The time that the server was down counts, but a call that runs again has ten minutes.
    for (before, down, after) in [(20, 10, 30), (55, 0, 10), (1, 6_000, 10)] {
        let call = runtime.invoke("hang", json!({})).await;
        tokio::time::sleep(before * HOUR / 60).await;
        runtime.crash().await;
        tokio::time::sleep(down * HOUR / 60).await;
        runtime.restart().await?;
        let begun = Instant::now();
        assert_eq!(runtime.result_of(&call).await.text(), too_late("1 hour"));
        let expected = after * HOUR / 60;
        assert!(
            (expected - HOUR / 60..expected + HOUR / 60).contains(&begun.elapsed()),
            "{:?}",
            begun.elapsed()
        );
    }
    Ok(())
}

/// Proves: CN-11
#[tokio::test(start_paused = true)]
async fn a_subscription_has_to_be_confirmed_in_time_and_may_then_last() -> Result<()> {
    let undecided = |_: Nothing, subscribe: Subscribe| async move {
        std::future::pending::<()>().await;
        drop(subscribe);
        Ok(())
    };
    let patient = |_: Nothing, subscribe: Subscribe| async move {
        let subscription = subscribe.confirm("").await?;
        tokio::time::sleep(1_000 * HOUR).await;
        subscription.finish("at last").await
    };
    let tools = ToolServer::new("slow").subscription("undecided", undecided).subscription("patient", patient);
    let mut runtime = TestRuntime::start(tools).await?;
    let confirmed = runtime.call("patient", json!({})).await;
    assert!(confirmed.result.subscription);
    let unconfirmed = runtime.call("undecided", json!({})).await;
    assert_eq!((unconfirmed.text(), unconfirmed.result.subscription), (&*too_late("24 hours"), false));
    let rap_tool::Callback::SubscriptionEvent(last) = runtime.next().await else { panic!("an event") };
    assert!(last.is_final && last.text == "at last", "{last:?}");
    Ok(())
}

/// Proves: CN-25, TC-10, TC-22
#[tokio::test]
async fn everything_of_a_runtime_that_vanished_is_cleaned_up_in_the_end() {
    let (data, gate, running) = (data_dir(), Gate::closed(), Arc::new(AtomicU32::new(0)));
    let mut limits = short_pauses();
    limits.delivery.give_up_after = Duration::from_millis(400);
    (limits.call_timeout, limits.cancel_grace) = (Duration::from_millis(400), Duration::from_millis(50));
    (limits.thread_ttl, limits.remember) = (Duration::from_millis(400), Duration::from_millis(400));
    let (closed, mut closings) = mpsc::unbounded_channel();
    let (hanging, watching, watched) = (Arc::clone(&running), Arc::clone(&running), gate.clone());
    let tools = ToolServer::new("test")
        .limits(limits)
        .tool("hang", move |args: Nothing, call: Call| {
            let guard = Guard::new(&hanging);
            async move {
                let _guard = guard;
                hang(args, call).await
            }
        })
        .subscription("watch", move |_: Nothing, subscribe: Subscribe| {
            let (guard, gate) = (Guard::new(&watching), watched.clone());
            async move {
                let (_guard, subscription) = (guard, subscribe.confirm("").await?);
                gate.pass().await;
                // An author who ignores that nobody listens.
                loop {
                    drop(subscription.send("something").await);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        })
        .on_close_thread(move |thread| {
            closed.send(thread.id().to_string()).ok();
            async { Ok(()) }
        });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    server.caller().accepted(&runtime.invocation("watch", "subscribes", "s", json!({}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    gate.reached().await;
    server.caller().accepted(&runtime.invocation("hang", "calls", "c", json!({}))).await;
    runtime.stop().await;
    gate.open(1);
    let mut names = Vec::new();
    while names.len() < 2 {
        names.extend(tokio::time::timeout(PATIENCE, closings.recv()).await.expect("no hook ran"));
    }
    names.sort();
    assert_eq!(names, ["calls", "subscribes"]);
    assert_eq!(running.load(Ordering::SeqCst), 0, "a handler is still running");
    let journal = Journal::open(data.path());
    for table in ["calls", "closings", "outbox", "questions", "call_keys"] {
        journal.until(&format!("SELECT count(*) FROM {table}"), 0).await;
    }
}

/// Proves: CN-25, TC-22
#[tokio::test(start_paused = true)]
async fn a_subscription_ends_when_all_its_events_were_refused_for_three_days() -> Result<()> {
    /// Reports its age when it is dropped.
    struct Age(Instant, mpsc::UnboundedSender<Duration>);
    impl Drop for Age {
        fn drop(&mut self) {
            self.1.send(self.0.elapsed()).ok();
        }
    }
    let (ended, mut endings) = mpsc::unbounded_channel();
    let hourly = move |_: Nothing, subscribe: Subscribe| {
        let age = Age(Instant::now(), ended.clone());
        async move {
            let (_age, subscription) = (age, subscribe.confirm("").await?);
            loop {
                tokio::time::sleep(HOUR).await;
                subscription.send("tick").await?;
            }
        }
    };
    let mut runtime = TestRuntime::start(ToolServer::new("ticks").subscription("hourly", hourly)).await?;
    let call = runtime.call("hourly", json!({})).await.result.id;
    for _ in 0..100 {
        runtime.refuse_next(401);
    }
    let age = tokio::time::timeout(200 * HOUR, endings.recv()).await?.unwrap();
    // The first was refused after an hour, and the last 72 hours later.
    assert!((73 * HOUR..74 * HOUR).contains(&age), "{age:?}");
    assert!(!runtime.is_alive(&call).await);
    assert!(runtime.pending().is_empty());
    Ok(())
}

#[tokio::test]
async fn the_log_says_how_a_call_ended() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let process = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let caller = process.caller();
    caller.accepted(&runtime.invocation("tick", "t", "s", json!({"count": 1, "every_ms": 1}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    assert_eq!(runtime.next().await.body["final"], true);
    process.until_logged(r#"tool="tick" thread="t" id="s" outcome="ended""#).await;
    for id in ["cancelled", "closed"] {
        caller.accepted(&runtime.invocation("slow", "t", id, json!({"seconds": 1_000}))).await;
    }
    caller.cancel("t", "cancelled").await;
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    process.until_logged(r#"id="cancelled" outcome="error""#).await;
    caller.close("t").await;
    process.until_logged(r#"id="closed" outcome="closed""#).await;
}

#[test]
fn the_server_default_is_a_day() {
    assert_eq!(Limits::default().call_timeout, 24 * HOUR);
}
