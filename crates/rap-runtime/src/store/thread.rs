//! What a thread is apart from its head: who it is and where it comes from. It never changes.

use rap_agent::Seq;
use rap_protocol::{ThreadId, Timestamp, UserId};

/// The number of a thread in the store; a callback token carries it.
pub(crate) type ThreadNo = i64;

/// Who a thread is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) no: ThreadNo,
    pub(crate) id: ThreadId,
    /// The root of its session; itself for a root.
    pub(crate) root: ThreadNo,
    pub(crate) parent: Option<ThreadNo>,
    /// Whose history it inherits: that of its parent, or of the thread that it was forked from.
    pub(crate) source: Option<ThreadNo>,
    /// It sees its source's history up to here.
    pub(crate) born_at: Seq,
    /// Root first, parent last.
    pub(crate) ancestors: Vec<ThreadId>,
    /// Random; tells this thread from one of the same number in another database.
    pub(crate) incarnation: u64,
    pub(crate) agent: String,
    pub(crate) user_id: Option<UserId>,
    pub(crate) title: Option<String>,
    pub(crate) created_at: Timestamp,
}

/// What a client says about a thread to be made.
#[derive(Debug, Clone)]
pub(crate) struct NewThread {
    pub(crate) id: ThreadId,
    pub(crate) agent: String,
    pub(crate) user_id: Option<UserId>,
    pub(crate) title: Option<String>,
    /// The first thing said.
    pub(crate) message: Option<String>,
}

/// A new id: they sort by time of birth.
pub(crate) fn fresh_id(now: Timestamp) -> ThreadId {
    let text = format!("t{:011x}{:016x}", now.0.max(0), random());
    ThreadId::new(text).expect("bug: digits make an id")
}

pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("bug: the system has random numbers");
    u64::from_le_bytes(bytes)
}
