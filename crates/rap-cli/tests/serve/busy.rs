//! Busy threads: messages, results and events during a model request or while calls are open.

use std::time::{Duration, Instant};

use rap_testkit::peer::Reply;
use rap_testkit::tools::{CANCEL, INVOKE};
use rap_testkit::{Rap, Setup, Tools};
use serde_json::json;

const LATE: &str = "interrupt:call_1_1 (result of a call that was still running)";

async fn waiting() -> (Tools, Rap, String, rap_testkit::tools::Call) {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {\"n\": 1}").await;
    let call = tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    (tools, rap, thread, call)
}

/// Proves: LC-19, SE-06
#[tokio::test]
async fn a_message_joins_a_waiting_thread_and_the_result_follows() {
    let (tools, rap, thread, call) = waiting().await;
    rap.say(&thread, "say hi").await;
    rap.until_line(&thread, "assistant: hi").await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["waiting_on"][0]["call_id"], "call_1_1", "it is still at work: {idle}");
    call.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    let transcript = [
        "user: call work {\"n\": 1}".to_owned(),
        "call call_1_1 work {\"n\":1}".into(),
        "result call_1_1: still running; the result will follow".into(),
        "user: say hi".into(),
        "assistant: hi".into(),
        format!("synthetic call rap_1 work {{\"kind\":\"{LATE}\",\"n\":1}}"),
        "result rap_1: done".into(),
        "assistant: work: done".into(),
    ];
    assert_eq!(rap.transcript(&thread).await, transcript);
    call.returns("twice").await;
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert_eq!((tools.count(CANCEL), tools.count(INVOKE)), (0, 1));
}

/// Proves: CN-01, CN-10, CN-14, CN-24
#[tokio::test]
async fn a_message_interrupts_a_waiting_thread_and_the_late_result_is_ignored() {
    let (tools, rap, thread, call) = waiting().await;
    rap.say_on_busy(&thread, "say stop", "interrupt").await.expect(202);
    let expected = json!({"thread_id": thread, "tool_call_id": "call_1_1"});
    assert_eq!(tools.next(CANCEL).await.body, expected);
    rap.until_idle(&thread).await;
    let transcript = [
        "user: call work {\"n\": 1}",
        "call call_1_1 work {\"n\":1}",
        "result call_1_1: interrupted",
        "user: say stop",
        "assistant: stop",
    ];
    assert_eq!(rap.transcript(&thread).await, transcript);
    call.returns("late").await;
    assert_eq!(rap.until_idle(&thread).await["turn"], 2);
    assert_eq!(rap.transcript(&thread).await, transcript);
}

#[tokio::test]
async fn an_enqueued_message_waits_until_a_waiting_thread_is_idle() {
    let (_tools, rap, thread, call) = waiting().await;
    for text in ["say one", "say two"] {
        rap.say_on_busy(&thread, text, "enqueue").await.expect(202);
    }
    assert_eq!(rap.thread(&thread).await["held"], 2);
    call.returns("done").await;
    rap.until_idle(&thread).await;
    let transcript = [
        "result call_1_1: done",
        "assistant: work: done",
        "user: say one",
        "user: say two",
        "assistant: two",
    ];
    assert_eq!(rap.transcript(&thread).await[2..], transcript);
    assert_eq!(rap.thread(&thread).await["held"], 0);
}

#[tokio::test]
async fn a_message_with_reject_is_refused_by_a_busy_thread() {
    let (_tools, rap, thread, call) = waiting().await;
    assert_eq!(rap.say_on_busy(&thread, "say no", "reject").await.refusal(), (409, "busy"));
    call.returns("done").await;
    rap.until_idle(&thread).await;
    rap.say_on_busy(&thread, "say yes", "reject").await.expect(202);
    rap.until_line(&thread, "assistant: yes").await;
    assert!(!rap.transcript(&thread).await.iter().any(|line| line.contains("say no")));

    rap.say(&thread, "sleep 60").await;
    assert_eq!(rap.say_on_busy(&thread, "say no", "reject").await.refusal(), (409, "busy"));
}

