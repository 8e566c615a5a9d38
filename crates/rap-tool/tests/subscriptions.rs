//! Subscriptions: confirmed, then events in order, then nothing more.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, poll};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate, SendError};
use serde_json::{Value, json};
use support::{Caller, Runtime, Server, data_dir, let_retries_pass, quick};
use tokio::sync::{Mutex, mpsc, oneshot};

/// Subscribes to what a test makes happen.
#[derive(Deserialize, JsonSchema)]
struct Feed {
    topic: String,
}

/// Says back what it is told.
#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

/// What a test has the handler do.
enum Order {
    Send(Event),
    /// Begins to send an event and does not wait for it.
    BeginToSend(Event),
    Finish(Event),
    Save(u64),
    Return,
    Fail(&'static str),
}

/// What a handler has met with.
#[derive(Debug, PartialEq)]
enum Met {
    Start { topic: String, cursor: Option<u64> },
    Cancelled,
}

type Answer = Result<(), SendError>;

/// A server with a subscription that does as it is told, and the two ends of the wire to its handler.
struct Stage {
    server: Server,
    caller: Caller,
    orders: mpsc::UnboundedSender<(Order, oneshot::Sender<Answer>)>,
    met: mpsc::UnboundedReceiver<Met>,
}

impl Stage {
    async fn set(data: &Path, limits: Limits) -> Stage {
        let (orders, received) = mpsc::unbounded_channel();
        let (meets, met) = mpsc::unbounded_channel();
        let received = Arc::new(Mutex::new(received));
        let feed = move |args: Feed, subscribe: Subscribe| {
            let (received, meets) = (Arc::clone(&received), meets.clone());
            async move {
                let cursor = subscribe.cursor()?;
                meets.send(Met::Start { topic: args.topic.clone(), cursor })?;
                if args.topic == "nothing" {
                    return Err(Error::new("there is no such feed"));
                }
                let subscription = subscribe.confirm(format!("Watching {}.", args.topic)).await?;
                let (mut orders, call) = (received.lock().await, Call::clone(&subscription));
                tokio::select! {
                    ended = obey(&mut orders, subscription) => ended,
                    () = call.cancelled() => {
                        meets.send(Met::Cancelled)?;
                        Ok(())
                    }
                }
            }
        };
        let tools = ToolServer::new("stage")
            .limits(limits)
            .tool("say", |args: Say, _: Call| async { Ok(args.text) })
            .subscription("feed", feed);
        let server = Server::start(tools, data).await;
        Stage { caller: server.caller(), server, orders, met }
    }

    async fn subscribe(&self, runtime: &Runtime) {
        self.subscribe_to(runtime, "birds").await;
    }

    async fn subscribe_to(&self, runtime: &Runtime, topic: &str) {
        let call = runtime.invocation("feed", "thread_1", "sub_1", json!({"topic": topic}));
        self.caller.accepted(&call).await;
    }

    /// Subscribes and takes the confirmation, and a first event: then the confirmation has been noted as taken.
    async fn subscribed(&self, runtime: &mut Runtime) {
        self.subscribe(runtime).await;
        assert_eq!(runtime.accepted().await.body["subscription"], true);
        self.send("begun").await;
        runtime.expect_text("begun").await;
    }

    fn order(&self, order: Order) -> oneshot::Receiver<Answer> {
        let (answer, answered) = oneshot::channel();
        assert!(self.orders.send((order, answer)).is_ok(), "no handler listens");
        answered
    }

    async fn send(&self, event: impl Into<Event>) {
        self.order(Order::Send(event.into())).await.unwrap().unwrap();
    }

