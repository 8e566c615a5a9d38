//! Tests of what is specific to SQLite: files, locks, transactions and migrations. The suite tests what every database
//! does.

mod batch;
mod batches;
mod commit;
mod file;
mod migration;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rap_io::secret_box::Key;
use rap_io::sqlite::open_sqlite;
use rap_protocol::ThreadId;
use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::store::suite::Database;
use crate::store::suite::fixture::Fixture;

pub(crate) use batches::Batches;

crate::store::suite::suite!(super::File::new);

/// Makes an empty database with the newest schema.
pub(super) fn database() -> Connection {
    let conn = Connection::open_in_memory().expect("an in-memory database");
    for migration in super::MIGRATIONS {
        conn.execute_batch(migration).expect("valid schema");
    }
    conn
}

/// A database in its own temporary directory.
struct File {
    dir: TempDir,
    limits: WriterLimits,
    /// The store that was opened last.
    opened: Mutex<Option<SqliteStore>>,
}

impl File {
    fn new() -> File {
        File::with(WriterLimits { batch_jobs: COMMIT_JOBS, ..WriterLimits::default() })
    }

    /// A batch ends when no more jobs are waiting, never by time.
    fn without_batch_timeout() -> Arc<File> {
        let batch_time = Duration::from_secs(3600);
        Arc::new(File::with(WriterLimits { batch_time, ..WriterLimits::default() }))
    }

    fn with(limits: WriterLimits) -> File {
        File { dir: tempfile::tempdir().unwrap(), limits, opened: Mutex::default() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("rap.db")
    }

    /// Opens another connection, which sees only committed data.
    fn connection(&self) -> Connection {
        open_sqlite(&self.path()).unwrap()
    }

    fn try_open(&self) -> Result<SqliteStore, OpenError> {
        let rules = crate::store::suite::fixture::rules(rap_agent::Limits::default());
        let clock = Arc::new(crate::world::SystemClock);
        SqliteStore::open(&self.path(), key(), rules, clock, Box::new(|_| ()))
    }

    /// The store that was opened last.
    fn store(&self) -> SqliteStore {
        self.opened.lock().unwrap().clone().expect("a store was opened")
    }

    /// Changes one row without going through the store.
    fn alter(&self, sql: &str) {
        assert_eq!(self.connection().execute(sql, []).unwrap(), 1, "{sql}");
    }

    /// Returns the rows of all tables that a step writes to.
    fn rows(&self) -> Vec<String> {
        all_rows(&self.connection())
    }
}

fn all_rows(conn: &Connection) -> Vec<String> {
    let tables =
        ["threads", "entries", "summaries", "held", "backlog", "calls", "questions", "views", "seen"];
    let mut all = Vec::new();
    for table in tables.into_iter().chain(["letters", "spending", "repeats"]) {
        let mut select = conn.prepare(&format!("SELECT * FROM {table} ORDER BY 1, 2")).unwrap();
        let columns = select.column_count();
        let row = |row: &rusqlite::Row<'_>| {
            let values: Vec<_> = (0..columns).map(|at| row.get_ref(at).unwrap()).collect();
            Ok(format!("{table} {values:?}"))
        };
        all.extend(select.query_map([], row).unwrap().map(Result::unwrap));
    }
    all
}

fn key() -> Key {
    Key::parse(&"7".repeat(64)).unwrap()
}

impl Database for File {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        let mut opened = self.opened.lock().unwrap();
        // Dropping the store releases its lock. A task that has just got its reply may still hold the store.
        *opened = None;
        let lock = self.dir.path().join("rap.db.lock");
        let mut attempts = 0..1000;
        while DirLock::take(&lock).is_err() && attempts.next().is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let store =
            SqliteStore::open_with(&self.path(), key(), rules, clock, on_commit, self.limits).unwrap();
        *opened = Some(store.clone());
        Arc::new(store)
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        let sql = "UPDATE threads SET head = '{\"phase\": \"confused\"}' WHERE id = ?1";
        assert_eq!(self.connection().execute(sql, [thread.as_str()]).unwrap(), 1);
    }

    fn execute(&self, sqlite: &str, _: &str) {
        self.connection().execute_batch(sqlite).unwrap();
    }

    fn setting(&self) -> crate::settings::Database {
        crate::settings::Database::File(self.path())
    }

    fn row_counts(&self) -> std::collections::BTreeMap<String, i64> {
        let conn = self.connection();
        let mut tables = conn.prepare("SELECT name FROM sqlite_schema WHERE type = 'table'").unwrap();
        let tables = tables.query_map([], |row| row.get::<_, String>(0)).unwrap().map(Result::unwrap);
        let count = |table: String| {
            let sql = format!("SELECT count(*) FROM {table}");
            let count = conn.query_row(&sql, [], |row| row.get(0)).unwrap();
            (table, count)
        };
        tables.filter(|table| table != "search").map(count).collect()
    }
}

impl Database for Arc<File> {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        File::open(self, rules, clock, on_commit)
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        File::corrupt_head(self, thread);
    }

    fn execute(&self, sqlite: &str, postgres: &str) {
        File::execute(self, sqlite, postgres);
    }

    fn setting(&self) -> crate::settings::Database {
        File::setting(self)
    }

    fn row_counts(&self) -> std::collections::BTreeMap<String, i64> {
        File::row_counts(self)
    }
}

/// Makes a fixture of the suite, and its file.
fn fixture() -> (Arc<File>, Fixture) {
    let file = File::without_batch_timeout();
    let fixture = Fixture::new(Box::new(Arc::clone(&file)));
    (file, fixture)
}
