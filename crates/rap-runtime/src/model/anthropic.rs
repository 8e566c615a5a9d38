//! Models that are served through `/v1/messages`, by Anthropic or a compatible server.
//!
//! Invariants:
//! - A stream without `message_stop` is an error, never an answer.
//! - A thinking block is kept unchanged, with its signature, or not at all.
//! - A turn that the provider pauses is resumed, a bounded number of times.

mod assembly;

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderName;
use rap_agent::prompt::{self, Prompt, Request};
use rap_io::client::Client;
use rap_io::hashing::{LONG, in_place};
use rap_protocol::Secret;
use serde_json::{Map, Value, json};
use url::Url;

use self::assembly::Assembly;
use super::remote::{self, Remote, encode, log_omitted_tools, spec};
use super::window::Window;
use super::{Error, Kind, Model, ModelAnswer, ModelRequest, OnDelta, Options, Prices, Provider, body};

/// Base URL of Anthropic's own server.
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
/// Default maximum number of tokens of an answer.
pub const MAX_TOKENS: u32 = 16 * 1024;
/// Minimum token budget for thinking.
pub const MIN_THINKING_TOKENS: u32 = 1024;
/// Version of the API.
const VERSION: &str = "2023-06-01";
/// Maximum number of times that a paused turn is resumed.
const MAX_PAUSES: usize = 8;

/// Context window in tokens, if the server does not report it.
pub const DEFAULT_WINDOW: u64 = 200_000;

/// The provider of these models.
pub static PROVIDER: Provider = Provider {
    name: "anthropic",
    kind: Kind::Remote { key_hint: "api.anthropic.com requires a key, such as \"env:ANTHROPIC_API_KEY\"" },
    build,
};

fn build(options: Options, client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error> {
    let base_url = options.base_url_or(DEFAULT_BASE_URL);
    let Options { name, api_key, max_tokens, thinking, prices, .. } = options;
    let settings = Settings { base_url, name, api_key, max_tokens, thinking, prices };
    Ok(Arc::new(Anthropic::new(client(), settings)?))
}

/// Settings of a model.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Base URL to which `/v1/messages` is appended, such as [`DEFAULT_BASE_URL`]. A `/v1` at its end is not repeated.
    pub base_url: Url,
    /// Name of the model.
    pub name: String,
    /// API key, sent in the header `x-api-key`.
    pub api_key: Option<Secret>,
    /// Maximum number of tokens of an answer, including thinking, such as [`MAX_TOKENS`].
    pub max_tokens: u32,
    /// Extended thinking.
    pub thinking: Thinking,
    /// Prices of the model. `None` means those of a known model.
    pub prices: Option<Prices>,
}

/// Extended thinking of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// The model does not think.
    #[default]
    Off,
    /// The model decides when to think.
    Adaptive,
    /// The model always thinks, with this token budget: at least [`MIN_THINKING_TOKENS`], and less than `max_tokens`.
    Tokens(u32),
}

/// A model that is served through `/v1/messages`.
#[derive(Debug)]
pub struct Anthropic {
    remote: Remote,
    max_tokens: u32,
    thinking: Thinking,
}

impl Anthropic {
    /// Creates a model. A key that cannot be sent in a header is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key, max_tokens, thinking, prices } = settings;
        let versioned = base_url.path().trim_end_matches('/').ends_with("/v1");
        let base_url = if versioned { base_url } else { remote::append_path(base_url, "/v1") };
        let mut list = remote::append_path(base_url.clone(), "/models");
        list.set_query(Some("limit=1000"));
        let window = Window::new(list, DEFAULT_WINDOW);
        let remote = Remote::new(client, base_url, "/messages", name, window)
            .with_prices(prices)
            .with(HeaderName::from_static("anthropic-version"), VERSION)
            .with_key(api_key, HeaderName::from_static("x-api-key"), "")?;
        Ok(Anthropic { remote, max_tokens, thinking })
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
        let mut body = self.body(body);
        let mut assembly = Assembly::default();
        for pauses in 0..=MAX_PAUSES {
            let encoded = encode(&body)?;
            let size = encoded.len();
            // The value is kept until the answer has ended, since the answer may be continued.
            request.memory.built(2 * size);
            let reply = self.remote.post(encoded, &request).await?;
            request.memory.built(size);
            body::read(reply, &mut assembly, on_delta).await?;
            if !assembly.is_paused() || pauses == MAX_PAUSES {
                break;
            }
            resume_after_pause(&mut body, assembly.pause());
        }
        let mut answer = assembly.into_answer(self.remote.origin(), request.turn, &names, on_delta);
        self.remote.price(&mut answer.usage);
        Ok(answer)
    }

    fn wire_request(&self, request: &ModelRequest) -> Request {
        let tools: Vec<_> = request.tools.iter().map(spec).collect();
        let thinking = match self.thinking {
            Thinking::Off => prompt::Thinking::Off,
            Thinking::Adaptive => prompt::Thinking::Optional { model: self.remote.name() },
            Thinking::Tokens(_) => prompt::Thinking::Always { model: self.remote.name() },
        };
        let prompt = Prompt::new(&request.system, &request.entries, &tools);
        let origin = Some(self.remote.origin());
        prompt::anthropic::request(&Prompt { images: request.images, thinking, origin, ..prompt })
    }

    fn body(&self, mut body: Map<String, Value>) -> Map<String, Value> {
        body.insert("model".into(), self.remote.name().into());
        body.insert("max_tokens".into(), self.max_tokens.into());
        body.insert("stream".into(), true.into());
        match self.thinking {
            Thinking::Off => {}
            Thinking::Adaptive => {
                body.insert("thinking".into(), json!({"type": "adaptive"}));
            }
            Thinking::Tokens(tokens) => {
                body.insert("thinking".into(), json!({"type": "enabled", "budget_tokens": tokens}));
            }
        }
        body
    }
}

#[async_trait]
impl Model for Anthropic {
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

/// Appends the content before the pause to the request, unchanged, as the last message of the assistant.
fn resume_after_pause(body: &mut Map<String, Value>, content: Vec<Value>) {
    let Some(Value::Array(messages)) = body.get_mut("messages") else { return };
    messages.pop_if(|last| last["role"] == "assistant");
    messages.push(json!({"role": "assistant", "content": content}));
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
