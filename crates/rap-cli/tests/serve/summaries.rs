//! Long conversations: a summary replaces earlier entries in the prompt, nothing is deleted, and a failed summary does
//! not fail the thread.

use std::time::Duration;

use rap_agent::prompt::SUMMARY_INSTRUCTIONS;
use rap_testkit::model::{ModelServer, messages};
use rap_testkit::peer::Reply;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

/// Text before a summary in a prompt.
const INTRODUCED: &str = "user: (The conversation so far is no longer shown. ";

async fn stage(lines: &str) -> (Tools, ModelServer, Rap) {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let lines = format!("{}\n{lines}", model.lines());
    let setup = Setup::new().tools(&tools).model(&lines).agent("name = \"default\"\nsystem = \"Be brief.\"");
    let rap = setup.start();
    (tools, model, rap)
}

/// A message of about this number of tokens.
fn long(tokens: usize) -> String {
    "ab ".repeat(tokens).trim_end().to_owned()
}

/// A thread whose model has answered `first` with `Hello.`.
async fn begun(model: &ModelServer, rap: &Rap) -> String {
    model.says("Hello.");
    let thread = rap.open("first").await;
    rap.until_line(&thread, "assistant: Hello.").await;
    model.question().await;
    thread
}

fn is_summary(question: &Value) -> bool {
    messages(question).last().unwrap().ends_with(SUMMARY_INSTRUCTIONS)
}

#[tokio::test]
async fn above_summarise_at_a_summary_replaces_the_answered_entries() {
    let (_tools, model, rap) = stage("window = 1000").await;
    let thread = begun(&model, &rap).await;
    model.says("Short.");
    rap.say(&thread, &long(500)).await;
    rap.until_line(&thread, "assistant: Short.").await;
    let asked = model.messages().await;
    assert_eq!(asked[..3], ["system: Be brief.", "user: first", "assistant: Hello."]);

    model.says("The user greeted.");
    model.says("Fine.");
    let text = long(900);
    rap.say(&thread, &text).await;
    rap.until_line(&thread, "assistant: Fine.").await;
    let question = model.question().await;
    assert!(is_summary(&question) && question.get("tools").is_none(), "{question}");
    let shown = messages(&question);
    assert_eq!(shown[..3], asked[..3], "it sees what the model has answered");
    assert!(shown[3].starts_with(&format!("{}\n\n", asked[3])));
    let question = model.question().await;
    let shown = messages(&question);
    assert_eq!(shown[0], "system: Be brief.");
    assert!(shown[1].starts_with(INTRODUCED) && shown[1].ends_with("\n\nThe user greeted."), "{}", shown[1]);
    assert_eq!(shown[2..], ["assistant: Short.".to_owned(), format!("user: {text}")]);
    assert!(question["tools"].as_array().is_some_and(|tools| !tools.is_empty()));

    let transcript = rap.transcript(&thread).await;
    let all = ["user: first", "assistant: Hello.", &format!("user: {}", long(500)), "assistant: Short."];
    assert_eq!(transcript[..4], all);
    assert_eq!(transcript[5..], ["summary to 3: The user greeted.", "assistant: Fine."]);
    let idle = rap.until_idle(&thread).await;
    assert_eq!((&idle["turn"], &idle["usage"]["input"]), (&json!(4), &json!(40)), "it is paid for");
    until("the figures have the tokens of the summary", async || {
        let figures = rap.get("/v1/figures").await.expect(200);
        let points = figures["agents"][0]["points"].as_array()?.clone();
        (points.iter().filter_map(|point| point["input"].as_u64()).sum::<u64>() == 40).then_some(())
    })
    .await;
    let (status, shown) = rap.command(&["threads", "tail", "--once", &thread]);
    assert!(status == Some(0) && shown.contains("a summary replaces entries 1 to 3: The user greeted."));

    // The next summary covers the first one, and the prompt has become shorter.
    model.says("All of it.");
    model.says("Good.");
    rap.say(&thread, &text).await;
    rap.until_line(&thread, "assistant: Good.").await;
    let shown = model.messages().await;
    assert!(shown[1].ends_with("\n\nThe user greeted."), "a summary of the summary: {shown:?}");
    let shown = model.messages().await;
    assert!(shown[1].ends_with("\n\nAll of it."), "{shown:?}");
    assert_eq!(shown[2..], ["assistant: Fine.".to_owned(), format!("user: {text}")]);
}

