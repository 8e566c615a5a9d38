//! Context window of a model, from its server's list of models.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, Uri};
use axum::{Router, routing};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Secret, UrlPolicy};
use rap_runtime::model::{Model, anthropic, openai};
use serde_json::{Value, json};
use tokio::time;
use url::Url;

/// Asks twice for the window of model `m` from a server with this list. Returns the window and the number of requests
/// for the list.
async fn window(list: Value, anthropic: bool) -> (u64, usize) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let answer = async move |uri: Uri, headers: HeaderMap| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(uri.query(), anthropic.then_some("limit=1000"));
        let key = if anthropic { "x-api-key" } else { "authorization" };
        assert!(headers[key].to_str().unwrap().ends_with("the-key"));
        list.to_string()
    };
    let router = Router::new().route("/v1/models", routing::get(answer));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let model = model(&url, anthropic);
    let tokens = model.window().await.unwrap();
    assert_eq!(model.window().await, Some(tokens));
    (tokens, count.load(Ordering::SeqCst))
}

fn model(url: &str, is_anthropic: bool) -> Arc<dyn Model> {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let (base_url, name, api_key) = (Url::parse(url).unwrap(), "m".to_owned(), Some(Secret::new("the-key")));
    if is_anthropic {
        let thinking = anthropic::Thinking::Off;
        let settings =
            anthropic::Settings { base_url, name, api_key, max_tokens: 100, thinking, prices: None };
        return Arc::new(anthropic::Anthropic::new(client, settings).unwrap());
    }
    let settings = openai::Settings { base_url, name, api_key, call_ids: None, prices: None };
    Arc::new(openai::OpenAi::new(client, settings).unwrap())
}

#[tokio::test]
async fn the_list_of_models_is_fetched_once_and_every_field_name_is_read() {
    let fields = ["context_length", "max_model_len", "context_window", "max_context_length"];
    for field in fields {
        let list = json!({"data": [{"id": "other", field: 1}, {"id": "m", field: 32_768}]});
        assert_eq!(window(list, false).await, (32_768, 1), "{field}");
    }
    let list = json!({"data": [{"id": "m", "context_window": 200_000, "max_input_tokens": 180_000}]});
    assert_eq!(window(list, true).await, (180_000, 1));
    assert_eq!(window(json!([{"name": "m", "context_length": 9_000}]), false).await, (9_000, 1));
}

#[tokio::test]
async fn a_list_without_the_window_gives_the_default() {
    let silent = [json!({}), json!({"data": []}), json!({"data": [{"id": "m"}]}), json!("no"), json!(null)];
    for list in silent {
        assert_eq!(window(list.clone(), false).await, (openai::DEFAULT_WINDOW, 1), "{list}");
        assert_eq!(window(list, true).await, (anthropic::DEFAULT_WINDOW, 1));
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(model(&format!("http://{free}/v1"), false).window().await, Some(openai::DEFAULT_WINDOW));
}

/// A list that names the window is more reliable than an error.
#[tokio::test]
async fn a_window_from_the_list_is_not_replaced_by_the_one_of_an_error() {
    let list = json!({"data": [{"id": "m", "context_length": 9_000}]}).to_string();
    let error = "{\"error\": {\"message\": \"maximum context length is 4096 tokens\"}}";
    let router = Router::new()
        .route("/v1/models", routing::get(async move || list))
        .route("/v1/chat/completions", routing::post(async move || (StatusCode::BAD_REQUEST, error)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let model = model(&url, false);
    let answer = model.ask(crate::canned::request(), &mut |_| {}).await;
    assert!(matches!(answer, Err(rap_runtime::model::Error::TooLong { .. })), "{answer:?}");
    assert_eq!(model.window().await, Some(9_000));
}

/// Advances the clock of the tokio runtime.
async fn advance(seconds: u64) {
    time::pause();
    time::advance(Duration::from_secs(seconds)).await;
    time::resume();
}

#[tokio::test]
async fn a_request_that_failed_is_repeated_after_a_minute_and_a_list_is_remembered() {
    let list = json!({"data": [{"id": "m", "context_length": 9_000}]}).to_string();
    let silent = json!({"data": [{"id": "m"}]}).to_string();
    let usual = openai::DEFAULT_WINDOW;
    for (failure, then, found) in [
        ((StatusCode::INTERNAL_SERVER_ERROR, list.clone()), list.clone(), 9_000),
        ((StatusCode::OK, "<!doctype html>".to_owned()), list, 9_000),
        ((StatusCode::NOT_FOUND, String::new()), silent, usual),
    ] {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let answer = async move || match counted.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => failure,
            _ => (StatusCode::OK, then),
        };
        let router = Router::new().route("/v1/models", routing::get(answer));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let model = model(&url, false);
        // Seconds before the window is read, the expected window, and the number of requests for the list.
        let table = [(0, usual, 1), (0, usual, 1), (59, usual, 1), (2, usual, 2), (50, usual, 2)];
        for (seconds, window, asked) in table.into_iter().chain([(11, found, 3), (3_600, found, 3)]) {
            advance(seconds).await;
            assert_eq!(model.window().await, Some(window));
            assert_eq!(count.load(Ordering::SeqCst), asked);
        }
    }
}
