//! Reads the raw rows of a database, whichever it is.

use std::path::{Path, PathBuf};
use std::pin::pin;

use futures_util::TryStreamExt;
use rap_io::sqlite::open_for_reading;
use rusqlite::Connection;
use rusqlite::types::ValueRef;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::settings::Database;
use crate::store::postgres::Address;
use crate::store::{PostgresError, postgres, sqlite};

/// Maximum number of problems that the check of the file itself reports.
const FILE_PROBLEMS: usize = 100;

/// Reason why a database cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// There is no such file.
    #[error("there is no database {}", .0.display())]
    NoFile(PathBuf),
    /// The file cannot be opened, or is not a database of the runtime.
    #[error("cannot read the database {}: {source}", path.display())]
    File {
        /// Path of the database.
        path: PathBuf,
        /// The error of the database.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file has none of the tables.
    #[error("{} is not a database of rap: it has none of its tables", .0.display())]
    Empty(PathBuf),
    /// The Postgres database cannot be used.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// A newer release has written the database.
    #[error(
        "the database has schema version {found}, and this release knows only {known}: use the newer release"
    )]
    Newer {
        /// Version of the database.
        found: i64,
        /// Newest version that this release knows.
        known: i64,
    },
}

/// A value of a column.
#[derive(Debug)]
pub(super) enum Cell {
    Null,
    Number(i64),
    Text(String),
    /// A value of a type that the column cannot have.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    Damaged,
    Threads,
    Entries,
    Calls,
    Held,
    Backlog,
    Messages,
}

impl Table {
    /// Returns a plural for people.
    pub(super) fn name(self) -> &'static str {
        match self {
            Table::Damaged => "damaged threads",
            Table::Threads => "threads",
            Table::Entries => "entries",
            Table::Calls => "calls",
            Table::Held => "held inputs",
            Table::Backlog => "waiting events",
            Table::Messages => "messages between threads",
        }
    }

    /// Returns one of its rows for people.
    pub(super) fn one(self) -> &'static str {
        match self {
            Table::Held => "an input that it holds",
            Table::Backlog => "an event that waits for a child",
            _ => "a row",
        }
    }

    fn sqlite(self) -> &'static str {
        match self {
            Table::Damaged => "SELECT thread, version, why FROM damaged",
            Table::Threads => {
                "SELECT no, id, parent, source, root, born_at, ancestors, version, status, head FROM threads ORDER BY no"
            }
            Table::Entries => "SELECT key >> 32, key & 4294967295, body FROM entries ORDER BY key",
            Table::Calls => "SELECT thread, id, state FROM calls ORDER BY thread, id",
            Table::Held => "SELECT thread, body FROM held ORDER BY thread, queue, no",
            Table::Backlog => "SELECT thread, body FROM backlog ORDER BY thread, call, no",
            Table::Messages => "SELECT receiver, letter FROM letters ORDER BY no",
        }
    }

    fn postgres(self) -> &'static str {
        match self {
            Table::Damaged => "SELECT thread, version, why FROM damaged",
            Table::Threads => {
                "SELECT no, id, parent, source, session, inherits, ancestors, version, status, head FROM threads \
                 ORDER BY no"
            }
            Table::Entries => "SELECT thread, seq, body FROM entries ORDER BY thread, seq",
            Table::Calls => "SELECT thread, id, state FROM calls ORDER BY thread, id",
            Table::Held => "SELECT thread, body FROM held ORDER BY thread, queue, no",
            Table::Backlog => "SELECT thread, body FROM backlog ORDER BY thread, call, no",
            Table::Messages => "SELECT receiver, body FROM outbox ORDER BY no",
        }
    }
}

/// A snapshot of a database.
pub(super) enum Source {
    Sqlite {
        conn: Connection,
        /// True if the database has the table of damaged threads.
        has_damaged: bool,
    },
    Postgres {
        client: Client,
        has_damaged: bool,
    },
}

