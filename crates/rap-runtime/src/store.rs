//! The store: threads, their histories and their work, in terms of the domain.
//!
//! [`Store`] is the interface of every database. An implementation is a folder below `store/`; nothing outside of it knows
//! a connection, a statement, a row number or an error of its engine. Invariants of every implementation:
//! - I3 Steps of one thread are serial.
//! - I4 Head and writes of a step are committed together or not at all.
//! - Nobody hears of a step, refusals included, and no effect is carried out, before the commit.
//! - A step is written as it is. The store adds nothing to it and leaves nothing out.

mod apply;
mod ledger;
mod listing;
pub(crate) mod sqlite;
#[cfg(test)]
mod suite;
mod thread;
mod work;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Ignored, Input, Limits, LostAfter, Seq, Status, StatusCheck, Step};
use rap_protocol::{CallId, ThreadId, Timestamp};

#[cfg(test)]
pub(crate) use apply::PANIC;
pub(crate) use apply::{Loaded, SharedFacts, Stepped, rounds, step_one};
pub(crate) use ledger::{
    Delivery, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Redelivery,
};
pub(crate) use listing::{
    CallRow, Cursor, HistoryPage, InboxItem, Page, StoredQuestion, SubscriptionRow, ThreadFilter, ThreadRow,
    TimerRow, ViewRow, Wanted,
};
pub use sqlite::OpenError;
pub(crate) use sqlite::SqliteStore;
pub(crate) use thread::{NewThread, SessionKey, Thread, ThreadKey, new_thread_id};
pub(crate) use work::{
    AnswerWork, AskWork, CheckWork, DuePage, DueWork, InvokeWork, OutboxKey, OutboxMessage, Timer, Work,
    WorkKey, WorkKind, WorkQueue,
};

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no such thread")]
    NoThread,
    #[error("the callback URL belongs to another thread")]
    WrongThread,
    #[error("a thread of that id exists")]
    Exists,
    #[error("the Idempotency-Key was used for another request; make a new key for each request")]
    KeyReused,
    #[error(transparent)]
    Ignored(#[from] Ignored),
    /// A step of the thread panicked. It takes no input until the next start.
    #[error("the thread is set aside after an internal error")]
    SetAside,
    /// Stored data makes no sense. Trying again does not help.
    #[error("stored data cannot be read")]
    Unreadable(#[source] BoxError),
    #[error("too much waits to be written")]
    Busy,
    /// Try later.
    #[error("the database is not available")]
    Unavailable(#[source] BoxError),
    #[error("the store is closed")]
    Closed,
}

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    /// The error and its sources in one line, for logs.
    pub(crate) fn with_sources(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}

/// Who sends an input. Internal ones go first, but not without an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// The runtime itself. Never refused because too much waits.
    Internal,
    /// A request from outside, which can be told to come back later.
    External,
}

/// The thread that a message is for.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Id(ThreadId),
    Key(ThreadKey),
    /// As a callback token names it. Another incarnation is another thread.
    Token {
        key: ThreadKey,
        incarnation: u64,
        id: ThreadId,
    },
    /// A root that does not exist yet.
    New(NewThread),
    /// A root that does not exist yet and begins with the history of another thread, up to the nearest valid point.
    Fork {
        source: ThreadId,
        at: Option<Seq>,
        id: ThreadId,
        incarnation: u64,
    },
}

/// An input on its way to a thread, and what is committed together with its step.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) target: Target,
    pub(crate) input: Input,
    /// Makes a repeat of a client's request harmless.
    pub(crate) once: Option<Once>,
    /// The stored message of another thread that this delivers. Without it in the store, this is a repeat.
    pub(crate) outbox: Option<OutboxKey>,
    /// What the session holds of a tool server from now on.
    pub(crate) toolset: Option<SessionToolset>,
}

impl Message {
    pub(crate) fn new(target: Target, input: Input) -> Message {
        Message { target, input, once: None, outbox: None, toolset: None }
    }
}

/// Identifies a request of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Once {
    /// Digest of the client's key and what it counts for.
    pub(crate) key: [u8; 32],
    /// Digest of the request.
    pub(crate) request: [u8; 32],
}

/// What the sender of a message hears of its step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) thread: ThreadId,
    pub(crate) turn: u64,
}

/// A committed step.
pub(crate) struct Committed {
    pub(crate) thread: Arc<Thread>,
    pub(crate) step: Step,
    /// The children that it added, in the order of its writes.
    pub(crate) children: Vec<Arc<Thread>>,
    /// Whether this is told late, after a commit of unknown outcome. Its work may have been found in the store before.
    pub(crate) late: bool,
}

/// Called with each committed step, in commit order. It must be quick.
pub(crate) type OnCommit = Box<dyn Fn(Committed) + Send + Sync>;

/// What the store is given to apply messages with.
pub(crate) struct Rules {
    /// The bounds of threads whose agent has none of its own.
    pub(crate) limits: Limits,
    /// The bounds of agents that have their own.
    pub(crate) agent_limits: HashMap<String, Limits>,
    /// The model server of each agent.
    pub(crate) model_servers: HashMap<String, String>,
    /// When calls and subscriptions are checked.
    pub(crate) lost_after: LostAfter,
}

