//! The store in one SQLite file, with one writer and several readers. Each batch of messages is one transaction.
//!
//! Messages wait in a queue. A job of the group-commit writer takes the waiting messages, applies them and, after the
//! COMMIT, replies to their senders. Each head has a version. If the outcome of a COMMIT is unknown, the stored
//! versions tell whether it succeeded, before anything else is applied.

mod access;
mod alerts;
mod apply;
mod backup;
mod cache;
mod counts;
mod deletion;
mod delivery_log;
mod facts;
mod figures;
mod heads;
mod history;
mod listings;
mod prune;
mod raw_rows;
mod search;
#[cfg(test)]
pub(crate) mod tests;
mod tokens;
mod toolsets;
mod transfer;
mod work;
mod writes;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck, Usage};
use rap_io::exposure::warn_if_exposed;
use rap_io::lock::{DirLock, LockError};
use rap_io::metrics::Exposition;
use rap_io::secret_box::Key;
use rap_io::sqlite::{MigrateError, database_files, migrate, open_sqlite};
use rap_io::writer::{self, WriterLimits};
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension};

use super::batch::{self, Applied, Batch, DisabledThreads, Outcome, PendingReply, StepMetrics};
use super::message_queue::{MessageQueue, Pending};
use super::transfer::DEPARTURE_LIFETIME;
use super::{
    COUNT_LIMIT, CallRow, ClaimedAlerts, ClientToken, Delivery, DeliveryFilter, DeliveryRecord, DuePage,
    DueWork, Error, Expired, Expiry, FiguresRow, HistoryPage, InboxItem, LongestPauses, Message,
    MessageClass, NewClientToken, OnCommit, OutboxKey, OutboxMessage, Page, PageRequest, Receipt, Redelivery,
    Remaining, SessionKey, SessionToolset, StepSettings, Store, StoreCounts, SubscriptionRow, Target, Thread,
    ThreadFilter, ThreadKey, ThreadRow, Timer, TimerRow, TokenDigest, TokenId, ViewKey, ViewRow, Visibility,
    Work, WorkKey, WorkKind, WorkQueue,
};
use crate::world::Clock;
use access::Access;
#[cfg(test)]
pub(crate) use access::{CommitFault, Inline, Observed, ObservedOutcome};
use apply::{Applier, Context};
pub(crate) use backup::copy_snapshot;
pub(crate) use raw_rows::RawRows;
pub(crate) use transfer::SqliteReader;

pub(crate) const MIGRATIONS: &[&str] = &[
    include_str!("sqlite/schema_1.sql"),
    include_str!("sqlite/schema_2.sql"),
    include_str!("sqlite/schema_3.sql"),
    include_str!("sqlite/schema_4.sql"),
    include_str!("sqlite/schema_5.sql"),
    include_str!("sqlite/schema_6.sql"),
    include_str!("sqlite/schema_7.sql"),
    include_str!("sqlite/schema_8.sql"),
    include_str!("sqlite/schema_9.sql"),
    include_str!("sqlite/schema_10.sql"),
];
/// Newest schema version that this release knows.
pub(crate) const KNOWN: i64 = MIGRATIONS.len() as i64;
/// Maximum number of messages in a batch.
const BATCH: usize = 32;
/// Maximum number of writer jobs that share a commit. A job is a batch of messages or a write outside a step.
const COMMIT_JOBS: usize = 8;

/// An error when opening the store.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process owns the database.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// The database was written by a newer version, or a migration failed.
    #[error("{}", path.display())]
    Schema {
        /// Path of the database.
        path: PathBuf,
        /// The reason.
        source: MigrateError,
    },
    /// The file cannot be opened.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// Path of the database.
        path: PathBuf,
        /// The error of the database.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match heads::is_row_error(&error) {
            true => Error::Unreadable(error.into()),
            false => Error::Unavailable(error.into()),
        }
    }
}

impl From<writer::Error> for Error {
    fn from(error: writer::Error) -> Self {
        match error {
            writer::Error::Busy => Error::Busy,
            writer::Error::Closed => Error::Closed,
            writer::Error::Sql(error) => error.into(),
            error => Error::Unavailable(error.into()),
        }
    }
}