    async fn until_over(&self) {
        self.caller.until_settled("thread_1", "sub_1").await;
    }
}

async fn obey(
    orders: &mut mpsc::UnboundedReceiver<(Order, oneshot::Sender<Answer>)>,
    subscription: Subscription,
) -> Result<()> {
    while let Some((order, answer)) = orders.recv().await {
        let done = match order {
            Order::Send(event) => subscription.send(event).await,
            Order::BeginToSend(event) => {
                let mut sending = Box::pin(subscription.send(event));
                assert!(poll!(&mut sending).is_pending());
                Ok(())
            }
            Order::Save(cursor) => subscription.save(cursor).await,
            Order::Finish(event) => return subscription.finish(event).await,
            Order::Return => return Ok(()),
            Order::Fail(message) => return Err(Error::new(message)),
        };
        answer.send(done).ok();
    }
    Ok(())
}

/// Proves: SE-11, SE-12, SE-01, LC-08
#[tokio::test]
async fn a_subscription_is_confirmed_by_name_before_any_event() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut stage = Stage::set(data.path(), quick()).await;
    // The confirmation is slow to be taken, and the event is there already.
    runtime.answer_next(&[503, 503, 503]);
    stage.subscribe(&runtime).await;
    assert_eq!(stage.met.recv().await, Some(Met::Start { topic: "birds".into(), cursor: None }));
    stage.send("a wren").await;
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
    assert!(stage.caller.is_alive("thread_1", "sub_1").await);
}

/// `associative` and `final` may be left out where they are false.
fn without_defaults(event: &Value) -> Value {
    let mut event = event.clone();
    event.as_object_mut().unwrap().retain(|_, value| *value != json!(false));
    event
}

/// Proves: SE-01, TR-14
#[tokio::test]
async fn events_keep_their_order_and_their_ids_while_some_are_tried_again() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    let script = [200, 503, 200, 503, 503, 200, 200, 500, 200, 504, 503, 502, 200];
    runtime.answer_next(&script);
    for number in 0..20 {
        stage.send(format!("event {number}")).await;
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
async fn the_final_event_is_the_last_one() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    runtime.answer_next(&[503, 503]);
    stage.send("one").await;
    stage.order(Order::Finish("two".into()));
    let one = runtime.expect_text("one").await;
    let two = runtime.expect_text("two").await;
    assert!(one.body.get("final").is_none_or(|it| *it == false) && two.body["final"] == true);
    stage.until_over().await;
    let others = let_retries_pass(&stage.caller, &mut runtime).await;
    assert!(others.is_empty(), "{others:?}");
}

/// Proves: SE-27
#[tokio::test]
async fn events_say_whether_they_belong_into_the_thread_and_structured_data_is_json() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    let bird = json!({"name": "wren", "notes": ["\"tic\"", "é"]});
    stage.send(Event::json(&bird).unwrap().associative()).await;
    stage.order(Order::Finish(Event::new("gone").associative()));
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
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribe_to(&runtime, "nothing").await;
    let result = runtime.expect_text("Error: there is no such feed").await;
    assert_eq!(result.body["type"], "tool_result");
    assert!(result.body.get("subscription").is_none_or(|it| *it == false));
    stage.until_over().await;
    assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-27
#[tokio::test]
async fn a_handler_that_ends_after_the_confirmation_sends_a_final_event() {
    let endings = [(Order::Return, "the subscription has ended"), (Order::Fail("no more"), "Error: no more")];
    for (order, text) in endings {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let stage = Stage::set(data.path(), quick()).await;
        stage.subscribed(&mut runtime).await;
        stage.order(order);
        let last = runtime.expect_text(text).await;
        assert!(last.is_event() && last.body["final"] == true, "{last:?}");
        stage.until_over().await;
    }
}

/// Proves: SE-19, SE-26, TC-11
#[tokio::test]
async fn nothing_is_sent_after_a_cancellation_or_the_closing_of_the_thread() {
    for path in ["/cancel_tool_call", "/close_thread"] {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let mut stage = Stage::set(data.path(), quick()).await;
        stage.subscribed(&mut runtime).await;
        stage.met.recv().await;
        // These wait in the outbox, on disk.
        runtime.answer_always(503);
        for number in 0..3 {
            stage.send(format!("late {number}")).await;
        }
        assert_eq!(runtime.next().await.text(), "late 0");
        let end = json!({"thread_id": "thread_1", "tool_call_id": "sub_1"});
        assert_eq!(stage.caller.post(path, end.to_string()).await, (200, String::new()));
        runtime.answer_always(200);
        assert_eq!(stage.met.recv().await, Some(Met::Cancelled));
        assert!(!stage.caller.is_alive("thread_1", "sub_1").await);
        runtime.pending();
        let others = let_retries_pass(&stage.caller, &mut runtime).await;
        assert!(others.is_empty(), "{others:?}");
    }
}

