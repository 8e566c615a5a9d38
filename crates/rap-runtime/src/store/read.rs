//! Reading: short transactions on connections of their own, beside the writer.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rap_agent::{Cause, Entry, ForkPoint, ForkSearch, Head, Item, Seq};
use rap_io::sqlite::open_for_reading;
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::cache::Loaded;
use super::filter::ThreadFilter;
use super::rows::{self, id, key, unreadable};
use super::thread::{Thread, ThreadNo};
use super::{Error, Store};

/// How many reads run at a time.
const READERS: usize = 4;

pub(super) struct Readers {
    path: PathBuf,
    places: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Readers {
    pub(super) fn new(path: PathBuf) -> Self {
        Readers { path, places: Arc::new(Semaphore::new(READERS)), idle: Mutex::default() }
    }

    fn take(&self) -> rusqlite::Result<Connection> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(conn) => Ok(conn),
            None => open_for_reading(&self.path),
        }
    }

    /// Waits for the reads that run; no other begins.
    pub(super) async fn close(&self) {
        if let Ok(all) = self.places.acquire_many(READERS as u32).await {
            self.places.close();
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
            drop(all);
        }
    }

    fn give_back(&self, conn: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
    }
}

/// A thread for a listing.
pub(crate) struct ThreadRow {
    pub(crate) thread: Arc<Thread>,
    pub(crate) parent_id: Option<ThreadId>,
    pub(crate) root_id: ThreadId,
    pub(crate) forked_from: Option<ThreadId>,
    pub(crate) head: Head,
    pub(crate) updated_at: Timestamp,
}

/// How much of a history is read at a time. One entry is always read, however large it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Page {
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
}

impl Page {
    /// So many entries, however large they are.
    pub(crate) fn rows(rows: usize) -> Page {
        Page { rows, bytes: usize::MAX }
    }
}

/// The latest content of a view.
pub(crate) struct ViewRow {
    pub(crate) server: String,
    pub(crate) view_type: String,
    pub(crate) content: Value,
    pub(crate) at: Timestamp,
}

/// What a session holds of a server.
#[derive(Debug, Clone)]
pub(crate) struct SessionTool {
    pub(crate) server: String,
    pub(crate) hash: Option<String>,
    pub(crate) error: Option<String>,
    pub(crate) fetched_at: Timestamp,
}

