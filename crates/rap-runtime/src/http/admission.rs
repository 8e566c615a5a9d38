//! Bounds what one client or callback URL can use at the same time, so that none can starve the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, StatusCode};
use http_body::{Frame, SizeHint};
use rap_io::body::{BodyError, BodyLimits, BodyMemory, ReceivedBody};
use rap_protocol::CallId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::ErrorResponse;
use crate::memory::{Grant, Memory, NoMemory, Share, Shares};
use crate::settings::Limits;
use crate::store::transfer::RECORD_BYTES;
use crate::store::{Client, ThreadKey};

/// Maximum number of concurrent requests with one callback URL.
const REQUESTS_PER_CALLBACK_URL: usize = 16;
/// Maximum number of keys whose rate is remembered.
const RATES: usize = 16_384;
/// Maximum number of event streams of a client.
const STREAMS_PER_CLIENT: usize = 256;
/// Maximum number of requests that read from the store at the same time, in total and for one client. Further ones
/// wait.
const READERS: usize = 16;
const READERS_PER_CLIENT: usize = 4;
/// Maximum number of large pages that are read and encoded at the same time, in total. It is less than the number of
/// reads that the store does at the same time, so that other reads do not wait for them. A client has one.
const LARGE_READERS: usize = 2;
/// Maximum number of reads of the store at the same time for the metrics, for the readiness check, and to find tokens.
/// Anybody can send such requests, and they must not take all reads of the store.
const METRICS_READERS: usize = 1;
const READINESS_READERS: usize = 1;
const TOKEN_READERS: usize = 2;
/// Maximum number of requests for the metrics at the same time. Further ones are refused.
const SCRAPES: usize = 16;
/// Maximum number of redirects after a sign-in that are passed on to one tool server at the same time.
const CONSENTS_PER_SERVER: usize = 16;
/// Number of clients from which those that read nothing are forgotten.
const KNOWN_CLIENTS: usize = 1024;
/// Memory for bodies of requests that are being received or processed, in bytes: in total, for one client, and the
/// additional memory of callbacks, so that clients cannot keep them out.
const REQUEST_BYTES: usize = 256 * 1024 * 1024;
const REQUEST_BYTES_PER_CLIENT: usize = REQUEST_BYTES / 4;
const CALLBACK_BYTES: usize = 32 * 1024 * 1024;
/// Memory for sign-ins to the web interface, which anybody can send, in bytes.
const SIGN_IN_BYTES: usize = 1024 * 1024;
/// Limits of one sign-in.
const SIGN_IN: BodyLimits = BodyLimits { bytes: 4 * 1024, within: Duration::from_secs(5) };
/// Memory for the records of sessions that arrive from another runtime, in bytes. The largest record fits.
const IMPORT_BYTES: usize = 2 * RECORD_BYTES;
/// Limits of one page of records.
const IMPORT: BodyLimits = BodyLimits { bytes: RECORD_BYTES, within: Duration::from_secs(60) };
/// Memory for large responses that their readers have not read yet, in bytes, in total and for one client.
const RESPONSE_BYTES: usize = 128 * 1024 * 1024;
const RESPONSE_BYTES_PER_CLIENT: usize = RESPONSE_BYTES / 2;
/// Size up to which a response is not counted, in bytes.
pub(super) const SMALL_RESPONSE: usize = 64 * 1024;
/// Maximum number of large bodies that are parsed at the same time.
const PARSERS: usize = 2;

/// Sender of a body, which decides whose memory it uses.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sender {
    Client(Client),
    /// Has a valid callback URL.
    Tool,
    /// Wants to sign in to the web interface.
    Stranger,
    /// Moves a session here.
    Runtime,
}

/// Rates by key. What is allowed in a second may come at once.
struct Rates<K> {
    /// Time that each item takes of its second; `None` without a limit.
    interval: Option<Duration>,
    /// Time up to which the items of a key have used their seconds. Times that have passed mean nothing.
    used_up_to: Mutex<HashMap<K, Instant>>,
}

impl<K: Eq + Hash> Rates<K> {
    const WINDOW: Duration = Duration::from_secs(1);

    fn new(per_second: Option<u64>) -> Self {
        let each = |items: u64| Self::WINDOW / u32::try_from(items.max(1)).unwrap_or(u32::MAX);
        Rates { interval: per_second.map(each), used_up_to: Mutex::default() }
    }

