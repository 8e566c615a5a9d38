//! Delivery of results: tried until it is taken, refused or given up, and never at another's expense.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::header::{LOCATION, RETRY_AFTER};
use futures_util::{StreamExt, stream};
use rap_tool::Rate;
use rap_tool::prelude::*;
use serde_json::json;
use support::{Caller, Runtime, Server, data_dir, let_retries_pass, quick};
use tokio::io::AsyncWriteExt;
use tokio::sync::Barrier;

/// Says back what it is told.
#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

/// Waits until it is cancelled.
#[derive(Deserialize, JsonSchema)]
struct Wait {}

fn tools() -> ToolServer {
    ToolServer::new("parrot").limits(quick()).tool("say", |args: Say, _: Call| async { Ok(args.text) }).tool(
        "wait",
        |_: Wait, call: Call| async move {
            call.cancelled().await;
            Ok("stopped")
        },
    )
}

async fn say(caller: &Caller, runtime: &Runtime, id: &str) {
    caller.accepted(&runtime.invocation("say", "thread_1", id, json!({"text": id}))).await;
}

/// Proves: TR-01, TR-14
#[tokio::test]
async fn a_result_is_tried_again_with_growing_pauses_after_an_error_of_the_runtime() {
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
    // Pauses of 20, 40, 80 and 100 ms, give or take a quarter.
    for (pair, least) in attempts.windows(2).zip([15, 30, 60, 75]) {
        let pause = pair[1].at - pair[0].at;
        assert!(pause >= Duration::from_millis(least), "{pause:?} instead of {least} ms");
    }
    server.caller().until_settled("thread_1", "call_1").await;
    assert!(let_retries_pass(&server.caller(), &mut runtime).await.is_empty());
}

/// Proves: TR-14
#[tokio::test]
async fn a_result_waits_for_a_runtime_that_is_not_there() {
    let (data, runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    let call = runtime.invocation("say", "thread_1", "call_1", json!({"text": "hi"}));
    let address = runtime.stop().await;
    server.caller().accepted(&call).await;
    // Several attempts find nobody, as long as a runtime elsewhere takes its time.
    let mut elsewhere = Runtime::start().await;
    let_retries_pass(&server.caller(), &mut elsewhere).await;
    assert!(server.caller().is_alive("thread_1", "call_1").await);
    let mut runtime = Runtime::start_on(&address).await;
    assert_eq!(runtime.next().await.text(), "hi");
    server.caller().until_settled("thread_1", "call_1").await;
}

/// Proves: TR-14
#[tokio::test]
async fn a_runtime_that_does_not_answer_in_time_is_tried_again() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.callback_within = Duration::from_millis(200);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.hang();
    say(&server.caller(), &runtime, "call_1").await;
    let first = runtime.next().await;
    let second = runtime.next().await;
    assert!(second.at - first.at >= Duration::from_millis(200));
    assert_eq!(first.raw, second.raw);
    assert!(server.caller().is_alive("thread_1", "call_1").await);
    runtime.answer_again();
    server.caller().until_settled("thread_1", "call_1").await;
}

/// Proves: TR-15
#[tokio::test]
async fn a_result_that_is_refused_is_not_sent_again() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = Server::start(tools(), data.path()).await;
    for status in [401, 403, 404, 405, 408, 409, 410, 422, 425, 429, 451] {
        runtime.answer_next(&[status]);
        let id = format!("call_{status}");
        say(&server.caller(), &runtime, &id).await;
        assert_eq!(runtime.next().await.name, id);
        server.caller().until_settled("thread_1", &id).await;
    }
    assert!(let_retries_pass(&server.caller(), &mut runtime).await.is_empty());
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
        server.caller().until_settled("thread_1", &id).await;
    }
    assert!(let_retries_pass(&server.caller(), &mut runtime).await.is_empty());
    assert!(elsewhere.pending().is_empty());
}

/// Proves: LC-09
#[tokio::test]
async fn a_result_that_the_runtime_can_not_take_is_followed_once_by_an_error_that_it_can() {
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
        server.caller().until_settled("thread_1", &id).await;
    }
    // The error itself is refused: that is the end.
    runtime.answer_next(&[413, 413]);
    say(&server.caller(), &runtime, "refused_twice").await;
    assert_eq!([runtime.next().await.status, runtime.next().await.status], [413, 413]);
    server.caller().until_settled("thread_1", "refused_twice").await;
    assert!(let_retries_pass(&server.caller(), &mut runtime).await.is_empty());
}

