//! A model behind `/chat/completions`: OpenAI's and any other server that speaks like it.
//!
//! Invariants:
//! - A stream without its end (`[DONE]` or a `finish_reason`) is an error, never an answer.
//! - An answer has a bound in bytes and in calls.

mod assembly;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use rap_agent::prompt::{self, Prompt, Request};
use rap_io::client::{self, Client, Streaming};
use rap_io::sse;
use rap_protocol::Secret;
use serde_json::{Map, Value, json};
use tokio::time::{Duration, timeout};
use url::Url;

use self::assembly::Assembly;
use super::remote::{self, Remote, broke_off, failed, linger, log_left_out, spec};
use super::window::Window;
use super::{Answer, Error, Question};

/// Where OpenAI itself is.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// How long the rest of a complete answer, which is its usage and `[DONE]`, is waited for.
const REST: Duration = Duration::from_secs(5);

/// How many tokens a model can read, where its server does not say.
pub const USUAL_WINDOW: u64 = 128_000;

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
    pub(super) remote: Remote,
}

impl OpenAi {
    /// A model with these settings. A key that can not be sent is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let Settings { base_url, name, api_key } = settings;
        let window = Window::new(remote::below(base_url.clone(), "/models"), USUAL_WINDOW);
        let endpoint = remote::below(base_url, "/chat/completions");
        let remote = Remote::new(client, endpoint, name, window);
        Ok(OpenAi { remote: remote.with_key(api_key, AUTHORIZATION, "Bearer ")? })
    }

    /// Asks. An error is not fit to be shown before it went through [`Remote::hidden`].
    pub(super) async fn ask(
        &self,
        question: &Question,
        on_delta: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Answer, Error> {
        let Request { body, names, left_out } = request(question);
        log_left_out(&left_out);
        let mut stream = self.remote.post(&self.body(body)).await?;
        let assembly = read(&mut stream, on_delta).await?;
        Ok(assembly.into_answer(question.turn, &names, on_delta))
    }

    fn body(&self, mut body: Map<String, Value>) -> Map<String, Value> {
        body.insert("model".into(), self.remote.name().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        body
    }
}

fn request(question: &Question) -> Request {
    let tools: Vec<_> = question.tools.iter().map(spec).collect();
    let prompt = Prompt::new(&question.system, &question.entries, &tools);
    prompt::openai::request(&Prompt { images: question.images, ..prompt })
}

async fn read(stream: &mut Streaming, on_delta: &mut (dyn FnMut(&str) + Send)) -> Result<Assembly, Error> {
    let mut reader = Reader { form: Form::Unknown, bytes: 0 };
    let mut assembly = Assembly::default();
    while !assembly.is_done() {
        let next = if assembly.is_complete() { rest(stream).await } else { stream.chunk().await };
        match next.map_err(failed)? {
            Some(bytes) => reader.take(&bytes, &mut assembly, on_delta)?,
            None => {
                reader.end(&mut assembly, on_delta)?;
                break;
            }
        }
    }
    if !assembly.is_complete() {
        return Err(broke_off());
    }
    linger(stream).await;
    Ok(assembly)
}

/// What comes behind the end of an answer. If it fails, the answer is still here; what is lost is only the news
/// that this was all.
async fn rest(stream: &mut Streaming) -> Result<Option<Bytes>, client::Error> {
    match timeout(REST, stream.chunk()).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}

/// Tells a stream of events from a plain document, which servers that know no streams answer with.
struct Reader {
    form: Form,
    bytes: usize,
}

enum Form {
    Unknown,
    Events(sse::Parser),
    Document(Vec<u8>),
}

impl Reader {
    fn take(
        &mut self,
        bytes: &Bytes,
        assembly: &mut Assembly,
        on_delta: &mut (dyn FnMut(&str) + Send),
    ) -> Result<(), Error> {
        remote::count(&mut self.bytes, bytes)?;
        if matches!(self.form, Form::Unknown) {
            match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
                None => return Ok(()),
                Some(b'{') => self.form = Form::Document(Vec::new()),
                Some(_) => self.form = Form::Events(sse::Parser::default()),
            }
        }
        match &mut self.form {
            Form::Unknown => {}
            Form::Document(document) => document.extend_from_slice(bytes),
            Form::Events(parser) => {
                let events = parser.push(bytes).map_err(|error| Error::retry(error.to_string()))?;
                events.iter().try_for_each(|event| assembly.take(&event.data, on_delta))?;
            }
        }
        Ok(())
    }

    fn end(&self, assembly: &mut Assembly, on_delta: &mut (dyn FnMut(&str) + Send)) -> Result<(), Error> {
        match &self.form {
            Form::Document(document) => assembly.take_document(document, on_delta),
            _ => Ok(()),
        }
    }
}
