//! A fake collector of traces: it takes OTLP over HTTP, and the test reads the spans.

use std::collections::BTreeMap;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1;
use prost::Message;

use crate::peer::Peer;

const PATH: &str = "/v1/traces";

/// A received span. Ids are in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    pub trace: String,
    pub id: String,
    /// Empty for the root of a trace.
    pub parent: String,
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    /// Trace and span of each link.
    pub links: Vec<(String, String)>,
    pub is_error: bool,
}

impl Span {
    fn of(span: v1::Span) -> Span {
        Span {
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            name: span.name,
            attributes: texts(span.attributes),
            links: span.links.iter().map(|link| (hex(&link.trace_id), hex(&link.span_id))).collect(),
            is_error: span.status.is_some_and(|status| status.code == 2),
        }
    }

    /// Value of the `traceparent` header of requests that belong to this span.
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.trace, self.id)
    }
}

pub struct Collector {
    peer: Peer,
    spans: Vec<Span>,
    /// Attributes of the program that sent the last spans.
    pub resource: BTreeMap<String, String>,
    /// Everything that was received.
    pub raw: Vec<u8>,
}

impl Collector {
    pub async fn start() -> Collector {
        let peer = Peer::start().await;
        Collector { peer, spans: Vec::new(), resource: BTreeMap::new(), raw: Vec::new() }
    }

    /// Section of the configuration.
    pub fn section(&self) -> String {
        format!("[telemetry]\notlp = \"{}\"", self.peer.url)
    }

    pub fn url(&self) -> &str {
        &self.peer.url
    }

    /// Waits for the first span of this name that was not taken yet, and takes it.
    pub async fn span(&mut self, name: &str) -> Span {
        loop {
            if let Some(at) = self.spans.iter().position(|span| span.name == name) {
                return self.spans.remove(at);
            }
            self.receive().await;
        }
    }

    async fn receive(&mut self) {
        let request = self.peer.next(PATH).await;
        assert_eq!(request.header("content-type"), Some("application/x-protobuf"));
        self.raw.extend_from_slice(&request.raw);
        let received = ExportTraceServiceRequest::decode(request.raw).unwrap();
        for part in received.resource_spans {
            self.resource = texts(part.resource.unwrap_or_default().attributes);
            let spans = part.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.extend(spans.map(Span::of));
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| {
        let text = match attribute.value.and_then(|value| value.value) {
            Some(Value::StringValue(text)) => text,
            Some(Value::IntValue(number)) => number.to_string(),
            other => format!("{other:?}"),
        };
        (attribute.key, text)
    };
    attributes.into_iter().map(text).collect()
}
