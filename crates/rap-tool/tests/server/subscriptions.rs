//! Subscriptions: confirmation, events in order, and the end.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Caller, Runtime, Server, data_dir, short_pauses, wait_past_retries};
use futures_util::{FutureExt, poll};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate, SendError};
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc, oneshot};

/// Subscribes to events that the test triggers.
#[derive(Deserialize, JsonSchema)]
struct Feed {
    topic: String,
}

/// Returns its text.
#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

/// A command of the test to the handler.
enum Command {
    Send(Event),
    /// Starts to send an event and drops the future.
    BeginToSend(Event),
    Finish(Event),
    Save(u64),
    Return,
    Fail(&'static str),
}

/// An observation of the handler.
#[derive(Debug, PartialEq)]
enum Observed {
    Start { topic: String, cursor: Option<u64> },
    Cancelled,
}

type Answer = Result<(), SendError>;

/// A server with a subscription whose handler runs the commands of the test.
struct Fixture {
    server: Server,
    caller: Caller,
    commands: mpsc::UnboundedSender<(Command, oneshot::Sender<Answer>)>,
    observed: mpsc::UnboundedReceiver<Observed>,
}

impl Fixture {
    async fn set(data: &Path, limits: Limits) -> Fixture {
        let (commands, received) = mpsc::unbounded_channel();
        let (observer, observed) = mpsc::unbounded_channel();
        let received = Arc::new(Mutex::new(received));
        let feed = move |args: Feed, subscribe: Subscribe| {
            let (received, observer) = (Arc::clone(&received), observer.clone());
            async move {
                let cursor = subscribe.cursor()?;
                observer.send(Observed::Start { topic: args.topic.clone(), cursor })?;
                if args.topic == "nothing" {
                    return Err(Error::new("there is no such feed"));
                }
                let subscription = subscribe.confirm(format!("Watching {}.", args.topic)).await?;
                let (mut commands, call) = (received.lock().await, Call::clone(&subscription));
                tokio::select! {
                    ended = run_commands(&mut commands, subscription) => ended,
                    () = call.cancelled() => {
                        observer.send(Observed::Cancelled)?;
                        Ok(())
                    }
                }
            }
        };
        let tools = ToolServer::new("fixture")
            .limits(limits)
            .tool("say", |args: Say, _: Call| async { Ok(args.text) })
            .subscription("feed", feed);
        let server = Server::start(tools, data).await;
        Fixture { caller: server.caller(), server, commands, observed }
    }

    async fn subscribe(&self, runtime: &Runtime) {
        self.subscribe_to(runtime, "birds").await;
    }

    async fn subscribe_to(&self, runtime: &Runtime, topic: &str) {
        let call = runtime.invocation("feed", "thread_1", "sub_1", json!({"topic": topic}));
        self.caller.accepted(&call).await;
    }

    /// Subscribes and waits for the confirmation and a first event. Then the delivery of the confirmation is
    /// recorded.
    async fn subscribed(&self, runtime: &mut Runtime) {
        self.subscribe(runtime).await;
        assert_eq!(runtime.accepted().await.body["subscription"], true);
        self.send("begun").await;
        runtime.expect_text("begun").await;
    }

    fn command(&self, command: Command) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        assert!(self.commands.send((command, answer)).is_ok(), "no handler listens");
        answered
    }

    async fn send(&self, event: impl Into<Event>) {
        self.command(Command::Send(event.into())).await.unwrap().unwrap();
    }

    async fn until_settled(&self) {
        self.caller.until_settled("thread_1", "sub_1").await;
    }
}

async fn run_commands(
    commands: &mut mpsc::UnboundedReceiver<(Command, oneshot::Sender<Answer>)>,
    subscription: Subscription,
) -> Result<()> {
    while let Some((command, answer)) = commands.recv().await {
        let done = match command {
            Command::Send(event) => subscription.send(event).await,
            Command::BeginToSend(event) => {
                let mut sending = Box::pin(subscription.send(event));
                assert!(poll!(&mut sending).is_pending());
                Ok(())
            }
            Command::Save(cursor) => subscription.save(cursor).await,
            Command::Finish(event) => return subscription.finish(event).await,
            Command::Return => return Ok(()),
            Command::Fail(message) => return Err(Error::new(message)),
        };
        answer.send(done).ok();
    }
    Ok(())
}

