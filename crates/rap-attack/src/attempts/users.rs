//! Client tokens that belong to a user or have a scope.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, BYSTANDER, Stage};
use crate::wire;

const TOPIC: &str = "users";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "access to other users' threads", "it sees or changes one", other_users),
        attempt!(TOPIC, "a token does more than its scope", "it writes, or makes tokens", scopes),
        attempt!(
            TOPIC,
            "Idempotency-Key of another client",
            "it gets the other client's response, or blocks the other client's key",
            keys
        ),
    ]
}

/// Creates a token with a client token of the configuration.
async fn token(stage: &Stage, scope: &str, user: Option<&str>) -> String {
    let body = json!({"name": "attack", "scope": scope, "user_id": user});
    let made = wire::post(&stage.rap.at("/v1/tokens"), Some(BYSTANDER), &body).await.expect("no answer");
    let token = made.body["token"].as_str().expect("no token").to_owned();
    stage.keep_secret(&token);
    token
}

/// Makes a thread of a user with an open question. Returns the thread and the call.
async fn thread_of(stage: &Stage, user: &str) -> (String, String) {
    let body = json!({"user_id": user, "title": format!("the secret of {user}"), "message": "call work {}"});
    let thread = stage.open_with(body).await;
    let call = stage.invocation(&stage.hostile, &thread).await;
    wire::post(call.url(), None, &call.question("http://127.0.0.1:9/")).await;
    (thread, call.id().to_owned())
}

async fn other_users(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (thread, call) = thread_of(&stage, "alice").await;
    let mallory = token(&stage, "write", Some("mallory")).await;
    let at = |path: &str| stage.rap.at(&path.replace("THREAD", &thread).replace("CALL", &call));
    for path in ["", "/history", "/events", "/views", "/usage"] {
        let path = format!("/v1/threads/THREAD{path}");
        let answer = wire::get(&at(&path), Some(&mallory)).await;
        tries.add(format!("GET {path}"), answer.is_some_and(|answer| answer.status != 404));
    }
    for (path, body) in [
        ("/messages", json!({"text": "x"})),
        ("/interrupt", Value::Null),
        ("/close", Value::Null),
        ("/fork", json!({})),
        ("/resume", Value::Null),
        ("/calls/CALL/cancel", Value::Null),
        ("/calls/CALL/choice", json!({"selected": 0})),
    ] {
        let path = format!("/v1/threads/THREAD{path}");
        let answer = wire::post(&at(&path), Some(&mallory), &body).await;
        tries.add(format!("POST {path}"), answer.is_some_and(|answer| answer.status != 404));
    }
    for path in [
        "/v1/threads",
        "/v1/threads?parent=THREAD",
        "/v1/threads?q=secret",
        "/v1/threads?status=needs_you",
        "/v1/threads?order=newest&roots=true",
        "/v1/figures",
        "/v1/nodes",
        "/v1/tools",
        "/v1/calls",
        "/v1/subscriptions",
        "/v1/timers",
        "/v1/inbox",
        "/v1/deliveries",
    ] {
        let text = wire::get(&at(path), Some(&mallory)).await.map_or_else(String::new, |answer| answer.text);
        tries.add(format!("{path} shows {text}"), text.contains(&thread) || text.contains("secret of alice"));
    }
    counts(&stage, &mallory, &thread, &mut tries).await;
    // The id of another user's thread is taken. The answer is the same as for a thread of its own.
    let create = async |id: &str| {
        let made = wire::post(&stage.rap.at("/v1/threads"), Some(&mallory), &json!({"id": id})).await;
        made.map_or_else(String::new, |answer| format!("{} {}", answer.status, answer.text))
    };
    create("of-mallory").await;
    let (own, taken) = (create("of-mallory").await, create(&thread).await);
    tries.add(
        format!("a taken id of its own is answered {own}, that of another {taken}"),
        own != taken || taken.contains("alice"),
    );
    let forged = json!({"user_id": "alice", "message": "say x"});
    let made = wire::post(&stage.rap.at("/v1/threads"), Some(&mallory), &forged).await;
    let owner = made.map_or(Value::Null, |made| made.body["user_id"].clone());
    tries.add("a thread of another user was made", owner == "alice");
    let status = wire::get(&at("/v1/threads/THREAD"), Some(ATTACKER))
        .await
        .map_or(Value::Null, |answer| answer.body["status"].clone());
    tries.add(format!("the thread is {status}"), status != "needs_you");
    tries.add("the stream of all events tells of it", stream_tells(&stage, &mallory, &thread).await);
    wire::post(&at("/v1/threads/THREAD/close"), Some(ATTACKER), &Value::Null).await;
    tries
}

