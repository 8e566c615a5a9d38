//! Moves sessions: reads them as records, writes records as rows, and keeps parcels.

mod reader;
mod statements;

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use rap_agent::{Entry, Head, Item};
use rap_protocol::{ThreadId, Timestamp, UserId};
use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::mpsc;

pub(crate) use self::reader::SqliteReader;
use self::statements::{SESSION, STATEMENTS, sql};
use super::heads::{self, unreadable};
use super::writes::entry_key;
use super::{SqliteStore, deletion, history};
use crate::store::stored::PAGE_BYTES;
use crate::store::transfer::{
    Cell, Checker, DEPARTURE_USED, ENTRY, Export, Header, Origin, PAGE_ROWS, Parcel, ParcelState,
    ROOT_RECORD, Record, Row, Scope, TABLES, ThreadRecord, TokenThread, VERSION,
};
use crate::store::{Error, HistoryPage, Loaded, SessionKey, StepSettings, Thread, ThreadKey, Transfer};

/// Number of root threads that are listed at once.
const ROOTS: i64 = 1_000;
/// Number of parcels that are listed at once. More than a few sessions are never on their way.
const PARCELS: i64 = 1_000;

impl ToSql for Cell {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Cell::Number(number) => number.to_sql(),
            Cell::Text(text) => text.to_sql(),
            Cell::Bytes(bytes) => bytes.to_sql(),
        }
    }
}

fn cell(value: ValueRef<'_>) -> rusqlite::Result<Cell> {
    Ok(match value {
        ValueRef::Integer(number) => Cell::Number(Some(number)),
        ValueRef::Blob(bytes) => Cell::Bytes(bytes.to_vec()),
        value => Cell::Text(Some(value.as_str()?.to_owned())),
    })
}

/// Takes a record. An error ends the reading.
type Take<'a> = &'a mut dyn FnMut(&Record) -> rusqlite::Result<()>;

/// Reads the records of a session. Returns false if there is no such root thread.
fn read(
    conn: &Connection,
    session: &ThreadId,
    origin: &Origin,
    now: Timestamp,
    send: Take<'_>,
) -> rusqlite::Result<bool> {
    let mut records = 0;
    let mut take = |record: Record| {
        records += 1;
        send(&record)
    };
    let root = heads::key_of(conn, session)?.map(|key| heads::load(conn, key)).transpose()?.flatten();
    let Some(Loaded { thread: root, .. }) = root.filter(|root| root.thread.parent.is_none()) else {
        return Ok(false);
    };
    let header =
        Header { version: VERSION, session: session.clone(), origin: origin.clone(), exported_at: now };
    take(Record::Session(header))?;
    read_threads(conn, &root, &mut take)?;
    inherited(conn, &root, &mut |seq, body| {
        let cells = vec![Cell::Number(Some(seq)), Cell::Text(Some(body))];
        take(Record::Row(Row { table: ENTRY, thread: Some(session.clone()), cells }))
    })?;
    for (table, statements) in STATEMENTS.iter().enumerate() {
        let mut statement = conn.prepare(&sql(statements.read))?;
        let mut rows = statement.query([root.key])?;
        while let Some(row) = rows.next()? {
            let thread = match TABLES[table].scope {
                Scope::Thread => Some(heads::thread_id(row, 0)?),
                Scope::Session => None,
            };
            let mut cells = Vec::with_capacity(TABLES[table].columns.len());
            for (at, (_, kind)) in TABLES[table].columns.iter().enumerate() {
                cells.push(match row.get_ref(at + 1)? {
                    ValueRef::Null if kind.is_number() => Cell::Number(None),
                    ValueRef::Null => Cell::Text(None),
                    value => cell(value)?,
                });
            }
            take(Record::Row(Row { table, thread, cells }))?;
        }
    }
    send(&Record::End(records))?;
    Ok(true)
}

