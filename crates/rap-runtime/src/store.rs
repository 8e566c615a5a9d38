//! The store of threads, their histories and their pending work, in domain terms.
//!
//! Every database implements [`Store`]. An implementation is a folder below `store/`. Its connections, statements, row
//! numbers and database errors stay inside that folder. Every implementation guarantees:
//! - I3 Steps of one thread are serial.
//! - I4 The head and the writes of a step are committed together or not at all.
//! - No reply is sent, not even a refusal, and no effect is carried out before the commit.
//! - A step is written unchanged. The store adds nothing to it and omits nothing.

pub(crate) mod alert;
mod apply;
mod batch;
mod client_token;
pub(crate) mod damage;
pub(crate) mod deletion;
mod delivery_log;
mod figures;
mod fleet;
mod listing;
mod message_queue;
pub(crate) mod postgres;
pub(crate) mod raw_rows;
pub(crate) mod sqlite;
pub(crate) mod stored;
#[cfg(test)]
pub(crate) mod suite;
mod thread;
pub(crate) mod transfer;
mod work;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Ignored, Input, Limits, LostAfter, Seq, Status, StatusCheck, Step, Usage};
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};

pub(crate) use alert::{Alert, AlertRule, ClaimedAlerts};
#[cfg(test)]
pub(crate) use apply::PANIC;
pub(crate) use apply::{Loaded, SharedFacts, Stepped, rounds, step_one};
pub(crate) use client_token::{
    ClientToken, NewClientToken, TOKENS, TokenDigest, TokenId, Visibility, may_be_created, new_token,
};
pub(crate) use deletion::{Expired, Expiry, Remaining};
pub(crate) use delivery_log::{
    Delivery, DeliveryAttempt, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Redelivery,
    outcome_after,
};
pub(crate) use figures::{Figures, FiguresRow, PART};
pub(crate) use fleet::{Activity, Fleet, Node, Renewal, Reservation, Reserve, Signal};
pub(crate) use listing::{
    CallRow, Cursor, HistoryPage, InboxItem, Page, PageRequest, RecentEvents, StoredQuestion,
    SubscriptionRow, ThreadFilter, ThreadRow, TimerRow, ViewKey, ViewRow,
};
pub use postgres::{PostgresError, UrlError};
pub use sqlite::OpenError;
pub(crate) use sqlite::SqliteStore;
pub(crate) use thread::{NewThread, SessionKey, Thread, ThreadKey, new_thread_id};
pub(crate) use transfer::Transfer;
pub(crate) use work::{
    AnswerWork, AskWork, CheckWork, DuePage, DueWork, InvokeWork, LongestPauses, OutboxKey, OutboxMessage,
    Timer, Work, WorkKey, WorkKind, WorkQueue,
};

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no such thread; GET /v1/threads lists those that exist")]
    NoThread,
    #[error("the callback URL belongs to another thread")]
    WrongThread,
    #[error("a thread with this id already exists; choose another id, or send a message to that thread")]
    Exists,
    /// The session is being moved to another database, or from one. Retry later.
    #[error("the session is being moved; retry later")]
    Moving,
    #[error("the thread has a parent; delete the session by the id of its root thread")]
    NotARoot,
    #[error("the thread is not closed; close it first, which closes its descendants, too")]
    NotClosed,
    #[error("the Idempotency-Key was used for another request; make a new key for each request")]
    KeyReused,
    #[error(transparent)]
    Ignored(#[from] Ignored),
    /// A step of the thread panicked. The thread accepts no input until the runtime restarts.
    #[error("the thread is disabled until the runtime restarts, because of an internal error")]
    Disabled,
    /// Stored data is invalid. Retrying does not help.
    #[error("stored data cannot be read")]
    Unreadable(#[source] BoxError),
    /// The queue of messages or of writer jobs is full. Retry later.
    #[error("too many messages are waiting to be written; retry later")]
    Busy,
    /// Retry later.
    #[error("the database is not available")]
    Unavailable(#[source] BoxError),
    #[error("the store is closed")]
    Closed,
}

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    /// Returns the error and its sources in one line, for logs.
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

/// The class of a message, by its origin. Internal messages go first, but cannot starve external ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageClass {
    /// Sent by the runtime itself. Never refused because of a full queue.
    Internal,
    /// Sent by a client or a tool server, which can be told to retry later. Senders take turns.
    External(MessageSender),
}

#[cfg(test)]
impl MessageClass {
    /// The class of messages of a client, for tests.
    pub(crate) const OF_A_CLIENT: MessageClass = MessageClass::External(MessageSender::Client(Client::Local));
}

/// Sender of external messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageSender {
    Client(Client),
    /// The tool servers that send callbacks to a thread.
    Tools(ThreadKey),
}

