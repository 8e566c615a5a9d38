//! Restarts: every acknowledged call ends in a callback, however the server was stopped.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Journal, Received, Runtime, ToolProcess, data_dir, is_server_process, short_pauses};
use axum::body::Bytes;
use rap_testkit::programs::{example_path, tool_server};
use rap_testkit::until;
use rap_tool::prelude::*;
use serde_json::json;

/// Writes to a file that it was called, and returns only when it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Note {
    /// The file to write to.
    file: PathBuf,
}

/// Counts, with one event per number.
#[derive(Deserialize, JsonSchema)]
struct Count {
    to: u32,
}

fn append(file: &Path, line: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(file).unwrap();
    writeln!(file, "{line}").unwrap();
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).unwrap_or_default().lines().count()
}

/// Serves the tools of these tests. The close hook never finishes when it runs for the first time.
async fn serve_test_tools() {
    let note = |args: Note, call: Call| async move {
        append(&args.file, "called");
        call.cancelled().await;
        Ok("stopped")
    };
    let closing = std::env::var_os("CLOSINGS").map(PathBuf::from);
    let on_close = move |_: Thread| {
        let file = closing.clone();
        async move {
            let Some(file) = file else { return Ok(()) };
            append(&file, "closed");
            if lines(&file) == 1 {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    };
    let hesitate = |args: Note, subscribe: Subscribe| async move {
        append(&args.file, "called");
        if lines(&args.file) == 1 {
            std::future::pending::<()>().await;
        }
        subscribe.confirm("At last.").await?.finish("over").await
    };
    let count = |args: Count, subscribe: Subscribe| async move {
        let counted: u32 = subscribe.cursor()?.unwrap_or(0);
        let subscription = subscribe.confirm("Counting.").await?;
        for number in counted + 1..args.to {
            tokio::time::sleep(Duration::from_millis(5)).await;
            subscription.send(Event::new(number.to_string()).cursor(number)).await?;
        }
        subscription.finish(args.to.to_string()).await
    };
    let tools = ToolServer::new("notes").limits(short_pauses()).tool("note", note).on_close_thread(on_close);
    let tools = tools.subscription("hesitate", hesitate).subscription("count", count);
    tools.serve("127.0.0.1:0").await.unwrap();
}

fn echo(runtime: &Runtime, id: &str) -> serde_json::Value {
    runtime.invocation("echo", "thread_1", id, json!({"text": id}))
}

/// Proves: LC-13
#[tokio::test(flavor = "multi_thread")]
async fn a_restartable_call_that_was_killed_runs_again_and_delivers_one_result() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let call = runtime.invocation("slow", "thread_1", "call_1", json!({"seconds": 0.5}));
    server.caller().accepted(&call).await;
    server.kill();
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    assert!(server.caller().is_alive("thread_1", "call_1").await);
    assert_eq!(runtime.next().await.text(), "slept 0.5");
    server.caller().until_settled("thread_1", "call_1").await;
    // From now on the call is settled.
    server.kill();
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    server.caller().accepted(&call).await;
    server.caller().accepted(&echo(&runtime, "call_2")).await;
    assert_eq!(runtime.next().await.name, "call_2");
    assert!(!server.caller().is_alive("thread_1", "call_1").await);
}

/// Proves: LC-09, LC-13
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_not_restartable_ends_with_an_error_after_a_kill() {
    if is_server_process() {
        return serve_test_tools().await;
    }
    const THIS: &str = "restart::a_call_that_is_not_restartable_ends_with_an_error_after_a_kill";
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let file = data.path().join("notes");
    let server = ToolProcess::start_test(THIS, data.path(), &[]);
    let call = runtime.invocation("note", "thread_1", "call_1", json!({"file": file}));
    server.caller().accepted(&call).await;
    until("the call has begun", async || lines(&file) == 1).await;
    server.kill();
    let server = ToolProcess::start_test(THIS, data.path(), &[]);
    let result = runtime.next().await;
    assert!(result.text().starts_with("Error: the server restarted during the call"), "{result:?}");
    server.caller().until_settled("thread_1", "call_1").await;
    server.caller().accepted(&call).await;
    assert!(!server.caller().is_alive("thread_1", "call_1").await);
    assert_eq!(lines(&file), 1);
}

/// Proves: LC-13
#[tokio::test(flavor = "multi_thread")]
async fn an_unconfirmed_subscription_is_started_again() {
    if is_server_process() {
        return serve_test_tools().await;
    }
    const THIS: &str = "restart::an_unconfirmed_subscription_is_started_again";
    for gracefully in [false, true] {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let file = data.path().join("notes");
        let server = ToolProcess::start_test(THIS, data.path(), &[]);
        let call = runtime.invocation("hesitate", "thread_1", "sub_1", json!({"file": file}));
        server.caller().accepted(&call).await;
        until("the call has begun", async || lines(&file) == 1).await;
        if gracefully {
            assert!(server.terminate());
        } else {
            server.kill();
        }
        let _server = ToolProcess::start_test(THIS, data.path(), &[]);
        assert_eq!(runtime.next().await.text(), "At last. Subscription ID: sub_1");
        assert_eq!(runtime.next().await.body["final"], true);
    }
}

/// Proves: TC-11
#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_close_hook_runs_again_after_a_crash() {
    if is_server_process() {
        return serve_test_tools().await;
    }
    const THIS: &str = "restart::an_unfinished_close_hook_runs_again_after_a_crash";
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (notes, closings) = (data.path().join("notes"), data.path().join("closings"));
    let environment = [("CLOSINGS", closings.to_str().unwrap())];
    let server = ToolProcess::start_test(THIS, data.path(), &environment);
    let call = runtime.invocation("note", "thread_1", "call_1", json!({"file": notes}));
    server.caller().accepted(&call).await;
    assert_eq!(server.caller().close("thread_1").await, (200, String::new()));
    until("the close hook has started", async || lines(&closings) == 1).await;
    server.kill();
    let server = ToolProcess::start_test(THIS, data.path(), &environment);
    until("the close hook has run again", async || lines(&closings) == 2).await;
    // The thread was closed, so the call has no result.
    assert!(!server.caller().is_alive("thread_1", "call_1").await);
    assert!(runtime.pending().is_empty());
}

