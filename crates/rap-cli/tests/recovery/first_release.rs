//! A database of the first release can still be used. `tests/fixtures/first-release/README.md` describes its content.

mod fixture;
use fixture::{Fixture, includes};
use rap_testkit::anthropic;
use rap_testkit::tools::{CLOSE, INVOKE, with};
use rap_testkit::{http, until};
use serde_json::{Value, json};

/// Threads with overdue work, which change as soon as a runtime starts.
const OVERDUE: [&str; 6] = ["answered", "asking", "asleep", "failed", "reporting", "scheduled"];

/// Returns true if the thread or its parent has overdue work.
fn is_overdue(thread: &Value) -> bool {
    OVERDUE.iter().any(|name| thread["id"] == *name || thread["parent"] == *name)
}

/// Checks that a thread is as the first release recorded it, except for overdue work.
async fn check_thread(fixture: &Fixture, recorded: &Value) {
    let mut thread = recorded["thread"].clone();
    let id = thread["id"].as_str().unwrap().to_owned();
    let shown = fixture.rap.get(&format!("/v1/threads/{id}")).await.expect(200);
    let overdue = is_overdue(&thread);
    let fields = thread.as_object_mut().unwrap();
    fields.remove("updated_at");
    if overdue {
        fields.retain(|key, _| {
            ["id", "parent", "root", "agent", "title", "created_at"].contains(&key.as_str())
        });
    }
    includes(&id, &shown, &thread);
    let history = fixture.rap.raw_history(&id).await;
    let before = recorded["history"].as_array().unwrap();
    assert!(overdue || history.len() == before.len(), "{id}: {history:?}");
    includes(&id, &json!(history[..before.len()]), &recorded["history"]);
    let views = fixture.rap.get(&format!("/v1/threads/{id}/views")).await.expect(200);
    includes(&id, &views["views"], &recorded["views"]);
}

#[tokio::test]
async fn all_threads_are_unchanged() {
    let mut fixture = Fixture::start().await;
    // The second start uses the database that the first one migrated.
    for start in 0..2 {
        if start == 1 {
            fixture = fixture.restarted();
        }
        let listed = fixture.rap.get("/v1/threads?limit=1000").await.expect(200);
        let recorded = fixture.recorded["threads"].as_object().unwrap();
        assert_eq!(listed["threads"].as_array().unwrap().len(), recorded.len());
        for recorded in recorded.values() {
            check_thread(&fixture, recorded).await;
        }
    }
}

/// Rows of a recorded listing that belong to threads without overdue work.
fn lasting(fixture: &Fixture, name: &str) -> Vec<Value> {
    let rows = fixture.recorded[name].as_array().unwrap().iter();
    rows.filter(|row| !OVERDUE.iter().any(|name| row["thread_id"] == *name)).cloned().collect()
}

#[tokio::test]
async fn calls_subscriptions_and_timers_are_listed_unchanged() {
    let fixture = Fixture::start().await;
    fixture.tools.invocation().await;
    for (name, kept) in [
        ("calls", &["thread_id", "call_id", "tool", "server", "since", "until"][..]),
        ("subscriptions", &["thread_id", "call_id", "tool", "server", "since", "waiting"]),
        ("timers", &["thread_id", "call_id", "tool", "kind", "at"]),
        (
            "inbox",
            &["thread_id", "call_id", "tool", "kind", "prompt", "choices", "default", "auth_url", "asked_at"],
        ),
        ("deliveries", &["thread_id", "call_id", "kind", "first_at", "detail"]),
    ] {
        let rows = fixture.rap.raw_listing(&format!("{name}?limit=1000")).await;
        for mut recorded in lasting(&fixture, name) {
            // The overdue event of this thread has been sent by now.
            if name == "deliveries" && recorded["thread_id"] == "due" {
                continue;
            }
            recorded.as_object_mut().unwrap().retain(|key, _| kept.contains(&key.as_str()));
            let same = |row: &&Value| ["thread_id", "call_id"].iter().all(|key| row[key] == recorded[key]);
            let row = rows.iter().find(same).unwrap_or_else(|| panic!("no {recorded} in {name}: {rows:?}"));
            includes(name, row, &recorded);
        }
    }
}

