//! Opens SQLite databases and migrates their schema.
//!
//! A reported commit is on disk: WAL with `synchronous=FULL`. A published migration must never be edited. Its number
//! is its position in the list. A migration and its version number are committed together.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, MAIN_DB, OpenFlags, Transaction, TransactionBehavior, ffi};

/// Time that a statement waits for a lock of another process. Short, because the other jobs of the writer wait as
/// well.
const BUSY_TIMEOUT: Duration = Duration::from_millis(250);
const STATEMENT_CACHE: usize = 64;
/// Size of the page cache.
const CACHE_KIB: i64 = 8 * 1024;
/// Number of pages in the write-ahead log at which a checkpoint runs. A page that changes many times between two
/// checkpoints is copied only once.
const CHECKPOINT_PAGES: i64 = 8_000;

/// Opens or creates a database file, with the common settings.
///
/// A new file can be read by its owner only. SQLite gives its other files the same permissions.
pub fn open_sqlite(path: &Path) -> rusqlite::Result<Connection> {
    // If the file exists or cannot be created, SQLite opens it or says why not.
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    drop(created);
    writable(open_with(path, OpenFlags::SQLITE_OPEN_CREATE)?)
}

/// Creates a database in memory, with the common settings. It is lost when the connection is closed.
pub fn open_in_memory() -> rusqlite::Result<Connection> {
    open_with(Path::new(":memory:"), OpenFlags::SQLITE_OPEN_CREATE)
}

/// Returns the paths of a database: the file itself, its write-ahead log and the shared memory of its readers.
pub fn database_files(path: &Path) -> [PathBuf; 3] {
    ["", "-wal", "-shm"].map(|ending| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        name.into()
    })
}

/// Opens an existing file for reading only. The file may be read-only.
pub fn open_for_reading(path: &Path) -> rusqlite::Result<Connection> {
    let conn = open_with(path, OpenFlags::empty())?;
    conn.pragma_update(None, "query_only", true)?;
    Ok(conn)
}

/// Opens an existing file for writing. A commit fails if the file was removed or replaced since it was opened,
/// because it would be lost when the process ends. Uses the commit hook of the connection.
pub fn open_existing(path: &Path) -> rusqlite::Result<Connection> {
    let mut conn = writable(open_with(path, OpenFlags::empty())?)?;
    let (path, opened) = (path.to_owned(), identity(path));
    conn.commit_hook(Some(move || {
        let replaced = opened.is_none() || identity(&path) != opened;
        if replaced {
            tracing::error!(
                database = %path.display(),
                "the database file was removed or replaced while it was open; nothing is written until it is restored \
                 or the program is restarted"
            );
        }
        replaced
    }))?;
    Ok(conn)
}

/// Fails for a read-only file. SQLite opens such a file and would only fail at the first write.
fn writable(conn: Connection) -> rusqlite::Result<Connection> {
    if conn.is_readonly(MAIN_DB)? {
        let read_only = ffi::Error::new(ffi::SQLITE_READONLY);
        return Err(rusqlite::Error::SqliteFailure(read_only, Some("the file is read-only".into())));
    }
    Ok(conn)
}

/// Device and inode number of a file.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

fn open_with(path: &Path, more: OpenFlags) -> rusqlite::Result<Connection> {
    // Without the URI flag, a path that begins with `file:` is an ordinary path.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | more;
    let conn = Connection::open_with_flags(path, flags)?;
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.pragma_update(None, "journal_mode", "WAL")?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "foreign_keys", "ON")?;
    conn.pragma_update(None, "temp_store", "MEMORY")?;
    conn.pragma_update(None, "cache_size", -CACHE_KIB)?;
    conn.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
    conn.set_prepared_statement_cache_capacity(STATEMENT_CACHE);
    Ok(conn)
}

/// Reason why a database could not be migrated.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The database was written by a newer version of the program, or by another program.
    #[error(
        "the database has schema version {found}, but this program knows only versions up to {known}: \
         start a newer version of the program"
    )]
    Newer {
        /// The version in the database.
        found: i64,
        /// Number of migrations in this program.
        known: i64,
    },
    /// The file is a SQLite database with tables of another program.
    #[error("the file is a database of another program: choose another path")]
    Foreign,
    /// A migration failed. The migrations before it are committed.
    #[error("migration {number} failed: {source}")]
    Failed {
        /// Number of the migration, from 1.
        number: i64,
        /// The error of the database.
        source: rusqlite::Error,
    },
    /// The version could not be read.
    #[error("cannot read the schema version: {0}")]
    Unreadable(#[source] rusqlite::Error),
}

/// Runs the missing migrations. Each runs in its own transaction, which also sets `PRAGMA user_version` to its
/// number. A migration must not contain BEGIN or COMMIT.
pub fn migrate(conn: &Connection, migrations: &[&str]) -> Result<(), MigrateError> {
    while migrate_once(conn, migrations)? == Progress::Stepped {}
    Ok(())
}

#[derive(PartialEq, Eq)]
enum Progress {
    Stepped,
    Done,
}

