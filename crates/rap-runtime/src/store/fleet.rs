//! The nodes that share a database: their leases, and the signals between them.
//!
//! Correctness never depends on either. A claim or a lease only keeps two nodes from doing the same work, and a signal
//! only makes something happen sooner: its subject is in the database, which every node also reads from time to time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::Status;
use rap_api::ChildEvent;
use rap_protocol::{CallId, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Error, SessionKey, Thread, ThreadKey, ViewKey, WorkKey, WorkQueue};

/// The other nodes of a database.
#[async_trait]
pub(crate) trait Fleet: Send + Sync {
    /// Returns the id of this node, as [`Fleet::nodes`] lists it.
    fn id(&self) -> String;
    /// Returns true if another node may be using the database.
    fn has_peers(&self) -> bool;
    /// Returns `None` if another node may be changing the database, also one that this node does not know yet.
    /// Otherwise returns a number that is another one whenever a node may have changed it in between.
    fn alone_since(&self) -> Option<u64>;
    /// Returns true if the lease of this node is valid, as far as the node knows.
    fn holds_lease(&self) -> bool;
    /// Returns false if the tool server is one that nodes start themselves, and another node is its host, as far as
    /// this node knows. Then only that node may send requests about calls to its process.
    fn hosts(&self, server: &str) -> bool;
    /// Renews the lease of this node and reads those of the others. Makes this node the host of tool servers that have none.
    async fn renew(&self, activity: Activity) -> Result<Renewal, Error>;
    /// Gives up the lease. Other nodes take over all claimed work at once.
    async fn leave(&self) -> Result<(), Error>;
    /// Returns true if every other node that this node knows has renewed its lease after this time.
    async fn others_renewed(&self, since: Timestamp) -> Result<bool, Error>;
    /// Lists the nodes, oldest first.
    async fn nodes(&self) -> Result<Vec<Node>, Error>;
    /// Returns which of these model requests are settled or claimed by another node.
    async fn lost_model_requests(&self, keys: Vec<WorkKey>) -> Result<Vec<WorkKey>, Error>;
    /// Gives up this node's claim of work, so that any node may do it. Its attempts still count.
    async fn release(&self, key: &WorkKey) -> Result<(), Error>;

    /// Queues a signal for the other nodes. Never blocks, and does nothing if there are no others.
    fn publish(&self, signal: Signal);
    /// Waits for signals of other nodes. Those of one node come in the order in which it published them.
    async fn receive(&self) -> Result<Vec<Signal>, Error>;
    /// Returns threads by their keys. Unknown ones are missing.
    async fn threads_by_key(&self, keys: Vec<ThreadKey>) -> Result<Vec<Arc<Thread>>, Error>;
}

/// Numbers of requests that a node has in progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Activity {
    pub(crate) asking: usize,
    pub(crate) invoking: usize,
}

/// A node of a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) id: String,
    /// Address that the node itself listens on.
    pub(crate) url: String,
    pub(crate) started_at: Timestamp,
    /// Time of its last renewal.
    pub(crate) seen_at: Timestamp,
    pub(crate) activity: Activity,
}

/// Outcome of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Renewal {
    /// True if the lease had run out before. Other nodes may have taken over work of this node.
    pub(crate) lapsed: bool,
    /// True if another node has left or lost its lease since the last renewal, or if this node has become the host of a tool
    /// server. Work can be taken over.
    pub(crate) peer_gone: bool,
    /// Time until the lease has to be renewed, or that of another node may run out.
    pub(crate) next: Duration,
}

/// Message to the other nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Signal {
    /// A step of the thread was committed.
    #[serde(rename = "c")]
    Changed {
        thread: ThreadKey,
        status: Status,
        questions: bool,
        views: BTreeSet<ViewKey>,
        /// Children that were spawned. Nodes of an earlier release do not send them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        children: Vec<ChildEvent>,
    },
    /// Part of an answer in progress.
    #[serde(rename = "d")]
    Delta { thread: ThreadKey, turn: u64, attempt: u32, text: String },
    /// A notice for users that is not stored.
    #[serde(rename = "n")]
    Notice { thread: ThreadKey, text: String },
    /// A row of the delivery log was added or changed.
    #[serde(rename = "l")]
    Delivery { id: String },
    /// Work that no node has claimed was stored.
    #[serde(rename = "w")]
    Work { queue: WorkQueue },
    /// The work is no longer needed.
    #[serde(rename = "x")]
    Cancelled { key: WorkKey },
    /// The host of tool servers that nodes start themselves has to notify them: a call was cancelled, or a thread closed and
    /// its calls cancelled.
    #[serde(rename = "t")]
    Notify {
        session: SessionKey,
        thread: ThreadKey,
        thread_id: ThreadId,
        call: Option<CallId>,
        cancelled: Vec<CallId>,
    },
    /// A client token was revoked.
    #[serde(rename = "r")]
    Revoked,
    /// A node has given up its lease.
    #[serde(rename = "g")]
    Left,
    /// Earlier signals were lost.
    #[serde(rename = "o")]
    Lost,
}

/// Reserves a slot for work that a step is about to store, if the work could start at once. The work is then stored with the
/// claim of this node.
pub(crate) type Reserve = Box<dyn Fn(&WorkQueue, SessionKey, &WorkKey) -> Option<Reservation> + Send + Sync>;

/// A reserved slot. It is released on drop, unless its work was started.
pub(crate) struct Reservation(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Reservation {
    pub(crate) fn new(release: impl FnOnce() + Send + Sync + 'static) -> Reservation {
        Reservation(Some(Box::new(release)))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(release) = self.0.take() {
            release();
        }
    }
}