/// Reads the threads of a session, parents before their children.
fn read_threads(
    conn: &Connection,
    root: &Thread,
    take: &mut dyn FnMut(Record) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let select = format!(
        "SELECT {}, p.id, s.id, t.updated_at, t.ask_at, t.ask_attempts, t.ask FROM threads t \
         LEFT JOIN threads p ON p.no = t.parent LEFT JOIN threads s ON s.no = t.source \
         WHERE t.no IN {SESSION} ORDER BY t.no",
        heads::THREAD_COLUMNS
    );
    let mut statement = conn.prepare(&select)?;
    let mut rows = statement.query([root.key])?;
    while let Some(row) = rows.next()? {
        let Loaded { thread, version, .. } = heads::loaded(row)?;
        let id = |at: usize| {
            let id: Option<String> = row.get(at)?;
            id.map(ThreadId::new).transpose().map_err(unreadable)
        };
        let asks = row.get::<_, Option<i64>>(20)?.is_some();
        let record = ThreadRecord {
            id: thread.id.clone(),
            key: thread.key.number(),
            token_key: thread.token_key.number(),
            parent: id(15)?,
            source: id(16)?,
            inherits: if thread.parent.is_some() { thread.inherits } else { 0 },
            ancestors: thread.ancestors.clone(),
            incarnation: thread.incarnation,
            agent: thread.agent.clone(),
            user_id: thread.user_id.clone(),
            title: thread.title.clone(),
            created_at: thread.created_at,
            updated_at: Timestamp(row.get(17)?),
            version,
            ask: if asks { Some((row.get(18)?, row.get(19)?)) } else { None },
            head: row.get(12)?,
        };
        take(Record::Thread(Box::new(record)))?;
    }
    Ok(())
}

/// Reads the entries that a fork inherits, with the arguments of the calls that they refer to.
fn inherited(
    conn: &Connection,
    fork: &Thread,
    take: &mut dyn FnMut(i64, String) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let mut after = 0;
    while after < fork.inherits {
        let page = HistoryPage { after, up_to: fork.inherits, rows: PAGE_ROWS, bytes: PAGE_BYTES };
        let entries = history::for_copy(conn, fork, page)?;
        let Some((last, _)) = entries.last() else { break };
        after = *last;
        for (seq, body) in entries {
            take(seq.cast_signed(), body)?;
        }
    }
    Ok(())
}

/// Gives the forks of a session's threads the history that they inherit.
fn separate_forks(conn: &Connection, session: SessionKey) -> rusqlite::Result<()> {
    let select = format!(
        "SELECT no FROM threads WHERE parent IS NULL AND source IS NOT NULL AND source IN {SESSION} AND root <> ?1"
    );
    let mut forks = conn.prepare(&select)?;
    let forks: Vec<ThreadKey> =
        forks.query_map([session], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    for fork in forks {
        let Some(Loaded { thread: fork, .. }) = heads::load(conn, fork)? else { continue };
        inherited(conn, &fork, &mut |seq, body| insert_entry(conn, fork.key, seq, &body))?;
        let sql = "UPDATE threads SET born_at = 0, source = NULL WHERE no = ?1";
        conn.execute(sql, [fork.key])?;
    }
    Ok(())
}

fn insert_entry(conn: &Connection, thread: ThreadKey, seq: i64, body: &str) -> rusqlite::Result<()> {
    let sql = "INSERT INTO entries (key, body) VALUES (?1, ?2)";
    conn.prepare_cached(sql)?.execute(params![entry_key(thread, seq.unsigned_abs()), body])?;
    insert_summary(conn, thread, seq, body)
}

/// Records the position of a summary.
fn insert_summary(conn: &Connection, thread: ThreadKey, seq: i64, body: &str) -> rusqlite::Result<()> {
    // A damaged entry of a fork that stays behind is copied as it is.
    let Ok(entry) = serde_json::from_str::<Entry>(body) else { return Ok(()) };
    if let Item::Summary { covers, .. } = entry.item {
        let sql = "INSERT INTO summaries (thread, seq, covers) VALUES (?1, ?2, ?3)";
        conn.prepare_cached(sql)?.execute(params![thread, seq, covers.cast_signed()])?;
    }
    Ok(())
}

/// Deletes all rows of a session.
fn delete(conn: &Connection, session: SessionKey) -> rusqlite::Result<()> {
    for statements in STATEMENTS.iter().filter(|statements| !statements.delete.is_empty()) {
        conn.execute(&sql(statements.delete), [session])?;
    }
    for table in ["summaries", "damaged"] {
        conn.execute(&format!("DELETE FROM {table} WHERE thread IN {SESSION}"), [session])?;
    }
    conn.execute(&format!("DELETE FROM threads WHERE no IN {SESSION}"), [session])?;
    Ok(())
}

fn begin(
    conn: &Connection,
    session: &ThreadId,
    state: ParcelState,
    peer: &[u8],
    now: Timestamp,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO parcels (session, state, peer, at) VALUES (?1, ?2, ?3, ?4)";
    conn.execute(sql, params![session.as_str(), state.as_str(), peer, now.0])?;
    Ok(())
}

fn add(
    conn: &Connection,
    session: &ThreadId,
    number: u64,
    record: &Record,
    text: &str,
) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO parcel_records (session, no, record) VALUES (?1, ?2, ?3)";
    conn.prepare_cached(sql)?.execute(params![session.as_str(), number.cast_signed(), text])?;
    if let Record::Thread(thread) = record {
        let sql = "INSERT OR IGNORE INTO parcel_threads (id, session) VALUES (?1, ?2)";
        conn.prepare_cached(sql)?.execute([thread.id.as_str(), session.as_str()])?;
    }
    Ok(())
}

