//! Agents with several models: the next one is asked if those before it fail.

use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::{Rap, Setup};
use serde_json::json;

/// Settings of an agent whose models `m1`, `m2` and so on are on these servers, in order.
fn agent(name: &str, fallback_after: &str, servers: &[&ModelServer]) -> String {
    let table = |(number, server): (usize, &&ModelServer)| {
        format!(
            "{{ provider = \"openai\", name = \"m{}\", api_key = \"sk-key\", base_url = \"{}/v1\" }}",
            number + 1,
            server.url
        )
    };
    let tables = servers.iter().enumerate().map(table).collect::<Vec<_>>().join(", ");
    format!("name = \"{name}\"\nfallback_after = \"{fallback_after}\"\nmodels = [{tables}]")
}

async fn two_servers() -> (ModelServer, ModelServer) {
    (ModelServer::start().await, ModelServer::start().await)
}

async fn notices(rap: &Rap, thread: &str) -> Vec<String> {
    let lines = rap.transcript(thread).await;
    lines.into_iter().filter(|line| line.starts_with("notice: ")).collect()
}

#[tokio::test]
async fn the_next_model_is_asked_if_the_first_one_fails_and_a_notice_says_so_once() {
    let (first, second) = two_servers().await;
    for failure in [Reply::Status(503), Reply::Status(401)] {
        let rap = Setup::new().agent(&agent("default", "0s", &[&first, &second])).start();
        first.answer(failure);
        second.says("Here.");
        second.says("Still here.");
        let thread = rap.open("hi").await;
        rap.until_line(&thread, "assistant: Here.").await;
        rap.until_idle(&thread).await;
        rap.say(&thread, "and?").await;
        rap.until_line(&thread, "assistant: Still here.").await;
        let notices = notices(&rap, &thread).await;
        assert_eq!(notices.len(), 1, "{notices:#?}");
        let begin = "notice: the first model of the agent, m1, fails (the model's server answered ";
        assert!(notices[0].starts_with(begin), "{notices:#?}");
        assert!(notices[0].ends_with("; its model 2, m2, answers instead"), "{notices:#?}");
        let log = rap.log();
        assert!(log.contains("m1 (openai), then m2 (openai)"), "{log}");
    }
}

/// The provider's text about a request of one thread is not shown in another one.
#[tokio::test]
async fn a_request_that_is_refused_for_its_content_does_not_concern_other_threads() {
    let (first, second) = two_servers().await;
    let rap = Setup::new().agent(&agent("default", "0s", &[&first, &second])).start();
    first.answer(Reply::Full(400, None, "no poems about Ada".into()));
    second.says("A poem.");
    let refused = rap.open("a poem").await;
    rap.until_line(&refused, "assistant: A poem.").await;
    let told = notices(&rap, &refused).await;
    assert!(told.len() == 1 && told[0].contains("no poems about Ada"), "{told:#?}");

    first.says("First.");
    let other = rap.open("hi").await;
    rap.until_line(&other, "assistant: First.").await;
    assert!(notices(&rap, &other).await.is_empty());

    first.answer(Reply::Full(503, None, "no time for Ada".into()));
    second.says("Second.");
    rap.say(&refused, "another one").await;
    rap.until_line(&refused, "assistant: Second.").await;
    second.says("Second, too.");
    rap.say(&other, "and?").await;
    rap.until_line(&other, "assistant: Second, too.").await;
    let told = notices(&rap, &other).await;
    let text = "notice: the first model of the agent, m1, fails (its server fails or is overloaded); its model 2, m2, \
                answers instead";
    assert_eq!(told, [text]);
}

/// Every model has its attempts before the turn fails, even if the first one has not failed for long enough. A refused
/// request is not repeated at the same model.
#[tokio::test]
async fn every_model_is_asked_before_the_turn_fails() {
    let (first, second) = two_servers().await;
    for (attempts, failure) in [(1, Reply::Status(503)), (5, Reply::Status(401))] {
        let setup = Setup::new().agent(&agent("default", "1h", &[&first, &second]));
        let rap = setup.limit(&format!("model_attempts = {attempts}")).start();
        let before = first.questions();
        first.answer(failure);
        second.says("Here.");
        let thread = rap.open("hi").await;
        rap.until_line(&thread, "assistant: Here.").await;
        assert_eq!(first.questions() - before, 1);
    }
}

#[tokio::test]
async fn the_pause_that_one_server_asks_for_does_not_delay_the_next_model() {
    let (first, second) = two_servers().await;
    let rap = Setup::new().agent(&agent("default", "0s", &[&first, &second])).start();
    first.answer(Reply::Full(429, Some(("retry-after", "300".into())), "slow down".into()));
    second.says("Here.");
    let thread = rap.open("hi").await;
    rap.until_line(&thread, "assistant: Here.").await;
}

