//! Work: the requests that committed steps ask for. Each item has a destination and a due time, and belongs to a
//! session.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use rap_agent::{Head, OpenCall, Seq, StatusCheck, ThreadMessage};
use rap_protocol::{CallId, ResponseUrl, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{SessionKey, Thread, ThreadKey};

/// The kind of an item of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum WorkKind {
    /// A request to a model server.
    Ask,
    /// An invocation of a tool server.
    Invoke,
    /// Delivery of a person's answer to a tool server.
    Answer,
    /// A request to a tool server for the status of a call or subscription.
    Check,
}

impl WorkKind {
    pub(crate) const ALL: [WorkKind; 4] =
        [WorkKind::Ask, WorkKind::Invoke, WorkKind::Answer, WorkKind::Check];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            WorkKind::Ask => "ask",
            WorkKind::Invoke => "invoke",
            WorkKind::Answer => "answer",
            WorkKind::Check => "check",
        }
    }
}

/// Identifies a queue: the work of one kind for one destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct WorkQueue {
    pub(crate) kind: WorkKind,
    /// Base URL of a model or tool server.
    pub(crate) destination: String,
}

/// Collects due retries in the order of their due times, within the shares of their sessions.
pub(super) struct DueRetries<'a> {
    page: &'a DuePage,
    work: Vec<(SessionKey, WorkKey)>,
    counts: BTreeMap<SessionKey, usize>,
}

impl<'a> DueRetries<'a> {
    pub(super) fn new(page: &'a DuePage) -> DueRetries<'a> {
        DueRetries { page, work: Vec::new(), counts: BTreeMap::new() }
    }

    /// Returns the sessions whose share is used up.
    pub(super) fn full(&self) -> Vec<SessionKey> {
        let full = self.counts.iter().filter(|(_, count)| **count >= self.page.per_session);
        full.map(|(session, _)| *session).collect()
    }

    /// Adds work that a query found. A later query finds it again if its session is not full.
    pub(super) fn add(&mut self, session: SessionKey, key: WorkKey) {
        let known = self.work.iter().any(|(_, other)| *other == key);
        let count = self.counts.entry(session).or_default();
        if *count < self.page.per_session && !known && !self.page.skip.contains(&key) {
            *count += 1;
            self.work.push((session, key));
        }
    }

    /// Returns the collected work. `complete` means that the last query found the rest.
    pub(super) fn finish(self, complete: bool) -> (Vec<(SessionKey, WorkKey)>, bool) {
        let more = !complete || !self.full().is_empty();
        (self.work, more)
    }
}

/// Longest pauses of stored work. Work that is due later than that was stored before the clock was set back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongestPauses {
    /// Pause before a retry of a request to a model or tool server.
    pub(crate) retry: Duration,
    /// Pause of a message between threads that could not be applied.
    pub(crate) message: Duration,
    /// Pause before a retry of an alert.
    pub(crate) alert: Duration,
}

/// Selects a page of due work.
#[derive(Debug, Clone)]
pub(crate) struct DuePage {
    pub(crate) now: Timestamp,
    /// Return new work only of sessions after this one. Retries are on every page.
    pub(crate) after: Option<SessionKey>,
    /// Maximum number of sessions with new work on a page.
    pub(crate) sessions: usize,
    /// Maximum number of items of each session on a page.
    pub(crate) per_session: usize,
    /// Items to leave out, because they are in progress or already known.
    pub(crate) skip: HashSet<WorkKey>,
}

/// A page of due work.
pub(crate) struct DueWork {
    pub(crate) work: Vec<(SessionKey, WorkKey)>,
    /// The last session that was read. `None` if there are no sessions after it.
    pub(crate) after: Option<SessionKey>,
    /// True if more retries or checks are due than fit on the page.
    pub(crate) more: bool,
}

/// Identifies an item of work.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum WorkKey {
    Ask {
        thread: ThreadKey,
        turn: u64,
    },
    Invoke {
        thread: ThreadKey,
        call: CallId,
    },
    Answer {
        thread: ThreadKey,
        /// Number of the question. Signals between nodes contain it under its earlier name.
        #[serde(rename = "no")]
        number: u64,
    },
    Check {
        thread: ThreadKey,
        call: CallId,
    },
}

impl WorkKey {
    pub(crate) fn thread(&self) -> ThreadKey {
        match self {
            WorkKey::Ask { thread, .. }
            | WorkKey::Invoke { thread, .. }
            | WorkKey::Answer { thread, .. }
            | WorkKey::Check { thread, .. } => *thread,
        }
    }

    pub(crate) fn kind(&self) -> WorkKind {
        match self {
            WorkKey::Ask { .. } => WorkKind::Ask,
            WorkKey::Invoke { .. } => WorkKind::Invoke,
            WorkKey::Answer { .. } => WorkKind::Answer,
            WorkKey::Check { .. } => WorkKind::Check,
        }
    }
}

/// An item of work with everything that an attempt needs.
pub(crate) enum Work {
    Ask(Box<AskWork>),
    Invoke(InvokeWork),
    Answer(AnswerWork),
    Check(CheckWork),
}

/// A request to the model.
pub(crate) struct AskWork {
    pub(crate) thread: Arc<Thread>,
    /// The head of the thread when the work was loaded.
    pub(crate) head: Head,
    pub(crate) turn: u64,
    /// The last entry that the request covers.
    pub(crate) up_to: Seq,
    /// Number of attempts before this one.
    pub(crate) attempts: u32,
}

/// An invocation.
pub(crate) struct InvokeWork {
    pub(crate) thread: Arc<Thread>,
    pub(crate) call: OpenCall,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) attempts: u32,
    /// Outcome of the last attempt. `None` before the first.
    pub(crate) outcome: Option<String>,
    /// Base of the callback URL that is stored with the call. `None` means that of the settings.
    pub(crate) callback_base: Option<String>,
}

/// Delivery of a person's answer.
pub(crate) struct AnswerWork {
    pub(crate) thread: Arc<Thread>,
    pub(crate) number: u64,
    pub(crate) call: CallId,
    /// Base URL of the tool server that asked.
    pub(crate) server: String,
    pub(crate) response_url: ResponseUrl,
    pub(crate) selected: usize,
    pub(crate) attempts: u32,
    /// Time at which the person answered.
    pub(crate) since: Timestamp,
}

/// A status check of a call or subscription that its server has long been silent about.
pub(crate) struct CheckWork {
    pub(crate) thread: Arc<Thread>,
    pub(crate) call: CallId,
    pub(crate) server: String,
    pub(crate) subscription: bool,
    pub(crate) check: StatusCheck,
}

/// Identifies an outbox message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OutboxKey(pub(super) i64);

/// A stored message from one thread to another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OutboxMessage {
    pub(crate) key: OutboxKey,
    pub(crate) session: SessionKey,
    pub(crate) sender: ThreadId,
    pub(crate) receiver: ThreadId,
    pub(crate) message: ThreadMessage,
}

/// A timer that is due.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Timer {
    pub(crate) session: SessionKey,
    pub(crate) thread: ThreadKey,
    /// The call that the timer belongs to. `None` if it is the thread's own timer.
    pub(crate) call: Option<CallId>,
}
