//! `[[notify]]`: people are told once about each transition, even across crashes.

use rap_io::webhook::SigningKeys;
use rap_protocol::{Secret, Timestamp};
use rap_testkit::peer::{Peer, Reply, Request};
use rap_testkit::tools::{tool, with};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::json;

const SECRET: &str = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
const HOOK: &str = "/hooks/T0KEN";

async fn tools() -> Tools {
    let tools = Tools::start().await;
    let wipe = with(tool("wipe"), json!({"annotations": {"destructive": true}}));
    tools.offer(tools.document("bench", "1", vec![wipe, tool("work")]));
    tools
}

fn notify(peer: &Peer, path: &str, on: &str) -> String {
    format!("[[notify]]\nurl = \"{}{path}\"\nsecret = \"env:HOOK_SECRET\"\non = {on}", peer.url)
}

/// Starts a runtime with a destination for each of these paths.
fn start(tools: &Tools, hooks: &[(&Peer, &str, &str)]) -> Rap {
    let setup = Setup::new().tools(tools).variable("HOOK_SECRET", SECRET);
    hooks.iter().fold(setup, |setup, (peer, path, on)| setup.section(&notify(peer, path, on))).start()
}

/// Checks the signature of an alert. Returns its id.
fn verified(request: &Request) -> String {
    let keys = SigningKeys::parse(&[Secret::new(SECRET)]).unwrap();
    let now = Timestamp::from(std::time::SystemTime::now());
    keys.verify(&request.headers, &request.raw, now).unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_is_told_once_and_signed_with_a_link_to_the_thread() {
    let (tools, peer) = (tools().await, Peer::start().await);
    let all = "[\"needs_you\", \"failed\", \"closed\"]";
    let rap = start(&tools, &[(&peer, HOOK, all), (&peer, "/other", "[\"closed\"]")]);
    let thread = rap.open("call wipe {\"password\": \"hunter2\"}").await;
    let alert = peer.next(HOOK).await;
    verified(&alert);
    assert_eq!(alert.body["type"], "thread.needs_you");
    let data = &alert.body["data"];
    assert_eq!((data["thread_id"].as_str(), data["status"].as_str()), (Some(&*thread), Some("needs_you")));
    assert_eq!(data["url"], json!(format!("{}/threads/{thread}", rap.url)));
    // Saying something else does not end the question, so it is not told again.
    rap.say(&thread, "say hello").await;
    rap.until_line(&thread, "assistant: hello").await;
    rap.until_status(&thread, "needs_you").await;
    rap.close(&thread).await;
    let closed = peer.next(HOOK).await;
    assert_eq!(closed.body["type"], "thread.closed");
    assert_eq!(peer.next("/other").await.body["type"], "thread.closed");
    until("nothing is left", || async { rap.rows("alerts") == 0 }).await;
    assert_eq!((peer.count(HOOK), peer.count("/other")), (2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alert_survives_kills_and_is_sent_until_it_is_accepted() {
    let (tools, peer, hangs) = (tools().await, Peer::start().await, Peer::start().await);
    peer.answer_always(HOOK, Reply::Status(503));
    hangs.answer_always("/hang", Reply::Hang);
    let on = "[\"needs_you\"]";
    let mut rap = start(&tools, &[(&hangs, "/hang", on), (&peer, HOOK, on)]);
    let thread = rap.open("call wipe {}").await;
    rap.until_status(&thread, "needs_you").await;
    let first = peer.next(HOOK).await;
    // A destination that hangs delays no other, and a kill in the middle of an attempt loses nothing.
    hangs.next("/hang").await;
    rap.kill();
    peer.answer_always(HOOK, Reply::Hang);
    rap.start_again();
    let second = peer.next(HOOK).await;
    rap.kill();
    peer.answer_always(HOOK, Reply::Status(200));
    rap.start_again();
    let third = peer.next(HOOK).await;
    assert_eq!((&first.raw, &second.raw), (&third.raw, &third.raw));
    let ids = [&first, &second, &third].map(verified);
    assert_eq!((&ids[0], &ids[1]), (&ids[2], &ids[2]));
    until("it is settled", || async { rap.rows("alerts") == 1 }).await;
    // Accepted alerts are not sent again, and the log names only the origin.
    let count = peer.count(HOOK);
    hangs.answer_always("/hang", Reply::Status(500));
    rap.restart();
    let log = || async { Some(rap.raw_listing("deliveries").await).filter(|rows| !rows.is_empty()) };
    let log = until("the failure of the other one is listed", log).await.remove(0);
    assert_eq!(
        (&log["kind"], &log["topic"], &log["outcome"]),
        (&json!("alert"), &json!("needs_you"), &json!("retrying"))
    );
    assert!(!log.to_string().contains("hang"), "{log}");
    assert_eq!(peer.count(HOOK), count);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_told_once_however_often_it_is_retried() {
    let (tools, peer) = (tools().await, Peer::start().await);
    let model = Peer::start().await;
    model.answer_always("/v1/chat/completions", Reply::Status(503));
    let lines = format!("provider = \"openai\"\nname = \"m\"\nbase_url = \"{}/v1\"", model.url);
    let setup = Setup::new().tools(&tools).variable("HOOK_SECRET", SECRET).model(&lines);
    let setup = setup.limit("model_attempts = 1").section(&notify(&peer, HOOK, "[\"failed\"]"));
    let rap = setup.start();
    let thread = rap.open("hello").await;
    let alert = peer.next(HOOK).await;
    assert_eq!(alert.body["type"], "thread.failed");
    assert!(alert.body["data"]["why"].as_str().unwrap().contains("503"), "{}", alert.body);
    rap.until_status(&thread, "failed").await;
    until("nothing is left", || async { rap.rows("alerts") == 0 }).await;
    assert_eq!(peer.count(HOOK), 1);
}
