//! Cancelling calls, closing threads and querying the status of calls.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{Answer, Caller, Gate, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};
use rap_testkit::http::{exchange, request};
use rap_testkit::{PATIENCE, until};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate};
use serde_json::{Value, json};
use tokio::sync::mpsc;

const OK: (u16, String) = (200, String::new());
const PATHS: [&str; 3] = ["/close_thread", "/cancel_tool_call", "/tool_call_status"];
const NEVER: Duration = Duration::from_secs(3600);

#[derive(Deserialize, JsonSchema)]
struct Echo {
    text: String,
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Sends reports of handlers and hooks to the test.
#[derive(Clone)]
struct Reporter(mpsc::UnboundedSender<String>);

struct Reports(mpsc::UnboundedReceiver<String>);

fn reports_channel() -> (Reporter, Reports) {
    let (reporter, reports) = mpsc::unbounded_channel();
    (Reporter(reporter), Reports(reports))
}

impl Reporter {
    fn report(&self, what: &str) {
        // The test may have ended.
        drop(self.0.send(what.to_owned()));
    }
}

impl Reports {
    async fn next(&mut self) -> String {
        tokio::time::timeout(PATIENCE, self.0.recv()).await.expect("nothing was reported").unwrap()
    }

    fn is_empty(&mut self) -> bool {
        self.0.try_recv().is_err()
    }
}

/// Reports when it is dropped.
struct Guard(Reporter);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.report("dropped");
    }
}

/// Tools: `echo`; `polite` returns when it is cancelled; `stubborn` never returns; `wait` waits at the gate; `watch`
/// sends an event each time the gate opens. `polite` and `stubborn` report when they run.
fn server(reporter: &Reporter, gate: &Gate) -> ToolServer {
    let (polite, stubborn, waits, watches) = (reporter.clone(), reporter.clone(), gate.clone(), gate.clone());
    let watcher = reporter.clone();
    ToolServer::new("test")
        .limits(short_pauses())
        .tool("echo", |args: Echo, _: Call| async move { Ok(format!("echo {}", args.text)) })
        .tool("polite", move |_: Nothing, call: Call| {
            let reporter = polite.clone();
            async move {
                reporter.report("running");
                call.cancelled().await;
                assert!(call.is_cancelled());
                reporter.report("heard");
                Ok("as far as I got")
            }
        })
        .tool("stubborn", move |_: Nothing, _: Call| {
            let reporter = stubborn.clone();
            async move {
                let _guard = Guard(reporter.clone());
                reporter.report("running");
                std::future::pending::<Result<String>>().await
            }
        })
        .tool("wait", move |_: Nothing, _: Call| {
            let gate = waits.clone();
            async move {
                gate.pass().await;
                Ok("waited")
            }
        })
        .subscription("watch", move |_: Nothing, subscribe: Subscribe| {
            let (gate, guard) = (watches.clone(), Guard(watcher.clone()));
            async move {
                let subscription = subscribe.confirm("Watching.").await?;
                let _guard = guard;
                loop {
                    gate.pass().await;
                    subscription.send("something").await?;
                }
            }
        })
}

/// Reports the id of each thread that is closed.
fn reporting_closings(server: ToolServer, reporter: &Reporter) -> ToolServer {
    let reporter = reporter.clone();
    server.on_close_thread(move |thread| {
        reporter.report(&format!("closed {}", thread.id()));
        async { Ok(()) }
    })
}

/// Makes a call whose result shows that no other callback was pending before it.
async fn barrier(caller: &Caller, runtime: &mut Runtime) {
    caller.accepted(&runtime.invocation("echo", "last", "last", json!({"text": "end"}))).await;
    let last = runtime.next().await;
    assert_eq!((last.name.as_str(), last.text()), ("last", "echo end"));
}

/// Proves: CN-12, CN-13
#[tokio::test]
async fn what_a_handler_returns_after_a_cancellation_is_its_result() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("polite", "t", "c", json!({}))).await;
    assert_eq!(reports.next().await, "running");
    assert_eq!(caller.cancel("t", "c").await, OK);
    assert_eq!(reports.next().await, "heard");
    let result = runtime.next().await;
    let expected = json!({"type": "tool_result", "group_id": "t", "id": "c", "text": "as far as I got"});
    assert_eq!(result.body, expected);
    caller.until_settled("t", "c").await;
    barrier(&caller, &mut runtime).await;
}

