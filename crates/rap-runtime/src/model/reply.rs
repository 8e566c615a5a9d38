//! The body of a model server's response while it is streamed, and its classification if it is not an answer.
//!
//! A wrong `base_url` often leads to a web page or an empty body with status 200. This is an error in the
//! configuration, which a retry does not fix. A stream that starts as an answer and is interrupted is a temporary
//! error.

use bytes::Bytes;
use rap_io::client::Streaming;
use rap_io::sse;
use tokio::time::{Duration, timeout};

use super::remote::{Remote, failed};
use super::{AnswerMemory, Error, ModelRequest, Usage};

/// Maximum size of an answer on the wire, in bytes.
const ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Number of bytes at the start of a body that are kept for errors.
const PREFIX_BYTES: usize = 1024;
/// Number of characters of a body or its content type that an error shows.
const EXCERPT_CHARS: usize = 80;
/// Names of the fields of server-sent events.
const FIELDS: [&str; 4] = ["data", "event", "id", "retry"];
/// Time limit for the end of a stream after a complete answer, so that the connection can be reused.
const DRAIN_WITHIN: Duration = Duration::from_millis(100);

/// The body of a response with a success status.
pub(super) struct Reply<'a> {
    remote: &'a Remote,
    request: &'a ModelRequest,
    stream: Streaming,
    /// The first bytes, without leading white space.
    prefix: Vec<u8>,
    bytes: usize,
    /// True if the server ended the body properly.
    ended: bool,
}

impl<'a> Reply<'a> {
    pub(super) fn new(remote: &'a Remote, request: &'a ModelRequest, stream: Streaming) -> Self {
        Reply { remote, request, stream, prefix: Vec::new(), bytes: 0, ended: false }
    }

    /// Records the tokens that the server has counted so far.
    pub(super) fn note_spent(&self, mut usage: Usage) {
        self.remote.price(&mut usage);
        self.request.spent.set(usage);
    }

    pub(super) fn memory(&self) -> &AnswerMemory {
        &self.request.memory
    }

    /// Returns the next chunk of the body, or `None` at its end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(bytes) = self.stream.chunk().await.map_err(failed)? else {
            self.ended = true;
            return Ok(None);
        };
        self.bytes += bytes.len();
        if self.bytes > ANSWER_BYTES {
            return Err(Error::retry(format!("the model's answer has more than {ANSWER_BYTES} bytes")));
        }
        let start = if self.prefix.is_empty() { bytes.trim_ascii_start() } else { &bytes };
        let room = PREFIX_BYTES - self.prefix.len();
        self.prefix.extend_from_slice(&start[..start.len().min(room)]);
        Ok(Some(bytes))
    }

    /// Discards the rest of the body after a complete answer.
    pub(super) async fn drain(mut self) {
        timeout(DRAIN_WITHIN, self.stream.chunk()).await.ok();
    }

    /// Classifies a failure to read an answer: returns `error`, or [`Error::Refused`] if the body is not an answer at
    /// all.
    pub(super) fn classify(&self, error: Error) -> Error {
        let status = self.stream.status;
        let kind = self.content_type();
        if self.prefix.is_empty() {
            // An event stream without events was interrupted, even if the server ended the body properly.
            if !self.ended || kind.as_deref() == Some("text/event-stream") {
                return error;
            }
            let kind = kind.map(|kind| format!(" ({kind})")).unwrap_or_default();
            return Error::refused(format!(
                "the model's server answered {status} with an empty body{kind}, not with an answer; check \
                 model.base_url"
            ));
        }
        if may_be_answer(&self.prefix) {
            return error;
        }
        let kind = kind.map_or_else(|| "without a content type".to_owned(), |kind| format!("with {kind}"));
        let begin = excerpt(&self.remote.redact(&printable(&self.prefix)));
        Error::refused(format!(
            "the model's server answered {status} {kind}, not with an answer (it begins `{begin}`); check \
             model.base_url"
        ))
    }

    /// Returns the content type without its parameters.
    fn content_type(&self) -> Option<String> {
        let kind = self.stream.content_type.as_deref()?.split(';').next()?.trim().to_ascii_lowercase();
        (!kind.is_empty()).then(|| excerpt(&printable(kind.as_bytes())))
    }
}

/// Returns true if a body may start with server-sent events or a JSON document.
fn may_be_answer(prefix: &[u8]) -> bool {
    let prefix = prefix.strip_prefix(sse::BOM).unwrap_or(prefix);
    let end = prefix.iter().position(|byte| matches!(byte, b':' | b'\r' | b'\n'));
    let field = &prefix[..end.unwrap_or(prefix.len())];
    match end {
        _ if prefix.starts_with(b"{") => true,
        Some(0) => true,
        Some(_) => FIELDS.iter().any(|name| name.as_bytes() == field),
        None => FIELDS.iter().any(|name| name.as_bytes().starts_with(field)),
    }
}

/// Returns the text on one line, without control characters.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let safe = |c: char| if c.is_ascii_graphic() || c.is_alphanumeric() || c == ' ' { c } else { '.' };
    words.collect::<Vec<_>>().join(" ").chars().map(safe).collect()
}

fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_documents_are_recognised() {
        let answers =
            ["{", "{\"error\": 1}", "d", "data", "data:", "data\n", "event: x\r\n", "id:", "r", ": wait"];
        for prefix in answers {
            assert!(may_be_answer(prefix.as_bytes()), "{prefix}");
        }
        assert!(may_be_answer(b"\xef\xbb\xbfdata: {}"));
        for prefix in ["<", "<!doctype html>", "datas", "database: down", "OK", "[", "not found\n", "\"x\""] {
            assert!(!may_be_answer(prefix.as_bytes()), "{prefix}");
        }
    }

    #[test]
    fn an_excerpt_is_printable_and_short() {
        assert_eq!(printable(b"<p>\r\n\t a\x1b[31m b\xff\xe2\x80\xae</p>"), "<p> a [31m b..</p>");
        assert_eq!(excerpt(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(excerpt(&"é".repeat(81)), format!("{}…", "é".repeat(80)));
    }
}
