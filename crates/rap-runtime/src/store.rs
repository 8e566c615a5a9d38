//! The store: threads in SQLite, one writer, one transaction for each batch of messages.
//!
//! A message is applied by loading the thread's head, stepping, and writing what follows, all in one job of the
//! group-commit writer. Invariants:
//! - I3 Steps of one thread are serial: there is one writer.
//! - I4 Head, entries, held input and effects of a step stand together or not at all: they are one savepoint.
//! - Nobody hears of a step, refusals included, and no effect is acted upon, before the COMMIT.
//! - A head is updated only at the version it was read at. A lost batch drops every head that is remembered.

mod budget;
mod cache;
mod census;
mod due;
mod filter;
mod ledger;
mod listings;
mod once;
mod read;
mod rows;
mod seen;
#[cfg(test)]
mod tests;
mod thread;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use rap_agent::{Amounts, Birth, Effect, Head, Ignored, Limits, Message, Seq, Status, Step, Write, step};
use rap_io::lock::{DirLock, LockError};
use rap_io::secret_box::Key;
use rap_io::sqlite::{MigrateError, migrate, open_existing, open_sqlite};
use rap_io::writer::{self, Lane, Writer, WriterLimits};
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::Connection;

use crate::engine::built_in;
use cache::{Cache, Loaded};
use census::Steps;
use once::once;
use read::Readers;
use rows::Applying;

pub(crate) use census::COUNTED;
pub(crate) use due::{Doubtful, DueAnswer, Letters};
pub(crate) use filter::ThreadFilter;
pub(crate) use ledger::{DeliveryFilter, DeliveryRow, Fate, Kind, Line, Redelivery, prune_old};
pub(crate) use listings::{Asked, CallRow, InboxItem, Listed, SubscriptionRow, TimerRow, Wanted};
pub(crate) use once::Once;
pub(crate) use read::{Page, SessionTool, ThreadRow, ViewRow};
pub(crate) use thread::{NewThread, Thread, ThreadNo, fresh_id, random};

const MIGRATIONS: &[&str] = &[include_str!("store/schema_1.sql")];
/// How many messages share a commit at most.
const BATCH_JOBS: usize = 64;

/// Why the store can not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process owns the database.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// The schema is newer, or a migration failed.
    #[error("{}: {source}", path.display())]
    Schema {
        /// The database.
        path: PathBuf,
        /// What is wrong.
        source: MigrateError,
    },
    /// The file can not be opened.
    #[error("can not open the database {}: {why}", path.display())]
    Open {
        /// The database.
        path: PathBuf,
        /// What the database said.
        why: String,
    },
}

/// Why a message was not applied.
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
    #[error("the thread is set aside after an internal error")]
    SetAside,
    /// Trying again does not help.
    #[error("what is stored can not be read: {0}")]
    Illegible(String),
    #[error("too much waits to be written")]
    Busy,
    #[error("the database is not available: {0}")]
    Unavailable(String),
    #[error("the store is closed")]
    Closed,
}

impl From<writer::Error> for Error {
    fn from(error: writer::Error) -> Self {
        match error {
            writer::Error::Busy => Error::Busy,
            writer::Error::Closed => Error::Closed,
            writer::Error::Panicked => Error::SetAside,
            writer::Error::Unavailable(why) => Error::Unavailable(why),
            writer::Error::Sql(error) => {
                tracing::error!(%error, "a statement failed");
                error.into()
            }
        }
    }
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match rows::is_illegible(&error) {
            true => Error::Illegible(error.to_string()),
            false => Error::Unavailable(error.to_string()),
        }
    }
}

/// Which thread is meant.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Id(ThreadId),
    No(ThreadNo),
    /// As a callback token says it; another incarnation is another thread.
    Token {
        no: ThreadNo,
        incarnation: u64,
        id: ThreadId,
    },
}

