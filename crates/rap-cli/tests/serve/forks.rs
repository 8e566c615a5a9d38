//! Forks: root threads that begin with a part of another thread's history.

use rap_testkit::{Rap, Tools};
use serde_json::json;

async fn fork(rap: &Rap, thread: &str, at: Option<u64>) -> String {
    let fork = rap.post(&format!("/v1/threads/{thread}/fork"), &json!({"at": at})).await.expect(201);
    assert_eq!(
        (&fork["forked_from"], &fork["parent"], &fork["root"]),
        (&json!(thread), &json!(null), &fork["id"])
    );
    fork["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_fork_sees_the_history_up_to_its_point_only() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    rap.until_idle(&thread).await;
    let fork = fork(&rap, &thread, None).await;
    rap.say(&thread, "say two").await;
    rap.until_idle(&thread).await;
    let rap = rap.restarted();
    assert_eq!(rap.transcript(&fork).await, ["user: say one", "assistant: one"]);
    rap.say(&fork, "say else").await;
    rap.until_idle(&fork).await;
    assert_eq!(rap.transcript(&fork).await[2..], ["user: say else", "assistant: else"]);
    assert_eq!(rap.transcript(&thread).await[2..], ["user: say two", "assistant: two"]);
    // A fork of a fork, and children of either.
    let again = self::fork(&rap, &fork, Some(3)).await;
    assert_eq!(rap.transcript(&again).await, ["user: say one", "assistant: one", "user: say else"]);
    rap.close(&thread).await;
    assert_eq!(rap.thread(&fork).await["status"], "idle");
}

#[tokio::test]
async fn a_fork_begins_at_the_nearest_valid_point_and_inherits_nothing_that_is_open() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {}").await;
    tools.invocation().await.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call work {}\ncall work {}").await;
    let calls = tools.invocations(2).await;
    calls[0].returns("first").await;
    // One result is there, one is missing: the nearest valid point is before the answer that called.
    for at in [None, Some(6), Some(7), Some(99)] {
        let fork = fork(&rap, &thread, at).await;
        assert_eq!(rap.transcript(&fork).await.last().unwrap(), "user: call work {}\ncall work {}");
        let shown = rap.thread(&fork).await;
        assert_eq!((&shown["status"], &shown["subscriptions"]), (&json!("idle"), &json!([])));
    }
    calls[1].returns("second").await;
    rap.until_idle(&thread).await;
    let whole = fork(&rap, &thread, None).await;
    assert_eq!(rap.transcript(&whole).await, rap.transcript(&thread).await);
    let empty = fork(&rap, &thread, Some(0)).await;
    assert!(rap.transcript(&empty).await.is_empty());
    rap.post("/v1/threads/nobody/fork", &json!({})).await.expect(404);
}

#[tokio::test]
async fn an_acknowledged_fork_survives_kill_9_and_its_request_counts_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    rap.until_idle(&thread).await;
    let path = format!("/v1/threads/{thread}/fork");
    let keyed = async |rap: &Rap, body: &[u8]| {
        let headers = [("content-type", "application/json"), ("idempotency-key", "fork-1")];
        rap.send("POST", &path, &headers, body).await
    };
    let fork = keyed(&rap, b"{}").await.expect(201);
    let rap = rap.restarted();
    // Like a client that did not receive the answer.
    assert_eq!(keyed(&rap, b"{\"at\": null}").await.expect(201)["id"], fork["id"]);
    assert_eq!(keyed(&rap, b"{\"at\": 1}").await.refusal(), (409, "key_reused"));
    let fork = fork["id"].as_str().unwrap();
    assert_eq!(rap.transcript(fork).await, ["user: say one", "assistant: one"]);
    rap.say(fork, "say two").await;
    let rap = rap.restarted();
    rap.until_line(fork, "assistant: two").await;
    assert_eq!(rap.transcript(&thread).await, ["user: say one", "assistant: one"]);
    assert_eq!(rap.rows("threads"), 2);
}

/// A fork of a long history is one row and no entry.
#[tokio::test]
async fn a_fork_copies_nothing() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    for number in 0..30 {
        rap.until_idle(&thread).await;
        rap.say(&thread, &format!("say {number}")).await;
    }
    rap.until_idle(&thread).await;
    let (threads, entries) = (rap.rows("threads"), rap.rows("entries"));
    let fork = fork(&rap, &thread, None).await;
    assert_eq!((rap.rows("threads"), rap.rows("entries")), (threads + 1, entries));
    assert_eq!(rap.transcript(&fork).await, rap.transcript(&thread).await);
}
