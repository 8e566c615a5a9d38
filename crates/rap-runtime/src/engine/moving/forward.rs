//! Forwards callbacks for threads that were moved to another runtime.
//!
//! Tools send the results and events of open calls to the URL that they were invoked with. The destination of a move has
//! the keys of this runtime, so the same token is valid there.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_io::webhook;
use url::Url;

use super::super::Engine;
use super::peer::ANSWER_BYTES;

/// Time limit of a callback that is passed on.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of destinations whose connections are kept open.
const DESTINATIONS: usize = 64;
/// Maximum number of runtimes that pass on one callback.
const HOPS: u32 = 16;
/// Number of runtimes that have passed a callback on.
const HOPS_HEADER: HeaderName = HeaderName::from_static("rap-forwarded");
/// Headers that are passed on: those of a signature, and the id of an event.
const PASSED_ON: [HeaderName; 4] =
    [webhook::ID, webhook::TIMESTAMP, webhook::SIGNATURE, HeaderName::from_static("idempotency-key")];

/// Clients for the destinations of callbacks, by base URL.
#[derive(Default)]
pub(crate) struct Forwarding(Mutex<HashMap<String, Client>>);

/// Answer of the runtime that has the thread of a callback.
pub(crate) enum Forwarded {
    /// It has accepted the callback.
    Accepted,
    /// It has refused the callback with this status.
    Refused(u16),
    /// It does not answer, or cannot accept the callback now.
    Unavailable(String),
}

impl Engine {
    /// Passes a callback on to the runtime that has its thread now.
    pub(crate) async fn forward_callback(
        &self,
        destination: &str,
        token: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Forwarded {
        let hops = headers.get(HOPS_HEADER).and_then(|value| value.to_str().ok()?.parse().ok()).unwrap_or(0);
        let url = Url::parse(destination).ok().filter(|_| hops < HOPS);
        let Some(mut url) = url else {
            return Forwarded::Unavailable("its destination is not known".into());
        };
        let client = self.forwarding_client(destination, &url);
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(["callback", token]);
        }
        let mut passed: Vec<(HeaderName, HeaderValue)> = PASSED_ON
            .into_iter()
            .filter_map(|name| Some((name.clone(), headers.get(&name)?.clone())))
            .collect();
        passed.push((HOPS_HEADER, HeaderValue::from(hops + 1)));
        match client.post_json(&url, &passed, body).await {
            Ok(reply) if (200..300).contains(&reply.status) => Forwarded::Accepted,
            Ok(reply) if (400..500).contains(&reply.status) && reply.status != 429 => {
                Forwarded::Refused(reply.status)
            }
            Ok(reply) => Forwarded::Unavailable(format!("it answered {}", reply.status)),
            Err(error) => Forwarded::Unavailable(error.to_string()),
        }
    }

    fn forwarding_client(&self, destination: &str, url: &Url) -> Client {
        let mut clients = self.forwarding.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(destination) {
            return client.clone();
        }
        if clients.len() >= DESTINATIONS {
            clients.clear();
        }
        let limits =
            ClientLimits { total: FORWARD_TIMEOUT, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        let client = Client::outgoing(self.settings.url_rules().configured(url), limits);
        clients.insert(destination.to_owned(), client.clone());
        client
    }
}
