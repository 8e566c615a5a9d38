//! The store in one SQLite file: one writer, one transaction for each batch of messages, a few readers.
//!
//! Messages wait in an inbox. A job of the group-commit writer takes those that wait, applies them and, after the COMMIT,
//! tells their senders. Heads carry versions: after a COMMIT whose outcome is unknown they decide whether it stands,
//! before anything else is applied.

mod access;
mod apply;
mod cache;
mod census;
mod facts;
mod heads;
mod history;
mod inbox;
mod ledger;
mod listings;
mod prune;
#[cfg(test)]
mod tests;
mod toolsets;
mod work;
mod writes;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck};
use rap_io::lock::{DirLock, LockError};
use rap_io::metrics::{Counter, Exposition, Histogram};
use rap_io::secret_box::Key;
use rap_io::sqlite::{MigrateError, migrate, open_sqlite};
use rap_io::writer::{self, WriterLimits};
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::oneshot;

use super::{
    CallRow, Census, Delivery, DeliveryFilter, DeliveryRecord, DuePage, DueWork, Error, HistoryPage,
    InboxItem, Lane, Message, OnCommit, OutboxKey, OutboxMessage, Page, Receipt, Redelivery, Rules,
    SessionKey, SessionToolset, Store, SubscriptionRow, Thread, ThreadFilter, ThreadKey, ThreadRow, Timer,
    TimerRow, ViewRow, Wanted, Work, WorkKey, WorkKind, WorkQueue,
};
use crate::world::Clock;
use access::Access;
#[cfg(test)]
pub(crate) use access::{CommitFault, Inline, Observed, ObservedOutcome};
use apply::{Applied, Applier, Context, SetAside};
use inbox::{Inbox, Pending};

const MIGRATIONS: &[&str] = &[include_str!("sqlite/schema_1.sql"), include_str!("sqlite/schema_2.sql")];
/// Messages that share a batch.
const BATCH: usize = 32;
/// Jobs of the writer that share a commit: a batch of messages, and writes that are not steps.
const COMMIT_JOBS: usize = 8;

/// Why the store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process owns the database.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// The schema is newer, or a migration failed.
    #[error("{}", path.display())]
    Schema {
        /// The database.
        path: PathBuf,
        /// What is wrong.
        source: MigrateError,
    },
    /// The file cannot be opened.
    #[error("cannot open the database {}", path.display())]
    Open {
        /// The database.
        path: PathBuf,
        /// The error of the database.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match heads::is_about_rows(&error) {
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

/// The store. Clones share it.
#[derive(Clone)]
pub(crate) struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    access: Access,
    inbox: Inbox,
    applier: Mutex<Applier>,
    set_aside: SetAside,
    /// The batch whose commit is in progress, or whose outcome is unknown.
    committing: Mutex<Option<Batch>>,
    rules: Rules,
    key: Key,
    clock: Arc<dyn Clock>,
    on_commit: OnCommit,
    metrics: Metrics,
    _lock: Option<DirLock>,
}

/// A batch that was written.
struct Batch {
    answers: Vec<Answer>,
    outcome: Outcome,
}

#[derive(PartialEq, Eq)]
enum Outcome {
    /// Its transaction goes on.
    Pending,
    /// Its commit failed, and it may stand all the same.
    Unknown,
}

/// What a sender will hear.
struct Answer {
    applied: Applied,
    reply: oneshot::Sender<Result<Receipt, Error>>,
    since: Instant,
}

struct Metrics {
    applied: Counter,
    refused: Counter,
    /// From the arrival of a message until its step is on disk.
    seconds: Histogram,
}

impl SqliteStore {
    /// Opens or creates the database; this blocks. The lock file is beside it.
    pub(crate) fn open(
        path: &Path,
        key: Key,
        rules: Rules,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
    ) -> Result<SqliteStore, OpenError> {
        let limits = WriterLimits { batch_jobs: COMMIT_JOBS, ..WriterLimits::default() };
        SqliteStore::open_with(path, key, rules, clock, on_commit, limits)
    }

