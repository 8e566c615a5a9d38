//! Every request of a long and varied conversation matches the types of the official SDKs, which are installed from PyPI
//! the first time.

use std::sync::Arc;

use crate::canned::{self, ok};
use rap_agent::{Arguments, CallEntry, Entry, Item, Speaker, Thought, ThoughtKind, Thoughts};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Body, CallId, Content, Image, Timestamp, UrlPolicy};
use rap_runtime::model::anthropic::{self, Thinking};
use rap_runtime::model::{CallIds, Model, ModelRequest, openai, responses};
use serde_json::{Map, Value, json};
use url::Url;

fn id(text: &str) -> CallId {
    CallId::new(text).unwrap()
}

fn call(name: &str, arguments: Arguments) -> CallEntry {
    CallEntry { id: id(name), model_id: None, name: "read".into(), arguments, display: None }
}

fn given(name: &str) -> CallEntry {
    let arguments = json!({"path": "a\u{0}b", "n": [1, null, {"x": 1.5}]});
    call(name, Arguments::Given(arguments.as_object().unwrap().clone()))
}

/// Returns a synthetic call for an event of a subscription, and its result.
fn event(name: &str, of: &str, kind: &str) -> [Item; 2] {
    let arguments = Arguments::Synthetic { of: id(of), kind: kind.into(), arguments: None };
    [Item::assistant("", vec![call(name, arguments)]), result(name, Body::Text("it happened".into()))]
}

fn result(name: &str, content: Body) -> Item {
    Item::Result { call_id: id(name), content, display: Vec::new(), synthetic: false }
}

/// Thinking and fields of every provider, for the models of this test at `url`.
fn thoughts(url: &Url) -> Thoughts {
    let reasoning = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"});
    let parts = [
        ThoughtKind::Readable { text: "hm".into(), signature: "c2ln".into() },
        ThoughtKind::Redacted { data: "c2VjcmV0".into() },
        ThoughtKind::Item { item: reasoning.as_object().unwrap().clone() },
    ];
    Thoughts {
        model: "m".into(),
        server: Some(url.as_str().trim_end_matches('/').to_owned()),
        // One of each before the calls, and one of each between the first two.
        parts: [0, 1]
            .into_iter()
            .flat_map(|calls| parts.clone().map(|kind| Thought { at: 0, calls, kind }))
            .collect(),
        fields: Map::from_iter([("reasoning_content".to_owned(), json!("hm"))]),
        call_fields: vec![Map::from_iter([("extra_content".to_owned(), json!({"google": {}}))])],
    }
}

/// Parallel calls, images, events, interrupted and unusable calls, a child, a fork's summary, messages of all speakers.
fn history(url: &Url) -> Vec<Item> {
    let image = || Content::Image(Image { data: "aGk=".into(), media_type: "image/png".into() });
    let picture = Body::Content(vec![Content::Text { text: "look".into() }, image(), image()]);
    let said = |text: &str, from| Item::message(text, from);
    let thinking = |text: &str, calls| Item::Assistant {
        text: text.into(),
        calls,
        thoughts: Some(thoughts(url)),
        usage: None,
    };
    let mut items = vec![
        Item::user("go"),
        thinking("let me see", vec![given("c1"), given("c2"), call("c3", Arguments::Unusable("{".into()))]),
        result("c2", picture),
        result("c1", Body::Text("one\u{0}".into())),
        Item::runtime_result(id("c3"), "Error: the arguments are not JSON"),
        Item::notice("for people"),
        thinking("", vec![given("c4"), given("c5")]),
        Item::runtime_result(id("c4"), "interrupted"),
        result("c5", Body::Text(String::new())),
        Item::User { text: "and this?".into(), content: vec![image()], from: Speaker::User },
        thinking("done", vec![]),
    ];
    items.extend(event("e1", "c1", "interrupt:c1 (subscription remains active)"));
    items.extend(event("e2", "c1", "interrupt:c1 (subscription has ended)"));
    items.push(thinking("noted", vec![]));
    items.push(said("you are a child", Speaker::Runtime));
    items.push(said("dig", Speaker::Parent));
    items.push(Item::Summary { text: "much was said".into(), covers: 3 });
    items.extend(event("e3", "c9", "late:c9"));
    items.push(Item::assistant("", vec![given("c6")]));
    items
}