impl Store {
    /// Runs a read in one short transaction.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let readers = Arc::clone(&self.readers);
        let place = Arc::clone(&readers.places).acquire_owned().await.map_err(|_| Error::Closed)?;
        let read = move || {
            // The read goes on if nobody waits for it any more, and keeps its place as long.
            let _place = place;
            let conn = readers.take()?;
            let done = conn.unchecked_transaction().and_then(|transaction| job(&transaction));
            if done.is_ok() {
                readers.give_back(conn);
            }
            done
        };
        match tokio::task::spawn_blocking(read).await {
            Ok(done) => done.map_err(Error::from),
            Err(_panicked) => Err(Error::SetAside),
        }
    }

    pub(crate) async fn is_readable(&self) -> Result<(), Error> {
        // A statement without a table would not look into the file.
        self.read(|conn| conn.prepare_cached("SELECT no FROM threads LIMIT 1")?.exists([])).await?;
        Ok(())
    }

    pub(crate) async fn thread(&self, id: ThreadId) -> Result<ThreadRow, Error> {
        self.read(move |conn| {
            let sql = format!("{THREAD_ROWS} WHERE t.id = ?1");
            conn.prepare_cached(&sql)?.query_row([id.as_str()], thread_row).optional()
        })
        .await?
        .ok_or(Error::NoThread)
    }

    pub(crate) async fn head(&self, thread: ThreadNo) -> Result<Head, Error> {
        let found = self.read(move |conn| rows::load(conn, thread)).await?;
        Ok(found.ok_or(Error::NoThread)?.head)
    }

    pub(crate) async fn threads(&self, filter: ThreadFilter) -> Result<Vec<ThreadRow>, Error> {
        self.read(move |conn| {
            let sql = format!("{THREAD_ROWS} {}", filter.condition());
            let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
            let row = params![filter.after, parent, filter.limit as i64];
            conn.prepare_cached(&sql)?.query_map(row, thread_row)?.collect()
        })
        .await
    }

    /// What a thread sees, after one entry and up to another. Synthetic calls show the arguments of their original.
    pub(crate) async fn history_for_people(
        &self,
        thread: Arc<Thread>,
        after: Seq,
        up_to: Seq,
        page: Page,
    ) -> Result<Vec<(Seq, Entry)>, Error> {
        self.read(move |conn| {
            let mut entries = history(conn, &thread, after, up_to, page)?;
            let line: Vec<ThreadNo> = pieces(conn, &thread, up_to)?.into_iter().map(|(no, ..)| no).collect();
            for (_, entry) in &mut entries {
                if let Item::Assistant { calls, .. } = &mut entry.item {
                    calls.iter_mut().try_for_each(|call| complete(conn, &line, &mut call.arguments))?;
                }
            }
            Ok(entries)
        })
        .await
    }

    /// What people see of a thread's open calls, where their tools have said how to show them.
    pub(crate) async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error> {
        let seqs: BTreeSet<Seq> = row.head.open_calls().map(|call| call.seq).collect();
        if seqs.is_empty() {
            return Ok(HashMap::new());
        }
        let thread = Arc::clone(&row.thread);
        self.read(move |conn| {
            let mut displays = HashMap::new();
            for seq in seqs {
                for (_, entry) in history(conn, &thread, seq - 1, seq, Page::rows(1))? {
                    let Item::Assistant { calls, .. } = entry.item else { continue };
                    displays.extend(calls.into_iter().filter_map(|call| Some((call.id, call.display?))));
                }
            }
            Ok(displays)
        })
        .await
    }

    /// What set a thread going, or one that it descends from: whoever works for an event has no more rights than that.
    pub(crate) async fn cause(&self, thread: Arc<Thread>) -> Result<Cause, Error> {
        if thread.parent.is_none() {
            return Ok(Cause::Client);
        }
        self.read(move |conn| {
            let mut next = Some(thread.no);
            while let Some(no) = next {
                let Some(Loaded { thread, head, .. }) = rows::load(conn, no)? else { break };
                if let Some(cause) = head.origin.cause() {
                    return Ok(cause);
                }
                next = thread.parent;
            }
            Ok(Cause::Client)
        })
        .await
    }

    /// The entries from the last one that a user said.
    pub(crate) async fn since_last_user(
        &self,
        thread: Arc<Thread>,
        up_to: Seq,
    ) -> Result<Vec<(Seq, Entry)>, Error> {
        self.read(move |conn| {
            let from = last_user(conn, &thread, up_to)?;
            history(conn, &thread, from.saturating_sub(1), up_to, Page::rows(usize::MAX))
        })
        .await
    }

    /// What a call is now, if the thread ever made it.
    pub(crate) async fn knows_call(&self, thread: ThreadId, call: CallId) -> Result<bool, Error> {
        self.read(move |conn| match rows::number_of(conn, &thread)? {
            None => Ok(false),
            Some(no) => Ok(rows::past_call(conn, no, &call)?.is_some()),
        })
        .await
    }

    pub(crate) async fn views(&self, thread: ThreadNo) -> Result<Vec<ViewRow>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT server, view_type, content, at FROM views WHERE thread = ?1 ORDER BY at DESC",
            )?;
            let view = |row: &Row<'_>| {
                Ok(ViewRow {
                    server: row.get(0)?,
                    view_type: row.get(1)?,
                    content: serde_json::from_str(row.get_ref(2)?.as_str()?).map_err(unreadable)?,
                    at: Timestamp(row.get(3)?),
                })
            };
            statement.query_map([thread], view)?.collect()
        })
        .await
    }

    /// What a session holds of each server it has asked.
    pub(crate) async fn session_tools(&self, root: ThreadNo) -> Result<Vec<SessionTool>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT server, hash, error, fetched_at FROM session_tools WHERE root = ?1",
            )?;
            let tool = |row: &Row<'_>| {
                Ok(SessionTool {
                    server: row.get(0)?,
                    hash: row.get(1)?,
                    error: row.get(2)?,
                    fetched_at: Timestamp(row.get(3)?),
                })
            };
            statement.query_map([root], tool)?.collect()
        })
        .await
    }

    pub(crate) async fn toolset(&self, hash: String) -> Result<Option<Vec<u8>>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached("SELECT body FROM toolsets WHERE hash = ?1")?;
            statement.query_row([hash], |row| row.get(0)).optional()
        })
        .await
    }
}

const THREAD_ROWS: &str = "SELECT t.no, t.id, t.parent, t.root, t.born_at, t.ancestors, t.incarnation, t.agent, \
                           t.user_id, t.title, t.created_at, t.version, t.head, t.source, p.id, r.id, t.updated_at, s.id \
                           FROM threads t LEFT JOIN threads p ON p.no = t.parent JOIN threads r ON r.no = t.root \
                           LEFT JOIN threads s ON s.no = t.source AND t.parent IS NULL";

