//! Reads the body of a response: an event stream, or a single document from a server that does not stream.
//!
//! A body that ends early is an error, unless the answer is already complete. The last event is read even if the empty
//! line after it is missing: an event that was cut is not valid JSON, so it is never taken for a whole one.

use rap_io::hashing::in_place;
use rap_io::sse;
use rap_protocol::check_json;
use tokio::time::{Duration, timeout};

use super::memory::MAX_ANSWER;
use super::remote::{EVENT_BYTES, incomplete_answer};
use super::reply::Reply;
use super::{Error, OnDelta, Usage};

/// Time limit for the rest of the body after a complete answer, such as its usage.
const REST_WITHIN: Duration = Duration::from_secs(5);

/// Maximum memory of the parsed form of an event, of a document or of the arguments of all calls, besides the texts, in
/// bytes.
pub(super) const PARSED_BYTES: usize = 32 * 1024 * 1024;

/// An answer that is assembled from the body of a response.
pub(super) trait Assembly {
    /// Adds the data of one event.
    fn push_event(&mut self, data: &str, on_delta: &mut OnDelta<'_>) -> Result<(), Error>;

    /// Adds an answer that came as one document. It is complete if it can be parsed.
    fn push_document(&mut self, document: &[u8], on_delta: &mut OnDelta<'_>) -> Result<(), Error>;

    /// Returns true if nothing else is expected.
    fn is_done(&self) -> bool;

    /// Returns the tokens that the server has counted so far.
    fn usage(&self) -> Usage;

    /// Returns true if the server has ended the answer. More about it, such as its usage, may follow.
    fn is_complete(&self) -> bool;

    /// Returns the memory of what has been received, in bytes.
    fn bytes(&self) -> usize;

    /// Returns the texts of the arguments of its calls.
    fn arguments(&self) -> impl Iterator<Item = &str>;
}

/// Reads a body until the answer is complete. Records the tokens that the server has counted so far.
pub(super) async fn read(
    mut reply: Reply<'_>,
    assembly: &mut impl Assembly,
    on_delta: &mut OnDelta<'_>,
) -> Result<(), Error> {
    let read = match read_whole(&mut reply, assembly, on_delta).await {
        Ok(()) => hold(&reply, assembly.bytes() + parsed_bytes(assembly)).await,
        failed => failed,
    };
    if let Err(error) = read {
        reply.note_spent(assembly.usage());
        return Err(reply.classify(error));
    }
    reply.drain().await;
    Ok(())
}

async fn read_whole(
    reply: &mut Reply<'_>,
    assembly: &mut impl Assembly,
    on_delta: &mut OnDelta<'_>,
) -> Result<(), Error> {
    let mut format = Format::Unknown;
    while !assembly.is_done() {
        let next = if assembly.is_complete() {
            timeout(REST_WITHIN, reply.chunk()).await.unwrap_or(Ok(None))
        } else {
            reply.chunk().await
        };
        let error = match next {
            Ok(Some(bytes)) => {
                let pushed = format.push(&bytes, assembly, on_delta);
                reply.note_spent(assembly.usage());
                pushed?;
                hold(reply, assembly.bytes() + format.bytes()).await?;
                continue;
            }
            Ok(None) => incomplete_answer(),
            Err(error) => error,
        };
        let ended = format.end(assembly, on_delta);
        return match ended {
            _ if assembly.is_complete() => Ok(()),
            Err(failure @ (Error::TooLong { .. } | Error::Refused { .. })) => Err(failure),
            _ => Err(error),
        };
    }
    Ok(())
}

/// Assembles an answer from a body that arrives in two parts.
#[cfg(test)]
pub(super) fn assemble(begin: &[u8], end: &[u8], assembly: &mut impl Assembly) -> Result<(), Error> {
    let mut format = Format::Unknown;
    for part in [begin, end] {
        if !assembly.is_done() {
            format.push(part, assembly, &mut |_| {})?;
        }
    }
    if !assembly.is_done() {
        format.end(assembly, &mut |_| {})?;
    }
    if assembly.is_complete() { Ok(()) } else { Err(incomplete_answer()) }
}

/// Waits until an answer may use this much memory.
async fn hold(reply: &Reply<'_>, bytes: usize) -> Result<(), Error> {
    if bytes > MAX_ANSWER {
        return Err(Error::retry(format!("the model's answer needs more than {MAX_ANSWER} bytes of memory")));
    }
    reply.memory().hold(bytes).await;
    Ok(())
}

/// Returns the memory that the arguments of all calls will need when they are parsed, in bytes.
fn parsed_bytes(assembly: &impl Assembly) -> usize {
    let parsed = |text: &str| text.len() + check_json(text.as_bytes(), PARSED_BYTES).unwrap_or(0);
    in_place(assembly.bytes(), || assembly.arguments().map(parsed).sum::<usize>().min(PARSED_BYTES))
}

enum Format {
    Unknown,
    Events(sse::Parser),
    Document(Vec<u8>),
}

impl Format {
    fn push(
        &mut self,
        mut bytes: &[u8],
        assembly: &mut impl Assembly,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<(), Error> {
        if matches!(self, Format::Unknown) {
            bytes = bytes.trim_ascii_start();
            match bytes.first() {
                None => return Ok(()),
                Some(b'{') => *self = Format::Document(Vec::new()),
                Some(_) => *self = Format::Events(sse::Parser::new(EVENT_BYTES)),
            }
        }
        match self {
            Format::Unknown => {}
            Format::Document(document) => document.extend_from_slice(bytes),
            Format::Events(parser) => {
                for event in parser.push(bytes) {
                    if assembly.is_done() {
                        break;
                    }
                    let event = event.map_err(|error| Error::retry(error.to_string()))?;
                    in_place(event.data.len(), || {
                        check_size(event.data.as_bytes())?;
                        assembly.push_event(&event.data, on_delta)
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Returns the size of what is kept until more arrives, in bytes.
    fn bytes(&self) -> usize {
        match self {
            Format::Unknown => 0,
            Format::Events(parser) => parser.buffered(),
            Format::Document(document) => document.len(),
        }
    }

    /// Adds the end of the body: a document, or an event without the empty line after it.
    fn end(self, assembly: &mut impl Assembly, on_delta: &mut OnDelta<'_>) -> Result<(), Error> {
        match self {
            Format::Unknown => Ok(()),
            Format::Document(document) => in_place(document.len(), || {
                check_size(&document)?;
                assembly.push_document(&document, on_delta)
            }),
            Format::Events(parser) => match parser.finish() {
                Some(event) => {
                    check_size(event.data.as_bytes())?;
                    assembly.push_event(&event.data, on_delta)
                }
                None => Ok(()),
            },
        }
    }
}

/// Refuses JSON whose parsed form would need too much memory, before it is parsed.
fn check_size(json: &[u8]) -> Result<(), Error> {
    let checked = check_json(json, PARSED_BYTES);
    checked.map(drop).map_err(|invalid| Error::retry(format!("the model's answer is too large: {invalid}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_needs_too_much_memory_is_not_parsed() {
        let event = format!("{{\"choices\": [{}0]}}", "{\"a\":0},".repeat(100_000));
        let refused = check_size(event.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains("the model's answer is too large"), "{refused}");
        assert!(check_size(b"{\"choices\": [{\"delta\": {}}]}").is_ok());
    }
}
