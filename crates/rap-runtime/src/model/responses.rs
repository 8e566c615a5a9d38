//! Models that are served through `/responses`, by OpenAI or a compatible server.
//!
//! Invariants:
//! - A stream without `response.completed` or `response.incomplete` is an error, never an answer.
//! - The server keeps no conversation. Reasoning items are requested in encrypted form, stored and sent back unchanged.

mod assembly;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use http::header::AUTHORIZATION;
use rap_agent::prompt::{self, Prompt, Request};
use rap_io::client::Client;
use rap_io::hashing::{LONG, in_place};
use serde_json::{Map, Value, json};

use self::assembly::Assembly;
use super::openai::{DEFAULT_BASE_URL, DEFAULT_WINDOW, Settings};
use super::remote::{self, Remote, encode, log_omitted_tools, spec};
use super::window::Window;
use super::{Error, Kind, Model, ModelAnswer, ModelRequest, OnDelta, Options, Provider, body};

/// The provider of these models.
pub static PROVIDER: Provider = Provider {
    name: "openai-responses",
    kind: Kind::Remote { key_hint: "api.openai.com requires a key, such as \"env:OPENAI_API_KEY\"" },
    build,
};
/// Wording of the refusal of a model that does not reason, in lower case.
const NO_REASONING: &str = "encrypted content is not supported";

fn build(options: Options, client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error> {
    let base_url = options.base_url_or(DEFAULT_BASE_URL);
    let Options { name, api_key, call_ids, prices, .. } = options;
    Ok(Arc::new(Responses::new(client(), Settings { base_url, name, api_key, call_ids, prices })?))
}

/// A model that is served through `/responses`.
#[derive(Debug)]
pub struct Responses {
    remote: Remote,
    call_ids: prompt::CallIds,
    /// False after the server said that the model does not reason.
    reasons: AtomicBool,
}

impl Responses {
    /// Creates a model. A key that cannot be sent in a header is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key, call_ids, prices } = settings;
        let window = Window::new(remote::append_path(base_url.clone(), "/models"), DEFAULT_WINDOW);
        let remote = Remote::new(client, base_url, "/responses", name, window);
        let remote = remote.with_prices(prices).with_key(api_key, AUTHORIZATION, "Bearer ")?;
        Ok(Responses { remote, call_ids: call_ids.unwrap_or_default(), reasons: AtomicBool::new(true) })
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
        let reasons = self.reasons.load(Ordering::Relaxed);
        let first = encode(&self.body(body.clone(), reasons))?;
        // The value is kept, since the request may be repeated.
        request.memory.built(2 * first.len());
        let reply = match self.remote.post(first, &request).await {
            Err(Error::Refused { why, .. }) if reasons && why.to_lowercase().contains(NO_REASONING) => {
                self.reasons.store(false, Ordering::Relaxed);
                self.remote.post(encode(&self.body(body, false))?, &request).await?
            }
            reply => {
                drop(body);
                reply?
            }
        };
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
        prompt::responses::request(&Prompt { images: request.images, origin, call_ids, ..prompt })
    }

    fn body(&self, mut body: Map<String, Value>, reasons: bool) -> Map<String, Value> {
        body.insert("model".into(), self.remote.name().into());
        body.insert("stream".into(), true.into());
        body.insert("store".into(), false.into());
        if reasons {
            body.insert("include".into(), json!(["reasoning.encrypted_content"]));
        }
        body
    }
}

#[async_trait]
impl Model for Responses {
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
