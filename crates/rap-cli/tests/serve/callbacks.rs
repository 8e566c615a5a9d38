//! The callback endpoint: a callback is accepted once, with the right token and for the right call, or refused with an
//! error code.

use rap_testkit::peer::Reply;
use rap_testkit::tools::{INVOKE, with};
use rap_testkit::{Rap, Setup, Tools, http, until};
use serde_json::{Value, json};

/// Proves: TR-10, TR-13, TR-25, LC-30, SE-06
#[tokio::test]
async fn a_result_is_taken_once_and_a_duplicate_changes_nothing() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    call.returns("done").await;
    rap.until_idle(&thread).await;
    let before = (rap.thread(&thread).await, rap.history(&thread).await);
    for body in [call.result("done"), call.result("something else"), call.confirmation("watching")] {
        call.says(&body).await;
    }
    assert_eq!((rap.thread(&thread).await, rap.history(&thread).await), before);
    let transcript =
        ["user: call work", "call call_1_1 work {}", "result call_1_1: done", "assistant: work: done"];
    assert_eq!(rap.transcript(&thread).await, transcript);
}

/// Proves: TR-13
#[tokio::test]
async fn an_acknowledged_callback_survives_a_kill() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("done").await;
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: work: done").await;
    assert!(rap.transcript(&thread).await.contains(&"result call_1_1: done".to_owned()));
}

/// Proves: TR-10, TR-21
#[tokio::test]
async fn a_result_may_have_several_parts_and_display_segments() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let content = json!([
        {"type": "text", "text": "one"},
        {"type": "image", "data": "aGk=", "mediaType": "image/png"},
    ]);
    let display = json!([{"type": "hologram", "content": 1}, {"type": "text", "content": "for people"}]);
    let more = json!({"content": content, "display_as": display, "a field of the future": true});
    call.says(&with(call.result("not this"), more)).await;
    rap.until_line(&thread, "assistant: work: one [image]").await;
    let history = rap.history(&thread).await;
    assert_eq!(history[2]["content"], content);
    assert_eq!(history[2]["display"], json!([{"type": "text", "content": "for people"}]));
    assert_eq!(history[2]["synthetic"], false);
}

fn changed(url: &str, at: usize) -> String {
    let other = if url.as_bytes()[at] == b'A' { "B" } else { "A" };
    format!("{}{other}{}", &url[..at], &url[at + 1..])
}

/// Proves: TR-20, LC-29
#[tokio::test]
async fn a_forged_altered_or_foreign_url_is_refused() {
    let tools = Tools::start().await;
    let (rap, other) = (Rap::start(&tools), Rap::start(&tools));
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    other.open("call work").await;
    let foreign = tools.invocation().await;

    let url = call.url();
    let begin = format!("{}/callback/", rap.url);
    let token = url.strip_prefix(&begin).unwrap();
    // The last character has unused bits, which must not be changed either.
    let mut urls: Vec<String> = (begin.len()..url.len()).map(|at| changed(url, at)).collect();
    urls.push(format!("{begin}x"));
    urls.push(format!("{begin}{}", "A".repeat(5000)));
    urls.push(format!("{url}A"));
    urls.push(format!("{begin}{}", &token[..token.len() - 1]));
    urls.push(foreign.url().replace(&other.url, &rap.url));
    for url in urls {
        let answer = http::post(&url, &call.result("forged")).await;
        assert_eq!(answer.refusal(), (401, "bad_token"), "{url}");
        assert!(!answer.message().contains(token));
    }
    assert_eq!(rap.until_status(&thread, "waiting").await["waiting_on"][0]["call_id"], "call_1_1");
    call.returns("the real one").await;
    rap.until_line(&thread, "assistant: work: the real one").await;
}

/// Proves: TR-25
#[tokio::test]
async fn a_url_expires_if_a_lifetime_is_configured() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("callback_token_lifetime = \"1s\"").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let view = call.view("note", json!("hello"));
    call.says(&view).await;
    let refused =
        until("expired", async || Some(call.post(&view).await).filter(|answer| answer.status != 200));
    assert_eq!(refused.await.refusal(), (401, "bad_token"));
    assert_eq!(call.post(&call.result("late")).await.status, 401);
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
}

/// Proves: TR-22, LC-29
#[tokio::test]
async fn a_body_for_another_call_or_thread_is_refused() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work\ncall work").await;
    let calls = tools.invocations(2).await;
    let stranger = rap.open("call work").await;
    tools.invocation().await;
    let [call, other] = [&calls[0], &calls[1]];

    for body in [
        other.result("x"),
        other.event("x"),
        other.oauth("https://a.example"),
        other.question("https://a.example"),
    ] {
        assert_eq!(call.post(&body).await.refusal(), (403, "wrong_call"), "{body}");
    }
    for body in
        [call.result("x"), call.event("x"), call.view("note", json!(1)), call.oauth("https://a.example")]
    {
        for group in [stranger.as_str(), "nobody"] {
            let body = with(body.clone(), json!({"group_id": group}));
            assert_eq!(call.post(&body).await.refusal(), (403, "wrong_thread"), "{body}");
        }
    }
    for thread in [&thread, &stranger] {
        assert_eq!(rap.transcript(thread).await.iter().filter(|line| line.starts_with("result")).count(), 0);
    }
    assert!(rap.listing("inbox").await.is_empty());
}