/// Proves: LC-09, LC-13, TR-14
#[tokio::test(flavor = "multi_thread")]
async fn an_undelivered_result_is_delivered_after_the_restart() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    runtime.answer_always(503);
    server.caller().accepted(&echo(&runtime, "call_1")).await;
    let tried = runtime.next().await;
    server.kill();
    let address = runtime.stop().await;
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start_on(&address).await;
    let taken = runtime.next().await;
    assert_eq!(taken.raw, tried.raw);
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(runtime.pending().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_is_recognised_after_a_restart() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    server.caller().accepted(&echo(&runtime, "call_1")).await;
    runtime.next().await;
    server.caller().until_settled("thread_1", "call_1").await;
    server.kill();
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    // A repeat is recognised even if the toolset has changed since then.
    let mut stale = echo(&runtime, "call_1");
    stale["toolset_version"] = "another".into();
    server.caller().accepted(&echo(&runtime, "call_1")).await;
    server.caller().accepted(&stale).await;
    server.caller().accepted(&echo(&runtime, "call_2")).await;
    assert_eq!(runtime.next().await.name, "call_2");
    assert!(!server.caller().is_alive("thread_1", "call_1").await);
}

/// Every invocation that was answered with 200 has one result, however often the server is killed.
///
/// Proves: LC-08, LC-09, LC-13, LC-18
#[tokio::test(flavor = "multi_thread")]
async fn repeated_kills_neither_lose_nor_duplicate_results() {
    const KILLS: u64 = 10;
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let url = tokio::sync::watch::Sender::new(Some(server.url.clone()));
    let acknowledged = Arc::new(Mutex::new(BTreeMap::new()));
    let sent = Arc::new(Mutex::new(BTreeMap::new()));
    let template = runtime.invocation("", "", "", json!({}));
    let base = template["callback_url"].as_str().unwrap().to_owned();
    let caller = server.caller();
    let callers: Vec<_> = (0..4)
        .map(|worker| {
            let (url, base, mut caller) = (url.subscribe(), base.clone(), caller.clone());
            let (acknowledged, sent) = (Arc::clone(&acknowledged), Arc::clone(&sent));
            tokio::spawn(async move {
                for number in 0.. {
                    let Some(now) = url.borrow().clone() else { return };
                    caller = caller.moved_to(&now);
                    let (id, thread) = (format!("call_{worker}_{number}"), format!("thread_{}", number % 5));
                    let (call, expected) = call_number(number, &id, &thread, &base);
                    sent.lock().unwrap().insert(id.clone(), (thread, expected.clone()));
                    let reply = caller.try_post("/invoke", call.to_string()).await;
                    match reply.map(|reply| reply.status) {
                        Some(200) => drop(acknowledged.lock().unwrap().insert(id, expected)),
                        Some(status) => assert_eq!(status, 503),
                        None => tokio::time::sleep(Duration::from_millis(5)).await,
                    }
                }
            })
        })
        .collect();
    for kill in 1..=KILLS {
        // Kills at an arbitrary moment after some more calls were acknowledged.
        let enough = acknowledged.lock().unwrap().len() + kill as usize * 3;
        until("calls are acknowledged", async || acknowledged.lock().unwrap().len() >= enough).await;
        let moment = (u64::from(std::process::id()) * 31 + kill * 7_919) % 60_000;
        tokio::time::sleep(Duration::from_micros(moment)).await;
        server.kill();
        server = ToolProcess::start("kitchen_sink", data.path(), &[]);
        url.send_replace(Some(server.url.clone()));
    }
    url.send_replace(None);
    for caller in callers {
        caller.await.unwrap();
    }
    let acknowledged = std::mem::take(&mut *acknowledged.lock().unwrap());
    let mut results: HashMap<String, BTreeSet<Bytes>> = HashMap::new();
    let mut missing: BTreeSet<&String> = acknowledged.keys().collect();
    while !missing.is_empty() {
        let result = runtime.next().await;
        missing.remove(&result.name);
        results.entry(result.name).or_default().insert(result.raw);
    }
    for id in acknowledged.keys().take(50) {
        let thread = sent.lock().unwrap()[id].0.clone();
        caller.clone().moved_to(&server.url).until_settled(&thread, id).await;
    }
    for result in runtime.pending() {
        results.entry(result.name).or_default().insert(result.raw);
    }
    for (id, bodies) in &results {
        assert_eq!(bodies.len(), 1, "{id} has several results: {bodies:?}");
        let (thread, expected) = &sent.lock().unwrap()[id];
        check_result(bodies.first().unwrap(), id, thread, expected);
    }
}

