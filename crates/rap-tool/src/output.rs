//! What a handler may return.

use rap_protocol::{
    Body, CallId, Callback, Content, Invalid, Segment, ThreadId, ToolResult, limits, parse_callback,
};
use serde::Serialize;

use crate::error::Error;
use crate::rules::Returned;

/// The result of a call: what the model sees, and what people see instead.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    body: Body,
    display_as: Vec<Segment>,
}

impl Output {
    /// A plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Output { body: Body::Text(text.into()), display_as: Vec::new() }
    }

    /// Several items, images among them.
    pub fn content(items: Vec<Content>) -> Self {
        Output { body: Body::Content(items), display_as: Vec::new() }
    }

    /// Adds a way to show it to people; the first that their client can show is shown.
    #[must_use]
    pub fn display(mut self, segment: Segment) -> Self {
        self.display_as.push(segment);
        self
    }

    /// A result that no runtime could take becomes an error that says so.
    pub(crate) fn into_returned(self) -> Returned {
        let Output { body, display_as } = self;
        let bytes = counted(&body) + counted(&display_as);
        if bytes + ENVELOPE_BYTES > limits::BODY_BYTES {
            let most = limits::BODY_BYTES / (1024 * 1024);
            return Returned::Error(format!(
                "the result is too large: {bytes} bytes, where {most} MiB are allowed"
            ));
        }
        match refused(&body, &display_as) {
            Some(invalid) => Returned::Error(format!("the tool made a result that is not valid: {invalid}")),
            None => Returned::Result { body, display_as },
        }
    }
}

/// Why a runtime would not take it. A text alone is always taken.
fn refused(body: &Body, display_as: &[Segment]) -> Option<Invalid> {
    if matches!(body, Body::Text(_)) && display_as.is_empty() {
        return None;
    }
    let result = ToolResult {
        group_id: ThreadId::new("t").expect("bug: an id"),
        id: CallId::new("c").expect("bug: an id"),
        call_id: None,
        body: body.clone(),
        display_as: display_as.to_vec(),
        subscription: false,
    };
    let bytes = serde_json::to_vec(&Callback::ToolResult(result)).expect("bug: a result is JSON");
    parse_callback(&bytes).err()
}

/// Room for the names and ids around a result or an event.
pub(crate) const ENVELOPE_BYTES: usize = 4 * 1024;

/// How many bytes a value takes as JSON.
pub(crate) fn counted<T: Serialize>(value: &T) -> usize {
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
    serde_json::to_writer(&mut counter, value).expect("bug: counting can not fail");
    counter.0
}

/// Anything serialisable, as JSON text.
#[derive(Debug, Clone, Copy)]
pub struct Json<T>(pub T);

/// What can be the result of a call.
#[diagnostic::on_unimplemented(
    message = "a tool can not return `{Self}`",
    label = "this is not something a model can be given",
    note = "return a `String`, `Json(value)` for anything serialisable, `Vec<Content>`, or an `Output`"
)]
pub trait IntoOutput {
    /// Turns it into a result.
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
    fn what_is_too_large_for_any_runtime_becomes_an_error() {
        let fits = Output::text("x".repeat(limits::BODY_BYTES - ENVELOPE_BYTES - 32)).into_returned();
        assert!(matches!(fits, Returned::Result { .. }));
        // A control character takes six bytes of JSON.
        let grows = Output::text("\u{1}".repeat(limits::BODY_BYTES / 6)).into_returned();
        assert!(matches!(grows, Returned::Error(message) if message.starts_with("the result is too large")));
    }

    #[test]
    fn json_is_given_as_text() {
        assert_eq!(Json([1, 2]).into_output().unwrap(), Output::text("[1,2]"));
    }
}
