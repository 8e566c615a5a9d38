//! Tool servers whose discovery hangs, drips, never ends or leads elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rap_testkit::peer::Reply;
use rap_testkit::poll;
use rap_testkit::tools::{DISCOVERY, tool};
use serde_json::json;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{REACHED_WITHIN, Stage};

const TOPIC: &str = "discovery";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "discovery that hangs or drips", "sessions wait for it", hanging),
        attempt!(TOPIC, "discovery that leads elsewhere", "a redirect is followed", redirects),
        attempt!(TOPIC, "discovery that is not a toolset", "it is offered to the model", garbage),
        attempt!(TOPIC, "another large toolset for each session", "they use much memory", many),
    ]
}

/// Time that a session of somebody else may take longer to begin if one server is silent: `discovery_wait`, and as much
/// again.
const DELAY: Duration = Duration::from_secs(2);

async fn until_answered(stage: &Stage, thread: &str) {
    stage.until_status(thread, &["idle", "waiting"]).await;
}

/// Returns true if a session was told that its toolset could not be fetched. It has the last valid one then.
async fn is_refused(stage: &Stage, thread: &str) -> bool {
    stage.history(thread).await.contains("could not be fetched")
}

async fn hanging(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let usual = first_answer(&stage).await;
    for (what, reply) in
        [("hangs", Reply::Hang), ("drips", Reply::Begin(b"{\"name\": \"bench\","[..].into()))]
    {
        stage.hostile.answer_always(DISCOVERY, reply);
        let taken = first_answer(&stage).await;
        tries.add(format!("discovery {what}: {taken:?} instead of {usual:?}"), taken > DELAY + 4 * usual);
    }
    tries
}

/// Time that a new session takes to call a tool of another server and to get its result.
async fn first_answer(stage: &Stage) -> Duration {
    let began = Instant::now();
    let thread = stage.open("call echo {\"text\": \"beside it\"}").await;
    let has_result = async || stage.history(&thread).await.contains("echo beside it");
    assert!(poll(REACHED_WITHIN, has_result).await.is_some(), "{thread} gets no result");
    began.elapsed()
}

async fn redirects(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let own = stage.rap.at("/v1/threads");
    for status in [301, 302, 303, 307, 308] {
        for to in
            [format!("{}/elsewhere", stage.elsewhere.url), own.clone(), "http://169.254.169.254/".to_owned()]
        {
            stage
                .hostile
                .answer_always(DISCOVERY, Reply::Full(status, Some(("location", to.clone())), "".into()));
            let thread = stage.open("call work {}").await;
            until_answered(&stage, &thread).await;
            let followed = stage.elsewhere.count("/elsewhere") > 0;
            tries.add(format!("{status} to {to}"), followed || !is_refused(&stage, &thread).await);
        }
    }
    tries
}

async fn garbage(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let json = Some(("content-type", "application/json".to_owned()));
    let replies = [
        ("20 MB of spaces", Reply::Full(200, json.clone(), vec![b' '; 20_000_000].into())),
        ("many brackets", Reply::Full(200, json.clone(), vec![b'['; 5_000_000].into())),
        ("HTML", Reply::Full(200, Some(("content-type", "text/html".to_owned())), "<html>".into())),
        ("nothing", Reply::Full(200, json.clone(), "".into())),
        ("invalid text", Reply::Full(200, json, b"\xff\xfe\x00"[..].into())),
        ("an error", Reply::Status(500)),
        ("no content", Reply::Status(204)),
    ];
    for (what, reply) in replies {
        stage.hostile.answer_always(DISCOVERY, reply);
        let thread = stage.open("call work {}").await;
        until_answered(&stage, &thread).await;
        tries.add(what, !is_refused(&stage, &thread).await);
    }
    tries
}

/// Sends toolsets of 1.5 MB whose values need much more memory, another one to each session. Each alone may be refused.
async fn many(stage: Arc<Stage>) -> Tries {
    const TOOLSETS: usize = 8;
    const TOOLS: usize = 6;
    let mut tries = Tries::new();
    for version in 0..TOOLSETS {
        let tools = (0..TOOLS).map(|number| {
            let mut tool = tool(&format!("work{number}"));
            tool["inputSchema"]["examples"] = vec![json!({"a": version}); 30_000].into();
            tool
        });
        stage.hostile.offer(stage.hostile.document("bench", &version.to_string(), tools.collect()));
        let thread = stage.open("call work0 {}").await;
        until_answered(&stage, &thread).await;
        tries.count += 1;
    }
    tries
}