/// Proves: LC-19
#[tokio::test]
async fn a_message_drops_the_answer_in_progress_but_not_more_than_twice_in_a_row() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("sleep 60").await;
    rap.until_status(&thread, "running").await;
    rap.say(&thread, "sleep 60").await;
    rap.say(&thread, "sleep 1\nsay three").await;
    rap.say(&thread, "say four").await;
    assert_eq!(rap.thread(&thread).await["held"], 1);
    rap.until_line(&thread, "assistant: four").await;
    let transcript = [
        "user: sleep 60",
        "user: sleep 60",
        "user: sleep 1\nsay three",
        "assistant: three",
        "user: say four",
        "assistant: four",
    ];
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert_eq!(rap.thread(&thread).await["turn"], 4);
}

/// A message that was held during a model request does not wait for the calls of the answer.
#[tokio::test]
async fn a_message_that_was_held_joins_as_soon_as_calls_are_open() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("sleep 60").await;
    rap.say(&thread, "sleep 60").await;
    rap.say(&thread, "sleep 0.5\ncall work").await;
    rap.say(&thread, "say hello").await;
    let call = tools.invocation().await;
    rap.until_line(&thread, "assistant: hello").await;
    let transcript = [
        "call call_3_1 work {}",
        "result call_3_1: still running; the result will follow",
        "user: say hello",
        "assistant: hello",
    ];
    assert_eq!(rap.transcript(&thread).await[3..], transcript);
    call.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}

#[tokio::test]
async fn messages_interrupt_an_answer_in_progress_or_wait_for_it() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("sleep 60\nsay never").await;
    for text in ["sleep 60\nsay one", "sleep 60\nsay two", "sleep 60\nsay three", "sleep 0.5\nsay now"] {
        rap.say_on_busy(&thread, text, "interrupt").await.expect(202);
    }
    rap.say_on_busy(&thread, "say then", "enqueue").await.expect(202);
    rap.until_line(&thread, "assistant: then").await;
    let transcript = ["user: sleep 0.5\nsay now", "assistant: now", "user: say then", "assistant: then"];
    assert_eq!(rap.transcript(&thread).await[4..], transcript);
}

/// Proves: CN-01, CN-24
#[tokio::test]
async fn an_interrupt_without_a_message_leaves_the_thread_idle() {
    let (tools, rap, thread, call) = waiting().await;
    rap.act(&thread, "interrupt").await.expect(202);
    let idle = rap.thread(&thread).await;
    assert_eq!((&idle["status"], &idle["turn"]), (&json!("idle"), &json!(1)));
    assert_eq!(tools.next(CANCEL).await.body["tool_call_id"], "call_1_1");
    call.returns("late").await;
    assert_eq!(rap.transcript(&thread).await[2..], ["result call_1_1: interrupted"]);

    rap.say(&thread, "sleep 60\nsay never").await;
    rap.until_status(&thread, "running").await;
    rap.act(&thread, "interrupt").await.expect(202);
    assert_eq!(rap.thread(&thread).await["status"], "idle");
    rap.act(&thread, "interrupt").await.expect(202);
    // Enqueued messages are handled after the interrupt.
    rap.say(&thread, "sleep 60\nsay never").await;
    rap.say_on_busy(&thread, "say afterwards", "enqueue").await.expect(202);
    rap.act(&thread, "interrupt").await.expect(202);
    rap.until_line(&thread, "assistant: afterwards").await;
    assert!(!rap.transcript(&thread).await.contains(&"assistant: never".to_owned()));
    assert_eq!(tools.count(CANCEL), 1);
}