impl Source {
    pub(super) async fn open(database: &Database) -> Result<Source, DoctorError> {
        match database {
            Database::File(path) if !path.exists() => Err(DoctorError::NoFile(path.clone())),
            Database::File(path) => open_file(path),
            Database::Postgres(postgres) => {
                let address = Address::parse(&postgres.url).map_err(PostgresError::from)?;
                let connect = |error: tokio_postgres::Error| PostgresError::Connect(error.into());
                let client = address.connect().await.map_err(connect)?;
                let failed = |error: tokio_postgres::Error| PostgresError::Prepare(error.into());
                let begin =
                    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = 0";
                client.batch_execute(begin).await.map_err(failed)?;
                let row = client.query_typed("SELECT version FROM rap_store", &[]).await.map_err(failed)?;
                let found = row.first().map_or(0, |row| row.get::<_, i32>(0));
                let known = postgres::KNOWN;
                if found > known {
                    return Err(DoctorError::Newer { found: found.into(), known: known.into() });
                }
                let table = "SELECT to_regclass('damaged') IS NOT NULL";
                let row = client.query_typed(table, &[]).await.map_err(failed)?;
                let has_damaged = row.first().is_some_and(|row| row.get(0));
                Ok(Source::Postgres { client, has_damaged })
            }
        }
    }

    /// Checks the SQLite file. Postgres checks its own files.
    pub(super) fn check_file(&self) -> Vec<String> {
        let Source::Sqlite { conn, .. } = self else { return Vec::new() };
        let check = || -> rusqlite::Result<Vec<String>> {
            let mut statement = conn.prepare(&format!("PRAGMA integrity_check({FILE_PROBLEMS})"))?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        match check() {
            Ok(lines) => lines.into_iter().filter(|line| line != "ok").collect(),
            Err(error) => vec![error.to_string()],
        }
    }

    /// Passes each row of a table to `take`.
    pub(super) async fn each(
        &mut self,
        table: Table,
        take: &mut (dyn FnMut(&[Cell]) + Send),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        match self {
            Source::Sqlite { has_damaged: false, .. } | Source::Postgres { has_damaged: false, .. }
                if table == Table::Damaged => {}
            Source::Sqlite { conn, .. } => {
                let mut statement = conn.prepare(table.sqlite())?;
                let columns = statement.column_count();
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    let cells: rusqlite::Result<Vec<Cell>> =
                        (0..columns).map(|at| Ok(sqlite_cell(row.get_ref(at)?))).collect();
                    take(&cells?);
                }
            }
            Source::Postgres { client, .. } => {
                let no_parameters: [(String, Type); 0] = [];
                let rows = client.query_typed_raw(table.postgres(), no_parameters).await?;
                let mut rows = pin!(rows);
                while let Some(row) = rows.try_next().await? {
                    let cells: Vec<Cell> = (0..row.len()).map(|at| postgres_cell(&row, at)).collect();
                    take(&cells);
                }
            }
        }
        Ok(())
    }
}

fn open_file(path: &Path) -> Result<Source, DoctorError> {
    let failed = |source: rusqlite::Error| DoctorError::File { path: path.into(), source: source.into() };
    let conn = open_for_reading(path).map_err(failed)?;
    let found: i64 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed)?;
    if found > sqlite::KNOWN {
        return Err(DoctorError::Newer { found, known: sqlite::KNOWN });
    }
    if found == 0 {
        return Err(DoctorError::Empty(path.into()));
    }
    // All tables are read in one snapshot.
    conn.execute_batch("BEGIN").map_err(failed)?;
    let table = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'damaged')";
    let has_damaged = conn.query_row(table, [], |row| row.get(0)).map_err(failed)?;
    Ok(Source::Sqlite { conn, has_damaged })
}

fn sqlite_cell(value: ValueRef<'_>) -> Cell {
    match value {
        ValueRef::Null => Cell::Null,
        ValueRef::Integer(number) => Cell::Number(number),
        ValueRef::Text(text) => match std::str::from_utf8(text) {
            Ok(text) => Cell::Text(text.to_owned()),
            Err(_) => Cell::Other,
        },
        ValueRef::Real(_) | ValueRef::Blob(_) => Cell::Other,
    }
}

fn postgres_cell(row: &tokio_postgres::Row, at: usize) -> Cell {
    if *row.columns()[at].type_() == Type::INT8 {
        return match row.try_get::<_, Option<i64>>(at) {
            Ok(Some(number)) => Cell::Number(number),
            Ok(None) => Cell::Null,
            Err(_) => Cell::Other,
        };
    }
    match row.try_get::<_, Option<String>>(at) {
        Ok(Some(text)) => Cell::Text(text),
        Ok(None) => Cell::Null,
        Err(_) => Cell::Other,
    }
}
