//! A model behind `/v1/messages`: Anthropic's and any other server that speaks like it.
//!
//! Invariants:
//! - A stream without `message_stop` is an error, never an answer.
//! - What the model thought is kept as it came, with its signature, or not at all.
//! - A turn that the provider pauses is gone on with, a bounded number of times.

mod assembly;

use std::sync::Arc;

use async_trait::async_trait;
use http::HeaderName;
use rap_agent::prompt::{self, Prompt, Request};
use rap_io::client::Client;
use rap_io::sse;
use rap_protocol::Secret;
use serde_json::{Map, Value, json};
use url::Url;

use self::assembly::Assembly;
use super::remote::{self, Remote, broke_off, log_left_out, spec};
use super::reply::Reply;
use super::window::Window;
use super::{Answer, Error, Kind, Model, OnDelta, Options, Provider, Question};

/// Where Anthropic itself is.
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";
/// How many tokens an answer has at most, unless another bound is given.
pub const MAX_TOKENS: u32 = 16 * 1024;
/// The fewest tokens that can be set aside for thinking.
pub const LEAST_THINKING: u32 = 1024;
/// The version of the API that is spoken here.
const VERSION: &str = "2023-06-01";
/// How often one question is gone on with after a pause.
const PAUSES: usize = 8;

/// How many tokens a model can read, where its server does not say.
pub const USUAL_WINDOW: u64 = 200_000;

/// What a configuration calls these models.
pub static PROVIDER: Provider = Provider {
    name: "anthropic",
    kind: Kind::Remote { key_hint: "api.anthropic.com wants a key, such as \"env:ANTHROPIC_API_KEY\"" },
    build,
};

fn build(options: Options, client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error> {
    let base_url = options.base_url_or(DEFAULT_BASE_URL);
    let Options { name, api_key, max_tokens, thinking, .. } = options;
    let settings = Settings { base_url, name, api_key, max_tokens, thinking };
    Ok(Arc::new(Anthropic::new(client(), settings)?))
}

/// Which model is asked, and where.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What `/v1/messages` is appended to, such as [`DEFAULT_BASE_URL`]. A `/v1` at its end is not repeated.
    pub base_url: Url,
    /// The model's name.
    pub name: String,
    /// Sent as `x-api-key`.
    pub api_key: Option<Secret>,
    /// How many tokens an answer has at most, thinking included; such as [`MAX_TOKENS`].
    pub max_tokens: u32,
    /// Whether it thinks before it answers.
    pub thinking: Thinking,
}

/// Whether a model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Thinking {
    /// It does not.
    #[default]
    Off,
    /// When it finds that it should.
    Adaptive,
    /// Always, with that many tokens at most: at least [`LEAST_THINKING`], and fewer than an answer has.
    Tokens(u32),
}

/// The model.
#[derive(Debug)]
pub struct Anthropic {
    remote: Remote,
    max_tokens: u32,
    thinking: Thinking,
}

impl Anthropic {
    /// A model with these settings. A key that can not be sent is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key, max_tokens, thinking } = settings;
        let versioned = base_url.path().trim_end_matches('/').ends_with("/v1");
        let base_url = if versioned { base_url } else { remote::below(base_url, "/v1") };
        let mut list = remote::below(base_url.clone(), "/models");
        list.set_query(Some("limit=1000"));
        let window = Window::new(list, USUAL_WINDOW);
        let remote = Remote::new(client, base_url, "/messages", name, window)
            .with(HeaderName::from_static("anthropic-version"), VERSION)
            .with_key(api_key, HeaderName::from_static("x-api-key"), "")?;
        Ok(Anthropic { remote, max_tokens, thinking })
    }

    /// Asks. An error must not be shown before it went through [`Remote::hidden`].
    async fn answer(&self, question: &Question, on_delta: &mut OnDelta<'_>) -> Result<Answer, Error> {
        let Request { body, names, left_out } = self.request(question);
        log_left_out(&left_out);
        let mut body = self.body(body);
        let mut assembly = Assembly::default();
        for pauses in 0..=PAUSES {
            let mut reply = self.remote.post(&body).await?;
            let read = read(&mut reply, &mut assembly, on_delta).await;
            read.map_err(|error| reply.judge(error))?;
            reply.linger().await;
            if !assembly.is_paused() || pauses == PAUSES {
                break;
            }
            go_on(&mut body, assembly.pause());
        }
        Ok(assembly.into_answer(self.remote.name(), question.turn, &names, on_delta))
    }

    fn request(&self, question: &Question) -> Request {
        let tools: Vec<_> = question.tools.iter().map(spec).collect();
        let thinking = match self.thinking {
            Thinking::Off => prompt::Thinking::Off,
            Thinking::Adaptive => prompt::Thinking::Free { model: self.remote.name() },
            Thinking::Tokens(_) => prompt::Thinking::First { model: self.remote.name() },
        };
        let prompt = Prompt::new(&question.system, &question.entries, &tools);
        prompt::anthropic::request(&Prompt { images: question.images, thinking, ..prompt })
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
    async fn ask(&self, question: Question, on_delta: &mut OnDelta<'_>) -> Result<Answer, Error> {
        self.answer(&question, on_delta).await.map_err(|error| self.remote.hidden(error))
    }

    async fn window(&self) -> Option<u64> {
        Some(self.remote.window().await)
    }

    fn destination(&self) -> &str {
        self.remote.destination()
    }
}

/// The provider wants what came before the pause back as it is: the assistant's last message.
fn go_on(body: &mut Map<String, Value>, content: Vec<Value>) {
    let Some(Value::Array(messages)) = body.get_mut("messages") else { return };
    messages.pop_if(|last| last["role"] == "assistant");
    messages.push(json!({"role": "assistant", "content": content}));
}

async fn read(
    reply: &mut Reply<'_>,
    assembly: &mut Assembly,
    on_delta: &mut OnDelta<'_>,
) -> Result<(), Error> {
    let mut parser = sse::Parser::new(remote::EVENT_BYTES);
    while !assembly.is_done() {
        let bytes = reply.chunk().await?.ok_or_else(broke_off)?;
        for event in parser.push(&bytes) {
            let event = event.map_err(|error| Error::retry(error.to_string()))?;
            assembly.take(&event.data, on_delta)?;
        }
    }
    Ok(())
}
