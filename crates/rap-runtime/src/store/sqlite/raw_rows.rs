//! Raw rows for the examination of damage.

use std::path::Path;

use rap_io::sqlite::open_for_reading;
use rusqlite::Connection;
use rusqlite::types::ValueRef;

use super::KNOWN;
use crate::doctor::DoctorError;
use crate::store::raw_rows::{Cell, Table};

/// Maximum number of problems that the check of the file itself reports.
const FILE_PROBLEMS: usize = 100;

fn query(table: Table) -> &'static str {
    match table {
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

/// A snapshot of a database.
pub(crate) struct RawRows {
    conn: Connection,
    /// True if the database has the table of damaged threads.
    has_damaged: bool,
}

impl RawRows {
    pub(crate) fn open(path: &Path) -> Result<RawRows, DoctorError> {
        if !path.exists() {
            return Err(DoctorError::NoFile(path.into()));
        }
        let failed = |source: rusqlite::Error| DoctorError::File { path: path.into(), source: source.into() };
        let conn = open_for_reading(path).map_err(failed)?;
        let found: i64 = conn.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(failed)?;
        if found > KNOWN {
            return Err(DoctorError::Newer { found, known: KNOWN });
        }
        if found == 0 {
            return Err(DoctorError::Empty(path.into()));
        }
        // All tables are read in one snapshot.
        conn.execute_batch("BEGIN").map_err(failed)?;
        let table = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'damaged')";
        let has_damaged = conn.query_row(table, [], |row| row.get(0)).map_err(failed)?;
        Ok(RawRows { conn, has_damaged })
    }

    pub(crate) fn check_file(&self) -> Vec<String> {
        let check = || -> rusqlite::Result<Vec<String>> {
            let mut statement = self.conn.prepare(&format!("PRAGMA integrity_check({FILE_PROBLEMS})"))?;
            statement.query_map([], |row| row.get(0))?.collect()
        };
        match check() {
            Ok(lines) => lines.into_iter().filter(|line| line != "ok").collect(),
            Err(error) => vec![error.to_string()],
        }
    }

    pub(crate) fn each(
        &self,
        table: Table,
        take: &mut (dyn FnMut(&[Cell]) + Send),
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        if table == Table::Damaged && !self.has_damaged {
            return Ok(());
        }
        let mut statement = self.conn.prepare(query(table))?;
        let columns = statement.column_count();
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let cells: rusqlite::Result<Vec<Cell>> =
                (0..columns).map(|at| Ok(cell(row.get_ref(at)?))).collect();
            take(&cells?);
        }
        Ok(())
    }
}

fn cell(value: ValueRef<'_>) -> Cell {
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
