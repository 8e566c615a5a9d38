//! A model on an HTTP server: code that all providers share.
//!
//! Invariants:
//! - The API key is sent in one header only, and removed from every error text.
//! - The sizes of answers and errors are bounded.

use http::header::ACCEPT;
use http::{HeaderName, HeaderValue};
use rap_agent::prompt::{OmittedTool, ServedModel, ToolSpec};
use rap_io::client::{self, Client, Fetched, Streaming};
use rap_io::hashing::{LONG, in_place};
use rap_protocol::{Secret, redact};
use serde_json::{Map, Value};
use url::{Position, Url};

use super::lenient::text;
use super::reply::Reply;
use super::too_long::{named_window, says_too_long, wording};
use super::window::Window;
use super::{Error, ModelRequest, OfferedTool, Prices, Usage};

/// Maximum size of an event of a streamed answer, in bytes.
pub(super) const EVENT_BYTES: usize = 4 * 1024 * 1024;
/// Maximum number of calls in an answer.
pub(super) const CALLS: usize = 256;
/// Note on an answer that reached the token limit.
pub(super) const CUT: &str = "[cut: the answer reached the model's limit]";
/// Note on an answer that the provider stopped.
pub(super) const FILTERED: &str = "[cut: the model's provider stopped the answer]";
/// Maximum number of bytes that are read of an error body.
const ERROR_BYTES: usize = 16 * 1024;
/// Status of a server, or of a proxy before it, for which the body of a request is too large. A shorter prompt helps,
/// whatever the error says.
const CONTENT_TOO_LARGE: u16 = 413;
/// Statuses of a server that refuses the key, whatever the request is.
const CREDENTIALS_REFUSED: [u16; 2] = [401, 403];
/// Types and codes of errors inside a stream that a repetition does not change. The status 400 is not one of them, because
/// vLLM and SGLang send it for every failure inside a stream, also for their own ones.
const PERMANENT: &[&str] = &[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "billing_error",
    "invalid_prompt",
    "invalid_image",
    "image_content_policy_violation",
    "401",
    "402",
    "403",
    "404",
];
/// Codes of errors that are temporary, whatever their type is.
const TEMPORARY: &[&str] = &["408", "429", "500", "502", "503", "529", "rate_limit_exceeded", "server_error"];

/// A model on a server: URL, name and credentials.
pub(super) struct Remote {
    client: Client,
    destination: String,
    endpoint: Url,
    name: String,
    window: Window,
    prices: Option<Prices>,
    api_key: Option<Secret>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("endpoint", &redact::url(&self.endpoint)).finish_non_exhaustive()
    }
}

/// Encodes the body of a request.
pub(super) fn encode(body: &Map<String, Value>) -> Result<Vec<u8>, Error> {
    in_place(LONG, || serde_json::to_vec(body)).map_err(|error| Error::refused(error.to_string()))
}

impl Remote {
    /// Returns a model whose requests are posted to `path` under the base URL.
    pub(super) fn new(client: Client, base_url: Url, path: &str, name: String, window: Window) -> Self {
        let (destination, endpoint) = (destination(&base_url), append_path(base_url, path));
        let headers = vec![(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"))];
        Remote { client, destination, endpoint, name, window, prices: None, api_key: None, headers }
    }

    /// Sets the API key, which is sent in `header` after `scheme`. A key that cannot be sent is [`Error::Refused`].
    pub(super) fn with_key(
        mut self,
        api_key: Option<Secret>,
        header: HeaderName,
        scheme: &str,
    ) -> Result<Self, Error> {
        if let Some(key) = &api_key {
            let value = HeaderValue::try_from(format!("{scheme}{}", key.expose()));
            let mut value =
                value.map_err(|_| Error::refused("the model's api_key cannot be sent in a header"))?;
            value.set_sensitive(true);
            self.headers.push((header, value));
        }
        Ok(Remote { api_key, ..self })
    }

    /// Sets the prices of the model. Without any, those of a known model apply.
    pub(super) fn with_prices(self, prices: Option<Prices>) -> Self {
        let prices = prices.or_else(|| Prices::known(&self.name));
        Remote { prices, ..self }
    }

    /// Sets the cost, if the prices are known.
    pub(super) fn price(&self, usage: &mut Usage) {
        usage.cost = self.prices.map_or(0, |prices| prices.cost(usage));
    }

    /// Adds a header.
    pub(super) fn with(mut self, header: HeaderName, value: &'static str) -> Self {
        self.headers.push((header, HeaderValue::from_static(value)));
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the model and its server, to which the additional fields of their answers are sent back.
    pub(super) fn origin(&self) -> ServedModel<'_> {
        ServedModel { server: &self.destination, model: &self.name }
    }

    /// Returns the base URL of the server, without secrets.
    pub(super) fn destination(&self) -> &str {
        &self.destination
    }

    /// Returns the size of the context window in tokens, as reported by the server.
    pub(super) async fn window(&self) -> u64 {
        self.window.tokens(self, &self.name).await
    }

    /// Returns true if the server has not named the size of its context window.
    pub(super) async fn assumes_window(&self) -> bool {
        self.window.is_assumed().await
    }

    /// Sends a request. Returns the body of the answer as soon as the response headers have arrived.
    pub(super) async fn post<'a>(
        &'a self,
        body: Vec<u8>,
        request: &'a ModelRequest,
    ) -> Result<Reply<'a>, Error> {
        let posted = self.client.post_stream(&self.endpoint, &self.headers, body.into()).await;
        let stream = posted.map_err(failed)?;
        let is_success = (200..300).contains(&stream.status);
        if is_success { Ok(Reply::new(self, request, stream)) } else { Err(refusal(stream).await) }
    }

