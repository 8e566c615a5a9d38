//! The runtime and a tool server of rap-tool, both as processes: they meet only on the wire.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::json;
use support::{Setup, until};
use tempfile::TempDir;

/// The example as a process. It is killed when this is dropped.
struct Sink {
    url: String,
    child: Child,
    _data: TempDir,
}

impl Sink {
    fn start() -> Sink {
        let mut path = std::env::current_exe().unwrap();
        path.pop();
        path.pop();
        let path = path.join("examples/kitchen_sink");
        assert!(path.exists(), "{} is missing: cargo build -p rap-tool --examples", path.display());
        let data = tempfile::tempdir().unwrap();
        let mut command = Command::new(path);
        command.env_clear().env("PORT", "0").env("RAP_TOOL_DATA", data.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let url =
            lines.by_ref().find_map(|line| Some(line.split_once("listening url=")?.1.trim().to_owned()));
        std::thread::spawn(move || lines.for_each(drop));
        Sink { url: url.expect("the example did not start"), child, _data: data }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Proves: SE-09, SE-13, CN-01
#[tokio::test]
async fn one_tool_of_each_kind_works_with_the_runtime() {
    let sink = Sink::start();
    let rap = Setup::new().tool_server(&sink.url).start();
    let thread =
        rap.open("call echo {\"text\": \"hi\"}\ncall fail {\"message\": \"broken\"}\ncall panic {}").await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["turn"], 2);
    let story = rap.story(&thread).await;
    assert!(story.contains(&"result call_1_1: echo hi".to_owned()), "{story:?}");
    assert!(story.contains(&"result call_1_2: Error: broken".to_owned()), "{story:?}");
    assert!(story.iter().any(|line| line.starts_with("result call_1_3: Error: ")), "{story:?}");

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
        let story = rap.story(child["id"].as_str().unwrap()).await;
        assert!(story.contains(&format!("assistant: tick: tick {number}")), "{story:?}");
    }
    assert_eq!(rap.thread(&thread).await["subscriptions"], json!([]));

    rap.say(&thread, "call slow {\"seconds\": 100}").await;
    rap.until_status(&thread, "waiting").await;
    rap.order(&thread, "interrupt").await.expect(202);
    rap.close(&thread).await;
    assert!(rap.story(&thread).await.iter().any(|line| line.ends_with(": interrupted")));
}
