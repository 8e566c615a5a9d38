//! Slots for model requests: sessions take turns, each model server has its own slots, and a retry delay holds none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::sync::Semaphore;

use crate::stage::{Answer, Model, Question};
use rap_testkit::{Rap, Setup};

/// Creates a thread of an agent with a first message.
async fn open(rap: &Rap, agent: &str, message: &str) -> String {
    let thread = rap.post("/v1/threads", &json!({"agent": agent, "message": message})).await.expect(201);
    thread["id"].as_str().unwrap().to_owned()
}

/// Twelve threads whose models never stop calling, with four slots.
#[tokio::test(flavor = "multi_thread")]
async fn threads_that_loop_take_turns_and_a_new_user_is_answered() {
    const LOOPS: usize = 12;
    const ROUNDS: usize = 10;
    let model = Model::start(async |question: Arc<Question>| {
        tokio::time::sleep(Duration::from_millis(5)).await;
        match question.topic().starts_with("loop") {
            // The runtime answers this call at once with an error.
            true => Answer::Calls(vec![("cancel_subscription", json!({"tool_call_id": "none"}))]),
            false => Answer::Says("Hello.".into()),
        }
    })
    .await;
    let setup = Setup::new().model(&model.lines()).limit("model_concurrency = 4");
    let rap = setup.limit("turns_per_wake = 1000000").start();
    let topics: Vec<String> = (0..LOOPS).map(|number| format!("loop {number:02}")).collect();
    for topic in &topics {
        rap.open(topic).await;
    }
    let from = model.requests.look(<[_]>::len);
    let window = |asked: &[Arc<Question>]| {
        let window = asked.get(from..from + LOOPS * ROUNDS)?;
        let turns = |topic: &String| window.iter().filter(|question| question.topic() == topic).count();
        Some(topics.iter().map(turns).collect::<Vec<_>>())
    };
    let turns = model.requests.until("a window of questions", window).await;
    let (fewest, most) = (turns.iter().min().unwrap(), turns.iter().max().unwrap());
    assert!(fewest * 3 >= *most, "of {} turns in all: {turns:?}", LOOPS * ROUNDS);

    let newcomer = rap.open("hello").await;
    let from = model.requests.look(<[_]>::len);
    let first = |asked: &[Arc<Question>]| {
        let came = asked.iter().any(|question| question.topic() == "hello");
        (came || asked.len() - from > 3 * LOOPS).then_some(came)
    };
    let came = model.requests.until("the new user's question", first).await;
    assert!(came, "{} questions of others came before that of a new user", 3 * LOOPS);
    rap.until_line(&newcomer, "assistant: Hello.").await;
}

/// The test releases the children's requests one at a time. The number of releases measures how long others wait.
#[tokio::test]
async fn a_session_with_many_children_delays_another_by_a_few_turns() {
    const CHILDREN: usize = 60;
    const SLOTS: usize = 2;
    let gate = Arc::new(Semaphore::new(0));
    let permits = Arc::clone(&gate);
    let model = Model::start(move |question: Arc<Question>| {
        let permits = Arc::clone(&permits);
        async move {
            if question.is_of_child() {
                permits.acquire().await.unwrap().forget();
                return Answer::Says("Done.".into());
            }
            if question.last() == "spawn" {
                let spawn = ("spawn_thread", json!({"instructions": "work"}));
                return Answer::Calls(vec![spawn; CHILDREN]);
            }
            Answer::Says("Hello.".into())
        }
    })
    .await;
    let rap = Setup::new().model(&model.lines()).limit(&format!("model_concurrency = {SLOTS}")).start();
    rap.open("spawn").await;
    let of_child = |question: &Arc<Question>| question.is_of_child();
    model.requests.until_count("children that are asked", SLOTS, of_child).await;

    let other = rap.open("hello").await;
    let is_hello = |question: &Arc<Question>| question.topic() == "hello";
    let mut answered = 0;
    loop {
        gate.add_permits(1);
        answered += 1;
        let next = |asked: &[Arc<Question>]| {
            let children = asked.iter().filter(|question| of_child(question)).count();
            let hello = asked.iter().any(is_hello);
            (hello || children >= SLOTS + answered).then_some(hello)
        };
        if model.requests.until("the next question", next).await {
            break;
        }
        assert!(answered <= 3 * SLOTS, "{answered} children were answered before the other session was");
    }
    rap.until_line(&other, "assistant: Hello.").await;
}

/// Two agents with a model server each. More threads of the first send requests than it has slots; then one of the second.
async fn one_of_two_servers(first: impl Fn() -> Answer + Send + Sync + 'static) {
    const SLOTS: usize = 2;
    let first = Arc::new(first);
    let bad = Model::start(move |_| std::future::ready(first())).await;
    let good = Model::start(async |_| Answer::Says("Hello.".into())).await;
    let agent = |name: &str, model: &Model| format!("name = {name:?}\n[agent.model]\n{}", model.lines());
    let rap = Setup::new()
        .model(&good.lines())
        .agent(&agent("bad", &bad))
        .agent(&agent("good", &good))
        .limit(&format!("model_concurrency = {SLOTS}"))
        .start();
    for number in 0..3 * SLOTS {
        open(&rap, "bad", &format!("thread {number}")).await;
    }
    bad.requests.until_count("questions to the bad server", SLOTS, |_| true).await;
    for _ in 0..2 * SLOTS {
        let thread = open(&rap, "good", "hello").await;
        rap.until_line(&thread, "assistant: Hello.").await;
    }
}

/// Its `Retry-After` is longer than this test.
#[tokio::test]
async fn a_failing_model_server_delays_only_its_own_agents() {
    one_of_two_servers(|| Answer::Fails(503, Some(60))).await;
}

#[tokio::test]
async fn a_hanging_model_server_delays_only_its_own_agents() {
    one_of_two_servers(|| Answer::Hangs).await;
}

#[tokio::test]
async fn a_retry_pause_occupies_no_slot() {
    let model = Model::start({
        let failed = AtomicBool::new(false);
        move |question: Arc<Question>| {
            let fails = question.topic() == "unlucky" && !failed.swap(true, Ordering::SeqCst);
            let answer = if fails { Answer::Fails(503, Some(8)) } else { Answer::Says("Hello.".into()) };
            std::future::ready(answer)
        }
    })
    .await;
    let rap = Setup::new().model(&model.lines()).limit("model_concurrency = 1").start();
    let unlucky = rap.open("unlucky").await;
    model.requests.until_count("the question that fails", 1, |_| true).await;
    let other = rap.open("hello").await;
    rap.until_line(&other, "assistant: Hello.").await;
    let order = |asked: &[Arc<Question>]| asked.iter().map(|question| question.topic().to_owned()).collect();
    let order: Vec<String> = model.requests.look(order);
    assert_eq!(order, ["unlucky", "hello"], "the other thread had to wait for the retry delay");
    rap.until_line(&unlucky, "assistant: Hello.").await;
}
