//! Resources that one caller can use are bounded, so that the others always find room. The time of a hook is bounded too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Caller, Gate, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};
use futures_util::{StreamExt, stream};
use rap_testkit::http::{connect, read_response, request};
use rap_testkit::programs::example;
use rap_testkit::{PATIENCE, Process};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate, TestRuntime};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;

/// Returns its text.
#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

/// A server with two callers, one of which is greedy.
struct Shared {
    server: Server,
    greedy: Caller,
    modest: Caller,
    gate: Gate,
    data: TempDir,
}

impl Shared {
    async fn start(limits: Limits) -> Shared {
        let (data, gate) = (data_dir(), Gate::closed());
        let server = Server::start(tools(&gate).limits(limits), data.path()).await;
        let [greedy, modest] =
            ["greedy-token", "modest-token"].map(|token| server.caller().with_token(token));
        Shared { server, greedy, modest, gate, data }
    }
}

/// Two tokens, and the tools `say`, `wait` (at the gate) and `follow` (until it is cancelled).
fn tools(gate: &Gate) -> ToolServer {
    let gate = gate.clone();
    ToolServer::new("shared")
        .bearer("greedy-token")
        .bearer("modest-token")
        .tool("say", |args: Say, _: Call| async { Ok(args.text) })
        .tool("wait", move |_: Say, _: Call| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok("waited")
            }
        })
        .subscription("follow", |_: Say, subscribe: Subscribe| async {
            let subscription = subscribe.confirm("Following.").await?;
            subscription.cancelled().await;
            Ok(())
        })
}

fn call(runtime: &Runtime, tool: &str, id: &str) -> Value {
    runtime.invocation(tool, "thread_1", id, json!({"text": id}))
}

#[tokio::test]
async fn one_caller_cannot_take_all_running_calls() {
    let mut limits = short_pauses();
    limits.calls = 8;
    let (shared, mut runtime) = (Shared::start(limits).await, Runtime::start().await);
    for number in 0..7 {
        shared.greedy.accepted(&call(&runtime, "wait", &format!("greedy_{number}"))).await;
    }
    let (status, answer) = shared.greedy.invoke(&call(&runtime, "wait", "greedy_7")).await;
    assert_eq!(status, 503, "{answer}");
    assert!(answer.contains("the share of running calls of this caller is used up"), "{answer}");
    for number in 0..3 {
        let id = format!("modest_{number}");
        shared.modest.accepted(&call(&runtime, "say", &id)).await;
        assert_eq!(runtime.next().await.name, id);
        shared.modest.until_settled("thread_1", &id).await;
    }
    shared.gate.open(7);
    for _ in 0..7 {
        assert_eq!(runtime.next().await.text(), "waited");
    }
}

#[tokio::test]
async fn one_caller_cannot_take_all_subscriptions() {
    let mut limits = short_pauses();
    limits.subscriptions = 8;
    let (shared, mut runtime) = (Shared::start(limits).await, Runtime::start().await);
    for number in 0..7 {
        shared.greedy.accepted(&call(&runtime, "follow", &format!("greedy_{number}"))).await;
        assert!(runtime.next().await.text().starts_with("Following."));
    }
    shared.greedy.accepted(&call(&runtime, "follow", "greedy_7")).await;
    let refused = "Error: the share of subscriptions of this caller is used up; cancel some first";
    assert_eq!(runtime.next().await.text(), refused);
    shared.modest.accepted(&call(&runtime, "follow", "modest")).await;
    assert!(runtime.next().await.text().starts_with("Following."));
    // A subscription that was cancelled makes room.
    assert_eq!(shared.greedy.cancel("thread_1", "greedy_0").await.0, 200);
    shared.greedy.until_settled("thread_1", "greedy_0").await;
    shared.greedy.accepted(&call(&runtime, "follow", "greedy_8")).await;
    assert!(runtime.next().await.text().starts_with("Following."));
}

/// Starts runtimes on different hosts that do not answer.
async fn hanging_hosts(number: usize) -> Vec<Runtime> {
    let start = |host: usize| async move {
        let runtime = Runtime::start_on(&format!("127.0.1.{host}:0")).await;
        runtime.stop_answering();
        runtime
    };
    stream::iter(1..=number).then(start).collect().await
}

#[tokio::test]
async fn a_caller_that_names_many_hosts_cannot_take_all_delivery_slots() {
    let mut limits = short_pauses();
    limits.deliveries = 8;
    let (shared, mut sound) = (Shared::start(limits.clone()).await, Runtime::start().await);
    let mut hosts = hanging_hosts(20).await;
    for (number, host) in hosts.iter().enumerate() {
        shared.greedy.accepted(&call(host, "say", &format!("greedy_{number}"))).await;
    }
    for host in &mut hosts[..7] {
        host.next().await;
    }
    // Neither first attempts nor retries of the other caller wait.
    for number in 0..5 {
        sound.answer_next(&[503]);
        let id = format!("modest_{number}");
        shared.modest.accepted(&call(&sound, "say", &id)).await;
        assert_eq!(sound.accepted().await.name, id);
    }
    assert!(hosts[7..].iter_mut().all(|host| host.pending().is_empty()), "the share is used up");
    for host in &hosts {
        host.resume_answering();
    }
    for host in &mut hosts[7..] {
        host.next().await;
    }
}

