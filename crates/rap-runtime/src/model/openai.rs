//! Models that are served through `/chat/completions`, by OpenAI or a compatible server.
//!
//! Invariants:
//! - A stream without an end (`[DONE]` or a `finish_reason`) is an error, never an answer.
//! - The size of an answer and its number of calls are bounded.

mod assembly;

use std::sync::Arc;

use async_trait::async_trait;
use http::header::AUTHORIZATION;
use rap_agent::prompt::{self, CallIds, Prompt, Request};
use rap_io::client::Client;
use rap_io::hashing::{LONG, in_place};
use rap_protocol::Secret;
use serde_json::{Map, Value, json};
use url::Url;

use self::assembly::Assembly;
use super::remote::{self, Remote, encode, log_omitted_tools, spec};
use super::window::Window;
use super::{Error, Kind, Model, ModelAnswer, ModelRequest, OnDelta, Options, Prices, Provider, body};

/// Base URL of OpenAI's own server.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";

/// Context window in tokens, if the server does not report it.
pub const DEFAULT_WINDOW: u64 = 128_000;

/// The provider of these models.
pub static PROVIDER: Provider = Provider {
    name: "openai",
    kind: Kind::Remote { key_hint: "api.openai.com requires a key, such as \"env:OPENAI_API_KEY\"" },
    build,
};

fn build(options: Options, client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error> {
    let base_url = options.base_url_or(DEFAULT_BASE_URL);
    let Options { name, api_key, call_ids, prices, .. } = options;
    Ok(Arc::new(OpenAi::new(client(), Settings { base_url, name, api_key, call_ids, prices })?))
}

/// Returns the form of call ids that the server at this URL needs.
fn usual_call_ids(base_url: &Url) -> CallIds {
    let is_mistral = |host: &str| host == "mistral.ai" || host.ends_with(".mistral.ai");
    if base_url.host_str().is_some_and(is_mistral) { CallIds::Short } else { CallIds::Wire }
}

/// Settings of a model.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Base URL to which `/chat/completions` is appended, such as [`DEFAULT_BASE_URL`].
    pub base_url: Url,
    /// Name of the model.
    pub name: String,
    /// API key, sent as a bearer token.
    pub api_key: Option<Secret>,
    /// Form of the call ids in requests. `None` means the form that the server needs, as far as its URL tells.
    pub call_ids: Option<CallIds>,
    /// Prices of the model. `None` means those of a known model.
    pub prices: Option<Prices>,
}

/// A model that is served through `/chat/completions`.
#[derive(Debug)]
pub struct OpenAi {
    remote: Remote,
    call_ids: CallIds,
}

impl OpenAi {
    /// Creates a model. A key that cannot be sent in a header is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key, call_ids, prices } = settings;
        let call_ids = call_ids.unwrap_or_else(|| usual_call_ids(&base_url));
        let window = Window::new(remote::append_path(base_url.clone(), "/models"), DEFAULT_WINDOW);
        let remote = Remote::new(client, base_url, "/chat/completions", name, window);
        Ok(OpenAi {
            remote: remote.with_prices(prices).with_key(api_key, AUTHORIZATION, "Bearer ")?,
            call_ids,
        })
    }

    /// Sends a request. Errors have to pass through [`Remote::redacted`] before they are shown.
    async fn answer(
        &self,
        mut request: ModelRequest,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<ModelAnswer, Error> {
        let Request { body, names, omitted_tools } = in_place(LONG, || self.wire_request(&request));
        // The history is not needed while the answer arrives.
        request.entries = Vec::new();
        log_omitted_tools(&omitted_tools);
        let body = encode(&self.body(body))?;
        request.memory.built(body.len());
        let reply = self.remote.post(body, &request).await?;
        request.memory.sent();
        let mut assembly = Assembly::default();
        body::read(reply, &mut assembly, on_delta).await?;
        let mut answer = assembly.into_answer(self.remote.origin(), request.turn, &names, on_delta);
        self.remote.price(&mut answer.usage);
        Ok(answer)
    }

    fn wire_request(&self, request: &ModelRequest) -> Request {
        let tools: Vec<_> = request.tools.iter().map(spec).collect();
        let prompt = Prompt::new(&request.system, &request.entries, &tools);
        let (origin, call_ids) = (Some(self.remote.origin()), self.call_ids);
        prompt::openai::request(&Prompt { images: request.images, origin, call_ids, ..prompt })
    }

    fn body(&self, mut body: Map<String, Value>) -> Map<String, Value> {
        body.insert("model".into(), self.remote.name().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        body
    }
}

#[async_trait]
impl Model for OpenAi {
    async fn ask(&self, request: ModelRequest, on_delta: &mut OnDelta<'_>) -> Result<ModelAnswer, Error> {
        self.answer(request, on_delta).await.map_err(|error| self.remote.redacted(error))
    }

    async fn window(&self) -> Option<u64> {
        Some(self.remote.window().await)
    }

    async fn assumes_window(&self) -> bool {
        self.remote.assumes_window().await
    }

    fn name(&self) -> &str {
        self.remote.name()
    }

    fn provider(&self) -> &str {
        PROVIDER.name
    }

    fn destination(&self) -> &str {
        self.remote.destination()
    }
}

/// Assembles the answer from a body that arrives in two parts, as from a server.
#[cfg(test)]
pub(super) fn assemble(begin: &[u8], end: &[u8]) -> Result<ModelAnswer, Error> {
    let mut assembly = Assembly::default();
    body::assemble(begin, end, &mut assembly)?;
    let names = prompt::openai::request(&Prompt::new("", &[], &[])).names;
    let origin = prompt::ServedModel { server: "https://model.test", model: "m" };
    Ok(assembly.into_answer(origin, 1, &names, &mut |_| {}))
}
