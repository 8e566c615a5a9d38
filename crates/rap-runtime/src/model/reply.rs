//! The body of a model server's answer while it comes, and what it is if it turns out to be no answer at all.
//!
//! A wrong `base_url` often leads to a web page or to nothing, with status 200. That is a mistake in the configuration,
//! which asking again does not mend. A stream that began as one and was cut is not: it is asked for again.

use bytes::Bytes;
use rap_io::client::Streaming;
use rap_io::sse;
use tokio::time::{Duration, timeout};

use super::Error;
use super::remote::{Remote, failed};

/// The largest answer, in bytes as they come over the wire.
const ANSWER_BYTES: usize = 16 * 1024 * 1024;
/// Number of bytes that are kept of the begin of a body.
const OPENING_BYTES: usize = 1024;
/// Number of characters of a body or of its content type that an error shows.
const SHOWN_CHARS: usize = 80;
/// Names of the fields of server-sent events.
const FIELDS: [&str; 4] = ["data", "event", "id", "retry"];
/// How long the end of a stream is waited for behind a whole answer, so that its connection can be used again.
const LINGER: Duration = Duration::from_millis(100);

/// The body of an answer whose status says success.
pub(super) struct Reply<'a> {
    remote: &'a Remote,
    stream: Streaming,
    /// The first bytes, without white space before them.
    opening: Vec<u8>,
    bytes: usize,
    /// Whether the server said that this was all.
    ended: bool,
}

impl<'a> Reply<'a> {
    pub(super) fn new(remote: &'a Remote, stream: Streaming) -> Self {
        Reply { remote, stream, opening: Vec::new(), bytes: 0, ended: false }
    }

    /// The next piece of the body; nothing at its end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(bytes) = self.stream.chunk().await.map_err(failed)? else {
            self.ended = true;
            return Ok(None);
        };
        self.bytes += bytes.len();
        if self.bytes > ANSWER_BYTES {
            return Err(Error::retry(format!("the model's answer has more than {ANSWER_BYTES} bytes")));
        }
        let start = if self.opening.is_empty() { bytes.trim_ascii_start() } else { &bytes };
        let room = OPENING_BYTES - self.opening.len();
        self.opening.extend_from_slice(&start[..start.len().min(room)]);
        Ok(Some(bytes))
    }

    /// Whatever comes behind a whole answer changes nothing.
    pub(super) async fn linger(mut self) {
        timeout(LINGER, self.stream.chunk()).await.ok();
    }

    /// The reason why the body could not be read to the end of an answer: `error`, or that it is none.
    pub(super) fn judge(&self, error: Error) -> Error {
        let status = self.stream.status;
        let kind = self.content_type();
        if self.opening.is_empty() {
            // Without any event, a server that speaks of events was cut, even if it ended its answer well.
            if !self.ended || kind.as_deref() == Some("text/event-stream") {
                return error;
            }
            let kind = kind.map(|kind| format!(" ({kind})")).unwrap_or_default();
            return Error::refused(format!(
                "the model's server answered {status} with an empty body{kind}, not with an answer; check \
                 model.base_url"
            ));
        }
        if is_begin_of_answer(&self.opening) {
            return error;
        }
        let kind = kind.map_or_else(|| "without a content type".to_owned(), |kind| format!("with {kind}"));
        let begin = shown(&self.remote.without_key(&printable(&self.opening)));
        Error::refused(format!(
            "the model's server answered {status} {kind}, not with an answer (it begins `{begin}`); check \
             model.base_url"
        ))
    }

    /// The content type without its parameters.
    fn content_type(&self) -> Option<String> {
        let kind = self.stream.content_type.as_deref()?.split(';').next()?.trim().to_ascii_lowercase();
        (!kind.is_empty()).then(|| shown(&printable(kind.as_bytes())))
    }
}

/// Whether a body can be the begin of server-sent events or of a JSON document, as far as it came.
fn is_begin_of_answer(opening: &[u8]) -> bool {
    let opening = opening.strip_prefix(sse::BOM).unwrap_or(opening);
    let end = opening.iter().position(|byte| matches!(byte, b':' | b'\r' | b'\n'));
    let field = &opening[..end.unwrap_or(opening.len())];
    match end {
        _ if opening.starts_with(b"{") => true,
        Some(0) => true,
        Some(_) => FIELDS.iter().any(|name| name.as_bytes() == field),
        None => FIELDS.iter().any(|name| name.as_bytes().starts_with(field)),
    }
}

/// A text on one line, without characters that do something to a terminal.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let safe = |c: char| if c.is_ascii_graphic() || c.is_alphanumeric() || c == ' ' { c } else { '.' };
    words.collect::<Vec<_>>().join(" ").chars().map(safe).collect()
}

fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_documents_are_told_from_anything_else() {
        let answers =
            ["{", "{\"error\": 1}", "d", "data", "data:", "data\n", "event: x\r\n", "id:", "r", ": wait"];
        for opening in answers {
            assert!(is_begin_of_answer(opening.as_bytes()), "{opening}");
        }
        assert!(is_begin_of_answer(b"\xef\xbb\xbfdata: {}"));
        for opening in ["<", "<!doctype html>", "datas", "database: down", "OK", "[", "not found\n", "\"x\""]
        {
            assert!(!is_begin_of_answer(opening.as_bytes()), "{opening}");
        }
    }

    #[test]
    fn what_is_shown_is_printable_and_short() {
        assert_eq!(printable(b"<p>\r\n\t a\x1b[31m b\xff\xe2\x80\xae</p>"), "<p> a [31m b..</p>");
        assert_eq!(shown(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(shown(&"é".repeat(81)), format!("{}…", "é".repeat(80)));
    }
}
