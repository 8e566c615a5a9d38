//! The Anthropic API end to end: requests to the model and handling of its answers.

use rap_testkit::anthropic::{AnthropicServer, messages};
use rap_testkit::peer::Reply;
use rap_testkit::{PATIENCE, Rap, Setup, Tools};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn stage() -> (Tools, AnthropicServer, Rap) {
    let (tools, model) = (Tools::start().await, AnthropicServer::start().await);
    let setup =
        Setup::new().tools(&tools).model(&model.lines()).agent("name = \"default\"\nsystem = \"Be brief.\"");
    let rap = setup.start();
    (tools, model, rap)
}

#[tokio::test]
async fn calls_results_and_thoughts_are_exchanged() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("toolu_a", "work", json!({"n": 1})), ("toolu_b", "watch", json!({"n": 2}))]);
    model.says("All done.");
    let thread = rap.open("go").await;
    let question = model.question().await;
    assert_eq!(messages(&question), ["user go"]);
    assert_eq!(question["system"][0]["text"], "Be brief.");
    assert_eq!(question["thinking"], json!({"type": "enabled", "budget_tokens": 1024}));

    let calls = tools.invocations(2).await;
    assert_eq!((calls[0].name(), calls[0].arguments()), ("toolu_a", &json!({"n": 1})));
    calls[1].returns("two").await;
    let image = json!({"type": "image", "data": "aGk=", "mediaType": "image/png"});
    let mut one = calls[0].result("");
    one["content"] = json!([{"type": "text", "text": "one"}, image]);
    calls[0].says(&one).await;
    let idle = rap.until_idle(&thread).await;
    assert_eq!(idle["usage"], json!({"input": 200, "output": 6, "cached": 180}));
    let asked = model.question().await;
    let expected = [
        "user go",
        "assistant <Hm.> | rap_1=work{\"n\":1} | rap_2=watch{\"n\":2}",
        "user rap_1: one [image] | rap_2: two",
    ];
    assert_eq!(messages(&asked), expected);
    assert_eq!(asked["messages"][1]["content"][0]["signature"], "c2ln");
    // The cacheable prefix is the same in both requests, except for the cache marks after it.
    let kept = json!({"type": "ephemeral"});
    assert_eq!((&asked["system"], &asked["tools"]), (&question["system"], &question["tools"]));
    assert_eq!(asked["messages"][0]["content"][0]["text"], question["messages"][0]["content"][0]["text"]);
    let last = |blocks: &Value| blocks.as_array().unwrap().last().unwrap()["cache_control"].clone();
    for question in [&question, &asked] {
        let said = &question["messages"].as_array().unwrap().last().unwrap()["content"];
        assert_eq!(
            [last(&question["system"]), last(&question["tools"]), last(said)],
            [&kept; 3].map(Clone::clone)
        );
    }
    assert_eq!(*rap.transcript(&thread).await.last().unwrap(), "assistant: All done.");
    assert!(!rap.get(&format!("/v1/threads/{thread}/history")).await.body.to_string().contains("c2ln"));
}

#[tokio::test]
async fn a_model_without_images_gets_a_text_in_place_of_an_image() {
    let (tools, model) = (Tools::start().await, AnthropicServer::start().await);
    let rap = Setup::new().tools(&tools).model(&format!("{}\nimages = false", model.lines())).start();
    model.calls(&[("toolu_a", "work", json!({}))]);
    model.says("Pity.");
    let thread = rap.open("go").await;
    let call = tools.invocation().await;
    let mut seen = call.result("");
    seen["content"] = json!([{"type": "image", "data": "aGk=", "mediaType": "image/png"}]);
    call.says(&seen).await;
    rap.until_line(&thread, "assistant: Pity.").await;
    model.question().await;
    let asked = model.question().await;
    let told = messages(&asked).remove(2);
    assert!(told.starts_with("user rap_1: [an image (image/png) is not shown: "), "{told}");
    assert!(!asked.to_string().contains("aGk="), "{asked}");
}

/// An event wakes a model with thinking enabled, in a turn that does not begin with a thinking block.
#[tokio::test]
async fn the_api_accepts_the_prompt_for_an_event() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("s1", "watch", json!({}))]);
    model.says("Subscribed.");
    let thread = rap.open("watch").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    rap.until_idle(&thread).await;
    model.says("Noted.");
    watch.says(&watch.inline("tick")).await;
    rap.until_line(&thread, "assistant: Noted.").await;
    for _ in 0..2 {
        model.question().await;
    }
    let asked = messages(&model.question().await);
    assert!(asked[3].starts_with("assistant <Hm.> | Subscribed. | rap_2=watch{"), "{asked:?}");
    assert_eq!(asked.len(), 5);
}

/// Reads the event stream until it contains a text.
async fn read_until(stream: &mut TcpStream, text: &str) {
    let mut seen = String::new();
    let read = async {
        while !seen.contains(text) {
            let mut bytes = [0; 4096];
            let count = stream.read(&mut bytes).await.unwrap();
            assert!(count > 0, "the stream ended: {seen}");
            seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    };
    assert!(tokio::time::timeout(PATIENCE, read).await.is_ok(), "no {text} in the stream");
}

#[tokio::test]
async fn a_runtime_that_is_killed_in_the_middle_of_an_answer_asks_again() {
    let (tools, model, rap) = stage().await;
    model.calls(&[("toolu_a", "work", json!({}))]);
    let thread = rap.open("go").await;
    let call = tools.invocation().await;
    model.question().await;
    let mut stream = TcpStream::connect(rap.url.trim_start_matches("http://")).await.unwrap();
    let request = format!("GET /v1/threads/{thread}/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut stream, "event: status").await;
    model.begins("Half an ans");
    call.returns("one").await;
    read_until(&mut stream, "Half an ans").await;

    // kill -9 during the answer.
    model.says("A whole answer.");
    let rap = rap.restarted();
    rap.until_line(&thread, "assistant: A whole answer.").await;
    let (first, second) = (model.question().await, model.question().await);
    assert_eq!(first, second, "the same question, with the thought that goes with its call");
    assert_eq!(messages(&second)[1], "assistant <Hm.> | rap_1=work{}");
    let transcript = rap.transcript(&thread).await;
    assert!(!transcript.iter().any(|line| line.contains("Half an ans")), "{transcript:?}");
    assert_eq!(transcript.len(), 4);
}

#[tokio::test]
async fn an_overloaded_server_is_asked_again_after_its_retry_after() {
    let (_tools, model, rap) = stage().await;
    let body = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
    for status in [529, 429] {
        model.answer(Reply::Full(status, Some(("retry-after", "1".into())), body.to_string().into()));
    }
    model.says("Here.");
    let thread = rap.open("go").await;
    rap.until_line(&thread, "assistant: Here.").await;
    let asked = model.all("/v1/messages");
    for again in 1..=2 {
        assert!(asked[again].at - asked[again - 1].at >= std::time::Duration::from_secs(1));
    }
    assert!(asked.iter().all(|asked| asked.header("x-api-key") == Some("sk-ant-key")));
    assert!(!rap.log().contains("sk-ant-key"));

    let refusal =
        json!({"type": "error", "error": {"type": "authentication_error", "message": "invalid x-api-key"}});
    model.answer(Reply::Full(401, None, refusal.to_string().into()));
    rap.say(&thread, "again").await;
    let failed = rap.until_status(&thread, "failed").await;
    assert_eq!(failed["why"], "the model's server answered 401: invalid x-api-key");
}
