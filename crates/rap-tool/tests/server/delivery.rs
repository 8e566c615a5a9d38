//! Delivery of results: retries, refusals, giving up, and isolation between hosts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Caller, Journal, Runtime, Server, data_dir, short_pauses, wait_past_retries};
use axum::http::header::{LOCATION, RETRY_AFTER};
use futures_util::{StreamExt, stream};
use rap_tool::Rate;
use rap_tool::prelude::*;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::sync::Barrier;

/// Returns its text.
#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

/// Waits until it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Wait {}

fn tools() -> ToolServer {
    ToolServer::new("parrot")
        .limits(short_pauses())
        .tool("say", |args: Say, _: Call| async { Ok(args.text) })
        .tool("wait", |_: Wait, call: Call| async move {
            call.cancelled().await;
            Ok("stopped")
        })
}

/// Waits until a call is settled. Status queries do not tell whether its result was refused.
async fn until_settled(data: &TempDir, id: &str) {
    let sql = format!("SELECT count(*) FROM calls WHERE call_id = '{id}' AND state = 3");
    Journal::open(data.path()).until(&sql, 1).await;
}

async fn say(caller: &Caller, runtime: &Runtime, id: &str) {
    caller.accepted(&runtime.invocation("say", "thread_1", id, json!({"text": id}))).await;
}

/// Proves: TR-01, TR-14
#[tokio::test]
async fn a_result_is_retried_with_growing_pauses_after_5xx_answers() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    runtime.answer_next(&[500, 502, 503, 504]);
    say(&server.caller(), &runtime, "call_1").await;
    let mut attempts = Vec::new();
    for _ in 0..5 {
        attempts.push(runtime.next().await);
    }
    let statuses: Vec<u16> = attempts.iter().map(|attempt| attempt.status).collect();
    assert_eq!(statuses, [500, 502, 503, 504, 200]);
    assert!(attempts.iter().all(|attempt| attempt.raw == attempts[0].raw), "{attempts:?}");
    // Pauses of 20, 40, 80 and 100 ms, plus or minus 25 %.
    for (pair, least) in attempts.windows(2).zip([15, 30, 60, 75]) {
        let pause = pair[1].at - pair[0].at;
        assert!(pause >= Duration::from_millis(least), "{pause:?} instead of {least} ms");
    }
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(wait_past_retries(&server.caller(), &mut runtime).await.is_empty());
}

/// Proves: TR-14
#[tokio::test]
async fn a_result_is_retried_until_the_runtime_is_reachable() {
    let (data, runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    let call = runtime.invocation("say", "thread_1", "call_1", json!({"text": "hi"}));
    let address = runtime.stop().await;
    server.caller().accepted(&call).await;
    // Several attempts fail while this waits.
    let mut elsewhere = Runtime::start().await;
    wait_past_retries(&server.caller(), &mut elsewhere).await;
    assert!(server.caller().is_alive("thread_1", "call_1").await);
    let mut runtime = Runtime::start_on(&address).await;
    assert_eq!(runtime.next().await.text(), "hi");
    server.caller().until_settled("thread_1", "call_1").await;
}

/// Proves: TR-14
#[tokio::test]
async fn a_callback_that_is_not_answered_in_time_is_retried() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.callback_within = Duration::from_millis(200);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.stop_answering();
    say(&server.caller(), &runtime, "call_1").await;
    let first = runtime.next().await;
    let second = runtime.next().await;
    assert!(second.at - first.at >= Duration::from_millis(200));
    assert_eq!(first.raw, second.raw);
    assert!(server.caller().is_alive("thread_1", "call_1").await);
    runtime.resume_answering();
    server.caller().until_settled("thread_1", "call_1").await;
}