/// Proves: SE-26
#[tokio::test]
async fn an_event_that_is_being_sent_is_let_go_when_its_subscription_is_cancelled() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.deliveries_per_host = 1;
    let stage = Stage::set(data.path(), limits).await;
    stage.subscribed(&mut runtime).await;
    runtime.hang();
    stage.send("stuck").await;
    stage.send("never sent").await;
    assert_eq!(runtime.next().await.text(), "stuck");
    stage.caller.cancel("thread_1", "sub_1").await;
    assert!(!stage.caller.is_alive("thread_1", "sub_1").await);
    // Its place is free, although nobody has answered.
    let say = runtime.invocation("say", "thread_2", "call_2", json!({"text": "free"}));
    stage.caller.accepted(&say).await;
    assert_eq!(runtime.next().await.text(), "free");
    runtime.answer_again();
    assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-08
#[tokio::test]
async fn a_cancellation_before_the_confirmation_was_taken_gives_one_error() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut stage = Stage::set(data.path(), quick()).await;
    runtime.answer_always(503);
    stage.subscribe(&runtime).await;
    stage.met.recv().await;
    stage.send("a wren").await;
    runtime.next().await;
    stage.caller.cancel("thread_1", "sub_1").await;
    assert_eq!(stage.met.recv().await, Some(Met::Cancelled));
    runtime.answer_always(200);
    runtime.expect_text("Error: cancelled").await;
    stage.until_over().await;
    assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
}

/// Proves: LC-08
#[tokio::test]
async fn a_confirmation_that_nobody_answers_gives_way_to_the_error_of_a_cancelled_call() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    runtime.hang();
    stage.subscribe(&runtime).await;
    assert_eq!(runtime.next().await.body["subscription"], true);
    runtime.answer_next(&[503]);
    stage.caller.cancel("thread_1", "sub_1").await;
    let tried = runtime.next().await;
    assert_eq!(tried.text(), "Error: cancelled");
    runtime.answer_again();
    let taken = runtime.next().await;
    assert_eq!((tried.status, taken.status, &tried.raw), (503, 200, &taken.raw));
    assert!(taken.at - tried.at >= Duration::from_millis(15), "tried again without a pause");
    stage.until_over().await;
    assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
}

#[tokio::test]
async fn an_event_that_finds_no_thread_ends_its_subscription() {
    for status in [404, 410] {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let mut stage = Stage::set(data.path(), quick()).await;
        stage.subscribed(&mut runtime).await;
        stage.met.recv().await;
        runtime.answer_next(&[status]);
        runtime.hang();
        for text in ["into the void", "never sent", "nor this"] {
            stage.send(text).await;
        }
        assert_eq!(runtime.next().await.text(), "into the void");
        runtime.answer_again();
        assert_eq!(stage.met.recv().await, Some(Met::Cancelled));
        assert!(!stage.caller.is_alive("thread_1", "sub_1").await);
        assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
    }
}

/// Proves: TR-15
#[tokio::test]
async fn an_event_that_is_refused_is_dropped_and_the_next_one_sent() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    let statuses = [400, 401, 403, 409, 413, 422, 429, 302];
    runtime.answer_next(&statuses);
    for status in statuses {
        stage.send(format!("answered {status}")).await;
    }
    stage.order(Order::Finish("taken".into()));
    for status in statuses {
        let refused = runtime.next().await;
        assert_eq!((refused.status, refused.text()), (status, &*format!("answered {status}")));
    }
    let taken = runtime.next().await;
    assert_eq!((taken.status, taken.text()), (200, "taken"));
    stage.until_over().await;
}