    /// Counts an item. Returns false if it comes too early.
    fn admit(&self, key: K, now: Instant) -> bool {
        let Some(interval) = self.interval else { return true };
        let mut all = self.used_up_to.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= RATES && !all.contains_key(&key) {
            all.retain(|_, used_up_to| *used_up_to > now);
            if all.len() >= RATES {
                return false;
            }
        }
        let used_up_to = all.entry(key).or_insert(now);
        let next = (*used_up_to).max(now) + interval;
        let admitted = next <= now + Self::WINDOW;
        if admitted {
            *used_up_to = next;
        }
        admitted
    }
}

/// The resources of one client.
struct ClientResources {
    readers: Arc<Semaphore>,
    large_reader: Arc<Semaphore>,
    bodies: Arc<BodyMemory>,
}

impl ClientResources {
    fn new() -> ClientResources {
        ClientResources {
            readers: Arc::new(Semaphore::new(READERS_PER_CLIENT)),
            large_reader: Arc::new(Semaphore::new(1)),
            bodies: Arc::new(BodyMemory::new(REQUEST_BYTES_PER_CLIENT)),
        }
    }

    fn are_used(&self) -> bool {
        let permits = [&self.readers, &self.large_reader];
        permits.into_iter().any(|permits| Arc::strong_count(permits) > 1)
            || Arc::strong_count(&self.bodies) > 1
            || self.bodies.is_used()
    }
}

/// The resources that requests share.
pub(crate) struct Admission {
    request_memory: BodyMemory,
    callback_memory: BodyMemory,
    sign_in_memory: BodyMemory,
    import_memory: BodyMemory,
    body_limits: BodyLimits,
    callbacks: Arc<Shares<(ThreadKey, CallId)>>,
    rates: Rates<Client>,
    events: Rates<(ThreadKey, CallId)>,
    requests: Arc<Shares<Client>>,
    streams: Arc<Shares<Client>>,
    readers: Arc<Semaphore>,
    large_readers: Arc<Semaphore>,
    scrapes: Semaphore,
    metrics_readers: Semaphore,
    readiness_readers: Semaphore,
    token_readers: Semaphore,
    consents: Arc<Shares<String>>,
    clients: Mutex<HashMap<Client, ClientResources>>,
    response_memory: Memory<Client>,
    parsers: Semaphore,
}

async fn permit(permits: &Semaphore) -> SemaphorePermit<'_> {
    permits.acquire().await.expect("bug: this semaphore is never closed")
}

/// Permit to read from the store: one of the client, and one of all.
pub(super) type ReaderPermit = [OwnedSemaphorePermit; 2];

/// Waits for a permit of each, first for the client's own, so that its requests wait for each other.
async fn both(own: Arc<Semaphore>, all: Arc<Semaphore>) -> ReaderPermit {
    let open = "bug: these semaphores are never closed";
    let own = own.acquire_owned().await.expect(open);
    [own, all.acquire_owned().await.expect(open)]
}

/// Memory of a response that its reader has not read yet. It is given back when it is dropped.
pub(super) type ResponseMemory = Grant<Client>;

impl Admission {
    pub(crate) fn new(limits: &Limits) -> Admission {
        let request_memory = BodyMemory::new(REQUEST_BYTES);
        Admission {
            callback_memory: request_memory.with_own(CALLBACK_BYTES),
            request_memory,
            sign_in_memory: BodyMemory::new(SIGN_IN_BYTES),
            import_memory: BodyMemory::new(IMPORT_BYTES),
            body_limits: BodyLimits { bytes: limits.body, within: limits.request_within },
            callbacks: Shares::new(REQUESTS_PER_CALLBACK_URL),
            rates: Rates::new(limits.requests_per_second),
            events: Rates::new(limits.events_per_second),
            requests: Shares::new(limits.connections.div_ceil(2)),
            streams: Shares::new(STREAMS_PER_CLIENT),
            readers: Arc::new(Semaphore::new(READERS)),
            large_readers: Arc::new(Semaphore::new(LARGE_READERS)),
            scrapes: Semaphore::new(SCRAPES),
            metrics_readers: Semaphore::new(METRICS_READERS),
            readiness_readers: Semaphore::new(READINESS_READERS),
            token_readers: Semaphore::new(TOKEN_READERS),
            consents: Shares::new(CONSENTS_PER_SERVER),
            clients: Mutex::default(),
            response_memory: Memory::new(RESPONSE_BYTES, RESPONSE_BYTES_PER_CLIENT),
            parsers: Semaphore::new(PARSERS),
        }
    }