/// Proves: TR-15
#[tokio::test]
async fn a_refused_result_is_not_sent_again() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    for status in [401, 403, 404, 405, 408, 409, 410, 422, 425, 429, 451] {
        runtime.answer_next(&[status]);
        let id = format!("call_{status}");
        say(&server.caller(), &runtime, &id).await;
        assert_eq!(runtime.next().await.name, id);
        until_settled(&data, &id).await;
    }
    assert!(wait_past_retries(&server.caller(), &mut runtime).await.is_empty());
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut elsewhere = Runtime::start().await;
    let server = Server::start(tools(), data.path()).await;
    for status in [301, 302, 303, 307, 308] {
        runtime.answer_next_with(status, LOCATION, &elsewhere.callback_url("elsewhere"));
        let id = format!("call_{status}");
        say(&server.caller(), &runtime, &id).await;
        assert_eq!(runtime.next().await.name, id);
        until_settled(&data, &id).await;
    }
    assert!(wait_past_retries(&server.caller(), &mut runtime).await.is_empty());
    assert!(elsewhere.pending().is_empty());
}

/// Proves: LC-09
#[tokio::test]
async fn a_result_refused_with_400_or_413_is_replaced_once_by_an_error() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    for (number, status) in [400, 413].into_iter().cycle().take(10).enumerate() {
        let id = format!("call_{number}");
        runtime.answer_next(&[status, 503]);
        say(&server.caller(), &runtime, &id).await;
        assert_eq!(runtime.next().await.text(), id);
        let (tried, taken) = (runtime.next().await, runtime.next().await);
        assert_eq!(tried.text(), format!("Error: the result was refused ({status})"));
        assert_eq!((taken.status, &taken.raw), (200, &tried.raw));
        until_settled(&data, &id).await;
    }
    // If the error is refused as well, the call is settled.
    runtime.answer_next(&[413, 413]);
    say(&server.caller(), &runtime, "refused_twice").await;
    assert_eq!([runtime.next().await.status, runtime.next().await.status], [413, 413]);
    until_settled(&data, "refused_twice").await;
    assert!(wait_past_retries(&server.caller(), &mut runtime).await.is_empty());
}

#[tokio::test]
async fn delivery_is_given_up_after_the_time_limit() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.delivery.give_up_after = Duration::from_millis(300);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.answer_always(503);
    let begun = Instant::now();
    say(&server.caller(), &runtime, "call_1").await;
    until_settled(&data, "call_1").await;
    let attempts = runtime.pending();
    assert!(attempts.len() >= 3, "{attempts:?}");
    let tried_for = attempts[attempts.len() - 1].at - begun;
    assert!(tried_for >= Duration::from_millis(295), "{tried_for:?}");
    runtime.answer_always(200);
    say(&server.caller(), &runtime, "call_2").await;
    assert_eq!(runtime.next().await.name, "call_2");
}

#[tokio::test]
async fn retry_after_is_respected() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.delivery.longest_pause = Duration::from_secs(60);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.answer_next_with(503, RETRY_AFTER, "1");
    say(&server.caller(), &runtime, "call_1").await;
    let (first, second) = (runtime.next().await, runtime.next().await);
    assert!(second.at - first.at >= Duration::from_millis(990), "{:?}", second.at - first.at);
}

#[tokio::test]
async fn a_runtime_that_does_not_answer_does_not_delay_others() {
    let (data, mut hanging, mut sound) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = short_pauses();
    (limits.deliveries, limits.deliveries_per_host) = (8, 2);
    let server = Server::start(tools().limits(limits), data.path()).await;
    hanging.stop_answering();
    for number in 0..20 {
        say(&server.caller(), &hanging, &format!("hanging_{number}")).await;
    }
    hanging.next().await;
    hanging.next().await;
    // Neither first attempts nor retries are delayed.
    for number in 0..10 {
        sound.answer_next(&[503]);
        let id = format!("sound_{number}");
        say(&server.caller(), &sound, &id).await;
        assert_eq!(sound.accepted().await.name, id);
    }
    // The other host had no more than its slots, and gets all results when it answers again.
    assert!(hanging.pending().is_empty());
    hanging.resume_answering();
    let mut names = Vec::new();
    for _ in 2..20 {
        names.push(hanging.next().await.name);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 18);
}