/// Proves: SE-24
#[tokio::test]
async fn events_are_held_to_a_rate() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.event_rate = Rate::new(10, 2);
    let stage = Stage::set(data.path(), limits).await;
    let begun = Instant::now();
    stage.subscribed(&mut runtime).await;
    for number in 0..5 {
        stage.send(format!("event {number}")).await;
    }
    // Two of the six at once, the others every 100 ms.
    assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
    for number in 0..5 {
        runtime.expect_text(&format!("event {number}")).await;
    }
}

#[tokio::test]
async fn sending_waits_while_too_many_events_wait_and_none_is_lost() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let mut limits = quick();
    limits.waiting_events = 2;
    let stage = Stage::set(data.path(), limits).await;
    stage.subscribed(&mut runtime).await;
    runtime.answer_always(503);
    let mut answers: Vec<_> =
        (0..6).map(|number| stage.order(Order::Send(format!("event {number}").into()))).collect();
    for answer in answers.drain(..2) {
        answer.await.unwrap().unwrap();
    }
    let mut other = Runtime::start().await;
    let_retries_pass(&stage.caller, &mut other).await;
    assert!((&mut answers[0]).now_or_never().is_none(), "a third event was let in");
    runtime.answer_always(200);
    for number in 0..6 {
        runtime.expect_text(&format!("event {number}")).await;
    }
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    // A handler that waits for room is woken by a cancellation, too.
    runtime.answer_always(503);
    let answers: Vec<_> = (0..3).map(|_| stage.order(Order::Send("last".into()))).collect();
    runtime.next().await;
    stage.caller.cancel("thread_1", "sub_1").await;
    stage.until_over().await;
    for answer in answers {
        // Sent, refused as ended, or dropped with its handler: in any case it does not hang.
        answer.await.ok();
    }
}

#[tokio::test]
async fn an_event_is_delivered_even_if_its_handler_does_not_wait_until_it_is_on_disk() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    // Nothing of the subscription is under way that could take the event along.
    let_retries_pass(&stage.caller, &mut Runtime::start().await).await;
    stage.order(Order::BeginToSend("a wren".into())).await.unwrap().unwrap();
    runtime.expect_text("a wren").await;
}

/// Proves: LC-14, SE-10, TR-18
#[tokio::test]
async fn a_subscription_goes_on_after_a_restart_from_where_its_last_event_left_it() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let start = |cursor| Some(Met::Start { topic: "birds".into(), cursor });
    let mut stage = Stage::set(data.path(), quick()).await;
    stage.subscribed(&mut runtime).await;
    assert_eq!(stage.met.recv().await, start(None));
    stage.send(Event::new("one").cursor(1)).await;
    let mut ids = vec![runtime.expect_text("one").await.event_id().to_owned()];
    // An event that was not taken before the restart is taken after it.
    runtime.answer_always(503);
    stage.send(Event::new("two").cursor(2)).await;
    let tried = runtime.next().await;
    stage.server.stop().await;
    runtime.answer_always(200);
    runtime.pending();

    let mut stage = Stage::set(data.path(), quick()).await;
    assert_eq!(stage.met.recv().await, start(Some(2)));
    let taken = runtime.expect_text("two").await;
    assert_eq!(taken.raw, tried.raw);
    stage.send("three").await;
    stage.order(Order::Save(7)).await.unwrap().unwrap();
    ids.extend([taken, runtime.expect_text("three").await].map(|event| event.event_id().to_owned()));
    stage.server.stop().await;

    let mut stage = Stage::set(data.path(), quick()).await;
    assert_eq!(stage.met.recv().await, start(Some(7)));
    // The same subscription again is the same subscription.
    stage.subscribe(&runtime).await;
    stage.order(Order::Finish("four".into()));
    ids.push(runtime.expect_text("four").await.event_id().to_owned());
    stage.until_over().await;
    ids.dedup();
    assert_eq!(ids.len(), 4);
    assert!(let_retries_pass(&stage.caller, &mut runtime).await.is_empty());
}
