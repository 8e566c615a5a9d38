//! Tokens of tool servers that are sent to somebody else.

use std::sync::Arc;

use rap_protocol::{UrlPolicy, UrlRules};
use rap_testkit::peer::Reply;
use rap_testkit::tools::{INVOKE, tool};
use serde_json::json;
use url::Url;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, HOSTILE, Stage};
use crate::wire;

const TOPIC: &str = "credentials";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(
            TOPIC,
            "endpoint of a foreign origin",
            "the token of the tool server is sent there",
            foreign_endpoint
        ),
        attempt!(TOPIC, "response_url of a foreign origin", "a token is sent there", foreign_response_url),
        attempt!(TOPIC, "origins that look alike", "the rules permit credentials for one", look_alikes),
    ]
}

/// Returns true if a request contains the token.
fn has_token(request: &rap_testkit::peer::Request) -> bool {
    let headers = format!("{:?}", request.headers);
    headers.contains(HOSTILE) || String::from_utf8_lossy(&request.raw).contains(HOSTILE)
}

async fn foreign_endpoint(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let port = wire::port(&stage.elsewhere.url);
    for (number, host) in ["127.0.0.1", "localhost", "127.0.0.3"].into_iter().enumerate() {
        let path = format!("/foreign{number}");
        let endpoint = format!("http://{host}:{port}{path}");
        stage.hostile.offer(json!({"name": "bench", "endpoint": endpoint, "tools": [tool("work")]}));
        let thread = stage.open("call work {}").await;
        // Only 127.0.0.1 listens; a refused connection has nothing to read.
        if host == "127.0.0.1" {
            let request = stage.elsewhere.next(&path).await;
            tries.add(format!("{endpoint} got the token"), has_token(&request));
        } else {
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
            let got = stage.elsewhere.all(&path);
            tries.add(format!("{endpoint} got the token"), got.iter().any(has_token));
        }
        wire::post(&stage.rap.at(&format!("/v1/threads/{thread}/close")), Some(ATTACKER), &json!({})).await;
    }
    let to = format!("{}/redirected-token", stage.elsewhere.url);
    stage.reset();
    stage.hostile.answer_next(INVOKE, Reply::Full(307, Some(("location", to)), "".into()));
    let call = stage.call("work").await;
    tries.add("a redirect was followed", stage.elsewhere.count("/redirected-token") > 0);
    wire::post(&stage.rap.at(&format!("/v1/threads/{}/close", call.thread())), Some(ATTACKER), &json!({}))
        .await;
    // Closing a thread notifies only the configured server.
    let told = ["/close_thread", "/cancel_tool_call"].iter().any(|path| stage.elsewhere.count(path) > 0);
    tries.add("a foreign origin was told of a closed thread", told);
    tries
}

async fn foreign_response_url(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let call = stage.call("work").await;
    wire::post(call.url(), None, &call.question(&format!("{}/answer", stage.elsewhere.url))).await;
    let choice = format!("/v1/threads/{}/calls/{}/choice", call.thread(), call.id());
    wire::post(&stage.rap.at(&choice), Some(ATTACKER), &json!({"selected": 0})).await;
    let request = stage.elsewhere.next("/answer").await;
    tries.add("it got the token", has_token(&request) || request.header("authorization").is_some());
    wire::post(call.url(), None, &call.result("done")).await;
    tries
}

async fn look_alikes(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let url = |text: &str| Url::parse(text).unwrap();
    let server = url("https://tools.example:8443/base");
    let rules = UrlRules::from(UrlPolicy::Private).configured(&server);
    for other in [
        "https://tools.example/",
        "http://tools.example:8443/",
        "https://tools.example:8444/",
        "https://evil.example:8443/",
        "https://tools.example.evil.example:8443/",
        "https://tools.example@evil.example:8443/",
        "https://tоols.example:8443/",
        "https://eviltools.example:8443/",
        "https://sub.tools.example:8443/",
        "https://127.0.0.1:8443/",
    ] {
        tries.add(other, rules.may_have_credentials(&server, &url(other)));
    }
    let local = url("http://127.0.0.1:7501/");
    for other in [
        "http://127.0.0.2:7501/",
        "http://127.0.0.1:7502/",
        "http://0.0.0.0:7501/",
        "http://[::ffff:127.0.0.1]:7501/",
    ] {
        tries.add(other, rules.may_have_credentials(&local, &url(other)));
    }
    tries
}
