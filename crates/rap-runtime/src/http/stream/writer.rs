//! Events on their way to the reader of a stream.
//!
//! A page of large events is read and encoded only after its memory was granted, by few streams at the same time. So
//! the events that wait for all readers together use no more than the answers of [`super::super::admission`] may.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rap_agent::Seq;
use rap_api::{RuntimeEvent, ThreadEvent};
use serde::Serialize;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::engine::Engine;
use crate::http::admission::{ReaderPermit, ResponseMemory, SMALL_RESPONSE};
use crate::memory::NoMemory;
use crate::store;
use crate::store::Client;

/// Number of pages or events that are buffered for a reader.
const BUFFERED: usize = 16;
/// Size of small events that are buffered for a reader, in bytes. Large ones are counted for the client.
const BUFFERED_BYTES: usize = SMALL_RESPONSE;
/// Time that a full buffer may take to accept an event before the reader is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) const TOO_SLOW: &str = "the reader is too slow; reconnect with Last-Event-ID";

/// Reason why a stream ends.
pub(super) enum End {
    /// The reader has disconnected.
    Disconnected,
    /// The reader is sent this reason.
    Reason(&'static str),
    Failed(store::Error),
}

impl From<store::Error> for End {
    fn from(error: store::Error) -> Self {
        End::Failed(error)
    }
}

impl From<NoMemory> for End {
    fn from(NoMemory: NoMemory) -> Self {
        End::Reason(TOO_SLOW)
    }
}

pub(super) type StreamResult<T = ()> = Result<T, End>;

/// Events on their way to the reader, and the memory that they use.
pub(super) type Frames = (Bytes, Buffered);

/// Memory of buffered events, which is free again when this is dropped.
pub(super) enum Buffered {
    /// Part of the [`BUFFERED_BYTES`] of the stream.
    Small {
        _bytes: OwnedSemaphorePermit,
    },
    Large {
        _memory: ResponseMemory,
    },
}

pub(super) struct Writer {
    frames: mpsc::Sender<Frames>,
    small: Arc<Semaphore>,
    engine: Arc<Engine>,
    client: Client,
}

/// Permission to read and encode a page of events.
pub(super) struct PagePermit {
    memory: Option<ResponseMemory>,
    /// Held until the page is encoded, because reading it takes a multiple of its size.
    readers: Option<(ReaderPermit, Option<ReaderPermit>)>,
}

/// The events of a page, encoded.
#[derive(Default)]
pub(super) struct EncodedPage(Vec<u8>);

impl EncodedPage {
    pub(super) fn push(&mut self, name: &str, event: &impl Serialize) {
        push_frame(&mut self.0, None, name, event);
    }

    pub(super) fn push_entry(&mut self, seq: Seq, entry: &ThreadEvent) {
        push_frame(&mut self.0, Some(seq), entry.name(), entry);
    }
}

impl Writer {
    /// Returns a writer, and where its frames arrive.
    pub(super) fn new(engine: Arc<Engine>, client: Client) -> (Writer, mpsc::Receiver<Frames>) {
        let (frames, waiting) = mpsc::channel(BUFFERED);
        let small = Arc::new(Semaphore::new(BUFFERED_BYTES));
        (Writer { frames, small, engine, client }, waiting)
    }

    pub(super) async fn send(&self, event: &ThreadEvent) -> StreamResult {
        self.write(frame(event.name(), event)).await
    }

    pub(super) async fn send_of_all(&self, event: &RuntimeEvent) -> StreamResult {
        self.write(frame(event.name(), event)).await
    }

    /// Writes a single event. Those that may be large are sent as pages.
    pub(super) async fn write(&self, frame: Vec<u8>) -> StreamResult {
        let memory = self.engine.admission.response_within(self.client, frame.len(), WRITE_TIMEOUT).await;
        self.push(frame, memory?).await
    }

    /// Waits for the memory of a page of about this size. A small page needs none.
    pub(super) async fn permit(&self, bytes: usize) -> StreamResult<PagePermit> {
        let admission = &self.engine.admission;
        let memory = admission.response_within(self.client, bytes, WRITE_TIMEOUT).await?;
        let readers = match &memory {
            Some(_) => {
                let reader = admission.reader(self.client).await;
                Some((reader, admission.large_reader(self.client, bytes).await))
            }
            None => None,
        };
        Ok(PagePermit { memory, readers })
    }

    pub(super) async fn send_page(&self, permit: PagePermit, page: EncodedPage) -> StreamResult {
        let (PagePermit { memory, readers }, mut frames) = (permit, page.0);
        let memory = self.engine.admission.resize_response(self.client, memory, frames.len())?;
        frames.shrink_to_fit();
        drop(readers);
        match frames.is_empty() {
            true => Ok(()),
            false => self.push(frames, memory).await,
        }
    }

    async fn push(&self, frames: Vec<u8>, memory: Option<ResponseMemory>) -> StreamResult {
        let buffered = match memory {
            Some(memory) => Buffered::Large { _memory: memory },
            None => {
                let bytes = u32::try_from(frames.len()).expect("bug: these events are small");
                let bytes = Arc::clone(&self.small).acquire_many_owned(bytes);
                let granted = tokio::time::timeout(WRITE_TIMEOUT, bytes).await;
                let granted = granted.map_err(|_| End::Reason(TOO_SLOW))?;
                Buffered::Small { _bytes: granted.expect("bug: this semaphore is never closed") }
            }
        };
        let sent = self.frames.send_timeout((frames.into(), buffered), WRITE_TIMEOUT).await;
        sent.map_err(|error| match error {
            SendTimeoutError::Timeout(_) => End::Reason(TOO_SLOW),
            SendTimeoutError::Closed(_) => End::Disconnected,
        })
    }
}

fn push_frame(frames: &mut Vec<u8>, id: Option<Seq>, name: &str, data: &impl Serialize) {
    let written: Result<(), serde_json::Error> = (|| {
        if let Some(id) = id {
            writeln!(frames, "id: {id}").map_err(serde_json::Error::io)?;
        }
        write!(frames, "event: {name}\ndata: ").map_err(serde_json::Error::io)?;
        serde_json::to_writer(&mut *frames, data)
    })();
    written.expect("bug: events are JSON, and a vector can be written to");
    frames.extend_from_slice(b"\n\n");
}

pub(super) fn frame(name: &str, data: &impl Serialize) -> Vec<u8> {
    let mut frame = Vec::new();
    push_frame(&mut frame, None, name, data);
    frame
}