fn drop_parcel(conn: &Connection, session: &ThreadId) -> rusqlite::Result<()> {
    for table in ["parcels", "parcel_records", "parcel_threads"] {
        conn.execute(&format!("DELETE FROM {table} WHERE session = ?1"), [session.as_str()])?;
    }
    Ok(())
}

fn state(conn: &Connection, session: &ThreadId) -> rusqlite::Result<Option<ParcelState>> {
    let sql = "SELECT state FROM parcels WHERE session = ?1";
    let state: Option<String> = conn.query_row(sql, [session.as_str()], |row| row.get(0)).optional()?;
    Ok(state.as_deref().and_then(ParcelState::parse))
}

/// Returns the error for a record that cannot be used.
fn bad_record(why: String) -> rusqlite::Error {
    unreadable(std::io::Error::other(why))
}

fn parse(text: &str) -> rusqlite::Result<Record> {
    Record::read(text).map_err(bad_record)
}

/// Writes the rows of a session from records.
struct Unpacking<'a> {
    conn: &'a Connection,
    rules: &'a StepSettings,
    /// True if threads get the keys that their records have.
    keep_keys: bool,
    session: SessionKey,
    threads: HashMap<ThreadId, (ThreadKey, Option<UserId>)>,
}

impl Unpacking<'_> {
    fn write(&mut self, record: &Record) -> rusqlite::Result<()> {
        match record {
            Record::Thread(thread) => self.thread(thread),
            Record::Row(row) => self.row(row),
            _ => Ok(()),
        }
    }

    fn thread(&mut self, record: &ThreadRecord) -> rusqlite::Result<()> {
        let conn = self.conn;
        let key = if self.keep_keys { ThreadKey::new(record.key) } else { heads::next_key(conn)? };
        if record.parent.is_none() {
            self.session = SessionKey(key);
        }
        let here = |id: &Option<ThreadId>| id.as_ref().and_then(|id| Some(self.threads.get(id)?.0));
        let source = match (&record.parent, &record.source) {
            (None, Some(source)) => heads::key_of(conn, source)?,
            (_, source) => here(source),
        };
        let thread = record.thread(key, self.session, here(&record.parent), source);
        let head: Head = serde_json::from_str(&record.head).map_err(unreadable)?;
        heads::insert(conn, &thread, &head, self.rules, record.updated_at)?;
        let (at, attempts) = record.ask.unzip();
        let sql = "UPDATE threads SET version = ?2, head = ?3, ask_at = coalesce(?4, ask_at), \
                   ask_attempts = coalesce(?5, 0) WHERE no = ?1";
        conn.prepare_cached(sql)?.execute(params![key, record.version, record.head, at, attempts])?;
        // It may have been moved away from here before.
        let sql = "DELETE FROM departures WHERE token_key = ?1 AND incarnation = ?2";
        conn.prepare_cached(sql)?.execute(params![record.token_key, record.incarnation.cast_signed()])?;
        self.threads.insert(record.id.clone(), (key, record.user_id.clone()));
        Ok(())
    }

    fn row(&self, row: &Row) -> rusqlite::Result<()> {
        let (thread, user) = match &row.thread {
            None => (None, None),
            Some(id) => match self.threads.get(id) {
                Some((key, user)) => (Some(*key), user.as_ref().map(UserId::as_str)),
                None => return Err(bad_record(format!("thread {id} is not in the session"))),
            },
        };
        let owner: [&dyn ToSql; 3] = [&thread, &self.session, &user];
        let cells = row.cells.iter().map(|cell| cell as &dyn ToSql);
        let mut statement = self.conn.prepare_cached(STATEMENTS[row.table].write)?;
        for (at, value) in owner.into_iter().chain(cells).enumerate().take(statement.parameter_count()) {
            statement.raw_bind_parameter(at + 1, value)?;
        }
        statement.raw_execute()?;
        if let (ENTRY, Some(thread), [Cell::Number(Some(seq)), Cell::Text(Some(body))]) =
            (row.table, thread, row.cells.as_slice())
        {
            insert_summary(self.conn, thread, *seq, body)?;
        }
        Ok(())
    }
}

