//! Models that are served through `/chat/completions`, by OpenAI or a compatible server.
//!
//! Invariants:
//! - A stream without an end (`[DONE]` or a `finish_reason`) is an error, never an answer.
//! - The size of an answer and its number of calls are bounded.

mod assembly;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::AUTHORIZATION;
use rap_agent::prompt::{self, Prompt, Request};
use rap_io::client::Client;
use rap_io::sse;
use rap_protocol::Secret;
use serde_json::{Map, Value, json};
use tokio::time::{Duration, timeout};
use url::Url;

use self::assembly::Assembly;
use super::remote::{self, Remote, incomplete_answer, log_omitted_tools, spec};
use super::reply::Reply;
use super::window::Window;
use super::{Error, Kind, Model, ModelAnswer, ModelRequest, OnDelta, Options, Provider};

/// Base URL of OpenAI's own server.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// Time limit for the usage and `[DONE]` after a complete answer.
const REST_WITHIN: Duration = Duration::from_secs(5);

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
    let Options { name, api_key, .. } = options;
    Ok(Arc::new(OpenAi::new(client(), Settings { base_url, name, api_key })?))
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
}

/// A model that is served through `/chat/completions`.
#[derive(Debug)]
pub struct OpenAi {
    remote: Remote,
}

impl OpenAi {
    /// Creates a model. A key that cannot be sent in a header is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key } = settings;
        let window = Window::new(remote::append_path(base_url.clone(), "/models"), DEFAULT_WINDOW);
        let remote = Remote::new(client, base_url, "/chat/completions", name, window);
        Ok(OpenAi { remote: remote.with_key(api_key, AUTHORIZATION, "Bearer ")? })
    }

    /// Sends a request. Errors have to pass through [`Remote::redacted`] before they are shown.
    async fn answer(&self, request: &ModelRequest, on_delta: &mut OnDelta<'_>) -> Result<ModelAnswer, Error> {
        let Request { body, names, omitted_tools } = wire_request(request);
        log_omitted_tools(&omitted_tools);
        let mut reply = self.remote.post(&self.body(body)).await?;
        let read = read(&mut reply, on_delta).await;
        let assembly = read.map_err(|error| reply.classify(error))?;
        reply.drain().await;
        Ok(assembly.into_answer(request.turn, &names, on_delta))
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
        self.answer(&request, on_delta).await.map_err(|error| self.remote.redacted(error))
    }

    async fn window(&self) -> Option<u64> {
        Some(self.remote.window().await)
    }

    fn destination(&self) -> &str {
        self.remote.destination()
    }
}

fn wire_request(request: &ModelRequest) -> Request {
    let tools: Vec<_> = request.tools.iter().map(spec).collect();
    let prompt = Prompt::new(&request.system, &request.entries, &tools);
    prompt::openai::request(&Prompt { images: request.images, ..prompt })
}

async fn read(reply: &mut Reply<'_>, on_delta: &mut OnDelta<'_>) -> Result<Assembly, Error> {
    let mut format = BodyFormat::Unknown;
    let mut assembly = Assembly::default();
    while !assembly.is_done() {
        let next = if assembly.is_complete() { rest(reply).await } else { reply.chunk().await? };
        match next {
            Some(bytes) => format.take(&bytes, &mut assembly, on_delta)?,
            None => {
                format.end(&mut assembly, on_delta)?;
                break;
            }
        }
    }
    if assembly.is_complete() { Ok(assembly) } else { Err(incomplete_answer()) }
}

/// Returns the next chunk after the end of an answer. A failure is ignored, because the answer is already complete.
async fn rest(reply: &mut Reply<'_>) -> Option<Bytes> {
    timeout(REST_WITHIN, reply.chunk()).await.ok()?.ok()?
}

/// Format of the body: an event stream, or a single document from a server without streaming.
enum BodyFormat {
    Unknown,
    Events(sse::Parser),
    Document(Vec<u8>),
}

impl BodyFormat {
    fn take(
        &mut self,
        bytes: &Bytes,
        assembly: &mut Assembly,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<(), Error> {
        if matches!(self, BodyFormat::Unknown) {
            match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
                None => return Ok(()),
                Some(b'{') => *self = BodyFormat::Document(Vec::new()),
                Some(_) => *self = BodyFormat::Events(sse::Parser::new(remote::EVENT_BYTES)),
            }
        }
        match self {
            BodyFormat::Unknown => {}
            BodyFormat::Document(document) => document.extend_from_slice(bytes),
            BodyFormat::Events(parser) => {
                for event in parser.push(bytes) {
                    let event = event.map_err(|error| Error::retry(error.to_string()))?;
                    assembly.push_event(&event.data, on_delta)?;
                }
            }
        }
        Ok(())
    }

    fn end(&self, assembly: &mut Assembly, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        match self {
            BodyFormat::Document(document) => assembly.push_document(document, on_delta),
            _ => Ok(()),
        }
    }
}
