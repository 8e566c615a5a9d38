//! Backups of a SQLite database, also while a runtime uses it.
//!
//! A backup is one snapshot of the database in a single file, and a copy of its key file beside it. It is a database
//! itself: a runtime can use it at once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::settings::Database;
use crate::store::sqlite::{copy_snapshot, sibling_path};

/// Reason why there is no backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The database is not a SQLite file.
    #[error(
        "rap backup copies SQLite databases; back up a Postgres database with pg_dump, and keep store.key with it"
    )]
    Postgres,
    /// The database file does not exist.
    #[error("there is no database at {}", .0.display())]
    NoDatabase(PathBuf),
    /// The key file of the database does not exist.
    #[error("the key file {} of the database is missing; restore it first, no backup is complete without it", .0.display())]
    NoKey(PathBuf),
    /// There is a file at the destination.
    #[error("{} exists; name another file", .0.display())]
    Exists(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The database cannot be copied.
    #[error("the database cannot be copied: {0}")]
    Copy(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The copy is not valid.
    #[error("the copy of the database is damaged: {0}")]
    Damaged(String),
}

/// A backup that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backup {
    /// Size of the copy, in bytes.
    pub bytes: u64,
    /// Path of the copy of the key file.
    pub key: PathBuf,
}

/// Copies a database and its key. Blocks until the copy is on disk. The files appear under their names only when they are
/// complete; nothing is replaced.
pub fn backup(database: &Database, to: &Path) -> Result<Backup, BackupError> {
    let Database::File(database) = database else { return Err(BackupError::Postgres) };
    let (key, key_copy) = (sibling_path(database, "key"), sibling_path(to, "key"));
    if !database.exists() {
        return Err(BackupError::NoDatabase(database.clone()));
    }
    if !key.exists() {
        return Err(BackupError::NoKey(key));
    }
    if let Some(path) = [to, &key_copy].into_iter().find(|path| path.exists()) {
        return Err(BackupError::Exists(path.to_owned()));
    }
    let draft = sibling_path(to, "partial");
    let written = write(database, &key, &draft, to, &key_copy);
    if written.is_err() && draft.exists() {
        fs::remove_file(&draft).map_err(failed(&draft))?;
    }
    Ok(Backup { bytes: written?, key: key_copy })
}

fn write(database: &Path, key: &Path, draft: &Path, to: &Path, key_copy: &Path) -> Result<u64, BackupError> {
    // The copy contains whole conversations, so nobody else may read it. SQLite accepts an empty file.
    new_file(draft)?;
    let problem = copy_snapshot(database, draft).map_err(BackupError::Copy)?;
    if let Some(problem) = problem {
        return Err(BackupError::Damaged(problem));
    }
    let file = File::open(draft).map_err(failed(draft))?;
    file.sync_all().map_err(failed(draft))?;
    let bytes = file.metadata().map_err(failed(draft))?.len();
    let secret = fs::read(key).map_err(failed(key))?;
    let mut copied = new_file(key_copy)?;
    copied.write_all(&secret).and_then(|()| copied.sync_all()).map_err(failed(key_copy))?;
    fs::rename(draft, to).map_err(failed(to))?;
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed(directory))?;
    Ok(bytes)
}

/// Creates a file that only its owner can read.
fn new_file(path: &Path) -> Result<File, BackupError> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed(path))
}

fn failed(path: &Path) -> impl Fn(io::Error) -> BackupError + '_ {
    move |source| BackupError::Io { path: path.to_owned(), source }
}
