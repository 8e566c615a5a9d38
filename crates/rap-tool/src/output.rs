//! Return types of handlers.

use rap_protocol::{
    Body, CallId, Callback, Content, Invalid, Segment, ThreadId, ToolResult, limits, parse_callback,
};
use serde::Serialize;

use crate::error::Error;
use crate::rules::Returned;
use crate::scrub::{Scrub, Scrubber};

/// The result of a call: content for the model and, optionally, other content to display to people.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    body: Body,
    display_as: Vec<Segment>,
}

impl Output {
    /// Creates a result of plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Output { body: Body::Text(text.into()), display_as: Vec::new() }
    }

    /// Creates a result of several content items, such as texts and images.
    pub fn content(items: Vec<Content>) -> Self {
        Output { body: Body::Content(items), display_as: Vec::new() }
    }

    /// Adds a representation for people. A client shows the first one that it supports.
    #[must_use]
    pub fn display(mut self, segment: Segment) -> Self {
        self.display_as.push(segment);
        self
    }

    /// Converts the result. A result that every runtime would refuse becomes an error that says so.
    pub(crate) fn into_returned(self) -> Returned {
        let Output { body, display_as } = self;
        let bytes = json_len(&body) + json_len(&display_as);
        if bytes + ENVELOPE_BYTES > limits::BODY_BYTES {
            let most = limits::BODY_BYTES / (1024 * 1024);
            return Returned::Error(format!(
                "the result is too large: {bytes} bytes; at most {most} MiB are allowed"
            ));
        }
        match validation_error(&body, &display_as) {
            Some(invalid) => Returned::Error(format!("the tool returned an invalid result: {invalid}")),
            None => Returned::Result { body, display_as },
        }
    }
}

impl Scrub for Output {
    fn size(&self) -> usize {
        let text = |text: &String| text.len();
        let body = match &self.body {
            Body::Text(body) => body.len(),
            Body::Content(items) => items.iter().map(|item| content_text(item).map_or(0, text)).sum(),
        };
        let segment = |segment: &Segment| match segment {
            Segment::Text(content) => content.len(),
            Segment::Diff { path, patch } => path.len() + patch.len(),
            Segment::Image(_) => 0,
        };
        body + self.display_as.iter().map(segment).sum::<usize>()
    }

    /// Images stay as they are.
    fn scrubbed(self, scrubber: &Scrubber) -> Self {
        let item = |item| match item {
            Content::Text { text } => Content::Text { text: text.scrubbed(scrubber) },
            image @ Content::Image(_) => image,
        };
        let segment = |segment| match segment {
            Segment::Text(text) => Segment::Text(text.scrubbed(scrubber)),
            Segment::Diff { path, patch } => {
                Segment::Diff { path: path.scrubbed(scrubber), patch: patch.scrubbed(scrubber) }
            }
            image @ Segment::Image(_) => image,
        };
        let body = match self.body {
            Body::Text(text) => Body::Text(text.scrubbed(scrubber)),
            Body::Content(items) => Body::Content(items.into_iter().map(item).collect()),
        };
        Output { body, display_as: self.display_as.into_iter().map(segment).collect() }
    }
}

fn content_text(item: &Content) -> Option<&String> {
    match item {
        Content::Text { text } => Some(text),
        Content::Image(_) => None,
    }
}

/// Returns why a runtime would refuse the result. A plain text is always valid.
fn validation_error(body: &Body, display_as: &[Segment]) -> Option<Invalid> {
    if matches!(body, Body::Text(_)) && display_as.is_empty() {
        return None;
    }
    let result = ToolResult {
        group_id: ThreadId::new("t").expect("bug: a valid id"),
        id: CallId::new("c").expect("bug: a valid id"),
        call_id: None,
        body: body.clone(),
        display_as: display_as.to_vec(),
        subscription: false,
    };
    let bytes = serde_json::to_vec(&Callback::ToolResult(result)).expect("bug: a result is JSON");
    parse_callback(&bytes).err()
}

/// Bytes reserved for the field names and ids around a result or an event.
pub(crate) const ENVELOPE_BYTES: usize = 4 * 1024;

/// Returns the length of a value as JSON, in bytes.
pub(crate) fn json_len<T: Serialize>(value: &T) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("bug: counting cannot fail");
    counter.0
}

/// Returns a serialisable value as JSON text.
#[derive(Debug, Clone, Copy)]
pub struct Json<T>(pub T);

/// Types that a handler can return.
#[diagnostic::on_unimplemented(
    message = "a tool cannot return `{Self}`",
    label = "this type cannot be converted to a tool result",
    note = "return a `String`, `Json(value)` for anything serialisable, `Vec<Content>`, or an `Output`"
)]
pub trait IntoOutput {
    /// Converts the value to a result.
    fn into_output(self) -> Result<Output, Error>;
}

impl IntoOutput for Output {
    fn into_output(self) -> Result<Output, Error> {
        Ok(self)
    }
}

impl IntoOutput for String {
    fn into_output(self) -> Result<Output, Error> {
        Ok(Output::text(self))
    }
}

impl IntoOutput for &str {
    fn into_output(self) -> Result<Output, Error> {
        Ok(Output::text(self))
    }
}

impl IntoOutput for Vec<Content> {
    fn into_output(self) -> Result<Output, Error> {
        Ok(Output::content(self))
    }
}

impl<T: Serialize> IntoOutput for Json<T> {
    fn into_output(self) -> Result<Output, Error> {
        Ok(Output::text(serde_json::to_string(&self.0)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_too_large_becomes_an_error() {
        let fits = Output::text("x".repeat(limits::BODY_BYTES - ENVELOPE_BYTES - 32)).into_returned();
        assert!(matches!(fits, Returned::Result { .. }));
        // A control character takes six bytes of JSON.
        let grows = Output::text("\u{1}".repeat(limits::BODY_BYTES / 6)).into_returned();
        assert!(matches!(grows, Returned::Error(message) if message.starts_with("the result is too large")));
    }

    #[test]
    fn json_is_returned_as_text() {
        assert_eq!(Json([1, 2]).into_output().unwrap(), Output::text("[1,2]"));
    }
}