/// Proves: CN-01, CN-14, CN-15, CN-24
#[tokio::test]
async fn one_call_is_cancelled_and_the_others_continue() {
    let (tools, other) = (Tools::start().await, Tools::offering("other", &["idle"]).await);
    let rap = Setup::new().tools(&tools).tools(&other).start();
    let thread = rap.open("call work\ncall work").await;
    let calls = tools.invocations(2).await;
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    let expected = json!({"thread_id": thread, "tool_call_id": "call_1_1"});
    assert_eq!(tools.next(CANCEL).await.body, expected);
    // Servers that did not get the call are notified too.
    let expected = json!({"thread_id": thread, "tool_call_id": calls[0].id()});
    assert_eq!(other.next(CANCEL).await.body, expected);
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    calls[0].returns("late").await;
    calls[1].returns("two").await;
    rap.until_line(&thread, "assistant: work: interrupted\nwork: two").await;
    assert_eq!(rap.transcript(&thread).await[3..5], ["result call_1_1: interrupted", "result call_1_2: two"]);
    // Cancelling a settled call succeeds and sends nothing. Cancelling an unknown call is an error.
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    rap.act(&thread, "calls/call_1_2/cancel").await.expect(202);
    assert_eq!(rap.act(&thread, "calls/call_9_9/cancel").await.refusal(), (404, "no_such_call"));
    assert_eq!((tools.count(CANCEL), other.count(CANCEL)), (1, 1));
}

#[tokio::test]
async fn cancelling_the_only_call_asks_the_model_and_one_behind_a_placeholder_gets_a_notice() {
    let (tools, rap, thread, _) = waiting().await;
    rap.act(&thread, "calls/call_1_1/cancel").await.expect(202);
    rap.until_line(&thread, "assistant: work: interrupted").await;

    rap.say(&thread, "call work").await;
    let call = tools.invocation().await;
    rap.say(&thread, "say hi").await;
    rap.until_line(&thread, "assistant: hi").await;
    rap.act(&thread, &format!("calls/{}/cancel", call.id())).await.expect(202);
    let transcript = rap.transcript(&thread).await;
    assert_eq!(*transcript.last().unwrap(), format!("notice: call {} of work was cancelled", call.name()));
    call.returns("late").await;
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert!(rap.thread(&thread).await["waiting_on"].as_array().unwrap().is_empty());
}

/// Proves: LC-28
#[tokio::test]
async fn a_call_that_times_out_gets_an_error_and_its_late_result_follows() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("call_timeout = \"300ms\"").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    rap.until_idle(&thread).await;
    let error = "Error: no result came within 300 ms; it may still follow";
    assert_eq!(rap.transcript(&thread).await[2], format!("result call_1_1: {error}"));
    call.returns("slow").await;
    rap.until_line(&thread, "assistant: work: slow").await;
    let late = [format!("synthetic call rap_1 work {{\"kind\":\"{LATE}\"}}"), "result rap_1: slow".into()];
    assert_eq!(rap.transcript(&thread).await[4..6], late);
    call.returns("slow").await;
    assert_eq!(rap.transcript(&thread).await.len(), 7);
}

/// A confirmation after the timeout of its call is not kept, and its tool is notified.
#[tokio::test]
async fn a_subscription_that_is_confirmed_too_late_is_not_kept() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("call_timeout = \"300ms\"").start();
    let thread = rap.open("call watch").await;
    let call = tools.invocation().await;
    rap.until_idle(&thread).await;
    call.confirms("watching").await;
    assert_eq!(tools.next(CANCEL).await.body["tool_call_id"], "call_1_1");
    rap.until_idle(&thread).await;
    assert!(rap.listing("subscriptions").await.is_empty());
    assert!(rap.transcript(&thread).await[5].contains("The subscription was not kept"));
    assert_eq!(call.post(&call.inline("x")).await.status, 410);
}

#[tokio::test]
async fn events_behind_a_long_call_join_when_the_oldest_has_waited_long_enough() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("hold_max = \"300ms\"").start();
    let thread = rap.open("call watch").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    watch.says(&watch.inline("tick")).await;
    rap.until_line(&thread, "assistant: work: still running; the result will follow\nwatch: tick").await;
    let transcript = rap.transcript(&thread).await;
    assert_eq!(transcript[6], format!("result {}: still running; the result will follow", work.name()));
    assert_eq!(transcript[8], "result rap_1: tick");
    work.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
}