/// The dispatcher scans while a host has no free slot, and must find the waiting message later.
#[tokio::test]
async fn a_message_without_a_slot_is_sent_when_one_is_free() {
    let (data, mut slow, mut other) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = short_pauses();
    limits.deliveries_per_host = 1;
    let server = Server::start(tools().limits(limits), data.path()).await;
    slow.stop_answering();
    say(&server.caller(), &slow, "first").await;
    assert_eq!(slow.next().await.name, "first");
    say(&server.caller(), &slow, "second").await;
    wait_past_retries(&server.caller(), &mut other).await;
    slow.resume_answering();
    assert_eq!(slow.next().await.name, "second");
}

/// After a restart, one host that does not answer has more due messages than the dispatcher reads at once, and all of
/// them are older than the message for the other host.
#[tokio::test]
async fn a_host_with_a_long_queue_does_not_block_messages_for_others() {
    let (data, mut hanging, mut other) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = short_pauses();
    (limits.deliveries, limits.deliveries_per_host) = (4, 1);
    limits.stop_within = Duration::from_millis(50);
    let server = Server::start(tools().limits(limits.clone()), data.path()).await;
    hanging.stop_answering();
    other.stop_answering();
    for number in 0..30 {
        say(&server.caller(), &hanging, &format!("hanging_{number}")).await;
    }
    say(&server.caller(), &other, "call_1").await;
    hanging.next().await;
    other.next().await;
    server.stop().await;
    other.resume_answering();
    let server = Server::start(tools().limits(limits), data.path()).await;
    assert_eq!(other.next().await.name, "call_1");
    server.caller().until_settled("thread_1", "call_1").await;
    hanging.next().await;
    assert!(hanging.pending().is_empty());
}

/// Proves: LC-06, LC-11, LC-18, TR-11, TR-12, TR-16
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_concurrent_calls_of_many_threads_never_mix_callback_urls_or_ids() {
    const CALLS: usize = 1_000;
    let (data, mut one, mut two) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let together = Arc::new(Barrier::new(CALLS));
    let tool = move |args: Say, call: Call| {
        let together = Arc::clone(&together);
        async move {
            together.wait().await;
            Ok(format!("{} {} {}", args.text, call.thread().id(), call.id()))
        }
    };
    let server = Server::start(ToolServer::new("crowd").tool("say", tool), data.path()).await;
    let caller = server.caller();
    // Both runtimes use the same threads and ids.
    let calls = (0..CALLS).map(|number| {
        let (runtime, which) = if number % 2 == 0 { (&one, "one") } else { (&two, "two") };
        let (thread, id) = (number / 2 % 25, number / 2);
        let mut call = runtime.invocation(
            "say",
            &format!("thread_{thread}"),
            &format!("call_{id}"),
            json!({"text": which}),
        );
        call["callback_url"] = runtime.callback_url(&format!("{which}_{thread}_{id}?token={id}")).into();
        if id % 2 == 0 {
            call["call_id"] = format!("secondary_{which}_{id}").into();
        }
        call
    });
    let calls: Vec<serde_json::Value> = calls.collect();
    stream::iter(&calls).for_each_concurrent(64, |call| caller.accepted(call)).await;
    for (runtime, which) in [(&mut one, "one"), (&mut two, "two")] {
        let mut seen = HashMap::new();
        for _ in 0..CALLS / 2 {
            let result = runtime.next().await;
            let [thread, id] = ["group_id", "id"].map(|field| result.body[field].as_str().unwrap());
            let number = |text: &str| text.rsplit_once('_').unwrap().1.to_owned();
            assert_eq!(result.name, format!("{which}_{}_{}", number(thread), number(id)));
            assert_eq!(result.query, format!("token={}", number(id)));
            assert_eq!(result.text(), format!("{which} {thread} {id}"));
            let secondary = format!("secondary_{which}_{}", number(id));
            let even = number(id).parse::<u32>().unwrap() % 2 == 0;
            assert_eq!(result.body.get("call_id").and_then(|it| it.as_str()), even.then_some(&*secondary));
            *seen.entry(id.to_owned()).or_insert(0) += 1;
        }
        assert!(seen.len() == CALLS / 2 && seen.values().all(|count| *count == 1));
    }
}