/// Proves: TR-21, LC-29
#[tokio::test]
async fn an_error_in_a_callback_names_its_json_path() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let result = call.result("x");
    let without = |name: &str| {
        let mut body = result.clone();
        body.as_object_mut().unwrap().remove(name);
        body
    };
    let table = [
        (json!([]), "$: "),
        (json!("x"), "$: "),
        (without("type"), "$.type: "),
        (with(result.clone(), json!({"type": "tool_results"})), "$.type: "),
        (without("group_id"), "$.group_id: "),
        (without("id"), "$.id: "),
        (without("text"), "$: "),
        (with(result.clone(), json!({"id": 1})), "$.id: "),
        (with(result.clone(), json!({"text": 1})), "$.text: "),
        (with(result.clone(), json!({"subscription": "yes"})), "$.subscription: "),
        (with(result.clone(), json!({"content": [{"type": "text"}]})), "$.content[0].text: "),
        (with(result.clone(), json!({"content": [{"type": "sound"}]})), "$.content[0].type: "),
        (with(call.event("x"), json!({"final": 1})), "$.final: "),
        (with(call.event("x"), json!({"tool_call_id": ""})), "$.tool_call_id: "),
        (call.oauth("http://elsewhere.example/"), "$.auth_url: "),
        (with(call.question("https://a.example"), json!({"default": 2})), "$.default: "),
        (with(call.question("https://a.example"), json!({"choices": []})), "$.choices: "),
        (call.view("", json!(1)), "$.view_type: "),
    ];
    for (body, path) in table {
        let answer = call.post(&body).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{body}");
        assert!(answer.message().starts_with(path), "{body}: {}", answer.message());
    }
    for body in [&b""[..], b"{", b"{\"type\": \"tool_result\"", b"\xff\xfe", &[b'['; 5000]] {
        let answer = http::send("POST", call.url(), &[("content-type", "application/json")], body).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{body:?}");
    }
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
}

/// Proves: TR-01, TR-21
#[tokio::test]
async fn a_callback_is_a_post_of_json_within_the_size_limit() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("body = \"4KiB\"").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let body = call.result("x").to_string();
    for kind in ["text/plain", "application/jsonp", "", "application/x-www-form-urlencoded"] {
        let answer = http::send("POST", call.url(), &[("content-type", kind)], body.as_bytes()).await;
        assert_eq!(answer.refusal(), (415, "not_json"), "{kind}");
    }
    assert_eq!(http::send("POST", call.url(), &[], body.as_bytes()).await.status, 415);
    let long = call.post(&call.result(&"x".repeat(4096))).await;
    assert_eq!(long.refusal(), (413, "too_large"));
    for method in ["GET", "PUT", "DELETE"] {
        let answer = http::send(method, call.url(), &[], b"").await;
        assert_eq!(answer.refusal(), (405, "method_not_allowed"), "{method}");
    }
    assert_eq!(rap.thread(&thread).await["status"], "waiting");
    let kind = ("content-type", "Application/JSON; charset=utf-8");
    assert_eq!(http::send("POST", call.url(), &[kind], body.as_bytes()).await.status, 200);
    rap.until_line(&thread, "assistant: work: x").await;
}

/// Proves: SE-20, SE-21, LC-29
#[tokio::test]
async fn a_closed_thread_refuses_callbacks() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    rap.close(&thread).await;
    let transcript = rap.transcript(&thread).await;
    for (call, body) in [
        (&work, work.result("x")),
        (&work, work.oauth("https://a.example")),
        (&work, work.question("https://a.example")),
        (&work, work.view("note", json!(1))),
        (&watch, watch.event("x")),
        (&watch, watch.inline("x")),
    ] {
        assert_eq!(call.post(&body).await.refusal(), (410, "thread_closed"), "{body}");
    }
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert!(rap.children(&thread).await.is_empty());
}