/// Proves: CN-11, CN-12
#[tokio::test]
async fn a_cancelled_handler_that_does_not_return_is_dropped_after_the_grace_time() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.cancel_grace = Duration::from_millis(400);
    let server = Server::start(server(&reporter, &gate).limits(limits), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("stubborn", "t", "c", json!({}))).await;
    assert_eq!(reports.next().await, "running");
    let cancelled = Instant::now();
    assert_eq!(caller.cancel("t", "c").await, OK);
    assert_eq!(reports.next().await, "dropped");
    assert!(cancelled.elapsed() >= Duration::from_millis(400), "{:?}", cancelled.elapsed());
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    barrier(&caller, &mut runtime).await;
}

/// Proves: CN-11, CN-13
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cancelled_call_has_its_result_even_if_the_handler_blocks_its_thread() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.cancel_grace = Duration::from_millis(50);
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = std::sync::Mutex::new(blocked);
    let (tools, running) = (server(&reporter, &gate).limits(limits), reporter.clone());
    let tools = tools.tool("block", move |_: Nothing, _: Call| {
        running.report("running");
        // Ends when the test drops the sender.
        assert!(blocked.lock().unwrap().recv().is_err());
        async { Ok("too late") }
    });
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("block", "t", "c", json!({}))).await;
    assert_eq!(reports.next().await, "running");
    assert_eq!(caller.cancel("t", "c").await, OK);
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    caller.until_settled("t", "c").await;
    drop(release);
    barrier(&caller, &mut runtime).await;
}

/// Proves: CN-04, CN-05, CN-08, CN-16
#[tokio::test]
async fn repeated_and_unknown_cancellations_are_harmless() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("polite", "t", "c", json!({}))).await;
    assert_eq!(reports.next().await, "running");
    for (thread, call) in [("t", "other"), ("other", "c"), ("other", "other")] {
        assert_eq!(caller.cancel(thread, call).await, OK);
    }
    assert!(caller.is_alive("t", "c").await && reports.is_empty());
    for _ in 0..3 {
        assert_eq!(caller.cancel("t", "c").await, OK);
    }
    assert_eq!(runtime.next().await.text(), "as far as I got");
    caller.until_settled("t", "c").await;
    assert_eq!(caller.cancel("t", "c").await, OK);
    barrier(&caller, &mut runtime).await;
}

#[tokio::test]
async fn a_cancellation_that_arrives_before_its_invocation_takes_effect() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    assert_eq!(caller.cancel("t", "c").await, OK);
    assert_eq!(caller.cancel("t", "s").await, OK);
    caller.accepted(&runtime.invocation("stubborn", "t", "c", json!({}))).await;
    assert_eq!(runtime.next().await.text(), "Error: cancelled");
    let subscription = runtime.invocation("watch", "t", "s", json!({}));
    caller.accepted(&subscription).await;
    let result = runtime.next().await;
    assert_eq!((result.text(), result.body.get("subscription")), ("Error: cancelled", None));
    // A call with the same id in another thread is not affected.
    let mut other = runtime.invocation("echo", "t2", "c", json!({"text": "x"}));
    other["callback_url"] = json!(runtime.callback_url("other"));
    caller.accepted(&other).await;
    assert_eq!(runtime.next().await.text(), "echo x");
    assert!(reports.is_empty(), "no handler has run");
    barrier(&caller, &mut runtime).await;
}

/// Proves: CN-03, CN-09
#[tokio::test]
async fn a_cancellation_after_the_handler_has_returned_changes_nothing() {
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("echo", "t", "c1", json!({"text": "delivered"}))).await;
    assert_eq!(runtime.next().await.text(), "echo delivered");
    caller.until_settled("t", "c1").await;
    assert_eq!(caller.cancel("t", "c1").await, OK);

    runtime.answer_always(503);
    caller.accepted(&runtime.invocation("echo", "t", "c2", json!({"text": "on its way"}))).await;
    runtime.next().await;
    assert_eq!(caller.cancel("t", "c2").await, OK);
    runtime.answer_always(200);
    assert_eq!(runtime.accepted().await.text(), "echo on its way");
    caller.until_settled("t", "c2").await;
    barrier(&caller, &mut runtime).await;
}