#[tokio::test]
async fn patience_ends() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.delivery.give_up_after = Duration::from_millis(300);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.answer_always(503);
    let begun = Instant::now();
    say(&server.caller(), &runtime, "call_1").await;
    server.caller().until_settled("thread_1", "call_1").await;
    let attempts = runtime.pending();
    assert!(attempts.len() >= 3, "{attempts:?}");
    let tried_for = attempts[attempts.len() - 1].at - begun;
    assert!(tried_for >= Duration::from_millis(295), "{tried_for:?}");
    runtime.answer_always(200);
    say(&server.caller(), &runtime, "call_2").await;
    assert_eq!(runtime.next().await.name, "call_2");
}

#[tokio::test]
async fn a_runtime_may_say_when_to_come_back() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.delivery.longest_pause = Duration::from_secs(60);
    let server = Server::start(tools().limits(limits), data.path()).await;
    runtime.answer_next_with(503, RETRY_AFTER, "1");
    say(&server.caller(), &runtime, "call_1").await;
    let (first, second) = (runtime.next().await, runtime.next().await);
    assert!(second.at - first.at >= Duration::from_millis(990), "{:?}", second.at - first.at);
}

#[tokio::test]
async fn a_runtime_that_hangs_delays_nobody_else() {
    let (data, mut hanging, mut sound) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = quick();
    (limits.deliveries, limits.deliveries_per_host) = (8, 2);
    let server = Server::start(tools().limits(limits), data.path()).await;
    hanging.hang();
    for number in 0..20 {
        say(&server.caller(), &hanging, &format!("hanging_{number}")).await;
    }
    hanging.next().await;
    hanging.next().await;
    // First attempts and retries: the one that hangs is in the way of neither.
    for number in 0..10 {
        sound.answer_next(&[503]);
        let id = format!("sound_{number}");
        say(&server.caller(), &sound, &id).await;
        assert_eq!(sound.accepted().await.name, id);
    }
    // It had no more than its share, and has all of it when it comes back.
    assert!(hanging.pending().is_empty());
    hanging.answer_again();
    let mut names = Vec::new();
    for _ in 2..20 {
        names.push(hanging.next().await.name);
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 18);
}

/// The dispatcher looks at what is due while a host has no place free; what waits for a place is found later.
#[tokio::test]
async fn what_waits_for_a_place_is_sent_when_there_is_one() {
    let (data, mut slow, mut other) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = quick();
    limits.deliveries_per_host = 1;
    let server = Server::start(tools().limits(limits), data.path()).await;
    slow.hang();
    say(&server.caller(), &slow, "first").await;
    assert_eq!(slow.next().await.name, "first");
    say(&server.caller(), &slow, "second").await;
    let_retries_pass(&server.caller(), &mut other).await;
    slow.answer_again();
    assert_eq!(slow.next().await.name, "second");
}

/// After a restart more is due for a host that hangs than the dispatcher reads at once, and all of it is older.
#[tokio::test]
async fn a_host_with_a_long_queue_does_not_hide_what_is_due_for_others() {
    let (data, mut hanging, mut other) = (data_dir(), Runtime::start().await, Runtime::start().await);
    let mut limits = quick();
    (limits.deliveries, limits.deliveries_per_host) = (4, 1);
    limits.stop_within = Duration::from_millis(50);
    let server = Server::start(tools().limits(limits.clone()), data.path()).await;
    hanging.hang();
    other.hang();
    for number in 0..30 {
        say(&server.caller(), &hanging, &format!("hanging_{number}")).await;
    }
    say(&server.caller(), &other, "call_1").await;
    hanging.next().await;
    other.next().await;
    server.stop().await;
    other.answer_again();
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

/// Some of them overtake their call, some are written in the same transaction, some come later.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_that_races_with_its_call_always_meets_it() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
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
        assert_eq!(result.text(), "Error: cancelled");
        assert!(names.insert(result.name), "a call has two results");
    }
}

/// Proves: TC-11
#[tokio::test]
async fn a_notification_counts_even_if_its_sender_does_not_wait_for_the_answer() {
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
        hang_up(&server, "/cancel_tool_call", &json!({"thread_id": thread, "tool_call_id": id})).await;
        assert_eq!(runtime.next().await.text(), "Error: cancelled");
        hang_up(&server, "/close_thread", &json!({"thread_id": thread})).await;
        assert_eq!(closings.recv().await.unwrap(), thread);
    }
}

/// Sends a request and closes the connection at once.
async fn hang_up(server: &Server, path: &str, body: &serde_json::Value) {
    let address = server.url.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (body, head) = (body.to_string(), format!("POST {path} HTTP/1.1\r\nHost: {address}\r\n"));
    let length = body.len();
    let rest = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
}
