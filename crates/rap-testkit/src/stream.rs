//! Reads the event stream of a thread.

use std::collections::VecDeque;

use rap_io::client::{Client as HttpClient, ClientLimits, Streaming};
use rap_io::sse::{Event, Parser};
use rap_protocol::UrlPolicy;
use serde_json::Value;

use crate::{Client, PATIENCE};

/// Larger than any event of these tests.
const EVENT_BYTES: usize = 64 * 1024 * 1024;

pub struct Stream {
    streaming: Streaming,
    parser: Parser,
    ready: VecDeque<Event>,
}

impl Stream {
    /// Opens a stream after an entry. `None` if nothing answers.
    pub async fn open(rap: &Client, path: &str, after: Option<u64>) -> Option<Stream> {
        let after = after.map(|after| after.to_string());
        let headers: Vec<_> = after.iter().map(|after| ("last-event-id", after.as_str())).collect();
        Stream::open_with(rap, path, &headers).await
    }

    /// Opens a stream with these headers.
    pub async fn open_with(rap: &Client, path: &str, headers: &[(&'static str, &str)]) -> Option<Stream> {
        let url = format!("{}{path}", rap.url).parse().unwrap();
        let header = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), http::HeaderValue::from_str(value).unwrap())
        };
        let headers: Vec<_> = headers.iter().map(header).collect();
        let client = HttpClient::new(UrlPolicy::Loopback, ClientLimits::default());
        let streaming = client.get_stream(&url, &headers).await.ok()?;
        assert_eq!(streaming.status, 200);
        Some(Stream { streaming, parser: Parser::new(EVENT_BYTES), ready: VecDeque::new() })
    }

    /// Opens the stream of a thread from its beginning.
    pub async fn of(rap: &Client, thread: &str) -> Stream {
        Stream::open(rap, &format!("/v1/threads/{thread}/events"), None).await.unwrap()
    }

    /// Returns the next event; `None` if the stream has ended or failed.
    pub async fn next(&mut self) -> Option<Event> {
        let next = async {
            loop {
                if let Some(event) = self.ready.pop_front() {
                    return Some(event);
                }
                let chunk = self.streaming.chunk().await.ok()??;
                self.ready.extend(self.parser.push(&chunk).into_iter().map(|event| event.unwrap()));
            }
        };
        tokio::time::timeout(PATIENCE, next).await.expect("no event in time")
    }

    /// Returns the data of the next event, which must have this name.
    pub async fn expect(&mut self, name: &str) -> Value {
        let event = self.next().await.unwrap_or_else(|| panic!("it ended before {name}"));
        assert_eq!(event.name, name, "{}", event.data);
        data(&event)
    }

    /// Skips events until one has this name. Returns its data.
    pub async fn until(&mut self, name: &str) -> Value {
        loop {
            let event = self.next().await.unwrap_or_else(|| panic!("it ended before {name}"));
            if event.name == name {
                return data(&event);
            }
        }
    }
}

pub fn data(event: &Event) -> Value {
    serde_json::from_str(&event.data).unwrap()
}