/// Proves: SE-11, SE-12, SE-01, LC-08
#[tokio::test]
async fn the_confirmation_contains_the_id_and_comes_before_any_event() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut fixture = Fixture::set(data.path(), short_pauses()).await;
    // The confirmation is retried while the event already waits.
    runtime.answer_next(&[503, 503, 503]);
    fixture.subscribe(&runtime).await;
    assert_eq!(fixture.observed.recv().await, Some(Observed::Start { topic: "birds".into(), cursor: None }));
    fixture.send("a wren").await;
    let confirmation = json!({
        "type": "tool_result", "group_id": "thread_1", "id": "sub_1", "subscription": true,
        "text": "Watching birds. Subscription ID: sub_1",
    });
    for status in [503, 503, 503, 200] {
        let attempt = runtime.next().await;
        assert_eq!((attempt.status, &attempt.body), (status, &confirmation));
    }
    let event = runtime.next().await;
    let expected = json!({
        "type": "subscription_event", "group_id": "thread_1", "tool_call_id": "sub_1", "text": "a wren",
        "event_id": event.event_id(),
    });
    assert_eq!(without_defaults(&event.body), expected);
    assert!(fixture.caller.is_alive("thread_1", "sub_1").await);
}

/// Removes fields that are false, which may also be missing.
fn without_defaults(event: &Value) -> Value {
    let mut event = event.clone();
    event.as_object_mut().unwrap().retain(|_, value| *value != json!(false));
    event
}

/// Proves: SE-01, TR-14
#[tokio::test]
async fn events_keep_their_order_and_their_ids_when_some_are_retried() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    let script = [200, 503, 200, 503, 503, 200, 200, 500, 200, 504, 503, 502, 200];
    runtime.answer_next(&script);
    for number in 0..20 {
        fixture.send(format!("event {number}")).await;
    }
    let mut ids = Vec::new();
    for number in 0..20 {
        let mut attempts = vec![runtime.next().await];
        while attempts[attempts.len() - 1].status != 200 {
            attempts.push(runtime.next().await);
        }
        assert_eq!(attempts[0].text(), format!("event {number}"));
        assert!(attempts.iter().all(|attempt| attempt.raw == attempts[0].raw), "{attempts:?}");
        ids.push(attempts[0].event_id().to_owned());
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 20);
}

/// Proves: SE-04
#[tokio::test]
async fn nothing_is_sent_after_the_final_event() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    runtime.answer_next(&[503, 503]);
    fixture.send("one").await;
    fixture.command(Command::Finish("two".into()));
    let one = runtime.expect_text("one").await;
    let two = runtime.expect_text("two").await;
    assert!(one.body.get("final").is_none_or(|it| *it == false) && two.body["final"] == true);
    fixture.until_settled().await;
    let others = wait_past_retries(&fixture.caller, &mut runtime).await;
    assert!(others.is_empty(), "{others:?}");
}

/// Proves: SE-27
#[tokio::test]
async fn events_can_be_associative_and_contain_json() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    let bird = json!({"name": "wren", "notes": ["\"tic\"", "é"]});
    fixture.send(Event::json(&bird).unwrap().associative()).await;
    fixture.command(Command::Finish(Event::new("gone").associative()));
    let event = runtime.next().await;
    assert_eq!(serde_json::from_str::<Value>(event.text()).unwrap(), bird);
    assert_eq!(event.body["associative"], true);
    let last = runtime.next().await;
    assert_eq!((&last.body["associative"], &last.body["final"]), (&json!(true), &json!(true)));
}

/// Proves: LC-10, LC-26
#[tokio::test]
async fn an_error_before_the_confirmation_is_the_result_of_the_call() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribe_to(&runtime, "nothing").await;
    let result = runtime.expect_text("Error: there is no such feed").await;
    assert_eq!(result.body["type"], "tool_result");
    assert!(result.body.get("subscription").is_none_or(|it| *it == false));
    fixture.until_settled().await;
    assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-27
#[tokio::test]
async fn a_handler_that_returns_after_the_confirmation_causes_a_final_event() {
    let endings =
        [(Command::Return, "the subscription has ended"), (Command::Fail("no more"), "Error: no more")];
    for (command, text) in endings {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let fixture = Fixture::set(data.path(), short_pauses()).await;
        fixture.subscribed(&mut runtime).await;
        fixture.command(command);
        let last = runtime.expect_text(text).await;
        assert!(last.is_event() && last.body["final"] == true, "{last:?}");
        fixture.until_settled().await;
    }
}

