//! Opens a data directory: lock, key and journal.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use rap_io::exposure::warn_if_exposed;
use rap_io::lock::DirLock;
use rap_io::secret_box::Key;
use rap_io::sqlite::{database_files, migrate, open_sqlite};
use rap_io::validation::Validations;
use rap_io::writer::{Writer, WriterLimits};
use rap_protocol::{Secret, UrlRules};
use rusqlite::{Connection, OptionalExtension};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::job_turns::JobTurns;
use super::{CloseHook, Engine, Offered, Outgoing, States, closing, delivery, metrics};
use crate::auth::Callers;
use crate::clock::Clock;
use crate::error::ServeError;
use crate::journal::keys::Keys;
use crate::journal::{Journal, MIGRATIONS};
use crate::limits::Limits;
use crate::rate::{Limiter, Rate};
use crate::shares::{self, Pool};

/// Maximum number of jobs per commit. With larger batches, the writer and the HTTP connections would take turns
/// waiting for each other. With this size and 64 connections, half of the requests are written while the other half
/// are answered.
pub(super) const BATCH_JOBS: usize = 32;

/// Rate limit of the metrics endpoint.
const SCRAPE_RATE: Rate = Rate::new(2, 20);

/// Maximum number of notifications that wait to be written.
const MAX_NOTIFICATIONS: usize = 4_096;

/// Configuration of an engine.
pub(crate) struct EngineConfig {
    pub(crate) data: PathBuf,
    pub(crate) key: Option<Secret>,
    pub(crate) tokens: Vec<Secret>,
    pub(crate) manifest: Bytes,
    pub(crate) version: String,
    pub(crate) tools: HashMap<String, Offered>,
    pub(crate) on_close: Option<CloseHook>,
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
    let EngineConfig { data, key, tokens, manifest, version, tools, on_close, states, limits } = config;
    let limits = limits.clamped();
    create_private_dir(&data)?;
    let lock_file = data.join("journal.lock");
    let lock = DirLock::take(&lock_file)?;
    let key = match key {
        Some(text) => Key::parse(text.expose()).map_err(|_| ServeError::BadKey)?,
        None => Key::from_file(&data.join("journal.key"))?,
    };
    let path = data.join("journal.db");
    let db = open_sqlite(&path).map_err(|error| ServeError::Journal(error.to_string()))?;
    migrate(&db, MIGRATIONS).map_err(|error| ServeError::Journal(error.to_string()))?;
    check_key(&db, &key, &data)?;
    warn_if_exposed(&[&database_files(&path)[..], &[lock_file]].concat());
    drop(db);
    let virtual_time = externals.clock.is_virtual();
    let open = move || {
        let db = open_sqlite(&path)?;
        if virtual_time {
            // A simulated crash ends the engine, not the machine, so nothing has to be flushed to disk.
            db.pragma_update(None, "synchronous", "OFF")?;
        }
        Ok(db)
    };
    let keys = Arc::<Mutex<Keys>>::default();
    let cached_keys = Arc::clone(&keys);
    let on_batch_failed = move || super::lock(&cached_keys).reset();
    let batches = WriterLimits { batch_jobs: BATCH_JOBS, ..WriterLimits::default() };
    let mut writer = Writer::start_with_failure_hook(open, batches, on_batch_failed)
        .map_err(|error| ServeError::Journal(error.to_string()))?;
    if virtual_time {
        writer = writer.for_paused_clock();
    }
    let callers = Callers::new(&tokens, &key);
    let known = Arc::new(callers.all());
    Ok(Arc::new(Engine {
        manifest,
        version,
        notifications: Limiter::new(limits.notification_rate),
        request_memory: shares::Memory::new(limits.arriving_bytes, &known),
        tools,
        validations: Validations::default(),
        on_close,
        invocations: Limiter::new(limits.invocation_rate),
        pending_notifications: Pool::new(MAX_NOTIFICATIONS, &known),
        calls: Pool::new(limits.calls, &known),
        subscriptions: Pool::new(limits.subscriptions, &known),
        journal: Journal { key, max_events: limits.waiting_events, keys },
        writer,
        outgoing: externals.outgoing,
        clock: externals.clock,
        public_url: externals.public_url,
        callback_rules: externals.callback_rules,
        states,
        counters: metrics::Counters::default(),
        answers: Limiter::new(limits.notification_rate),
        scrapes: Limiter::new(SCRAPE_RATE),
        runs: Mutex::default(),
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
