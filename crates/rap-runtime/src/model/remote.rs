//! A model behind HTTP: what its providers have in common.
//!
//! Invariants:
//! - The key goes into one header and nowhere else; every error text is searched for it.
//! - An answer and an error have bounds in bytes.

use http::header::ACCEPT;
use http::{HeaderName, HeaderValue};
use rap_agent::prompt::{LeftOut, ToolSpec};
use rap_io::client::{self, Client, Fetched, Streaming};
use rap_protocol::{Secret, redact};
use serde_json::{Map, Value};
use url::{Position, Url};

use super::reply::Reply;
use super::window::Window;
use super::{Error, Offered};

/// Largest event of a streamed answer, in bytes.
pub(super) const EVENT_BYTES: usize = 4 * 1024 * 1024;
/// The most calls of one answer.
pub(super) const CALLS: usize = 256;
/// Said where an answer is not whole.
pub(super) const CUT: &str = "[cut: the answer reached the model's limit]";
/// Said where the provider did not let it be.
pub(super) const FILTERED: &str = "[cut: the model's provider stopped the answer]";
/// What servers say of a question that is longer than what the model can read.
const TOO_LONG: [&str; 8] = [
    "context length",
    "context_length",
    "context window",
    "context size",
    "prompt is too long",
    "input is too long",
    "too many tokens",
    "request_too_large",
];
/// How much of an error's body is read, in bytes.
const ERROR_BYTES: usize = 16 * 1024;

/// Where a model is, which one it is, and how we show who we are.
pub(super) struct Remote {
    client: Client,
    destination: String,
    endpoint: Url,
    name: String,
    window: Window,
    api_key: Option<Secret>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("endpoint", &redact::url(&self.endpoint)).finish_non_exhaustive()
    }
}

impl Remote {
    /// A model whose questions are posted to `path` below the base URL.
    pub(super) fn new(client: Client, base_url: Url, path: &str, name: String, window: Window) -> Self {
        let (destination, endpoint) = (destination(&base_url), below(base_url, path));
        let headers = vec![(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"))];
        Remote { client, destination, endpoint, name, window, api_key: None, headers }
    }

    /// The same with a key, which is sent in `header`, behind `scheme`. One that can not be sent is
    /// [`Error::Refused`].
    pub(super) fn with_key(
        mut self,
        api_key: Option<Secret>,
        header: HeaderName,
        scheme: &str,
    ) -> Result<Self, Error> {
        if let Some(key) = &api_key {
            let value = HeaderValue::try_from(format!("{scheme}{}", key.expose()));
            let mut value = value.map_err(|_| Error::refused("the model's api_key can not be sent"))?;
            value.set_sensitive(true);
            self.headers.push((header, value));
        }
        Ok(Remote { api_key, ..self })
    }

    /// The same with one more header.
    pub(super) fn with(mut self, header: HeaderName, value: &'static str) -> Self {
        self.headers.push((header, HeaderValue::from_static(value)));
        self
    }

    /// The model's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The server's base URL; it holds no secret.
    pub(super) fn destination(&self) -> &str {
        &self.destination
    }

    /// How many tokens the model can read, as its server says.
    pub(super) async fn window(&self) -> u64 {
        self.window.tokens(self, &self.name).await
    }

    /// Sends a question and returns the body of its answer as soon as the server says that there is one.
    pub(super) async fn post(&self, body: &Map<String, Value>) -> Result<Reply<'_>, Error> {
        let body = serde_json::to_vec(body).map_err(|error| Error::refused(error.to_string()))?;
        let posted = self.client.post_stream(&self.endpoint, &self.headers, body.into()).await;
        let stream = posted.map_err(failed)?;
        let is_success = (200..300).contains(&stream.status);
        if is_success { Ok(Reply::new(self, stream)) } else { Err(refusal(stream).await) }
    }

    /// A document of the same server.
    pub(super) async fn get(&self, url: &Url, max_bytes: usize) -> Result<Fetched, client::Error> {
        self.client.get(url, &self.headers, max_bytes).await
    }

    /// An error whose text holds no key, not even a masked one, and no path of a URL.
    pub(super) fn hidden(&self, error: Error) -> Error {
        match error {
            Error::Retry { why, retry_after } => Error::Retry { why: self.without_key(&why), retry_after },
            Error::TooLong { why } => Error::TooLong { why: self.without_key(&why) },
            Error::Refused { why } => Error::Refused { why: self.without_key(&why) },
        }
    }

    /// The text without the key and anything that looks like one, and without paths.
    pub(super) fn without_key(&self, text: &str) -> String {
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

/// A base URL without its user, query, fragment and the slashes at its end.
fn destination(base_url: &Url) -> String {
    let scheme = &base_url[..Position::BeforeUsername];
    let rest = &base_url[Position::BeforeHost..Position::AfterPath];
    format!("{scheme}{}", rest.trim_end_matches('/'))
}

/// A base URL with more of a path.
pub(super) fn below(mut base_url: Url, path: &str) -> Url {
    let path = format!("{}{path}", base_url.path().trim_end_matches('/'));
    base_url.set_path(&path);
    base_url
}

/// A tool as prompts are told of it.
pub(super) fn spec(tool: &Offered) -> ToolSpec<'_> {
    ToolSpec { name: &tool.name, description: &tool.description, schema: tool.schema.document() }
}

/// Says which tools the provider can not take.
pub(super) fn log_left_out(left_out: &[LeftOut]) {
    for tool in left_out {
        tracing::debug!(tool = tool.name, why = tool.why, "a tool is not offered");
    }
}

/// Why there is no answer, or not all of it.
pub(super) fn failed(error: client::Error) -> Error {
    let why = format!("the model's server: {error}");
    match error {
        client::Error::Forbidden(_) | client::Error::BadUrl | client::Error::NoCertificates => {
            Error::refused(why)
        }
        _ => Error::retry(why),
    }
}

/// An answer that ended before it was whole.
pub(super) fn broke_off() -> Error {
    Error::retry("the model's answer broke off")
}

/// Something that is no answer.
pub(super) fn garbled() -> Error {
    Error::retry("the model's answer is garbled")
}

/// Another call beyond these is no answer.
pub(super) fn too_many_calls() -> Error {
    Error::retry(format!("the model's answer has more than {CALLS} calls"))
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
        400 | 413 if says_too_long(&body) => Error::TooLong { why },
        _ => Error::refused(why),
    }
}

/// Whether a refusal is about the length of the question. There is no code that all servers use.
fn says_too_long(body: &[u8]) -> bool {
    let said = String::from_utf8_lossy(body).to_lowercase();
    TOO_LONG.iter().any(|words| said.contains(words))
}

/// What an error body says, in any of the forms that servers use.
pub(super) fn error_message(value: &Value) -> String {
    let places = ["/error/message", "/error", "/message", "/detail"];
    let found = places.iter().find_map(|place| value.pointer(place)?.as_str());
    found.or(value.as_str()).map_or_else(|| value.to_string(), str::to_owned)
}
