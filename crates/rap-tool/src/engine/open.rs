//! Opens a data directory: lock, key and journal.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use rap_io::exposure::warn_if_exposed;
use rap_io::lock::DirLock;
use rap_io::secret_box::Key;
use rap_io::sqlite::{database_files, migrate, open_in_memory, open_sqlite};
use rap_io::validation::Validations;
use rap_io::writer::{Writer, WriterLimits};
use rap_protocol::{Secret, UrlRules};
use rusqlite::{Connection, OptionalExtension};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::job_turns::JobTurns;
use super::{
    CloseHook, Engine, MigrateHook, Offer, Outgoing, States, closing, delivery, files, metrics, moving,
};
use crate::auth::{Auth, Callers};
use crate::clock::Clock;
use crate::error::ServeError;
use crate::journal::keys::CallIndex;
use crate::journal::{Journal, MIGRATIONS};
use crate::limits::Limits;
use crate::oauth::Tokens;
use crate::rate::{Limiter, Rate};
use crate::rules::Bounds;
use crate::scrub::{Scrubber, Sources};
use crate::shares::{self, Pool};

/// Maximum number of jobs per commit. With larger batches, the writer and the HTTP connections would take turns
/// waiting for each other. With this size and 64 connections, half of the requests are written while the other half
/// are answered.
pub(super) const BATCH_JOBS: usize = 32;

/// Rate limit of the metrics endpoint.
const SCRAPE_RATE: Rate = Rate::new(2, 20);

/// Maximum number of notifications that wait to be written.
const MAX_NOTIFICATIONS: usize = 4_096;

/// Maximum number of large invocations that are parsed at the same time.
const PARSERS: usize = 2;
/// Memory for the arguments of calls and subscriptions whose handlers run, as a multiple of `Limits::arriving_bytes`.
const ARGUMENT_MEMORY: usize = 2;
/// Size of a slot of that memory, in bytes. A smaller invocation needs none.
pub(super) const ARGUMENT_UNIT: usize = 1024;

/// Configuration of an engine.
pub(crate) struct EngineConfig {
    /// Directory of the journal; `None` keeps it in memory.
    pub(crate) data: Option<PathBuf>,
    pub(crate) key: Option<Secret>,
    pub(crate) auth: Vec<Auth>,
    pub(crate) offer: Offer,
    pub(crate) on_close: Option<CloseHook>,
    pub(crate) on_migrate: Option<MigrateHook>,
    pub(crate) migration_key: Option<Secret>,
    pub(crate) consent_url: Option<String>,
    pub(crate) states: States,
    pub(crate) limits: Limits,
}

/// Dependencies of an engine that differ between production and tests.
pub(crate) struct Externals {
    pub(crate) public_url: String,
    pub(crate) callback_rules: UrlRules,
    pub(crate) outgoing: Outgoing,
    pub(crate) clock: Clock,
}

/// Opens the data directory and creates an engine. Nothing is resumed yet.
pub(crate) fn open(config: EngineConfig, externals: Externals) -> Result<Arc<Engine>, ServeError> {
    let EngineConfig { data, key, auth, offer, on_close, states, limits, .. } = config;
    let migration_key = parse_migration_key(config.migration_key.as_ref())?;
    let limits = limits.clamped();
    let directories = thread_directories(data.as_deref())?;
    let virtual_time = externals.clock.is_virtual();
    let secrets =
        auth.iter().flat_map(Auth::secrets).chain(key.clone()).chain(config.migration_key).collect();
    let scrubber = Arc::new(Scrubber::new(Sources::of_this_process(secrets)));
    let Storage { key, lock, open } = match &data {
        Some(data) => on_disk(data, key, virtual_time)?,
        None => in_memory(key)?,
    };
    let keys = Arc::<Mutex<CallIndex>>::default();
    let writer = start_writer(open, virtual_time, Arc::clone(&keys))?;
    let callers = Callers::new(&auth, &key)?;
    let tokens = Tokens::new(data.as_deref(), key.clone());
    let known = Arc::new(callers.all());
    Ok(Arc::new(Engine {
        offer: RwLock::new(Arc::new(offer)),
        scrubber,
        notifications: Limiter::new(limits.notification_rate),
        request_memory: shares::Memory::new(limits.arriving_bytes, &known),
        validations: Validations::default(),
        on_close,
        migrations: moving::Migrations::new(config.on_migrate, migration_key),
        arrived_files: files::ArrivedFiles::open(&directories),
        invocations: Limiter::new(limits.invocation_rate),
        pending_notifications: Pool::new(MAX_NOTIFICATIONS, &known),
        calls: Pool::new(limits.calls, &known),
        subscriptions: Pool::new(limits.subscriptions, &known),
        parsers: Semaphore::new(PARSERS),
        arguments: Pool::new(limits.arriving_bytes / ARGUMENT_UNIT * ARGUMENT_MEMORY, &known),
        journal: Journal { key, bounds: bounds(&limits), keys },
        writer,
        outgoing: externals.outgoing,
        clock: externals.clock,
        consent_url: config
            .consent_url
            .unwrap_or_else(|| format!("{}{}", externals.public_url, super::CONSENT_PATH)),
        public_url: externals.public_url,
        directories,
        callback_rules: externals.callback_rules,
        states,
        tokens,
        counters: metrics::Counters::default(),
        answers: Limiter::new(limits.notification_rate),
        scrapes: Limiter::new(SCRAPE_RATE),
        runs: Mutex::default(),
        run_ended: Notify::new(),
        deadlines: Mutex::default(),
        deadline_changed: Notify::new(),
        early: Mutex::default(),
        close_hooks: Mutex::new(closing::CloseHooks::new(&known)),
        closings: Notify::new(),
        queues: Mutex::new(delivery::DeliveryQueues::new(&limits, &known)),
        turns: Mutex::default(),
        job_turns: JobTurns::new(&known),
        retries: Mutex::default(),
        retry_turn: tokio::sync::Mutex::default(),
        callers,
        due: Notify::new(),
        stopping: CancellationToken::new(),
        ended: CancellationToken::new(),
        tasks: TaskTracker::new(),
        runtime: Handle::current(),
        limits,
        _lock: lock,
    }))
}