/// Proves: TR-06
#[tokio::test]
async fn a_due_invocation_is_sent_with_its_old_callback_url() {
    let fixture = Fixture::start().await;
    let sent = fixture.tools.invocation().await;
    let recorded = fixture.url_of("due", "work");
    assert_eq!((sent.thread(), sent.url()), ("due", recorded.as_str()));
    assert_eq!((sent.id(), sent.arguments()), (fixture.call("due", "work").id(), &json!({"status": 503})));
    fixture.call("due", "work").returns("at last").await;
    fixture.rap.until_line("due", "assistant: work: at last").await;
    // Acknowledged invocations are not sent again.
    assert_eq!(fixture.tools.count(INVOKE), 1);
}

/// Proves: TR-06, TR-25
#[tokio::test]
async fn callback_urls_of_open_calls_are_still_valid() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    for (thread, answer) in [
        ("waiting", "assistant: work: here"),
        ("placeholder", "assistant: work: here"),
        ("choice", "assistant: work: here"),
        ("sign-in", "assistant: work: here"),
        ("late", "assistant: work: here"),
        ("renamed", "assistant: Hello again."),
    ] {
        let call = fixture.call(thread, "work");
        call.returns("here").await;
        rap.until_line(thread, answer).await;
        let transcript = rap.until_idle(thread).await;
        assert_eq!(transcript["waiting_on"], json!([]), "{transcript}");
        let transcript = rap.transcript(thread).await;
        let results =
            transcript.iter().filter(|line| line.starts_with("result ") && line.ends_with(": here"));
        assert_eq!(results.count(), 1, "{transcript:#?}");
        call.returns("twice").await;
        assert_eq!(rap.transcript(thread).await, transcript);
    }
    let late = rap.transcript("placeholder").await;
    let kind = "interrupt:call_1_1 (result of a call that was still running)";
    assert!(late.iter().any(|line| line.starts_with("synthetic call") && line.contains(kind)), "{late:?}");
    assert!(rap.listing("inbox").await.iter().all(|item| item["thread_id"] == "approval"));
}

#[tokio::test]
async fn callback_urls_of_settled_calls_are_answered_as_before() {
    let fixture = Fixture::start().await;
    let transcript = fixture.rap.transcript("interrupted").await;
    fixture.call("interrupted", "work").returns("too late").await;
    assert_eq!(fixture.rap.transcript("interrupted").await, transcript);
    let closed = fixture.call("closed", "work");
    assert_eq!(closed.post(&closed.result("x")).await.refusal(), (410, "thread_closed"));
    let ended = fixture.call("ended", "watch");
    assert_eq!(ended.post(&ended.inline("x")).await.refusal(), (410, "subscription_ended"));
    let waiting = fixture.call("waiting", "work");
    let other = with(waiting.result("x"), json!({"id": "call_9"}));
    assert_eq!(waiting.post(&other).await.status, 403);
    let forged = format!("{}A", waiting.url());
    assert_eq!(http::post(&forged, &waiting.result("x")).await.status, 401);
    assert_eq!(fixture.rap.thread("waiting").await["status"], "waiting");
}

/// Proves: LC-30, TR-25
#[tokio::test]
async fn subscriptions_continue_and_old_event_ids_are_known() {
    let fixture = Fixture::start().await;
    let (rap, watch) = (&fixture.rap, fixture.call("subscribed", "watch"));
    let transcript = rap.transcript("subscribed").await;
    watch.says(&with(watch.inline("one"), json!({"event_id": "e1"}))).await;
    assert_eq!(rap.transcript("subscribed").await, transcript);
    watch.says(&with(watch.inline("two"), json!({"event_id": "e2"}))).await;
    rap.until_line("subscribed", "assistant: watch: two").await;
    watch.says(&watch.event("aside")).await;
    until("a second child", async || (rap.children("subscribed").await.len() == 2).then_some(())).await;
    watch.says(&with(watch.inline("three"), json!({"final": true}))).await;
    rap.until_line("subscribed", "assistant: watch: three").await;
    assert_eq!(watch.post(&watch.inline("four")).await.refusal(), (410, "subscription_ended"));
}

