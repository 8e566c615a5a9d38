//! Crashes and orderly stops: everything acknowledged is there exactly once and continues. `main.rs` includes these
//! tests twice, for SQLite and for Postgres.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rap_testkit::peer::Reply;
use rap_testkit::tools::{Call, INVOKE};
use rap_testkit::{Setup, Tools, until};
use serde_json::{Value, json};

use crate::support::{self, Api, data, event, event_for_child, names_in, start};

fn is_on_postgres() -> bool {
    module_path!().ends_with("_on_postgres")
}

fn setup(tools: &Tools) -> Setup {
    if is_on_postgres() { Setup::new().tools(tools).on_postgres() } else { support::setup(tools) }
}

/// Proves: TR-13
#[tokio::test(flavor = "multi_thread")]
async fn an_unacknowledged_invocation_is_sent_again_unchanged_after_a_crash() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    tools.answer_always(INVOKE, Reply::Hang);
    api.create("t", "call work {\"a\": [1, \"two\"]}").await;
    let call = tools.invocation().await;
    rap.kill();
    tools.answer_always(INVOKE, Reply::Status(200));
    rap.start_again();
    let again = tools.invocation().await;
    assert_eq!(again.request.body, call.request.body);
    assert_eq!(*again.arguments(), json!({"a": [1, "two"]}));
    api.until_acknowledged(&call).await;
    // When the acknowledgement is on disk, the invocation is not sent again.
    rap.restart();
    assert_eq!(call.post(&call.result("done")).await.status, 200);
    rap.restart();
    api.until_said("t", "work: done").await;
    assert_eq!(tools.pending(INVOKE), 0);
}

/// Proves: LC-38
#[tokio::test(flavor = "multi_thread")]
async fn a_model_request_is_repeated_after_a_crash_and_answered_once() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "sleep 0.4\nsay awake").await;
    for _ in 0..3 {
        assert_eq!(api.thread("t").await["status"], "running");
        rap.restart();
    }
    api.until_status("t", "idle").await;
    assert_eq!(api.texts("t").await, ["sleep 0.4\nsay awake", "awake"]);
    assert_eq!(api.thread("t").await["turn"], 1);
    assert!(rap.process_mut().ended().is_none());
}

/// Proves: TR-13, TR-25, LC-30, SE-13
#[tokio::test(flavor = "multi_thread")]
async fn callbacks_after_a_crash_are_taken_once_at_the_same_url() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "call watch {}\ncall work {}").await;
    let (watch, work) = (tools.invocation().await, tools.invocation().await);
    let (watch, work) =
        if watch.request.body["operation"] == "watch" { (watch, work) } else { (work, watch) };
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    rap.restart();
    assert_eq!(api.thread("t").await["subscriptions"][0]["call_id"], watch.name());
    assert_eq!(api.thread("t").await["waiting_on"][0]["call_id"], work.name());
    // Like a tool that did not receive the answer.
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    assert_eq!(work.post(&work.result("done")).await.status, 200);
    api.until_status("t", "idle").await;
    assert_eq!(watch.post(&event(&watch, "event 1")).await.status, 200);
    api.until_said("t", "watch: event 1").await;
    rap.restart();
    for _ in 0..2 {
        assert_eq!(work.post(&work.result("done")).await.status, 200);
        assert_eq!(watch.post(&event(&watch, "event 1")).await.status, 200);
        assert_eq!(watch.post(&event(&watch, "event 2")).await.status, 200);
    }
    api.until_said("t", "watch: event 2").await;
    let texts = api.texts("t").await;
    for text in ["watching", "done", "event 1", "event 2"] {
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{text}: {texts:?}");
    }
    // An event child continues too, and its parent gets its report.
    let child = event_for_child(&watch, "event 3");
    assert_eq!(watch.post(&child).await.status, 200);
    rap.restart();
    assert_eq!(watch.post(&child).await.status, 200);
    until("the child is done", || async { api.thread("t").await["children"] == 0 }).await;
    let children = api.get("/v1/threads?parent=t").await.body["threads"].as_array().unwrap().clone();
    assert_eq!(children.len(), 1);
    assert_eq!(children[0]["status"], "closed");
    let texts = api.texts(children[0]["id"].as_str().unwrap()).await;
    assert!(texts.contains(&"event 3".to_owned()), "{texts:?}");
}

