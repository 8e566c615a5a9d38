//! Requests and answers between the checker and an implementation, without secrets.

use rap_protocol::{Secret, redact};
use serde::Serialize;
use serde_json::Value;
use url::Url;

/// Maximum number of characters of a body that are shown.
const BODY_CHARS: usize = 1_200;

/// Request and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exchange {
    /// Request.
    pub request: RedactedMessage,
    /// Answer.
    pub answer: RedactedMessage,
}

/// Request or answer without secrets: every URL is cut off after its host, except a toolset's `endpoint`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RedactedMessage {
    /// Method and path of a request, or status of an answer.
    pub head: String,
    /// Body, truncated. Empty if there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub body: String,
}

impl Exchange {
    /// Creates an exchange.
    pub fn new(request: RedactedMessage, answer: RedactedMessage) -> Exchange {
        Exchange { request, answer }
    }

    /// Replaces every occurrence of a secret by `…`.
    pub fn redact(mut self, secret: &Secret) -> Exchange {
        let secret = secret.expose();
        if !secret.is_empty() {
            let Exchange { request, answer } = &mut self;
            for text in [&mut request.head, &mut request.body, &mut answer.head, &mut answer.body] {
                *text = text.replace(secret, "…");
            }
        }
        self
    }
}

impl RedactedMessage {
    /// Creates a message from its head and its body.
    pub fn new(head: impl Into<String>, body: &[u8]) -> RedactedMessage {
        RedactedMessage { head: without_urls(&head.into()), body: cut(&body_text(body)) }
    }

    /// Creates a message without a body, for example for an answer that never arrived.
    pub fn head(head: impl Into<String>) -> RedactedMessage {
        RedactedMessage::new(head, b"")
    }
}

fn body_text(body: &[u8]) -> String {
    match serde_json::from_slice::<Value>(body) {
        Ok(mut value) => {
            hide_urls(&mut value, "");
            value.to_string()
        }
        Err(_) => without_urls(&String::from_utf8_lossy(body)),
    }
}

fn hide_urls(value: &mut Value, key: &str) {
    match value {
        Value::String(_) if key == "endpoint" => {}
        Value::String(text) if key.ends_with("_url") && Url::parse(text).is_err() => "…".clone_into(text),
        Value::String(text) => *text = without_urls(text),
        Value::Array(items) => items.iter_mut().for_each(|item| hide_urls(item, key)),
        Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| hide_urls(value, key)),
        _ => {}
    }
}

/// Cuts off every URL in a text after its host, because the rest may be a capability.
fn without_urls(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let start = rest[..at].trim_end_matches(|c: char| c.is_ascii_alphanumeric()).len();
        let end = rest[at..].find(ends_url).map_or(rest.len(), |length| at + length);
        out.push_str(&rest[..start]);
        match Url::parse(&rest[start..end]) {
            Ok(url) => out.push_str(&redact::url(&url)),
            Err(_) => out.push('…'),
        }
        rest = &rest[end..];
    }
    out + rest
}

fn ends_url(c: char) -> bool {
    c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '`' | '<' | '>' | '\\')
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(BODY_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
    }
}