    pub(super) fn callback(&self, thread: ThreadKey, call: &CallId) -> Option<Share<(ThreadKey, CallId)>> {
        self.callbacks.take((thread, call.clone()), 1)
    }

    /// Returns whether another request of a client is allowed now.
    pub(super) fn rate(&self, client: Client) -> bool {
        self.rates.admit(client, Instant::now())
    }

    /// Returns whether another event of a subscription is allowed now.
    pub(super) fn event(&self, thread: ThreadKey, call: &CallId) -> bool {
        self.events.admit((thread, call.clone()), Instant::now())
    }

    pub(super) fn request(&self, client: Client) -> Option<Share<Client>> {
        self.requests.take(client, 1)
    }

    pub(super) fn stream(&self, client: Client) -> Option<Share<Client>> {
        self.streams.take(client, 1)
    }

    /// Returns a part of the resources of a client.
    fn of_client<T>(&self, client: Client, part: impl FnOnce(&ClientResources) -> &Arc<T>) -> Arc<T> {
        let mut all = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= KNOWN_CLIENTS {
            all.retain(|_, resources| resources.are_used());
        }
        Arc::clone(part(all.entry(client).or_insert_with(ClientResources::new)))
    }

    /// Reads the body of a request.
    pub(super) async fn read_body(
        &self,
        sender: Sender,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<ReceivedBody, BodyError> {
        match sender {
            Sender::Client(client) => {
                let share = self.of_client(client, |resources| &resources.bodies);
                self.request_memory.within(share).read_json(headers, body, self.body_limits).await
            }
            Sender::Tool => self.callback_memory.read_json(headers, body, self.body_limits).await,
            Sender::Stranger => self.sign_in_memory.read_json(headers, body, SIGN_IN).await,
            Sender::Runtime => self.import_memory.read(headers, body, IMPORT).await,
        }
    }

    /// Waits until a client may read from the store.
    pub(super) async fn reader(&self, client: Client) -> ReaderPermit {
        let own = self.of_client(client, |resources| &resources.readers);
        both(own, Arc::clone(&self.readers)).await
    }

    /// Waits until a client may read and encode a page of this size. A small page needs no further permit.
    pub(super) async fn large_reader(&self, client: Client, bytes: usize) -> Option<ReaderPermit> {
        if bytes <= SMALL_RESPONSE {
            return None;
        }
        let own = self.of_client(client, |resources| &resources.large_reader);
        Some(both(own, Arc::clone(&self.large_readers)).await)
    }

    /// Returns memory for a response, or `Err` if the responses that were not read yet use too much. A small response needs
    /// none. A response that is larger than a client's share takes all of it.
    pub(super) fn response(&self, client: Client, bytes: usize) -> Result<Option<ResponseMemory>, NoMemory> {
        if bytes <= SMALL_RESPONSE {
            return Ok(None);
        }
        self.response_memory.take(client, bytes.min(RESPONSE_BYTES_PER_CLIENT)).map(Some)
    }

    /// Adjusts memory to the size that a response turned out to have.
    pub(super) fn resize_response(
        &self,
        client: Client,
        memory: Option<ResponseMemory>,
        bytes: usize,
    ) -> Result<Option<ResponseMemory>, NoMemory> {
        let Some(mut memory) = memory else { return self.response(client, bytes) };
        let bytes = bytes.min(RESPONSE_BYTES_PER_CLIENT);
        if bytes > memory.bytes() {
            memory.merge(self.response_memory.take(client, bytes - memory.bytes())?);
        }
        memory.shrink(bytes);
        Ok(Some(memory))
    }

    /// Like [`Admission::response`], but waits for a limited time.
    pub(super) async fn response_within(
        &self,
        client: Client,
        bytes: usize,
        within: Duration,
    ) -> Result<Option<ResponseMemory>, NoMemory> {
        const PAUSE: Duration = Duration::from_millis(50);
        let waiting = async {
            loop {
                match self.response(client, bytes) {
                    Ok(memory) => return memory,
                    Err(NoMemory) => tokio::time::sleep(PAUSE).await,
                }
            }
        };
        tokio::time::timeout(within, waiting).await.map_err(|_| NoMemory)
    }

    /// Waits until a large body may be parsed.
    pub(super) async fn parser(&self) -> SemaphorePermit<'_> {
        permit(&self.parsers).await
    }

