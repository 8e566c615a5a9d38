//! Reads request bodies within limits of size, time and memory.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Size up to which a body uses the memory for small bodies, in bytes.
const SMALL: usize = 64 * 1024;
/// Divisor of the memory: this part of it is reserved for the first [`SMALL`] bytes of each body, so that large bodies do
/// not keep small ones out.
const SMALL_PART: usize = 4;

/// Memory for all bodies that are being received or processed at the same time.
#[derive(Debug, Clone)]
pub struct BodyMemory {
    small: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// Used when the others are used up.
    own: Arc<Semaphore>,
    /// Memory from which each byte is taken as well.
    share: Option<Arc<BodyMemory>>,
}

/// Limits of one body.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// Maximum size in bytes.
    pub bytes: usize,
    /// Time that the whole body may take to arrive, however steadily it arrives.
    pub within: Duration,
}

/// A complete body. It counts against the memory until it is dropped.
#[derive(Debug)]
pub struct ReceivedBody {
    /// Content of the body.
    pub bytes: Bytes,
    _grant: Grant,
}

/// Memory that a body uses.
#[derive(Debug, Default)]
struct Grant {
    small: Option<OwnedSemaphorePermit>,
    large: Option<OwnedSemaphorePermit>,
    own: Option<OwnedSemaphorePermit>,
    share: Option<Box<Grant>>,
}

/// Reason why a body is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The content type is not JSON.
    #[error("send JSON, with the header Content-Type: application/json")]
    NotJson,
    /// The body is larger than [`BodyLimits::bytes`].
    #[error("the body has more than {0} bytes")]
    TooLarge(usize),
    /// The body did not arrive within [`BodyLimits::within`].
    #[error("the request took too long to arrive")]
    TooSlow,
    /// The connection ended before the body was complete.
    #[error("the request ended before its body was complete")]
    CutOff,
    /// The memory for bodies is used up.
    #[error("too many requests at once; try again later")]
    Overloaded,
}

impl BodyMemory {
    /// Creates a memory of this many bytes.
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.min(Semaphore::MAX_PERMITS);
        let small = bytes / SMALL_PART;
        let [small, large, own] = [small, bytes - small, 0].map(|bytes| Arc::new(Semaphore::new(bytes)));
        BodyMemory { small, large, own, share: None }
    }

    /// Returns this memory with `bytes` more, which only the bodies that are read through the returned value can use.
    #[must_use]
    pub fn with_own(&self, bytes: usize) -> Self {
        let own = Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)));
        BodyMemory { own, ..self.clone() }
    }

    /// Returns this memory for bodies that together use no more than `share`, so that others find memory, too.
    #[must_use]
    pub fn within(&self, share: Arc<BodyMemory>) -> Self {
        BodyMemory { share: Some(share), ..self.clone() }
    }

    /// Returns true while a body or a clone uses it.
    pub fn is_used(&self) -> bool {
        [&self.small, &self.large, &self.own].into_iter().any(|memory| Arc::strong_count(memory) > 1)
    }

    /// Reads a JSON body.
    pub async fn read_json(
        &self,
        headers: &HeaderMap,
        body: Body,
        limits: BodyLimits,
    ) -> Result<ReceivedBody, BodyError> {
        if !is_json(headers) {
            return Err(BodyError::NotJson);
        }
        self.read(headers, body, limits).await
    }

    /// Reads a body of any type.
    pub async fn read(
        &self,
        headers: &HeaderMap,
        body: Body,
        limits: BodyLimits,
    ) -> Result<ReceivedBody, BodyError> {
        if content_length(headers) > limits.bytes {
            return Err(BodyError::TooLarge(limits.bytes));
        }
        let reading = self.collect(body, limits.bytes);
        tokio::time::timeout(limits.within, reading).await.unwrap_or(Err(BodyError::TooSlow))
    }

    /// Takes memory for some bytes of a body: first for those that count as small.
    fn take(&self, grant: &mut Grant, small: usize, large: usize) -> Result<(), BodyError> {
        if let Some(share) = &self.share {
            share.take(grant.share.get_or_insert_default(), small, large)?;
        }
        let without_small = take(&self.small, &mut grant.small, small).is_err();
        let other = if without_small { small + large } else { large };
        take(&self.large, &mut grant.large, other).or_else(|_| take(&self.own, &mut grant.own, other))
    }

    /// Reads a body chunk by chunk. A body of one chunk, the common case, is not copied.
    async fn collect(&self, mut body: Body, limit: usize) -> Result<ReceivedBody, BodyError> {
        let mut collected = Bytes::new();
        let mut grant = Grant::default();
        while let Some(frame) = body.frame().await {
            let Ok(chunk) = frame.map_err(|_| BodyError::CutOff)?.into_data() else { continue };
            let (before, after) = (collected.len(), collected.len() + chunk.len());
            if after > limit {
                return Err(BodyError::TooLarge(limit));
            }
            let small = after.min(SMALL) - before.min(SMALL);
            self.take(&mut grant, small, chunk.len() - small)?;
            if collected.is_empty() {
                collected = chunk;
            } else {
                let mut longer = BytesMut::from(collected);
                longer.extend_from_slice(&chunk);
                collected = longer.freeze();
            }
        }
        Ok(ReceivedBody { bytes: collected, _grant: grant })
    }
}