/// Proves: SE-19, SE-26
#[tokio::test]
async fn a_cancelled_subscription_stops_and_sends_nothing_more() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.cancel_grace = Duration::from_millis(100);
    let server = Server::start(server(&reporter, &gate).limits(limits), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("watch", "t", "s", json!({}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    gate.open(1);
    assert_eq!(runtime.next().await.text(), "something");
    assert!(caller.is_alive("t", "s").await);
    assert_eq!(caller.cancel("t", "s").await, OK);
    // The handler still has its grace time to send events.
    gate.open(5);
    assert_eq!(reports.next().await, "dropped");
    assert!(!caller.is_alive("t", "s").await);
    barrier(&caller, &mut runtime).await;
}

/// Proves: TC-04, TC-11, TC-12, LC-03
#[tokio::test]
async fn closing_a_thread_ends_its_calls_and_subscriptions_without_callbacks_and_runs_the_hook_once() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.cancel_grace = Duration::from_millis(100);
    (limits.delivery.first_pause, limits.delivery.longest_pause) = (NEVER, NEVER);
    let tools = reporting_closings(server(&reporter, &gate).limits(limits), &reporter);
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("watch", "t", "s", json!({}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    caller.accepted(&runtime.invocation("polite", "t", "c1", json!({}))).await;
    caller.accepted(&runtime.invocation("stubborn", "t", "c2", json!({}))).await;
    assert_eq!([reports.next().await, reports.next().await], ["running", "running"]);
    // An undelivered result is not sent any more either.
    runtime.answer_always(503);
    caller.accepted(&runtime.invocation("echo", "t", "c3", json!({"text": "x"}))).await;
    assert_eq!(runtime.next().await.name, "c3");

    assert_eq!(caller.close("t").await, OK);
    for call in ["s", "c1", "c2", "c3"] {
        assert!(!caller.is_alive("t", call).await, "{call}");
    }
    let mut heard = [reports.next().await, reports.next().await, reports.next().await, reports.next().await];
    heard.sort();
    assert_eq!(heard, ["closed t", "dropped", "dropped", "heard"]);
    runtime.answer_always(200);
    for _ in 0..3 {
        assert_eq!(caller.close("t").await, OK);
    }
    let journal = Journal::open(data.path());
    journal.until("SELECT count(*) FROM closings WHERE pending = 1", 0).await;
    assert_eq!(journal.number("SELECT count(*) FROM outbox"), 0);
    barrier(&caller, &mut runtime).await;
    assert!(reports.is_empty());
}

/// Proves: TC-04, TC-05, TC-09, TC-12
#[tokio::test]
async fn a_hook_that_fails_panics_or_hangs_does_not_change_the_answer() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let hook = reporter.clone();
    let tools = server(&reporter, &gate).on_close_thread(move |thread| {
        let name = thread.id().as_str().to_owned();
        hook.report(&name);
        assert_ne!(name, "panics at once");
        async move {
            match name.as_str() {
                "fails" => Err(Error::new("the disk is full")),
                "panics" => panic!("as it should"),
                "hangs" => std::future::pending().await,
                _ => Ok(()),
            }
        }
    });
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    let journal = Journal::open(data.path());
    for thread in ["works", "fails", "panics", "panics at once", "hangs"] {
        let mut call = runtime.invocation("echo", thread, "c", json!({"text": "x"}));
        call["callback_url"] = json!(runtime.callback_url("x"));
        caller.accepted(&call).await;
        runtime.next().await;
        caller.until_settled(thread, "c").await;
        assert_eq!(caller.close(thread).await, OK);
        assert_eq!(reports.next().await, thread);
        if thread != "hangs" {
            journal.until("SELECT count(*) FROM closings WHERE pending = 1", 0).await;
        }
    }
    // A thread that is being closed is not closed again at the same time.
    assert_eq!(caller.close("hangs").await, OK);
    assert_eq!(caller.close("hangs").await, OK);
    barrier(&caller, &mut runtime).await;
    assert!(reports.is_empty());
}

/// Proves: TC-09, TC-14
#[tokio::test]
async fn closing_an_unknown_thread_is_acknowledged_and_does_nothing() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(reporting_closings(server(&reporter, &gate), &reporter), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    for _ in 0..2 {
        assert_eq!(caller.close("nobody").await, OK);
    }
    assert_eq!(Journal::open(data.path()).rows(), [0, 0, 0]);
    barrier(&caller, &mut runtime).await;
    assert!(reports.is_empty());
}

/// Proves: TC-08
#[tokio::test]
async fn an_invocation_after_its_thread_was_closed_runs_normally() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(reporting_closings(server(&reporter, &gate), &reporter), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    // Closes the thread before any call and between two calls, and repeats a call of the closed thread.
    assert_eq!(caller.close("t").await, OK);
    caller.accepted(&runtime.invocation("echo", "t", "c1", json!({"text": "1"}))).await;
    assert_eq!(runtime.next().await.text(), "echo 1");
    assert_eq!(caller.close("t").await, OK);
    assert_eq!(reports.next().await, "closed t");
    caller.accepted(&runtime.invocation("echo", "t", "c2", json!({"text": "2"}))).await;
    assert_eq!(runtime.next().await.text(), "echo 2");
    caller.accepted(&runtime.invocation("echo", "t", "c1", json!({"text": "1"}))).await;
    barrier(&caller, &mut runtime).await;
    assert_eq!(caller.close("t").await, OK);
    assert_eq!(reports.next().await, "closed t");
}

const CRASHING: &str = "RAP_TEST_CRASHING";

/// Proves: TC-11
#[tokio::test]
async fn a_hook_that_was_interrupted_by_a_crash_runs_again() {
    if std::env::var_os(CRASHING).is_some() {
        let (reporter, _reports) = reports_channel();
        let tools = server(&reporter, &Gate::closed()).on_close_thread(|_| async {
            std::fs::write(Path::new(&std::env::var(CRASHING)?).join("begun"), "")?;
            std::future::pending().await
        });
        return tools.serve("127.0.0.1:0").await.unwrap();
    }
    let (data, begun) = (data_dir(), data_dir());
    let this = "notifications::a_hook_that_was_interrupted_by_a_crash_runs_again";
    let process = ToolProcess::start_test(this, data.path(), &[(CRASHING, begun.path().to_str().unwrap())]);
    let mut runtime = Runtime::start().await;
    let caller = process.caller();
    caller.accepted(&runtime.invocation("echo", "t", "c", json!({"text": "x"}))).await;
    assert_eq!(runtime.next().await.text(), "echo x");
    assert_eq!(caller.close("t").await, OK);
    until("the hook has begun", async || begun.path().join("begun").exists()).await;
    process.kill();

    let (gate, (reporter, mut reports)) = (Gate::closed(), reports_channel());
    let _server = Server::start(reporting_closings(server(&reporter, &gate), &reporter), data.path()).await;
    assert_eq!(reports.next().await, "closed t");
    Journal::open(data.path()).until("SELECT count(*) FROM closings WHERE pending = 1", 0).await;
}

/// Proves: TC-03, TC-10, TC-22, CN-25
#[tokio::test]
async fn a_thread_that_is_never_closed_expires_unless_it_is_in_use() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.thread_ttl = Duration::from_millis(200);
    limits.cancel_grace = NEVER;
    let tools = reporting_closings(server(&reporter, &gate).limits(limits), &reporter);
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    caller.accepted(&runtime.invocation("wait", "calls", "c", json!({}))).await;
    caller.accepted(&runtime.invocation("watch", "subscribes", "s", json!({}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    // Each idle thread that expires shows that the older threads, which are in use, did not.
    for idle in ["idle1", "idle2", "idle3"] {
        caller.accepted(&runtime.invocation("echo", idle, idle, json!({"text": "x"}))).await;
        assert_eq!(runtime.next().await.name, idle);
        assert_eq!(reports.next().await, format!("closed {idle}"));
    }
    assert!(caller.is_alive("calls", "c").await && caller.is_alive("subscribes", "s").await);
    gate.open(100_000);
    let mut names = Vec::new();
    while names.len() < 2 {
        let next = runtime.next().await;
        if !names.contains(&next.name) {
            names.push(next.name);
        }
    }
    assert_eq!(reports.next().await, "closed calls");
    assert!(caller.is_alive("subscribes", "s").await);
    caller.cancel("subscribes", "s").await;
    assert_eq!([reports.next().await, reports.next().await], ["dropped", "closed subscribes"]);
}

#[tokio::test]
async fn a_settled_call_is_kept_for_a_time_and_then_deleted() {
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.remember = Duration::from_millis(1_500);
    limits.thread_ttl = limits.remember;
    let server = Server::start(server(&reporter, &gate).limits(limits), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    let call = runtime.invocation("echo", "t", "c", json!({"text": "x"}));
    caller.accepted(&runtime.invocation("wait", "t", "running", json!({}))).await;
    caller.accepted(&call).await;
    assert_eq!(runtime.next().await.text(), "echo x");
    let journal = Journal::open(data.path());
    journal.until("SELECT count(*) FROM calls WHERE call_id = 'c' AND state = 3", 1).await;
    let sensitive = "arguments IS NULL AND callback IS NULL AND user_id IS NULL AND cursor IS NULL";
    let kept = format!("SELECT count(*) FROM calls WHERE call_id = 'c' AND NOT ({sensitive})");
    assert_eq!(journal.number(&kept), 0, "sensitive data is deleted");
    journal.until("SELECT count(*) FROM calls WHERE call_id = 'c'", 0).await;
    assert!(caller.is_alive("t", "running").await, "a call that is not settled is kept");
    caller.accepted(&call).await;
    assert_eq!(runtime.next().await.text(), "echo x");
    gate.open(1);
    assert_eq!(runtime.next().await.text(), "waited");
}

#[tokio::test]
async fn a_call_is_alive_until_its_callback_was_accepted() {
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    assert!(!caller.is_alive("t", "c").await);
    caller.accepted(&runtime.invocation("wait", "t", "c", json!({}))).await;
    gate.reached().await;
    assert!(caller.is_alive("t", "c").await);
    runtime.answer_always(503);
    gate.open(1);
    assert_eq!(runtime.next().await.status, 503);
    assert!(caller.is_alive("t", "c").await, "the result is not delivered yet");
    runtime.answer_always(200);
    assert_eq!(runtime.accepted().await.text(), "waited");
    caller.until_settled("t", "c").await;
    let raw = request("/tool_call_status", "", &json!({"thread_id": "t", "tool_call_id": "c"}).to_string());
    let answer = exchange(&server.url, raw).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, r#"{"alive":false}"#));
}

/// Starts a call and a subscription, which the test then must not change.
async fn busy(caller: &Caller, runtime: &mut Runtime, gate: &Gate) {
    caller.accepted(&runtime.invocation("wait", "t", "c", json!({}))).await;
    gate.reached().await;
    caller.accepted(&runtime.invocation("watch", "t", "s", json!({}))).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    gate.reached().await;
}

async fn assert_unchanged(caller: &Caller, runtime: &mut Runtime, gate: &Gate) {
    assert!(caller.is_alive("t", "c").await && caller.is_alive("t", "s").await);
    assert!(runtime.pending().is_empty());
    gate.open(2);
    let mut texts = [runtime.next().await.text().to_owned(), runtime.next().await.text().to_owned()];
    texts.sort();
    assert_eq!(texts, ["something", "waited"]);
}

/// Proves: TC-21, CN-23, CN-05
#[tokio::test]
async fn invalid_ids_are_acknowledged_and_change_nothing() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(1_000, 1_000);
    let tools = reporting_closings(server(&reporter, &gate).limits(limits), &reporter);
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    busy(&caller, &mut runtime, &gate).await;
    let journal = Journal::open(data.path());
    journal.until("SELECT count(*) FROM outbox", 0).await;
    let before = journal.rows();
    let long = "x".repeat(257);
    let ids = [
        // Invalid ids.
        "",
        long.as_str(),
        "t\0",
        "t\n",
        "\u{7f}",
        "\u{85}",
        // Valid ids that are not in use.
        "../../etc/passwd",
        "t/../t",
        "t%00",
        " t",
        "T",
        "t' OR '1'='1",
        "t'; DELETE FROM calls; --",
        "%",
        "_",
        "*",
        "t\\",
        "$(id)",
        "`id`",
        "; rm -rf /",
    ];
    for id in ids {
        for (thread, call) in [(id, "c"), ("t", id), (id, id)] {
            assert_eq!(caller.cancel(thread, call).await, OK, "{thread:?} {call:?}");
            assert!(!caller.is_alive(thread, call).await, "{thread:?} {call:?}");
        }
        assert_eq!(caller.close(id).await, OK, "{id:?}");
    }
    assert_eq!(journal.rows(), before);
    assert!(reports.is_empty());
    assert_unchanged(&caller, &mut runtime, &gate).await;
}

#[tokio::test]
async fn a_malformed_notification_is_400_and_changes_nothing() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let tools = reporting_closings(server(&reporter, &gate), &reporter);
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    busy(&caller, &mut runtime, &gate).await;
    let bodies = [
        ("", "$: "),
        ("{", "$: "),
        ("[]", "$: "),
        ("\"t\"", "$: "),
        ("{}", "$.thread_id: "),
        (r#"{"thread_id": null, "tool_call_id": "c"}"#, "$.thread_id: "),
        (r#"{"thread_id": 7, "tool_call_id": "c"}"#, "$.thread_id: "),
        (r#"{"thread_id": ["t"], "tool_call_id": "c"}"#, "$.thread_id: "),
        (r#"{"thread_id": "t", "tool_call_id": "c"} x"#, "$: "),
    ];
    let refused = |path: &str, body: &str, (status, answer): Answer, named: &str| {
        assert_eq!(status, 400, "{path} {body}");
        let error: Value = serde_json::from_str(&answer).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(named), "{path} {body}: {message}");
    };
    for path in PATHS {
        for (body, named) in bodies {
            refused(path, body, caller.post(path, body).await, named);
        }
    }
    for path in &PATHS[1..] {
        for (body, named) in [
            (r#"{"thread_id": "t"}"#, "$.tool_call_id: "),
            (r#"{"thread_id": "t", "tool_call_id": {}}"#, "$.tool_call_id: "),
            (r#"{"thread_id": "", "tool_call_id": 7}"#, "$.tool_call_id: "),
        ] {
            refused(path, body, caller.post(path, body).await, named);
        }
    }
    assert!(reports.is_empty());
    assert_unchanged(&caller, &mut runtime, &gate).await;
}

/// Proves: TC-18, CN-20, TR-19
#[tokio::test]
async fn without_the_right_token_every_post_is_401_and_changes_nothing() {
    let (data, gate, (reporter, mut reports)) = (data_dir(), Gate::closed(), reports_channel());
    let tools = reporting_closings(server(&reporter, &gate), &reporter).bearer("right");
    let server = Server::start(tools, data.path()).await;
    let (caller, mut runtime) = (server.caller().with_token("right"), Runtime::start().await);
    busy(&caller, &mut runtime, &gate).await;
    let journal = Journal::open(data.path());
    journal.until("SELECT count(*) FROM outbox", 0).await;
    let before = journal.rows();
    let headers = [
        "",
        "authorization: Bearer wrong\r\n",
        "authorization: Bearer\r\n",
        "authorization: Bearer \r\n",
        "authorization: right\r\n",
        "authorization: Basic right\r\n",
        "authorization: Bearer right right\r\n",
        "authorization: Bearer RIGHT\r\n",
        "authorization: Bearer righ\r\n",
        "x-authorization: Bearer right\r\n",
    ];
    let invocation = runtime.invocation("echo", "t", "new", json!({"text": "x"})).to_string();
    let name = json!({"thread_id": "t", "tool_call_id": "c"}).to_string();
    for path in ["/invoke", PATHS[0], PATHS[1], PATHS[2]] {
        let body = if path == "/invoke" { &invocation } else { &name };
        for header in headers {
            let answer = exchange(&server.url, request(path, header, body)).await;
            assert_eq!(answer.status, 401, "{path} {header:?}");
            assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
            assert!(!answer.text.contains("right") && !answer.text.contains("alive"), "{}", answer.text);
        }
    }
    assert_eq!(journal.rows(), before);
    assert!(reports.is_empty());
    assert_unchanged(&caller, &mut runtime, &gate).await;
}

/// Proves: TC-20, CN-22
#[tokio::test]
async fn notifications_above_their_rate_are_429_and_invocations_are_not() {
    assert_eq!(Limits::default().notification_rate, Rate::new(100, 200));
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(1, 200);
    let tools = server(&reporter, &gate).limits(limits).bearer("one").bearer("two");
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let caller = server.caller().with_token("one");
    let body = json!({"thread_id": "t", "tool_call_id": "c"}).to_string();
    for number in 0..200 {
        let (status, _) = caller.post(PATHS[number % 3], body.clone()).await;
        assert_eq!(status, 200, "notification {number}");
    }
    let mut refused = [false; 3];
    for number in 0..60 {
        refused[number % 3] |= caller.post(PATHS[number % 3], body.clone()).await.0 == 429;
    }
    assert_eq!(refused, [true; 3], "they share one rate");
    for number in 0..50 {
        caller.accepted(&runtime.invocation("echo", "t2", &format!("c{number}"), json!({"text": "x"}))).await;
        runtime.next().await;
    }
    assert_eq!(server.caller().with_token("two").close("t").await, OK, "another caller is not affected");
}

/// Proves: LC-32
#[tokio::test]
async fn invocations_above_their_rate_are_503_and_can_be_repeated() {
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let mut limits = short_pauses();
    limits.invocation_rate = Rate::new(2, 5);
    let server = Server::start(server(&reporter, &gate).limits(limits), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    let mut refused = None;
    for number in 0..30 {
        let call = runtime.invocation("echo", "t", &format!("c{number}"), json!({"text": "x"}));
        let answer = exchange(&server.url, request("/invoke", "", &call.to_string())).await;
        if answer.status != 200 {
            refused = Some((answer, call));
            break;
        }
        runtime.next().await;
    }
    let (answer, call) = refused.expect("the rate limit applies");
    assert_eq!(answer.status, 503);
    assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    assert_eq!(caller.close("t").await, OK, "notifications have a separate rate");
    let again = async {
        while caller.invoke(&call).await.0 == 503 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, again).await.unwrap();
    assert_eq!(runtime.next().await.text(), "echo x");
}

/// Proves: TC-19, CN-21
#[tokio::test]
async fn the_answer_to_a_notification_does_not_reveal_what_exists() {
    let (data, gate, (reporter, _reports)) = (data_dir(), Gate::closed(), reports_channel());
    let server = Server::start(server(&reporter, &gate), data.path()).await;
    let (caller, mut runtime) = (server.caller(), Runtime::start().await);
    busy(&caller, &mut runtime, &gate).await;
    let comparable = |answer: rap_testkit::http::Response| {
        let head =
            answer.head.lines().filter(|line| !line.starts_with("date:")).collect::<Vec<_>>().join("\n");
        assert!(head.contains("content-length: 0"), "{head}");
        (answer.status, head, answer.text)
    };
    for path in &PATHS[..2] {
        let mut answers = Vec::new();
        for (thread, call) in [("nobody", "c"), ("t", "nothing"), ("t", "c"), ("t", "c"), ("", "\n")] {
            let body = json!({"thread_id": thread, "tool_call_id": call}).to_string();
            answers.push(comparable(exchange(&server.url, request(path, "", &body)).await));
        }
        answers.dedup();
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert_eq!((answers[0].0, answers[0].2.as_str()), (200, ""));
    }
}