/// Proves: LC-16
#[tokio::test(flavor = "multi_thread")]
async fn held_input_keeps_its_order_across_crashes() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "call watch {}\ncall work {}").await;
    let (first, second) = (tools.invocation().await, tools.invocation().await);
    let (watch, work) =
        if first.request.body["operation"] == "watch" { (first, second) } else { (second, first) };
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    for number in 0..12 {
        if number % 4 == 3 {
            rap.restart();
        }
        assert_eq!(watch.post(&event(&watch, &format!("event {number}"))).await.status, 200);
        assert_eq!(api.say_on_busy("t", &format!("say queued {number}"), "enqueue").await.status, 202);
    }
    assert_eq!(api.thread("t").await["held"], 24);
    assert_eq!(work.post(&work.result("done")).await.status, 200);
    api.until_status("t", "idle").await;
    let texts = api.texts("t").await;
    let of = |start: &str| -> Vec<String> {
        texts.iter().filter(|text| text.starts_with(start)).cloned().collect()
    };
    assert_eq!(of("event"), (0..12).map(|number| format!("event {number}")).collect::<Vec<_>>());
    assert_eq!(of("say queued"), (0..12).map(|number| format!("say queued {number}")).collect::<Vec<_>>());
    assert_eq!(texts.last().unwrap(), "queued 11");
    assert!(rap.process_mut().ended().is_none());
}

/// Sent messages, and whether they were accepted.
#[derive(Default)]
struct Sent {
    accepted: Mutex<BTreeSet<(String, String)>>,
    uncertain: Mutex<BTreeSet<(String, String)>>,
}

const THREADS: usize = 5;