fn call_number(number: u64, id: &str, thread: &str, base: &str) -> (serde_json::Value, String) {
    let (operation, arguments, expected) = match number % 3 {
        0 => ("echo", json!({"text": id}), format!("echo {id}")),
        1 => ("fail", json!({"message": id}), format!("Error: {id}")),
        _ => ("slow", json!({"seconds": 0.05}), "slept 0.05".into()),
    };
    let call = json!({
        "operation": operation, "arguments": arguments, "id": id, "group_id": thread,
        "callback_url": format!("{base}{id}"),
    });
    (call, expected)
}

fn check_result(raw: &Bytes, id: &str, thread: &str, expected: &str) {
    let body: serde_json::Value = serde_json::from_slice(raw).unwrap();
    assert_eq!(
        (&body["type"], &body["id"], &body["group_id"]),
        (&json!("tool_result"), &json!(id), &json!(thread))
    );
    let text = body["text"].as_str().unwrap();
    // `echo` and `fail` are not restartable.
    let restarted = text.starts_with("Error: the server restarted") && !expected.starts_with("slept");
    assert!(text == expected || restarted, "{id}: {text}");
}

/// Removes repeated events, which have the same event id.
fn distinct(events: impl IntoIterator<Item = Received>) -> Vec<Received> {
    let mut seen = BTreeSet::new();
    events.into_iter().filter(|event| seen.insert(event.event_id().to_owned())).collect()
}