/// Outcome of a write that stored rows can forbid.
type Outcome<T> = rusqlite::Result<Result<T, Error>>;

fn unpack(conn: &Connection, rules: &StepSettings, session: &ThreadId) -> Outcome<()> {
    let Some(state) = state(conn, session)? else { return Ok(Err(Error::NoThread)) };
    if state == ParcelState::Left {
        return Ok(Err(Error::Moving));
    }
    let sql = "SELECT 1 FROM parcel_threads p JOIN threads t ON t.id = p.id WHERE p.session = ?1";
    if conn.prepare(sql)?.exists([session.as_str()])? {
        return Ok(Err(Error::Exists));
    }
    let mut unpacking = Unpacking {
        conn,
        rules,
        keep_keys: state == ParcelState::Leaving,
        session: SessionKey::NONE,
        threads: HashMap::new(),
    };
    let mut checker = Checker::default();
    let mut statement = conn.prepare("SELECT record FROM parcel_records WHERE session = ?1 ORDER BY no")?;
    let mut rows = statement.query([session.as_str()])?;
    while let Some(row) = rows.next()? {
        let record = parse(row.get_ref(0)?.as_str()?)?;
        checker.take(&record).map_err(bad_record)?;
        unpacking.write(&record)?;
    }
    if !checker.is_complete() {
        return Err(bad_record("the session is not complete".into()));
    }
    drop_parcel(conn, session)?;
    Ok(Ok(()))
}

fn pack(conn: &Connection, session: &ThreadId, origin: &Origin, peer: &[u8], now: Timestamp) -> Outcome<()> {
    if state(conn, session)?.is_some() {
        return Ok(Err(Error::Moving));
    }
    begin(conn, session, ParcelState::Leaving, peer, now)?;
    let (mut number, mut checker) = (0, Checker::default());
    let packed = read(conn, session, origin, now, &mut |record| {
        let text = record.write();
        // A damaged session could not be unpacked.
        checker.take(&parse(&text)?).map_err(bad_record)?;
        add(conn, session, number, record, &text)?;
        number += 1;
        Ok(())
    })?;
    let key = heads::key_of(conn, session)?;
    let marked = key.map(|key| deletion::is_marked(conn, SessionKey(key))).transpose()?.unwrap_or(false);
    let Some(key) = key.filter(|_| packed && !marked) else {
        drop_parcel(conn, session)?;
        return Ok(Err(Error::NoThread));
    };
    separate_forks(conn, SessionKey(key))?;
    delete(conn, SessionKey(key))?;
    Ok(Ok(()))
}

fn export(
    conn: &Connection,
    session: &ThreadId,
    origin: &Origin,
    now: Timestamp,
    records: &mpsc::Sender<String>,
) -> rusqlite::Result<bool> {
    let key = heads::key_of(conn, session)?;
    if key.map(|key| deletion::is_marked(conn, SessionKey(key))).transpose()?.unwrap_or(false) {
        return Ok(false);
    }
    read(conn, session, origin, now, &mut |record| {
        let gone = |_| unreadable(std::io::Error::other("the reader of the records is gone"));
        records.blocking_send(record.write()).map_err(gone)
    })
}