/// Proves: SE-22, SE-03, LC-29
#[tokio::test]
async fn an_event_is_refused_before_confirmation_and_after_the_end() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("call watch").await;
    let watch = tools.invocation().await;
    let early = watch.post(&watch.inline("too early")).await;
    assert_eq!(early.refusal(), (503, "not_confirmed_yet"));
    assert!(early.retry_after().unwrap().as_secs() >= 1);
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    watch.says(&watch.inline("in time")).await;
    rap.until_line(&thread, "assistant: watch: in time").await;

    watch.says(&with(watch.inline("the end"), json!({"final": true}))).await;
    rap.until_line(&thread, "assistant: watch: the end").await;
    assert_eq!(watch.post(&watch.inline("after the end")).await.refusal(), (410, "subscription_ended"));

    rap.say(&thread, "call work").await;
    let work = tools.invocation().await;
    work.returns("no subscription").await;
    rap.until_line(&thread, "assistant: work: no subscription").await;
    assert_eq!(work.post(&work.inline("never subscribed")).await.refusal(), (410, "subscription_ended"));

    rap.say(&thread, "call watch").await;
    let cancelled = tools.invocation().await;
    cancelled.confirms("watching again").await;
    rap.until_idle(&thread).await;
    rap.act(&thread, &format!("calls/{}/cancel", cancelled.id())).await.expect(202);
    assert_eq!(cancelled.post(&cancelled.event("cancelled")).await.refusal(), (410, "subscription_ended"));

    let transcript = rap.transcript(&thread).await.join("\n");
    for text in ["too early", "after the end", "never subscribed", "interrupted"] {
        assert!(!transcript.contains(text), "{text}: {transcript}");
    }
    assert!(rap.children(&thread).await.is_empty());
}

/// Proves: TR-06
#[tokio::test]
async fn the_callback_url_is_the_same_in_every_attempt_and_after_a_restart() {
    let tools = Tools::start().await;
    tools.answer_next(INVOKE, Reply::Status(500));
    tools.answer_next(INVOKE, Reply::Status(503));
    tools.answer_next(INVOKE, Reply::Hang);
    let rap = Rap::start(&tools);
    let thread = rap.open("call work {\"a\": 1}").await;
    let first = tools.invocation().await;
    tools.invocation().await;
    tools.invocation().await;
    let rap = rap.restarted();
    tools.invocation().await;
    for again in tools.all(INVOKE) {
        assert_eq!(again.raw, first.request.raw);
    }
    first.returns("by the first URL").await;
    rap.until_line(&thread, "assistant: work: by the first URL").await;
}

/// A tool server knows a call by its URL too, so with another one it would run the call twice.
#[tokio::test]
async fn an_invocation_that_is_retried_keeps_its_callback_url_when_public_url_is_changed() {
    let tools = Tools::start().await;
    tools.answer_next(INVOKE, Reply::Status(503));
    let mut rap = Rap::start(&tools);
    let thread = rap.open("call work {\"a\": 1}").await;
    let first = tools.invocation().await;
    rap.kill();
    let file = rap.directory().join("rap.toml");
    let other = rap.url.replace("127.0.0.1", "localhost");
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replacen("[server]", &format!("[server]\npublic_url = {other:?}"), 1))
        .unwrap();
    rap.start_again();
    assert_eq!(tools.invocation().await.request.raw, first.request.raw);
    first.returns("by the first URL").await;
    rap.until_line(&thread, "assistant: work: by the first URL").await;
    // A new call has the new URL.
    rap.say(&thread, "call work {\"a\": 2}").await;
    let second = tools.invocation().await;
    assert!(second.url().starts_with(&format!("{other}/callback/")), "{}", second.url());
}

/// A callback URL is never logged at any level, because it allows writing to the conversation.
#[tokio::test]
async fn no_log_contains_a_callback_path() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).variable("RUST_LOG", "trace").start();
    tools.answer_next(INVOKE, Reply::Status(500));
    let thread = rap.open("call watch").await;
    tools.invocation().await;
    let call = tools.invocation().await;
    let token = call.url().rsplit('/').next().unwrap().to_owned();
    assert_eq!(http::post(&changed(call.url(), call.url().len() - 9), &call.result("x")).await.status, 401);
    assert_eq!(call.post(&json!({"type": "x", "callback_url": call.url()})).await.status, 400);
    assert_eq!(call.post(&with(call.result("x"), json!({"id": "other"}))).await.status, 403);
    let secret = "https://sign.example/in?code=topsecret";
    call.says(&call.oauth(secret)).await;
    let answers = format!("{}/topsecret-answers", tools.url);
    call.says(&call.question(&answers)).await;
    rap.act(&thread, &format!("calls/{}/choice", call.id())).await.expect(400);
    let choice = format!("/v1/threads/{thread}/calls/{}/choice", call.id());
    rap.post(&choice, &json!({"selected": 0})).await.expect(202);
    tools.next("/topsecret-answers").await;
    call.confirms("watching").await;
    rap.until_idle(&thread).await;
    call.says(&call.inline("tick")).await;
    rap.until_line(&thread, "assistant: watch: tick").await;
    rap.close(&thread).await;
    assert_eq!(call.post(&call.inline("x")).await.status, 410);
    tools.next("/close_thread").await;
    let log = rap.log();
    // One line for the invocation, however many attempts it took.
    assert_eq!(log.matches("rap::audit").count(), 1, "{log}");
    for secret in [&token[..], &token[8..40], "/callback/", "topsecret"] {
        assert!(!log.contains(secret), "{secret} is in the log:\n{log}");
    }
    // It is not in the database or in the client API either.
    let seen =
        [rap.thread(&thread).await, Value::Array(rap.history(&thread).await)].map(|json| json.to_string());
    assert!(seen.iter().all(|json| !json.contains(&token) && !json.contains("topsecret")));
}
