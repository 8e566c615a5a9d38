//! A model behind `/chat/completions`: OpenAI's and any other server that speaks like it.
//!
//! Invariants:
//! - A stream without its end (`[DONE]` or a `finish_reason`) is an error, never an answer.
//! - The key goes into one header and nowhere else; every error text is searched for it.
//! - An answer has a bound in bytes and in calls.

mod assembly;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderName, HeaderValue};
use rap_agent::prompt::{self, Prompt, Request, ToolSpec};
use rap_io::client::{self, Client, Streaming};
use rap_io::sse;
use rap_protocol::{Secret, redact};
use serde_json::{Map, Value, json};
use tokio::time::{Duration, timeout};
use url::Url;

use self::assembly::{Assembly, error_message};
use super::{Answer, Error, Offered, Question};

/// Where OpenAI itself is.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";
/// The largest answer, in bytes as they come over the wire.
pub const ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// How much of an error's body is read, in bytes.
const ERROR_BYTES: usize = 16 * 1024;
/// How long the rest of a complete answer, which is its usage and `[DONE]`, is waited for.
const REST: Duration = Duration::from_secs(5);
/// How long the end of a stream is waited for behind `[DONE]`, so that its connection can be used again.
const LINGER: Duration = Duration::from_millis(100);

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
pub struct OpenAi {
    client: Client,
    endpoint: Url,
    name: String,
    api_key: Option<Secret>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl std::fmt::Debug for OpenAi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenAi")
            .field("endpoint", &redact::url(&self.endpoint))
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl OpenAi {
    /// A model with these settings. A key that can not be sent is [`Error::Refused`].
    pub fn new(client: Client, settings: Settings) -> Result<Self, Error> {
        let mut headers = vec![(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"))];
        if let Some(key) = &settings.api_key {
            let bearer = HeaderValue::try_from(format!("Bearer {}", key.expose()));
            let mut bearer = bearer.map_err(|_| Error::refused("the model's api_key can not be sent"))?;
            bearer.set_sensitive(true);
            headers.push((AUTHORIZATION, bearer));
        }
        let Settings { mut base_url, name, api_key } = settings;
        let path = format!("{}/chat/completions", base_url.path().trim_end_matches('/'));
        base_url.set_path(&path);
        Ok(OpenAi { client, endpoint: base_url, name, api_key, headers })
    }

    pub(super) async fn ask(
        &self,
        question: &Question,
        on_delta: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Answer, Error> {
        self.asked(question, on_delta).await.map_err(|error| match error {
            Error::Retry { why, retry_after } => Error::Retry { why: self.hidden(&why), retry_after },
            Error::Refused { why } => Error::Refused { why: self.hidden(&why) },
        })
    }

    async fn asked(
        &self,
        question: &Question,
        on_delta: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Answer, Error> {
        let Request { body, names, left_out } = request(question);
        for tool in left_out {
            tracing::debug!(tool = tool.name, why = tool.why, "a tool is not offered");
        }
        let body = self.body(body);
        let mut stream =
            self.client.post_stream(&self.endpoint, &self.headers, body).await.map_err(failed)?;
        if !(200..300).contains(&stream.status) {
            return Err(refusal(stream).await);
        }
        let assembly = read(&mut stream, on_delta).await?;
        Ok(assembly.into_answer(question.turn, &names, on_delta))
    }

    fn body(&self, mut body: Map<String, Value>) -> Bytes {
        body.insert("model".into(), self.name.as_str().into());
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
        Value::Object(body).to_string().into()
    }

    /// A text without the key, not even a masked one, and without the paths of URLs.
    fn hidden(&self, text: &str) -> String {
        let text = match self.api_key.as_ref().map(Secret::expose) {
            Some(key) if !key.is_empty() => text.replace(key, "[key]"),
            _ => text.to_owned(),
        };
        let words = redact::text(&text);
        let words = words.split(' ').map(|word| if is_key(word) { "[key]" } else { word });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Servers repeat a wrong key in part, such as `sk-ab***yz`.
fn is_key(word: &str) -> bool {
    let bare = word.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    bare.starts_with("sk-") || word.contains("***")
}

fn request(question: &Question) -> Request {
    let tools: Vec<_> = question.tools.iter().map(spec).collect();
    let prompt = Prompt::new(&question.system, &question.entries, &tools);
    prompt::openai::request(&Prompt { images: question.images, ..prompt })
}

fn spec(tool: &Offered) -> ToolSpec<'_> {
    ToolSpec { name: &tool.name, description: &tool.description, schema: tool.schema.document() }
}

fn failed(error: client::Error) -> Error {
    let why = format!("the model's server: {error}");
    match error {
        client::Error::Forbidden(_) | client::Error::BadUrl | client::Error::NoCertificates => {
            Error::refused(why)
        }
        _ => Error::retry(why),
    }
}

/// Why the server answered with something else than success.
async fn refusal(mut stream: Streaming) -> Error {
    let mut body = Vec::new();
    while body.len() < ERROR_BYTES {
        let Ok(Some(bytes)) = stream.chunk().await else { break };
        body.extend_from_slice(&bytes);
    }
    let status = stream.status;
    let why = match serde_json::from_slice(&body) {
        Ok(value) => error_message(&value),
        Err(_) => String::from_utf8_lossy(&body).trim().to_owned(),
    };
    let why = format!("the model's server answered {status}: {}", why.replace(['\r', '\n'], " "));
    match status {
        408 | 425 | 429 | 500.. => Error::Retry { why, retry_after: stream.retry_after },
        _ => Error::refused(why),
    }
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
        return Err(Error::retry("the model's answer broke off"));
    }
    // Whatever comes now changes nothing.
    timeout(LINGER, stream.chunk()).await.ok();
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
        bytes: &[u8],
        assembly: &mut Assembly,
        on_delta: &mut (dyn FnMut(&str) + Send),
    ) -> Result<(), Error> {
        self.bytes += bytes.len();
        if self.bytes > ANSWER_BYTES {
            return Err(Error::retry(format!("the model's answer has more than {ANSWER_BYTES} bytes")));
        }
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
