//! How an SQLite database is opened and brought to its schema.
//!
//! A commit that was reported is on the disk: WAL with `synchronous=FULL`. A migration that was published must
//! never be edited; its number is its place in the list, and it stands together with the version that counts it
//! or not at all.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, MAIN_DB, OpenFlags, Transaction, TransactionBehavior, ffi};

/// How long a statement waits for another process before it fails. Short, since the writer's other jobs wait
/// as well.
const BUSY_TIMEOUT: Duration = Duration::from_millis(250);
const STATEMENT_CACHE: usize = 64;
/// How much of the database is kept in memory.
const CACHE_KIB: i64 = 8 * 1024;
/// How long the log grows before it is carried over into the database. A page that changes a hundred times until
/// then is carried over once.
const CHECKPOINT_PAGES: i64 = 8_000;

/// Opens or creates the database file with the settings that all our databases have.
pub fn open_sqlite(path: &Path) -> rusqlite::Result<Connection> {
    writable(open_with(path, OpenFlags::SQLITE_OPEN_CREATE)?)
}

/// Opens a file that has to be there, for reading alone; it may be read-only.
pub fn open_for_reading(path: &Path) -> rusqlite::Result<Connection> {
    let conn = open_with(path, OpenFlags::empty())?;
    conn.pragma_update(None, "query_only", true)?;
    Ok(conn)
}

/// The same for a file that has to be there, and stay there: a commit to a file that was removed or replaced while it
/// was open would be lost with the process, so it fails. Uses the connection's commit hook.
pub fn open_existing(path: &Path) -> rusqlite::Result<Connection> {
    let mut conn = writable(open_with(path, OpenFlags::empty())?)?;
    let (path, opened) = (path.to_owned(), identity(path));
    conn.commit_hook(Some(move || {
        let lost = opened.is_none() || identity(&path) != opened;
        if lost {
            tracing::error!(
                database = %path.display(),
                "the database was removed or replaced while it was open; nothing is written until it is put back, or \
                 the program is started again"
            );
        }
        lost
    }))?;
    Ok(conn)
}

/// A file that we may not write is opened all the same, and would be noticed only when something has to be written.
fn writable(conn: Connection) -> rusqlite::Result<Connection> {
    if conn.is_readonly(MAIN_DB)? {
        let read_only = ffi::Error::new(ffi::SQLITE_READONLY);
        return Err(rusqlite::Error::SqliteFailure(read_only, Some("the file is read-only".into())));
    }
    Ok(conn)
}

/// Which file it is, whatever its name.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

fn open_with(path: &Path, more: OpenFlags) -> rusqlite::Result<Connection> {
    // Without the URI flag, a path that begins with `file:` is a path.
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

/// Why a database is not at its schema.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// A newer program, or another one, wrote it.
    #[error(
        "the database has schema version {found}, but this program knows only versions up to {known}: \
         start a newer version of the program"
    )]
    Newer {
        /// The version in the database.
        found: i64,
        /// The number of migrations that this program has.
        known: i64,
    },
    /// One migration failed. Those before it stand.
    #[error("migration {number} failed: {source}")]
    Failed {
        /// Counted from 1.
        number: i64,
        /// What the database said.
        source: rusqlite::Error,
    },
    /// The version could not be read.
    #[error("can not read the schema version: {0}")]
    Unreadable(#[source] rusqlite::Error),
}

/// Runs the migrations that the database has not seen, each in a transaction of its own together with its
/// number in `PRAGMA user_version`. A migration must not contain BEGIN or COMMIT.
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
    // The version is read under the write lock, so that two processes do not run the same migration.
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
        let conn = open_sqlite(&dir.path().join("db")).unwrap();
        let table =
            [("journal_mode", "wal"), ("synchronous", "2"), ("foreign_keys", "1"), ("temp_store", "2")];
        for (name, expected) in table {
            assert_eq!(setting(&conn, name), expected, "{name}");
        }
    }

    #[test]
    fn a_database_that_is_not_there_is_not_made_where_it_has_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let error = open_existing(&path).unwrap_err();
        assert_eq!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::CannotOpen), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_database_that_was_moved_takes_no_commit_until_it_is_back() {
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
    fn a_failed_migration_leaves_nothing_and_names_its_number() {
        let conn = Connection::open_in_memory().unwrap();
        let error = migrate(&conn, &[FIRST, "CREATE TABLE half (z); CREATE TABLE a (x);"]).unwrap_err();
        assert!(error.to_string().starts_with("migration 2 failed"), "{error}");
        assert_eq!(version(&conn), 1);
        assert!(conn.is_autocommit());
        assert!(conn.prepare("SELECT * FROM half").is_err());
    }

    #[test]
    fn a_newer_database_is_refused_with_both_numbers() {
        let conn = Connection::open_in_memory().unwrap();
        conn.pragma_update(None, "user_version", 9).unwrap();
        let error = migrate(&conn, &[FIRST, SECOND]).unwrap_err();
        assert!(matches!(error, MigrateError::Newer { found: 9, known: 2 }));
        assert!(error.to_string().contains("version 9") && error.to_string().contains("up to 2"), "{error}");
    }
}
