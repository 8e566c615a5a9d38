//! Every wording of an error for a request that is too long, with a status, inside a stream and as a document, for
//! every API.

use std::sync::Arc;

use crate::canned::{self, Canned, Harness, failing, ok};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use rap_runtime::model::{Error, Model, anthropic, openai, responses};
use serde_json::{Value, json};
use url::Url;

#[path = "../../src/model/too_long/examples.rs"]
mod examples;

#[derive(Debug, Clone, Copy)]
enum Api {
    OpenAi,
    Anthropic,
    Responses,
}

const APIS: [Api; 3] = [Api::OpenAi, Api::Anthropic, Api::Responses];

impl Api {
    async fn start(self, answers: Vec<Canned>) -> Harness {
        let path = match self {
            Api::OpenAi => "/chat/completions",
            Api::Anthropic => "/v1/messages",
            Api::Responses => "/responses",
        };
        canned::start(path, answers, |url| self.model(url)).await
    }

    fn model(self, base_url: Url) -> Arc<dyn Model> {
        let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
        let (name, api_key, prices) = ("m".to_owned(), None, None);
        if let Api::Anthropic = self {
            let (max_tokens, thinking) = (100, anthropic::Thinking::Off);
            let settings = anthropic::Settings { base_url, name, api_key, max_tokens, thinking, prices };
            return Arc::new(anthropic::Anthropic::new(client, settings).unwrap());
        }
        let settings = openai::Settings { base_url, name, api_key, call_ids: None, prices };
        match self {
            Api::Responses => Arc::new(responses::Responses::new(client, settings).unwrap()),
            _ => Arc::new(openai::OpenAi::new(client, settings).unwrap()),
        }
    }

    /// The first event of a stream.
    fn begin(self) -> Value {
        match self {
            Api::OpenAi => json!({"choices": [{"delta": {"content": "half"}}]}),
            Api::Anthropic => json!({"type": "message_start", "message": {"usage": {"input_tokens": 1}}}),
            Api::Responses => json!({"type": "response.created", "response": {"status": "in_progress"}}),
        }
    }

    /// Responses with this error in every form that a server of this API uses.
    fn responses(self, message: &str) -> Vec<Canned> {
        let error = json!({"message": message, "type": null, "param": null, "code": "400"});
        let mut errors = vec![
            // LiteLLM sends this form in the streams of all APIs.
            json!({"error": error}),
            json!({"error": message}),
            json!({"error": {"message": "Provider returned error", "code": 502, "metadata": {"raw": message}}}),
            json!({"object": "error", "message": message, "type": "BadRequestError", "code": 400}),
            json!({"message": message, "code": 400}),
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}}),
        ];
        let mut all: Vec<_> = errors.iter().map(|error| failing(400, &error.to_string())).collect();
        all.extend(errors.iter().map(|error| ok(error.to_string())));
        if let Api::Responses = self {
            errors.push(json!({"type": "error", "code": "invalid_prompt", "message": message}));
            errors.push(json!({"type": "response.failed", "response": {"error": error}}));
        }
        for error in errors {
            all.push(ok(format!("data: {error}\n\n")));
            all.push(ok(format!("data: {}\n\ndata: {error}\n\n", self.begin())));
        }
        all
    }
}

#[tokio::test]
async fn every_wording_is_recognised_in_every_form_and_the_window_is_learned() {
    for api in APIS {
        let answers: Vec<_> = examples::ERRORS.iter().map(|(message, _)| api.responses(message)).collect();
        let harness = api.start(answers.concat()).await;
        for (answers, (message, named)) in answers.iter().zip(examples::ERRORS) {
            for canned in answers {
                let body = String::from_utf8_lossy(&canned.body);
                let error = harness.ask().await.0.unwrap_err();
                let is_recognised = matches!(&error, Error::TooLong { window, .. } if window == named);
                assert!(is_recognised, "{api:?} {}: {body}: {error:?}", canned.status);
                if named.is_some() {
                    assert_eq!(harness.model.window().await, *named, "{api:?}: {message}");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_error_event_without_a_type_shows_the_words_of_the_server() {
    for api in APIS {
        let error = json!({"error": {"message": "no money", "type": "None", "code": "500"}});
        let harness = api.start(vec![ok(format!("data: {}\n\ndata: {error}\n\n", api.begin()))]).await;
        let why = "the model's server: no money".to_owned();
        assert_eq!(harness.ask().await.0, Err(Error::Retry { why, retry_after: None }), "{api:?}");
    }
}

/// Servers repeat the request in the details of an error, and a conversation may contain any wording.
#[tokio::test]
async fn only_the_first_message_of_an_error_that_is_cut_is_read() {
    let echo = format!("maximum context length is 4096 {}", "x".repeat(40_000));
    let detail = format!(
        r#"{{"detail": [{{"loc": ["body"], "msg": "Field \"model\" required", "input": {{"message": "{echo}"}}}}]}}"#
    );
    let long = format!(r#"{{"error": {{"message": "maximum context length is 9001", "input": "{echo}"}}}}"#);
    for api in APIS {
        let harness = api.start(vec![failing(422, &detail), failing(400, &long)]).await;
        let refused = harness.ask().await.0.unwrap_err();
        let why = "the model's server answered 422: Field \"model\" required".to_owned();
        assert_eq!(refused, Error::Refused { why, every_request: false }, "{api:?}");
        let refused = harness.ask().await.0.unwrap_err();
        assert!(matches!(refused, Error::TooLong { window: Some(9_001), .. }), "{api:?}: {refused:?}");
    }
}