/// Proves: LC-14, SE-10, TR-18
#[tokio::test(flavor = "multi_thread")]
async fn repeated_kills_neither_lose_nor_repeat_events() {
    const LINES: usize = 60;
    let (data, files, mut runtime) = (data_dir(), data_dir(), Runtime::start().await);
    let file = files.path().join("log.txt");
    append(&file, "before the subscription");
    let environment = [("WATCH_DIR", files.path().to_str().unwrap())];
    let mut server = ToolProcess::start("watch", data.path(), &environment);
    let call = runtime.invocation("follow", "thread_1", "sub_1", json!({"file": "log.txt"}));
    server.caller().accepted(&call).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    let mut events = Vec::new();
    for number in 0..LINES {
        append(&file, &format!("line {number}"));
        match number % 15 {
            // Kills the server sometimes during delivery, sometimes right after the file has changed.
            7 => events.push(runtime.next().await),
            14 => {
                server.kill();
                server = ToolProcess::start("watch", data.path(), &environment);
            }
            _ => {}
        }
    }
    while events.last().is_none_or(|event: &Received| event.text() != format!("line {}", LINES - 1)) {
        events.push(runtime.next().await);
    }
    assert!(events.iter().all(Received::is_event), "{events:?}");
    let texts: Vec<String> = distinct(events).iter().map(|event| event.text().to_owned()).collect();
    let expected: Vec<String> = (0..LINES).map(|number| format!("line {number}")).collect();
    assert_eq!(texts, expected);
    assert!(server.caller().is_alive("thread_1", "sub_1").await);
}

/// Proves: LC-14, SE-04
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_reaches_its_final_event_despite_kills() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let call = runtime.invocation("tick", "thread_1", "sub_1", json!({"count": 20, "every_ms": 20}));
    server.caller().accepted(&call).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    let mut events = Vec::new();
    while events.last().is_none_or(|event: &Received| event.body["final"] != true) {
        events.push(runtime.next().await);
        if events.len() % 6 == 0 {
            server.kill();
            server = ToolProcess::start("kitchen_sink", data.path(), &[]);
        }
    }
    server.caller().until_settled("thread_1", "sub_1").await;
    events.extend(runtime.pending());
    let texts: Vec<String> = distinct(events).iter().map(|event| event.text().to_owned()).collect();
    let expected: Vec<String> = (1..=20).map(|number| format!("tick {number}")).collect();
    assert_eq!(texts, expected);
}