#[tokio::test]
async fn a_full_thread_answers_503() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("held_per_thread = 2").start();
    let thread = rap.open("call watch").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    for n in 1..=2 {
        watch.says(&watch.inline(&format!("tick {n}"))).await;
        rap.say_on_busy(&thread, &format!("say {n}"), "enqueue").await.expect(202);
    }
    let full = watch.post(&watch.inline("tick 3")).await;
    assert_eq!(full.refusal(), (503, "thread_full"));
    assert!(full.retry_after().is_some());
    assert_eq!(rap.say_on_busy(&thread, "say 3", "enqueue").await.refusal(), (503, "thread_full"));
    assert_eq!(rap.thread(&thread).await["held"], 4);
    work.returns("done").await;
    rap.until_line(&thread, "assistant: 2").await;
    watch.says(&watch.inline("tick 3")).await;
    rap.until_line(&thread, "assistant: watch: tick 3").await;
    let transcript = rap.transcript(&thread).await.join("\n");
    assert!(transcript.contains("assistant: work: done\nwatch: tick 1\nwatch: tick 2"), "{transcript}");
}

#[tokio::test]
async fn a_model_that_talks_to_itself_is_paused_until_it_is_resumed() {
    let tools = Tools::start().await;
    let script = "repeat = true\n[[turn]]\ncalls = [{name = \"nowhere\"}]\n";
    let rap = Setup::new().tools(&tools).limit("turns_per_wake = 3").start_with_script(script);
    let thread = rap.open("go").await;
    let paused = rap.until_status(&thread, "needs_you").await;
    assert_eq!(paused["turn"], 3);
    let why = "paused: 3 turns in a row without new external input; resume the thread to continue";
    assert_eq!(paused["why"], why);
    assert_eq!(*rap.transcript(&thread).await.last().unwrap(), format!("notice: {why}"));

    rap.say(&thread, "are you there").await;
    let held = rap.thread(&thread).await;
    assert_eq!((&held["status"], &held["held"], &held["turn"]), (&json!("needs_you"), &json!(1), &json!(3)));
    rap.act(&thread, "resume").await.expect(202);
    rap.until(&thread, "paused again", |thread| thread["turn"] == 6 && thread["status"] == "needs_you").await;
    let transcript = rap.transcript(&thread).await;
    let said = transcript.iter().position(|line| line == "user: are you there").unwrap();
    assert_eq!(transcript[said - 1], format!("notice: {why}"));
    rap.act(&thread, "interrupt").await.expect(202);
    assert_eq!(rap.thread(&thread).await["status"], "idle");
    assert_eq!(rap.act(&thread, "resume").await.refusal(), (409, "nothing_to_resume"));
}

/// Proves: LC-16
#[tokio::test]
async fn held_input_survives_a_kill() {
    let (_tools, rap, thread, call) = waiting().await;
    rap.say_on_busy(&thread, "say later", "enqueue").await.expect(202);
    let rap = rap.restarted();
    assert_eq!(rap.thread(&thread).await["held"], 1);
    call.returns("done").await;
    rap.until_line(&thread, "assistant: later").await;
}

/// Proves: TR-13
#[tokio::test]
async fn a_stopped_runtime_ends_soon_and_continues_after_a_restart() {
    let (tools, rap, thread, call) = waiting().await;
    tools.answer_always(CANCEL, Reply::Hang);
    let asking = rap.open("sleep 3\nsay at last").await;
    let cancelled = rap.open("call work").await;
    tools.invocation().await;
    rap.act(&cancelled, "interrupt").await.expect(202);
    tools.next(CANCEL).await;
    let began = Instant::now();
    let rap = rap.stopped_and_started();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    call.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    rap.until_line(&asking, "assistant: at last").await;
    assert_eq!((tools.count(INVOKE), tools.count(CANCEL)), (2, 1));
}