#[tokio::test]
async fn a_caller_cannot_take_all_slots_of_a_host_that_another_caller_uses() {
    let mut limits = short_pauses();
    limits.deliveries_per_host = 4;
    let (shared, mut host) = (Shared::start(limits).await, Runtime::start().await);
    host.stop_answering();
    for number in 0..10 {
        shared.greedy.accepted(&call(&host, "say", &format!("greedy_{number}"))).await;
    }
    for _ in 0..3 {
        assert!(host.next().await.name.starts_with("greedy_"));
    }
    shared.modest.accepted(&call(&host, "say", "modest")).await;
    assert_eq!(host.next().await.name, "modest");
    host.resume_answering();
    for _ in 3..10 {
        assert!(host.next().await.name.starts_with("greedy_"));
    }
}

/// After a restart, one caller has more messages than slots, all of them older than the message of the other caller.
#[tokio::test]
async fn waiting_messages_of_one_caller_do_not_come_before_all_of_another() {
    let mut limits = short_pauses();
    limits.deliveries = 4;
    limits.stop_within = Duration::from_millis(50);
    let (shared, mut sound) = (Shared::start(limits.clone()).await, Runtime::start().await);
    let hosts = hanging_hosts(30).await;
    for (number, host) in hosts.iter().enumerate() {
        shared.greedy.accepted(&call(host, "say", &format!("greedy_{number}"))).await;
    }
    sound.stop_answering();
    shared.modest.accepted(&call(&sound, "say", "modest")).await;
    sound.next().await;
    shared.server.stop().await;
    let server = Server::start(tools(&shared.gate).limits(limits), shared.data.path()).await;
    sound.resume_answering();
    assert_eq!(sound.next().await.name, "modest");
    server.caller().with_token("modest-token").until_settled("thread_1", "modest").await;
}

