//! Copies of a database.

use std::path::Path;

use rap_io::sqlite::open_for_reading;
use rusqlite::Connection;

/// Copies one snapshot of a database into an empty file, and checks the copy. Returns what is wrong with it.
pub(crate) fn copy_snapshot(
    database: &Path,
    to: &Path,
) -> Result<Option<String>, Box<dyn std::error::Error + Send + Sync>> {
    let source = open_for_reading(database)?;
    let path = to.to_str().ok_or("the path is not valid UTF-8")?;
    // It writes nothing but the new file.
    source.pragma_update(None, "query_only", false)?;
    source.execute("VACUUM INTO ?1", [path])?;
    let copied = Connection::open(to)?;
    let check: String = copied.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    Ok(Some(check).filter(|check| check != "ok"))
}