#[tokio::test]
async fn a_summary_names_open_calls_and_does_not_affect_earlier_children() {
    // Large enough for the tools, which are estimated from bytes until the provider reports tokens.
    let (tools, model, rap) = stage("window = 10000").await;
    model.calls(&[("s1", "watch", json!({"topic": "x"}))]);
    model.says("Subscribed.");
    let thread = rap.open("watch x").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    model.calls(&[("w1", "work", json!({"n": 1}))]);
    rap.say(&thread, "work").await;
    let work = tools.invocation().await;
    model.calls(&[("c1", "work", json!({"n": 2}))]);
    watch.says(&watch.event("tick")).await;
    let of_child = tools.invocation().await;
    let child = rap.child(&thread).await;
    rap.until_status(&child, "waiting").await;
    for _ in 0..4 {
        model.question().await;
    }

    model.says("Much was said.");
    model.says("Noted.");
    rap.say(&thread, &long(9_000)).await;
    rap.until_line(&thread, "assistant: Noted.").await;
    assert!(is_summary(&model.question().await));
    let asked = model.messages().await;
    for line in ["Much was said.", "\n- rap_2 (work)", "\n- rap_1 (watch)", &format!("\n- {child}")] {
        assert!(asked[1].contains(line), "{line}: {}", asked[1]);
    }
    assert_eq!(asked[2], "assistant calls rap_2=work{\"n\":1}");
    assert!(!asked.iter().any(|line| line.contains("watch x")), "{asked:?}");

    // An event of the subscription repeats its arguments, though its call is covered by the summary.
    model.says("Ticked.");
    watch.says(&watch.inline("tock")).await;
    rap.until_line(&thread, "assistant: Ticked.").await;
    let asked = model.messages().await;
    let echo = asked.iter().find(|line| line.contains("interrupt:rap_1")).unwrap();
    assert!(
        echo.contains("watch{\"kind\":\"interrupt:rap_1 (subscription remains active)\",\"topic\":\"x\"}")
    );
    model.says("Finished.");
    work.returns("done").await;
    rap.until_line(&thread, "assistant: Finished.").await;
    let asked = model.messages().await;
    assert!(
        asked.iter().any(|line| line.contains("interrupt:rap_2") && line.contains("\"n\":1")),
        "{asked:?}"
    );

    model.says("Handled.");
    of_child.returns("two").await;
    rap.until_status(&child, "closed").await;
    let asked = model.messages().await;
    assert_eq!(asked[1], "user: watch x");
    assert!(!asked.iter().any(|line| line.contains("Much was said.")), "{asked:?}");
    assert_eq!(asked.last().unwrap(), "tool rap_1: two");
}

#[tokio::test]
async fn an_id_that_only_a_covered_call_has_is_not_used_again() {
    let (tools, model, rap) = stage("window = 1000").await;
    model.calls(&[("same", "work", json!({}))]);
    model.says("Once.");
    let thread = rap.open("go").await;
    tools.invocation().await.returns("done").await;
    rap.until_line(&thread, "assistant: Once.").await;
    model.says("It went once.");
    model.calls(&[("same", "work", json!({}))]);
    model.says("Twice.");
    rap.say(&thread, &long(900)).await;
    let call = tools.invocation().await;
    assert_ne!(call.id(), "same");
    assert_eq!(call.request.body["call_id"], "same");
    call.returns("done").await;
    rap.until_line(&thread, "assistant: Twice.").await;
}

#[tokio::test]
async fn a_summary_is_made_again_after_kill_9() {
    let (_tools, model, rap) = stage("window = 1000").await;
    let thread = begun(&model, &rap).await;
    model.answer(Reply::Hang);
    rap.say(&thread, &long(900)).await;
    assert!(is_summary(&model.question().await));
    model.says("Short.");
    model.says("Fine.");
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: Fine.").await;
    assert!(is_summary(&model.question().await));
    let transcript = rap.transcript(&thread).await;
    assert_eq!(transcript[3..], ["summary to 1: Short.", "assistant: Fine."]);
    // After the summary, the model request is retried as usual.
    model.says("More.");
    model.answer(Reply::Hang);
    rap.say(&thread, &long(900)).await;
    rap.until_line(&thread, "summary to 4: More.").await;
    for _ in 0..3 {
        model.question().await;
    }
    model.says("Still fine.");
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: Still fine.").await;
    assert!(model.messages().await[1].ends_with("\n\nMore."));
    assert_eq!(model.questions(), 7);
}

