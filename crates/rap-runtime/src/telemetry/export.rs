//! Sends spans to a collector as OTLP over HTTP, in batches from a bounded queue.
//!
//! Nothing waits for the collector: a span that finds the queue full is dropped, a batch that could not be sent is
//! dropped, and both are counted.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_io::metrics::{Counter, Exposition};
use rap_protocol::UrlRules;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::TelemetrySettings;
use super::span::{Span, text_attribute};

/// Maximum number of spans that wait to be sent. More are dropped.
const WAITING: usize = 4096;
/// Maximum number of spans in one request.
const BATCH: usize = 512;
/// Time for which spans are collected before they are sent.
const PAUSE: Duration = Duration::from_secs(1);
/// Time for a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the last requests, when the runtime stops.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest pause after requests that failed. What does not fit into the queue meanwhile is dropped.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Numbers of spans.
#[derive(Default)]
pub(super) struct Counts {
    sent: Counter,
    dropped: Counter,
}

impl Counts {
    pub(super) fn expose(&self, text: &mut Exposition) {
        let help = "Spans of traces that the collector accepted, and that were dropped because it did not or was too slow.";
        let samples = [("outcome=\"sent\"", self.sent.get()), ("outcome=\"dropped\"", self.dropped.get())];
        text.family("rap_trace_spans_total", "counter", help, samples);
    }
}

/// Sending end of the queue of spans.
pub(super) struct Queue {
    sender: mpsc::Sender<Span>,
    pub(super) counts: Arc<Counts>,
}

/// Receiving end of the queue of spans.
pub(crate) struct Exporter {
    settings: TelemetrySettings,
    spans: mpsc::Receiver<Span>,
    counts: Arc<Counts>,
    client: Client,
}

impl Queue {
    pub(super) fn new(settings: TelemetrySettings) -> (Queue, Exporter) {
        let (sender, spans) = mpsc::channel(WAITING);
        let counts = Arc::new(Counts::default());
        let limits = ClientLimits { total: TIMEOUT, idle_per_host: 1, ..ClientLimits::default() };
        // The operator has chosen the collector.
        let client = Client::new(UrlRules::unrestricted(), limits);
        (Queue { sender, counts: Arc::clone(&counts) }, Exporter { settings, spans, counts, client })
    }

    /// Adds a span, unless the queue is full.
    pub(super) fn push(&self, span: Span) {
        if self.sender.try_send(span).is_err() {
            self.counts.dropped.count();
        }
    }
}

impl Exporter {
    /// Sends spans until the runtime stops, and then those that wait, if the collector answers.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut pause = PAUSE;
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                span = self.spans.recv() => match span {
                    Some(span) => batch.push(span),
                    None => return,
                }
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            }
            self.fill(&mut batch);
            let too_late = async {
                stop.cancelled().await;
                tokio::time::sleep(LAST_TIMEOUT).await;
            };
            let sent = tokio::select! {
                biased;
                sent = self.send(std::mem::take(&mut batch)) => sent,
                () = too_late => return,
            };
            pause = if sent { PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
        }
        if pause == PAUSE {
            tokio::time::timeout(LAST_TIMEOUT, self.send_rest(batch)).await.ok();
        }
    }

    async fn send_rest(&mut self, mut batch: Vec<Span>) {
        loop {
            self.fill(&mut batch);
            if batch.is_empty() || !self.send(std::mem::take(&mut batch)).await {
                return;
            }
        }
    }

    pub(super) fn fill(&mut self, batch: &mut Vec<Span>) {
        while batch.len() < BATCH
            && let Ok(span) = self.spans.try_recv()
        {
            batch.push(span);
        }
    }

    /// Sends a batch. Returns true if the collector accepted it.
    async fn send(&self, spans: Vec<Span>) -> bool {
        let count = spans.len() as u64;
        let body = body(&self.settings.service, &spans);
        drop(spans);
        let refused = match self.post(body).await {
            Ok(200..300) => {
                self.counts.sent.add(count);
                return true;
            }
            Ok(status) => format!("it answered {status}"),
            Err(why) => why,
        };
        self.counts.dropped.add(count);
        tracing::warn!(why = refused, dropped = count, "the collector of traces did not accept spans");
        false
    }

    async fn post(&self, body: Bytes) -> Result<u16, String> {
        let header = |(name, value): &(String, rap_protocol::Secret)| {
            let value = HeaderValue::from_str(value.expose()).ok()?;
            Some((HeaderName::from_bytes(name.as_bytes()).ok()?, value))
        };
        let headers: Option<Vec<_>> = self.settings.headers.iter().map(header).collect();
        let headers = headers.ok_or("a configured header is not valid")?;
        let reply = self.client.post_json(&self.settings.url, &headers, body).await;
        reply.map(|reply| reply.status).map_err(|error| error.to_string())
    }
}

fn body(service: &str, spans: &[Span]) -> Bytes {
    let version = env!("CARGO_PKG_VERSION");
    let resource = [text_attribute("service.name", service), text_attribute("service.version", version)];
    let spans: Vec<_> = spans.iter().map(Span::to_json).collect();
    let scope = json!({"name": "rap", "version": version});
    let request = json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{"scope": scope, "spans": spans}],
    }]});
    request.to_string().into()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use rap_protocol::TraceContext;
    use url::Url;

    use super::super::span::Kind;
    use super::*;

    #[tokio::test]
    async fn a_full_queue_drops_spans_and_counts_them() {
        let url = Url::parse("http://127.0.0.1:9/v1/traces").unwrap();
        let settings = TelemetrySettings { url, headers: Vec::new(), service: "rap".into() };
        let (queue, mut exporter) = Queue::new(settings);
        let context = TraceContext { trace: [1; 16], span: [2; 8], sampled: true };
        for _ in 0..WAITING + 3 {
            let now = SystemTime::now();
            queue.push(Span::new("chat", Kind::Client, context, None, (now, now)));
        }
        assert_eq!(queue.counts.dropped.get(), 3);
        let mut batch = Vec::new();
        exporter.fill(&mut batch);
        assert_eq!(batch.len(), BATCH);
        // Nobody listens there.
        assert!(!exporter.send(batch).await);
        assert_eq!((queue.counts.sent.get(), queue.counts.dropped.get()), (0, 3 + BATCH as u64));
    }
}
