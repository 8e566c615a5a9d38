//! Work: what has to be done outside of the store. It has a destination and a due time, and belongs to a session.

use std::collections::HashSet;
use std::sync::Arc;

use rap_agent::{Head, OpenCall, Seq, StatusCheck, ThreadMessage};
use rap_protocol::{CallId, ResponseUrl, ThreadId, Timestamp};
use serde_json::{Map, Value};

use super::{SessionKey, Thread, ThreadKey};

/// A kind of work that goes to a destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WorkKind {
    /// A question to a model server.
    Ask,
    /// An invocation of a tool server.
    Invoke,
    /// A person's answer for a tool server.
    Answer,
    /// A question to a tool server whether a call or subscription is alive.
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

/// The work of one kind for one destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkQueue {
    pub(crate) kind: WorkKind,
    /// Base URL of a model or tool server.
    pub(crate) destination: String,
}

/// A page of due work.
#[derive(Debug, Clone)]
pub(crate) struct DuePage {
    pub(crate) now: Timestamp,
    /// New work only of sessions behind this one. Work to be tried again is on every page.
    pub(crate) after: Option<SessionKey>,
    /// Number of sessions with new work.
    pub(crate) sessions: usize,
    /// Amount of work of each session.
    pub(crate) per_session: usize,
    /// Work that is left out because it is in progress or known already.
    pub(crate) skip: HashSet<WorkKey>,
}

/// Due work of a page.
pub(crate) struct DueWork {
    pub(crate) work: Vec<(SessionKey, WorkKey)>,
    /// The last session that was looked at, if there may be more behind it.
    pub(crate) after: Option<SessionKey>,
    /// Whether more of this work is due than a page has: to be tried again, or to be checked.
    pub(crate) more: bool,
}

/// Identifies work.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WorkKey {
    Ask { thread: ThreadKey, turn: u64 },
    Invoke { thread: ThreadKey, call: CallId },
    Answer { thread: ThreadKey, no: u64 },
    Check { thread: ThreadKey, call: CallId },
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

/// Work, with everything that an attempt needs.
pub(crate) enum Work {
    Ask(Box<AskWork>),
    Invoke(InvokeWork),
    Answer(AnswerWork),
    Check(CheckWork),
}

/// A question to the model.
pub(crate) struct AskWork {
    pub(crate) thread: Arc<Thread>,
    /// The head of the thread when it asks.
    pub(crate) head: Head,
    pub(crate) turn: u64,
    /// The last entry that it covers.
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
    /// Outcome of the last attempt.
    pub(crate) outcome: Option<String>,
}

/// A person's answer.
pub(crate) struct AnswerWork {
    pub(crate) thread: Arc<Thread>,
    pub(crate) no: u64,
    pub(crate) call: CallId,
    pub(crate) response_url: ResponseUrl,
    pub(crate) selected: usize,
    pub(crate) attempts: u32,
    /// Time of the answer.
    pub(crate) since: Timestamp,
}

/// A call or subscription whose server has not been heard of for long.
pub(crate) struct CheckWork {
    pub(crate) thread: Arc<Thread>,
    pub(crate) call: CallId,
    pub(crate) server: String,
    pub(crate) subscription: bool,
    pub(crate) check: StatusCheck,
}

/// Identifies a stored message between threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct OutboxKey(pub(super) i64);

/// A message between threads.
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
    /// The call whose timer it is; none if it is the thread's own.
    pub(crate) call: Option<CallId>,
}