/// A client of the API: everyone who uses the same token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    /// Needs no token.
    Local,
    /// Position of the token in the settings.
    Configured(usize),
    Created(TokenId),
}

/// The receiving thread of a message.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Id(ThreadId),
    Key(ThreadKey),
    /// The thread that a callback token identifies. A different incarnation is a different thread.
    Token {
        key: ThreadKey,
        incarnation: u64,
        id: ThreadId,
    },
    /// A root thread that does not exist yet.
    New(NewThread),
    /// A root thread that does not exist yet and inherits the history of `source` up to the nearest valid point at or
    /// before `at`, or up to the last valid point if `at` is `None`.
    Fork {
        source: ThreadId,
        at: Option<Seq>,
        id: ThreadId,
        incarnation: u64,
    },
}

/// An input for a thread, and the data that is committed together with its step.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) target: Target,
    pub(crate) input: Input,
    /// Threads that the sender sees. For it, the others do not exist.
    pub(crate) visible: Visibility,
    /// Identifies a client's request, so that a repeat of it is not applied again.
    pub(crate) idempotency_key: Option<IdempotencyKey>,
    /// The outbox message that this message delivers. If it is no longer stored, this message is a duplicate.
    pub(crate) outbox: Option<OutboxKey>,
    /// A toolset to save for the session together with the step.
    pub(crate) toolset: Option<SessionToolset>,
}

impl Message {
    pub(crate) fn new(target: Target, input: Input) -> Message {
        Message {
            target,
            input,
            visible: Visibility::All,
            idempotency_key: None,
            outbox: None,
            toolset: None,
        }
    }
}

/// Identifies a request of a client, so that a repeat of it is recognised.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdempotencyKey {
    /// Digest of the client, its Idempotency-Key and the scope of the key.
    pub(crate) key: [u8; 32],
    /// Digest without the client, under which releases without client tokens stored the key.
    pub(crate) former_key: Option<[u8; 32]>,
    /// Digest of the request. The same key with another request is refused.
    pub(crate) request: [u8; 32],
}

/// The reply to the sender of a message whose step was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) thread: ThreadId,
    /// Turn number of the thread after the step.
    pub(crate) turn: u64,
}

/// A committed step.
pub(crate) struct Committed {
    pub(crate) thread: Arc<Thread>,
    pub(crate) step: Step,
    /// The children that the step added, in the order of its writes.
    pub(crate) children: Vec<Arc<Thread>>,
    /// True if the commit had an unknown outcome and was confirmed later. The dispatcher may already have found the
    /// work of the step in the store.
    pub(crate) late: bool,
    /// Slots that were reserved for work of the step.
    pub(crate) reserved: Vec<Reservation>,
}

/// Called with each committed step, in commit order. It must return quickly.
pub(crate) type OnCommit = Box<dyn Fn(Committed) + Send + Sync>;

/// The settings that the store applies messages with.
pub(crate) struct StepSettings {
    /// Limits of threads whose agent has no limits of its own.
    pub(crate) limits: Limits,
    /// Limits of agents that have their own, by agent name.
    pub(crate) agent_limits: HashMap<String, Limits>,
    /// Base URL of the model server of each agent, by agent name.
    pub(crate) model_servers: HashMap<String, String>,
    /// Time after which the status of calls and subscriptions is checked.
    pub(crate) lost_after: LostAfter,
    /// Destinations of alerts.
    pub(crate) alerts: Vec<AlertRule>,
    /// Base of the callback URLs of new calls. It is stored with each call, so that a retry has the same URL even if this
    /// has changed since.
    pub(crate) callback_base: String,
}

impl StepSettings {
    pub(crate) fn limits(&self, agent: &str) -> &Limits {
        self.agent_limits.get(agent).unwrap_or(&self.limits)
    }

    /// Returns the longest time for which a thread holds its input.
    pub(crate) fn longest_hold(&self) -> Duration {
        self.agent_limits
            .values()
            .chain([&self.limits])
            .map(|limits| limits.hold_max)
            .max()
            .unwrap_or_default()
    }

    /// Returns the destination of an agent's model requests. It is empty for an agent that is no longer configured.
    pub(crate) fn model_server(&self, agent: &str) -> &str {
        self.model_servers.get(agent).map_or("", String::as_str)
    }
}

