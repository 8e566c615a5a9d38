//! Sends spans to the collector, several at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use prost::Message;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlRules;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::TelemetrySettings;
use super::span::{Span, attribute};

/// Maximum number of spans that wait to be sent. More are dropped.
const WAITING: usize = 4096;
/// Maximum number of spans in one request.
const BATCH: usize = 512;
/// Time for which spans are collected before they are sent.
const PAUSE: Duration = Duration::from_secs(1);
/// Time for a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the last request, when the runtime stops.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest pause after requests that failed. What does not fit into the queue meanwhile is dropped.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Sending end of the queue of spans.
pub(super) struct Queue {
    sender: mpsc::Sender<Span>,
    dropped: Arc<AtomicU64>,
}

/// Receiving end of the queue of spans.
pub(crate) struct Receiver {
    spans: mpsc::Receiver<Span>,
    dropped: Arc<AtomicU64>,
}

impl Queue {
    pub(super) fn new() -> (Queue, Receiver) {
        let (sender, spans) = mpsc::channel(WAITING);
        let dropped = Arc::new(AtomicU64::new(0));
        (Queue { sender, dropped: Arc::clone(&dropped) }, Receiver { spans, dropped })
    }

    /// Adds a span, unless the queue is full.
    pub(super) fn push(&self, span: Span) {
        if self.sender.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Sends the spans of a queue until the runtime stops.
pub(crate) async fn run(settings: TelemetrySettings, mut receiver: Receiver, stop: CancellationToken) {
    let limits = ClientLimits { total: TIMEOUT, idle_per_host: 1, ..ClientLimits::default() };
    // The operator has chosen the collector.
    let client = Client::new(UrlRules::unrestricted(), limits);
    let mut pause = PAUSE;
    while !stop.is_cancelled() {
        let mut batch = Vec::new();
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            received = receiver.spans.recv_many(&mut batch, BATCH) => {
                if received == 0 {
                    return;
                }
            }
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
        while batch.len() < BATCH
            && let Ok(span) = receiver.spans.try_recv()
        {
            batch.push(span);
        }
        let stopped = async {
            stop.cancelled().await;
            tokio::time::sleep(LAST_TIMEOUT).await;
        };
        let sent = tokio::select! {
            biased;
            sent = send(&client, &settings, batch) => sent,
            () = stopped => return,
        };
        match sent {
            Ok(()) => pause = PAUSE,
            Err(why) => {
                pause = (pause * 2).min(LONGEST_PAUSE);
                let dropped = receiver.dropped.swap(0, Ordering::Relaxed);
                tracing::warn!(why, dropped, "traces could not be sent to the collector");
            }
        }
    }
    let mut rest = Vec::new();
    while rest.len() < BATCH
        && let Ok(span) = receiver.spans.try_recv()
    {
        rest.push(span);
    }
    if !rest.is_empty() {
        // What is lost when the runtime stops is lost.
        tokio::time::timeout(LAST_TIMEOUT, send(&client, &settings, rest)).await.ok();
    }
}

async fn send(client: &Client, settings: &TelemetrySettings, spans: Vec<Span>) -> Result<(), String> {
    let mut headers = vec![(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"))];
    for (name, value) in &settings.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "a header is not valid")?;
        let value = HeaderValue::from_str(value.expose()).map_err(|_| "a header is not valid")?;
        headers.push((name, value));
    }
    let reply = client.post_json(&settings.url, &headers, body(settings, spans)).await;
    match reply {
        Ok(reply) if (200..300).contains(&reply.status) => Ok(()),
        Ok(reply) => Err(format!("the collector answered {}", reply.status)),
        Err(error) => Err(error.to_string()),
    }
}

fn body(settings: &TelemetrySettings, spans: Vec<Span>) -> Bytes {
    let text = |key, text: &str| attribute(key, Value::StringValue(text.to_owned()));
    let version = env!("CARGO_PKG_VERSION");
    let attributes = vec![text("service.name", &settings.service), text("service.version", version)];
    let scope = InstrumentationScope {
        name: "rap".into(),
        version: version.into(),
        ..InstrumentationScope::default()
    };
    let spans = spans.into_iter().map(Span::into_proto).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let resource = Some(Resource { attributes, ..Resource::default() });
    let resource_spans = vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }];
    ExportTraceServiceRequest { resource_spans }.encode_to_vec().into()
}