/// Sends messages and records which were accepted, until `stop` is set.
async fn talk(api: Api, sent: Arc<Sent>, stop: tokio::sync::watch::Receiver<bool>, speaker: usize) {
    for number in 0.. {
        if *stop.borrow() {
            return;
        }
        let thread = format!("t{}", (speaker + number) % THREADS);
        let text = match number % 3 {
            0 => format!("call work {{\"by\": \"{speaker}-{number}\"}}"),
            _ => format!("say {speaker}-{number}"),
        };
        let body = json!({"text": text, "on_busy": if number % 7 == 0 { "join" } else { "enqueue" }});
        let reply = api.try_post(&format!("/v1/threads/{thread}/messages"), &body).await;
        match reply.as_ref().map(|reply| reply.status) {
            Some(202) => sent.accepted.lock().unwrap().insert((thread, text)),
            None | Some(503) => sent.uncertain.lock().unwrap().insert((thread, text)),
            Some(_) => panic!("{reply:?}"),
        };
        if reply.is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Returns the result of each call, and retries until it is accepted.
async fn work(api: Api, tools: Arc<Tools>, sent: Arc<Sent>) {
    let mut returning = tokio::task::JoinSet::new();
    let mut known = BTreeMap::new();
    loop {
        let call = Call { request: tools.next_at_any_time(INVOKE).await };
        let key = (call.thread().to_owned(), call.id().to_owned());
        if let Some(first) = known.insert(key.clone(), call.clone()) {
            assert_eq!(first.request.body, call.request.body, "a repeated invocation differs from the first");
            continue;
        }
        let (api, sent) = (api.clone(), Arc::clone(&sent));
        returning.spawn(async move {
            let text = format!("result of {}", key.1);
            api.post_until_accepted(call.url(), &call.result(&text)).await;
            sent.accepted.lock().unwrap().insert((key.0, text));
        });
        while let Some(ended) = returning.try_join_next() {
            ended.unwrap();
        }
    }
}

/// Sends events of a subscription until `stop` is set.
async fn watch(api: Api, call: Call, sent: Arc<Sent>, stop: tokio::sync::watch::Receiver<bool>) {
    for number in 0.. {
        if *stop.borrow() {
            return;
        }
        let text = format!("event {number} of {}", call.thread());
        api.post_until_accepted(call.url(), &event(&call, &text)).await;
        sent.accepted.lock().unwrap().insert((call.thread().to_owned(), text));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks that calls are followed by exactly their results.
pub fn check_prompt(thread: &str, history: &[Value]) {
    let mut open: Vec<&str> = Vec::new();
    for (at, entry) in history.iter().enumerate() {
        assert_eq!(entry["seq"], at as u64 + 1, "{thread}");
        match entry["kind"].as_str().unwrap() {
            "notice" => {}
            "result" => {
                let call = entry["call_id"].as_str().unwrap();
                let place = open.iter().position(|open| *open == call);
                open.remove(place.unwrap_or_else(|| panic!("{thread}: a result without a call: {entry}")));
            }
            _ => {
                assert!(open.is_empty(), "{thread}: {open:?} have no result before {entry}");
                let calls = entry["calls"].as_array();
                open = calls.into_iter().flatten().map(|call| call["id"].as_str().unwrap()).collect();
            }
        }
    }
    assert!(open.is_empty(), "{thread}: {open:?} have no result");
}

/// Proves: TR-13, TR-25, LC-16, LC-17, LC-30, LC-38
#[tokio::test(flavor = "multi_thread")]
async fn everything_acknowledged_is_there_once_however_often_the_process_is_killed() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).limit("held_per_thread = 100000").limit("hold_max = \"100ms\""));
    let sent = Arc::new(Sent::default());
    let (stopping, stop) = tokio::sync::watch::channel(false);
    let mut senders = tokio::task::JoinSet::new();
    for thread in 0..THREADS {
        api.create(&format!("t{thread}"), "call watch {}").await;
        let call = tools.invocation().await;
        assert_eq!(call.post(&call.confirmation("watching")).await.status, 200);
        senders.spawn(watch(api.clone(), call, Arc::clone(&sent), stop.clone()));
    }
    let worker = tokio::spawn(work(api.clone(), Arc::new(tools), Arc::clone(&sent)));
    for speaker in 0..4 {
        senders.spawn(talk(api.clone(), Arc::clone(&sent), stop.clone(), speaker));
    }
    // Kill at arbitrary points.
    for pause in [300, 40, 170, 90, 260, 20, 130, 210, 60, 350] {
        let accepted = sent.accepted.lock().unwrap().len();
        tokio::time::sleep(Duration::from_millis(pause)).await;
        until("something is accepted", || async { sent.accepted.lock().unwrap().len() > accepted + 20 })
            .await;
        rap.restart();
    }
    stopping.send_replace(true);
    while let Some(ended) = senders.join_next().await {
        ended.unwrap();
    }
    for thread in 0..THREADS {
        let thread = format!("t{thread}");
        until("all of it is done", || async {
            let now = api.thread(&thread).await;
            let done = now["status"] == "idle" && now["held"] == 0;
            done && now["waiting_on"].as_array().unwrap().is_empty()
        })
        .await;
    }
    assert!(rap.process_mut().ended().is_none() && !worker.is_finished());
    worker.abort();
    let mut found: BTreeMap<(String, String), usize> = BTreeMap::new();
    for thread in 0..THREADS {
        let thread = format!("t{thread}");
        let history = api.whole_history(&thread).await;
        check_prompt(&thread, &history);
        for entry in history {
            let text = match entry["kind"].as_str().unwrap() {
                "user" => entry["text"].as_str().unwrap(),
                "result" => entry["content"].as_str().unwrap(),
                _ => continue,
            };
            *found.entry((thread.clone(), text.to_owned())).or_default() += 1;
        }
    }
    let (accepted, uncertain) = (sent.accepted.lock().unwrap(), sent.uncertain.lock().unwrap());
    for what in accepted.iter() {
        assert_eq!(found.get(what), Some(&1), "{what:?} was acknowledged");
    }
    for what in uncertain.iter() {
        assert!(found.get(what).is_none_or(|times| *times == 1), "{what:?} is there {:?} times", found[what]);
    }
}

/// Proves: LC-17
#[tokio::test(flavor = "multi_thread")]
async fn work_without_a_free_slot_is_done_after_a_crash() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).limit("model_concurrency = 1").limit("invoke_concurrency = 1"));
    let worker = tokio::spawn(work(api.clone(), Arc::new(tools), Arc::default()));
    const MANY: usize = 60;
    for number in 0..MANY {
        api.create(&format!("t{number}"), "call work {}\ncall work {}").await;
        if number == MANY / 2 {
            rap.restart();
        }
    }
    // Long before the periodic upkeep would find it.
    until("all threads are done", || async {
        let idle = api.get("/v1/threads?status=idle&limit=1000").await.body;
        idle["threads"].as_array().unwrap().len() == MANY
    })
    .await;
    for number in 0..MANY {
        let texts = api.texts(&format!("t{number}")).await;
        assert_eq!(texts.len(), 4, "{texts:?}");
    }
    assert!(rap.process_mut().ended().is_none() && !worker.is_finished());
    worker.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_a_person_reaches_the_tool_after_a_crash() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("t", "call work {}").await;
    let call = tools.invocation().await;
    const ANSWER: &str = "/answers/colour";
    let response_url = format!("{}{ANSWER}", tools.url);
    assert_eq!(call.post(&call.question(&response_url)).await.status, 200);
    rap.restart();
    // A repeated question is the same question.
    assert_eq!(call.post(&call.question(&response_url)).await.status, 200);
    let inbox = api.get("/v1/inbox").await.body["items"].as_array().unwrap().clone();
    assert_eq!(inbox.len(), 1);
    assert_eq!(inbox[0]["prompt"], "Which colour?");
    tools.answer_next(ANSWER, Reply::Status(503));
    let path = format!("/v1/threads/t/calls/{}/choice", call.id());
    assert_eq!(api.post(&path, &json!({"selected": 1})).await.status, 202);
    until("it was tried once", || async { tools.count(ANSWER) > 0 }).await;
    rap.restart();
    until("it was tried again", || async { tools.count(ANSWER) >= 2 }).await;
    for answer in tools.all(ANSWER) {
        assert_eq!(answer.body, json!({"id": call.id(), "selected": 1}));
    }
    assert_eq!(call.post(&call.result("green it is")).await.status, 200);
    api.until_said("t", "work: green it is").await;
    assert_eq!(api.post(&path, &json!({"selected": 0})).await.status, 404);
}