    /// Fetches a document from the same server.
    pub(super) async fn get(&self, url: &Url, max_bytes: usize) -> Result<Fetched, client::Error> {
        self.client.get(url, &self.headers, max_bytes).await
    }

    /// Removes keys, also masked ones, and paths of URLs from the text of an error. Learns the size of the context
    /// window if the error names it.
    pub(super) fn redacted(&self, error: Error) -> Error {
        if let Error::TooLong { window: Some(tokens), .. } = error {
            self.window.learn(tokens);
        }
        match error {
            Error::Retry { why, retry_after } => Error::Retry { why: self.redact(&why), retry_after },
            Error::TooLong { why, window } => Error::TooLong { why: self.redact(&why), window },
            Error::Refused { why, every_request } => Error::Refused { why: self.redact(&why), every_request },
        }
    }

    /// Removes the key, everything that looks like a key, and paths of URLs from a text.
    pub(super) fn redact(&self, text: &str) -> String {
        let text = match self.api_key.as_ref().map(Secret::expose) {
            Some(key) if !key.is_empty() => text.replace(key, "[key]"),
            _ => text.to_owned(),
        };
        let words = redact::text(&text);
        let words = words.split(' ').map(|word| if is_key(word) { "[key]" } else { word });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Returns true for a word that looks like a key. Servers repeat wrong keys in part, such as `sk-ab***yz`.
fn is_key(word: &str) -> bool {
    let bare = word.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    bare.starts_with("sk-") || word.contains("***")
}

/// Returns a base URL without user, query, fragment and trailing slashes.
fn destination(base_url: &Url) -> String {
    let scheme = &base_url[..Position::BeforeUsername];
    let rest = &base_url[Position::BeforeHost..Position::AfterPath];
    format!("{scheme}{}", rest.trim_end_matches('/'))
}

pub(super) fn append_path(mut base_url: Url, path: &str) -> Url {
    let path = format!("{}{path}", base_url.path().trim_end_matches('/'));
    base_url.set_path(&path);
    base_url
}

/// Converts a tool for a prompt.
pub(super) fn spec(tool: &OfferedTool) -> ToolSpec<'_> {
    ToolSpec { name: &tool.name, description: &tool.description, schema: tool.schema.document() }
}

/// Logs the tools that the provider does not support.
pub(super) fn log_omitted_tools(omitted_tools: &[OmittedTool]) {
    for tool in omitted_tools {
        tracing::debug!(tool = tool.name, why = tool.why, "a tool is not offered");
    }
}

/// Converts an error of the HTTP client.
pub(super) fn failed(error: client::Error) -> Error {
    let why = format!("the model's server: {error}");
    match error {
        client::Error::Forbidden(_) | client::Error::BadUrl | client::Error::NoCertificates => {
            Error::Refused { why, every_request: true }
        }
        _ => Error::retry(why),
    }
}

/// Error for an answer that ended too early.
pub(super) fn incomplete_answer() -> Error {
    Error::retry("the model's answer ended before it was complete")
}

/// Error for an answer that does not follow the protocol of the provider.
pub(super) fn malformed_answer() -> Error {
    Error::retry("the model's answer is malformed")
}

/// Error for an answer with too many calls.
pub(super) fn too_many_calls() -> Error {
    Error::retry(format!("the model's answer has more than {CALLS} calls"))
}

/// Converts a response whose status is not a success.
async fn refusal(mut stream: Streaming) -> Error {
    let mut body = Vec::new();
    let is_cut = loop {
        if body.len() >= ERROR_BYTES {
            break true;
        }
        match stream.chunk().await {
            Ok(Some(bytes)) => body.extend_from_slice(&bytes),
            Ok(None) => break false,
            Err(_) => break true,
        }
    };
    let status = stream.status;
    let (why, wording) = match serde_json::from_slice(&body) {
        Ok(value) => (error_message(&value), wording(&value)),
        Err(_) => {
            let text = String::from_utf8_lossy(&body).trim().to_owned();
            let text = if is_cut && text.starts_with(['{', '[']) { first_message(&text) } else { text };
            (text.clone(), text)
        }
    };
    let why = format!("the model's server answered {status}: {}", why.replace(['\r', '\n'], " "));
    let is_busy = matches!(status, 408 | 425 | 429);
    if status == CONTENT_TOO_LARGE || (!is_busy && says_too_long(&wording)) {
        return Error::TooLong { why, window: named_window(&wording) };
    }
    // The server knows better than the status whether a repetition helps.
    if stream.should_retry.unwrap_or(is_busy || status >= 500) {
        Error::Retry { why, retry_after: stream.retry_after }
    } else {
        Error::Refused { why, every_request: CREDENTIALS_REFUSED.contains(&status) }
    }
}

/// Returns the error in an event or a document, in any of the formats that servers use: a member of it, or all of it.
pub(super) fn error_in(event: &Value) -> Option<&Value> {
    let member = event.get("error").filter(|error| !error.is_null());
    let is_error = event["type"] == "error" || event["object"] == "error";
    let has_code = || ["type", "code", "status"].iter().any(|name| !text(&event[*name]).is_empty());
    let is_bare = || event["message"].is_string() && event.get("choices").is_none() && has_code();
    member.or_else(|| (is_error || is_bare()).then_some(event))
}

/// Returns the type of an event. An event without one is an error of the server, or malformed.
pub(super) fn event_type(event: &Value) -> Result<&str, Error> {
    let is_error = event["type"] == "error" || event["object"] == "error";
    let kind = event["type"].as_str().filter(|_| !is_error);
    kind.ok_or_else(|| error_in(event).map_or_else(malformed_answer, streamed_error))
}

/// Converts an error that a server sends instead of an answer, or in the middle of one, with a success status.
pub(super) fn streamed_error(error: &Value) -> Error {
    let why = format!("the model's server: {}", error_message(error));
    let wording = wording(error);
    let marks = ["type", "code", "status"].map(|name| text(&error[name]));
    let is_marked = |kinds: &[&str]| marks.iter().any(|mark| kinds.contains(&mark.as_str()));
    if is_marked(&["413"]) || (!is_marked(&["429"]) && says_too_long(&wording)) {
        Error::TooLong { why, window: named_window(&wording) }
    } else if is_marked(PERMANENT) && !is_marked(TEMPORARY) {
        let every_request = is_marked(&["401", "403"]);
        Error::Refused { why, every_request }
    } else {
        Error::retry(why)
    }
}

/// Returns the first message in the JSON of an error that was cut. The rest may repeat parts of the request, so it is not
/// the server's wording.
fn first_message(json: &str) -> String {
    let text_after = |name: &str| {
        let at = json.find(name)? + name.len();
        let value = json[at..].trim_start().strip_prefix(':')?;
        let text = serde_json::Deserializer::from_str(value).into_iter::<String>().next()?.ok()?;
        Some((at, text))
    };
    let names = ["\"message\"", "\"msg\"", "\"error\"", "\"detail\""];
    let first = names.iter().filter_map(|name| text_after(name)).min_by_key(|(at, _)| *at);
    first.map_or_else(|| "(an error without a message)".to_owned(), |(_, text)| text)
}

/// Extracts the message of an error body, in any of the formats that servers use.
pub(super) fn error_message(value: &Value) -> String {
    let value = value.get(0).unwrap_or(value);
    let places = ["/error/message", "/error", "/message", "/detail", "/detail/0/msg"];
    let found = places.iter().find_map(|place| value.pointer(place)?.as_str());
    found.or(value.as_str()).map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_is_found_in_an_event_and_the_rest_is_not_taken_for_one() {
        let own = |event: Value| assert_eq!(error_in(&event), Some(&event), "{event}");
        own(json!({"object": "error", "message": "no", "code": 400}));
        own(json!({"type": "error", "error": null, "message": "no"}));
        own(json!({"message": "no", "code": 400}));
        let event = json!({"error": {"message": "no"}, "choices": []});
        assert_eq!(error_in(&event), Some(&event["error"]));
        for event in [
            json!({"choices": [], "error": null, "message": "ok"}),
            json!({"type": "message_start", "message": {}}),
            json!({"message": "a model is loaded"}),
        ] {
            assert_eq!(error_in(&event), None);
        }
    }

    #[test]
    fn an_error_inside_a_stream_is_permanent_only_if_the_server_says_so() {
        let is_refused = |error: Value| matches!(streamed_error(&error), Error::Refused { .. });
        assert!(is_refused(json!({"type": "invalid_request_error"})) && is_refused(json!({"code": 404})));
        let temporary = json!({"type": "invalid_request_error", "code": "rate_limit_exceeded"});
        assert!(!is_refused(temporary) && !is_refused(json!({"type": "BadRequestError", "code": 400})));
    }

    #[test]
    fn the_first_message_of_a_cut_error_is_read() {
        let table = [
            (r#"{"detail": [{"msg": "a \"b\"", "input": {"message": "c"#, "a \"b\""),
            (r#"{"error" : {"code": 1, "message" : "a", "echo": "b"#, "a"),
            (r#"{"detail": "a", "x": "#, "a"),
            (r#"{"messages": ["message"], "x": "#, "(an error without a message)"),
        ];
        for (json, expected) in table {
            assert_eq!(first_message(json), expected, "{json}");
        }
    }
}