/// A store in a SQLite database. Clones refer to the same store.
#[derive(Clone)]
pub(crate) struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    access: Access,
    queue: MessageQueue,
    applier: Mutex<Applier>,
    disabled: DisabledThreads,
    /// The batch whose commit is in progress, or whose outcome is unknown.
    committing: Mutex<Option<Batch>>,
    rules: StepSettings,
    key: Key,
    clock: Arc<dyn Clock>,
    on_commit: OnCommit,
    metrics: StepMetrics,
    _lock: Option<DirLock>,
}

impl SqliteStore {
    /// Opens or creates the database. This blocks. The lock file is in the same directory.
    pub(crate) fn open(
        path: &Path,
        key: Key,
        rules: StepSettings,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
    ) -> Result<SqliteStore, OpenError> {
        let limits = WriterLimits { batch_jobs: COMMIT_JOBS, ..WriterLimits::default() };
        SqliteStore::open_with(path, key, rules, clock, on_commit, limits)
    }

    fn open_with(
        path: &Path,
        key: Key,
        rules: StepSettings,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
        limits: WriterLimits,
    ) -> Result<SqliteStore, OpenError> {
        let lock_file = sibling_path(path, "lock");
        let lock = DirLock::take(&lock_file)?;
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| OpenError::Open { path: path.into(), source };
        let conn = open_sqlite(path).map_err(|error| failed(error.into()))?;
        migrate(&conn, MIGRATIONS).map_err(|source| OpenError::Schema { path: path.into(), source })?;
        let prepared =
            heads::retarget_model_requests(&conn, &rules).and_then(|()| heads::recompute_due(&conn, &rules));
        let prepared = prepared.and_then(|()| alerts::release(&conn));
        let prepared = prepared.and_then(|()| work::keep_callback_base(&conn, &rules.callback_base));
        prepared.map_err(|error| failed(error.into()))?;
        warn_if_exposed(&[&database_files(path)[..], &[lock_file]].concat());
        drop(conn);
        let slot: Arc<std::sync::OnceLock<std::sync::Weak<Inner>>> = Arc::default();
        let lost = Arc::clone(&slot);
        let on_lost = move || {
            if let Some(inner) = lost.get().and_then(std::sync::Weak::upgrade) {
                inner.batch_lost();
            }
        };
        let access = Access::threads(path, limits, on_lost).map_err(|error| failed(error.into()))?;
        let store = SqliteStore::new(access, key, rules, clock, on_commit, Some(lock));
        slot.set(Arc::downgrade(&store.inner)).unwrap_or_else(|_| unreachable!("bug: the slot is set once"));
        Ok(store)
    }

    /// Makes a store on the caller's connection, which runs all work on the calling task.
    #[cfg(test)]
    pub(crate) fn inline(
        inline: Inline,
        key: Key,
        rules: StepSettings,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
    ) -> rusqlite::Result<SqliteStore> {
        inline.with(|conn| {
            migrate(conn, MIGRATIONS).expect("bug: a new database can be migrated");
            heads::retarget_model_requests(conn, &rules)?;
            work::keep_callback_base(conn, &rules.callback_base)
        })?;
        let store = SqliteStore::new(Access::Inline(inline.clone()), key, rules, clock, on_commit, None);
        let inner = Arc::downgrade(&store.inner);
        inline.on_lost(move || {
            if let Some(inner) = inner.upgrade() {
                inner.batch_lost();
            }
        });
        Ok(store)
    }

    fn new(
        access: Access,
        key: Key,
        rules: StepSettings,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
        lock: Option<DirLock>,
    ) -> SqliteStore {
        let disabled = DisabledThreads::default();
        let inner = Inner {
            access,
            queue: MessageQueue::default(),
            applier: Mutex::new(Applier::new(disabled.clone())),
            disabled,
            committing: Mutex::default(),
            rules,
            key,
            clock,
            on_commit,
            metrics: StepMetrics::new(),
            _lock: lock,
        };
        SqliteStore { inner: Arc::new(inner) }
    }

    async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.inner.access.read(job).await
    }

    async fn write<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        self.inner.access.write(job).await
    }
}