impl Target {
    /// A number alone may be that of a thread in another database; a body may name another thread than its URL.
    fn misses(&self, thread: &Thread) -> Option<Error> {
        match self {
            Target::Token { incarnation, .. } if thread.incarnation != *incarnation => Some(Error::NoThread),
            Target::Token { id, .. } if thread.id != *id => Some(Error::WrongThread),
            Target::Id(id) if thread.id != *id => Some(Error::NoThread),
            _ => None,
        }
    }
}

/// What the sender of a message hears of its step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) thread: ThreadId,
    pub(crate) turn: u64,
}

/// A step that is on disk, and what is to be done now.
pub(crate) struct Committed {
    pub(crate) thread: Arc<Thread>,
    pub(crate) effects: Vec<Effect>,
    /// Calls whose invocation is due no more.
    pub(crate) settled: Vec<CallId>,
    /// When it, or a call of it, wants to be looked at.
    pub(crate) due: Option<Timestamp>,
    pub(crate) status: Status,
}

/// Where committed steps go. It runs on the writer's thread and must be quick.
pub(crate) type Outlet = Box<dyn Fn(Committed) + Send + Sync>;

/// The handle to the store. Clones share it.
#[derive(Clone)]
pub(crate) struct Store {
    writer: Writer,
    shared: Arc<Shared>,
    readers: Arc<Readers>,
}

/// The bounds of threads: those of all, and those of agents that have their own.
#[derive(Debug, Clone, Default)]
pub(crate) struct AgentLimits {
    pub(crate) usual: Limits,
    pub(crate) own: HashMap<String, Limits>,
}

impl AgentLimits {
    fn of(&self, thread: &Thread) -> &Limits {
        self.own.get(&thread.agent).unwrap_or(&self.usual)
    }
}

struct Shared {
    cache: Mutex<Cache>,
    /// Threads in whose step something panicked.
    aside: Mutex<HashSet<ThreadNo>>,
    limits: AgentLimits,
    key: Key,
    outlet: Outlet,
    steps: Steps,
    _lock: DirLock,
}

enum Ran {
    Done(Vec<Committed>, Receipt),
    Refused(Error),
}

pub(crate) fn now() -> Timestamp {
    SystemTime::now().into()
}

impl Store {
    /// Opens or creates the database; this blocks. The lock file lies beside it.
    pub(crate) fn open(
        path: &Path,
        key: Key,
        limits: AgentLimits,
        outlet: Outlet,
    ) -> Result<Store, OpenError> {
        let batches = WriterLimits { batch_jobs: BATCH_JOBS, ..WriterLimits::default() };
        Store::open_with(path, key, limits, batches, outlet)
    }

    fn open_with(
        path: &Path,
        key: Key,
        limits: AgentLimits,
        batches: WriterLimits,
        outlet: Outlet,
    ) -> Result<Store, OpenError> {
        let lock = DirLock::take(&beside(path, "lock"))?;
        let failed = |why: String| OpenError::Open { path: path.into(), why };
        let conn = open_sqlite(path).map_err(|error| failed(error.to_string()))?;
        migrate(&conn, MIGRATIONS).map_err(|source| OpenError::Schema { path: path.into(), source })?;
        drop(conn);
        let shared = Arc::new(Shared {
            cache: Mutex::default(),
            aside: Mutex::default(),
            limits,
            key,
            outlet,
            steps: Steps::default(),
            _lock: lock,
        });
        let (file, lost) = (path.to_owned(), Arc::clone(&shared));
        let writer =
            Writer::start_watched(move || open_existing(&file), batches, move || lost.forget_heads())
                .map_err(|error| failed(error.to_string()))?;
        Ok(Store { writer, shared, readers: Arc::new(Readers::new(path.to_owned())) })
    }

    /// Applies a message. When this resolves, what it did is on disk, or nothing of it is.
    pub(crate) async fn step(&self, lane: Lane, target: Target, message: Message) -> Result<Receipt, Error> {
        self.step_and(lane, target, message, |_| Ok(())).await
    }

