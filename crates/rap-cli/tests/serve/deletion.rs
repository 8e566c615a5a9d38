//! Deletion of closed sessions: on request, by `rap prune`, and by retention.

use rap_testkit::http::Response;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

async fn delete(rap: &Rap, thread: &str) -> Response {
    rap.send("DELETE", &format!("/v1/threads/{thread}"), &[], b"").await
}

async fn until_gone(rap: &Rap) {
    let tables = ["threads", "entries", "calls", "deletions", "views", "letters", "session_tools"];
    until("no row is left", async || tables.iter().all(|table| rap.rows(table) == 0).then_some(())).await;
}

#[tokio::test]
async fn a_closed_session_is_deleted_with_its_children_and_its_calls() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch {}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.event("tick")).await;
    let child = rap.child(&thread).await;
    assert_eq!(delete(&rap, &thread).await.refusal(), (409, "thread_open"));
    assert_eq!(delete(&rap, &child).await.refusal(), (409, "not_a_root"));
    assert_eq!(delete(&rap, "nobody").await.refusal(), (404, "no_such_thread"));
    rap.close(&thread).await;
    delete(&rap, &thread).await.expect(202);
    for thread in [&thread, &child] {
        assert_eq!(rap.get(&format!("/v1/threads/{thread}")).await.refusal(), (404, "no_such_thread"));
    }
    assert_eq!(rap.raw_listing("threads").await, Vec::<Value>::new());
    assert_eq!(delete(&rap, &thread).await.refusal(), (404, "no_such_thread"));
    until_gone(&rap).await;
    // A late message of the tool is refused like one for a thread that never was.
    assert_eq!(watch.post(&watch.event("late")).await.status, 404);
    let metrics = rap.send("GET", "/metrics", &[], b"").await.text;
    assert!(metrics.contains("rap_threads{status=\"closed\"} 0"), "{metrics}");
}

#[tokio::test]
async fn a_deletion_goes_on_after_kill_9_and_forks_keep_their_history() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    rap.until_idle(&thread).await;
    let fork = rap.post(&format!("/v1/threads/{thread}/fork"), &json!({})).await.expect(201);
    let fork = fork["id"].as_str().unwrap();
    rap.close(&thread).await;
    delete(&rap, &thread).await.expect(202);
    let rap = rap.restarted();
    until("only the fork is left", async || (rap.rows("threads") == 1).then_some(())).await;
    assert_eq!(rap.transcript(fork).await, ["user: say one", "assistant: one"]);
    rap.say(fork, "say two").await;
    rap.until_line(fork, "assistant: two").await;
}

#[tokio::test]
async fn prune_deletes_sessions_that_have_been_closed_for_a_time() {
    let rap = Setup::new().start();
    for name in ["closed", "open"] {
        rap.post("/v1/threads", &json!({"id": name, "message": "say hello"})).await.expect(201);
        rap.until_idle(name).await;
    }
    rap.close("closed").await;
    let refused = rap.command(&["prune"]);
    assert_eq!(refused.0, Some(1));
    assert!(refused.1.contains("retention.closed_threads"), "{}", refused.1);
    let counted = rap.command(&["prune", "--closed-for", "1d", "--dry-run"]);
    assert_eq!(counted, (Some(0), "0 closed sessions would be deleted\n".into()));
    let counted = rap.command(&["prune", "--closed-for", "0s", "--dry-run", "--json"]);
    assert_eq!(counted, (Some(0), "{\n  \"sessions\": 1\n}\n".into()));
    let pruned = rap.command(&["prune", "--closed-for", "0s"]);
    assert_eq!(pruned, (Some(0), "1 closed session is being deleted\n".into()));
    until("the open one is left", async || (rap.rows("threads") == 1).then_some(())).await;
    let refused = rap.command(&["threads", "delete", "open"]);
    assert_eq!(refused.0, Some(1));
    assert!(refused.1.contains("close it first"), "{}", refused.1);
    rap.close("open").await;
    assert_eq!(rap.command(&["threads", "delete", "open"]), (Some(0), "deleted session open\n".into()));
    until_gone(&rap).await;
}

#[tokio::test]
async fn closed_sessions_are_deleted_after_the_retention() {
    let rap = Setup::new().section("[retention]\nclosed_threads = \"1s\"").start();
    let kept = rap.open("say hello").await;
    let closed = rap.open("say hello").await;
    rap.until_idle(&closed).await;
    rap.close(&closed).await;
    until("it is gone", async || {
        (rap.get(&format!("/v1/threads/{closed}")).await.status == 404).then_some(())
    })
    .await;
    assert_eq!(rap.thread(&kept).await["id"], kept.as_str());
}
