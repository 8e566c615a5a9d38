//! Notifications: every tool server is notified once, and nothing waits for it.

use std::time::{Duration, Instant};

use rap_testkit::peer::Reply;
use rap_testkit::tools::{CANCEL, CLOSE, INVOKE};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::json;

/// Waits until any retry would have been sent: a call that is refused twice is sent a third time.
async fn let_retries_pass(tools: &Tools, rap: &Rap) {
    for _ in 0..2 {
        tools.answer_next(INVOKE, Reply::Status(503));
    }
    let thread = rap.open("call work").await;
    let mut seen = 0;
    while seen < 3 {
        let call = tools.invocation().await;
        seen += usize::from(call.thread() == thread);
    }
}

/// Proves: TC-01, TC-13, TC-15
#[tokio::test]
async fn closing_notifies_every_server_whether_or_not_it_was_used() {
    let (used, unused) = (Tools::start().await, Tools::offering("unused", &["idle"]).await);
    let below = format!("{}/deep/down", unused.url);
    let rap =
        Setup::new().tools(&used).bearer("one").tools(&unused).bearer("two").tool_server(&below).start();
    let thread = rap.open("call work").await;
    used.invocation().await;
    rap.close(&thread).await;
    for (server, path, token) in [
        (&used, CLOSE, Some("Bearer one")),
        (&unused, CLOSE, Some("Bearer two")),
        (&unused, "/deep/down/close_thread", None),
    ] {
        let asked = server.next(path).await;
        assert_eq!(asked.method, "POST");
        assert_eq!(asked.body, json!({"thread_id": thread}));
        assert_eq!(asked.header("content-type"), Some("application/json"));
        assert_eq!(asked.header("authorization"), token);
    }
    let transcript = rap.transcript(&thread).await;
    assert!(
        transcript
            .ends_with(&["result call_1_1: interrupted".into(), "notice: the thread was closed".into()]),
        "{transcript:?}"
    );
}

/// A thread without messages is closed like any other.
///
/// Proves: TC-13
#[tokio::test]
async fn closing_an_empty_thread_notifies_every_server() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "silent"})).await.expect(201);
    rap.close("silent").await;
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": "silent"}));
}

/// Proves: CN-01, CN-15, CN-17
#[tokio::test]
async fn cancelling_notifies_every_server_whether_or_not_it_was_used() {
    let (used, unused) = (Tools::start().await, Tools::offering("unused", &["idle"]).await);
    let rap = Setup::new().tools(&used).bearer("one").tools(&unused).start();
    let thread = rap.open("call work\ncall work").await;
    let sent = used.invocations(2).await;
    let mut expected: Vec<_> = sent.iter().map(|call| call.id()).collect();
    expected.sort_unstable();
    rap.act(&thread, "interrupt").await.expect(202);
    for (server, token) in [(&used, Some("Bearer one")), (&unused, None)] {
        server.notified(CANCEL, 2).await;
        let mut calls = Vec::new();
        for asked in server.all(CANCEL) {
            assert_eq!(asked.header("content-type"), Some("application/json"));
            assert_eq!(asked.header("authorization"), token);
            assert_eq!(asked.body["thread_id"], *thread);
            calls.push(asked.body["tool_call_id"].as_str().unwrap().to_owned());
        }
        calls.sort();
        assert_eq!(calls, expected);
    }
}

/// Proves: TC-02, TC-07, TC-16, TC-17, CN-02, CN-07, CN-18, CN-19
#[tokio::test]
async fn each_server_is_notified_once_and_nothing_waits_for_failing_ones() {
    let (hangs, fails, good) = (
        Tools::offering("hangs", &["a"]).await,
        Tools::offering("fails", &["b"]).await,
        Tools::start().await,
    );
    let mut gone = Tools::offering("gone", &["c"]).await;
    gone.stop().await;
    for path in [CLOSE, CANCEL] {
        hangs.answer_always(path, Reply::Hang);
        let body = json!({"type": "tool_result", "text": "not read"}).to_string();
        fails.answer_always(path, Reply::Full(500, Some(("retry-after", "0".into())), body.into()));
    }
    let rap = Setup::new().tools(&hangs).tools(&fails).tools(&gone).tools(&good).start();
    let thread = rap.open("call work").await;
    let call = good.invocation().await;

    let began = Instant::now();
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    rap.until_line(&thread, "assistant: work: interrupted").await;
    rap.close(&thread).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(rap.thread(&thread).await["status"], "closed");
    for server in [&hangs, &fails, &good] {
        server.next(CANCEL).await;
        assert_eq!(server.all(CANCEL)[0].body, json!({"thread_id": thread, "tool_call_id": call.id()}));
        assert_eq!(server.next(CLOSE).await.body, json!({"thread_id": thread}));
    }
    gone.start_again().await;
    let_retries_pass(&good, &rap).await;
    for server in [&hangs, &fails, &good] {
        assert_eq!((server.count(CANCEL), server.count(CLOSE)), (1, 1));
    }
    assert_eq!((gone.count(CANCEL), gone.count(CLOSE)), (0, 0));
}

/// The delivery log shows that the time has run out. Only then a retry could follow.
///
/// Proves: TC-07, CN-07
#[tokio::test]
async fn a_notification_that_times_out_is_not_sent_again() {
    let (hangs, good) = (Tools::offering("hangs", &["idle"]).await, Tools::start().await);
    for path in [CLOSE, CANCEL] {
        hangs.answer_always(path, Reply::Hang);
    }
    let rap = Setup::new().tools(&hangs).tools(&good).start();
    let thread = rap.open("call work").await;
    good.invocation().await;
    rap.act(&thread, "interrupt").await.expect(202);
    rap.until_idle(&thread).await;
    rap.close(&thread).await;
    until("both notifications have timed out", async || {
        let given_up =
            rap.raw_listing("deliveries").await.into_iter().filter(|row| row["outcome"] == "given_up");
        let mut topics: Vec<String> = given_up.map(|row| row["topic"].as_str().unwrap().to_owned()).collect();
        topics.sort();
        topics == ["cancel_tool_call", "close_thread"]
    })
    .await;
    let_retries_pass(&good, &rap).await;
    assert_eq!((hangs.count(CANCEL), hangs.count(CLOSE)), (1, 1));
}

