//! The event stream over real HTTP: no entry is lost or repeated, slow readers are disconnected, and the end is announced.

use std::time::{Duration, Instant};

use rap_testkit::http;
use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::stream::{Stream, data};
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Reason in the end event of a stopping runtime.
const STOPPING: &str = "the runtime is stopping; reconnect";
/// Maximum duration of a stop.
const STOPS_WITHIN: Duration = Duration::from_secs(2);

/// Opens a stream and reads nothing from it.
async fn stalled_reader(rap: &Rap, path: &str) -> TcpStream {
    let host = rap.url.trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&host).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Reads a stream until it has replayed an entry of this size or has ended. Returns true if it has ended.
async fn has_ended(mut stream: TcpStream, bytes: usize) -> bool {
    let (mut received, mut buffer) = (Vec::new(), vec![0; 64 * 1024]);
    let end = b"event: end";
    loop {
        let count = stream.read(&mut buffer).await.unwrap_or(0);
        let from = received.len().saturating_sub(end.len());
        received.extend_from_slice(&buffer[..count]);
        if count == 0 || received[from..].windows(end.len()).any(|window| window == end) {
            return true;
        }
        if received.len() >= bytes {
            return false;
        }
    }
}

/// Each of them would need the memory of the entry several times.
#[tokio::test(flavor = "multi_thread")]
async fn replays_of_large_entries_to_readers_that_do_not_read_share_a_bounded_memory() {
    const READERS: usize = 100;
    const RESULT: usize = 7_000_000;
    const PEAK: u64 = 500 * 1024;
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).start();
    let thread = rap.open("call work {}").await;
    tools.invocation().await.returns(&"x".repeat(RESULT)).await;
    rap.until(&thread, "idle", |row| row["status"] == "idle").await;
    let mut readers = Vec::new();
    for _ in 0..READERS {
        readers.push(stalled_reader(&rap, &format!("/v1/threads/{thread}/events")).await);
    }
    let mut replayed = 0;
    // While the last one is read, the others read nothing.
    for reader in readers.into_iter().rev() {
        replayed += usize::from(!has_ended(reader, RESULT).await);
    }
    assert!(replayed > 0);
    let status = std::fs::read_to_string(format!("/proc/{}/status", rap.process().id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < PEAK, "{peak} KiB at {replayed} replays");
}

#[tokio::test]
async fn a_new_reader_gets_entries_then_a_snapshot_then_live_events() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    rap.until_line(&thread, "assistant: one").await;
    rap.say(&thread, "call work {}").await;
    let call = tools.invocation().await;
    call.says(&call.view("bar", json!(1))).await;
    rap.say_on_busy(&thread, "later", "enqueue").await.expect(202);

    let mut stream = Stream::of(&rap, &thread).await;
    for seq in 1..=4 {
        let event = stream.next().await.unwrap();
        assert_eq!((event.name.as_str(), event.id.as_str()), ("entry", seq.to_string().as_str()));
        assert_eq!(data(&event), rap.raw_history(&thread).await[seq - 1]);
    }
    let open = stream.expect("call").await;
    assert_eq!((&open["call_id"], &open["state"]), (&json!(call.id()), &json!("open")));
    assert_eq!(stream.expect("view").await["content"], 1);
    let status = stream.expect("status").await;
    assert_eq!((&status["status"], &status["held"]), (&json!("waiting"), &json!(1)));

    call.returns("done").await;
    assert_eq!(stream.expect("entry").await["content"], "done");
    let settled = stream.until("call").await;
    assert_eq!((&settled["call_id"], &settled["state"]), (&json!(call.id()), &json!("settled")));
    let mut said = stream.until("entry").await;
    while said["text"] != "later" || said["kind"] != "assistant" {
        said = stream.until("entry").await;
    }
    rap.close(&thread).await;
    while stream.until("status").await["status"] != "closed" {}
}

