//! Bounds what one client or callback URL can use at the same time, so that none can starve the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, StatusCode};
use http_body::{Frame, SizeHint};
use rap_io::body::{BodyError, BodyLimits, BodyMemory, ReceivedBody};
use rap_protocol::CallId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::ErrorResponse;
use crate::settings::Limits;
use crate::store::transfer::RECORD_BYTES;
use crate::store::{ThreadKey, TokenId};

/// Maximum number of concurrent requests with one callback URL.
const REQUESTS_PER_CALLBACK_URL: usize = 16;
/// Maximum number of keys whose rate is remembered.
const RATES: usize = 16_384;
/// Maximum number of event streams of a client.
const STREAMS_PER_CLIENT: usize = 256;
/// Maximum number of requests that read from the store at the same time, in total and for one client. Further ones
/// wait.
const READERS: usize = 8;
const READERS_PER_CLIENT: usize = 4;
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

/// A client of the API: everyone who uses the same token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    /// Needs no token.
    Local,
    /// Position of the token in the settings.
    Configured(usize),
    Created(TokenId),
}

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

/// Amounts in use, by user of the resource.
struct Shares<K> {
    used: Mutex<HashMap<K, usize>>,
    each: usize,
}

/// Part of a share, which is given back when it is dropped.
pub(crate) struct Share<K: Eq + Hash> {
    shares: Arc<Shares<K>>,
    key: K,
    amount: usize,
}

impl<K: Eq + Hash + Clone> Shares<K> {
    fn new(each: usize) -> Arc<Self> {
        Arc::new(Shares { used: Mutex::default(), each })
    }

    fn used(&self) -> MutexGuard<'_, HashMap<K, usize>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `None` if that is more than is left of the share.
    fn take(self: &Arc<Self>, key: K, amount: usize) -> Option<Share<K>> {
        let mut all = self.used();
        let used = all.get(&key).copied().unwrap_or_default() + amount;
        if used > self.each {
            return None;
        }
        all.insert(key.clone(), used);
        Some(Share { shares: Arc::clone(self), key, amount })
    }
}

impl<K: Eq + Hash> Share<K> {
    /// Gives back all but this amount.
    fn shrink(&mut self, amount: usize) {
        let mut all = self.shares.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used) = all.get_mut(&self.key) {
            *used -= self.amount.saturating_sub(amount);
            if *used == 0 {
                all.remove(&self.key);
            }
        }
        self.amount = self.amount.min(amount);
    }

    /// Adds another part of the same share.
    fn merge(&mut self, mut other: Self) {
        self.amount += std::mem::take(&mut other.amount);
    }
}

impl<K: Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        self.shrink(0);
    }
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
    bodies: Arc<BodyMemory>,
}

impl ClientResources {
    fn new() -> ClientResources {
        ClientResources {
            readers: Arc::new(Semaphore::new(READERS_PER_CLIENT)),
            bodies: Arc::new(BodyMemory::new(REQUEST_BYTES_PER_CLIENT)),
        }
    }

    fn are_used(&self) -> bool {
        Arc::strong_count(&self.readers) > 1 || Arc::strong_count(&self.bodies) > 1 || self.bodies.is_used()
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
    clients: Mutex<HashMap<Client, ClientResources>>,
    response_memory: Arc<Semaphore>,
    response_memory_of: Arc<Shares<Client>>,
    parsers: Semaphore,
}

/// Memory of a response that its reader has not read yet. It is given back when it is dropped.
pub(super) struct ResponseMemory {
    permit: OwnedSemaphorePermit,
    share: Share<Client>,
}

impl ResponseMemory {
    fn bytes(&self) -> usize {
        self.share.amount
    }

    fn shrink(&mut self, bytes: usize) {
        drop(self.permit.split(self.bytes().saturating_sub(bytes)));
        self.share.shrink(bytes);
    }

    fn merge(&mut self, more: ResponseMemory) {
        self.permit.merge(more.permit);
        self.share.merge(more.share);
    }
}

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
            clients: Mutex::default(),
            response_memory: Arc::new(Semaphore::new(RESPONSE_BYTES)),
            response_memory_of: Shares::new(RESPONSE_BYTES_PER_CLIENT),
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
    pub(super) async fn reader(&self, client: Client) -> [OwnedSemaphorePermit; 2] {
        let own = self.of_client(client, |resources| &resources.readers);
        let open = "bug: these semaphores are never closed";
        let own = own.acquire_owned().await.expect(open);
        [own, Arc::clone(&self.readers).acquire_owned().await.expect(open)]
    }

    /// Returns memory for a response, or `Err` if the responses that were not read yet use too much. A small response needs
    /// none. A response that is larger than a client's share takes all of it.
    pub(super) fn response(&self, client: Client, bytes: usize) -> Result<Option<ResponseMemory>, NoMemory> {
        if bytes <= SMALL_RESPONSE {
            return Ok(None);
        }
        self.take_response_memory(client, bytes.min(RESPONSE_BYTES_PER_CLIENT)).map(Some)
    }

    fn take_response_memory(&self, client: Client, bytes: usize) -> Result<ResponseMemory, NoMemory> {
        let share = self.response_memory_of.take(client, bytes).ok_or(NoMemory)?;
        let bytes = u32::try_from(bytes).map_err(|_| NoMemory)?;
        let permit = Arc::clone(&self.response_memory).try_acquire_many_owned(bytes).map_err(|_| NoMemory)?;
        Ok(ResponseMemory { permit, share })
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
            memory.merge(self.take_response_memory(client, bytes - memory.bytes())?);
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
    pub(super) async fn parser(&self) -> tokio::sync::SemaphorePermit<'_> {
        self.parsers.acquire().await.expect("bug: this semaphore is never closed")
    }
}

/// The responses that were not read yet use too much memory.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoMemory;

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

    use super::*;

    fn admission() -> Admission {
        Admission::new(&Limits::default())
    }

    #[test]
    fn a_share_is_bounded_and_given_back() {
        let shares = Shares::new(3);
        let (two, _one) = (shares.take("a", 2).unwrap(), shares.take("a", 1).unwrap());
        assert!(shares.take("a", 1).is_none());
        assert!(shares.take("b", 3).is_some());
        drop(two);
        assert!(shares.take("a", 2).is_some());
        drop(_one);
        assert!(shares.used().is_empty());
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
            let used = admission.response_memory_of.used().get(&client).copied().unwrap_or_default();
            assert_eq!(RESPONSE_BYTES - admission.response_memory.available_permits(), used);
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
        assert!(futures_util::FutureExt::now_or_never(more.as_mut()).is_none());
        drop(admission.reader(Client::Configured(1)).await);
        held.pop();
        drop(more.await);
    }
}
