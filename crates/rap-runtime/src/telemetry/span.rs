//! A span in the JSON form of OTLP.

use std::time::SystemTime;

use rap_protocol::TraceContext;
use serde_json::{Value, json};

/// Maximum length of a name or a text attribute, in characters. Names of tools and agents may be long.
const TEXT_CHARS: usize = 256;
/// Status code of a span that has failed.
const ERROR: u8 = 2;

/// Role of a span, with its number in OTLP.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Internal = 1,
    Server = 2,
    Client = 3,
}

/// A span that has ended.
pub(super) struct Span {
    name: String,
    kind: Kind,
    context: TraceContext,
    parent: Option<[u8; 8]>,
    began: SystemTime,
    ended: SystemTime,
    attributes: Vec<(&'static str, Attribute)>,
    links: Vec<TraceContext>,
    failed: bool,
}

enum Attribute {
    Text(String),
    Number(i64),
}

impl Span {
    pub(super) fn new(
        name: &str,
        kind: Kind,
        context: TraceContext,
        parent: Option<[u8; 8]>,
        (began, ended): (SystemTime, SystemTime),
    ) -> Span {
        Span {
            name: cut(name),
            kind,
            context,
            parent,
            began,
            // The clock may have been set back.
            ended: ended.max(began),
            attributes: Vec::new(),
            links: Vec::new(),
            failed: false,
        }
    }

    pub(super) fn text(&mut self, key: &'static str, text: &str) {
        self.attributes.push((key, Attribute::Text(cut(text))));
    }

    pub(super) fn number(&mut self, key: &'static str, number: u64) {
        self.attributes.push((key, Attribute::Number(i64::try_from(number).unwrap_or(i64::MAX))));
    }

    pub(super) fn link(&mut self, to: TraceContext) {
        self.links.push(to);
    }

    /// Marks the span as failed, with a word for the kind of error.
    pub(super) fn error(&mut self, kind: &str) {
        self.text("error.type", kind);
        self.failed = true;
    }

    pub(super) fn to_json(&self) -> Value {
        let attributes = self.attributes.iter().map(|(key, value)| match value {
            Attribute::Text(text) => text_attribute(key, text),
            // OTLP writes 64-bit integers as text.
            Attribute::Number(number) => json!({"key": key, "value": {"intValue": number.to_string()}}),
        });
        let links = self.links.iter().map(
            |link| json!({"traceId": hex(&link.trace), "spanId": hex(&link.span), "flags": flags(*link)}),
        );
        let mut span = json!({
            "traceId": hex(&self.context.trace),
            "spanId": hex(&self.context.span),
            "flags": flags(self.context),
            "name": self.name,
            "kind": self.kind as u8,
            "startTimeUnixNano": nanos(self.began),
            "endTimeUnixNano": nanos(self.ended),
            "attributes": attributes.collect::<Vec<_>>(),
            "links": links.collect::<Vec<_>>(),
            "status": if self.failed { json!({"code": ERROR}) } else { json!({}) },
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = hex(&parent).into();
        }
        span
    }
}

pub(super) fn text_attribute(key: &str, text: &str) -> Value {
    json!({"key": key, "value": {"stringValue": text}})
}

fn flags(context: TraceContext) -> u8 {
    u8::from(context.sampled)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn cut(text: &str) -> String {
    text.char_indices().nth(TEXT_CHARS).map_or(text, |(end, _)| &text[..end]).to_owned()
}

fn nanos(at: SystemTime) -> String {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_span_has_the_json_form_of_otlp() {
        let context = TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
        let at = |nanos| SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos);
        let mut span = Span::new("chat gpt", Kind::Client, context, Some([1; 8]), (at(1_000), at(2_000)));
        span.text("gen_ai.request.model", "gpt");
        span.number("gen_ai.usage.input_tokens", u64::MAX);
        span.link(context);
        span.error("refused");
        let ids =
            json!({"traceId": "4bf92f3577b34da6a3ce929d0e0e4736", "spanId": "00f067aa0ba902b7", "flags": 1});
        let mut expected = json!({
            "parentSpanId": "0101010101010101",
            "name": "chat gpt",
            "kind": 3,
            "startTimeUnixNano": "1000",
            "endTimeUnixNano": "2000",
            "attributes": [
                {"key": "gen_ai.request.model", "value": {"stringValue": "gpt"}},
                {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "9223372036854775807"}},
                {"key": "error.type", "value": {"stringValue": "refused"}},
            ],
            "links": [ids],
            "status": {"code": 2},
        });
        for key in ["traceId", "spanId", "flags"] {
            expected[key] = ids[key].clone();
        }
        assert_eq!(span.to_json(), expected);
    }

    #[test]
    fn long_texts_are_cut_and_an_end_is_never_before_the_beginning() {
        let context = TraceContext { trace: [1; 16], span: [2; 8], sampled: true };
        let (later, now) = (SystemTime::UNIX_EPOCH + Duration::from_secs(9), SystemTime::UNIX_EPOCH);
        let mut span = Span::new(&"ä".repeat(300), Kind::Internal, context, None, (later, now));
        span.text("gen_ai.tool.name", &"x".repeat(5_000));
        let span = span.to_json();
        assert_eq!(span["name"], "ä".repeat(256));
        assert_eq!(span["attributes"][0]["value"]["stringValue"], "x".repeat(256));
        assert_eq!(span["startTimeUnixNano"], span["endTimeUnixNano"]);
        assert_eq!(span.get("parentSpanId"), None);
    }
}
