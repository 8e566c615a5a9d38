//! A span in the form in which collectors receive it.

use std::time::SystemTime;

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::{Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{self, Status};
use rap_protocol::TraceContext;

/// Maximum length of a name or a text attribute, in characters. Names of tools and agents may be long.
const TEXT_CHARS: usize = 256;

#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Internal,
    Server,
    Client,
}

/// A span that has ended.
pub(super) struct Span(v1::Span);

impl Span {
    pub(super) fn new(
        name: String,
        kind: Kind,
        context: TraceContext,
        parent: Option<[u8; 8]>,
        (began, ended): (SystemTime, SystemTime),
    ) -> Span {
        let kind = match kind {
            Kind::Internal => SpanKind::Internal,
            Kind::Server => SpanKind::Server,
            Kind::Client => SpanKind::Client,
        };
        let began = nanos(began);
        Span(v1::Span {
            trace_id: context.trace.to_vec(),
            span_id: context.span.to_vec(),
            parent_span_id: parent.map(|parent| parent.to_vec()).unwrap_or_default(),
            flags: u32::from(context.sampled),
            name: cut(&name),
            kind: kind.into(),
            start_time_unix_nano: began,
            // The clock may have been set back.
            end_time_unix_nano: nanos(ended).max(began),
            ..v1::Span::default()
        })
    }

    pub(super) fn text(&mut self, key: &str, text: &str) {
        self.0.attributes.push(attribute(key, Value::StringValue(cut(text))));
    }

    pub(super) fn number(&mut self, key: &str, number: i64) {
        self.0.attributes.push(attribute(key, Value::IntValue(number)));
    }

    pub(super) fn link(&mut self, to: TraceContext) {
        let (trace_id, span_id) = (to.trace.to_vec(), to.span.to_vec());
        self.0.links.push(Link { trace_id, span_id, flags: u32::from(to.sampled), ..Link::default() });
    }

    /// Marks the span as failed, with a word for the kind of error.
    pub(super) fn error(&mut self, kind: &str) {
        self.text("error.type", kind);
        self.0.status = Some(Status { message: String::new(), code: StatusCode::Error.into() });
    }

    pub(super) fn into_proto(self) -> v1::Span {
        self.0
    }
}

pub(super) fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_CHARS).collect()
}

fn nanos(at: SystemTime) -> u64 {
    let since_epoch = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
}
