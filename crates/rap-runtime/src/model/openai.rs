//! A model behind `/chat/completions`: OpenAI's and any other server that speaks like it.
//!
//! Invariants:
//! - A stream without its end (`[DONE]` or a `finish_reason`) is an error, never an answer.
//! - An answer has a bound in bytes and in calls.

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
use super::remote::{self, Remote, broke_off, log_left_out, spec};
use super::reply::Reply;
use super::window::Window;
use super::{Answer, Error, Kind, Model, OnDelta, Options, Provider, Question};

/// Where OpenAI itself is.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// How long the rest of a complete answer, which is its usage and `[DONE]`, is waited for.
const REST: Duration = Duration::from_secs(5);

/// How many tokens a model can read, where its server does not say.
pub const USUAL_WINDOW: u64 = 128_000;

/// What a configuration calls these models.
pub static PROVIDER: Provider = Provider {
    name: "openai",
    kind: Kind::Remote { key_hint: "api.openai.com wants a key, such as \"env:OPENAI_API_KEY\"" },
    build,
};

fn build(options: Options, client: &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error> {
    let base_url = options.base_url_or(DEFAULT_BASE_URL);
    let Options { name, api_key, .. } = options;
    Ok(Arc::new(OpenAi::new(client(), Settings { base_url, name, api_key })?))
}

/// Which model is asked, and where.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What `/chat/completions` is appended to, such as [`DEFAULT_BASE_URL`].
    pub base_url: Url,
    /// The model's name.
    pub name: String,
    /// Sent as a bearer token.
    pub api_key: Option<Secret>,
}

/// The model.
#[derive(Debug)]
pub struct OpenAi {
    remote: Remote,
}

impl OpenAi {
    /// A model with these settings. A key that can not be sent is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key } = settings;
        let window = Window::new(remote::below(base_url.clone(), "/models"), USUAL_WINDOW);
        let remote = Remote::new(client, base_url, "/chat/completions", name, window);
        Ok(OpenAi { remote: remote.with_key(api_key, AUTHORIZATION, "Bearer ")? })
    }

    /// Asks. An error must not be shown before it went through [`Remote::hidden`].
    async fn answer(&self, question: &Question, on_delta: &mut OnDelta<'_>) -> Result<Answer, Error> {
        let Request { body, names, left_out } = request(question);
        log_left_out(&left_out);
        let mut reply = self.remote.post(&self.body(body)).await?;
        let read = read(&mut reply, on_delta).await;
        let assembly = read.map_err(|error| reply.judge(error))?;
        reply.linger().await;
        Ok(assembly.into_answer(question.turn, &names, on_delta))
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

fn request(question: &Question) -> Request {
    let tools: Vec<_> = question.tools.iter().map(spec).collect();
    let prompt = Prompt::new(&question.system, &question.entries, &tools);
    prompt::openai::request(&Prompt { images: question.images, ..prompt })
}

async fn read(reply: &mut Reply<'_>, on_delta: &mut OnDelta<'_>) -> Result<Assembly, Error> {
    let mut form = Form::Unknown;
    let mut assembly = Assembly::default();
    while !assembly.is_done() {
        let next = if assembly.is_complete() { rest(reply).await } else { reply.chunk().await? };
        match next {
            Some(bytes) => form.take(&bytes, &mut assembly, on_delta)?,
            None => {
                form.end(&mut assembly, on_delta)?;
                break;
            }
        }
    }
    if assembly.is_complete() { Ok(assembly) } else { Err(broke_off()) }
}

/// What comes behind the end of an answer. If it fails, the answer is still here; what is lost is only the news
/// that this was all.
async fn rest(reply: &mut Reply<'_>) -> Option<Bytes> {
    timeout(REST, reply.chunk()).await.ok()?.ok()?
}

/// Tells a stream of events from a plain document, which servers that know no streams answer with.
enum Form {
    Unknown,
    Events(sse::Parser),
    Document(Vec<u8>),
}

impl Form {
    fn take(
        &mut self,
        bytes: &Bytes,
        assembly: &mut Assembly,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<(), Error> {
        if matches!(self, Form::Unknown) {
            match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
                None => return Ok(()),
                Some(b'{') => *self = Form::Document(Vec::new()),
                Some(_) => *self = Form::Events(sse::Parser::new(remote::EVENT_BYTES)),
            }
        }
        match self {
            Form::Unknown => {}
            Form::Document(document) => document.extend_from_slice(bytes),
            Form::Events(parser) => {
                for event in parser.push(bytes) {
                    let event = event.map_err(|error| Error::retry(error.to_string()))?;
                    assembly.take(&event.data, on_delta)?;
                }
            }
        }
        Ok(())
    }

    fn end(&self, assembly: &mut Assembly, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        match self {
            Form::Document(document) => assembly.take_document(document, on_delta),
            _ => Ok(()),
        }
    }
}