    /// The same, and something that is written together with the step, if there is one.
    pub(crate) async fn step_and(
        &self,
        lane: Lane,
        target: Target,
        message: Message,
        also: impl FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
    ) -> Result<Receipt, Error> {
        let shared = Arc::clone(&self.shared);
        let job = move |conn: &Connection| {
            let ran = shared.apply(conn, &target, message)?;
            if matches!(ran, Ran::Done(..)) {
                also(conn)?;
            }
            Ok(ran)
        };
        self.run(lane, job).await
    }

    /// Makes a root thread, and tells it what was said first.
    pub(crate) async fn create(&self, new: NewThread, mark: Option<Once>) -> Result<Receipt, Error> {
        let shared = Arc::clone(&self.shared);
        self.run(Lane::External, move |conn| once(conn, mark, || shared.create(conn, new))).await
    }

    /// Makes a root that begins with the history of another thread, up to the nearest valid point.
    pub(crate) async fn fork(
        &self,
        source: ThreadId,
        at: Option<Seq>,
        mark: Option<Once>,
    ) -> Result<Receipt, Error> {
        let fork = move |conn: &Connection| {
            let Some(no) = rows::number_of(conn, &source)? else { return Ok(Ran::Refused(Error::NoThread)) };
            let Some(source) = rows::load(conn, no)? else { return Ok(Ran::Refused(Error::NoThread)) };
            let fork = rows::insert_fork(conn, &source, at, fresh_id(now()), now())?;
            Ok(Ran::Done(Vec::new(), Receipt { thread: fork.thread.id.clone(), turn: 0 }))
        };
        self.run(Lane::External, move |conn| once(conn, mark, || fork(conn))).await
    }

    /// Applies a message of a client, which may be a repeat of one that was applied.
    pub(crate) async fn step_once(
        &self,
        target: Target,
        message: Message,
        mark: Option<Once>,
    ) -> Result<Receipt, Error> {
        let shared = Arc::clone(&self.shared);
        let job = move |conn: &Connection| once(conn, mark, || shared.apply(conn, &target, message));
        self.run(Lane::External, job).await
    }

    /// Hands a letter to its receiver and removes it, unless the receiver can not take any message at the moment.
    pub(crate) async fn deliver(&self, letter: Letters) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let job = move |conn: &Connection| {
            let ran = shared.apply(conn, &Target::Id(letter.receiver), letter.message)?;
            if !matches!(ran, Ran::Refused(Error::SetAside | Error::Illegible(_) | Error::Unavailable(_))) {
                conn.prepare_cached("DELETE FROM letters WHERE no = ?1")?.execute([letter.no])?;
            }
            Ok(ran)
        };
        match self.run(Lane::Internal, job).await {
            Ok(_) | Err(Error::Ignored(_) | Error::NoThread) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn run(
        &self,
        lane: Lane,
        job: impl FnOnce(&Connection) -> rusqlite::Result<Ran> + Send + 'static,
    ) -> Result<Receipt, Error> {
        let (shared, outlet) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
        let began = Instant::now();
        let job = move |conn: &Connection| {
            let ran = job(conn);
            if ran.is_err() {
                // It is undone as a whole, also where the head was remembered already.
                shared.forget_heads();
            }
            ran
        };
        let then = move |ran| match ran {
            Ran::Refused(error) => {
                outlet.steps.refused.count();
                Err(error)
            }
            Ran::Done(committed, receipt) => {
                outlet.steps.applied.count();
                outlet.steps.seconds.took(began.elapsed());
                committed.into_iter().for_each(|step| (outlet.outlet)(step));
                Ok(receipt)
            }
        };
        self.writer.run_then(lane, job, then).await?
    }

    /// Writes something that is no step: how deliveries went, and what was fetched.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        Ok(self.writer.run(Lane::Internal, job).await?)
    }