impl Rules {
    pub(crate) fn limits(&self, agent: &str) -> &Limits {
        self.agent_limits.get(agent).unwrap_or(&self.limits)
    }

    /// The destination of an agent's questions; empty for an agent that is not configured any more.
    pub(crate) fn model_server(&self, agent: &str) -> &str {
        self.model_servers.get(agent).map_or("", String::as_str)
    }
}

/// What a session holds of a tool server.
#[derive(Debug, Clone)]
pub(crate) struct SessionToolset {
    pub(crate) session: SessionKey,
    pub(crate) server: String,
    /// The toolset; without one, the session keeps what it held.
    pub(crate) toolset: Option<StoredToolset>,
    /// Why the last discovery failed.
    pub(crate) error: Option<String>,
    pub(crate) fetched_at: Timestamp,
}

/// A toolset as its server sent it.
#[derive(Debug, Clone)]
pub(crate) struct StoredToolset {
    pub(crate) hash: String,
    /// The document; none where it is known to be stored.
    pub(crate) body: Option<Arc<Vec<u8>>>,
}

/// How much there is of everything.
pub(crate) struct Census {
    pub(crate) threads: [(&'static str, i64); Status::ALL.len()],
    /// Work that waits, by kind, counted up to [`COUNTED`].
    pub(crate) waiting: Vec<(&'static str, u32)>,
    /// Threads that are set aside because a step of theirs panicked.
    pub(crate) set_aside: usize,
}

/// Work that waits is counted up to this number.
pub(crate) const COUNTED: u32 = 10_000;

/// A database of threads.
#[async_trait]
pub(crate) trait Store: Send + Sync {
    /// Applies messages in order. When this resolves, each step is on disk, or nothing of it is.
    async fn apply(&self, lane: Lane, messages: Vec<Message>) -> Vec<Result<Receipt, Error>>;

    async fn thread(&self, id: &ThreadId) -> Result<ThreadRow, Error>;
    /// Threads in the order in which they were made.
    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error>;
    /// What people see of a history. Synthetic calls show the arguments of their original.
    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error>;
    /// What a model sees of a history: the last summary, and what it does not cover.
    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error>;
    /// The entries from the last message of a user.
    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error>;
    /// How people see the open calls of a thread, where their tools say so.
    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error>;
    /// The cause of a thread, or of the thread that it descends from.
    async fn cause(&self, thread: &Thread) -> Result<Cause, Error>;
    async fn knows_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error>;
    async fn views(&self, thread: ThreadKey) -> Result<Vec<ViewRow>, Error>;

    /// Questions that wait for a person, in one thread or in all; the oldest first.
    async fn inbox(&self, thread: Option<ThreadKey>, wanted: Wanted) -> Result<Page<InboxItem>, Error>;
    async fn calls(&self, wanted: Wanted) -> Result<Page<CallRow>, Error>;
    async fn subscriptions(&self, wanted: Wanted) -> Result<Page<SubscriptionRow>, Error>;
    /// Sleeps, schedules, time-outs of calls and retries of failed threads; the next first.
    async fn timers(&self, wanted: Wanted) -> Result<Page<TimerRow>, Error>;

    /// What a session holds of each tool server that it has asked.
    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error>;
    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error>;
    /// The hash of the toolset that any session fetched last from a server.
    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error>;
    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error>;

    /// The destinations that have work.
    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error>;
    /// Due work of one queue, page by page: sessions in the order of their keys, each with its longest-waiting work first.
    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error>;
    /// Work that is still due, with everything that an attempt needs. If it cannot be read, it has to be postponed.
    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error>;
    /// Puts off work after an attempt that did not succeed.
    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error>;
    /// A person's answer was delivered, or is not to be delivered any more.
    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error>;
    /// Tool servers have accepted these invocations.
    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error>;
    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error>;
    /// Messages between threads that are due, oldest first.
    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error>;
    /// Timers that are due, oldest first. Time-outs of calls that were over before `late_after` are left out.
    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error>;
    /// Puts off timers that are still due and messages that could not be applied, so that they do not stay in front.
    async fn put_off(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error>;
    /// Time of the next retry or timer after a time.
    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error>;

    /// Writes records of deliveries; returns their ids.
    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error>;
    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error>;
    async fn delivery(&self, id: &str) -> Result<Option<Delivery>, Error>;
    /// Makes an invocation due that waits for a retry.
    async fn redeliver(&self, id: &str, now: Timestamp) -> Result<Redelivery, Error>;

    /// Removes a bounded number of rows that are kept for a time only. Returns whether there are more.
    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error>;
    async fn census(&self) -> Result<Census, Error>;
    /// Adds the store's own figures to an exposition.
    fn expose(&self, text: &mut rap_io::metrics::Exposition);
    async fn is_readable(&self) -> Result<(), Error>;
    /// Finishes what waits and closes the database.
    async fn close(&self);
}