#[tokio::test]
async fn a_message_during_a_summary_is_answered() {
    let (_tools, model, rap) = stage("window = 1000").await;
    let thread = begun(&model, &rap).await;
    model.answer(Reply::Hang);
    rap.say(&thread, &long(900)).await;
    assert!(is_summary(&model.question().await));
    model.says("Short.");
    model.says("Fine.");
    rap.say(&thread, "and?").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    assert!(is_summary(&model.question().await));
    assert!(model.messages().await.last().unwrap().ends_with("\n\nand?"));
}

#[tokio::test]
async fn a_failed_or_empty_summary_is_retried_and_the_question_still_asked() {
    let (_tools, model, rap) = stage("window = 1000").await;
    let thread = begun(&model, &rap).await;
    model.answer(Reply::Full(500, None, "overloaded".into()));
    model.says("Fine.");
    rap.say(&thread, &long(900)).await;
    rap.until_line(&thread, "assistant: Fine.").await;
    let notice = "notice: this long conversation could not be summarised: the model's server answered 500: \
                  overloaded; the next turn tries again";
    assert_eq!(rap.transcript(&thread).await[3], notice);
    assert!(is_summary(&model.question().await));
    assert_eq!(model.messages().await[1], "user: first", "it is asked as it was");

    model.says("");
    model.says("Good.");
    rap.say(&thread, &long(900)).await;
    rap.until_line(&thread, "assistant: Good.").await;
    assert!(
        rap.transcript(&thread)
            .await
            .iter()
            .any(|line| line.contains("could not be summarised: the summary is empty;"))
    );
    model.says("Short.");
    model.says("Better.");
    rap.say(&thread, &long(900)).await;
    rap.until_line(&thread, "assistant: Better.").await;
    assert!(rap.transcript(&thread).await.iter().any(|line| line.starts_with("summary to 6: Short.")));
}

/// The whole request is for the same server, which is overloaded.
#[tokio::test]
async fn a_server_that_asks_for_a_pause_instead_of_a_summary_is_not_asked_before() {
    let (_tools, model, rap) = stage("window = 1000").await;
    let thread = begun(&model, &rap).await;
    model.answer(Reply::Full(429, Some(("retry-after", "2".into())), "slow down".into()));
    model.says("Fine.");
    rap.say(&thread, &long(900)).await;
    rap.until_line(&thread, "assistant: Fine.").await;
    let all = model.all("/v1/chat/completions");
    let [_, summary, whole] = &all[..] else { panic!("{all:?}") };
    assert!(is_summary(&summary.body) && !is_summary(&whole.body));
    assert!(whole.at - summary.at >= Duration::from_secs(2), "{:?}", whole.at - summary.at);
}

#[tokio::test]
async fn a_prompt_refused_for_its_length_forces_one_summary() {
    let (_tools, model, rap) = stage("").await;
    let error = json!({"error": {"message": "no", "code": "context_length_exceeded"}}).to_string();
    let refusal = || Reply::Full(400, None, error.clone().into());
    let thread = begun(&model, &rap).await;
    model.answer(refusal());
    model.says("Short.");
    model.says("Fine.");
    rap.say(&thread, "more").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    assert_eq!(rap.transcript(&thread).await[3], "summary to 1: Short.");
    assert_eq!(model.count("/v1/models"), 0, "a short conversation asks nobody how long it may be");
    // A prompt that is still too long fails the thread with the reason.
    model.answer(refusal());
    model.says("Shorter.");
    model.answer(refusal());
    rap.say(&thread, "even more").await;
    let failed = rap.until_status(&thread, "needs_you").await;
    let why = failed["why"].as_str().unwrap();
    let begin = "the prompt cannot fit, and there is nothing left to summarise: the system prompt and the tools have \
                 about ";
    assert!(why.starts_with(begin), "{why}");
    assert!(why.ends_with("; the model can read 128000: the model's server answered 400: no"), "{why}");
    assert_eq!(model.questions(), 7);
}