/// Nothing listens on these hosts, so each attempt fails at once and is retried.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_names_a_thousand_dead_hosts_does_not_delay_others() {
    const DEAD: usize = 1_000;
    let mut limits = short_pauses();
    limits.deliveries = 64;
    let (shared, mut sound) = (Shared::start(limits).await, Runtime::start().await);
    let dead = stream::iter(0..DEAD).for_each_concurrent(32, |number| {
        let mut call = call(&sound, "say", &format!("dead_{number}"));
        let host = format!("127.{}.{}.{}", 2 + number / 65_536, number / 256 % 256, number % 256);
        call["callback_url"] = format!("http://{host}:9/callback").into();
        let greedy = &shared.greedy;
        async move { greedy.accepted(&call).await }
    });
    dead.await;
    for number in 0..20 {
        sound.answer_next(&[503]);
        let id = format!("modest_{number}");
        shared.modest.accepted(&call(&sound, "say", &id)).await;
        assert_eq!(sound.accepted().await.name, id);
    }
    // All of them have been tried, and more than once.
    let journal = Journal::open(shared.data.path());
    journal.until("SELECT count(*) FROM outbox WHERE attempts < 2", 0).await;
    assert_eq!(journal.number("SELECT count(*) FROM outbox"), i64::try_from(DEAD).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_thread_with_very_many_calls_counts_as_several_requests() {
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(1, 2);
    let (shared, runtime) = (Shared::start(limits).await, Runtime::start().await);
    let calls = stream::iter(0..1_500).for_each_concurrent(32, |number| {
        let (call, greedy) = (call(&runtime, "wait", &format!("call_{number}")), &shared.greedy);
        async move { greedy.accepted(&call).await }
    });
    calls.await;
    assert_eq!(shared.greedy.close("thread_1").await.0, 200);
    assert_eq!(shared.greedy.close("thread_2").await.0, 429, "the first one visited all calls");
    assert_eq!(shared.modest.close("thread_1").await.0, 200);
    assert_eq!(shared.modest.close("thread_2").await.0, 200);
}

#[tokio::test]
async fn one_caller_cannot_take_all_memory_for_arguments_of_running_calls() {
    let mut limits = short_pauses();
    limits.arriving_bytes = 100_000;
    let (shared, runtime) = (Shared::start(limits).await, Runtime::start().await);
    let large = |id: &str, bytes: usize| {
        runtime.invocation("wait", "thread_1", id, json!({"text": "x".repeat(bytes)}))
    };
    let mut accepted = 0;
    while shared.greedy.invoke(&large(&format!("greedy_{accepted}"), 30_000)).await.0 == 200 {
        accepted += 1;
        assert!(accepted < 10, "there is no bound");
    }
    assert!(accepted >= 3);
    // Small calls need none of it, and others have a part of their own.
    shared.greedy.accepted(&call(&runtime, "wait", "small")).await;
    shared.modest.accepted(&large("modest", 10_000)).await;
}

#[tokio::test]
async fn one_caller_cannot_take_all_memory_for_request_bodies() {
    let mut limits = short_pauses();
    limits.arriving_bytes = 1_000_000;
    let (shared, mut runtime) = (Shared::start(limits).await, Runtime::start().await);
    let body =
        runtime.invocation("say", "thread_1", "large", json!({"text": "x".repeat(60_000)})).to_string();
    let whole = request("/invoke", "authorization: Bearer greedy-token\r\n", &body);
    let mut arriving = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let mut stream = connect(&shared.server.url).await;
        stream.write_all(&whole.as_bytes()[..whole.len() - 1]).await.unwrap();
        arriving.spawn(read_response(stream));
    }
    let answer = tokio::time::timeout(PATIENCE, arriving.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(answer.status, 503, "there is no memory for all of them");
    shared.modest.accepted(&call(&runtime, "say", "modest")).await;
    assert_eq!(runtime.next().await.name, "modest");
}

/// Proves: TR-19
#[tokio::test]
async fn tokens_from_the_environment_are_separated_by_commas_and_each_is_a_caller() {
    let data = data_dir();
    let tokens = [("RAP_TOOL_BEARER", "first-token, second-token")];
    let process = ToolProcess::start("kitchen_sink", data.path(), &tokens);
    let mut runtime = Runtime::start().await;
    let [first, second] = ["first-token", "second-token"].map(|token| process.caller().with_token(token));
    let slow = runtime.invocation("slow", "thread_1", "call_1", json!({"seconds": 3600}));
    first.accepted(&slow).await;
    assert!(first.is_alive("thread_1", "call_1").await);
    assert!(!second.is_alive("thread_1", "call_1").await, "it is the call of another caller");
    second.accepted(&runtime.invocation("echo", "thread_1", "call_2", json!({"text": "x"}))).await;
    runtime.expect_text("echo x").await;
    for wrong in ["first-token, second-token", "first-token,", "third"] {
        assert_eq!(process.caller().with_token(wrong).invoke(&slow).await.0, 401, "{wrong}");
    }
    for tokens in ["first-token,,second-token", "first-token,", ",", "two words,third"] {
        let mut command = example("kitchen_sink", data.path(), &[]);
        command.env("RAP_TOOL_BEARER", tokens);
        let start_error = Process::refused(command);
        assert!(start_error.contains("a bearer token must have"), "{start_error}");
        assert!(!start_error.contains("first-token"), "{start_error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_close_hook_that_takes_too_long_is_dropped_and_does_not_run_again() {
    for (seconds, expected_runs) in [(20, 2), (40, 1)] {
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&runs);
        let server = ToolServer::new("shared")
            .tool("say", |args: Say, _: Call| async { Ok(args.text) })
            .on_close_thread(move |_| {
                counter.fetch_add(1, Ordering::SeqCst);
                std::future::pending()
            });
        let mut runtime = TestRuntime::start(server).await.unwrap();
        runtime.call("say", json!({"text": "x"})).await;
        runtime.close().await;
        // The default is 30 seconds.
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        runtime.restart().await.unwrap();
        // The clock stands still until nothing else can run.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(runs.load(Ordering::SeqCst), expected_runs, "after {seconds} seconds");
    }
}

#[tokio::test]
async fn the_close_hooks_of_one_caller_do_not_keep_those_of_another_waiting() {
    const THREADS: usize = 300;
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (closed, mut closings) = tokio::sync::mpsc::unbounded_channel();
    let (hook_running, hook_most) = (Arc::clone(&running), Arc::clone(&most));
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(10_000, 10_000);
    let server = tools(&Gate::closed()).limits(limits).on_close_thread(move |thread| {
        let (running, most, closed) = (Arc::clone(&hook_running), Arc::clone(&hook_most), closed.clone());
        async move {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            closed.send(thread.id().to_string()).unwrap();
            if thread.id().as_str().starts_with("greedy") {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    });
    let server = Server::start(server, data.path()).await;
    let [greedy, modest] = ["greedy-token", "modest-token"].map(|token| server.caller().with_token(token));
    for number in 0..THREADS {
        let thread = format!("greedy_{number}");
        greedy.accepted(&runtime.invocation("say", &thread, "call_1", json!({"text": "x"}))).await;
        runtime.next().await;
        assert_eq!(greedy.close(&thread).await.0, 200);
    }
    modest.accepted(&runtime.invocation("say", "modest", "call_1", json!({"text": "x"}))).await;
    runtime.next().await;
    assert_eq!(modest.close("modest").await.0, 200);
    while closings.recv().await.unwrap() != "modest" {}
    assert!(most.load(Ordering::SeqCst) < THREADS, "the number of hooks that run is bounded");
}