    /// Waits until the metrics may be read from the store. Returns `None` if too many others wait for that.
    pub(super) async fn metrics_reader(&self) -> Option<[SemaphorePermit<'_>; 2]> {
        let scrape = self.scrapes.try_acquire().ok()?;
        Some([scrape, permit(&self.metrics_readers).await])
    }

    /// Waits until a readiness check may read from the store.
    pub(super) async fn readiness_reader(&self) -> SemaphorePermit<'_> {
        permit(&self.readiness_readers).await
    }

    /// Waits until a token may be looked up in the store.
    pub(super) async fn token_reader(&self) -> SemaphorePermit<'_> {
        permit(&self.token_readers).await
    }

    /// Returns `None` if too many redirects are being passed on to this tool server.
    pub(super) fn consent(&self, server: &str) -> Option<Share<String>> {
        self.consents.take(server.to_owned(), 1)
    }
}

impl From<NoMemory> for ErrorResponse {
    fn from(NoMemory: NoMemory) -> Self {
        let message = "too many large responses of this client are not read yet; read them, then try again";
        ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message)
    }
}

/// A body that holds shares until it is sent or its connection is closed.
pub(super) struct HoldingBody<T> {
    body: Body,
    _held: T,
}

impl<T: Send + Unpin + 'static> HoldingBody<T> {
    pub(super) fn wrap(body: Body, held: T) -> Body {
        Body::new(HoldingBody { body, _held: held })
    }
}