    /// Finishes what waits and closes the database. Whoever is last carries the log over into it, so readers go first.
    pub(crate) async fn close(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

/// A file that belongs to the database.
pub(crate) fn beside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(extension);
    name.into()
}

impl Shared {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        // A panic in a step can not leave the cache half changed.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn aside(&self) -> MutexGuard<'_, HashSet<ThreadNo>> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_heads(&self) {
        self.cache().clear();
    }

    fn create(&self, conn: &Connection, new: NewThread) -> rusqlite::Result<Ran> {
        let Some(loaded) = rows::insert_root(conn, &new, now())? else {
            return Ok(Ran::Refused(Error::Exists));
        };
        let Some(text) = new.message else {
            return Ok(Ran::Done(Vec::new(), Receipt { thread: loaded.thread.id.clone(), turn: 0 }));
        };
        let target = Target::No(loaded.thread.no);
        let said = Message::Said { text, on_busy: rap_agent::OnBusy::Join };
        let ran = self.attempt(conn, loaded, &target, said)?;
        ran.ok_or(rusqlite::Error::QueryReturnedNoRows)
    }

    fn apply(&self, conn: &Connection, target: &Target, message: Message) -> rusqlite::Result<Ran> {
        let Some(no) = self.number(conn, target)? else { return Ok(Ran::Refused(Error::NoThread)) };
        if self.aside().contains(&no) {
            return Ok(Ran::Refused(Error::SetAside));
        }
        let _guard = SetAside { shared: self, no };
        let remembered = self.cache().take(no);
        if let Some(loaded) = remembered
            && let Some(ran) = self.attempt(conn, loaded, target, message.clone())?
        {
            return Ok(ran);
        }
        let Some(loaded) = rows::load(conn, no)? else { return Ok(Ran::Refused(Error::NoThread)) };
        let ran = self.attempt(conn, loaded, target, message)?;
        Ok(ran.unwrap_or(Ran::Refused(Error::Unavailable("the thread moved on while it was read".into()))))
    }

    fn number(&self, conn: &Connection, target: &Target) -> rusqlite::Result<Option<ThreadNo>> {
        match target {
            Target::No(no) | Target::Token { no, .. } => Ok(Some(*no)),
            Target::Id(id) => {
                let remembered = self.cache().no(id);
                if remembered.is_some() { Ok(remembered) } else { rows::number_of(conn, id) }
            }
        }
    }

    /// Steps and writes. `None` if the head was not the one in the database.
    fn attempt(
        &self,
        conn: &Connection,
        loaded: Loaded,
        target: &Target,
        message: Message,
    ) -> rusqlite::Result<Option<Ran>> {
        let Loaded { thread, head, version } = loaded;
        if let Some(error) = target.misses(&thread) {
            self.cache().put(Loaded { thread, head, version });
            return Ok(Some(Ran::Refused(error)));
        }
        let (now, limits) = (now(), self.limits.of(&thread));
        let message = inform(conn, &thread, &head, message, now)?;
        fault(&message);
        let step = match step(head.clone(), message, now, limits) {
            Ok(step) => step,
            Err(ignored) => {
                // A refusal must not rest on a head that is not the one in the database.
                if !rows::is_at(conn, thread.no, version)? {
                    return Ok(None);
                }
                self.cache().put(Loaded { thread, head, version });
                return Ok(Some(Ran::Refused(ignored.into())));
            }
        };
        let spent = (!limits.budgets.are_off()).then(|| Amounts::of(&head, &step));
        let Step { head: next, writes, effects } = step;
        let due = next.due(limits);
        let timers = writes.iter().filter_map(|write| match write {
            Write::Open(call) | Write::Dispatch(call) => call.until,
            Write::Timer { at, .. } => *at,
            _ => None,
        });
        let look_by = timers.chain(due).min();
        if !rows::update_head(conn, thread.no, version, &next, due, now)? {
            return Ok(None);
        }
        let mut step = Committed {
            thread: Arc::clone(&thread),
            effects,
            settled: Vec::new(),
            due: look_by,
            status: next.status(),
        };
        let born = self.write_all(conn, &mut step, writes, now)?;
        let receipt = Receipt { thread: thread.id.clone(), turn: next.turn };
        self.cache().put(Loaded { thread, head: next, version: version + 1 });
        let steps = [step].into_iter().chain(born).collect();
        let steps = if let Some(spent) = spent { self.spend(conn, steps, spent, now)? } else { steps };
        Ok(Some(Ran::Done(steps, receipt)))
    }

