//! Scrubbing of output.

use std::time::Duration;

use crate::support::{Runtime, ToolProcess, data_dir};
use rap_tool::prelude::*;
use rap_tool::{Callback, Content, Segment, TestRuntime};
use serde_json::json;

/// A token of the server, which is a secret.
const TOKEN: &str = "a-long-token";

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

async fn leak(_: Nothing, _: Call) -> Result<String> {
    Ok(format!("{TOKEN} in /tmp/x"))
}

/// Proves: LC-33
#[tokio::test]
async fn secrets_of_the_environment_and_the_home_directory_are_not_in_results() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let environment =
        [("HOME", "/home/ann"), ("SERVICE_API_KEY", "s3cr3t-value"), ("SERVICE_NAME", "ordinary-name")];
    let process = ToolProcess::start("kitchen_sink", data.path(), &environment);
    let text = "s3cr3t-value of ordinary-name in /home/ann/work/a.rs:1:2";
    let table = [
        ("echo", json!({"text": text}), "echo [secret] of ordinary-name in ~/work/a.rs:1:2"),
        ("fail", json!({"message": text}), "Error: [secret] of ordinary-name in ~/work/a.rs:1:2"),
    ];
    for (tool, arguments, expected) in table {
        process.caller().accepted(&runtime.invocation(tool, "t", tool, arguments)).await;
        assert_eq!(runtime.next().await.text(), expected);
    }
}

/// Proves: LC-33
#[tokio::test(start_paused = true)]
async fn every_kind_of_output_is_scrubbed() -> Result<()> {
    let content = |_: Nothing, _: Call| async {
        let text = format!("{TOKEN} shown");
        let diff = Segment::Diff { path: "/tmp/a".into(), patch: text.clone() };
        Ok(Output::content(vec![Content::Text { text: text.clone() }])
            .display(Segment::Text(text))
            .display(diff))
    };
    let ask = |_: Nothing, call: Call| async move {
        call.view("state", json!({"at": ["/tmp/x", TOKEN]})).await?;
        call.choose(TOKEN, [TOKEN, "/tmp"], 0).await?;
        Err::<String, _>(Error::new(format!("{TOKEN} was wrong")))
    };
    let watch = |_: Nothing, subscribe: Subscribe| async move {
        let subscription = subscribe.confirm(format!("Watching with {TOKEN}.")).await?;
        subscription.send(format!("in /tmp/y with {TOKEN}")).await?;
        subscription.finish(TOKEN).await
    };
    let tools = ToolServer::new("leaky")
        .bearer(TOKEN)
        .tool("leak", leak)
        .offer(Tool::new("exact", leak).without_scrubbing())
        .tool("content", content)
        .tool("ask", ask)
        .subscription("watch", watch);
    let mut runtime = TestRuntime::start(tools).await?;
    assert_eq!(runtime.call("leak", json!({})).await.text(), "[secret] in [temp]/x");
    assert_eq!(runtime.call("exact", json!({})).await.text(), format!("{TOKEN} in /tmp/x"));
    let content = runtime.call("content", json!({})).await.result;
    assert_eq!(json!(content.body), json!({"content": [{"type": "text", "text": "[secret] shown"}]}));
    let diff = Segment::Diff { path: "[temp]/a".into(), patch: "[secret] shown".into() };
    assert_eq!(content.display_as, [Segment::Text("[secret] shown".into()), diff]);

    let call = runtime.invoke("ask", json!({})).await;
    let Callback::ViewUpdate(view) = runtime.next().await else { panic!("a view") };
    assert_eq!(view.content, json!({"at": ["[temp]/x", "[secret]"]}));
    let Callback::UserChoice(question) = runtime.next().await else { panic!("a question") };
    assert_eq!(
        (question.prompt.as_str(), &question.choices[..]),
        ("[secret]", &["[secret]".into(), "[temp]".into()][..])
    );
    runtime.answer(&question, 0).await;
    assert_eq!(runtime.result_of(&call).await.text(), "Error: [secret] was wrong");

    let confirmed = runtime.call("watch", json!({})).await;
    assert!(confirmed.text().starts_with("Watching with [secret]."), "{}", confirmed.text());
    for expected in ["in [temp]/y with [secret]", "[secret]"] {
        let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
        assert_eq!(event.text, expected);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_large_result_is_scrubbed_to_its_end() -> Result<()> {
    let large = |_: Nothing, _: Call| async { Ok(format!("{}{TOKEN}", "x".repeat(7 * 1024 * 1024))) };
    let begun = std::time::Instant::now();
    let mut runtime = TestRuntime::start(ToolServer::new("large").bearer(TOKEN).tool("large", large)).await?;
    assert!(runtime.call("large", json!({})).await.text().ends_with("xx[secret]"));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    Ok(())
}