#[tokio::test]
async fn a_thread_fails_for_good_only_if_all_models_refuse() {
    let (first, second) = two_servers().await;
    for (failure, retried) in [(503, true), (401, false)] {
        let setup = Setup::new().agent(&agent("default", "0s", &[&first, &second]));
        let rap = setup.limit("model_attempts = 1").start();
        first.answer(Reply::Status(failure));
        second.answer(Reply::Status(403));
        let thread = rap.open("hi").await;
        let failed = rap.until_status(&thread, "failed").await;
        assert!(failed["why"].as_str().unwrap().contains("answered 403"), "{failed}");
        // It is asked again only if a model may work later.
        assert_eq!(!failed["retry_at"].is_null(), retried, "{failed}");
    }
}

/// The window of one model says nothing about the others.
#[tokio::test]
async fn a_request_that_is_too_long_for_one_model_waits_for_the_others() {
    let (first, second) = two_servers().await;
    let too_long = || {
        let error = json!({"error": {"message": "This model's maximum context length is 4096 tokens."}});
        Reply::Full(400, None, error.to_string().into())
    };
    let setup = Setup::new().agent(&agent("default", "1h", &[&first, &second]));
    let rap = setup.limit("model_attempts = 1").start();
    first.says("Hello.");
    let thread = rap.open("hi").await;
    rap.until_line(&thread, "assistant: Hello.").await;
    // The first model is down, and the history is too long for the second one, also in the request for a summary.
    first.answer(Reply::Status(503));
    second.answer(too_long());
    second.answer(too_long());
    rap.say(&thread, "more").await;
    let failed = rap.until_status(&thread, "failed").await;
    assert!(failed["why"].as_str().unwrap().contains("maximum context length is 4096"), "{failed}");
    assert!(!failed["retry_at"].is_null(), "{failed}");
    first.says("I am back.");
    rap.say(&thread, "and now?").await;
    rap.until_line(&thread, "assistant: I am back.").await;
    rap.until_idle(&thread).await;

    // It is too long for the first model, but not for the second one.
    let other = Setup::new().agent(&agent("default", "1h", &[&first, &second])).start();
    first.answer(too_long());
    second.says("I can read it.");
    let thread = other.open("hi").await;
    other.until_line(&thread, "assistant: I can read it.").await;
    let told = notices(&other, &thread).await;
    assert!(told.len() == 1 && told[0].contains("maximum context length is 4096"), "{told:#?}");

    // It is too long for both.
    first.answer(too_long());
    second.answer(too_long());
    let thread = other.open("hi").await;
    other.until_status(&thread, "needs_you").await;
}

/// The only slot of the first model's server is in use by another agent, whose request hangs.
#[tokio::test]
async fn a_request_for_the_next_model_does_not_wait_for_slots_of_the_first_ones_server() {
    let (first, second) = two_servers().await;
    let setup = Setup::new().agent(&agent("both", "0s", &[&first, &second]));
    let setup = setup.agent(&agent("one", "0s", &[&first])).limit("model_concurrency = 1");
    let rap = setup.start();
    let open = async |agent: &str| {
        let opened = rap.post("/v1/threads", &json!({"agent": agent, "message": "hi"})).await.expect(201);
        opened["id"].as_str().unwrap().to_owned()
    };
    first.answer(Reply::Status(503));
    second.says("Here.");
    let thread = open("both").await;
    rap.until_line(&thread, "assistant: Here.").await;
    rap.until_idle(&thread).await;

    first.answer(Reply::Hang);
    let asked = first.questions();
    open("one").await;
    rap_testkit::until("the first server is asked", async || first.questions() > asked).await;
    second.says("Still here.");
    rap.say(&thread, "and?").await;
    rap.until_line(&thread, "assistant: Still here.").await;
    second.says("New here.");
    let other = open("both").await;
    rap.until_line(&other, "assistant: New here.").await;
    assert_eq!(rap.number("SELECT count(*) FROM threads WHERE ask_to IS NOT NULL"), 1);
}

/// The slot of the second model's server is in use by another agent.
#[tokio::test]
async fn a_request_for_the_next_model_waits_for_a_slot_of_its_server() {
    let (first, second) = two_servers().await;
    let setup = Setup::new().agent(&agent("both", "0s", &[&first, &second]));
    let setup = setup.agent(&agent("one", "0s", &[&second])).limit("model_concurrency = 1");
    let rap = setup.start();
    second.answer(Reply::Hang);
    // One for each request.
    second.says("Here.");
    second.says("Here.");
    let body = json!({"agent": "one", "message": "hi"});
    rap.post("/v1/threads", &body).await.expect(201);
    second.question().await;
    first.answer(Reply::Status(503));
    let body = json!({"agent": "both", "message": "hi"});
    let thread = rap.post("/v1/threads", &body).await.expect(201)["id"].as_str().unwrap().to_owned();
    let to_second = format!("SELECT count(*) FROM threads WHERE ask_to = '{}/v1'", second.url);
    rap_testkit::until("both requests are for the second server", async || rap.number(&to_second) == 2).await;
    assert_eq!(second.questions(), 1);
    second.release();
    rap.until_line(&thread, "assistant: Here.").await;
}