/// Asks for figures, and for what is for administrators.
async fn counts(stage: &Stage, token: &str, thread: &str, tries: &mut Tries) {
    let figures = wire::get(&stage.rap.at("/v1/figures"), Some(token)).await.map(|answer| answer.body);
    let figures = figures.unwrap_or_default();
    let counted = figures["threads"].as_object().is_none_or(|all| all.values().any(|count| *count != 0));
    tries.add(format!("figures of others: {figures}"), counted || figures["agents"] != json!([]));
    let nodes = wire::get(&stage.rap.at("/v1/nodes"), Some(token)).await.map(|answer| answer.body);
    tries.add(
        format!("the work of all users: {nodes:?}"),
        nodes.is_none_or(|nodes| nodes["nodes"] != json!([])),
    );
    for path in [&*format!("/v1/threads/{thread}/move"), "/v1/imports", "/v1/tokens"] {
        let status = wire::get(&stage.rap.at(path), Some(token)).await.map_or(0, |answer| answer.status);
        tries.add(format!("{path} was answered {status}"), status != 403);
    }
}

/// Returns true if the stream of all events of a token names a thread while that thread changes.
async fn stream_tells(stage: &Stage, token: &str, thread: &str) -> bool {
    let host = wire::authority(&stage.rap.url);
    let request = format!("GET /v1/events HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {token}\r\n\r\n");
    let listening = wire::exchange(&stage.rap.url, request.as_bytes(), std::time::Duration::from_secs(1));
    let change = async {
        let url = stage.rap.at(&format!("/v1/threads/{thread}/messages"));
        wire::post(&url, Some(ATTACKER), &json!({"text": "say more"})).await
    };
    let (heard, _) = tokio::join!(listening, change);
    heard.contains(thread)
}

async fn scopes(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (reader, writer) = (token(&stage, "read", None).await, token(&stage, "write", None).await);
    let thread = stage.open("say hello").await;
    for path in
        ["/v1/threads", "/v1/threads/T/messages", "/v1/threads/T/close", "/v1/threads/T/fork", "/v1/tokens"]
    {
        let url = stage.rap.at(&path.replace('T', &thread));
        let status =
            wire::post(&url, Some(&reader), &json!({"text": "x"})).await.map_or(0, |answer| answer.status);
        tries.add(format!("a reader's POST {path} was answered {status}"), status != 403);
    }
    for (name, token) in [("reader", &reader), ("writer", &writer)] {
        let body = json!({"name": "more", "scope": "admin"});
        let status = wire::post(&stage.rap.at("/v1/tokens"), Some(token), &body)
            .await
            .map_or(0, |answer| answer.status);
        tries.add(format!("a {name} makes a token: {status}"), status != 403);
        let status =
            wire::get(&stage.rap.at("/v1/tokens"), Some(token)).await.map_or(0, |answer| answer.status);
        tries.add(format!("a {name} lists tokens: {status}"), status != 403);
    }
    let listed = wire::get(&stage.rap.at("/v1/tokens"), Some(BYSTANDER))
        .await
        .map_or_else(String::new, |answer| answer.text);
    tries.add("the list shows tokens", listed.contains(&reader) || listed.contains(&writer));
    tries
}

async fn keys(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let create = async |token: &str, id: &str| {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str()), ("idempotency-key", "the same key"), wire::JSON];
        let answer = wire::answer(
            "POST",
            &stage.rap.at("/v1/threads"),
            &headers,
            json!({"id": id}).to_string().as_bytes(),
        )
        .await;
        answer.map_or((0, String::new()), |answer| (answer.status, answer.text))
    };
    create(BYSTANDER, "key-of-a-bystander").await;
    let (status, text) = create(ATTACKER, "key-of-an-attacker").await;
    tries.add(format!("the same key of another client was answered {status}"), status != 201);
    tries.add("it got the other's answer", text.contains("key-of-a-bystander"));
    tries
}
