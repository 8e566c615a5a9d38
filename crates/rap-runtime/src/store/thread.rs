//! The immutable data of a thread: everything except its head.

use rap_agent::{Identity, Seq};
use rap_protocol::{ThreadId, Timestamp, UserId};
use serde::{Deserialize, Serialize};

/// The store's internal key of a thread. Only the store interprets it. Callback tokens contain it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct ThreadKey(i64);

impl ThreadKey {
    pub(crate) const fn new(number: i64) -> ThreadKey {
        ThreadKey(number)
    }

    pub(super) const fn number(self) -> i64 {
        self.0
    }

    pub(crate) fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    pub(crate) fn from_bytes(bytes: [u8; 8]) -> ThreadKey {
        ThreadKey(i64::from_be_bytes(bytes))
    }
}

/// The store's internal key of a session, which is a root thread with all its descendants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct SessionKey(pub(super) ThreadKey);

impl SessionKey {
    /// No session.
    pub(crate) const NONE: SessionKey = SessionKey(ThreadKey(0));

    #[cfg(test)]
    pub(crate) fn of_root(root: ThreadKey) -> SessionKey {
        SessionKey(root)
    }
}

/// The immutable data of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thread {
    pub(crate) key: ThreadKey,
    /// The key that its callback tokens contain. It differs from `key` if the thread was moved here.
    pub(crate) token_key: ThreadKey,
    pub(crate) id: ThreadId,
    pub(crate) session: SessionKey,
    pub(crate) parent: Option<ThreadKey>,
    /// The thread whose history it inherits: its parent, or the thread that it was forked from.
    pub(crate) source: Option<ThreadKey>,
    /// The last entry of its source's history that it inherits. 0 if it inherits nothing.
    pub(crate) inherits: Seq,
    /// Ids of its ancestors, root first, parent last.
    pub(crate) ancestors: Vec<ThreadId>,
    /// A random number that callback tokens and call ids contain.
    pub(crate) incarnation: u64,
    pub(crate) agent: String,
    pub(crate) user_id: Option<UserId>,
    pub(crate) title: Option<String>,
    pub(crate) created_at: Timestamp,
}

impl Thread {
    pub(crate) fn identity(&self) -> Identity {
        Identity { id: self.id.clone(), incarnation: self.incarnation, depth: self.ancestors.len() }
    }
}

/// A root thread to be created.
#[derive(Debug, Clone)]
pub(crate) struct NewThread {
    pub(crate) id: ThreadId,
    pub(crate) incarnation: u64,
    pub(crate) agent: String,
    pub(crate) user_id: Option<UserId>,
    pub(crate) title: Option<String>,
}

/// Makes a new thread id. Ids sort by the time of their creation.
pub(crate) fn new_thread_id(now: Timestamp, random: u64) -> ThreadId {
    let text = format!("t{:011x}{random:016x}", now.0.max(0));
    ThreadId::new(text).expect("bug: an id of digits is well-formed")
}