/// Proves: LC-16
#[tokio::test]
async fn held_and_queued_input_is_written_when_the_call_returns() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    assert_eq!(rap.thread("held").await["held"], 2);
    fixture.call("held", "work").returns("done").await;
    rap.until_line("held", "assistant: queued").await;
    let transcript = rap.transcript("held").await;
    let place = |end: &str| transcript.iter().position(|line| line.ends_with(end)).unwrap();
    let places =
        [": done", ": held event", "watch: held event", "user: say queued", "assistant: queued"].map(place);
    assert!(places.is_sorted(), "{transcript:#?}");
    assert_eq!(rap.until_idle("held").await["held"], 0);
}

#[tokio::test]
async fn a_backlog_drains() {
    let fixture = Fixture::start().await;
    let (rap, tools) = (&fixture.rap, &fixture.tools);
    // The overdue invocation.
    tools.invocation().await;
    let child = rap.child("backlog").await;
    assert_eq!(rap.children("backlog").await.len(), 1);
    fixture.call(&child, "watch").returns("done").await;
    rap.until_status(&child, "closed").await;
    assert_eq!(tools.next(CLOSE).await.body, json!({"thread_id": child}));
    // The next child takes all waiting events, in order.
    let next = tools.invocation().await;
    let transcript = rap.transcript(next.thread()).await;
    let results = transcript.iter().filter(|line| line.starts_with("result "));
    let texts: Vec<_> = results.map(|line| line.rsplit(": ").next().unwrap()).collect();
    assert_eq!(texts, ["watching", "second", "third", "fourth"]);
    assert_eq!(next.request.body["thread_ancestors"], json!(["backlog"]));
    fixture.here(&next).returns("done").await;
    rap.until("backlog", "without children", |thread| thread["children"] == 0).await;
    let watch = fixture.call("backlog", "watch");
    watch.says(&watch.event("fifth")).await;
    tools.invocation().await;
}

#[tokio::test]
async fn timers_fire() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    rap.until_line("asleep", "assistant: sleep: the sleep is over").await;
    rap.until_line("scheduled", "assistant: schedule: tea").await;
    rap.until_line("failed", "assistant: Hello again.").await;
    let failed = "result call_1_1: Error: the user's answer could not be delivered to the tool";
    let told =
        async || rap.transcript("answered").await.iter().any(|line| line.starts_with(failed)).then_some(());
    until("the answer was given up", told).await;
    rap.until_idle("scheduled").await;
    let timers = rap.listing("timers").await;
    let next = timers.iter().find(|timer| timer["thread_id"] == "scheduled").unwrap();
    assert_eq!(next["kind"], "schedule");
    assert!(next["at"].as_str() > Some("2026-01-05T10:01:00.000Z"), "{next}");
    assert_eq!(rap.thread("long-asleep").await["waiting_on"][0]["until"], "2035-06-01T08:00:00.000Z");
    for thread in ["long-asleep", "listening"] {
        rap.say(thread, "say awake").await;
        rap.until_line(thread, "assistant: awake").await;
    }
}

#[tokio::test]
async fn messages_between_threads_arrive_once() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    rap.until_line("reporting", "assistant: spawn_thread: gold").await;
    let child = rap.child("spawning").await;
    fixture.call(&child, "work").returns("dug").await;
    rap.until_line(&child, "assistant: work: dug").await;
    rap.say(&child, "call close_thread {\"report\": \"silver\"}").await;
    rap.until_line("spawning", "assistant: spawn_thread: silver").await;
    rap.until("spawning", "without children", |thread| thread["children"] == 0).await;
    let fixture = fixture.restarted();
    let transcript = fixture.rap.transcript("reporting").await;
    assert_eq!(transcript.iter().filter(|line| line.ends_with(": gold")).count(), 2, "{transcript:#?}");
}

/// Proves: LC-38
#[tokio::test]
async fn model_requests_are_repeated() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    rap.until_line("asking", "assistant: Hello again.").await;
    assert_eq!(rap.until_idle("asking").await["turn"], 1);
    assert_eq!(rap.thread("refused").await["status"], "failed");
    rap.act("refused", "resume").await.expect(202);
    rap.until_line("refused", "assistant: Hello again.").await;
    rap.act("spent", "resume").await.expect(202);
    rap.until_line("spent", "assistant: four").await;
    // Resuming allows two more turns; that was the first.
    rap.until_idle("spent").await;
    rap.say("spent", "say five").await;
    rap.until_line("spent", "assistant: five").await;
    rap.until_idle("spent").await;
    rap.say("spent", "say six").await;
    rap.until_status("spent", "needs_you").await;
    rap.act("looping", "resume").await.expect(202);
    rap.until("looping", "paused again", |thread| thread["turn"] == 6 && thread["status"] == "needs_you")
        .await;
}