impl<T: Unpin> HttpBody for HoldingBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderValue, header};
    use futures_util::FutureExt;

    use super::*;

    fn admission() -> Admission {
        Admission::new(&Limits::default())
    }

    #[test]
    fn requests_of_a_second_may_come_at_once_and_further_ones_at_the_rate() {
        let rates = Rates::new(Some(4));
        let (start, quarter) = (Instant::now(), Duration::from_millis(250));
        let admitted = |key: &'static str, at| (0..6).filter(|_| rates.admit(key, at)).count();
        assert_eq!(admitted("a", start), 4);
        assert_eq!(admitted("b", start), 4, "clients do not share a rate");
        assert_eq!(admitted("a", start + quarter), 1);
        assert_eq!(admitted("a", start + quarter), 0);
        assert_eq!(admitted("a", start + 20 * quarter), 4, "unused time is not saved");
        assert!((0..9).all(|_| Rates::new(None).admit("a", start)));
    }

    #[test]
    fn the_memory_for_rates_is_bounded() {
        let rates = Rates::new(Some(1000));
        let start = Instant::now();
        assert!((0..RATES).all(|key| rates.admit(key, start)));
        assert!(!rates.admit(RATES, start));
        assert!(rates.admit(RATES, start + Rates::<usize>::WINDOW));
        assert_eq!(rates.used_up_to.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn bodies_of_clients_leave_memory_to_other_clients_to_callbacks_and_to_sign_ins() {
        let (admission, large) = (admission(), Bytes::from(vec![b' '; 7 * 1024 * 1024]));
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let read = async |sender, body: &Bytes| {
            admission.read_body(sender, &headers, Body::from(body.clone())).await
        };
        let (mut held, mut refused) = (Vec::new(), 0);
        for client in 0.. {
            let before = held.len();
            while let Ok(body) = read(Sender::Client(Client::Configured(client)), &large).await {
                held.push(body);
            }
            refused += 1;
            if held.len() == before {
                break;
            }
        }
        assert!(refused > 3, "a client has a share: {} clients have {} bodies", refused, held.len());
        assert!(held.len() * large.len() <= REQUEST_BYTES);
        assert!(read(Sender::Tool, &large).await.is_ok());
        let sign_in = Bytes::from_static(b"{\"token\": \"x\"}");
        assert!(read(Sender::Stranger, &sign_in).await.is_ok());
        assert_eq!(read(Sender::Stranger, &large).await.unwrap_err(), BodyError::TooLarge(SIGN_IN.bytes));
        held.clear();
        assert!(read(Sender::Client(Client::Local), &large).await.is_ok());
        let clients = admission.clients.lock().unwrap();
        assert!(clients.values().all(|resources| !resources.are_used()), "they can be forgotten");
    }

    #[test]
    fn one_client_cannot_use_the_memory_for_all_responses() {
        let (admission, large) = (admission(), 8 * 1024 * 1024);
        let (first, second) = (Client::Configured(0), Client::Configured(1));
        let mut held = Vec::new();
        while let Ok(memory) = admission.response(first, large) {
            held.push(memory);
        }
        assert_eq!(held.len(), RESPONSE_BYTES_PER_CLIENT / large);
        assert!(admission.response(second, large).is_ok());
        assert!(admission.response(first, SMALL_RESPONSE).is_ok_and(|memory| memory.is_none()));
        held.clear();
        assert!(admission.response(first, large).is_ok());
    }

    #[test]
    fn the_memory_of_a_response_follows_its_size() {
        let (admission, client, mib) = (admission(), Client::Configured(0), 1024 * 1024);
        let left = || {
            let used = admission.response_memory.used_by(&client);
            assert_eq!(RESPONSE_BYTES - admission.response_memory.left(), used);
            RESPONSE_BYTES_PER_CLIENT - used
        };
        let memory = admission.response(client, 8 * mib).unwrap();
        let memory = admission.resize_response(client, memory, mib).unwrap();
        assert_eq!(left(), RESPONSE_BYTES_PER_CLIENT - mib);
        let memory = admission.resize_response(client, memory, 3 * mib).unwrap();
        assert_eq!(left(), RESPONSE_BYTES_PER_CLIENT - 3 * mib);
        let others = admission.response(client, left()).unwrap();
        assert!(admission.resize_response(client, memory, 4 * mib).is_err(), "nothing is left");
        drop(others);
        // A setting may allow responses that are larger than a share.
        let whole = admission.response(client, 10 * RESPONSE_BYTES).unwrap();
        assert_eq!(left(), 0);
        drop(whole);
        assert_eq!(left(), RESPONSE_BYTES_PER_CLIENT);
    }

    #[tokio::test]
    async fn one_client_cannot_use_all_readers() {
        let admission = admission();
        let mut held = Vec::new();
        for _ in 0..READERS_PER_CLIENT {
            held.push(admission.reader(Client::Configured(0)).await);
        }
        let mut more = Box::pin(admission.reader(Client::Configured(0)));
        assert!(more.as_mut().now_or_never().is_none());
        drop(admission.reader(Client::Configured(1)).await);
        held.pop();
        drop(more.await);
    }

    /// Otherwise anybody could make a readiness check wait, and the runtime would be taken out of service.
    #[tokio::test]
    async fn requests_for_the_metrics_in_bulk_are_refused_and_delay_no_readiness_check() {
        let admission = admission();
        let mut scrapes: Vec<_> = (0..SCRAPES).map(|_| Box::pin(admission.metrics_reader())).collect();
        let granted: Vec<_> = scrapes.iter_mut().map(|scrape| scrape.as_mut().now_or_never()).collect();
        assert_eq!(granted.iter().flatten().count(), METRICS_READERS);
        assert!(admission.metrics_reader().now_or_never().is_some_and(|refused| refused.is_none()));
        assert!(admission.readiness_reader().now_or_never().is_some());
        drop((granted, scrapes));
        assert!(admission.metrics_reader().await.is_some());
    }

    /// Otherwise all reads of the store would wait for those of one client.
    #[tokio::test]
    async fn few_large_pages_are_read_at_the_same_time_and_one_of_a_client() {
        let (admission, large) = (admission(), SMALL_RESPONSE + 1);
        let first = admission.large_reader(Client::Configured(0), large).await;
        assert!(admission.large_reader(Client::Configured(0), SMALL_RESPONSE).await.is_none());
        let mut more = Box::pin(admission.large_reader(Client::Configured(0), large));
        assert!(more.as_mut().now_or_never().is_none());
        let second = admission.large_reader(Client::Configured(1), large).await;
        let mut third = Box::pin(admission.large_reader(Client::Configured(2), large));
        assert!(third.as_mut().now_or_never().is_none());
        drop((first, second));
        assert!(more.await.is_some() && third.await.is_some());
    }
}