#[tokio::test]
async fn no_summary_is_made_if_system_prompt_and_tools_alone_exceed_summarise_at() {
    let (_tools, model, rap) = stage("window = 1000").await;
    model.says_to(800, "Hello.");
    let thread = rap.open("first").await;
    rap.until_line(&thread, "assistant: Hello.").await;
    model.question().await;
    // The provider counted 800 tokens, nearly all of them for the tools.
    model.says_to(810, "Fine.");
    rap.say(&thread, "second").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    assert!(!is_summary(&model.question().await));
    assert_eq!(model.questions(), 2);

    // The same count, nearly all for the conversation.
    let (_tools, model, rap) = stage("window = 1000").await;
    model.says_to(800, "Hello.");
    let thread = rap.open(&long(900)).await;
    rap.until_line(&thread, "assistant: Hello.").await;
    model.question().await;
    model.says("Short.");
    model.says("Fine.");
    rap.say(&thread, "second").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    assert!(is_summary(&model.question().await));
}

#[tokio::test]
async fn a_prompt_that_cannot_fit_is_not_sent_and_its_length_is_reported() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let agent = format!("name = \"default\"\nsystem = \"{}\"", long(4_000));
    let setup = Setup::new().tools(&tools).model(&format!("{}\nwindow = 1000", model.lines()));
    let rap = setup.agent(&agent).start();
    let thread = rap.open("first").await;
    let failed = rap.until_status(&thread, "needs_you").await;
    let why = failed["why"].as_str().unwrap();
    let begin = "the prompt cannot fit: the system prompt and the tools alone have at least 2";
    assert!(why.starts_with(begin), "{why}");
    let end = " tokens, and the model can read 1000; shorten the system prompt, allow fewer tools, or correct \
               model.window";
    assert!(why.ends_with(end), "{why}");
    assert_eq!(model.questions(), 0);
}

#[tokio::test]
async fn the_window_is_read_from_the_list_of_models() {
    let (_tools, model, rap) = stage("summarise_at = \"50%\"").await;
    let list = json!({"data": [{"id": "gpt", "context_length": 8_000}]});
    model.answer_always("/v1/models", Reply::json(&list));
    let thread = begun(&model, &rap).await;
    model.says("Fine.");
    rap.say(&thread, &long(3_900)).await;
    rap.until_line(&thread, "assistant: Fine.").await;
    model.says("Short.");
    model.says("Good.");
    rap.say(&thread, &long(4_100)).await;
    rap.until_line(&thread, "assistant: Good.").await;
    assert!(rap.transcript(&thread).await.iter().any(|line| line == "summary to 3: Short."));
    assert_eq!(model.count("/v1/models"), 1);
}

#[tokio::test]
async fn a_scripted_model_makes_summaries_too() {
    let tools = Tools::start().await;
    let setup = Setup::new().tools(&tools).model("provider = \"scripted\"\nwindow = 10000");
    let rap = setup.start();
    let thread = rap.open("call watch {\"topic\": \"x\"}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_line(&thread, "assistant: watch: watching").await;
    rap.say(&thread, &format!("say one\n{}", long(9_000))).await;
    let summary = "summary to 3: 3 entries; the user said:\n- call watch {\"topic\": \"x\"}\n\nActive \
                   subscriptions, which cancel_subscription ends:\n- call_1_1 (watch)";
    rap.until_line(&thread, summary).await;
    rap.until_idle(&thread).await;
    watch.says(&watch.inline("tick")).await;
    rap.until_line(&thread, "assistant: watch: tick").await;
}

#[tokio::test]
async fn a_fork_sees_the_summary_only_if_it_begins_after_it() {
    let (_tools, model, rap) = stage("").await;
    let thread = begun(&model, &rap).await;
    model.answer(Reply::Full(400, None, "{\"error\": \"too many tokens\"}".into()));
    model.says("Short.");
    model.says("Fine.");
    rap.say(&thread, "more").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    for _ in 0..3 {
        model.question().await;
    }
    let fork = async |at: u64| {
        let fork = rap.post(&format!("/v1/threads/{thread}/fork"), &json!({"at": at})).await.expect(201);
        let fork = fork["id"].as_str().unwrap().to_owned();
        model.says("Forked.");
        rap.say(&fork, "and?").await;
        rap.until_line(&fork, "assistant: Forked.").await;
        model.messages().await
    };
    assert_eq!(fork(2).await, ["system: Be brief.", "user: first", "assistant: Hello.", "user: and?"]);
    let after = fork(5).await;
    assert!(after[1].starts_with(INTRODUCED) && after[1].ends_with("\n\nShort."), "{}", after[1]);
    assert_eq!((after[2].as_str(), after.last().unwrap().as_str()), ("assistant: Hello.", "user: and?"));
}
