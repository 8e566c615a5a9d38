//! Publish/subscribe hub for event streams. It announces that a thread has changed; listeners then read the changes
//! from the store. Only text that is never stored, such as that of an answer in progress, is part of an event.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rap_agent::{Spawn, Status, Step, Write};
use rap_api::ChildEvent;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use crate::store::{Thread, ThreadKey, ViewKey};

/// Number of events that a listener may lag behind before it is dropped.
const MAX_LAG: usize = 1024;
/// Maximum number of new children that an event names. A listener that is behind is not told about the others.
pub(crate) const MAX_CHILDREN: usize = 100;

/// Changes of a thread that a listener does not find out by reading its head and its new entries.
#[derive(Debug, Clone, Default)]
pub(crate) struct Changes {
    /// True if a question was added or replaced.
    pub(crate) questions: bool,
    /// Views that were added or replaced.
    pub(crate) views: BTreeSet<ViewKey>,
    /// Children that were spawned, at most [`MAX_CHILDREN`].
    pub(crate) children: Vec<ChildEvent>,
}

impl Changes {
    pub(crate) fn of(step: &Step) -> Changes {
        let mut changes = Changes::default();
        for write in &step.writes {
            match write {
                Write::Question { .. } => changes.questions = true,
                Write::View { server, view_type, .. } => {
                    changes.views.insert(ViewKey { server: server.0.clone(), view_type: view_type.clone() });
                }
                Write::Spawn(spawn) => changes.children.extend(child_event(spawn)),
                _ => {}
            }
        }
        changes.children.truncate(MAX_CHILDREN);
        changes
    }

    fn merge(&mut self, later: Changes) {
        self.questions |= later.questions;
        self.views.extend(later.views);
        let room = MAX_CHILDREN.saturating_sub(self.children.len());
        self.children.extend(later.children.into_iter().take(room));
    }
}

fn child_event(spawn: &Spawn) -> Option<ChildEvent> {
    let (_, call, tool) = spawn.head.origin().parent()?;
    Some(ChildEvent {
        thread_id: spawn.id.as_str().to_owned(),
        call_id: call.as_str().to_owned(),
        tool: tool.to_owned(),
        title: spawn.head.title().map(str::to_owned),
    })
}

/// An event for listeners.
#[derive(Debug, Clone)]
pub(crate) enum LiveEvent {
    /// A step of the thread was committed.
    ThreadChanged { thread: Arc<Thread>, status: Status, changes: Changes },
    /// Part of an answer in progress.
    Delta { turn: u64, attempt: u32, text: Arc<str> },
    /// A notice for users that is not stored.
    Notice { thread: Arc<Thread>, text: Arc<str> },
    /// A row of the delivery log was added or changed.
    Delivery { id: String },
    /// Events of other nodes were lost. Listeners read everything again.
    Missed,
}

pub(crate) struct Hub {
    /// Number of listeners. While it is zero, publishing takes no lock.
    listeners: Arc<AtomicUsize>,
    threads: Mutex<HashMap<ThreadKey, broadcast::Sender<LiveEvent>>>,
    all: broadcast::Sender<LiveEvent>,
}

/// Receives events until it is dropped.
pub(crate) struct Listener {
    live: broadcast::Receiver<LiveEvent>,
    /// The event after a merged `ThreadChanged`.
    kept: Option<Result<LiveEvent, RecvError>>,
    _count: ListenerCount,
}

impl Listener {
    /// Returns the next event. Consecutive changes of one thread are merged, because one read of the store shows them
    /// all.
    pub(crate) async fn next(&mut self) -> Result<LiveEvent, RecvError> {
        if let Some(kept) = self.kept.take() {
            return kept;
        }
        let mut next = self.live.recv().await?;
        while let LiveEvent::ThreadChanged { thread, status, changes } = &mut next {
            match self.live.try_recv() {
                Ok(LiveEvent::ThreadChanged { thread: again, status: newer, changes: later })
                    if again.key == thread.key =>
                {
                    *status = newer;
                    changes.merge(later);
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

struct ListenerCount(Arc<AtomicUsize>);

impl Drop for ListenerCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Hub {
    pub(crate) fn new() -> Hub {
        Hub { listeners: Arc::default(), threads: Mutex::default(), all: broadcast::Sender::new(MAX_LAG) }
    }

    fn threads(&self) -> MutexGuard<'_, HashMap<ThreadKey, broadcast::Sender<LiveEvent>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to the events of one thread.
    pub(crate) fn listen(&self, thread: ThreadKey) -> Listener {
        let mut threads = self.threads();
        threads.retain(|_, sender| sender.receiver_count() > 0);
        let live = threads.entry(thread).or_insert_with(|| broadcast::Sender::new(MAX_LAG)).subscribe();
        self.listener(live)
    }

    /// Subscribes to the events of all threads, without parts of answers.
    pub(crate) fn listen_to_all(&self) -> Listener {
        self.listener(self.all.subscribe())
    }

    fn listener(&self, live: broadcast::Receiver<LiveEvent>) -> Listener {
        self.listeners.fetch_add(1, Ordering::Relaxed);
        Listener { live, kept: None, _count: ListenerCount(Arc::clone(&self.listeners)) }
    }

    /// Returns true if there is any listener.
    pub(crate) fn has_listeners(&self) -> bool {
        self.listener_count() > 0
    }

    /// Returns the number of listeners.
    pub(crate) fn listener_count(&self) -> usize {
        self.listeners.load(Ordering::Relaxed)
    }

    /// Publishes an event of a thread. Never blocks: a listener that is too slow misses events and gets an error.
    pub(crate) fn publish(&self, thread: ThreadKey, live: LiveEvent) {
        if !self.has_listeners() {
            return;
        }
        if let Some(sender) = self.threads().get(&thread) {
            // Sending fails if there is no receiver left.
            sender.send(live.clone()).ok();
        }
        if !matches!(live, LiveEvent::Delta { .. }) {
            self.publish_to_all(live);
        }
    }

    /// Returns which of these threads have listeners, all of them if somebody listens to all threads.
    pub(crate) fn listened_to(&self, mut keys: Vec<ThreadKey>) -> Vec<ThreadKey> {
        if self.all.receiver_count() == 0 {
            let threads = self.threads();
            keys.retain(|key| threads.contains_key(key));
        }
        keys
    }

    /// Tells all listeners that they may have missed events.
    pub(crate) fn publish_missed(&self) {
        for sender in self.threads().values() {
            sender.send(LiveEvent::Missed).ok();
        }
        self.publish_to_all(LiveEvent::Missed);
    }

    /// Publishes an event to the listeners of all threads.
    pub(crate) fn publish_to_all(&self, live: LiveEvent) {
        self.all.send(live).ok();
    }
}
