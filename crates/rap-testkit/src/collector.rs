//! A fake collector of traces: it takes OTLP over HTTP, and the test reads the spans.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::peer::{Peer, Reply};

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
    fn of(span: &Value) -> Span {
        let ids = |of: &Value| (text(&of["traceId"]), text(&of["spanId"]));
        let (trace, id) = ids(span);
        assert_eq!((trace.len(), id.len()), (32, 16), "{span}");
        let nanos = |key: &str| text(&span[key]).parse::<u64>().unwrap();
        assert!(nanos("startTimeUnixNano") <= nanos("endTimeUnixNano"), "{span}");
        Span {
            trace,
            id,
            parent: text(&span["parentSpanId"]),
            name: text(&span["name"]),
            attributes: attributes(&span["attributes"]),
            links: span["links"].as_array().into_iter().flatten().map(ids).collect(),
            is_error: span["status"]["code"] == 2,
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
    pub raw: String,
    /// Authorization header of the last request.
    pub authorization: Option<String>,
}

impl Collector {
    pub async fn start() -> Collector {
        Collector {
            peer: Peer::start().await,
            spans: Vec::new(),
            resource: BTreeMap::new(),
            raw: String::new(),
            authorization: None,
        }
    }

    /// Section of the configuration.
    pub fn section(&self) -> String {
        format!("[telemetry]\notlp_endpoint = \"{}\"", self.peer.url)
    }

    pub fn url(&self) -> &str {
        &self.peer.url
    }

    /// Accepts requests but never answers them.
    pub fn hang(&self) {
        self.peer.answer_always(PATH, Reply::Hang);
    }

    /// Number of requests so far.
    pub fn requests(&self) -> usize {
        self.peer.count(PATH)
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

    /// Waits for a request with spans.
    pub async fn receive(&mut self) {
        let request = self.peer.next(PATH).await;
        assert_eq!(request.header("content-type"), Some("application/json"));
        self.authorization = request.header("authorization").map(str::to_owned);
        self.raw.push_str(std::str::from_utf8(&request.raw).unwrap());
        for part in request.body["resourceSpans"].as_array().unwrap() {
            self.resource = attributes(&part["resource"]["attributes"]);
            let scopes = part["scopeSpans"].as_array().unwrap().iter();
            let spans = scopes.flat_map(|scope| scope["spans"].as_array().unwrap());
            self.spans.extend(spans.map(Span::of));
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn attributes(list: &Value) -> BTreeMap<String, String> {
    let attribute = |attribute: &Value| {
        let values = attribute["value"].as_object().unwrap();
        (text(&attribute["key"]), values.values().map(text).collect())
    };
    list.as_array().into_iter().flatten().map(attribute).collect()
}
