//! The runtime with the rap-tool example `kitchen_sink`, as separate processes.

use rap_testkit::{Process, Setup, programs, until};
use serde_json::json;

/// Proves: SE-09, SE-13, CN-01
#[tokio::test]
async fn one_tool_of_each_kind_works_with_the_runtime() {
    let data = tempfile::tempdir().unwrap();
    let sink = Process::start(programs::example("kitchen_sink", data.path(), &[]));
    let rap = Setup::new().tool_server(&sink.url).start();
    let thread =
        rap.open("call echo {\"text\": \"hi\"}\ncall fail {\"message\": \"broken\"}\ncall panic {}").await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["turn"], 2);
    let transcript = rap.transcript(&thread).await;
    assert!(transcript.contains(&"result call_1_1: echo hi".to_owned()), "{transcript:?}");
    assert!(transcript.contains(&"result call_1_2: Error: broken".to_owned()), "{transcript:?}");
    assert!(transcript.iter().any(|line| line.starts_with("result call_1_3: Error: ")), "{transcript:?}");

    rap.say(&thread, "call choose {}").await;
    rap.until_status(&thread, "needs_you").await;
    let question = rap.listing("inbox").await.remove(0);
    let call = question["call_id"].as_str().unwrap();
    let path = format!("/v1/threads/{thread}/calls/{call}/choice");
    rap.post(&path, &json!({"selected": 2})).await.expect(202);
    rap.until_line(&thread, "assistant: choose: chose blue").await;

    rap.say(&thread, "call show {}").await;
    rap.until_line(&thread, "assistant: show: shown").await;
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    assert_eq!(views["views"][0]["content"]["path"], "greeting.txt");

    rap.say(&thread, "call tick {\"count\": 3, \"every_ms\": 50}").await;
    let ticks = until("three ticks", async || {
        let children = rap.children(&thread).await;
        (children.len() == 3 && children.iter().all(|child| child["status"] == "closed")).then_some(children)
    });
    for (number, child) in (1..).zip(ticks.await) {
        let transcript = rap.transcript(child["id"].as_str().unwrap()).await;
        assert!(transcript.contains(&format!("assistant: tick: tick {number}")), "{transcript:?}");
    }
    assert_eq!(rap.thread(&thread).await["subscriptions"], json!([]));

    rap.say(&thread, "call slow {\"seconds\": 100}").await;
    rap.until_status(&thread, "waiting").await;
    rap.act(&thread, "interrupt").await.expect(202);
    rap.close(&thread).await;
    assert!(rap.transcript(&thread).await.iter().any(|line| line.ends_with(": interrupted")));
}