fn roots(conn: &Connection, after: Option<ThreadKey>) -> rusqlite::Result<Vec<(ThreadKey, ThreadId)>> {
    let sql = format!(
        "SELECT no, id FROM threads t WHERE no > ?1 AND parent IS NULL AND {} ORDER BY no LIMIT ?2",
        deletion::NOT_DELETED
    );
    let after = after.map_or(0, ThreadKey::number);
    conn.prepare_cached(&sql)?
        .query_map([after, ROOTS], |row| Ok((row.get(0)?, heads::thread_id(row, 1)?)))?
        .collect()
}

#[async_trait]
impl Export for SqliteStore {
    async fn export(
        &self,
        session: &ThreadId,
        origin: &Origin,
        records: mpsc::Sender<String>,
    ) -> Result<(), Error> {
        let (session, origin, now) = (session.clone(), origin.clone(), self.inner.clock.now());
        let found = self.read(move |conn| export(conn, &session, &origin, now, &records)).await?;
        if found { Ok(()) } else { Err(Error::NoThread) }
    }

    async fn roots(&self, after: Option<ThreadKey>) -> Result<Vec<(ThreadKey, ThreadId)>, Error> {
        self.read(move |conn| roots(conn, after)).await
    }
}

#[async_trait]
impl Transfer for SqliteStore {
    async fn pack(&self, session: &ThreadId, origin: &Origin, peer: Vec<u8>) -> Result<(), Error> {
        let (session, origin, now) = (session.clone(), origin.clone(), self.inner.clock.now());
        let inner = Arc::clone(&self.inner);
        self.write(move |conn| {
            inner.applier().forget_heads();
            pack(conn, &session, &origin, &peer, now)
        })
        .await?
    }

