//! Memory of requests to models.

use std::sync::Arc;
use std::time::Duration;

use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use rap_runtime::Limits;
use rap_runtime::model::openai::{OpenAi, Settings};
use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::until;
use url::Url;

use crate::local::LocalRuntime;

#[tokio::test(flavor = "multi_thread")]
async fn a_large_request_waits_for_another_one_and_a_small_one_does_not() {
    let server = ModelServer::start().await;
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let (base_url, name) = (Url::parse(&format!("{}/v1", server.url)).unwrap(), "m".to_owned());
    let settings = Settings { base_url, name, api_key: None, call_ids: None, prices: None };
    let limits = Limits { model_answer_bytes: 1024 * 1024, ..Limits::default() };
    let rap = LocalRuntime::with_model(Arc::new(OpenAi::new(client, settings).unwrap()), limits).await;
    let large = "x".repeat(600_000);
    server.answer(Reply::Hang);
    rap.open(&large).await;
    until("the first request is sent", async || server.questions() == 1).await;
    let second = rap.open(&large).await;
    server.says("to the small one");
    let small = rap.open("hi").await;
    rap.until_line(&small, "assistant: to the small one").await;
    // Time in which the second would be sent, too, if it did not wait.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.questions(), 2, "the second waits");
    server.says("to the second");
    server.release();
    rap.until_line(&second, "assistant: to the second").await;
}