    /// Writes everything but the head; gives the children that were born.
    fn write_all(
        &self,
        conn: &Connection,
        step: &mut Committed,
        writes: Vec<Write>,
        now: Timestamp,
    ) -> rusqlite::Result<Vec<Committed>> {
        let thread = Arc::clone(&step.thread);
        let limits = self.limits.of(&thread);
        let applying = Applying { conn, thread: &thread, key: &self.key, limits, now };
        let mut born = Vec::new();
        for write in writes {
            if let Write::Settle { call, .. } = &write {
                step.settled.push(call.clone());
            }
            born.extend(applying.write(write)?);
        }
        for effect in &step.effects {
            if let Effect::Tell { to, letter } = effect {
                applying.tell(to, letter)?;
            }
        }
        Ok(born)
    }
}

/// Adds what the rules need to know besides the head.
fn inform(
    conn: &Connection,
    thread: &Thread,
    head: &Head,
    message: Message,
    now: Timestamp,
) -> rusqlite::Result<Message> {
    match message {
        Message::Returned { call, result, .. } => {
            let past = if head.is_open(&call) { None } else { rows::past_call(conn, thread.no, &call)? };
            Ok(Message::Returned { call, result, past })
        }
        Message::Happened { call, event, .. } => {
            let Some(subscription) = head.subscription(&call) else {
                let past = if head.is_open(&call) { None } else { rows::past_call(conn, thread.no, &call)? };
                return Ok(Message::Happened { call, event, past, seen: false, birth: None });
            };
            let seen = match &event.id {
                None => false,
                Some(id) => rows::was_seen(conn, thread.no, &call, id)?,
            };
            let birth = if event.associative || seen {
                None
            } else {
                let arguments = rows::arguments_of(conn, thread.no, subscription.seq, &call)?;
                Some(Birth { arguments, ..birth(thread, now) })
            };
            Ok(Message::Happened { call, event, past: None, seen, birth })
        }
        Message::TimedOut { call } if head.subscription(&call).is_some_and(|own| own.server.is_runtime()) => {
            let seq = head.subscription(&call).map_or(0, |own| own.seq);
            let arguments = rows::arguments_of(conn, thread.no, seq, &call)?;
            let (text, next) = built_in::tick(&arguments, now);
            Ok(Message::Ticked { call, text, next })
        }
        Message::ChildClosed { child, .. } => {
            Ok(Message::ChildClosed { child, birth: Some(birth(thread, now)) })
        }
        Message::ChildRests { child, .. } => {
            Ok(Message::ChildRests { child, birth: Some(birth(thread, now)) })
        }
        other => Ok(other),
    }
}

fn birth(thread: &Thread, now: Timestamp) -> Birth {
    let depth = thread.ancestors.len() + 1;
    Birth { parent: thread.id.clone(), depth, child: fresh_id(now), arguments: serde_json::Map::new() }
}

/// A thread whose step panics is left alone from then on: what it would do next is unknown.
struct SetAside<'a> {
    shared: &'a Shared,
    no: ThreadNo,
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                thread = self.no,
                "a step panicked; its thread is set aside until the next start"
            );
            self.shared.aside().insert(self.no);
        }
    }
}

/// Where the tests put a fault into a step.
#[cfg(test)]
fn fault(message: &Message) {
    if matches!(message, Message::Said { text, .. } if text == tests::PANIC) {
        panic!("as the test wanted");
    }
}

#[cfg(not(test))]
fn fault(_: &Message) {}