/// Some cancellations arrive before their call, some are written in the same transaction, some arrive later.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_that_races_with_its_call_always_takes_effect() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.notification_rate = Rate::new(10_000, 10_000);
    let server = Server::start(tools().limits(limits), data.path()).await;
    let caller = server.caller();
    let calls = stream::iter(0..300).for_each_concurrent(32, |number| {
        let (caller, id) = (&caller, format!("call_{number}"));
        let call = runtime.invocation("wait", "thread_1", &id, json!({}));
        async move {
            let (cancelled, ()) = tokio::join!(caller.cancel("thread_1", &id), caller.accepted(&call));
            assert_eq!(cancelled.0, 200);
        }
    });
    calls.await;
    let mut names = std::collections::BTreeSet::new();
    for _ in 0..300 {
        let result = runtime.next().await;
        // One that was cancelled before it started has no output.
        assert!(["stopped", "Error: cancelled"].contains(&result.text()), "{}", result.text());
        assert!(names.insert(result.name), "a call has two results");
    }
}

/// Proves: TC-11
#[tokio::test]
async fn a_notification_takes_effect_even_if_its_sender_disconnects() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (closed, mut closings) = tokio::sync::mpsc::unbounded_channel();
    let tools = tools().on_close_thread(move |thread| {
        closed.send(thread.id().to_string()).unwrap();
        async { Ok(()) }
    });
    let server = Server::start(tools, data.path()).await;
    for number in 0..20 {
        let (thread, id) = (format!("thread_{number}"), format!("call_{number}"));
        server.caller().accepted(&runtime.invocation("wait", &thread, &id, json!({}))).await;
        send_and_disconnect(&server, "/cancel_tool_call", &json!({"thread_id": thread, "tool_call_id": id}))
            .await;
        assert!(["stopped", "Error: cancelled"].contains(&runtime.next().await.text()));
        send_and_disconnect(&server, "/close_thread", &json!({"thread_id": thread})).await;
        assert_eq!(closings.recv().await.unwrap(), thread);
    }
}

/// Sends a request and closes the connection at once.
async fn send_and_disconnect(server: &Server, path: &str, body: &serde_json::Value) {
    let address = server.url.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (body, head) = (body.to_string(), format!("POST {path} HTTP/1.1\r\nHost: {address}\r\n"));
    let length = body.len();
    let rest = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
}

/// The context of an invocation's trace comes back with all callbacks of the call, also after a restart. A malformed
/// one does not.
#[tokio::test]
async fn callbacks_carry_the_trace_context_of_their_invocation() {
    const CONTEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let tool = |_: Wait, call: Call| async move { Ok(call.traceparent().unwrap_or_default()) };
    let server = Server::start(tools().tool("trace", tool), data.path()).await;
    for (id, sent, expected) in [("call_1", CONTEXT, Some(CONTEXT)), ("call_2", "00-nothing", None)] {
        let invocation = runtime.invocation("trace", "thread_1", id, json!({})).to_string();
        let url = format!("{}/invoke", server.url);
        let headers = [("content-type", "application/json"), ("traceparent", sent)];
        let answer = rap_testkit::http::send("POST", &url, &headers, invocation.as_bytes()).await;
        assert_eq!(answer.status, 200);
        let callback = runtime.next().await;
        assert_eq!(callback.headers.get("traceparent").map(|value| value.to_str().unwrap()), expected);
        assert_eq!(callback.text(), expected.unwrap_or_default());
    }
    runtime.answer_next(&[503]);
    let invocation = runtime.invocation("trace", "thread_1", "call_3", json!({})).to_string();
    let headers = [("content-type", "application/json"), ("traceparent", CONTEXT)];
    let url = format!("{}/invoke", server.url);
    assert_eq!(rap_testkit::http::send("POST", &url, &headers, invocation.as_bytes()).await.status, 200);
    runtime.next().await;
    server.stop().await;
    let server = Server::start(tools().tool("trace", tool), data.path()).await;
    let callback = runtime.next().await;
    assert_eq!(callback.headers.get("traceparent").unwrap(), CONTEXT);
    server.caller().until_settled("thread_1", "call_3").await;
    Journal::open(data.path()).until("SELECT count(*) FROM calls WHERE traceparent IS NOT NULL", 0).await;
}
