//! Opening a data directory: lock, key, journal.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use rap_io::lock::DirLock;
use rap_io::secret_box::Key;
use rap_io::sqlite::{migrate, open_sqlite};
use rap_io::writer::{Writer, WriterLimits};
use rap_protocol::Secret;
use rusqlite::{Connection, OptionalExtension};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{CloseHook, Engine, Offered, Outgoing, States, metrics};
use crate::auth::Callers;
use crate::clock::Clock;
use crate::error::ServeError;
use crate::journal::keys::Keys;
use crate::journal::{Book, MIGRATIONS};
use crate::limits::Limits;
use crate::rate::{Limiter, Rate};

/// How many jobs share a commit. With more, the writer and those who talk HTTP wait for each other in turns: of 64
/// connections, half are being written while the others are being answered.
const BATCH_JOBS: usize = 32;

/// How often the metrics may be read.
const SCRAPES: Rate = Rate::new(2, 20);

/// How many notifications may wait to be written.
const NOTIFICATIONS: usize = 4_096;

/// All that a server is made of.
pub(crate) struct Parts {
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

/// Where an engine runs: on this machine, or inside of a test.
pub(crate) struct Place {
    pub(crate) public_url: String,
    pub(crate) outgoing: Outgoing,
    pub(crate) clock: Clock,
}

/// Opens the data directory and makes an engine that has not resumed anything yet.
pub(crate) fn open(parts: Parts, place: Place) -> Result<Arc<Engine>, ServeError> {
    let Parts { data, key, tokens, manifest, version, tools, on_close, states, limits } = parts;
    let limits = limits.within_reach();
    create_private_dir(&data)?;
    let lock = DirLock::take(&data.join("journal.lock"))?;
    let key = match key {
        Some(text) => Key::parse(text.expose()).map_err(|_| ServeError::BadKey)?,
        None => Key::from_file(&data.join("journal.key"))?,
    };
    let path = data.join("journal.db");
    let db = open_sqlite(&path).map_err(|error| ServeError::Journal(error.to_string()))?;
    migrate(&db, MIGRATIONS).map_err(|error| ServeError::Journal(error.to_string()))?;
    check_key(&db, &key, &data)?;
    drop(db);
    let virtual_time = place.clock.is_virtual();
    let open = move || {
        let db = open_sqlite(&path)?;
        if virtual_time {
            // A test that crashes its server does not pull the plug.
            db.pragma_update(None, "synchronous", "OFF")?;
        }
        Ok(db)
    };
    let keys = Arc::<Mutex<Keys>>::default();
    let lost = Arc::clone(&keys);
    let on_lost = move || super::lock(&lost).forget();
    let batches = WriterLimits { batch_jobs: BATCH_JOBS, ..WriterLimits::default() };
    let mut writer = Writer::start_watched(open, batches, on_lost)
        .map_err(|error| ServeError::Journal(error.to_string()))?;
    if virtual_time {
        writer = writer.holding_the_clock();
    }
    Ok(Arc::new(Engine {
        callers: Callers::new(&tokens, &key),
        manifest,
        version,
        notifications: Limiter::new(limits.notification_rate),
        arriving: Arc::new(Semaphore::new(limits.arriving_bytes)),
        tools,
        on_close,
        invocations: Limiter::new(limits.invocation_rate),
        notified: Arc::new(Semaphore::new(NOTIFICATIONS)),
        calls: Arc::new(Semaphore::new(limits.calls)),
        subscriptions: Arc::new(Semaphore::new(limits.subscriptions)),
        book: Book { key, most_events: limits.waiting_events, keys },
        writer,
        outgoing: place.outgoing,
        clock: place.clock,
        public_url: place.public_url,
        states,
        counters: metrics::Counters::default(),
        answers: Limiter::new(limits.notification_rate),
        scrapes: Limiter::new(SCRAPES),
        runs: Mutex::default(),
        early: Mutex::default(),
        lanes: Mutex::default(),
        due: Notify::new(),
        stopping: CancellationToken::new(),
        ended: CancellationToken::new(),
        tasks: TaskTracker::new(),
        runtime: Handle::current(),
        limits,
        _lock: lock,
    }))
}

/// Only the owner may look into it: results and arguments lie there in the clear.
fn create_private_dir(path: &Path) -> Result<(), ServeError> {
    use std::os::unix::fs::DirBuilderExt;
    let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.map_err(|source| ServeError::Data { path: path.into(), source })
}

/// What was sealed with another key could never be delivered; better to say so now.
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