fn thread_row(row: &Row<'_>) -> rusqlite::Result<ThreadRow> {
    let Loaded { thread, head, .. } = rows::loaded(row)?;
    let (parent, source): (Option<String>, Option<String>) = (row.get(14)?, row.get(17)?);
    Ok(ThreadRow {
        thread,
        parent_id: parent.map(ThreadId::new).transpose().map_err(unreadable)?,
        root_id: id(row, 15)?,
        forked_from: source.map(ThreadId::new).transpose().map_err(unreadable)?,
        head,
        updated_at: Timestamp(row.get(16)?),
    })
}

/// What stands in a row and can not be understood stops its own thread, not the others.
pub(super) fn legible<T>(thread: ThreadNo, read: rusqlite::Result<T>) -> rusqlite::Result<Option<T>> {
    match read {
        Err(error) if rows::is_illegible(&error) => {
            tracing::error!(thread, %error, "a thread is left alone: what is stored of it can not be read");
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// The pieces of a history: each thread of the line of descent, and which of its entries are seen.
pub(super) fn pieces(
    conn: &Connection,
    thread: &Thread,
    up_to: Seq,
) -> rusqlite::Result<Vec<(ThreadNo, Seq, Seq)>> {
    let mut pieces = vec![(thread.no, thread.born_at, up_to)];
    let (mut source, mut end) = (thread.source, thread.born_at.min(up_to));
    while let Some(no) = source {
        let Some(Loaded { thread, .. }) = rows::load(conn, no)? else { break };
        pieces.push((no, thread.born_at, end));
        source = thread.source;
        end = end.min(thread.born_at);
    }
    pieces.reverse();
    Ok(pieces)
}

pub(super) fn history(
    conn: &Connection,
    thread: &Thread,
    after: Seq,
    up_to: Seq,
    page: Page,
) -> rusqlite::Result<Vec<(Seq, Entry)>> {
    let mut entries = Vec::new();
    let mut bytes = 0;
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key LIMIT ?3",
    )?;
    for (no, from, to) in pieces(conn, thread, up_to)? {
        let from = from.max(after);
        if from >= to {
            continue;
        }
        let left = i64::try_from(page.rows - entries.len()).unwrap_or(i64::MAX);
        let mut found = statement.query(params![key(no, from), key(no, to), left])?;
        while let Some(row) = found.next()? {
            let body = row.get_ref(1)?.as_str()?;
            bytes += body.len();
            let entry: Entry = serde_json::from_str(body).map_err(unreadable)?;
            entries.push((row.get::<_, i64>(0)?.unsigned_abs(), entry));
            if bytes >= page.bytes {
                return Ok(entries);
            }
        }
        if entries.len() >= page.rows {
            break;
        }
    }
    Ok(entries)
}

/// Gives a synthetic call the arguments of its original, which a thread of the line made.
pub(super) fn complete(
    conn: &Connection,
    line: &[ThreadNo],
    arguments: &mut rap_agent::Arguments,
) -> rusqlite::Result<()> {
    if let rap_agent::Arguments::Echo { of, arguments: arguments @ None, .. } = arguments {
        for no in line.iter().rev() {
            if let Some(past) = rows::past_call(conn, *no, of)? {
                *arguments = Some(rows::arguments_of(conn, *no, past.seq, of)?);
                break;
            }
        }
    }
    Ok(())
}

/// The nearest point at or before an entry from which a thread can be forked.
pub(super) fn fork_point(conn: &Connection, thread: &Thread, at: Seq) -> rusqlite::Result<ForkPoint> {
    let mut search = ForkSearch::new(at);
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (no, from, to) in pieces(conn, thread, at)?.into_iter().rev() {
        let mut found = statement.query(params![key(no, from), key(no, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let Some(point) = search.look(row.get::<_, i64>(0)?.unsigned_abs(), &entry.item) {
                return Ok(point);
            }
        }
    }
    Ok(search.end())
}

/// The last entry that a user said; looked for from the end.
fn last_user(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Seq> {
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (no, from, to) in pieces(conn, thread, up_to)?.into_iter().rev() {
        let mut found = statement.query(params![key(no, from), key(no, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let rap_agent::Item::User { from: rap_agent::Speaker::User, .. } = entry.item {
                return Ok(row.get::<_, i64>(0)?.unsigned_abs());
            }
        }
    }
    Ok(0)
}