    fn open_with(
        path: &Path,
        key: Key,
        rules: Rules,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
        limits: WriterLimits,
    ) -> Result<SqliteStore, OpenError> {
        let lock = DirLock::take(&beside(path, "lock"))?;
        let failed =
            |source: Box<dyn std::error::Error + Send + Sync>| OpenError::Open { path: path.into(), source };
        let conn = open_sqlite(path).map_err(|error| failed(error.into()))?;
        migrate(&conn, MIGRATIONS).map_err(|source| OpenError::Schema { path: path.into(), source })?;
        let prepared =
            heads::retarget_questions(&conn, &rules).and_then(|()| heads::recompute_due(&conn, &rules));
        prepared.map_err(|error| failed(error.into()))?;
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

    /// A store on a connection of the caller, which does its work where it is called.
    #[cfg(test)]
    pub(crate) fn inline(
        inline: Inline,
        key: Key,
        rules: Rules,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
    ) -> rusqlite::Result<SqliteStore> {
        inline.with(|conn| {
            migrate(conn, MIGRATIONS).expect("bug: a new database can be migrated");
            heads::retarget_questions(conn, &rules)
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
        rules: Rules,
        clock: Arc<dyn Clock>,
        on_commit: OnCommit,
        lock: Option<DirLock>,
    ) -> SqliteStore {
        let metrics = Metrics {
            applied: Counter::default(),
            refused: Counter::default(),
            seconds: Histogram::of_seconds(),
        };
        let set_aside = SetAside::default();
        let inner = Inner {
            access,
            inbox: Inbox::default(),
            applier: Mutex::new(Applier::new(set_aside.clone())),
            set_aside,
            committing: Mutex::default(),
            rules,
            key,
            clock,
            on_commit,
            metrics,
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

/// A file that belongs to the database.
pub(crate) fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

impl Inner {
    fn applier(&self) -> MutexGuard<'_, Applier> {
        // A panic in a step is caught; a panic elsewhere loses the batch, and with it all heads.
        self.applier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn committing(&self) -> MutexGuard<'_, Option<Batch>> {
        self.committing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the writer apply the messages that wait.
    fn schedule(self: &Arc<Self>) {
        let (inner, committed) = (Arc::clone(self), Arc::clone(self));
        let job = move |conn: &Connection| inner.apply_waiting(conn);
        let posted = self.access.post(job, move |()| committed.complete());
        if posted.is_err() {
            self.inbox.refuse_all(|| Error::Closed);
        }
    }

    /// Applies the messages that wait. Runs in a transaction.
    fn apply_waiting(self: &Arc<Self>, conn: &Connection) -> rusqlite::Result<()> {
        let resolved = self.resolve(conn);
        if let Err(error) = &resolved {
            self.inbox.refuse_all(|| Error::Unavailable(error.to_string().into()));
        }
        let mut answers = resolved?;
        let (waiting, more) = self.inbox.take(BATCH);
        if more {
            self.schedule();
        }
        let applied = self.apply_batch(conn, waiting, &mut answers);
        if !answers.is_empty() {
            *self.committing() = Some(Batch { answers, outcome: Outcome::Pending });
        }
        applied
    }

    fn apply_batch(
        &self,
        conn: &Connection,
        waiting: Vec<Pending>,
        answers: &mut Vec<Answer>,
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
                answers.extend(applied.map(|(applied, (reply, since))| Answer { applied, reply, since }));
                Ok(())
            }
            Err(error) => {
                for (reply, _) in senders {
                    // A sender that is gone need not hear.
                    reply.send(Err(Error::Unavailable(error.to_string().into()))).ok();
                }
                Err(error)
            }
        }
    }

    /// Decides by the versions of heads whether a batch of unknown outcome stands. If it does, its senders hear of it with
    /// this commit; if not, they are told to try again.
    fn resolve(&self, conn: &Connection) -> rusqlite::Result<Vec<Answer>> {
        let mut committing = self.committing();
        let Some(batch) = &*committing else { return Ok(Vec::new()) };
        let mut stands = Vec::with_capacity(batch.answers.len());
        for answer in batch.answers.iter().filter(|_| batch.outcome == Outcome::Unknown) {
            let Applied::Done { committed, version, .. } = &answer.applied else {
                stands.push(None);
                continue;
            };
            let stored = heads::version(conn, committed.thread.key)?;
            stands.push(Some(stored.is_some_and(|stored| stored >= *version)));
        }
        // Only now: a batch whose versions cannot be read is looked at again.
        let Some(Batch { answers, outcome }) = committing.take() else { return Ok(Vec::new()) };
        drop(committing);
        if outcome == Outcome::Pending {
            return Ok(answers);
        }
        // A refusal or a repeat may be due to a step of the same batch.
        let all = !stands.contains(&Some(false));
        let mut standing = Vec::new();
        for (mut answer, stands) in answers.into_iter().zip(stands) {
            if let Applied::Done { committed, .. } = &mut answer.applied {
                committed.late = true;
            }
            if stands.unwrap_or(all) {
                standing.push(answer);
            } else {
                // A sender that is gone need not hear.
                answer.reply.send(Err(Error::Unavailable("the commit failed".into()))).ok();
            }
        }
        Ok(standing)
    }

    /// Tells senders and the runtime of a batch that is on disk.
    fn complete(&self) {
        let Some(Batch { answers, .. }) = self.committing().take() else { return };
        for Answer { applied, reply, since } in answers {
            let answer = match applied {
                Applied::Done { receipt, committed, .. } => {
                    self.metrics.applied.count();
                    self.metrics.seconds.took(since.elapsed());
                    (self.on_commit)(*committed);
                    Ok(receipt)
                }
                Applied::Repeated(receipt) => Ok(receipt),
                Applied::Refused(error) => {
                    self.metrics.refused.count();
                    Err(error)
                }
            };
            // A sender that is gone need not hear.
            reply.send(answer).ok();
        }
    }

    /// A commit failed. Messages that wait would meet the same failure. The batch may stand all the same; that is looked at
    /// when the database answers again.
    fn batch_lost(self: &Arc<Self>) {
        self.applier().forget_heads();
        self.inbox.refuse_all(|| Error::Unavailable("the database does not answer".into()));
        let unknown = self.committing().as_mut().map(|batch| batch.outcome = Outcome::Unknown).is_some();
        if unknown {
            self.access.resolve_later(Arc::clone(self));
        }
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn apply(&self, lane: Lane, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        let answers = self.inner.inbox.push(lane, messages, || self.inner.schedule());
        let mut results = Vec::with_capacity(answers.len());
        for answer in answers {
            results.push(match answer {
                // A sender that was dropped says nothing about the store: it may well be applied.
                Ok(answer) => answer.await.unwrap_or_else(|lost| Err(Error::Unavailable(lost.into()))),
                Err(error) => Err(error),
            });
        }
        results
    }

    async fn thread(&self, id: &ThreadId) -> Result<ThreadRow, Error> {
        let id = id.clone();
        self.read(move |conn| history::thread(conn, &id)).await?.ok_or(Error::NoThread)
    }

    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error> {
        self.read(move |conn| listings::threads(conn, &filter)).await
    }

    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error> {
        let thread = thread.clone();
        self.read(move |conn| history::for_people(conn, &thread, page)).await
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

    async fn knows_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        let (thread, call) = (thread.clone(), call.clone());
        self.read(move |conn| match heads::key_of(conn, &thread)? {
            None => Ok(false),
            Some(key) => Ok(facts::past_call(conn, key, &call)?.is_some()),
        })
        .await
    }

    async fn views(&self, thread: ThreadKey) -> Result<Vec<ViewRow>, Error> {
        self.read(move |conn| listings::views(conn, thread)).await
    }

    async fn inbox(&self, thread: Option<ThreadKey>, wanted: Wanted) -> Result<Page<InboxItem>, Error> {
        let key = self.inner.key.clone();
        self.read(move |conn| listings::inbox(conn, &key, thread, &wanted)).await
    }

    async fn calls(&self, wanted: Wanted) -> Result<Page<CallRow>, Error> {
        self.read(move |conn| listings::calls(conn, &wanted)).await
    }

    async fn subscriptions(&self, wanted: Wanted) -> Result<Page<SubscriptionRow>, Error> {
        self.read(move |conn| listings::subscriptions(conn, &wanted)).await
    }

    async fn timers(&self, wanted: Wanted) -> Result<Page<TimerRow>, Error> {
        self.read(move |conn| listings::timers(conn, &wanted)).await
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
        if self.inner.set_aside.contains(key.thread()) {
            return Err(Error::SetAside);
        }
        let (key, secrets) = (key.clone(), self.inner.key.clone());
        self.read(move |conn| work::load(conn, &secrets, &key, now)).await
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

    async fn put_off(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error> {
        self.write(move |conn| work::put_off(conn, &timers, &messages, now, at)).await
    }

    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        self.read(move |conn| work::next_due(conn, after)).await
    }

    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error> {
        self.write(move |conn| ledger::record_all(conn, &records)).await
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error> {
        self.read(move |conn| ledger::list(conn, &filter)).await
    }

    async fn delivery(&self, id: &str) -> Result<Option<Delivery>, Error> {
        let Ok(number) = id.parse() else { return Ok(None) };
        self.read(move |conn| ledger::one(conn, number)).await
    }

    async fn redeliver(&self, id: &str, now: Timestamp) -> Result<Redelivery, Error> {
        let Ok(number) = id.parse() else { return Ok(Redelivery::NoSuchDelivery) };
        self.write(move |conn| ledger::redeliver(conn, number, now)).await
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        self.write(move |conn| prune::prune(conn, keys_before, deliveries_before)).await
    }

    async fn census(&self) -> Result<Census, Error> {
        let set_aside = self.inner.set_aside.len();
        self.read(move |conn| census::census(conn, set_aside)).await
    }

    fn expose(&self, text: &mut Exposition) {
        let metrics = &self.inner.metrics;
        let outcomes = [("applied", metrics.applied.get()), ("refused", metrics.refused.get())];
        let outcomes = outcomes.map(|(outcome, count)| (format!("outcome=\"{outcome}\""), count));
        text.family("rap_steps_total", "counter", "Messages to threads.", outcomes);
        let help = "From the arrival of a message until its step is on disk.";
        text.histogram("rap_step_commit_seconds", help, &metrics.seconds);
        let (internal, external) = self.inner.inbox.waiting();
        let waiting = [("internal", internal), ("external", external)];
        let waiting = waiting.map(|(lane, count)| (format!("lane=\"{lane}\""), count));
        text.family("rap_writer_queue", "gauge", "Messages that wait for the writer.", waiting);
        self.inner.access.expose(text);
    }

    async fn is_readable(&self) -> Result<(), Error> {
        // A statement without a table would not look into the file.
        self.read(|conn| conn.prepare_cached("SELECT no FROM threads LIMIT 1")?.exists([])).await?;
        Ok(())
    }

    async fn close(&self) {
        self.inner.access.close().await;
    }
}
