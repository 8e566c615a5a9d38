//! Redeployed tool servers: an outdated version costs a session at most two turns and the runtime few discoveries.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::stage::{Answer, Bench, Model, Question, open_all, post_all};
use rap_testkit::peer::Request;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, until};

/// Model that calls `work` until it succeeds, if the user asks for it, and otherwise only answers.
async fn worker() -> Model {
    Model::start(async |question: Arc<Question>| match question.last() {
        "done" => Answer::Says("Finished.".into()),
        last if last.starts_with("Error") || last.starts_with("work") => {
            Answer::Calls(vec![("work", json!({}))])
        }
        _ => Answer::Says("Hello.".into()),
    })
    .await
}

/// Model requests of one conversation.
fn questions(model: &Model, topic: &str) -> Vec<Arc<Question>> {
    model.requests.look(|asked| asked.iter().filter(|question| question.topic() == topic).cloned().collect())
}

/// Asks a thread to work and waits until it has.
async fn work(rap: &Rap, thread: &str, order: &str) {
    rap.say(thread, order).await;
    let finished = |transcript: &[String]| {
        let said = transcript.iter().position(|line| *line == format!("user: {order}"));
        said.is_some_and(|at| transcript[at..].iter().any(|line| line == "assistant: Finished."))
    };
    until(order, async || finished(&rap.transcript(thread).await).then_some(())).await;
}

/// A session that has just refreshed its toolset, and whose server is then deployed again.
async fn deployed_twice(model: &Model, bench: &Bench, rap: &Rap) -> String {
    let thread = rap.open("work at first").await;
    rap.until_line(&thread, "assistant: Finished.").await;
    bench.deploy(2);
    work(rap, &thread, "work again").await;
    let last = questions(model, "work at first").pop().unwrap();
    assert_eq!(last.tool("work"), Some("Works, version 2."));
    bench.deploy(3);
    thread
}

/// A session may not refresh twice in a minute, but another session has fetched the newest toolset meanwhile.
///
/// Proves: LC-35
#[tokio::test]
async fn after_a_second_deployment_a_session_uses_the_newest_tools_that_the_runtime_has() {
    let (model, bench) = (worker().await, Bench::start().await);
    let rap = Setup::new().model(&model.lines()).tool_server(&bench.url).start();
    let thread = deployed_twice(&model, &bench, &rap).await;
    let other = rap.open("work elsewhere").await;
    rap.until_line(&other, "assistant: Finished.").await;
    assert_eq!(bench.invocations(3), 1, "a new session asks anew");

    let (turns, refused) = (questions(&model, "work at first").len(), bench.invocations(2));
    rap.say(&thread, "work once more").await;
    let over = |asked: &[Arc<Question>]| {
        let turns = asked.iter().filter(|question| question.topic() == "work at first").skip(turns);
        let turns: Vec<_> = turns.cloned().collect();
        let finished = turns.last().is_some_and(|question| question.last() == "done");
        (finished || turns.len() > 4).then_some(turns)
    };
    let turns = model.requests.until("the session works with the new version, or burns turns", over).await;
    let heard: Vec<&str> = turns.iter().map(|question| question.last()).collect();
    let told = turns.iter().find(|question| question.last().starts_with("Error: the tools of bench changed"));
    assert!(turns.len() <= 4, "{heard:?}");
    assert!(told.is_none_or(|question| question.tool("work") == Some("Works, version 3.")), "{heard:?}");
    assert_eq!(bench.invocations(3), 2);
    assert!(bench.invocations(2) - refused <= 1, "a version that was refused is not sent again");
}

/// The newest toolset was not fetched and the session may not refresh yet. Until then its model is not asked to call again.
#[tokio::test]
async fn where_a_refresh_must_wait_the_result_waits_with_it() {
    let (model, bench) = (worker().await, Bench::start().await);
    let rap = Setup::new().model(&model.lines()).tool_server(&bench.url).start();
    let bystander = rap.open("talk").await;
    rap.until_line(&bystander, "assistant: Hello.").await;
    let thread = deployed_twice(&model, &bench, &rap).await;
    let (turns, refused) = (questions(&model, "work at first").len(), bench.invocations(2));
    rap.say(&thread, "work once more").await;
    bench
        .requests
        .until_count("the call of the old version", refused + 1, |asked| {
            asked.path == INVOKE && asked.body["toolset_version"] == "2"
        })
        .await;
    // In this time a model that is asked to call again would have called many times.
    for number in 0..20 {
        rap.say(&bystander, &format!("talk {number}")).await;
        let answered = |asked: &[Arc<Question>]| {
            let last = asked.iter().rev().find(|question| question.topic() == "talk")?;
            last.last().ends_with(&format!("talk {number}")).then_some(())
        };
        model.requests.until("the bystander is asked", answered).await;
        rap.until_idle(&bystander).await;
    }
    let turns = questions(&model, "work at first").len() - turns;
    assert!(
        turns <= 4,
        "{turns} turns, {} calls of a version that was refused",
        bench.invocations(2) - refused
    );
    assert!(bench.invocations(2) - refused <= 1, "a version that was refused is not sent again");
}

/// Completes when more than this number of calls of version 1 were refused.
async fn refused_more_than(bench: &Bench, calls: usize) -> usize {
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let refused = bench.invocations(1);
        if refused > calls {
            return refused;
        }
    }
}

/// Sessions with version 1 call `work` after version 2 was deployed.
async fn deployed_once(sessions: usize) {
    let (model, bench) = (worker().await, Bench::start().await);
    let rap = Setup::new().model(&model.lines()).tool_server(&bench.url).start();
    let threads: Vec<String> = (0..sessions).map(|number| format!("session-{number}")).collect();
    open_all(&rap, &threads, Some("talk")).await;
    for thread in &threads {
        rap.until_idle(thread).await;
    }
    let before = bench.discoveries();
    bench.deploy(2);
    let say = |id: &String| (format!("{}/v1/threads/{id}/messages", rap.url), json!({"text": "work"}));
    post_all(202, threads.iter().map(say)).await;
    let finished = |question: &Arc<Question>| question.last() == "done";
    tokio::select! {
        () = model.requests.until_count("sessions that worked with the new version", sessions, finished) => {}
        refused = refused_more_than(&bench, 2 * sessions) => panic!("{refused} refused calls of {sessions} sessions"),
    }
    let mut refused: BTreeMap<String, usize> = BTreeMap::new();
    let is_refused = |asked: &&Request| asked.path == INVOKE && asked.body["toolset_version"] == "1";
    bench.requests.look(|asked| {
        for asked in asked.iter().filter(is_refused) {
            *refused.entry(asked.body["group_id"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    });
    let most = refused.values().max().unwrap();
    assert!(*most <= 2, "a session was refused {most} times");
    let discoveries = bench.discoveries() - before;
    assert!(discoveries <= sessions / 4, "{discoveries} discoveries for {sessions} sessions");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_hold_an_old_version_share_what_discovery_gives() {
    deployed_once(60).await;
}

/// More sessions than the runtime caches toolsets for.
#[tokio::test(flavor = "multi_thread")]
async fn each_of_many_sessions_is_refused_at_most_twice_after_a_deployment() {
    deployed_once(530).await;
}