/// Proves: LC-28
#[tokio::test(flavor = "multi_thread")]
async fn timers_that_came_due_during_downtime_fire_at_the_start() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).limit("call_timeout = \"1500ms\"").limit("hold_max = \"1s\""));
    api.create("holds", "call watch {}").await;
    let watch = tools.invocation().await;
    assert_eq!(watch.post(&watch.confirmation("watching")).await.status, 200);
    api.until_status("holds", "idle").await;
    for thread in ["holds", "waits"] {
        match thread {
            "holds" => assert_eq!(api.say_on_busy(thread, "call work {}", "join").await.status, 202),
            _ => api.create(thread, "call work {}").await,
        }
        tools.invocation().await;
    }
    assert_eq!(watch.post(&event(&watch, "an event")).await.status, 200);
    assert_eq!(api.thread("holds").await["held"], 1);
    rap.kill();
    tokio::time::sleep(Duration::from_millis(1600)).await;
    rap.start_again();
    let timed_out = "Error: no result came within 1 second; it may still follow";
    api.until_said("waits", timed_out).await;
    api.until_said("holds", timed_out).await;
    api.until_said("holds", "an event").await;
    for thread in ["holds", "waits"] {
        api.until_status(thread, "idle").await;
        check_prompt(thread, &api.whole_history(thread).await);
    }
}

/// A tool that could not deliver its result during downtime is not too late.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_comes_right_after_the_start_is_in_time() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools).limit("call_timeout = \"3s\""));
    api.create("waits", "call work {}").await;
    let call = tools.invocation().await;
    rap.kill();
    tokio::time::sleep(Duration::from_millis(3100)).await;
    rap.start_again();
    assert_eq!(call.post(&call.result("done")).await.status, 200);
    api.until_said("waits", "work: done").await;
    api.until_status("waits", "idle").await;
    assert_eq!(api.whole_history("waits").await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_within_two_seconds_and_nothing_is_lost() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    api.create("waits", "call work {}").await;
    let call = tools.invocation().await;
    api.create("asks", "sleep 3\nsay at last").await;
    assert_eq!(api.say_on_busy("waits", "say later", "enqueue").await.status, 202);
    // One client reads a stream, another has an idle connection.
    let stream = tokio::spawn({
        let api = api.clone();
        async move { api.get("/v1/threads/waits/events").await }
    });
    until("the question is asked", || async { api.thread("asks").await["status"] == "running" }).await;
    let began = Instant::now();
    rap.process().signal("TERM");
    assert_eq!(rap.process_mut().wait().code(), Some(0), "{}", rap.log());
    assert!(began.elapsed() < Duration::from_secs(2), "it took {:?}", began.elapsed());
    assert_eq!(stream.await.unwrap().status, 200);
    if !is_on_postgres() {
        // After an orderly stop the database is one file.
        assert_eq!(names_in(&data(&rap)), ["rap.db", "rap.db.key", "rap.db.lock"]);
    }
    rap.start_again();
    assert_eq!(api.thread("asks").await["status"], "running");
    assert_eq!(api.thread("waits").await["held"], 1);
    assert_eq!(call.post(&call.result("done")).await.status, 200);
    api.until_said("waits", "later").await;
    api.until_said("asks", "at last").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigterm_ends_at_once() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(setup(&tools));
    tools.answer_always(INVOKE, Reply::Hang);
    api.create("t", "call work {}").await;
    let call = tools.invocation().await;
    rap.process().signal("TERM");
    rap.until_logged("stopping").await;
    // The runtime waits for the invocation in progress.
    assert!(rap.process_mut().ended().is_none());
    let began = Instant::now();
    rap.process().signal("TERM");
    assert_eq!(rap.process_mut().wait().code(), Some(1), "{}", rap.log());
    assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
    tools.answer_always(INVOKE, Reply::Status(200));
    rap.start_again();
    assert_eq!(tools.invocation().await.request.body, call.request.body);
    assert_eq!(call.post(&call.result("done")).await.status, 200);
    api.until_said("t", "work: done").await;
}