#[tokio::test]
async fn old_questions_can_be_answered() {
    let fixture = Fixture::start().await;
    let (rap, tools) = (&fixture.rap, &fixture.tools);
    tools.invocation().await;
    let choose = async |thread: &str, selected: u64| {
        let path = format!("/v1/threads/{thread}/calls/call_1_1/choice");
        rap.post(&path, &json!({"selected": selected})).await.expect(202);
    };
    choose("approval", 0).await;
    let call = tools.invocation().await;
    assert_eq!((call.thread(), call.arguments()), ("approval", &json!({"disk": 1})));
    fixture.here(&call).returns("wiped").await;
    rap.until_line("approval", "assistant: wipe: wiped").await;
    choose("choice", 0).await;
    // Its URL, which is encrypted in the database, has the host and port of the fixture's public URL.
    let sent = async || {
        let lines = rap.listing("deliveries").await;
        lines.into_iter().find(|line| line["kind"] == "answer" && line["thread_id"] == "choice")
    };
    let line = until("the delivery of the answer", sent).await;
    assert_eq!(line["outcome"], "given_up", "{line}");
    assert!(line["detail"].as_str().unwrap().contains("leads back to this server"), "{line}");
    assert!(rap.listing("inbox").await.iter().all(|item| item["thread_id"] == "sign-in"));
}

#[tokio::test]
async fn old_idempotency_keys_are_known() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    let keyed = async |path: &str, key: &str, body: Value| {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        rap.send("POST", path, &headers, body.to_string().as_bytes()).await
    };
    let transcript = rap.transcript("idle").await;
    let messages = "/v1/threads/idle/messages";
    let repeat = keyed(messages, "key-1", json!({"text": "say once", "on_busy": "join"})).await;
    assert_eq!(repeat.expect(202)["turn"], 6);
    let other = keyed(messages, "key-1", json!({"text": "say other", "on_busy": "join"})).await;
    assert_eq!(other.refusal(), (409, "key_reused"));
    assert_eq!(rap.transcript("idle").await, transcript);
    let fork = keyed("/v1/threads/idle/fork", "fork-1", json!({"at": 2})).await.expect(201);
    assert_eq!(fork["forked_from"], "idle");
    let threads = rap.get("/v1/threads?limit=1000").await.expect(200);
    assert_eq!(
        threads["threads"].as_array().unwrap().len(),
        fixture.recorded["threads"].as_object().unwrap().len()
    );
    let fork = fork["id"].as_str().unwrap();
    assert_eq!(rap.transcript(fork).await, transcript[..2]);
    rap.say(fork, "say else").await;
    rap.until_line(fork, "assistant: else").await;
}

#[tokio::test]
async fn conversations_continue_with_the_same_history() {
    let fixture = Fixture::start().await;
    let rap = &fixture.rap;
    rap.say("idle", "call work {\"n\": 2}").await;
    // The other one was overdue.
    let calls = fixture.tools.invocations(2).await;
    let call = calls.iter().find(|call| call.thread() == "idle").unwrap();
    assert_eq!(call.request.body["user_id"], "user-1");
    fixture.here(call).returns("more").await;
    rap.until_line("idle", "assistant: work: more").await;

    // Two overdue model requests come first, in any order.
    rap.until_line("asking", "assistant: Hello again.").await;
    rap.until_line("failed", "assistant: Hello again.").await;
    for _ in 0..2 {
        fixture.model.question().await;
    }
    rap.say("summarised", "go on").await;
    rap.until_line("summarised", "assistant: Hello again.").await;
    let shown = fixture.model.messages().await;
    assert!(shown.iter().any(|line| line.ends_with("\n\nThe user greeted.")), "{shown:#?}");
    assert!(!shown.iter().any(|line| line == "user: first"), "{shown:#?}");
    assert_eq!(shown[shown.len() - 1], "user: go on");
    fixture.thinker.says("And again.");
    rap.say("thinking", "go on").await;
    rap.until_line("thinking", "assistant: And again.").await;
    let shown = anthropic::messages(&fixture.thinker.question().await);
    assert_eq!(shown, ["user think", "assistant <Hm.> | I thought of it.", "user go on"]);
}