    async fn begin_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        let (session, now) = (session.clone(), self.inner.clock.now());
        self.write(move |conn| {
            if heads::key_of(conn, &session)?.is_some()
                || state(conn, &session)?.is_some_and(|state| state != ParcelState::Arriving)
            {
                return Ok(Err(Error::Exists));
            }
            drop_parcel(conn, &session)?;
            begin(conn, &session, ParcelState::Arriving, &[], now)?;
            Ok(Ok(()))
        })
        .await?
    }

    async fn add_records(&self, session: &ThreadId, first: u64, records: Vec<String>) -> Result<(), Error> {
        let session = session.clone();
        self.write(move |conn| {
            if state(conn, &session)? != Some(ParcelState::Arriving) {
                return Ok(Err(Error::NoThread));
            }
            for (number, text) in (first..).zip(&records) {
                add(conn, &session, number, &parse(text)?, text)?;
            }
            Ok(Ok(()))
        })
        .await?
    }

    async fn unpack(&self, session: &ThreadId) -> Result<(), Error> {
        let (session, inner) = (session.clone(), Arc::clone(&self.inner));
        self.write(move |conn| {
            inner.applier().forget_heads();
            unpack(conn, &inner.rules, &session)
        })
        .await?
    }

    async fn records(&self, session: &ThreadId, from: u64) -> Result<Vec<String>, Error> {
        let session = session.clone();
        self.read(move |conn| {
            let sql =
                "SELECT record FROM parcel_records WHERE session = ?1 AND no >= ?2 ORDER BY no LIMIT ?3";
            let row = params![session.as_str(), from.cast_signed(), PAGE_ROWS as i64];
            conn.prepare_cached(sql)?.query_map(row, |row| row.get(0))?.collect()
        })
        .await
    }

    async fn parcels(&self) -> Result<Vec<Parcel>, Error> {
        self.read(move |conn| {
            let sql = "SELECT session, state, peer, at FROM parcels LIMIT ?1";
            let parcel = |row: &rusqlite::Row<'_>| {
                let state = ParcelState::parse(row.get_ref(1)?.as_str()?);
                Ok(Parcel {
                    session: heads::thread_id(row, 0)?,
                    state: state.ok_or_else(|| bad_record("the state of a parcel is not known".into()))?,
                    peer: row.get(2)?,
                    at: Timestamp(row.get(3)?),
                })
            };
            conn.prepare_cached(sql)?.query_map([PARCELS], parcel)?.collect()
        })
        .await
    }

    async fn mark_left(&self, session: &ThreadId, peer: &[u8]) -> Result<(), Error> {
        let (session, peer) = (session.clone(), peer.to_vec());
        let sql =
            "UPDATE parcels SET state = 'left' WHERE session = ?1 AND peer = ?2 AND state <> 'arriving'";
        match self.write(move |conn| conn.execute(sql, params![session.as_str(), peer])).await? {
            0 => Err(Error::NoThread),
            _ => Ok(()),
        }
    }

    async fn reclaim(&self, session: &ThreadId) -> Result<(), Error> {
        let session = session.clone();
        let sql = "UPDATE parcels SET state = 'leaving' WHERE session = ?1 AND state = 'left'";
        self.write(move |conn| conn.execute(sql, [session.as_str()])).await.map(drop)
    }

    async fn drop_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        let session = session.clone();
        self.write(move |conn| drop_parcel(conn, &session)).await
    }

    async fn depart(
        &self,
        session: &ThreadId,
        threads: Vec<TokenThread>,
        destination: &str,
    ) -> Result<(), Error> {
        let (session, destination) = (session.clone(), destination.to_owned());
        let now = self.inner.clock.now();
        self.write(move |conn| {
            let sql = "INSERT OR REPLACE INTO departures (token_key, incarnation, destination, at) \
                       VALUES (?1, ?2, ?3, ?4)";
            let mut insert = conn.prepare_cached(sql)?;
            for TokenThread { key, incarnation } in &threads {
                insert.execute(params![key, incarnation.cast_signed(), destination, now.0])?;
            }
            drop_parcel(conn, &session)
        })
        .await
    }

    async fn moved_to(&self, thread: TokenThread) -> Result<Option<String>, Error> {
        let now = self.inner.clock.now();
        let found = self.read(move |conn| {
            let sql = "SELECT destination, at FROM departures WHERE token_key = ?1 AND incarnation = ?2";
            let row = params![thread.key, thread.incarnation.cast_signed()];
            let found = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, Timestamp(row.get(1)?)));
            conn.prepare_cached(sql)?.query_row(row, found).optional()
        });
        let Some((destination, at)) = found.await? else { return Ok(None) };
        if at.plus(DEPARTURE_USED) < now {
            let sql = "UPDATE departures SET at = ?3 WHERE token_key = ?1 AND incarnation = ?2";
            let incarnation = thread.incarnation.cast_signed();
            self.write(move |conn| conn.execute(sql, params![thread.key, incarnation, now.0])).await?;
        }
        Ok(Some(destination))
    }

    async fn parcel_of(&self, thread: &ThreadId) -> Result<Option<ParcelState>, Error> {
        let thread = thread.clone();
        self.read(move |conn| {
            let sql =
                "SELECT state FROM parcel_threads t JOIN parcels p ON p.session = t.session WHERE t.id = ?1";
            let state: Option<String> =
                conn.prepare_cached(sql)?.query_row([thread.as_str()], |row| row.get(0)).optional()?;
            Ok(state.as_deref().and_then(ParcelState::parse))
        })
        .await
    }

    async fn parcel_root(&self, thread: &ThreadId) -> Result<Option<String>, Error> {
        let thread = thread.clone();
        self.read(move |conn| {
            let sql = "SELECT record FROM parcel_threads t JOIN parcel_records r ON r.session = t.session
                       WHERE t.id = ?1 AND r.no = ?2";
            let row = params![thread.as_str(), ROOT_RECORD];
            conn.prepare_cached(sql)?.query_row(row, |row| row.get(0)).optional()
        })
        .await
    }

    async fn moved_thread(&self, token_key: ThreadKey, incarnation: u64) -> Result<Option<ThreadKey>, Error> {
        self.read(move |conn| {
            let sql = "SELECT no FROM threads WHERE token_key = ?1 AND incarnation = ?2";
            conn.prepare_cached(sql)?
                .query_row(params![token_key, incarnation.cast_signed()], |row| row.get(0))
                .optional()
        })
        .await
    }
}