/// Returns the path of a file that belongs to the database: its path with another extension appended.
pub(crate) fn sibling_path(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

impl Inner {
    fn applier(&self) -> MutexGuard<'_, Applier> {
        // A panic in a step is caught. After any other panic the batch is lost and all cached heads are dropped.
        self.applier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn committing(&self) -> MutexGuard<'_, Option<Batch>> {
        self.committing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Schedules a writer job that applies the waiting messages.
    fn schedule(self: &Arc<Self>) {
        let (inner, committed) = (Arc::clone(self), Arc::clone(self));
        let job = move |conn: &Connection| inner.apply_waiting(conn);
        let posted = self.access.post(job, move |()| committed.complete());
        if posted.is_err() {
            self.queue.refuse_all(|| Error::Closed);
        }
    }

    /// Applies the waiting messages. Runs in a transaction.
    fn apply_waiting(self: &Arc<Self>, conn: &Connection) -> rusqlite::Result<()> {
        let resolved = self.resolve(conn);
        if let Err(error) = &resolved {
            self.queue.refuse_all(|| Error::Unavailable(error.to_string().into()));
        }
        let mut replies = resolved?;
        let (waiting, more) = self.queue.take(BATCH);
        if more {
            self.schedule();
        }
        let applied = self.apply_batch(conn, waiting, &mut replies);
        if !replies.is_empty() {
            *self.committing() = Some(Batch { replies, outcome: Outcome::Pending });
        }
        applied
    }

    fn apply_batch(
        &self,
        conn: &Connection,
        waiting: Vec<Pending>,
        replies: &mut Vec<PendingReply>,
    ) -> rusqlite::Result<()> {
        if waiting.is_empty() {
            return Ok(());
        }
        let (messages, senders): (Vec<Message>, Vec<_>) =
            waiting.into_iter().map(|Pending { message, reply, since }| (message, (reply, since))).unzip();
        let context = Context { conn, rules: &self.rules, key: &self.key, now: self.clock.now() };
        let applied = self.applier().apply(&context, &messages);
        #[cfg(test)]
        self.access.observe(std::mem::take(&mut self.applier().observed));
        match applied {
            Ok(applied) => {
                let applied = applied.into_iter().zip(senders);
                replies.extend(applied.map(|(applied, (reply, since))| PendingReply {
                    applied,
                    reply,
                    since,
                }));
                Ok(())
            }
            Err(error) => {
                for (reply, _) in senders {
                    // The sender may have stopped waiting for the reply.
                    reply.send(Err(Error::Unavailable(error.to_string().into()))).ok();
                }
                Err(error)
            }
        }
    }

    /// Compares versions of heads to decide whether a batch of unknown outcome was committed. If it was, its replies
    /// are returned, to be sent after this commit. If not, its senders are told to retry.
    fn resolve(&self, conn: &Connection) -> rusqlite::Result<Vec<PendingReply>> {
        let mut committing = self.committing();
        let Some(batch) = &*committing else { return Ok(Vec::new()) };
        let mut stored = Vec::with_capacity(batch.replies.len());
        for pending in batch.replies.iter().filter(|_| batch.outcome == Outcome::Unknown) {
            let Applied::Done { committed, version, .. } = &pending.applied else {
                stored.push(None);
                continue;
            };
            let version_now = heads::version(conn, committed.thread.key)?;
            stored.push(Some(version_now.is_some_and(|now| now >= *version)));
        }
        // The batch is taken only now, because if reading the versions fails, this runs again.
        let Some(Batch { replies, outcome }) = committing.take() else { return Ok(Vec::new()) };
        drop(committing);
        if outcome == Outcome::Pending {
            return Ok(replies);
        }
        Ok(batch::confirmed(replies, stored))
    }

    /// Sends the replies of a batch that is on disk and reports its steps to the runtime.
    fn complete(&self) {
        let Some(Batch { replies, .. }) = self.committing().take() else { return };
        batch::complete(replies, &self.metrics, &self.on_commit);
    }

    /// Handles a failed commit. Waiting messages are refused, since they would fail in the same way. The batch may be
    /// on disk nevertheless; that is resolved later, when the database responds again.
    fn batch_lost(self: &Arc<Self>) {
        self.applier().forget_heads();
        self.queue.refuse_all(|| Error::Unavailable("the database does not answer".into()));
        let unknown = self.committing().as_mut().map(|batch| batch.outcome = Outcome::Unknown).is_some();
        if unknown {
            self.access.resolve_later(Arc::clone(self));
        }
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn apply(&self, class: MessageClass, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        batch::replies(self.inner.queue.push(class, messages, || self.inner.schedule())).await
    }

    async fn thread(&self, id: &ThreadId, visible: &Visibility) -> Result<ThreadRow, Error> {
        let (id, visible) = (id.clone(), visible.clone());
        self.read(move |conn| history::thread(conn, &id, &visible)).await?.ok_or(Error::NoThread)
    }

    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error> {
        self.read(move |conn| match &filter.phrase {
            Some(phrase) => search::threads(conn, &filter, phrase),
            None => listings::threads(conn, &filter),
        })
        .await
    }

    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error> {
        let thread = thread.clone();
        self.read(move |conn| history::for_people(conn, &thread, page)).await
    }

    async fn history_bytes(&self, thread: &Thread, page: HistoryPage) -> Result<usize, Error> {
        let thread = thread.clone();
        self.read(move |conn| history::size(conn, &thread, page)).await
    }

    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        let thread = thread.clone();
        self.read(move |conn| history::for_prompt(conn, &thread, up_to)).await
    }

    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        let thread = thread.clone();
        self.read(move |conn| history::since_user(conn, &thread, up_to)).await
    }

    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error> {
        let calls: Vec<Seq> = row.head.open_calls().map(|call| call.seq).collect();
        if calls.is_empty() {
            return Ok(HashMap::new());
        }
        let thread = Arc::clone(&row.thread);
        self.read(move |conn| history::displays(conn, &thread, calls)).await
    }

    async fn cause(&self, thread: &Thread) -> Result<Cause, Error> {
        if thread.parent.is_none() {
            return Ok(Cause::Client);
        }
        let key = thread.key;
        self.read(move |conn| history::cause(conn, key)).await
    }

    async fn server_of_call(&self, thread: ThreadKey, call: &CallId) -> Result<Option<String>, Error> {
        let call = call.clone();
        let found = self.read(move |conn| facts::past_call(conn, thread, &call)).await?;
        Ok(found.map(|call| call.server.0))
    }

    async fn has_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        let (thread, call) = (thread.clone(), call.clone());
        self.read(move |conn| match heads::key_of(conn, &thread)? {
            None => Ok(false),
            Some(key) => Ok(facts::past_call(conn, key, &call)?.is_some()),
        })
        .await
    }

    async fn session_usage(&self, session: SessionKey) -> Result<(Usage, u64), Error> {
        self.read(move |conn| listings::session_usage(conn, session)).await
    }

    async fn views(
        &self,
        thread: ThreadKey,
        after: Option<ViewKey>,
    ) -> Result<Page<ViewRow, ViewKey>, Error> {
        self.read(move |conn| listings::views(conn, thread, after.clone())).await
    }

    async fn view(&self, thread: ThreadKey, key: &ViewKey) -> Result<Option<ViewRow>, Error> {
        let key = key.clone();
        self.read(move |conn| listings::view(conn, thread, &key)).await
    }

    async fn inbox(
        &self,
        thread: Option<ThreadKey>,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<InboxItem>, Error> {
        let (key, visible) = (self.inner.key.clone(), visible.clone());
        self.read(move |conn| listings::inbox(conn, &key, thread, &visible, &page_request)).await
    }

    async fn calls(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<CallRow>, Error> {
        let visible = visible.clone();
        self.read(move |conn| listings::calls(conn, &visible, &page_request)).await
    }

    async fn subscriptions(
        &self,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<SubscriptionRow>, Error> {
        let visible = visible.clone();
        self.read(move |conn| listings::subscriptions(conn, &visible, &page_request)).await
    }

    async fn timers(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<TimerRow>, Error> {
        let visible = visible.clone();
        self.read(move |conn| listings::timers(conn, &visible, &page_request)).await
    }

    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error> {
        self.read(move |conn| toolsets::of_session(conn, session)).await
    }

    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error> {
        let hash = hash.to_owned();
        self.read(move |conn| {
            let mut statement = conn.prepare_cached("SELECT body FROM toolsets WHERE hash = ?1")?;
            statement.query_row([hash], |row| row.get(0)).optional()
        })
        .await
    }

    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error> {
        let server = server.to_owned();
        self.read(move |conn| toolsets::newest(conn, &server)).await
    }

    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error> {
        self.write(move |conn| toolsets.iter().try_for_each(|toolset| toolsets::save(conn, toolset))).await
    }

    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error> {
        self.read(move |conn| work::destinations(conn, kind)).await
    }

    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error> {
        let (queue, lost_after) = (queue.clone(), self.inner.rules.lost_after);
        self.read(move |conn| work::due(conn, &queue, &page, lost_after)).await
    }

    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error> {
        if self.inner.disabled.contains(key.thread()) {
            return Err(Error::Disabled);
        }
        let (key, secrets) = (key.clone(), self.inner.key.clone());
        self.read(move |conn| work::load(conn, &secrets, &key, now)).await
    }

    async fn set_aside(&self, target: &Target, why: String, now: Timestamp) -> Result<(), Error> {
        let target = target.clone();
        self.write(move |conn| heads::set_aside(conn, &target, &why, now)).await
    }

    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error> {
        let key = key.clone();
        self.write(move |conn| work::postpone(conn, &key, at, attempts, &outcome)).await
    }

    async fn redirect(&self, key: &WorkKey, destination: &str) -> Result<(), Error> {
        let (key, destination) = (key.clone(), destination.to_owned());
        self.write(move |conn| work::redirect(conn, &key, &destination)).await
    }

    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error> {
        let key = key.clone();
        self.write(move |conn| work::answer_delivered(conn, &key, attempts)).await
    }

    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error> {
        self.write(move |conn| work::acknowledge(conn, &calls, at)).await
    }

    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error> {
        let call = call.clone();
        self.write(move |conn| work::record_check(conn, thread, &call, check)).await
    }

    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error> {
        let skip = skip.to_vec();
        self.read(move |conn| work::due_messages(conn, now, &skip, limit)).await
    }

    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error> {
        let skip = skip.to_vec();
        self.read(move |conn| work::due_timers(conn, now, late_after, &skip, limit)).await
    }

    async fn postpone_due(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error> {
        self.write(move |conn| work::postpone_due(conn, &timers, &messages, now, at)).await
    }

    async fn end_long_pauses(&self, now: Timestamp, longest: LongestPauses) -> Result<(), Error> {
        let hold = self.inner.rules.longest_hold();
        self.write(move |conn| work::end_long_pauses(conn, now, longest, hold)).await
    }

    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        self.read(move |conn| work::next_due(conn, after)).await
    }

    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error> {
        self.write(move |conn| delivery_log::record_all(conn, &records)).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error> {
        self.read(move |conn| delivery_log::list(conn, &filter)).await
    }

    async fn delivery(&self, id: &str, visible: &Visibility) -> Result<Option<Delivery>, Error> {
        let Ok(number) = id.parse() else { return Ok(None) };
        let visible = visible.clone();
        self.read(move |conn| delivery_log::get(conn, number, &visible)).await
    }

    async fn redeliver(&self, id: &str, visible: &Visibility, now: Timestamp) -> Result<Redelivery, Error> {
        let Ok(number) = id.parse() else { return Ok(Redelivery::NoSuchDelivery) };
        let visible = visible.clone();
        self.write(move |conn| delivery_log::redeliver(conn, number, &visible, now)).await
    }

    async fn claim_alerts(
        &self,
        destination: &str,
        now: Timestamp,
        until: Timestamp,
        limit: usize,
    ) -> Result<ClaimedAlerts, Error> {
        let destination = destination.to_owned();
        self.write(move |conn| alerts::claim(conn, &destination, now, until, limit)).await
    }

    async fn settle_alert(&self, number: i64, next: Option<Timestamp>) -> Result<(), Error> {
        self.write(move |conn| match next {
            Some(at) => alerts::postpone(conn, number, at),
            None => alerts::remove(conn, number),
        })
        .await
    }

    async fn expire_alerts(&self, before: Timestamp) -> Result<(), Error> {
        self.write(move |conn| alerts::expire(conn, before)).await
    }

    async fn add_token(&self, token: NewClientToken, max: usize) -> Result<Option<TokenId>, Error> {
        self.write(move |conn| tokens::add(conn, &token, max)).await
    }

    async fn token(&self, digest: &TokenDigest) -> Result<Option<ClientToken>, Error> {
        let digest = *digest;
        self.read(move |conn| tokens::find(conn, &digest)).await
    }

    async fn tokens(&self, page_request: PageRequest) -> Result<Page<ClientToken>, Error> {
        self.read(move |conn| tokens::list(conn, &page_request)).await
    }

    async fn token_used(&self, id: TokenId, at: Timestamp) -> Result<(), Error> {
        self.write(move |conn| tokens::used(conn, id, at)).await
    }

    async fn revoke_token(&self, id: TokenId) -> Result<bool, Error> {
        self.write(move |conn| tokens::revoke(conn, id)).await
    }

    async fn add_figures(&self, rows: Vec<FiguresRow>, now: Timestamp) -> Result<(), Error> {
        self.write(move |conn| figures::add(conn, &rows, now)).await
    }

    async fn figures(&self, since: Timestamp, step: i64) -> Result<Vec<FiguresRow>, Error> {
        self.read(move |conn| figures::sum(conn, since, step)).await
    }

    async fn statuses(&self, user: &UserId) -> Result<Vec<(String, i64)>, Error> {
        let user = user.clone();
        self.read(move |conn| figures::statuses(conn, user.as_str(), COUNT_LIMIT)).await
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        let departures_before = self.inner.clock.now().minus(DEPARTURE_LIFETIME);
        self.write(move |conn| prune::prune(conn, keys_before, deliveries_before, departures_before)).await
    }

    async fn delete_session(&self, id: &ThreadId, visible: &Visibility) -> Result<(), Error> {
        let (id, visible, now) = (id.clone(), visible.clone(), self.inner.clock.now());
        self.write(move |conn| deletion::mark(conn, &id, &visible, now)).await?
    }

    async fn expire_sessions(
        &self,
        before: Timestamp,
        after: Option<ThreadKey>,
        expiry: Expiry,
    ) -> Result<Expired, Error> {
        let now = self.inner.clock.now();
        self.write(move |conn| deletion::expire(conn, before, after, expiry, now)).await
    }

    async fn delete_batch(&self) -> Result<Remaining, Error> {
        let (inner, now) = (Arc::clone(&self.inner), self.inner.clock.now());
        // An idle runtime writes nothing.
        let session = match self.read(move |conn| deletion::next(conn, now)).await? {
            Ok(session) => session,
            Err(remaining) => return Ok(remaining),
        };
        let batch = self.write(move |conn| {
            // A fork may inherit nothing any more, and threads may be gone.
            inner.applier().forget_heads();
            deletion::batch(conn, session, now)
        });
        let done = batch.await;
        if !matches!(done, Ok(_) | Err(Error::Busy | Error::Closed)) {
            // Others are deleted meanwhile.
            self.write(move |conn| deletion::postpone(conn, session, now)).await?;
        }
        done
    }

    async fn counts(&self) -> Result<StoreCounts, Error> {
        let disabled = self.inner.disabled.len();
        self.read(move |conn| counts::counts(conn, disabled)).await
    }

    fn expose(&self, text: &mut Exposition) {
        self.inner.metrics.expose(text, self.inner.queue.waiting());
        self.inner.access.expose(text);
    }

    async fn is_readable(&self) -> Result<(), Error> {
        // A statement that uses no table would not read the file.
        self.read(|conn| conn.prepare_cached("SELECT no FROM threads LIMIT 1")?.exists([])).await?;
        Ok(())
    }

    async fn close(&self) {
        self.inner.access.close().await;
    }
}
