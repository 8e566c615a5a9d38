//! The hub: who listens to which thread. It carries hints, not history: a listener that hears that a thread has moved
//! reads what is new from the store. Only what is never stored, the text of an answer in progress, is carried itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rap_agent::Status;
use rap_protocol::ThreadId;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use crate::store::ThreadKey;

/// How much a listener may be behind before it is dropped.
const BEHIND: usize = 1024;

/// Something that has just happened.
#[derive(Debug, Clone)]
pub(crate) enum Live {
    /// A step of the thread is on disk.
    Moved { thread: ThreadId, status: Status },
    /// A piece of an answer in progress.
    Delta { turn: u64, attempt: u32, text: Arc<str> },
    /// Something that people should know now; it is not stored.
    Notice { thread: ThreadId, text: Arc<str> },
    /// A line of the ledger is new, or has changed.
    Delivery { id: String },
}

pub(crate) struct Hub {
    /// Without any, nothing below is looked at.
    listeners: Arc<AtomicUsize>,
    threads: Mutex<HashMap<ThreadKey, broadcast::Sender<Live>>>,
    all: broadcast::Sender<Live>,
}

/// Hears what happens until it is dropped.
pub(crate) struct Listener {
    live: broadcast::Receiver<Live>,
    /// What came behind a move.
    kept: Option<Result<Live, RecvError>>,
    _count: Count,
}

impl Listener {
    /// The next thing that happens. Moves of one thread in a row are one: whoever looks sees what all of them did.
    pub(crate) async fn next(&mut self) -> Result<Live, RecvError> {
        if let Some(kept) = self.kept.take() {
            return kept;
        }
        let mut next = self.live.recv().await?;
        while let Live::Moved { thread, .. } = &next {
            match self.live.try_recv() {
                Ok(Live::Moved { thread: again, status }) if again == *thread => {
                    next = Live::Moved { thread: again, status };
                }
                Err(TryRecvError::Empty) => break,
                Ok(other) => {
                    self.kept = Some(Ok(other));
                    break;
                }
                Err(TryRecvError::Lagged(missed)) => {
                    self.kept = Some(Err(RecvError::Lagged(missed)));
                    break;
                }
                Err(TryRecvError::Closed) => {
                    self.kept = Some(Err(RecvError::Closed));
                    break;
                }
            }
        }
        Ok(next)
    }
}

struct Count(Arc<AtomicUsize>);

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Hub {
    pub(crate) fn new() -> Hub {
        Hub { listeners: Arc::default(), threads: Mutex::default(), all: broadcast::Sender::new(BEHIND) }
    }

    fn threads(&self) -> MutexGuard<'_, HashMap<ThreadKey, broadcast::Sender<Live>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens to one thread from now on.
    pub(crate) fn listen(&self, thread: ThreadKey) -> Listener {
        let mut threads = self.threads();
        threads.retain(|_, sender| sender.receiver_count() > 0);
        let live = threads.entry(thread).or_insert_with(|| broadcast::Sender::new(BEHIND)).subscribe();
        self.counted(live)
    }

    /// Listens to all threads from now on; pieces of answers are left out.
    pub(crate) fn listen_to_all(&self) -> Listener {
        self.counted(self.all.subscribe())
    }

    fn counted(&self, live: broadcast::Receiver<Live>) -> Listener {
        self.listeners.fetch_add(1, Ordering::Relaxed);
        Listener { live, kept: None, _count: Count(Arc::clone(&self.listeners)) }
    }

    /// Whether anybody listens to anything.
    pub(crate) fn is_heard(&self) -> bool {
        self.listeners() > 0
    }

    /// How many listen.
    pub(crate) fn listeners(&self) -> usize {
        self.listeners.load(Ordering::Relaxed)
    }

    /// Tells whoever listens. It never blocks; who is too slow loses it and learns that.
    pub(crate) fn tell(&self, thread: ThreadKey, live: Live) {
        if !self.is_heard() {
            return;
        }
        if let Some(sender) = self.threads().get(&thread) {
            // Nobody may listen any more.
            sender.send(live.clone()).ok();
        }
        if !matches!(live, Live::Delta { .. }) {
            self.tell_all(live);
        }
    }

    /// Tells those who listen to all threads.
    pub(crate) fn tell_all(&self, live: Live) {
        self.all.send(live).ok();
    }
}