/// Proves: SE-19, SE-26, TC-11
#[tokio::test]
async fn nothing_is_sent_after_a_cancellation_or_after_the_thread_was_closed() {
    for path in ["/cancel_tool_call", "/close_thread"] {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let mut fixture = Fixture::set(data.path(), short_pauses()).await;
        fixture.subscribed(&mut runtime).await;
        fixture.observed.recv().await;
        // These events wait in the outbox.
        runtime.answer_always(503);
        for number in 0..3 {
            fixture.send(format!("late {number}")).await;
        }
        assert_eq!(runtime.next().await.text(), "late 0");
        let end = json!({"thread_id": "thread_1", "tool_call_id": "sub_1"});
        assert_eq!(fixture.caller.post(path, end.to_string()).await, (200, String::new()));
        runtime.answer_always(200);
        assert_eq!(fixture.observed.recv().await, Some(Observed::Cancelled));
        assert!(!fixture.caller.is_alive("thread_1", "sub_1").await);
        runtime.pending();
        let others = wait_past_retries(&fixture.caller, &mut runtime).await;
        assert!(others.is_empty(), "{others:?}");
    }
}

/// Proves: SE-26
#[tokio::test]
async fn an_event_that_is_being_sent_is_aborted_when_its_subscription_is_cancelled() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.deliveries_per_host = 1;
    let fixture = Fixture::set(data.path(), limits).await;
    fixture.subscribed(&mut runtime).await;
    runtime.stop_answering();
    fixture.send("stuck").await;
    fixture.send("never sent").await;
    assert_eq!(runtime.next().await.text(), "stuck");
    fixture.caller.cancel("thread_1", "sub_1").await;
    assert!(!fixture.caller.is_alive("thread_1", "sub_1").await);
    // Its delivery slot is free, although the runtime has not answered.
    let say = runtime.invocation("say", "thread_2", "call_2", json!({"text": "free"}));
    fixture.caller.accepted(&say).await;
    assert_eq!(runtime.next().await.text(), "free");
    runtime.resume_answering();
    assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-08
#[tokio::test]
async fn a_cancellation_before_the_confirmation_was_delivered_gives_one_error() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut fixture = Fixture::set(data.path(), short_pauses()).await;
    runtime.answer_always(503);
    fixture.subscribe(&runtime).await;
    fixture.observed.recv().await;
    fixture.send("a wren").await;
    runtime.next().await;
    fixture.caller.cancel("thread_1", "sub_1").await;
    assert_eq!(fixture.observed.recv().await, Some(Observed::Cancelled));
    runtime.answer_always(200);
    runtime.expect_text("Error: cancelled").await;
    fixture.until_settled().await;
    assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-08
#[tokio::test]
async fn an_unanswered_confirmation_is_replaced_by_the_error_of_a_cancelled_call() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    runtime.stop_answering();
    fixture.subscribe(&runtime).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    runtime.answer_next(&[503]);
    fixture.caller.cancel("thread_1", "sub_1").await;
    let tried = runtime.next().await;
    assert_eq!(tried.text(), "Error: cancelled");
    runtime.resume_answering();
    let taken = runtime.next().await;
    assert_eq!((tried.status, taken.status, &tried.raw), (503, 200, &taken.raw));
    assert!(taken.at - tried.at >= Duration::from_millis(15), "retried without a pause");
    fixture.until_settled().await;
    assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
}

#[tokio::test]
async fn an_event_refused_with_404_or_410_ends_its_subscription() {
    for status in [404, 410] {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let mut fixture = Fixture::set(data.path(), short_pauses()).await;
        fixture.subscribed(&mut runtime).await;
        fixture.observed.recv().await;
        runtime.answer_next(&[status]);
        runtime.stop_answering();
        for text in ["into the void", "never sent", "nor this"] {
            fixture.send(text).await;
        }
        assert_eq!(runtime.next().await.text(), "into the void");
        runtime.resume_answering();
        assert_eq!(fixture.observed.recv().await, Some(Observed::Cancelled));
        assert!(!fixture.caller.is_alive("thread_1", "sub_1").await);
        assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
    }
}

/// Proves: TR-15
#[tokio::test]
async fn a_refused_event_is_dropped_and_the_next_one_is_sent() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    let statuses = [400, 401, 403, 409, 413, 422, 429, 302];
    runtime.answer_next(&statuses);
    for status in statuses {
        fixture.send(format!("answered {status}")).await;
    }
    fixture.command(Command::Finish("taken".into()));
    for status in statuses {
        let refused = runtime.next().await;
        assert_eq!((refused.status, refused.text()), (status, &*format!("answered {status}")));
    }
    let taken = runtime.next().await;
    assert_eq!((taken.status, taken.text()), (200, "taken"));
    fixture.until_settled().await;
}