/// Proves: LC-14, SE-01, SE-04, SE-11
#[tokio::test(flavor = "multi_thread")]
async fn kills_and_outages_neither_lose_nor_repeat_events_of_many_subscriptions() {
    if is_server_process() {
        return serve_test_tools().await;
    }
    const THIS: &str = "restart::kills_and_outages_neither_lose_nor_repeat_events_of_many_subscriptions";
    const TO: usize = 40;
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    runtime.answer_next(&[200, 200, 503, 200, 500, 503, 200].repeat(100));
    let mut server = ToolProcess::start_test(THIS, data.path(), &[]);
    let names: Vec<String> = (0..8).map(|number| format!("sub_{number}")).collect();
    for name in &names {
        let call = runtime.invocation("count", "thread_1", name, json!({"to": TO}));
        server.caller().accepted(&call).await;
    }
    let mut taken: HashMap<String, Vec<Received>> = HashMap::new();
    let mut unfinished = names.len();
    let mut received = 0;
    while unfinished > 0 {
        let next = runtime.next().await;
        received += 1;
        if received % 60 == 0 {
            server.kill();
            server = ToolProcess::start_test(THIS, data.path(), &[]);
        }
        if next.status == 200 {
            let of_this = taken.entry(next.name.clone()).or_default();
            let known = of_this.iter().any(|before| before.raw == next.raw);
            if !known {
                unfinished -= usize::from(next.body["final"] == true);
                of_this.push(next);
            }
        }
    }
    let mut expected = vec!["Counting.".to_owned()];
    expected.extend((1..=TO).map(|number| number.to_string()));
    for name in &names {
        expected[0] = format!("Counting. Subscription ID: {name}");
        let texts: Vec<&str> = taken[name].iter().map(Received::text).collect();
        assert_eq!(texts, expected, "{name}");
        server.caller().until_settled("thread_1", name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graceful_shutdown_finishes_calls_and_subscriptions_continue_after_the_restart() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let tick = runtime.invocation("tick", "thread_1", "sub_1", json!({"count": 1_000, "every_ms": 30}));
    server.caller().accepted(&tick).await;
    runtime.next().await;
    runtime.expect_text("tick 1").await;
    let slow = runtime.invocation("slow", "thread_1", "call_1", json!({"seconds": 0.7}));
    server.caller().accepted(&slow).await;
    assert!(server.terminate(), "it did not exit with success");
    let mut received = runtime.pending();
    let results: Vec<Received> = received.extract_if(.., |it| it.name == "call_1").collect();
    assert_eq!(results.iter().map(Received::text).collect::<Vec<_>>(), ["slept 0.7"]);
    let before = received.len() as u64 + 1;

    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    received.push(runtime.next().await);
    let texts: Vec<String> = distinct(received).iter().map(|event| event.text().to_owned()).collect();
    let expected: Vec<String> = (2..=before + 1).map(|number| format!("tick {number}")).collect();
    assert_eq!(texts, expected);
    assert!(!server.caller().is_alive("thread_1", "call_1").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_server_on_the_same_data_directory_is_refused() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let stderr = ToolProcess::refused("kitchen_sink", data.path(), &[]);
    assert!(stderr.contains("another process is using this directory; stop it first"), "{stderr}");
    // The first server still works.
    server.caller().accepted(&echo(&runtime, "call_1")).await;
    runtime.expect_text("echo call_1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_can_only_be_opened_with_its_own_key() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (right, wrong) = ("ab".repeat(32), "cd".repeat(32));
    let server = ToolProcess::start("kitchen_sink", data.path(), &[("RAP_TOOL_KEY", &right)]);
    runtime.answer_always(503);
    server.caller().accepted(&echo(&runtime, "call_1")).await;
    runtime.next().await;
    server.kill();
    for environment in [&[("RAP_TOOL_KEY", &*wrong)][..], &[]] {
        let stderr = ToolProcess::refused("kitchen_sink", data.path(), environment);
        assert!(stderr.contains("was written with another key; use the RAP_TOOL_KEY"), "{stderr}");
        assert!(!stderr.contains(&right) && !stderr.contains(&wrong), "{stderr}");
    }
    let stderr = ToolProcess::refused("kitchen_sink", data.path(), &[("RAP_TOOL_KEY", "not a key")]);
    assert!(stderr.contains("64 hexadecimal digits") && !stderr.contains("not a key"), "{stderr}");
    runtime.answer_always(200);
    let _server = ToolProcess::start("kitchen_sink", data.path(), &[("RAP_TOOL_KEY", &right)]);
    runtime.expect_text("echo call_1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_of_a_newer_version_is_refused() {
    let data = data_dir();
    ToolProcess::start("kitchen_sink", data.path(), &[]).kill();
    let journal = rusqlite::Connection::open(data.path().join("journal.db")).unwrap();
    journal.pragma_update(None, "user_version", 99).unwrap();
    drop(journal);
    let stderr = ToolProcess::refused("kitchen_sink", data.path(), &[]);
    assert!(stderr.contains("version 99"), "{stderr}");
}

const SECRET: &str = "s3cr3t-part-of-the-callback-url";
const TOKEN: &str = "t0ken-that-opens-this-server";

/// Runs a server through all uses of a callback URL: delivered, retried, refused, followed by events, and
/// unreachable.
async fn run_with_secrets(data: &Path, environment: &[(&str, &str)]) -> (ToolProcess, Runtime) {
    let environment = [environment, &[("RAP_TOOL_BEARER", TOKEN)]].concat();
    let server = ToolProcess::start("kitchen_sink", data, &environment);
    let caller = server.caller().with_token(TOKEN);
    let (mut runtime, gone) = (Runtime::start().await, Runtime::start().await);
    let call = |runtime: &Runtime, operation: &str, id: &str, arguments| {
        let mut call = runtime.invocation(operation, "thread_1", id, arguments);
        call["callback_url"] = runtime.callback_url(&format!("{SECRET}?token={SECRET}")).into();
        call
    };
    runtime.answer_next(&[200, 404, 413, 200, 503]);
    // Status queries do not tell that a result was refused.
    let journal = Journal::open(data);
    for (id, settled) in ["taken", "refused", "too_large", "tried_again"].into_iter().zip(1..) {
        caller.accepted(&call(&runtime, "echo", id, json!({"text": "hi"}))).await;
        journal.until("SELECT count(*) FROM calls WHERE state = 3", settled).await;
    }
    caller.accepted(&call(&runtime, "nonsense", "unknown", json!({}))).await;
    caller.accepted(&call(&runtime, "tick", "sub_1", json!({"count": 1_000_000, "every_ms": 10}))).await;
    let mut unreachable = call(&gone, "echo", "unreachable", json!({"text": "hi"}));
    gone.stop().await;
    caller.accepted(&unreachable).await;
    unreachable["callback_url"] = format!("ftp://example.com/{SECRET}").into();
    assert_eq!(caller.invoke(&unreachable).await.0, 400);
    while !runtime.next().await.text().starts_with("tick 3") {}
    (server, runtime)
}

fn files_in(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Proves: LC-34
#[tokio::test(flavor = "multi_thread")]
async fn callback_urls_and_tokens_are_not_on_disk_in_plain_text() {
    let data = data_dir();
    let data = data.path().join("made by the server");
    let (server, _runtime) = run_with_secrets(&data, &[]).await;
    let check = || {
        let mut bytes = 0;
        for file in files_in(&data) {
            let content = fs::read(&file).unwrap();
            bytes += content.len();
            for secret in [SECRET, TOKEN] {
                let found = content.windows(secret.len()).any(|window| window == secret.as_bytes());
                assert!(!found, "{} holds {secret}", file.display());
            }
        }
        assert!(bytes > 10_000, "{} is empty", data.display());
    };
    check();
    server.kill();
    check();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&data.join("journal.key")), mode(&data)), (0o600, 0o700));
}

/// Proves: LC-34
#[tokio::test(flavor = "multi_thread")]
async fn callback_urls_and_tokens_are_not_in_the_log_at_any_level() {
    let data = data_dir();
    let (server, _runtime) = run_with_secrets(data.path(), &[("RUST_LOG", "trace")]).await;
    server.until_logged("was refused").await;
    let log = server.log();
    for secret in [SECRET, TOKEN] {
        let line = log.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{line:?}");
    }
}

/// While the disk is full, the server keeps what it has acknowledged and acknowledges nothing else. It recovers by
/// itself when there is space again.
///
/// Proves: LC-09
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_server_on_a_full_disk_accepts_nothing_and_loses_nothing() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    // A file size limit simulates the full disk. Its signal is ignored, so that writes fail with an error.
    let mut shell = tool_server(Command::new("/bin/sh"), data.path(), &[]);
    let program = example_path("kitchen_sink");
    shell.args(["-c", "trap '' XFSZ; exec \"$0\"", program.to_str().unwrap()]);
    let server = ToolProcess::spawn(shell);
    let caller = server.caller();
    let limit = |bytes: &str| {
        let (pid, soft) = (server.id().to_string(), format!("--fsize={bytes}:unlimited"));
        assert!(Command::new("prlimit").args(["--pid", &pid, &soft]).status().unwrap().success());
    };
    let slow = runtime.invocation("slow", "thread_1", "slow", json!({"seconds": 0.3}));
    let tick = runtime.invocation("tick", "thread_1", "tick", json!({"count": 10, "every_ms": 50}));
    caller.accepted(&slow).await;
    caller.accepted(&tick).await;
    assert_eq!(runtime.next().await.name, "tick");
    limit("0");
    for number in 0..5 {
        let call = echo(&runtime, &format!("refused_{number}"));
        let reply = caller.try_post("/invoke", call.to_string()).await.unwrap();
        assert_eq!((reply.status, reply.retry_after), (503, Some(Duration::from_secs(1))));
    }
    // A notification is acknowledged anyway.
    assert_eq!(caller.cancel("thread_1", "refused_1").await, (200, String::new()));
    server.until_logged("the journal cannot be written").await;
    limit("unlimited");
    until("there is space", async || caller.invoke(&echo(&runtime, "taken")).await.0 == 200).await;
    for id in ["slow", "tick", "taken"] {
        caller.until_settled("thread_1", id).await;
    }
    let mut all = BTreeSet::new();
    for received in runtime.pending() {
        all.insert(format!("{} {}", received.name, received.text()));
    }
    let mut expected: BTreeSet<String> = (1..=10).map(|number| format!("tick tick {number}")).collect();
    expected.extend(["slow slept 0.3".into(), "taken echo taken".into()]);
    assert_eq!(all, expected);
}