fn migrate_once(conn: &Connection, migrations: &[&str]) -> Result<Progress, MigrateError> {
    // Reads the version under the write lock, so that two processes do not run the same migration.
    let tx =
        Transaction::new_unchecked(conn, TransactionBehavior::Immediate).map_err(MigrateError::Unreadable)?;
    let found: i64 =
        tx.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(MigrateError::Unreadable)?;
    if usize::try_from(found) == Ok(migrations.len()) {
        return Ok(Progress::Done);
    }
    let Some(sql) = usize::try_from(found).ok().and_then(|next| migrations.get(next)) else {
        return Err(MigrateError::Newer { found, known: migrations.len() as i64 });
    };
    let count = "SELECT count(*) FROM sqlite_schema";
    if found == 0
        && tx.query_row(count, [], |row| row.get::<_, i64>(0)).map_err(MigrateError::Unreadable)? > 0
    {
        return Err(MigrateError::Foreign);
    }
    let number = found + 1;
    apply(tx, sql, number).map_err(|source| MigrateError::Failed { number, source })?;
    Ok(Progress::Stepped)
}

fn apply(tx: Transaction<'_>, sql: &str, number: i64) -> rusqlite::Result<()> {
    tx.execute_batch(sql)?;
    tx.pragma_update(None, "user_version", number)?;
    tx.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "CREATE TABLE a (x INTEGER PRIMARY KEY);";
    const SECOND: &str = "CREATE TABLE b (y INTEGER REFERENCES a (x)); INSERT INTO a VALUES (7);";

    fn version(conn: &Connection) -> i64 {
        conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    }

    fn setting(conn: &Connection, name: &str) -> String {
        use rusqlite::types::Value;
        match conn.pragma_query_value(None, name, |row| row.get(0)).unwrap() {
            Value::Integer(number) => number.to_string(),
            Value::Text(text) => text,
            other => panic!("{name} is {other:?}"),
        }
    }

    #[test]
    fn a_database_is_opened_with_durable_settings() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let conn = open_sqlite(&path).unwrap();
        conn.execute_batch(FIRST).unwrap();
        for file in database_files(&path) {
            assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600, "{}", file.display());
        }
        let table =
            [("journal_mode", "wal"), ("synchronous", "2"), ("foreign_keys", "1"), ("temp_store", "2")];
        for (name, expected) in table {
            assert_eq!(setting(&conn, name), expected, "{name}");
        }
    }

    #[test]
    fn open_existing_does_not_create_a_missing_database() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let error = open_existing(&path).unwrap_err();
        assert_eq!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::CannotOpen), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn commits_to_a_moved_database_fail_until_it_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (path, elsewhere) = (dir.path().join("db"), dir.path().join("elsewhere"));
        open_sqlite(&path).unwrap().execute_batch(FIRST).unwrap();
        let conn = open_existing(&path).unwrap();
        let insert = |x: i64| conn.execute("INSERT INTO a VALUES (?1)", [x]);
        insert(1).unwrap();
        std::fs::rename(&path, &elsewhere).unwrap();
        assert!(insert(2).is_err());
        std::fs::copy(&elsewhere, &path).unwrap();
        assert!(insert(3).is_err());
        assert!(conn.is_autocommit());
        std::fs::rename(&elsewhere, &path).unwrap();
        insert(4).unwrap();
        let sum: i64 = conn.query_row("SELECT sum(x) FROM a", [], |row| row.get(0)).unwrap();
        assert_eq!(sum, 5);
    }

    #[test]
    fn migrations_run_once_and_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let conn = open_sqlite(&dir.path().join("db")).unwrap();
        migrate(&conn, &[FIRST]).unwrap();
        assert_eq!(version(&conn), 1);
        migrate(&conn, &[FIRST, SECOND]).unwrap();
        migrate(&conn, &[FIRST, SECOND]).unwrap();
        assert_eq!(version(&conn), 2);
        let rows: i64 = conn.query_row("SELECT count(*) FROM a", [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 1);
    }

    #[test]
    fn a_failed_migration_is_rolled_back_and_names_its_number() {
        let conn = Connection::open_in_memory().unwrap();
        let error = migrate(&conn, &[FIRST, "CREATE TABLE half (z); CREATE TABLE a (x);"]).unwrap_err();
        assert!(error.to_string().starts_with("migration 2 failed"), "{error}");
        assert_eq!(version(&conn), 1);
        assert!(conn.is_autocommit());
        assert!(conn.prepare("SELECT * FROM half").is_err());
    }

    #[test]
    fn a_database_of_another_program_is_refused_and_stays_as_it_is() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch("CREATE TABLE other (x)").unwrap();
        assert!(matches!(migrate(&conn, &[FIRST]), Err(MigrateError::Foreign)));
        let tables: i64 = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).unwrap();
        assert_eq!((tables, version(&conn)), (1, 0));
    }

    #[test]
    fn the_error_for_a_newer_database_names_both_versions() {
        let conn = Connection::open_in_memory().unwrap();
        conn.pragma_update(None, "user_version", 9).unwrap();
        let error = migrate(&conn, &[FIRST, SECOND]).unwrap_err();
        assert!(matches!(error, MigrateError::Newer { found: 9, known: 2 }));
        assert!(error.to_string().contains("version 9") && error.to_string().contains("up to 2"), "{error}");
    }
}
