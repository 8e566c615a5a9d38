//! Reads sessions of a database file beside the runtime that uses it.

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use rap_io::sqlite::open_for_reading;
use rap_protocol::ThreadId;
use rusqlite::Connection;
use tokio::sync::mpsc;

use super::super::MIGRATIONS;
use super::{bad_record, export, roots};
use crate::store::transfer::{Export, Origin};
use crate::store::{Error, ThreadKey};
use crate::world::{Clock, SystemClock};

/// Reads sessions of a database that a runtime may be using.
pub(crate) struct SqliteReader {
    path: PathBuf,
}

impl SqliteReader {
    pub(crate) fn new(path: &Path) -> SqliteReader {
        SqliteReader { path: path.to_owned() }
    }

    async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let path = self.path.clone();
        let read = move || {
            let conn = open_for_reading(&path)?;
            let version: i64 = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
            if version != MIGRATIONS.len() as i64 {
                let why = format!(
                    "the database has schema version {version}, and this release needs {}: start it once with rap serve",
                    MIGRATIONS.len()
                );
                return Err(bad_record(why));
            }
            let transaction = conn.unchecked_transaction()?;
            job(&transaction)
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(done) => done.map_err(Error::from),
            Err(panicked) => Err(Error::Unreadable(panicked.into())),
        }
    }
}

#[async_trait]
impl Export for SqliteReader {
    async fn export(
        &self,
        session: &ThreadId,
        origin: &Origin,
        records: mpsc::Sender<String>,
    ) -> Result<(), Error> {
        let (session, origin, now) = (session.clone(), origin.clone(), SystemClock.now());
        let found = self.read(move |conn| export(conn, &session, &origin, now, &records)).await?;
        if found { Ok(()) } else { Err(Error::NoThread) }
    }

    async fn roots(&self, after: Option<ThreadKey>) -> Result<Vec<(ThreadKey, ThreadId)>, Error> {
        self.read(move |conn| roots(conn, after)).await
    }
}
