//! Messages of people with images, from the API to the model.

use rap_testkit::anthropic::AnthropicServer;
use rap_testkit::model::ModelServer;
use rap_testkit::{Rap, Setup, Tools};
use serde_json::{Value, json};

const DATA: &str = "iVBORw0KGgo=";

fn image() -> Value {
    json!({"type": "image", "data": DATA, "mediaType": "image/png"})
}

async fn send(rap: &Rap, thread: &str, content: Value) -> rap_testkit::http::Response {
    let path = format!("/v1/threads/{thread}/messages");
    rap.post(&path, &json!({"text": "What is this?", "content": content})).await
}

#[tokio::test]
async fn images_of_people_reach_a_model_with_chat_completions_and_stay_in_history_and_forks() {
    let (tools, model) = (Tools::start().await, ModelServer::start().await);
    let rap = Setup::new().tools(&tools).model(&model.lines()).start();
    model.says("A pixel.");
    let body = json!({"message": "Look.", "content": [image(), {"type": "text", "text": "Closely."}]});
    let thread = rap.post("/v1/threads", &body).await.expect(201)["id"].as_str().unwrap().to_owned();
    let question = model.question().await;
    let url = format!("data:image/png;base64,{DATA}");
    let expected = json!([{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Closely."}]);
    assert_eq!(question["messages"].as_array().unwrap().last().unwrap()["content"], expected);
    rap.until_idle(&thread).await;
    let entry = rap.raw_history(&thread).await.remove(0);
    assert_eq!(entry["content"], body["content"]);
    assert_eq!(rap.thread(&thread).await["title"], "Look.");
    // A fork and a restart keep the image.
    let rap = rap.restarted();
    let fork = rap.post(&format!("/v1/threads/{thread}/fork"), &json!({})).await.expect(201);
    model.says("Still a pixel.");
    rap.say(fork["id"].as_str().unwrap(), "Again?").await;
    let question = model.question().await;
    assert!(question["messages"].to_string().contains(&url), "{question}");
}

#[tokio::test]
async fn images_of_people_reach_anthropic() {
    let model = AnthropicServer::start().await;
    let rap = Setup::new().model(&model.lines()).start();
    model.says("A pixel.");
    let thread = rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201)["id"].clone();
    send(&rap, thread.as_str().unwrap(), json!([image()])).await.expect(202);
    let content = model.question().await["messages"][0]["content"].clone();
    assert_eq!(content[0]["text"], "What is this?");
    assert_eq!(content[1]["source"], json!({"type": "base64", "media_type": "image/png", "data": DATA}));
}

#[tokio::test]
async fn bad_images_are_refused_with_the_place_of_the_mistake() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let table = [
        (json!([{"type": "image", "data": "?", "mediaType": "image/png"}]), "$.content[0].data"),
        (json!([{"type": "image", "data": DATA, "mediaType": "image/tiff"}]), "content[0].mediaType"),
        (json!([image(), {"type": "video"}]), "$.content[1].type"),
        (
            json!([{"type": "image", "data": "A".repeat(5 * 1024 * 1024 + 4), "mediaType": "image/png"}]),
            "content[0].data",
        ),
        (Value::Array(vec![image(); 21]), "at most 20 items"),
        (json!("text"), "expected a sequence"),
    ];
    for (content, place) in table {
        let answer = send(&rap, "t", content).await;
        assert_eq!(answer.status, 400);
        assert!(answer.message().contains(place), "{place}: {}", answer.message());
    }
    assert!(rap.raw_history("t").await.is_empty());
}