fn parse_migration_key(text: Option<&Secret>) -> Result<Option<Key>, ServeError> {
    let key = text.map(|text| Key::parse(text.expose())).transpose();
    key.map_err(|_| ServeError::BadMigrationKey)
}

fn bounds(limits: &Limits) -> Bounds {
    Bounds { max_events: limits.waiting_events, deliver_for: limits.delivery.give_up_after }
}

/// Returns the parent of the threads' directories. Refuses a data directory that is a URL.
fn thread_directories(data: Option<&Path>) -> Result<PathBuf, ServeError> {
    match data {
        // The URL may contain a password, so the error does not repeat it.
        Some(data) if data.to_string_lossy().contains("://") => Err(ServeError::JournalUrl),
        Some(data) => std::path::absolute(data.join("threads"))
            .map_err(|source| ServeError::Data { path: data.into(), source }),
        None => Ok(std::env::temp_dir().join(format!("rap-tool-{}", std::process::id()))),
    }
}

/// Starts the writer of the journal. After a failed batch it forgets the cached `keys`, which may be wrong then.
fn start_writer(
    open: OpenDatabase,
    virtual_time: bool,
    keys: Arc<Mutex<CallIndex>>,
) -> Result<Writer, ServeError> {
    let on_batch_failed = move || super::lock(&keys).reset();
    let batches = WriterLimits { batch_jobs: BATCH_JOBS, ..WriterLimits::default() };
    let writer = Writer::start_with_failure_hook(open, batches, on_batch_failed)
        .map_err(|error| ServeError::Journal(error.to_string()))?;
    Ok(if virtual_time { writer.for_paused_clock() } else { writer })
}

type OpenDatabase = Box<dyn Fn() -> rusqlite::Result<Connection> + Send>;

/// Key and lock of a journal, and the function that opens its database.
struct Storage {
    key: Key,
    lock: Option<DirLock>,
    open: OpenDatabase,
}

fn on_disk(data: &Path, key: Option<Secret>, virtual_time: bool) -> Result<Storage, ServeError> {
    create_private_dir(data)?;
    let lock_file = data.join("journal.lock");
    let lock = DirLock::take(&lock_file)?;
    let key = match key {
        Some(text) => Key::parse(text.expose()).map_err(|_| ServeError::BadKey)?,
        None => Key::from_file(&data.join("journal.key"))?,
    };
    let path = data.join("journal.db");
    let db = open_sqlite(&path).map_err(|error| ServeError::Journal(error.to_string()))?;
    migrate(&db, MIGRATIONS).map_err(|error| ServeError::Journal(error.to_string()))?;
    check_key(&db, &key, data)?;
    warn_if_exposed(&[&database_files(&path)[..], &[lock_file]].concat());
    drop(db);
    let open = move || {
        let db = open_sqlite(&path)?;
        if virtual_time {
            // A simulated crash ends the engine, not the machine, so nothing has to be flushed to disk.
            db.pragma_update(None, "synchronous", "OFF")?;
        }
        Ok(db)
    };
    Ok(Storage { key, lock: Some(lock), open: Box::new(open) })
}

/// Keeps the journal in the one connection of the writer. The writer opens another one only after an IO error, which would
/// be an empty journal, so that is refused.
fn in_memory(key: Option<Secret>) -> Result<Storage, ServeError> {
    let key = match key {
        Some(text) => Key::parse(text.expose()).map_err(|_| ServeError::BadKey)?,
        None => Key::random(),
    };
    let db = open_in_memory().map_err(|error| ServeError::Journal(error.to_string()))?;
    migrate(&db, MIGRATIONS).map_err(|error| ServeError::Journal(error.to_string()))?;
    tracing::warn!(
        "the journal is in memory: when this process ends, running calls end without a result, subscriptions end, \
         undelivered results and events are lost, hooks of open threads do not run, and an invocation that is sent again \
         runs again"
    );
    let db = Mutex::new(Some(db));
    let open = move || super::lock(&db).take().ok_or(rusqlite::Error::InvalidQuery);
    Ok(Storage { key, lock: None, open: Box::new(open) })
}

/// Readable by the owner only, because the journal contains results and arguments in plain text.
fn create_private_dir(path: &Path) -> Result<(), ServeError> {
    use std::os::unix::fs::DirBuilderExt;
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| ServeError::Data { path: path.into(), source })
}

/// Checks that the journal was written with this key. With another key, its callbacks could not be delivered.
fn check_key(db: &Connection, key: &Key, data: &Path) -> Result<(), ServeError> {
    const PROOF: &[u8] = b"this journal's key";
    let failed = |error: rusqlite::Error| ServeError::Journal(error.to_string());
    let sealed: Option<Vec<u8>> = db
        .query_row("SELECT value FROM meta WHERE name = 'key'", [], |row| row.get(0))
        .optional()
        .map_err(failed)?;
    match sealed {
        Some(sealed) => match key.open(&sealed, PROOF) {
            Ok(_) => Ok(()),
            Err(_) => Err(ServeError::WrongKey(data.into())),
        },
        None => {
            let sealed = key.seal(PROOF, PROOF);
            db.execute("INSERT INTO meta (name, value) VALUES ('key', ?1)", [sealed]).map_err(failed)?;
            Ok(())
        }
    }
}