fn take(
    memory: &Arc<Semaphore>,
    permit: &mut Option<OwnedSemaphorePermit>,
    bytes: usize,
) -> Result<(), BodyError> {
    if bytes == 0 {
        return Ok(());
    }
    let bytes = u32::try_from(bytes).map_err(|_| BodyError::Overloaded)?;
    let more = Arc::clone(memory).try_acquire_many_owned(bytes).map_err(|_| BodyError::Overloaded)?;
    match permit {
        Some(permit) => permit.merge(more),
        None => *permit = Some(more),
    }
    Ok(())
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    content_type.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case("application/json")
}

fn content_length(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    length.and_then(|length| length.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::HeaderValue;
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use tokio::sync::mpsc;

    use super::*;

    const LIMITS: BodyLimits = BodyLimits { bytes: 1 << 20, within: Duration::from_secs(30) };

    fn json() -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))])
    }

    /// A body that arrives in the chunks that are sent.
    fn arriving() -> (mpsc::UnboundedSender<usize>, Body) {
        let (sender, mut receiver) = mpsc::unbounded_channel::<usize>();
        let frames = futures_util::stream::poll_fn(move |context| {
            receiver
                .poll_recv(context)
                .map(|size| size.map(|size| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b' '; size])))))
        });
        (sender, Body::new(StreamBody::new(frames)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_in_is_refused_when_its_time_is_over() {
        let (chunks, body) = arriving();
        let trickle = tokio::spawn(async move {
            while chunks.send(1).is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        let read = BodyMemory::new(1000).read_json(&json(), body, LIMITS).await;
        assert_eq!(read.unwrap_err(), BodyError::TooSlow);
        trickle.await.unwrap();
    }

    #[tokio::test]
    async fn unfinished_large_bodies_use_a_bounded_amount_of_memory_and_leave_room_for_small_ones() {
        let memory = BodyMemory::new(8 * SMALL);
        let (first, body) = arriving();
        first.send(7 * SMALL).unwrap();
        let headers = json();
        let reading = memory.read_json(&headers, body, LIMITS);
        tokio::pin!(reading);
        assert!(futures_util::FutureExt::now_or_never(reading.as_mut()).is_none());
        let large = memory.read_json(&json(), Body::from(vec![b' '; 2 * SMALL]), LIMITS).await;
        assert_eq!(large.unwrap_err(), BodyError::Overloaded);
        let small = memory.read_json(&json(), Body::from("{}"), LIMITS).await;
        assert_eq!(small.unwrap().bytes, "{}");
        drop(first);
        drop(reading.await.unwrap());
        let large = memory.read_json(&json(), Body::from(vec![b' '; 2 * SMALL]), LIMITS).await;
        assert_eq!(large.unwrap().bytes.len(), 2 * SMALL);
    }

    #[tokio::test]
    async fn small_bodies_may_use_all_of_the_memory() {
        let memory = BodyMemory::new(SMALL_PART * SMALL);
        let mut held = Vec::new();
        for _ in 0..SMALL_PART {
            held.push(memory.read_json(&json(), Body::from(vec![b' '; SMALL]), LIMITS).await.unwrap());
        }
        let more = memory.read_json(&json(), Body::from("{}"), LIMITS).await;
        assert_eq!(more.unwrap_err(), BodyError::Overloaded);
    }

    #[tokio::test]
    async fn memory_of_its_own_is_there_when_the_common_memory_is_used_up() {
        let common = BodyMemory::new(SMALL_PART * SMALL);
        let memory = common.with_own(SMALL);
        let mut held = Vec::new();
        for _ in 0..SMALL_PART + 1 {
            held.push(memory.read_json(&json(), Body::from(vec![b' '; SMALL]), LIMITS).await.unwrap());
        }
        for (memory, is_full) in [(&memory, true), (&common, true), (&common.with_own(SMALL), false)] {
            let more = memory.read_json(&json(), Body::from("{}"), LIMITS).await;
            assert_eq!(more.is_err(), is_full);
        }
    }

    #[tokio::test]
    async fn bodies_within_a_share_leave_memory_to_others() {
        let common = BodyMemory::new(2 * SMALL_PART * SMALL);
        let share = Arc::new(BodyMemory::new(SMALL_PART * SMALL));
        let memory = common.within(Arc::clone(&share));
        let mut held = Vec::new();
        while let Ok(received) = memory.read_json(&json(), Body::from(vec![b' '; SMALL]), LIMITS).await {
            held.push(received);
        }
        assert_eq!(held.len(), SMALL_PART);
        assert!(share.is_used());
        let other = common.within(Arc::new(BodyMemory::new(SMALL_PART * SMALL)));
        assert!(other.read_json(&json(), Body::from(vec![b' '; SMALL]), LIMITS).await.is_ok());
        held.clear();
        assert!(!share.is_used());
        assert!(memory.read_json(&json(), Body::from(vec![b' '; 2 * SMALL]), LIMITS).await.is_ok());
    }

    #[tokio::test]
    async fn a_body_has_to_be_json_of_an_allowed_size() {
        let memory = BodyMemory::new(10 << 20);
        let other = memory.read_json(&HeaderMap::new(), Body::empty(), LIMITS).await;
        assert_eq!(other.unwrap_err(), BodyError::NotJson);
        let large = memory.read_json(&json(), Body::from(vec![b' '; LIMITS.bytes + 1]), LIMITS).await;
        assert_eq!(large.unwrap_err(), BodyError::TooLarge(LIMITS.bytes));
        let mut announced = json();
        announced.insert(header::CONTENT_LENGTH, HeaderValue::from(LIMITS.bytes + 1));
        let (_never, body) = arriving();
        let large = memory.read_json(&announced, body, LIMITS).await;
        assert_eq!(large.unwrap_err(), BodyError::TooLarge(LIMITS.bytes));
    }
}