/// Sends messages one after the other, each exactly once, across restarts of the runtime.
async fn speak(url: String, thread: &'static str, count: usize) {
    for n in 0..count {
        let body = json!({"text": format!("say {n}"), "on_busy": "reject"}).to_string();
        let key = format!("key-{n}");
        until("the message is taken", async || {
            let host = url.trim_start_matches("http://").to_owned();
            let mut stream = TcpStream::connect(&host).await.ok()?;
            let request = format!(
                "POST /v1/threads/{thread}/messages HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\
                 content-type: application/json\r\nidempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(request.as_bytes()).await.ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.ok()?;
            answer.starts_with("HTTP/1.1 202").then_some(())
        })
        .await;
    }
}

/// Readers connect and disconnect, and the runtime is killed twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_reconnecting_reader_misses_and_repeats_no_entry() {
    const MESSAGES: usize = 100;
    let mut rap = Setup::new().start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let speaker = tokio::spawn(speak(rap.url.clone(), "t", MESSAGES));
    let (mut last, mut entries, mut patience) = (0, Vec::<Value>::new(), 1);
    let mut kills = [60, 140].into_iter().peekable();
    while entries.len() < 2 * MESSAGES {
        if kills.next_if(|kill| entries.len() >= *kill).is_some() {
            rap = rap.restarted();
        }
        let mut stream = Stream::open(&rap, "/v1/threads/t/events", Some(last)).await.unwrap();
        // Disconnects after a while, sometimes during a replay.
        for _ in 0..patience {
            let Some(event) = stream.next().await else { break };
            if event.name == "entry" {
                let seq: u64 = event.id.parse().unwrap();
                assert_eq!(seq, last + 1, "lost or repeated");
                assert_eq!(data(&event)["seq"], seq);
                last = seq;
                entries.push(data(&event));
            }
            if entries.len() == 2 * MESSAGES {
                break;
            }
        }
        patience = patience * 7 % 23 + 1;
    }
    speaker.await.unwrap();
    assert_eq!(entries, rap.history("t").await);
    let said: Vec<_> = entries.iter().filter(|entry| entry["kind"] == "assistant").collect();
    assert!(said.iter().enumerate().all(|(n, entry)| entry["text"] == *format!("{n}")), "{said:?}");
}

#[tokio::test]
async fn an_invalid_last_event_id_is_refused() {
    let rap = Setup::new().start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    for id in ["x", "-1", "1.5", "99999999999"] {
        let answer = rap.send("GET", "/v1/threads/t/events", &[("last-event-id", id)], b"").await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{id}");
    }
    assert_eq!(rap.get("/v1/threads/nobody/events").await.refusal(), (404, "no_such_thread"));
}

/// Text of an interrupted attempt is void. The next attempt has another number.
#[tokio::test]
async fn deltas_carry_turn_and_attempt() {
    let model = ModelServer::start().await;
    let rap = Setup::new().model(&model.lines()).start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let mut stream = Stream::of(&rap, "t").await;
    stream.until("status").await;
    let piece = json!({"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": null}]});
    let head = Some(("content-type", "text/event-stream".to_owned()));
    model.answer(Reply::Full(200, head, format!("data: {piece}\n\n").into()));
    model.says("whole");
    rap.say("t", "hello").await;
    let mut told = Vec::new();
    while told.len() < 3 {
        let delta = stream.until("delta").await;
        let field = |name: &str| delta[name].as_u64().unwrap();
        told.push((field("turn"), field("attempt"), delta["text"].as_str().unwrap().to_owned()));
    }
    let expected = [(1, 1, "half".into()), (1, 2, "wh".into()), (1, 2, "ole".into())];
    assert_eq!(told, expected);
    assert_eq!(stream.until("entry").await["text"], "whole");
}