/// Proves: SE-24
#[tokio::test]
async fn the_rate_of_events_is_limited() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.event_rate = Rate::new(10, 2);
    let fixture = Fixture::set(data.path(), limits).await;
    let begun = Instant::now();
    fixture.subscribed(&mut runtime).await;
    for number in 0..5 {
        fixture.send(format!("event {number}")).await;
    }
    // Two of the six events are sent at once, the others every 100 ms.
    assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
    for number in 0..5 {
        runtime.expect_text(&format!("event {number}")).await;
    }
}

#[tokio::test]
async fn sending_waits_while_the_outbox_is_full_and_no_event_is_lost() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = short_pauses();
    limits.waiting_events = 2;
    let fixture = Fixture::set(data.path(), limits).await;
    fixture.subscribed(&mut runtime).await;
    runtime.answer_always(503);
    let mut answers: Vec<_> =
        (0..6).map(|number| fixture.command(Command::Send(format!("event {number}").into()))).collect();
    for answer in answers.drain(..2) {
        answer.await.unwrap().unwrap();
    }
    let mut other = Runtime::start().await;
    wait_past_retries(&fixture.caller, &mut other).await;
    assert!((&mut answers[0]).now_or_never().is_none(), "a third event was accepted");
    runtime.answer_always(200);
    for number in 0..6 {
        runtime.expect_text(&format!("event {number}")).await;
    }
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    // A cancellation also wakes a handler that waits for room in the outbox.
    runtime.answer_always(503);
    let answers: Vec<_> = (0..3).map(|_| fixture.command(Command::Send("last".into()))).collect();
    runtime.next().await;
    fixture.caller.cancel("thread_1", "sub_1").await;
    fixture.until_settled().await;
    for answer in answers {
        // Sent, refused or dropped with its handler, but it must not hang.
        answer.await.ok();
    }
}

#[tokio::test]
async fn an_event_is_delivered_even_if_its_handler_drops_the_future() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    // No other delivery of the subscription is active that could also send the event.
    wait_past_retries(&fixture.caller, &mut Runtime::start().await).await;
    fixture.command(Command::BeginToSend("a wren".into())).await.unwrap().unwrap();
    runtime.expect_text("a wren").await;
}

/// Proves: LC-14, SE-10, TR-18
#[tokio::test]
async fn a_subscription_continues_from_its_cursor_after_a_restart() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let start = |cursor| Some(Observed::Start { topic: "birds".into(), cursor });
    let mut fixture = Fixture::set(data.path(), short_pauses()).await;
    fixture.subscribed(&mut runtime).await;
    assert_eq!(fixture.observed.recv().await, start(None));
    fixture.send(Event::new("one").cursor(1)).await;
    let mut ids = vec![runtime.expect_text("one").await.event_id().to_owned()];
    // An event that was not delivered before the restart is delivered after it.
    runtime.answer_always(503);
    fixture.send(Event::new("two").cursor(2)).await;
    let tried = runtime.next().await;
    fixture.server.stop().await;
    runtime.answer_always(200);
    runtime.pending();

    let mut fixture = Fixture::set(data.path(), short_pauses()).await;
    assert_eq!(fixture.observed.recv().await, start(Some(2)));
    let taken = runtime.expect_text("two").await;
    assert_eq!(taken.raw, tried.raw);
    fixture.send("three").await;
    fixture.command(Command::Save(7)).await.unwrap().unwrap();
    ids.extend([taken, runtime.expect_text("three").await].map(|event| event.event_id().to_owned()));
    fixture.server.stop().await;

    let mut fixture = Fixture::set(data.path(), short_pauses()).await;
    assert_eq!(fixture.observed.recv().await, start(Some(7)));
    // Subscribing again with the same id is a repeat.
    fixture.subscribe(&runtime).await;
    fixture.command(Command::Finish("four".into()));
    ids.push(runtime.expect_text("four").await.event_id().to_owned());
    fixture.until_settled().await;
    ids.dedup();
    assert_eq!(ids.len(), 4);
    assert!(wait_past_retries(&fixture.caller, &mut runtime).await.is_empty());
}