/// A runtime that interpreted these answers would change the thread, follow the redirection or wait for the end of the
/// body.
///
/// Proves: TC-06, CN-06
#[tokio::test]
async fn the_answer_to_a_notification_has_no_effect() {
    let (tools, elsewhere) = (Tools::start().await, Tools::offering("elsewhere", &["idle"]).await);
    let mut transcripts = Vec::new();
    let rap = Setup::new().tools(&tools).start();
    for answer in 0..5 {
        let thread = rap.open("call work").await;
        let call = tools.invocation().await;
        let body = call.result("from the answer").to_string();
        let location = format!("{}/close_thread", elsewhere.url);
        let reply = match answer {
            0 => Reply::Status(200),
            1 => Reply::Full(200, Some(("content-type", "application/json".into())), body.into()),
            2 => Reply::Full(410, None, "the thread is unknown; stop".into()),
            3 => Reply::Full(307, Some(("location", location)), "".into()),
            _ => Reply::Begin(body.into()),
        };
        tools.answer_next(CANCEL, reply.clone());
        tools.answer_next(CLOSE, reply);
        rap.act(&thread, "interrupt").await.expect(202);
        tools.next(CANCEL).await;
        rap.until_idle(&thread).await;
        rap.say(&thread, "say go on").await;
        rap.until_line(&thread, "assistant: go on").await;
        rap.close(&thread).await;
        tools.next(CLOSE).await;
        assert_eq!(rap.thread(&thread).await["status"], "closed");
        transcripts.push(rap.transcript(&thread).await);
    }
    let_retries_pass(&tools, &rap).await;
    assert!(transcripts.iter().all(|transcript| *transcript == transcripts[0]), "{transcripts:#?}");
    assert_eq!((elsewhere.count(CANCEL), elsewhere.count(CLOSE)), (0, 0));
}

/// Proves: TC-07
#[tokio::test]
async fn a_second_closing_sends_nothing_and_neither_does_a_restart() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say hello").await;
    rap.until_idle(&thread).await;
    rap.close(&thread).await;
    tools.next(CLOSE).await;
    let transcript = rap.transcript(&thread).await;
    rap.close(&thread).await;
    let rap = rap.restarted();
    rap.close(&thread).await;
    let_retries_pass(&tools, &rap).await;
    assert_eq!(tools.count(CLOSE), 1);
    assert_eq!(rap.transcript(&thread).await, transcript);
}

/// Proves: TC-01
#[tokio::test]
async fn closing_a_thread_closes_its_descendants() {
    let tools = Tools::start().await;
    let script = "[[turn]]\ncalls = [{name = \"watch\"}]\n[[turn]]\nsay = \"subscribed\"\n";
    let rap = Setup::new().tools(&tools).start_with_script(script);
    let thread = rap.open("go").await;
    let mut watch = tools.invocation().await;
    let mut line = vec![thread.clone()];
    for _ in 0..2 {
        let parent = watch.thread().to_owned();
        watch.confirms("watching").await;
        rap.until_idle(&parent).await;
        watch.says(&watch.event("one")).await;
        watch = tools.invocation().await;
        line.push(watch.thread().to_owned());
    }
    rap.close(&thread).await;
    let mut told: Vec<String> = Vec::new();
    for body in tools.notified(CLOSE, 3).await {
        told.push(body["thread_id"].as_str().unwrap().to_owned());
    }
    for member in &line {
        assert!(told.contains(member), "{member} in {told:?}");
        rap.until_status(member, "closed").await;
    }
    assert_eq!(watch.post(&watch.result("x")).await.refusal(), (410, "thread_closed"));
    assert_eq!(rap.say_on_busy(&line[2], "hello", "join").await.refusal(), (409, "thread_closed"));
    // Subscriptions are not cancelled, but the open call of the youngest thread is.
    assert_eq!(tools.next(CANCEL).await.body["thread_id"], *line[2]);
    assert_eq!((tools.count(CLOSE), tools.count(CANCEL)), (3, 1));
    assert!(rap.listing("calls").await.is_empty());
}

#[tokio::test]
async fn a_server_without_notification_endpoints_has_one_line_in_the_delivery_log() {
    let tools = Tools::start().await;
    tools.answer_always(CLOSE, Reply::Status(404));
    let rap = Rap::start(&tools);
    for name in ["one", "two", "three"] {
        rap.post("/v1/threads", &json!({"id": name})).await.expect(201);
        rap.close(name).await;
        tools.next(CLOSE).await;
    }
    // Another failure is listed after those that are left out.
    tools.answer_always(CLOSE, Reply::Status(500));
    rap.post("/v1/threads", &json!({"id": "four"})).await.expect(201);
    rap.close("four").await;
    until("the last failure is listed", || async { rap.raw_listing("deliveries").await.len() >= 2 }).await;
    let listed = rap.raw_listing("deliveries").await;
    assert_eq!(listed.len(), 2, "{listed:?}");
    let missing = &listed[1];
    assert_eq!((&missing["topic"], &missing["thread_id"]), (&json!("close_thread"), &json!(null)));
    assert!(missing["detail"].as_str().unwrap().contains("the server has no /close_thread"), "{missing}");
}
