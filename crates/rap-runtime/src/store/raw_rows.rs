//! Raw rows of a database, for the examination of damage. Their form does not depend on the database.

use super::{postgres, sqlite};
use crate::doctor::DoctorError;
use crate::settings::Database;

/// A value of a column.
#[derive(Debug)]
pub(crate) enum Cell {
    Null,
    Number(i64),
    Text(String),
    /// A value of a type that the column cannot have.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
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
    pub(crate) fn name(self) -> &'static str {
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
    pub(crate) fn one(self) -> &'static str {
        match self {
            Table::Held => "an input that it holds",
            Table::Backlog => "an event that waits for a child",
            _ => "a row",
        }
    }
}

/// A snapshot of a database.
pub(crate) enum RawRows {
    Sqlite(sqlite::RawRows),
    Postgres(postgres::RawRows),
}

impl RawRows {
    pub(crate) async fn open(database: &Database) -> Result<RawRows, DoctorError> {
        match database {
            Database::File(path) => Ok(RawRows::Sqlite(sqlite::RawRows::open(path)?)),
            Database::Postgres(settings) => {
                Ok(RawRows::Postgres(postgres::RawRows::open(&settings.url).await?))
            }
        }
    }

    /// Checks the SQLite file. Postgres checks its own files.
    pub(crate) fn check_file(&self) -> Vec<String> {
        match self {
            RawRows::Sqlite(rows) => rows.check_file(),
            RawRows::Postgres(_) => Vec::new(),
        }
    }

    /// Passes each row of a table to `take`.
    pub(crate) async fn each(
        &mut self,
        table: Table,
        take: &mut (dyn FnMut(&[Cell]) + Send),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        match self {
            RawRows::Sqlite(rows) => rows.each(table, take),
            RawRows::Postgres(rows) => rows.each(table, take).await,
        }
    }
}