/// The toolset of one tool server in a session.
#[derive(Debug, Clone)]
pub(crate) struct SessionToolset {
    pub(crate) session: SessionKey,
    pub(crate) server: String,
    /// If this is `None`, saving keeps the toolset that the session already has.
    pub(crate) toolset: Option<StoredToolset>,
    /// The reason why the last discovery failed. `None` if it succeeded.
    pub(crate) error: Option<String>,
    pub(crate) fetched_at: Timestamp,
    pub(crate) source: Source,
}

/// Source of a toolset of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A fetch for this session, which replaces any other toolset.
    Fetched,
    /// The newest toolset that any session has fetched. It never replaces a toolset that the session has.
    StandIn,
}

/// A toolset as its server sent it.
#[derive(Debug, Clone)]
pub(crate) struct StoredToolset {
    pub(crate) hash: String,
    /// The toolset document. `None` if it is already stored.
    pub(crate) body: Option<Arc<Vec<u8>>>,
}

/// Numbers of threads and of waiting work, for metrics.
pub(crate) struct StoreCounts {
    pub(crate) threads: [(&'static str, i64); Status::ALL.len()],
    /// Number of waiting items of work by kind, each counted up to [`COUNT_LIMIT`].
    pub(crate) waiting: Vec<(&'static str, u32)>,
    /// Number of threads that are disabled because one of their steps panicked.
    pub(crate) disabled: usize,
    /// Number of threads that are set aside because their rows are damaged, counted up to [`COUNT_LIMIT`].
    pub(crate) damaged: u32,
}

/// Waiting work is counted up to this number.
pub(crate) const COUNT_LIMIT: u32 = 10_000;

/// A database of threads.
#[async_trait]
pub(crate) trait Store: Transfer {
    /// Applies messages in order. When this returns, each step is on disk completely or not at all.
    async fn apply(&self, class: MessageClass, messages: Vec<Message>) -> Vec<Result<Receipt, Error>>;

    /// Returns a thread, or [`Error::NoThread`] if it is not visible.
    async fn thread(&self, id: &ThreadId, visible: &Visibility) -> Result<ThreadRow, Error>;
    /// Lists threads in the order of their creation.
    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error>;
    /// Returns a history as people see it. Synthetic calls show the arguments of the original call.
    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error>;
    /// Returns the size of the entries of such a page, in bytes, as they are stored. It is known without reading them.
    async fn history_bytes(&self, thread: &Thread, page: HistoryPage) -> Result<usize, Error>;
    /// Returns a history as the model sees it: the last summary and the entries that it does not cover.
    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error>;
    /// Returns the entries from the last user message on.
    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error>;
    /// Returns the display texts of the open calls of a thread. Calls without a display text are missing.
    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error>;
    /// Returns the cause of a thread, or of its nearest ancestor that has one.
    async fn cause(&self, thread: &Thread) -> Result<Cause, Error>;
    /// Returns the tool server of a call, even if the call is settled.
    async fn server_of_call(&self, thread: ThreadKey, call: &CallId) -> Result<Option<String>, Error>;
    async fn has_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error>;
    /// Returns the tokens and costs of all threads of a session, and their number.
    async fn session_usage(&self, session: SessionKey) -> Result<(Usage, u64), Error>;
    /// Returns a page of the views of a thread, in the order of their keys.
    async fn views(&self, thread: ThreadKey, after: Option<ViewKey>)
    -> Result<Page<ViewRow, ViewKey>, Error>;
    async fn view(&self, thread: ThreadKey, key: &ViewKey) -> Result<Option<ViewRow>, Error>;

    /// Lists unanswered questions to people, in one thread or in all, oldest first. Those of one thread come without the
    /// arguments of their calls, because event streams read them after every step of the thread.
    async fn inbox(
        &self,
        thread: Option<ThreadKey>,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<InboxItem>, Error>;
    async fn calls(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<CallRow>, Error>;
    async fn subscriptions(
        &self,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<SubscriptionRow>, Error>;
    /// Lists sleeps, schedules, timeouts of calls and retries of failed threads, the next one first.
    async fn timers(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<TimerRow>, Error>;

    /// Returns the toolsets of a session, one per tool server that was asked for it.
    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error>;
    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error>;
    /// Returns the hash of the toolset that was fetched last from a server, by any session.
    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error>;
    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error>;

    /// Lists the destinations that have work of a kind.
    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error>;
    /// Returns a page of the due work of one queue: sessions in the order of their keys, each with its oldest work
    /// first.
    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error>;
    /// Loads work with everything that an attempt needs. Returns `None` if it is no longer due. The caller has to
    /// postpone work that cannot be read.
    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error>;
    /// Records that rows of a thread are damaged. Until its next step the thread is shown as failed with this reason.
    async fn set_aside(&self, target: &Target, why: String, now: Timestamp) -> Result<(), Error>;
    /// Sets the next due time of work after a failed attempt.
    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error>;
    /// Changes the destination of a model request.
    async fn redirect(&self, key: &WorkKey, destination: &str) -> Result<(), Error>;
    /// Records that a person's answer was delivered, or need not be delivered any more.
    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error>;
    /// Records that tool servers have accepted these invocations.
    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error>;
    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error>;
    /// Returns due messages between threads, oldest first, except those of the sessions in `skip`.
    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error>;
    /// Returns due timers, oldest first, except those of the sessions in `skip`. Timeouts of calls that were due
    /// before `late_after` are left out.
    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error>;
    /// Postpones timers that are still due and messages that could not be applied, so that they do not block the ones
    /// behind them.
    async fn postpone_due(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error>;
    /// Makes everything due that pauses for longer than its kind ever does, because the clock was set back meanwhile.
    async fn end_long_pauses(&self, now: Timestamp, longest: LongestPauses) -> Result<(), Error>;
    /// Returns the time of the first retry or timer after a time.
    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error>;

    /// Writes records of deliveries and returns their ids.
    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error>;
    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error>;
    async fn delivery(&self, id: &str, visible: &Visibility) -> Result<Option<Delivery>, Error>;
    /// Makes an invocation that waits for a retry due now.
    async fn redeliver(&self, id: &str, visible: &Visibility, now: Timestamp) -> Result<Redelivery, Error>;

    /// Claims up to `limit` due alerts of a destination until a time, after which they are due again.
    async fn claim_alerts(
        &self,
        destination: &str,
        now: Timestamp,
        until: Timestamp,
        limit: usize,
    ) -> Result<ClaimedAlerts, Error>;
    /// Sets the time of the next attempt to send an alert, or deletes the alert if there is none.
    async fn settle_alert(&self, number: i64, next: Option<Timestamp>) -> Result<(), Error>;
    /// Deletes alerts that were made before a time.
    async fn expire_alerts(&self, before: Timestamp) -> Result<(), Error>;

    /// Adds a client token. Returns `None` if there are `max` tokens already.
    async fn add_token(&self, token: NewClientToken, max: usize) -> Result<Option<TokenId>, Error>;
    async fn token(&self, digest: &TokenDigest) -> Result<Option<ClientToken>, Error>;
    /// Lists client tokens, oldest first.
    async fn tokens(&self, page_request: PageRequest) -> Result<Page<ClientToken>, Error>;
    /// Records the time of a token's last request, unless a later one is recorded.
    async fn token_used(&self, id: TokenId, at: Timestamp) -> Result<(), Error>;
    /// Removes a client token. Returns false if there is none with this id.
    async fn revoke_token(&self, id: TokenId) -> Result<bool, Error>;

    /// Adds figures to those that are stored.
    async fn add_figures(&self, rows: Vec<FiguresRow>, now: Timestamp) -> Result<(), Error>;
    /// Returns the figures since a time, added up in intervals of `step` milliseconds: agents by name, each in order of
    /// time.
    async fn figures(&self, since: Timestamp, step: i64) -> Result<Vec<FiguresRow>, Error>;
    /// Counts the threads of a user by status, up to [`COUNT_LIMIT`] threads.
    async fn statuses(&self, user: &UserId) -> Result<Vec<(String, i64)>, Error>;

    /// Removes a bounded number of expired rows. Returns whether there are more.
    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error>;
    /// Marks a closed session, which hides it and has its rows deleted.
    async fn delete_session(&self, id: &ThreadId, visible: &Visibility) -> Result<(), Error>;
    /// Looks at a bounded number of root threads after one, and counts or marks sessions that were closed before a time.
    async fn expire_sessions(
        &self,
        before: Timestamp,
        after: Option<ThreadKey>,
        expiry: Expiry,
    ) -> Result<Expired, Error>;
    /// Deletes a bounded number of rows of a marked session, or copies them into forks that inherit them.
    async fn delete_batch(&self) -> Result<Remaining, Error>;
    async fn counts(&self) -> Result<StoreCounts, Error>;
    /// Adds the store's own metrics to an exposition.
    fn expose(&self, text: &mut rap_io::metrics::Exposition);
    /// Fails if the database does not answer, or takes no writes.
    async fn is_readable(&self) -> Result<(), Error>;
    /// Returns the connection to the other nodes of the database. `None` if it can have only one node.
    fn fleet(&self) -> Option<&dyn Fleet> {
        None
    }
    /// Applies the waiting messages and closes the database.
    async fn close(&self);
}