/// More data than the buffers of two sockets hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_reader_is_disconnected_and_delays_nothing() {
    let rap = Setup::new().start();
    let thread = rap.open("say begin").await;
    rap.until_line(&thread, "assistant: begin").await;
    let mut deaf = stalled_reader(&rap, &format!("/v1/threads/{thread}/events")).await;
    let mut other = Stream::of(&rap, &thread).await;
    let large = "x".repeat(1024 * 1024);
    let mut slowest = Duration::ZERO;
    for n in 0..16 {
        let began = Instant::now();
        rap.say(&thread, &format!("say {n} {large}")).await;
        loop {
            let entry = other.until("entry").await;
            let text = entry["text"].as_str().unwrap();
            if entry["kind"] == "assistant" && text.starts_with(&format!("{n} ")) {
                break;
            }
        }
        slowest = slowest.max(began.elapsed());
    }
    // The timeout for a stalled reader is much longer.
    assert!(slowest < Duration::from_secs(4), "{slowest:?}");
    until("it is dropped", async || {
        let metrics = rap.get("/metrics").await.body;
        metrics.as_str().unwrap().contains("\nrap_streams 1\n").then_some(())
    })
    .await;
    // When it reads again, it finds an end event that says what to do.
    let mut text = Vec::new();
    let read = deaf.read_to_end(&mut text);
    tokio::time::timeout(Duration::from_secs(1), read).await.ok();
    let text = String::from_utf8_lossy(&text);
    let end = "event: end\ndata: {\"reason\":\"the reader is too slow; reconnect with Last-Event-ID\"}\n\n";
    assert!(text.contains(end), "{}", &text[text.len().saturating_sub(300)..]);
    assert!(text.ends_with("0\r\n\r\n"), "the stream is complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_ends_every_stream_at_once_with_an_end_event() {
    let rap = Setup::new().start();
    let thread = rap.open("say hello").await;
    rap.until_line(&thread, "assistant: hello").await;
    for n in 0..8 {
        rap.say(&thread, &format!("say {n} {}", "x".repeat(1024 * 1024))).await;
        rap.until_idle(&thread).await;
    }
    let mut one = Stream::of(&rap, &thread).await;
    while one.until("status").await["status"] != "idle" {}
    let mut all = Stream::open(&rap, "/v1/events", None).await.unwrap();
    // One more reader has stalled within its replay.
    let _deaf = stalled_reader(&rap, &format!("/v1/threads/{thread}/events")).await;
    until("all are open", async || {
        rap.get("/metrics").await.body.as_str().unwrap().contains("\nrap_streams 3\n").then_some(())
    })
    .await;
    let mut rap = rap;
    let stopping = tokio::task::spawn_blocking(move || rap.stop());
    for stream in [&mut one, &mut all] {
        assert_eq!(stream.until("end").await["reason"], STOPPING);
        assert!(stream.next().await.is_none());
    }
    let took = stopping.await.unwrap();
    assert!(took < STOPS_WITHIN, "{took:?}");
}

/// A stream, an invocation and a model request are open.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_does_not_wait_for_open_requests_and_loses_nothing() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    model.calls(&[("c1", "work", json!({}))]);
    tools.answer_next(INVOKE, Reply::Hang);
    let calls = rap.open("call something").await;
    let first = tools.invocation().await;
    model.answer(Reply::Hang);
    let asks = rap.open("are you there?").await;
    until("the question is asked", async || (model.questions() == 2).then_some(())).await;
    let mut stream = Stream::of(&rap, &calls).await;
    stream.until("status").await;

    model.says("I am");
    let mut rap = rap;
    let (took, rap) = tokio::task::spawn_blocking(move || (rap.stop(), rap.restarted())).await.unwrap();
    assert!(took < STOPS_WITHIN, "{took:?}");
    assert_eq!(stream.until("end").await["reason"], STOPPING);
    let again = tools.invocation().await;
    assert_eq!(first.request.body, again.request.body);
    rap.until_line(&asks, "assistant: I am").await;
    model.says("done it is");
    again.returns("done").await;
    rap.until_line(&calls, "assistant: done it is").await;
}

#[tokio::test]
async fn the_stream_of_all_threads_has_statuses_questions_and_deliveries() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let mut all = Stream::open(&rap, "/v1/events", None).await.unwrap();
    let thread = rap.open("call work").await;
    let news = all.expect("status").await;
    assert_eq!((&news["thread_id"], &news["status"]), (&json!(thread), &json!("running")));
    assert_eq!(all.until("status").await["status"], "waiting");
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}/answer", tools.url))).await;
    assert_eq!(all.expect("status").await["status"], "needs_you");
    assert_eq!(all.expect("choice").await["prompt"], "Which colour?");
    http::post(&format!("{}/callback/made-up", rap.url), &json!({})).await.expect_refusal(401);
    let delivery = all.expect("delivery").await;
    assert_eq!((&delivery["kind"], &delivery["outcome"]), (&json!("callback"), &json!("refused")));
    assert_eq!(rap.listing("deliveries").await, [delivery]);
}