/// Asks a model with every part of the history: with tools and images, and without, as for a summary. Returns the captured
/// requests.
async fn captured(
    api: &'static str,
    path: &str,
    answer: String,
    model: impl FnOnce(Url) -> Arc<dyn Model>,
) -> Vec<(&'static str, Value)> {
    let count = history(&Url::parse("http://h").unwrap()).len();
    let answers = (0..2 * count).map(|_| ok(answer.clone()));
    let harness = canned::start(path, answers, model).await;
    let url = Url::parse(harness.model.destination()).unwrap();
    let items = history(&url);
    for end in 1..=count {
        let entries = items[..end].iter().map(|item| Entry { at: Timestamp(0), item: item.clone() });
        let request = ModelRequest { entries: entries.collect(), ..canned::request() };
        let bare =
            ModelRequest { system: String::new(), tools: Arc::new([]), images: false, ..request.clone() };
        for request in [request, bare] {
            harness.ask_with(request).await.0.unwrap_or_else(|error| panic!("{api}: {error}"));
        }
    }
    let requests = harness.server.requests();
    assert_eq!(requests.len(), 2 * count);
    requests.into_iter().map(|(_, body)| (api, body)).collect()
}

/// Returns the requests of a turn that the provider pauses.
async fn resumed() -> Vec<(&'static str, Value)> {
    let search =
        json!({"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}});
    let content = json!([{"type": "text", "text": "Searching."}, search,
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}]);
    let paused =
        json!({"type": "message", "role": "assistant", "content": content, "stop_reason": "pause_turn"});
    let done = json!({"type": "message", "role": "assistant", "content": [{"type": "text", "text": "ok"}]});
    let answers = [paused, done].map(|answer| ok(answer.to_string()));
    let harness = canned::start("/v1/messages", answers, |url| claude(url, Thinking::Off)).await;
    harness.ask().await.0.unwrap();
    let requests = harness.server.requests();
    assert_eq!(requests.len(), 2);
    requests.into_iter().map(|(_, body)| ("anthropic", body)).collect()
}

fn claude(base_url: Url, thinking: Thinking) -> Arc<dyn Model> {
    let (name, max_tokens) = ("m".to_owned(), 4096);
    let settings = anthropic::Settings { base_url, name, api_key: None, max_tokens, thinking, prices: None };
    Arc::new(anthropic::Anthropic::new(client(), settings).unwrap())
}

fn client() -> Client {
    Client::new(UrlPolicy::Loopback, ClientLimits::default())
}

fn openai_settings(base_url: Url, call_ids: CallIds) -> openai::Settings {
    openai::Settings { base_url, name: "m".into(), api_key: None, call_ids: Some(call_ids), prices: None }
}

async fn all_requests() -> Vec<(&'static str, Value)> {
    let chat = "data: {\"choices\": [{\"delta\": {\"content\": \"ok\"}, \"finish_reason\": \"stop\"}]}\n\ndata: [DONE]\n\n";
    let message =
        json!({"type": "message", "role": "assistant", "content": [{"type": "text", "text": "ok"}]})
            .to_string();
    let response = json!({"status": "completed", "output": []}).to_string();
    let mut all = Vec::new();
    for call_ids in [CallIds::Wire, CallIds::Short] {
        all.extend(
            captured("openai", "/chat/completions", chat.to_owned(), |url| {
                Arc::new(openai::OpenAi::new(client(), openai_settings(url, call_ids)).unwrap())
            })
            .await,
        );
    }
    for thinking in [Thinking::Off, Thinking::Adaptive, Thinking::Tokens(1024)] {
        all.extend(captured("anthropic", "/v1/messages", message.clone(), |url| claude(url, thinking)).await);
    }
    let asked = captured("openai-responses", "/responses", response, |url| {
        Arc::new(responses::Responses::new(client(), openai_settings(url, CallIds::Wire)).unwrap())
    });
    all.extend(asked.await);
    all.extend(resumed().await);
    all
}

#[tokio::test]
async fn every_request_matches_the_types_of_the_official_sdks() {
    let requests = all_requests().await;
    let lines: String = requests.iter().map(|(_, body)| body.to_string()).collect();
    assert!(
        lines.contains("reasoning_content") && lines.contains("encrypted_content") && lines.contains("c2ln")
    );
    rap_testkit::sdk_types::check(env!("CARGO_TARGET_TMPDIR"), requests).await;
}
